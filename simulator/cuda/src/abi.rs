//! Types of cuda.h that several families of functions use.

use std::ffi::c_void;

/// cuda.h's `CUmemLocation`.
#[repr(C)]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Location {
    pub kind: u32,
    pub id: i32,
}

/// `CU_MEM_LOCATION_TYPE_DEVICE`
pub const ON_DEVICE: u32 = 1;

/// cuda.h's `CUmemPoolProps`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct PoolProperties {
    pub kind: u32,
    handles: u32,
    pub location: Location,
    security: *mut c_void,
    maximum: usize,
    usage: u16,
    reserved: [u8; 54],
}
