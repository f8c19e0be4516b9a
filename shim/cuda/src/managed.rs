//! Managed memory in place of device memory, for shares whose GPU's memory is oversubscribed.
//!
//! Together the shares of such a GPU have more memory than the GPU. So they must use managed memory, which the driver moves
//! to the host page by page when others use the GPU's memory, and back when it is used again. Programs ask for device memory;
//! they get managed memory that prefers the GPU, and queries describe it as device memory.
//!
//! Memory that the driver cannot move (contexts, modules, arrays, pools, physical memory) is also charged to a second
//! account, whose limit oversubscription does not raise ([`crate::device::Residence`]).

use core::ffi::c_void;

use crate::abi::{CUdevice, CUdeviceptr, CUresult};
use crate::charge::is_converted;
use crate::device::Device;
use crate::driver::{Call, real};
use crate::ipc::range_of;
use crate::process;

/// Allocates `bytes` of managed memory, which every stream of every device may use, and which moves to the
/// device when it is used there.
///
/// # Safety
///
/// `pointer` may be written to.
pub unsafe fn make(device: &Device, bytes: u64, pointer: *mut CUdeviceptr) -> CUresult {
    const ATTACH_GLOBAL: u32 = 1;
    const SET_PREFERRED_LOCATION: u32 = 3;
    let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
    let mut made = 0;
    // SAFETY: writes to the local address.
    let result = unsafe {
        real!(cuMemAllocManaged: fn(*mut CUdeviceptr, usize, u32))(
            &raw mut made,
            bytes,
            ATTACH_GLOBAL,
        )
    };
    if result.is_ok() {
        // Advice: without it the memory works too.
        // SAFETY: of memory that was allocated just now.
        let _ = unsafe {
            real!(cuMemAdvise: fn(CUdeviceptr, usize, u32, CUdevice))(
                made,
                bytes,
                SET_PREFERRED_LOCATION,
                device.handle,
            )
        };
        // SAFETY: the caller's promise.
        unsafe { pointer.write_unaligned(made) };
    }
    result
}

/// Whether an address lies in managed memory for which the program asked as device memory.
fn is_ours(address: CUdeviceptr) -> bool {
    let Some(process) = process::joined() else {
        return false;
    };
    if !process.is_oversubscribed() {
        return false;
    }
    let Ok((start, _)) = range_of(address) else {
        return false;
    };
    process.pointers.get(start).is_some_and(is_converted)
}

/// `cuIpcGetMemHandle`: managed memory has no handle.
pub fn export(address: CUdeviceptr, driver: Call<'_>) -> CUresult {
    if is_ours(address) {
        return CUresult::NOT_SUPPORTED;
    }
    driver.make()
}

/// An attribute that only managed memory has: a pointer for the host.
const HOST_POINTER: u32 = 4;
/// Whether it is managed memory.
const IS_MANAGED: u32 = 8;

/// `cuPointerGetAttribute`: the driver's answer, or what it would answer for device memory.
pub fn correct(
    value: *mut c_void,
    attribute: u32,
    address: CUdeviceptr,
    driver: Call<'_>,
) -> CUresult {
    if !matches!(attribute, HOST_POINTER | IS_MANAGED) || value.is_null() || !is_ours(address) {
        return driver.make();
    }
    if attribute == HOST_POINTER {
        return CUresult::INVALID_VALUE;
    }
    let result = driver.make();
    if result.is_ok() {
        // SAFETY: not null, and the driver has just written to it.
        unsafe { deny(attribute, value) };
    }
    result
}

/// `cuPointerGetAttributes`: the same for several attributes; those that the pointer does not have are zero.
pub fn correct_each(
    count: u32,
    attributes: *const u32,
    values: *const *mut c_void,
    address: CUdeviceptr,
    driver: Call<'_>,
) -> CUresult {
    let result = driver.make();
    if !result.is_ok() || attributes.is_null() || values.is_null() || !is_ours(address) {
        return result;
    }
    for place in 0..count as usize {
        // SAFETY: the driver has just read so many of both, and written to the values.
        unsafe {
            let value = values.add(place).read();
            if !value.is_null() {
                deny(attributes.add(place).read(), value);
            }
        }
    }
    result
}

/// Sets an attribute that only managed memory has to 0.
///
/// # Safety
///
/// The value is of the attribute's type.
unsafe fn deny(attribute: u32, value: *mut c_void) {
    // SAFETY: the caller's promise.
    unsafe {
        match attribute {
            // A `bool` in C: the driver writes one byte, or four of an int of 0 or 1.
            IS_MANAGED => value.cast::<u8>().write(0),
            HOST_POINTER => value.cast::<usize>().write(0),
            _ => {}
        }
    }
}
