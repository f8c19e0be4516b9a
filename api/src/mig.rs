//! How MIG divides a node's GPUs, as NVML reports it.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::quantity::{Quantity, bytes_schema};

/// How MIG divides GPUs that are alike.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MigGeometry {
    /// The UUIDs of these GPUs.
    #[schemars(extend("x-kubernetes-list-type" = "set"))]
    pub gpus: Vec<String>,
    /// The profiles of GPU instances that the driver offers, in the order of their ids.
    pub profiles: Vec<MigProfile>,
}

/// A profile of GPU instances (`nvmlGpuInstanceProfileInfo_v2_t`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MigProfile {
    /// As in NVML's `name` without the word MIG: `1g.10gb`, `1g.10gb+me`.
    pub name: String,
    /// As `nvidia-smi mig -lgip` shows it (`id`).
    #[schemars(range(max = 4_294_967_295_u32))]
    pub id: u32,
    /// Compute slices of an instance (`sliceCount`).
    #[schemars(range(min = 1, max = 255))]
    pub compute_slices: u32,
    /// Memory slices of an instance: the size of its placements (`nvmlGpuInstancePlacement_t`).
    #[schemars(range(min = 1, max = 255))]
    pub memory_slices: u32,
    /// The first memory slices of the possible placements
    /// (`nvmlDeviceGetGpuInstancePossiblePlacements_v2`).
    pub placements: Vec<u32>,
    /// Memory of an instance, bytes (`memorySizeMB`).
    #[schemars(schema_with = "bytes_schema")]
    pub memory: Quantity,
    /// Streaming multiprocessors of an instance.
    #[schemars(range(max = 4_294_967_295_u32))]
    pub multiprocessors: u32,
    /// Most instances of the profile at the same time (`instanceCount`).
    #[schemars(range(max = 4_294_967_295_u32))]
    pub instances: u32,
    /// The instance's other engines.
    #[serde(default)]
    pub engines: MigEngines,
}

/// Engines of a GPU instance beside its multiprocessors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct MigEngines {
    /// `copyEngineCount`.
    #[schemars(range(max = 4_294_967_295_u32))]
    pub copy: u32,
    /// `decoderCount`.
    #[schemars(range(max = 4_294_967_295_u32))]
    pub decoders: u32,
    /// `encoderCount`.
    #[schemars(range(max = 4_294_967_295_u32))]
    pub encoders: u32,
    /// `jpegCount`.
    #[schemars(range(max = 4_294_967_295_u32))]
    pub jpeg: u32,
    /// `ofaCount`.
    #[schemars(range(max = 4_294_967_295_u32))]
    pub ofa: u32,
}

/// A GPU instance that Tranche did not make.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MigInstance {
    /// Its profile's name.
    pub profile: String,
    /// The first of its memory slices.
    #[schemars(range(max = 255))]
    pub start: u32,
    /// Its id, as `nvidia-smi mig -lgi` shows it.
    #[schemars(range(max = 4_294_967_295_u32))]
    pub id: u32,
    /// The UUID of the MIG device, `MIG-…`, of its only compute instance if that has all of its slices; absent where it has
    /// none, or several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
}
