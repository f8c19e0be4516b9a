//! NVML's types, as nvml.h has them.

use core::ffi::{c_int, c_uint, c_ulonglong};

/// A type for which zeros are a valid value: NVML's structs of numbers.
///
/// # Safety
///
/// All zeros must be a valid value, and so must whatever the driver writes.
pub unsafe trait Plain: Copy {}

// SAFETY: a number.
unsafe impl Plain for u32 {}
// SAFETY: a number.
unsafe impl Plain for usize {}

/// `nvmlReturn_t`: a number, because newer drivers return codes that we do not know.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Return(pub c_uint);

impl Return {
    pub const SUCCESS: Self = Self(0);
    pub const NOT_SUPPORTED: Self = Self(3);
    pub const NO_PERMISSION: Self = Self(4);
    pub const NOT_FOUND: Self = Self(6);
    pub const INSUFFICIENT_SIZE: Self = Self(7);
    pub const LIBRARY_NOT_FOUND: Self = Self(12);
    pub const FUNCTION_NOT_FOUND: Self = Self(13);
    pub const MEMORY: Self = Self(20);
    pub const ARGUMENT_VERSION_MISMATCH: Self = Self(25);
}

/// A GPU, to the driver's library; opaque.
pub type Device = usize;

/// `nvmlGpmSupport_t`.
#[repr(C)]
pub struct GpmSupport {
    version: c_uint,
    pub is_supported: c_uint,
}

/// `nvmlMemory_t` and `nvmlBAR1Memory_t`, in bytes.
#[repr(C)]
pub struct Memory {
    pub total: u64,
    pub free: u64,
    pub used: u64,
}

/// `nvmlMemory_v2_t`, in bytes.
#[repr(C)]
pub struct MemoryV2 {
    version: c_uint,
    pub total: u64,
    pub reserved: u64,
    pub free: u64,
    pub used: u64,
}

/// `nvmlProcessInfo_v1_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ProcessV1 {
    pub pid: c_uint,
    pub memory: u64,
}

/// `nvmlProcessInfo_v2_t`; the third version has the same layout.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ProcessV2 {
    pub pid: c_uint,
    pub memory: u64,
    pub gpu_instance: c_uint,
    pub compute_instance: c_uint,
}

/// `nvmlProcessDetail_v1_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ProcessDetail {
    pub pid: c_uint,
    pub memory: u64,
    pub gpu_instance: c_uint,
    pub compute_instance: c_uint,
    pub protected: u64,
}

/// `nvmlProcessDetailList_v1_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct ProcessDetails {
    pub version: c_uint,
    pub mode: c_uint,
    pub count: c_uint,
    pub to: *mut ProcessDetail,
}

/// `nvmlProcessUtilizationSample_t`; percent of the GPU.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Sample {
    pub pid: c_uint,
    pub at: c_ulonglong,
    pub sm: c_uint,
    pub memory: c_uint,
    pub encoder: c_uint,
    pub decoder: c_uint,
}

/// `nvmlProcessUtilizationInfo_v1_t`; percent of the GPU.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UtilizationInfo {
    pub at: c_ulonglong,
    pub pid: c_uint,
    pub sm: c_uint,
    pub memory: c_uint,
    pub encoder: c_uint,
    pub decoder: c_uint,
    pub jpeg: c_uint,
    pub optical_flow: c_uint,
}

/// `nvmlProcessesUtilizationInfo_v1_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct UtilizationInfos {
    pub version: c_uint,
    pub count: c_uint,
    pub since: c_ulonglong,
    pub to: *mut UtilizationInfo,
}

/// `nvmlUtilization_t`: percent of the last sample period.
#[repr(C)]
pub struct Utilization {
    pub gpu: c_uint,
    pub memory: c_uint,
}

/// `nvmlGpuDynamicPstatesInfo_t`. The first domain is the GPU, the second its memory.
#[repr(C)]
pub struct DynamicPstates {
    flags: c_uint,
    pub domains: [Domain; 8],
}

/// One of its domains.
#[repr(C)]
pub struct Domain {
    pub is_present: c_uint,
    pub percentage: c_uint,
    thresholds: [c_uint; 2],
}

/// `nvmlSample_t`.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Value {
    pub at: c_ulonglong,
    pub value: [u8; 8],
}

/// The beginning of `nvmlAccountingStats_v2_t`, with the PID.
#[repr(C)]
pub struct AccountingStatsV2 {
    pub pid: c_uint,
}

/// `nvmlSamplingType_t`, `nvmlValueType_t`.
pub type Enumeration = c_int;

// SAFETY: numbers; every bit pattern is a value.
unsafe impl Plain for Sample {}
// SAFETY: as above.
unsafe impl Plain for UtilizationInfo {}
