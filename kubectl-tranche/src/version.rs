//! `version`: this program's, the API server's, and those of Tranche in the cluster.

use std::collections::BTreeMap;

use serde::Serialize;

use crate::output::{Block, View};
use crate::snapshot::Snapshot;

/// The versions.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Version {
    /// This program's.
    pub(crate) client: &'static str,
    /// The API server's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) kubernetes: Option<String>,
    /// Those of the node plugins, and on how many nodes each is.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) node_plugins: BTreeMap<String, usize>,
}

impl Version {
    pub(crate) const fn of_client() -> Self {
        Self {
            client: env!("CARGO_PKG_VERSION"),
            kubernetes: None,
            node_plugins: BTreeMap::new(),
        }
    }

    pub(crate) fn add_plugins(&mut self, snapshot: &Snapshot) {
        let status = snapshot
            .gpu_nodes
            .iter()
            .filter_map(|it| it.status.as_ref());
        for registration in status.filter_map(|it| it.registration.as_ref()) {
            let version = registration.plugin_version.clone();
            *self.node_plugins.entry(version).or_default() += 1;
        }
    }
}

impl View for Version {
    fn blocks(&self, _: bool) -> Vec<Block> {
        let mut lines = vec![format!("kubectl-tranche {}", self.client)];
        lines.extend(self.kubernetes.iter().map(|it| format!("Kubernetes {it}")));
        lines.extend(self.node_plugins.iter().map(|(version, nodes)| {
            let nodes = if *nodes == 1 {
                "1 node".to_owned()
            } else {
                format!("{nodes} nodes")
            };
            format!("node plugin {version} on {nodes}")
        }));
        lines.into_iter().map(Block::plain).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::World;

    #[test]
    fn plugins_are_counted_by_version() {
        let mut world = World::new();
        let status = world.gpu_nodes[1].status.as_mut().unwrap();
        status.registration.as_mut().unwrap().plugin_version = "0.2.0".to_owned();
        let mut version = Version::of_client();
        version.add_plugins(&world.snapshot());
        let plugins = [("0.1.0".to_owned(), 1), ("0.2.0".to_owned(), 1)];
        assert_eq!(version.node_plugins, plugins.into());
    }
}
