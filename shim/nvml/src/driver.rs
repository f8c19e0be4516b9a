//! The real driver's library, and our symbols that only forward to it.

use core::ffi::c_void;

use tranche_shim_core::paths;
use tranche_shim_runtime::library::Library;

use crate::abi::Return;

use symbols::PASSING;

pub use symbols::index;

/// The driver's library.
pub static DRIVER: Library = Library::new(
    paths::REAL_NVML,
    (c"nvmlInit_v2", || handled(index::nvmlInit_v2 - PASSING)),
);

tranche_shim_runtime::library! {
    driver: DRIVER,
    first: symbols::nvmlComputeInstanceDestroy,
    missing: missing,
    unavailable: unavailable,
}

/// The result of a function that this driver does not have.
pub extern "C" fn missing() -> Return {
    Return::FUNCTION_NOT_FOUND
}

/// The result of every function without a driver.
pub extern "C" fn unavailable() -> Return {
    Return::LIBRARY_NOT_FOUND
}

/// The function `index` as an `F`, the type of a C function.
pub fn typed<F: Copy>(index: usize) -> F {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
    let address = address(index);
    // SAFETY: `F` is the type that nvml.h gives the function of this name, whose address this is, or
    // that of one of ours, which takes no arguments: in this ABI the caller clears what it passed.
    unsafe { core::mem::transmute_copy(&address) }
}

const _: () = assert!(!symbols::PASSING_NAMES.is_empty());
