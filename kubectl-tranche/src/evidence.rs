//! What was read for support, before secrets are taken out.

use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::events::v1::Event;

use crate::facts::Facts;

#[derive(Clone, Debug, Default)]
pub struct Evidence {
    /// The facts that `doctor` examines, with all objects.
    pub facts: Facts,
    pub pods: Vec<Pod>,
    /// The newest lines of their containers' logs.
    pub logs: Vec<Log>,
    /// Events about our objects, and events of the namespace in which Tranche runs.
    pub events: Vec<Event>,
    /// What could not be read.
    pub missing: Vec<String>,
}

/// The log of a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Log {
    pub pod: String,
    pub container: String,
    pub text: String,
}
