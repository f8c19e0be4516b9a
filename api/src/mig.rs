//! How MIG divides a node's GPUs, as NVML reports it.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::quantity::{Quantity, bytes_schema};

/// How MIG divides GPUs that have the same profiles.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MigGeometry {
    /// The UUIDs of the GPUs.
    #[schemars(extend("x-kubernetes-list-type" = "set"))]
    pub gpus: Vec<String>,
    /// The GPU instance profiles that the driver offers, in the order of their ids.
    pub profiles: Vec<MigProfile>,
}

/// A GPU instance profile (`nvmlGpuInstanceProfileInfo_v2_t`).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MigProfile {
    /// The profile's name: NVML's `name` without the word MIG, for example `1g.10gb` or `1g.10gb+me`.
    pub name: String,
    /// The profile's id (`id`), as `nvidia-smi mig -lgip` shows it.
    #[schemars(range(max = 4_294_967_295_u32))]
    pub id: u32,
    /// The number of compute slices of an instance (`sliceCount`).
    #[schemars(range(min = 1, max = 255))]
    pub compute_slices: u32,
    /// The number of memory slices of an instance, which is the size of its placements (`nvmlGpuInstancePlacement_t`).
    #[schemars(range(min = 1, max = 255))]
    pub memory_slices: u32,
    /// The possible placements of an instance (`nvmlDeviceGetGpuInstancePossiblePlacements_v2`): the number of the
    /// first memory slice of each.
    pub placements: Vec<u32>,
    /// The memory of an instance, in bytes (`memorySizeMB`).
    #[schemars(schema_with = "bytes_schema")]
    pub memory: Quantity,
    /// The number of streaming multiprocessors of an instance.
    #[schemars(range(max = 4_294_967_295_u32))]
    pub multiprocessors: u32,
    /// The maximum number of instances of the profile that can exist at the same time (`instanceCount`).
    #[schemars(range(max = 4_294_967_295_u32))]
    pub instances: u32,
    /// The engines of an instance other than its multiprocessors.
    #[serde(default)]
    pub engines: MigEngines,
}

/// The engines of a GPU instance other than its multiprocessors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", default)]
pub struct MigEngines {
    /// The number of copy engines (`copyEngineCount`).
    #[schemars(range(max = 4_294_967_295_u32))]
    pub copy: u32,
    /// The number of video decoders (`decoderCount`).
    #[schemars(range(max = 4_294_967_295_u32))]
    pub decoders: u32,
    /// The number of video encoders (`encoderCount`).
    #[schemars(range(max = 4_294_967_295_u32))]
    pub encoders: u32,
    /// The number of JPEG engines (`jpegCount`).
    #[schemars(range(max = 4_294_967_295_u32))]
    pub jpeg: u32,
    /// The number of engines for optical flow (`ofaCount`).
    #[schemars(range(max = 4_294_967_295_u32))]
    pub ofa: u32,
}

/// A GPU instance that Tranche did not create.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct MigInstance {
    /// The name of the instance's profile.
    pub profile: String,
    /// The number of the instance's first memory slice.
    #[schemars(range(max = 255))]
    pub start: u32,
    /// The instance's id, as `nvidia-smi mig -lgi` shows it.
    #[schemars(range(max = 4_294_967_295_u32))]
    pub id: u32,
    /// The UUID of the instance's MIG device, `MIG-…`, if the instance has exactly one compute instance and that has
    /// all of its compute slices. Absent otherwise.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub uuid: Option<String>,
}
