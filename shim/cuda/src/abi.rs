//! The driver's types, as far as the shim reads them. Layouts and values are those of cuda.h.

use core::ffi::c_void;

/// A result code. A number, not an enum: a newer driver returns codes that we do not know.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CUresult(pub u32);

impl CUresult {
    pub const SUCCESS: Self = Self(0);
    pub const INVALID_VALUE: Self = Self(1);
    pub const OUT_OF_MEMORY: Self = Self(2);
    pub const SHARED_OBJECT_INIT_FAILED: Self = Self(303);
    pub const INVALID_CONTEXT: Self = Self(201);
    pub const UNSUPPORTED_LIMIT: Self = Self(215);
    pub const NOT_FOUND: Self = Self(500);
    pub const NOT_READY: Self = Self(600);
    pub const NOT_PERMITTED: Self = Self(800);
    pub const NOT_SUPPORTED: Self = Self(801);
    pub const MPS_CONNECTION_FAILED: Self = Self(805);

    pub fn is_ok(self) -> bool {
        self == Self::SUCCESS
    }
}

pub type CUdevice = i32;
pub type CUdeviceptr = u64;
/// Before CUDA 3.2 device pointers and sizes had 32 bits; those functions still exist.
pub type CUdeviceptr_v1 = u32;
/// Opaque handles; 0 means none.
pub type CUcontext = usize;
pub type CUstream = usize;
pub type CUevent = usize;
/// A handle that can be launched: a `CUfunction`, a `CUkernel`, or a `CUgraphExec`.
pub type CUfunction = usize;
pub type CUmemoryPool = usize;
pub type CUarray = usize;
pub type CUgraph = usize;
pub type CUgraphExec = usize;
/// A handle of physical memory, or of a multicast object.
pub type CUmemGenericAllocationHandle = u64;
pub type CUuuid = [u8; 16];
/// `CUipcMemHandle`, which is passed by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct CUipcMemHandle(pub [u8; 64]);
/// The address of a driver function.
pub type Function = *mut c_void;

/// Where memory lies.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct CUmemLocation {
    pub kind: i32,
    pub id: i32,
}

impl CUmemLocation {
    pub const DEVICE: i32 = 1;
    const HOST: i32 = 2;
    const HOST_NUMA_CURRENT: i32 = 4;
    const LOCALITY_DOMAIN: i32 = 6;

    /// Whether it is host memory.
    pub fn is_host(self) -> bool {
        (Self::HOST..=Self::HOST_NUMA_CURRENT).contains(&self.kind)
    }

    /// The device it names, if it names one.
    pub fn device(self) -> Option<CUdevice> {
        match self.kind {
            Self::DEVICE => Some(self.id),
            // The domain is in the bits above.
            Self::LOCALITY_DOMAIN => Some(self.id & 0xff),
            _ => None,
        }
    }
}

/// A pool's properties, up to what is read.
#[repr(C)]
pub struct CUmemPoolProps {
    pub allocation_type: i32,
    pub handle_types: i32,
    pub location: CUmemLocation,
}

/// Properties of an allocation.
#[repr(C)]
#[derive(Default)]
pub struct CUmemAllocationProp {
    pub kind: i32,
    pub handle_types: i32,
    pub location: CUmemLocation,
    pub metadata: usize,
    pub flags: [u8; 8],
}

impl CUmemAllocationProp {
    pub const PINNED: i32 = 1;
    pub const GRANULARITY_MINIMUM: u32 = 0;
}

/// How a kernel is launched, up to what is read.
#[repr(C)]
pub struct CUlaunchConfig {
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared: u32,
    pub stream: CUstream,
}

/// `CUDA_LAUNCH_PARAMS`.
#[repr(C)]
pub struct CUlaunchParams {
    pub function: CUfunction,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared: u32,
    pub stream: CUstream,
    pub parameters: usize,
}

/// The parameters of a graph's memory node.
#[repr(C)]
pub struct CUDA_MEM_ALLOC_NODE_PARAMS {
    pub pool: CUmemPoolProps,
    /// The rest of the pool's properties: security attributes, size, usage, and room.
    pub pool_rest: [u64; 9],
    pub access: usize,
    pub access_count: usize,
    pub bytes: usize,
    pub address: CUdeviceptr,
}

/// `CUDA_KERNEL_NODE_PARAMS` from its second version on.
#[repr(C)]
pub struct CUDA_KERNEL_NODE_PARAMS {
    pub function: CUfunction,
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared: u32,
    pub parameters: usize,
    pub extra: usize,
    /// Used if the function is 0.
    pub kernel: CUfunction,
    /// Where the kernel runs; 0 for the context that is current.
    pub context: CUcontext,
}

/// The parameters of any node of a graph: a kind, and fields that depend on it.
#[repr(C)]
pub struct CUgraphNodeParams {
    pub kind: i32,
    pub reserved: [i32; 3],
    /// The first words of the fields that depend on the kind.
    pub body: [u64; 16],
}

impl CUgraphNodeParams {
    pub const KERNEL: i32 = 0;
    pub const GRAPH: i32 = 4;
    pub const MEM_ALLOC: i32 = 10;
}

const _: () = {
    assert!(core::mem::offset_of!(CUDA_MEM_ALLOC_NODE_PARAMS, access) == 88);
    assert!(core::mem::offset_of!(CUgraphNodeParams, body) == 16);
    assert!(core::mem::offset_of!(CUDA_KERNEL_NODE_PARAMS, kernel) == 56);
};

/// The shape of an array, in numbers of today's width or of the one used before CUDA 3.2.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ArrayShape2<S> {
    pub width: S,
    pub height: S,
    pub format: u32,
    pub channels: u32,
}

/// The shape of an array with a depth, or layers.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ArrayShape3<S> {
    pub width: S,
    pub height: S,
    pub depth: S,
    pub format: u32,
    pub channels: u32,
    pub flags: u32,
}

pub const CUDA_ARRAY3D_SPARSE: u32 = 0x40;
pub const CUDA_ARRAY3D_DEFERRED_MAPPING: u32 = 0x80;

#[repr(C)]
#[derive(Default)]
pub struct CUDA_ARRAY_MEMORY_REQUIREMENTS {
    pub size: usize,
    pub alignment: usize,
    pub reserved: [u32; 4],
}

/// One operation of `cuMemMapArrayAsync`.
#[repr(C)]
pub struct CUarrayMapInfo {
    pub resource_type: u32,
    pub resource: usize,
    pub subresource_type: u32,
    /// The tiles: level, layer, offset and extent, or layer, offset and size.
    pub subresource: [u64; 4],
    pub operation: u32,
    pub handle_type: u32,
    pub memory: CUmemGenericAllocationHandle,
    pub offset: u64,
    pub device_mask: u32,
    pub flags: u32,
    pub reserved: [u32; 2],
}

impl CUarrayMapInfo {
    pub const MAP: u32 = 1;
}
