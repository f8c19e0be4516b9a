//! NVML's return codes.

use std::ffi::{CStr, c_char};

/// A failure: an `nvmlReturn_t` other than `NVML_SUCCESS`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Code(pub u32);

impl Code {
    pub const UNINITIALIZED: Self = Self(1);
    pub const INVALID_ARGUMENT: Self = Self(2);
    pub const NOT_SUPPORTED: Self = Self(3);
    pub const NO_PERMISSION: Self = Self(4);
    pub const NOT_FOUND: Self = Self(6);
    pub const INSUFFICIENT_SIZE: Self = Self(7);
    pub const DRIVER_NOT_LOADED: Self = Self(9);
    pub const TIMEOUT: Self = Self(10);
    pub const GPU_IS_LOST: Self = Self(15);
    pub const RESET_REQUIRED: Self = Self(16);
    pub const LIB_RM_VERSION_MISMATCH: Self = Self(18);
    pub const IN_USE: Self = Self(19);
    pub const INSUFFICIENT_RESOURCES: Self = Self(23);
    pub const ARGUMENT_VERSION_MISMATCH: Self = Self(25);
    pub const UNKNOWN: Self = Self(999);
}

/// The text of a code.
pub fn message(code: u32) -> &'static CStr {
    match code {
        0 => c"The operation was successful",
        1 => c"NVML was not first initialized with nvmlInit()",
        2 => c"A supplied argument is invalid",
        3 => c"The requested operation is not available on target device",
        4 => c"The current user does not have permission for operation",
        5 => c"Already initialized",
        6 => c"A query to find an object was unsuccessful",
        7 => c"An input argument is not large enough",
        8 => c"A device's external power cables are not properly attached",
        9 => c"NVIDIA driver is not loaded",
        10 => c"User provided timeout passed",
        11 => c"NVIDIA Kernel detected an interrupt issue with a GPU",
        12 => c"NVML Shared Library couldn't be found or loaded",
        13 => c"Local version of NVML doesn't implement this function",
        14 => c"infoROM is corrupted",
        15 => c"The GPU has fallen off the bus or has otherwise become inaccessible",
        16 => c"The GPU requires a reset before it can be used again",
        17 => c"The GPU control device has been blocked by the operating system/cgroups",
        18 => c"RM has detected an NVML/RM version mismatch",
        19 => c"An operation cannot be performed because the GPU is currently in use",
        20 => c"Insufficient memory",
        21 => c"No data",
        22 => c"The requested vgpu operation is not available on target device",
        23 => c"Insufficient resources",
        24 => c"Freq not supported",
        25 => c"The provided version is invalid/unsupported",
        26 => c"The requested functionality has been deprecated",
        27 => c"The system is not ready for the request",
        _ => c"An internal driver error occurred",
    }
}

/// The message of a code, as `nvmlErrorString` gives it.
#[unsafe(no_mangle)]
pub extern "C" fn nvmlErrorString(code: u32) -> *const c_char {
    message(code).as_ptr()
}
