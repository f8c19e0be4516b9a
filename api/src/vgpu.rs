//! NVIDIA vGPU: a GPU that is a vGPU in a virtual machine, or a GPU on which a host creates vGPUs.

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

/// The maximum number of types of a GPU (`NVA081_MAX_VGPU_TYPES_PER_PGPU` of NVIDIA's open kernel modules).
pub const MOST_TYPES: usize = 128;
/// The maximum length of a type's name, in bytes (`NVA081_VGPU_STRING_BUFFER_SIZE`).
pub const LONGEST_TYPE: usize = 64;

/// What the driver reports about vGPU.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GpuVgpu {
    /// The GPU's role in vGPU: `Guest`, `Host` or `SharedGraphicsHost` (`nvmlDeviceGetVirtualizationMode`).
    // Any string, so that a newer plugin's word does not make an older schema refuse the status.
    #[schemars(with = "String")]
    #[serde(default)]
    pub role: VgpuRole,
    /// The names of vGPU types, sorted, at most 128. If the host's driver uses mdev, they are the types that it offers
    /// (`nvidia-…/name` in `mdev_supported_types`); on other kernels, they are the types that can be created now
    /// (`creatable_vgpu_types`). Tranche does not serve them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(schema_with = "types_schema")]
    pub types: Vec<String>,
    /// The number of vGPUs that exist on the GPU. The driver keeps memory for each of them until it is removed.
    #[serde(default)]
    #[schemars(range(max = 4_294_967_295_u32))]
    pub devices: u32,
    /// The number of the GPU's virtual functions that are switched on.
    #[serde(default)]
    #[schemars(range(max = 4_294_967_295_u32))]
    pub virtual_functions: u32,
}

/// A GPU's role in vGPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum VgpuRole {
    /// The node is a virtual machine, and the GPU is a vGPU.
    Guest,
    /// The node's driver can create vGPUs on the GPU.
    Host,
    /// The node's hypervisor shares the GPU for graphics (vSGA) and does not list which part each virtual machine has.
    SharedGraphicsHost,
    /// A value that this release does not know.
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
