//! Fields that an API server did not store.
//!
//! A server with a disabled feature gate silently drops the gate's fields. A shared device without
//! its request policy, or a tier without its counters, would be allocated wrongly, so the loss must
//! be detected.

use std::fmt;

use k8s_openapi::api::resource::v1::ResourceSliceSpec;

use super::compare::differences;

/// A field that was sent and is missing in the stored object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DroppedField {
    /// The field, such as `spec.devices[0].consumesCounters`.
    pub path: String,
    /// The feature gate that the field depends on, if known.
    pub gate: Option<FeatureGate>,
}

/// A feature gate of the API server that our slices need.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum FeatureGate {
    /// Shared devices and their request policies.
    ConsumableCapacity,
    /// Counters, by which one GPU serves one tier at a time.
    PartitionableDevices,
    /// Taints, which close devices that are still allocated.
    DeviceTaints,
}

impl FeatureGate {
    /// The gate's name.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::ConsumableCapacity => "DRAConsumableCapacity",
            Self::PartitionableDevices => "DRAPartitionableDevices",
            Self::DeviceTaints => "DRADeviceTaints",
        }
    }

    fn of_field(field: &str) -> Option<Self> {
        match field {
            "allowMultipleAllocations" | "requestPolicy" => Some(Self::ConsumableCapacity),
            "sharedCounters" | "consumesCounters" => Some(Self::PartitionableDevices),
            "taints" => Some(Self::DeviceTaints),
            _ => None,
        }
    }
}

impl fmt::Display for FeatureGate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

impl fmt::Display for DroppedField {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the API server dropped {}", self.path)?;
        match self.gate {
            Some(gate) => write!(f, ": turn on its feature gate {gate}"),
            None => Ok(()),
        }
    }
}

/// The fields of `desired` that are missing in `stored`. Fields with another value are not listed.
#[must_use]
pub fn dropped(desired: &ResourceSliceSpec, stored: &ResourceSliceSpec) -> Vec<DroppedField> {
    differences(desired, stored)
        .into_iter()
        .filter(|difference| difference.lost)
        .map(|difference| DroppedField {
            gate: difference
                .path
                .iter()
                .rev()
                .find_map(|field| FeatureGate::of_field(field)),
            path: spell(&difference.path),
        })
        .collect()
}

fn spell(path: &[String]) -> String {
    path.iter().fold("spec".to_owned(), |spelled, segment| {
        if segment.bytes().all(|byte| byte.is_ascii_digit()) {
            format!("{spelled}[{segment}]")
        } else {
            format!("{spelled}.{segment}")
        }
    })
}
