//! The difference between the slices of a node as they should be and as they are.
//!
//! Consumers use the slices of the highest generation only, and only when as many of them exist as each
//! says. So a change of one slice is one write, and any other change is a new generation that every
//! slice follows; what is left of the old one is then obsolete and is deleted last.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::ResourceExt;
use tranche_api::gpu_node::Published;
use tranche_driver::slices::{self, Digest, SlicePlan};

use crate::known::KnownSlice;

/// How long the rest of a pool stays after a part of it was removed. The kubelet takes less to delete a pool, and
/// a running plugin takes less to request the slices.
const LEFTOVERS: SignedDuration = SignedDuration::from_secs(5);

/// What is wrong where the API server stores only a part of `status.published`.
const RECORD_DROPPED: &str = "the API server does not store all of status.published, which the node needs: \
     apply the CustomResourceDefinition gpunodes.gpu.tranche.dev of this release";

/// One write to a ResourceSlice.
#[derive(Clone, Debug, PartialEq)]
pub enum Write {
    /// A slice that does not exist.
    Create(ResourceSlice),
    /// A slice that differs; carries the resourceVersion that it replaces.
    Replace(ResourceSlice),
    /// A slice that is not wanted, of exactly this UID and version.
    Delete {
        name: String,
        uid: String,
        /// `metadata.resourceVersion`.
        version: String,
    },
}

impl Write {
    /// Deletes the slice as it is known.
    #[must_use]
    pub fn delete(slice: &KnownSlice) -> Self {
        Self::Delete {
            name: slice.name.to_string(),
            uid: slice.uid.to_string(),
            version: slice.version.to_string(),
        }
    }
}

/// Knowledge about a node's slices and its record that is stored nowhere else. Losing it costs a few
/// writes.
#[derive(Clone, Debug, Default)]
pub struct Memory {
    /// What an API server made of slices that it did not store as asked, because it does not know their
    /// fields or has them switched off. Without it the difference would be written for ever.
    dropped: BTreeMap<String, Dropped>,
    /// The same for `status.published`: as it was asked for, and as it was stored.
    dropped_record: Option<(Published, Published)>,
    /// Since when a recorded slice is missing.
    waiting_since: Option<Timestamp>,
}

#[derive(Clone, Debug)]
struct Dropped {
    wanted: Digest,
    stored: Digest,
    problem: String,
}

impl Memory {
    /// Compares what was sent with what was stored, and remembers the difference. True if there is one.
    pub fn answered(&mut self, wanted: &ResourceSlice, stored: &ResourceSlice) -> bool {
        let name = wanted.name_any();
        if slices::same(&wanted.spec, &stored.spec) {
            self.dropped.remove(&name);
            return false;
        }
        let dropped = slices::dropped(&wanted.spec, &stored.spec);
        let problem = if dropped.is_empty() {
            format!("the API server stored ResourceSlice {name} other than it was written")
        } else {
            let fields: Vec<_> = dropped.iter().map(ToString::to_string).collect();
            fields.join("; ")
        };
        self.dropped.insert(
            name,
            Dropped {
                wanted: Digest::of(&wanted.spec),
                stored: Digest::of(&stored.spec),
                problem,
            },
        );
        true
    }

    /// Compares `status.published` as it was asked for with what was stored, and remembers the difference.
    /// True if there is one.
    pub fn recorded(&mut self, wanted: &Published, stored: &Published) -> bool {
        self.dropped_record = (wanted != stored).then(|| (wanted.clone(), stored.clone()));
        self.dropped_record.is_some()
    }

    /// Whether the stored `status.published` is what is wanted, as well as this API server can store it.
    #[must_use]
    pub fn is_recorded(&self, wanted: &Published, stored: &Published) -> bool {
        wanted == stored
            || self
                .dropped_record
                .as_ref()
                .is_some_and(|(asked, answer)| asked == wanted && answer == stored)
    }

    /// Notes that a recorded slice is missing; returns how long the other slices stay.
    pub fn waiting(&mut self, now: Timestamp) -> Duration {
        let since = *self.waiting_since.get_or_insert(now);
        Duration::try_from(since + LEFTOVERS - now).unwrap_or(Duration::ZERO)
    }

