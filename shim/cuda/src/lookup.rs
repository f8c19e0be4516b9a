//! Look-ups of kernels: what must be known of a kernel before it is launched.

use core::ffi::{CStr, c_char};

use tranche_shim_core::Entry;
use tranche_shim_core::compute::collective::is_collective;

use crate::abi::{CUfunction, CUresult};
use crate::collective;
use crate::driver::Call;
use crate::keys;
use crate::process;

/// A look-up of a kernel by `name`, whose handle the driver writes to `handle`.
pub fn find_kernel(handle: *mut CUfunction, name: *const c_char, driver: Call<'_>) -> CUresult {
    let result = driver.make();
    if result.is_ok() && !handle.is_null() && !name.is_null() {
        // SAFETY: the driver found a kernel by this C string.
        if is_collective(unsafe { CStr::from_ptr(name) }.to_bytes()) {
            // SAFETY: not null, and the driver has just written to it.
            mark(unsafe { handle.read() });
        }
    }
    result
}

/// The same in a library, whose kernels belong to no particular context.
pub fn find_library_kernel(
    handle: *mut CUfunction,
    name: *const c_char,
    driver: Call<'_>,
) -> CUresult {
    let result = find_kernel(handle, name, driver);
    if result.is_ok() && !handle.is_null() {
        // SAFETY: not null, and the driver has just written to it.
        note_kernels(unsafe { core::slice::from_raw_parts(handle, 1) });
    }
    result
}

/// `cuLibraryEnumerateKernels`.
pub fn list_kernels(handles: *mut CUfunction, count: u32, driver: Call<'_>) -> CUresult {
    let result = driver.make();
    if result.is_ok() && !handles.is_null() {
        // SAFETY: not null, with room for so many. If the library has fewer, the rest is the program's data; noting that is
        // harmless.
        note_kernels(unsafe { core::slice::from_raw_parts(handles, count as usize) });
    }
    result
}

fn note_kernels(handles: &[CUfunction]) {
    let Some(process) = process::joined() else {
        return;
    };
    for &handle in handles.iter().filter(|handle| **handle != 0) {
        let entry = Entry {
            bytes: 0,
            device: u8::MAX,
            context: 0,
        };
        // The table is full: the kernel is treated like an ordinary one.
        let _ = process
            .pointers
            .put(keys::key(keys::Kind::Kernel, handle as u64), entry);
    }
}

/// `cuKernelGetFunction`: another handle of the same kernel.
pub fn find_function(function: *mut CUfunction, kernel: CUfunction, driver: Call<'_>) -> CUresult {
    let result = driver.make();
    let is_marked = process::joined().is_some_and(|process| collective::is_marked(process, kernel));
    if result.is_ok() && !function.is_null() && is_marked {
        // SAFETY: not null, and the driver has just written to it.
        mark(unsafe { function.read() });
    }
    result
}

fn mark(handle: CUfunction) {
    if let Some(process) = process::joined() {
        collective::mark(process, handle);
    }
}
