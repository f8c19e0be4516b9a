//! Where the node plugins serve their nodes' usage: the addresses of their pods, by a watch.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, PoisonError};

use futures::StreamExt as _;
use k8s_openapi::api::core::v1::Pod;
use kube::runtime::watcher::Event;
use kube::runtime::{WatchStreamExt as _, watcher};
use kube::{Api, Client};
use tranche_api::names::PLUGIN_PODS;

/// The name of the port for metrics, in the pods.
const PORT: &str = "metrics";
/// Pods in one page of a list.
const PAGE: u32 = 100;

/// The relevant fields of a plugin's pod.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Plugin {
    node: String,
    /// Its address, or why it does not serve.
    endpoint: Result<SocketAddr, String>,
    is_ending: bool,
}

/// By the pod's name; `None` before the first complete list.
#[derive(Clone, Debug, Default)]
pub struct Plugins(Arc<Mutex<Option<BTreeMap<String, Plugin>>>>);

impl Plugins {
    /// Follows the pods in `namespace` until the runtime ends. It keeps only the node and the address of each pod.
    #[must_use]
    pub fn follow(client: Client, namespace: &str) -> Self {
        let plugins = Self::default();
        let this = plugins.clone();
        let pods: Api<Pod> = Api::namespaced(client, namespace);
        tokio::spawn(async move {
            let config = watcher::Config::default()
                .labels(PLUGIN_PODS)
                .page_size(PAGE);
            let mut events = watcher(pods, config).default_backoff().boxed();
            let mut listed = BTreeMap::new();
            while let Some(event) = events.next().await {
                match event {
                    Ok(event) => this.observe(event, &mut listed),
                    Err(error) => {
                        tracing::warn!(%error, "the watch of the node plugins' pods failed and is retried");
                    }
                }
            }
        });
        plugins
    }

    fn observe(&self, event: Event<Pod>, listed: &mut BTreeMap<String, Plugin>) {
        match event {
            Event::Init => listed.clear(),
            Event::InitApply(pod) => listed.extend(plugin(&pod)),
            Event::InitDone => *self.pods() = Some(std::mem::take(listed)),
            Event::Apply(pod) => self.pods().get_or_insert_default().extend(plugin(&pod)),
            Event::Delete(pod) => {
                let name = pod.metadata.name.unwrap_or_default();
                self.pods().get_or_insert_default().remove(&name);
            }
        }
    }

    /// The nodes with a plugin; `None` before the first complete list.
    #[must_use]
    pub fn nodes(&self) -> Option<BTreeSet<String>> {
        let pods = self.pods();
        Some(
            pods.as_ref()?
                .values()
                .map(|plugin| plugin.node.clone())
                .collect(),
        )
    }

    /// The address of a node's plugin, or why it does not serve.
    pub fn of(&self, node: &str) -> Result<SocketAddr, String> {
        let pods = self.pods();
        let Some(pods) = pods.as_ref() else {
            return Err("the node plugins are not listed yet".to_owned());
        };
        let of_node = pods.values().filter(|plugin| plugin.node == node);
        // Next to a pod that ends, its successor may run already.
        match of_node.min_by_key(|plugin| (plugin.endpoint.is_err(), plugin.is_ending)) {
            Some(plugin) => plugin.endpoint.clone(),
            None => Err(format!("no node plugin runs on the node {node}")),
        }
    }

    fn pods(&self) -> std::sync::MutexGuard<'_, Option<BTreeMap<String, Plugin>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Fixed addresses, for tests.
    #[doc(hidden)]
    #[must_use]
    pub fn fixed(endpoints: impl IntoIterator<Item = (String, SocketAddr)>) -> Self {
        let plugin = |(node, address): (String, SocketAddr)| {
            let name = format!("plugin-{node}");
            let endpoint = Ok(address);
            (
                name,
                Plugin {
                    node,
                    endpoint,
                    is_ending: false,
                },
            )
        };
        Self(Arc::new(Mutex::new(Some(
            endpoints.into_iter().map(plugin).collect(),
        ))))
    }
}

