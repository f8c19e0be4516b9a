//! The names and epochs of the node's own ResourceSlices.

use std::collections::BTreeMap;

use futures::{Stream, StreamExt};
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::core::PartialObjectMeta;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client, ResourceExt};
use tracing::warn;
use tranche_api::names::{DRIVER, EPOCH_ANNOTATION};

/// A watch event of a slice, with names and annotations only.
pub type SliceEvent = Event<PartialObjectMeta<ResourceSlice>>;

/// Watches this node's slices of our driver; errors are logged and tried again.
pub fn watch(client: Client, node: &str) -> impl Stream<Item = SliceEvent> + use<> {
    let api = Api::<PartialObjectMeta<ResourceSlice>>::all(client);
    let fields = format!("spec.nodeName={node},spec.driver={DRIVER}");
    watcher(api, watcher::Config::default().fields(&fields))
        .default_backoff()
        .filter_map(async |event| {
            event
                .inspect_err(|error| warn!(%error, "cannot watch the node's slices; trying again"))
                .ok()
        })
}

/// Names and epochs of the existing slices.
#[derive(Debug, Default)]
pub struct OwnSlices {
    there: BTreeMap<String, Option<i64>>,
    listing: Option<BTreeMap<String, Option<i64>>>,
}

impl OwnSlices {
    /// Applies an event; whether it removed a slice of `epoch`.
    pub fn apply(&mut self, event: SliceEvent, epoch: i64) -> bool {
        match event {
            Event::Init => {
                self.listing = Some(BTreeMap::new());
                false
            }
            Event::InitApply(slice) => {
                let epoch = epoch_of(&slice);
                let listing = self.listing.get_or_insert_default();
                listing.insert(slice.name_any(), epoch);
                false
            }
            Event::InitDone => {
                let before =
                    std::mem::replace(&mut self.there, self.listing.take().unwrap_or_default());
                before
                    .iter()
                    .any(|(name, of)| *of == Some(epoch) && !self.there.contains_key(name))
            }
            Event::Apply(slice) => {
                self.there.insert(slice.name_any(), epoch_of(&slice));
                false
            }
            Event::Delete(slice) => {
                self.there.remove(&slice.name_any());
                epoch_of(&slice) == Some(epoch)
            }
        }
    }

    /// Whether one of these is missing.
    #[must_use]
    pub fn lack(&self, names: &[String]) -> bool {
        names.iter().any(|name| !self.there.contains_key(name))
    }
}

fn epoch_of(slice: &PartialObjectMeta<ResourceSlice>) -> Option<i64> {
    slice.annotations().get(EPOCH_ANNOTATION)?.parse().ok()
}

#[cfg(test)]
mod tests {
    use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
    use kube::core::PartialObjectMetaExt;

    use super::*;

    fn slice(name: &str, epoch: i64) -> PartialObjectMeta<ResourceSlice> {
        ObjectMeta {
            name: Some(name.to_owned()),
            annotations: Some(BTreeMap::from([(
                EPOCH_ANNOTATION.to_owned(),
                epoch.to_string(),
            )])),
            ..ObjectMeta::default()
        }
        .into_response_partial()
    }

    #[test]
    fn only_a_slice_of_the_current_epoch_is_missed() {
        let mut slices = OwnSlices::default();
        assert!(!slices.apply(Event::Init, 2));
        assert!(!slices.apply(Event::InitApply(slice("a", 2)), 2));
        assert!(!slices.apply(Event::InitApply(slice("b", 1)), 2));
        assert!(!slices.apply(Event::InitDone, 2));
        assert!(!slices.lack(&["a".into(), "b".into()]));
        assert!(!slices.apply(Event::Delete(slice("b", 1)), 2));
        assert!(slices.apply(Event::Delete(slice("a", 2)), 2));
        assert!(slices.lack(&["a".into()]));
    }

    #[test]
    fn a_slice_deleted_while_the_watch_was_down_is_missed_too() {
        let mut slices = OwnSlices::default();
        slices.apply(Event::Apply(slice("a", 2)), 2);
        slices.apply(Event::Init, 2);
        assert!(slices.apply(Event::InitDone, 2));
        assert!(slices.lack(&["a".into()]));
    }
}
