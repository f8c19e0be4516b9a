//! A local copy of one kind of object, fed by a watch.
//!
//! A watch starts with a list. Until the list is complete the previous copy is used, so that a
//! re-list never looks like a deletion of everything.

use std::collections::BTreeMap;
use std::sync::Arc;

use kube::runtime::watcher::Event;

use crate::known::Stored;

/// A resourceVersion as a number: comparable within a kind since Kubernetes 1.35 (KEP-5504).
pub type Version = u128;

/// The version of an object; 0 if it has no version.
pub fn version<K: Stored>(object: &K) -> Version {
    object
        .resource_version()
        .and_then(|v| v.parse().ok())
        .unwrap_or(0)
}

/// One object before and after an event.
#[derive(Debug)]
pub struct Change<K> {
    /// The object before, if it was known.
    pub before: Option<Arc<K>>,
    /// The object now, unless it is gone.
    pub after: Option<Arc<K>>,
}

/// A local copy of one kind of object, by name.
#[derive(Debug)]
pub struct Mirror<K> {
    objects: BTreeMap<String, Arc<K>>,
    /// A list that is not complete yet.
    incoming: Option<List<K>>,
    synced: bool,
    /// The highest version that `objects` includes.
    seen: Version,
    lists_begun: u64,
    lists_done: u64,
}

#[derive(Debug)]
struct List<K> {
    objects: BTreeMap<String, Arc<K>>,
    seen: Version,
}

impl<K> Default for List<K> {
    fn default() -> Self {
        Self {
            objects: BTreeMap::new(),
            seen: 0,
        }
    }
}

impl<K> Default for Mirror<K> {
    fn default() -> Self {
        Self {
            objects: BTreeMap::new(),
            incoming: None,
            synced: false,
            seen: 0,
            lists_begun: 0,
            lists_done: 0,
        }
    }
}

impl<K: Stored> Mirror<K> {
    /// Applies one event of the watch and returns what changed.
    pub fn apply(&mut self, event: Event<K>) -> Vec<Change<K>> {
        match event {
            Event::Init => {
                self.lists_begun += 1;
                self.incoming = Some(List::default());
                Vec::new()
            }
            Event::InitApply(object) => {
                let list = self.incoming.get_or_insert_default();
                list.seen = list.seen.max(version(&object));
                list.objects
                    .insert(object.name().to_owned(), Arc::new(object));
                Vec::new()
            }
            Event::InitDone => {
                self.synced = true;
                self.lists_done = self.lists_begun;
                let list = self.incoming.take().unwrap_or_default();
                self.seen = self.seen.max(list.seen);
                let mut old = std::mem::replace(&mut self.objects, list.objects);
                let mut changes: Vec<_> = self
                    .objects
                    .iter()
                    .map(|(name, after)| Change {
                        before: old.remove(name),
                        after: Some(after.clone()),
                    })
                    .filter(|c| {
                        c.before.as_ref().map(|b| version(b.as_ref()))
                            != c.after.as_ref().map(|a| version(a.as_ref()))
                    })
                    .collect();
                changes.extend(old.into_values().map(|before| Change {
                    before: Some(before),
                    after: None,
                }));
                changes
            }
            Event::Apply(object) => {
                self.seen = self.seen.max(version(&object));
                self.update(object).into_iter().collect()
            }
            Event::Delete(object) => {
                self.seen = self.seen.max(version(&object));
                if self.has_newer(&object) {
                    return Vec::new();
                }
                let before = self.objects.remove(object.name());
                vec![Change {
                    before,
                    after: None,
                }]
            }
        }
    }

    /// Takes an object that was read by itself, or that it is gone, because the watch did not deliver it in time. Returns what
    /// changed; `None` also while a list is not complete, which may be older.
    pub fn read(&mut self, name: &str, found: Option<K>) -> Option<Change<K>> {
        if self.incoming.is_some() {
            return None;
        }
        match found {
            Some(object) => self.update(object),
            None => Some(Change {
                before: Some(self.objects.remove(name)?),
                after: None,
            }),
        }
    }

    /// Whether a list is not complete yet.
    #[must_use]
    pub fn is_listing(&self) -> bool {
        self.incoming.is_some()
    }

    /// An object that was read by itself is newer than what the watch delivers next.
    fn has_newer(&self, object: &K) -> bool {
        let known = self.objects.get(object.name());
        known.is_some_and(|known| version(known.as_ref()) > version(object))
    }

    fn update(&mut self, object: K) -> Option<Change<K>> {
        if self.has_newer(&object) {
            return None;
        }
        let after = Arc::new(object);
        let before = self.objects.insert(after.name().to_owned(), after.clone());
        Some(Change {
            before,
            after: Some(after),
        })
    }

    /// Whether the first list is complete.
    #[must_use]
    pub fn synced(&self) -> bool {
        self.synced
    }