/// Name and content; `None` for a pod that is on no node yet.
fn plugin(pod: &Pod) -> Option<(String, Plugin)> {
    let name = pod.metadata.name.clone()?;
    let spec = pod.spec.as_ref()?;
    let node = spec.node_name.clone()?;
    let status = pod.status.as_ref();
    let address: Option<IpAddr> = status
        .and_then(|status| status.pod_ip.as_ref())
        .and_then(|address| address.parse().ok());
    let ports = spec
        .containers
        .iter()
        .flat_map(|it| it.ports.iter().flatten());
    let port = ports
        .filter(|port| port.name.as_deref() == Some(PORT))
        .find_map(|port| u16::try_from(port.container_port).ok());
    let phase = status.and_then(|status| status.phase.as_deref());
    // A pod that has ended keeps its address, which another pod may have now.
    let address = address.filter(|_| !matches!(phase, Some("Failed" | "Succeeded")));
    let endpoint = match (address, port) {
        (Some(address), Some(port)) => Ok(SocketAddr::new(address, port)),
        (None, _) => Err(format!(
            "the node plugin's pod {name} is {}",
            phase.unwrap_or("Pending")
        )),
        (_, None) => Err(format!("the node plugin's pod {name} has no port {PORT}")),
    };
    let is_ending = pod.metadata.deletion_timestamp.is_some();
    Some((
        name,
        Plugin {
            node,
            endpoint,
            is_ending,
        },
    ))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn pod(name: &str, status: &Value, ending: bool) -> Pod {
        serde_json::from_value(json!({
            "metadata": {"name": name, "deletionTimestamp": ending.then_some("2026-01-01T00:00:00Z")},
            "spec": {"nodeName": "a", "containers": [{"name": "node-plugin", "ports": [
                {"name": "http", "containerPort": 8085}, {"name": "metrics", "containerPort": 8443},
            ]}]},
            "status": status,
        }))
        .unwrap()
    }

    #[test]
    fn a_node_has_its_newest_plugin_or_the_reason_for_none() {
        let (plugins, mut listed) = (Plugins::default(), BTreeMap::new());
        assert_eq!(plugins.nodes(), None);
        plugins.observe(Event::Init, &mut listed);
        let (old, new) = (json!({"podIP": "10.0.0.1"}), json!({"podIP": "fd00::2"}));
        plugins.observe(Event::InitApply(pod("old", &old, false)), &mut listed);
        assert_eq!(plugins.nodes(), None, "the list is not complete");
        plugins.observe(Event::InitDone, &mut listed);
        let endpoint = || plugins.of("a");
        let address = |text: &str| Ok(text.parse().unwrap());
        assert_eq!(endpoint(), address("10.0.0.1:8443"));
        plugins.observe(Event::Apply(pod("old", &old, true)), &mut listed);
        plugins.observe(
            Event::Apply(pod("a-new", &json!({"phase": "Pending"}), false)),
            &mut listed,
        );
        assert_eq!(endpoint(), address("10.0.0.1:8443"), "it serves to its end");
        plugins.observe(Event::Apply(pod("a-new", &new, false)), &mut listed);
        assert_eq!(endpoint(), address("[fd00::2]:8443"));
        plugins.observe(Event::Delete(pod("old", &old, true)), &mut listed);
        let evicted = json!({"phase": "Failed", "podIP": "10.0.0.1"});
        plugins.observe(Event::Apply(pod("a-new", &evicted, false)), &mut listed);
        assert_eq!(
            endpoint().unwrap_err(),
            "the node plugin's pod a-new is Failed"
        );
        plugins.observe(
            Event::Apply(pod("a-new", &json!({"phase": "Pending"}), false)),
            &mut listed,
        );
        assert_eq!(plugins.nodes().unwrap(), ["a".to_owned()].into());
        assert_eq!(
            endpoint().unwrap_err(),
            "the node plugin's pod a-new is Pending"
        );
        plugins.observe(Event::Delete(pod("a-new", &new, false)), &mut listed);
        assert_eq!(endpoint().unwrap_err(), "no node plugin runs on the node a");
    }
}