    /// Notes that no recorded slice is missing, or that all are.
    pub fn not_waiting(&mut self) {
        self.waiting_since = None;
    }

    /// What the API server dropped, each problem once; empty if it stored everything.
    #[must_use]
    pub fn problem(&self) -> String {
        let mut problems: Vec<_> = self.dropped.values().map(|d| d.problem.as_str()).collect();
        problems.sort_unstable();
        problems.dedup();
        if self.dropped_record.is_some() {
            problems.push(RECORD_DROPPED);
        }
        problems.join("; ")
    }

    /// Forgets slices that are no longer wanted.
    pub fn keep_only(&mut self, names: &[String]) {
        self.dropped.retain(|name, _| names.contains(name));
    }

    /// Whether what is stored is what is wanted, as well as this API server can store it.
    fn as_good_as(&self, name: &str, wanted: Digest, stored: Digest) -> bool {
        wanted == stored
            || self
                .dropped
                .get(name)
                .is_some_and(|d| d.wanted == wanted && d.stored == stored)
    }
}

/// The writes that make a pool what it should be.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Difference {
    /// The generation of the pool once `writes` are done.
    pub generation: i64,
    /// Creates and replacements.
    pub writes: Vec<Write>,
    /// What to delete after the writes.
    pub obsolete: Vec<Write>,
}

/// Compares the existing slices with the planned ones. `published` is the last publication, which gives the generation
/// where no slice is left.
#[must_use]
pub fn difference(
    plan: &SlicePlan,
    existing: &[Arc<KnownSlice>],
    published: &Published,
    memory: &Memory,
) -> Difference {
    let last_generation = published.pool_generation;
    let by_name: BTreeMap<&str, &KnownSlice> = existing.iter().map(|s| (&*s.name, &**s)).collect();
    let is_planned = |slice: &KnownSlice| {
        plan.slices
            .iter()
            .any(|it| it.name.as_str() == &*slice.name)
    };
    let of_pool = || existing.iter().filter(|s| *s.pool == *plan.pool);
    let current = of_pool().map(|s| s.generation).max();
    let count = i64::try_from(plan.slices.len()).unwrap_or(i64::MAX);

    let obsolete: Vec<_> = existing.iter().filter(|s| !is_planned(s)).collect();
    // An obsolete slice of an older generation was left by an earlier change: consumers do not use it, so its removal
    // does not change the pool.
    let removed = obsolete
        .iter()
        .any(|s| *s.pool == *plan.pool && Some(s.generation) == current);
    let (mut created, mut scattered, mut changed) = (false, false, 0);
    let mut same = Vec::with_capacity(plan.slices.len());
    for planned in &plan.slices {
        let Some(old) = by_name.get(&*planned.name) else {
            created = true;
            same.push(false);
            continue;
        };
        scattered |=
            Some(old.generation) != current || *old.pool != *plan.pool || old.count != count;
        let content = Digest::of(&plan.spec(planned, old.generation));
        let is_same = memory.as_good_as(&planned.name, content, old.content);
        changed += usize::from(!is_same);
        same.push(is_same);
    }
    let generation = match current {
        // No slice could carry a new generation.
        _ if plan.slices.is_empty() => last_generation,
        Some(current) if !removed && !created && !scattered && changed <= 1 => current,
        Some(current) => current.max(last_generation) + 1,
        None => last_generation + 1,
    };

    let owners = [plan.owner()];
    let object = |planned| plan.object(planned, generation);
    let writes = plan
        .slices
        .iter()
        .zip(same)
        .filter_map(|(planned, is_same)| {
            let Some(old) = by_name.get(&*planned.name) else {
                return Some(Write::Create(object(planned)));
            };
            let is_settled = is_same
                && old.generation == generation
                && old.count == count
                && *old.pool == *plan.pool
                && old.is_owned_by(&owners);
            if is_settled {
                return None;
            }
            let wanted = object(planned);
            Some(Write::Replace(ResourceSlice {
                metadata: old.replacement(wanted.metadata.owner_references),
                spec: wanted.spec,
            }))
        })
        .collect();

    Difference {
        generation,
        writes,
        obsolete: obsolete.into_iter().map(|s| Write::delete(s)).collect(),
    }
}
