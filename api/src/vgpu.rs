//! NVIDIA vGPU: a GPU that is a vGPU in a virtual machine, or whose host makes vGPUs of it.

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

/// The most types of a GPU (`NVA081_MAX_VGPU_TYPES_PER_PGPU` of NVIDIA's open kernel modules).
pub const MOST_TYPES: usize = 128;
/// The most bytes of a type's name (`NVA081_VGPU_STRING_BUFFER_SIZE`).
pub const LONGEST_TYPE: usize = 64;

/// What the driver says of vGPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GpuVgpu {
    /// `Guest`, `Host` or `SharedGraphicsHost` (`nvmlDeviceGetVirtualizationMode`).
    // Any string, so that a newer plugin's word does not make an older schema refuse the status.
    #[schemars(with = "String")]
    #[serde(default)]
    pub role: VgpuRole,
    /// The names of the vGPU types that the host's driver offers (`nvidia-…/name` in `mdev_supported_types`) or, on kernels
    /// where it does not use mdev, that can be made now (`creatable_vgpu_types`): sorted, at most 128. Tranche does not serve
    /// them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "types_schema")]
    pub types: Vec<String>,
    /// How many vGPUs of the GPU exist. The driver keeps memory for each of them until it is removed.
    #[serde(default)]
    #[schemars(range(max = 4_294_967_295_u32))]
    pub devices: u32,
    /// How many virtual functions of the GPU are switched on.
    #[serde(default)]
    #[schemars(range(max = 4_294_967_295_u32))]
    pub virtual_functions: u32,
}

/// A GPU's part in vGPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum VgpuRole {
    /// The GPU is a vGPU of the virtual machine that is the node.
    Guest,
    /// The node's driver can make vGPUs of it.
    Host,
    /// The node's hypervisor shares it for graphics (vSGA), without a list of who has what of it.
    SharedGraphicsHost,
    /// A word that this release does not know.
    #[default]
    #[serde(other)]
    Unknown,
}

fn types_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "array",
        "maxItems": MOST_TYPES,
        "items": {"type": "string", "maxLength": LONGEST_TYPE},
        "x-kubernetes-list-type": "atomic",
    })
}
