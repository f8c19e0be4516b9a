//! The requests of a claim.

use serde_json::{Value, json};
use tranche_api::names::{DRIVER, OVERSUBSCRIBED};
use tranche_api::tier::Tier;

/// One request of a claim.
#[derive(Clone, Debug)]
pub struct Request(Value);

impl Request {
    /// A device of a class.
    #[must_use]
    pub fn class(name: &str) -> Self {
        Self(json!({"name": "gpu", "exactly": {"deviceClassName": name}}))
    }

    /// A device of a tier.
    #[must_use]
    pub fn of(tier: Tier) -> Self {
        Self::class(&tier.class_name())
    }

    #[must_use]
    pub fn exclusive() -> Self {
        Self::of(Tier::Exclusive)
    }

    /// A share without limits.
    #[must_use]
    pub fn timeshared() -> Self {
        Self::of(Tier::Timeshared)
    }

    /// A share with this memory and compute.
    #[must_use]
    pub fn capped(memory: &str, cores: &str) -> Self {
        Self::sized(Tier::Capped, memory, cores)
    }

    /// A share of a GPU with an MPS daemon, with this memory and this percentage of the threads.
    #[must_use]
    pub fn concurrent(memory: &str, threads: &str) -> Self {
        Self::sized(Tier::Concurrent, memory, threads)
    }

    /// A capped share of a GPU whose memory is oversubscribed.
    #[must_use]
    pub fn oversubscribed(memory: &str, cores: &str) -> Self {
        Self::class(&format!("{OVERSUBSCRIBED}.{DRIVER}")).of_size(memory, cores)
    }

    fn sized(tier: Tier, memory: &str, cores: &str) -> Self {
        Self::of(tier).of_size(memory, cores)
    }

    fn of_size(mut self, memory: &str, cores: &str) -> Self {
        self.0["exactly"]["capacity"] = json!({"requests": {"memory": memory, "cores": cores}});
        self
    }

    /// A partition of this profile.
    #[must_use]
    pub fn profile(profile: &str) -> Self {
        Self::of(Tier::Partition).that(&format!(
            "device.attributes['gpu.tranche.dev'].profile == '{profile}'"
        ))
    }

    /// A partition with at least this memory.
    #[must_use]
    pub fn partition(memory: &str) -> Self {
        Self::of(Tier::Partition).with_memory(memory)
    }

    /// The request with at least this memory.
    #[must_use]
    pub fn with_memory(mut self, memory: &str) -> Self {
        self.0["exactly"]["capacity"] = json!({"requests": {"memory": memory}});
        self
    }

    /// A device for which the CEL `expression` is true.
    #[must_use]
    pub fn that(mut self, expression: &str) -> Self {
        self.0["exactly"]["selectors"] = json!([{"cel": {"expression": expression}}]);
        self
    }

    /// The request under this name instead of `gpu`.
    #[must_use]
    pub fn named(mut self, name: &str) -> Self {
        self.0["name"] = name.into();
        self
    }

    /// The request on the GPU with this UUID.
    #[must_use]
    pub fn on(self, uuid: &str) -> Self {
        self.that(&format!(
            "device.attributes['gpu.tranche.dev'].uuid == '{uuid}'"
        ))
    }

    /// A claim's spec with only this request.
    #[must_use]
    pub fn spec(&self) -> Value {
        spec([self])
    }
}

/// A claim's spec with several requests.
pub fn spec<'a>(requests: impl IntoIterator<Item = &'a Request>) -> Value {
    let requests: Vec<_> = requests.into_iter().map(|request| &request.0).collect();
    json!({"devices": {"requests": requests}})
}

/// The spec with its requests on different GPUs.
#[must_use]
pub fn apart(mut spec: Value) -> Value {
    spec["devices"]["constraints"] = json!([{"distinctAttribute": "gpu.tranche.dev/uuid"}]);
    spec
}

/// The spec with parameters for our driver.
#[must_use]
pub fn with_parameters(mut spec: Value, parameters: &Value) -> Value {
    spec["devices"]["config"] =
        json!([{"opaque": {"driver": tranche_api::names::DRIVER, "parameters": parameters}}]);
    spec
}
