//! The facts that `doctor` examines.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::DeviceTaintRule;
use k8s_openapi::jiff::Timestamp;

use crate::snapshot::Snapshot;
use crate::usage::UsageResult;

/// The facts for the checks.
#[derive(Clone, Debug)]
pub struct Facts {
    /// The API server's version, such as `v1.37.1`, or why it is not known.
    pub version: Served<String>,
    /// The versions of `resource.k8s.io` that it serves.
    pub dra_versions: Served<Vec<String>>,
    /// Whether feature gates are on, by name, as the API server's metrics say.
    pub gates: Served<BTreeMap<String, bool>>,
    pub access: Vec<Access>,
    /// The pods of the chart; an error where the caller may not list them.
    pub components: Served<Vec<Component>>,
    /// The Deployments and DaemonSets of the chart; an error where the caller may not list them.
    pub workloads: Served<Vec<Workload>>,
    /// Why the API server does not reach the usage API; `None` where it does, and where there is none.
    pub usage_api_fault: Option<String>,
    /// The namespace of these pods.
    pub system: String,
    /// When the facts were read.
    pub now: Timestamp,
    /// The newest warnings about pods that cannot start or end, by the pod's UID.
    pub warnings: BTreeMap<String, String>,
    /// The DeviceTaintRules for all drivers or for ours.
    pub rules: Vec<DeviceTaintRule>,
    pub snapshot: Snapshot,
    /// The use of GPUs.
    pub usage: UsageResult,
}

/// A value, or one line that says why it is not known.
pub type Served<T> = Result<T, String>;

/// Whether the caller has a right.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Access {
    pub verb: &'static str,
    /// The resource, as RBAC names it.
    pub resource: &'static str,
    /// The namespace; all where empty.
    pub namespace: String,
    /// Whether the API server allows it.
    pub is_allowed: bool,
}

/// A pod of the chart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Component {
    /// `controller`, `node-plugin`, `mps`.
    pub component: String,
    pub pod: String,
    /// Its node; empty where it has none.
    pub node: String,
    /// Whether it is ready.
    pub is_ready: bool,
    /// The images of its containers.
    pub images: Vec<String>,
}

/// A Deployment or DaemonSet of the chart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Workload {
    /// `Deployment` or `DaemonSet`.
    pub kind: &'static str,
    pub name: String,
    pub component: String,
    /// How many pods it should have: its replicas, or the nodes that it matches.
    pub wanted: usize,
}

impl Default for Facts {
    /// Nothing is known.
    fn default() -> Self {
        Self {
            version: Err(String::new()),
            dra_versions: Err(String::new()),
            gates: Err(String::new()),
            access: Vec::new(),
            components: Err(String::new()),
            workloads: Err(String::new()),
            usage_api_fault: None,
            system: String::new(),
            now: Timestamp::UNIX_EPOCH,
            warnings: BTreeMap::new(),
            rules: Vec::new(),
            snapshot: Snapshot::default(),
            usage: Err(String::new()),
        }
    }
}
