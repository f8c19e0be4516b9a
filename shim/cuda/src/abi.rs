//! The driver's types, as far as they are looked at. Layouts and values are cuda.h's.

use core::ffi::c_void;

/// A result code. A number, not an enum: a newer driver returns codes that we do not know.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CUresult(pub u32);

impl CUresult {
    pub const SUCCESS: Self = Self(0);
    pub const OUT_OF_MEMORY: Self = Self(2);
    pub const SHARED_OBJECT_INIT_FAILED: Self = Self(303);
    pub const NOT_FOUND: Self = Self(500);
    pub const NOT_READY: Self = Self(600);
    pub const NOT_PERMITTED: Self = Self(800);
    pub const STREAM_CAPTURE_INVALIDATED: Self = Self(901);

    pub fn is_ok(self) -> bool {
        self == Self::SUCCESS
    }
}

pub type CUdevice = i32;
pub type CUdeviceptr = u64;
/// Before CUDA 3.2 device pointers and sizes had 32 bits; those functions still exist.
pub type CUdeviceptr_v1 = u32;
/// Opaque handles; 0 is none.
pub type CUcontext = usize;
pub type CUstream = usize;
pub type CUevent = usize;
/// A `CUfunction`, a `CUkernel`, or a `CUgraphExec`: what can be launched.
pub type CUfunction = usize;
pub type CUmemoryPool = usize;
pub type CUuuid = [u8; 16];
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
