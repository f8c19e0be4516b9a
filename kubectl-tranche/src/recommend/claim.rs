//! The claim of a recommendation, as YAML to apply.

use serde_json::{Value, json};
use tranche_api::Quantity;

use super::Leaf;

/// The default for memory: room for a small model.
const USUAL_MEMORY: u64 = 10 << 30;
/// The default for cores, percent.
const USUAL_CORES: u8 = 25;

/// How much of a GPU a claim requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Size {
    /// Bytes.
    pub memory: Option<u64>,
    /// Percent, 1-100.
    pub cores: Option<u8>,
}

/// A size that no claim can have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    #[error("--memory {0:?} is not an amount of memory: write bytes with a suffix, such as 20Gi")]
    Memory(String),
}

impl Size {
    /// Reads an amount of memory in the form that claims use.
    pub fn with_memory(self, text: &str) -> Result<Self, SizeError> {
        let refuse = || SizeError::Memory(text.to_owned());
        let amount: Quantity = text.parse().map_err(|_| refuse())?;
        let bytes = amount.to_count().ok().filter(|bytes| *bytes > 0);
        Ok(Self {
            memory: Some(bytes.ok_or_else(refuse)?),
            ..self
        })
    }
}

/// A ResourceClaimTemplate, with a comment that says how a pod uses it.
pub(super) fn object(leaf: &Leaf, name: &str, namespace: Option<&str>, size: Size) -> Value {
    let mut exactly = json!({"deviceClassName": leaf.class});
    if leaf.has_memory {
        let memory = Quantity::from_bytes(size.memory.unwrap_or(USUAL_MEMORY));
        exactly["capacity"]["requests"]["memory"] = json!(memory);
    }
    if leaf.has_cores {
        let cores = size.cores.unwrap_or(USUAL_CORES);
        exactly["capacity"]["requests"]["cores"] = json!(cores.to_string());
    }
    let mut object = json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaimTemplate",
        "metadata": {"name": name},
        "spec": {"spec": {"devices": {"requests": [{"name": "gpu", "exactly": exactly}]}}},
    });
    if let Some(namespace) = namespace {
        object["metadata"]["namespace"] = json!(namespace);
    }
    object
}

/// What to apply.
#[must_use]
pub fn yaml(leaf: &Leaf, name: &str, namespace: Option<&str>, size: Size) -> String {
    let object = object(leaf, name, namespace, size);
    // JSON without numbers and dates is always valid YAML.
    let text = serde_saphyr::to_string(&object).unwrap_or_else(|_| object.to_string());
    format!(
        "{}\n# A pod uses it so:\n#   spec:\n#     resourceClaims: [{{name: gpu, resourceClaimTemplateName: {name}}}]\n#     containers:\n#     - resources: {{claims: [{{name: gpu}}]}}\n",
        text.trim_end()
    )
}