    /// The object of that name.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&Arc<K>> {
        self.objects.get(name)
    }

    /// All objects, by name.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<K>> {
        self.objects.values()
    }

    /// A mark to hand to [`Self::caught_up`] after a write.
    #[must_use]
    pub fn lists_begun(&self) -> u64 {
        self.lists_begun
    }

    /// Whether the copy includes a write that was answered with `version`: the watch delivers in the
    /// order of versions, and a list that began after the write includes it too.
    #[must_use]
    pub fn caught_up(&self, version: Version, lists_begun: u64) -> bool {
        self.seen >= version || self.lists_done > lists_begun
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::api::core::v1::ConfigMap;
    use kube::api::ObjectMeta;

    use super::*;

    fn object(name: &str, version: u64) -> ConfigMap {
        ConfigMap {
            metadata: ObjectMeta {
                name: Some(name.into()),
                resource_version: Some(version.to_string()),
                ..ObjectMeta::default()
            },
            ..ConfigMap::default()
        }
    }

    fn names(mirror: &Mirror<ConfigMap>) -> Vec<String> {
        mirror.iter().map(|o| o.name().to_owned()).collect()
    }

    #[test]
    fn a_list_in_progress_hides_nothing() {
        let mut mirror = Mirror::default();
        mirror.apply(Event::Init);
        mirror.apply(Event::InitApply(object("a", 1)));
        assert!(!mirror.synced());
        mirror.apply(Event::InitDone);
        assert!(mirror.synced());

        mirror.apply(Event::Init);
        assert_eq!(names(&mirror), ["a"]);
        mirror.apply(Event::InitApply(object("b", 2)));
        let changes = mirror.apply(Event::InitDone);
        assert_eq!(names(&mirror), ["b"]);
        assert_eq!(changes.len(), 2, "b came and a went");
    }

    #[test]
    fn a_list_that_changes_nothing_reports_nothing() {
        let mut mirror = Mirror::default();
        for _ in 0..2 {
            mirror.apply(Event::Init);
            mirror.apply(Event::InitApply(object("a", 1)));
            let _ = mirror.apply(Event::InitDone);
        }
        mirror.apply(Event::Init);
        mirror.apply(Event::InitApply(object("a", 1)));
        assert!(mirror.apply(Event::InitDone).is_empty());
    }

    #[test]
    fn a_write_is_seen_by_its_version_or_by_a_later_list() {
        let mut mirror = Mirror::default();
        mirror.apply(Event::Init);
        mirror.apply(Event::InitDone);
        let mark = mirror.lists_begun();
        assert!(!mirror.caught_up(7, mark));
        // Written, then deleted by another client before the answer was processed: the deletion has a
        // higher version.
        mirror.apply(Event::Delete(object("a", 8)));
        assert!(mirror.caught_up(7, mark));

        assert!(!mirror.caught_up(9, mark));
        mirror.apply(Event::Init);
        assert!(!mirror.caught_up(9, mark));
        mirror.apply(Event::InitDone);
        assert!(mirror.caught_up(9, mark));
    }

    #[test]
    fn a_list_in_progress_does_not_include_what_it_has_listed() {
        let mut mirror = Mirror::default();
        mirror.apply(Event::Init);
        mirror.apply(Event::InitApply(object("a", 1)));
        mirror.apply(Event::InitDone);
        let mark = mirror.lists_begun();
        mirror.apply(Event::Init);
        mirror.apply(Event::InitApply(object("b", 10)));
        assert!(!mirror.caught_up(9, mark));
        mirror.apply(Event::InitDone);
        assert!(mirror.caught_up(9, mark));
    }

    #[test]
    fn what_was_read_by_itself_is_not_undone_by_older_events() {
        let mut mirror = Mirror::default();
        mirror.apply(Event::Init);
        mirror.apply(Event::InitApply(object("a", 1)));
        assert!(mirror.read("a", Some(object("a", 5))).is_none());
        mirror.apply(Event::InitDone);
        let held = |mirror: &Mirror<ConfigMap>| mirror.get("a").map(|it| version(it.as_ref()));
        assert!(mirror.read("a", Some(object("a", 5))).is_some());
        assert!(mirror.apply(Event::Apply(object("a", 3))).is_empty());
        assert!(mirror.apply(Event::Delete(object("a", 4))).is_empty());
        assert_eq!(held(&mirror), Some(5));
        // Other objects may still be older than that.
        assert!(!mirror.caught_up(5, mirror.lists_begun()));
        assert!(mirror.read("a", None).is_some() && mirror.read("a", None).is_none());
        mirror.apply(Event::Apply(object("a", 7)));
        assert_eq!(held(&mirror), Some(7));
    }

    #[test]
    fn a_list_begun_before_the_write_proves_nothing() {
        let mut mirror: Mirror<ConfigMap> = Mirror::default();
        mirror.apply(Event::Init);
        let mark = mirror.lists_begun();
        mirror.apply(Event::InitDone);
        assert!(!mirror.caught_up(9, mark));
    }
}
