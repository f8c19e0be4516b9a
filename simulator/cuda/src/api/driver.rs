//! Initialisation, versions and the list of GPUs.

use crate::code::Code;
use crate::device::device;
use crate::driver::{cuda_version, driver, initialise};
use crate::export::{export, put};

export! {
    fn cuInit(flags: u32) {
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        initialise()
    }
    fn cuDriverGetVersion(version: *mut i32) { put(version, cuda_version()) }
    fn cuDeviceGetCount(count: *mut i32) {
        put(count, i32::try_from(driver()?.gpus.len()).unwrap_or(0))
    }
    fn cuDeviceGet(to: *mut i32, ordinal: i32) {
        device(ordinal)?;
        put(to, ordinal)
    }
}
