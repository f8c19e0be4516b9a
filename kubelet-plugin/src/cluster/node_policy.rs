//! What the cluster's policies ask of this node, as the controller publishes it in the node's own
//! GpuNode (`status.published.gpus`). The plugin reads no SharingPolicy.

use std::collections::{BTreeMap, BTreeSet};

use tranche_api::gpu_node::{Published, PublishedCapped, PublishedGpu};
use tranche_api::sharing_policy::{Interval, LOW_PRIORITY_FLOOR, UNACCOUNTED};
use tranche_driver::cdi::Capability;
use tranche_driver::health::HealthTerms;
use tranche_driver::policy::LEAST_UNACCOUNTED;

/// What the policies ask of this node. Nothing is known before the controller has published anything and the plugin has
/// read it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodePolicy {
    gpus: BTreeMap<String, PublishedGpu>,
}

impl NodePolicy {
    #[must_use]
    pub fn of(published: &Published) -> Self {
        let gpus = published.gpus.iter();
        Self {
            gpus: gpus.map(|gpu| (gpu.uuid.clone(), gpu.clone())).collect(),
        }
    }

    /// Whether it is known what is asked for a GPU. The controller publishes it for every GPU of the inventory, just after
    /// the GPU's slices.
    #[must_use]
    pub fn is_known(&self, gpu_uuid: &str) -> bool {
        self.gpus.contains_key(gpu_uuid)
    }

    /// The driver's libraries that containers with capped shares of a GPU get beside compute and utility.
    #[must_use]
    pub fn capabilities(&self, gpu_uuid: &str) -> BTreeSet<Capability> {
        let gpu = self.gpus.get(gpu_uuid).into_iter();
        let names = gpu.flat_map(|gpu| &gpu.capped.extra_driver_capabilities);
        names
            .filter_map(|name| Capability::named(name))
            .filter(|capability| Capability::EXTRA.contains(capability))
            .collect()
    }

    /// What is asked for capped shares of a GPU; the defaults for one that is not listed.
    #[must_use]
    pub fn capped(&self, gpu_uuid: &str) -> PublishedCapped {
        let gpu = self.gpus.get(gpu_uuid);
        gpu.map(|gpu| gpu.capped.clone()).unwrap_or_default()
    }

    /// Bytes that a process may hold on a GPU beyond its share's account.
    #[must_use]
    pub fn unaccounted_memory(&self, gpu_uuid: &str) -> u64 {
        let asked = self.capped(gpu_uuid).unaccounted_memory;
        let asked = asked.and_then(|amount| amount.to_count().ok());
        // With less, honest programs would be reported.
        asked.unwrap_or(UNACCOUNTED).max(LEAST_UNACCOUNTED)
    }

    /// What a share of low priority of a GPU keeps, in percent of its cores.
    #[must_use]
    pub fn low_priority_floor(&self, gpu_uuid: &str) -> u32 {
        let floor = self.capped(gpu_uuid).low_priority_floor;
        floor.unwrap_or(LOW_PRIORITY_FLOOR)
    }

    /// What the policies say about faults of a GPU.
    #[must_use]
    pub fn health(&self, gpu_uuid: &str) -> HealthTerms {
        let gpu = self.gpus.get(gpu_uuid);
        gpu.map(|gpu| HealthTerms::of(&gpu.health))
            .unwrap_or_default()
    }

    /// The length of time slices that is asked for timeshared shares of a GPU.
    #[must_use]
    pub fn interval(&self, gpu_uuid: &str) -> Interval {
        let gpu = self.gpus.get(gpu_uuid);
        gpu.map(|gpu| gpu.timeshared.interval).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use tranche_api::sharing_policy::OnBypass;

    use super::*;

    fn published(published: Value) -> NodePolicy {
        NodePolicy::of(&serde_json::from_value(published).expect("what the schema lets pass"))
    }

    #[test]
    fn what_is_absent_or_unknown_means_the_default() {
        let policy = published(json!({
            "epoch": 1, "poolGeneration": 1,
            "gpus": [
                {"uuid": "kill", "policy": "p", "capped": {"onBypass": "Kill", "unaccountedMemory": "1Gi", "lowPriorityFloor": 0}},
                {"uuid": "report", "capped": {"onBypass": "Report", "unaccountedMemory": "1Mi"},
                    "timeshared": {"interval": "Long"}},
                {"uuid": "newer", "capped": {
                    "onBypass": "Migrate", "another": 1,
                    "extraDriverCapabilities": ["video", "holograms", "compute", "other"],
                }, "timeshared": {"interval": "Endless"}},
                {"uuid": "empty", "capped": {}},
                {"uuid": "bare"},
            ],
        }));
        assert!(policy.is_known("bare") && !policy.is_known("not listed"));
        assert_eq!(policy.capped("kill").on_bypass, OnBypass::Kill);
        assert_eq!(
            policy.capabilities("newer"),
            BTreeSet::from([Capability::Video])
        );
        assert_eq!(policy.capabilities("kill"), BTreeSet::new());
        assert_eq!(policy.interval("report"), Interval::Long);
        assert_eq!(policy.unaccounted_memory("kill"), 1 << 30);
        assert_eq!(policy.unaccounted_memory("report"), LEAST_UNACCOUNTED);
        for uuid in ["newer", "empty", "bare", "not listed"] {
            assert_eq!(policy.unaccounted_memory(uuid), UNACCOUNTED, "{uuid}");
        }
        assert_eq!(policy.low_priority_floor("kill"), 0);
        for uuid in ["report", "newer", "empty", "bare", "not listed"] {
            assert_eq!(
                policy.low_priority_floor(uuid),
                LOW_PRIORITY_FLOOR,
                "{uuid}"
            );
        }
        for uuid in ["kill", "newer", "bare", "not listed"] {
            assert_eq!(policy.interval(uuid), Interval::Default, "{uuid}");
        }
        for uuid in ["report", "newer", "empty", "bare", "not listed"] {
            assert_eq!(policy.capped(uuid).on_bypass, OnBypass::Report, "{uuid}");
        }
        assert_eq!(
            NodePolicy::default().capped("kill").on_bypass,
            OnBypass::Report
        );
    }
}
