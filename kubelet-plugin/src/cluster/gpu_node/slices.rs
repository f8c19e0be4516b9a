//! The names of the node's own ResourceSlices.

use std::collections::BTreeSet;

use futures::{Stream, StreamExt};
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::core::PartialObjectMeta;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Api, Client, ResourceExt};
use tracing::warn;
use tranche_api::names::DRIVER;

/// A watch event of a slice, with metadata only.
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

/// Names of the existing slices.
#[derive(Debug, Default)]
pub struct OwnSlices {
    there: BTreeSet<String>,
    listing: Option<BTreeSet<String>>,
    listed: bool,
}

impl OwnSlices {
    pub fn apply(&mut self, event: SliceEvent) {
        match event {
            Event::Init => self.listing = Some(BTreeSet::new()),
            Event::InitApply(slice) => {
                let listing = self.listing.get_or_insert_default();
                listing.insert(slice.name_any());
            }
            Event::InitDone => {
                self.there = self.listing.take().unwrap_or_default();
                self.listed = true;
            }
            Event::Apply(slice) => {
                self.there.insert(slice.name_any());
            }
            Event::Delete(slice) => {
                self.there.remove(&slice.name_any());
            }
        }
    }

    /// Whether one of these is missing. False before the first list.
    #[must_use]
    pub fn lack(&self, names: &[String]) -> bool {
        self.listed && names.iter().any(|name| !self.there.contains(name))
    }
}

#[cfg(test)]
mod tests {
    use kube::api::ObjectMeta;
    use kube::core::PartialObjectMetaExt;

    use super::*;

    fn slice(name: &str) -> PartialObjectMeta<ResourceSlice> {
        ObjectMeta {
            name: Some(name.to_owned()),
            ..ObjectMeta::default()
        }
        .into_response_partial()
    }

    #[test]
    fn a_slice_is_lacking_when_a_list_or_a_watch_says_so() {
        let (a, b) = (["a".to_owned()], ["b".to_owned()]);
        let mut slices = OwnSlices::default();
        slices.apply(Event::Init);
        slices.apply(Event::InitApply(slice("a")));
        assert!(!slices.lack(&b), "nothing is known before the first list");
        slices.apply(Event::InitDone);
        assert!(!slices.lack(&a));
        assert!(slices.lack(&b));
        slices.apply(Event::Apply(slice("b")));
        assert!(!slices.lack(&b));
        slices.apply(Event::Delete(slice("b")));
        assert!(slices.lack(&b));

        // Until a new list is complete, the previous one is used.
        slices.apply(Event::Init);
        assert!(!slices.lack(&a));
        slices.apply(Event::InitDone);
        assert!(slices.lack(&a), "deleted while the watch was down");
    }
}
