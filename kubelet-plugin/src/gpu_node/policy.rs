//! What the cluster's policies ask of this node, as the controller publishes it in the node's own
//! GpuNode (`status.published.gpus`). The plugin reads no SharingPolicy.

use std::collections::BTreeMap;

use tranche_api::GpuNode;
use tranche_api::gpu_node::PublishedCapped;

/// What the policies ask of this node. Until the controller has published anything the defaults hold.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NodePolicy {
    capped: BTreeMap<String, PublishedCapped>,
}

impl NodePolicy {
    /// As published; `None` where nothing is.
    #[must_use]
    pub fn of(gpu_node: &GpuNode) -> Option<Self> {
        let published = gpu_node.status.as_ref()?.published.as_ref()?;
        let gpus = published.gpus.iter();
        Some(Self {
            capped: gpus
                .map(|gpu| (gpu.uuid.clone(), gpu.capped.clone()))
                .collect(),
        })
    }

    /// What is asked for capped shares of a GPU; the defaults for one that is not listed.
    #[must_use]
    pub fn capped(&self, gpu_uuid: &str) -> PublishedCapped {
        self.capped.get(gpu_uuid).cloned().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use tranche_api::sharing_policy::OnBypass;

    use super::*;

    fn published(published: &Value) -> Option<NodePolicy> {
        let gpu_node = json!({
            "apiVersion": "gpu.tranche.dev/v1alpha1", "kind": "GpuNode",
            "metadata": {"name": "n"}, "spec": {}, "status": {"published": published},
        });
        NodePolicy::of(&serde_json::from_value(gpu_node).expect("what the schema lets pass"))
    }

    #[test]
    fn what_is_absent_or_unknown_means_the_default() {
        let policy = published(&json!({
            "epoch": 1, "poolGeneration": 1,
            "gpus": [
                {"uuid": "kill", "policy": "p", "capped": {"onBypass": "Kill"}},
                {"uuid": "report", "capped": {"onBypass": "Report"}},
                {"uuid": "newer", "capped": {"onBypass": "Migrate", "another": 1}},
                {"uuid": "empty", "capped": {}},
                {"uuid": "bare"},
            ],
        }))
        .expect("published");
        assert_eq!(policy.capped("kill").on_bypass, OnBypass::Kill);
        for uuid in ["report", "newer", "empty", "bare", "not listed"] {
            assert_eq!(policy.capped(uuid).on_bypass, OnBypass::Report, "{uuid}");
        }
        assert_eq!(published(&Value::Null), None);
        assert_eq!(
            NodePolicy::default().capped("kill").on_bypass,
            OnBypass::Report
        );
    }
}
