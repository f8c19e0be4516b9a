//! Libraries: modules that are loaded without a context.

use std::ffi::{c_char, c_void};

use crate::driver::driver;
use crate::export::{export, put};
use crate::module::{Module, create, create_from_file, enumerate, function_of, global_of};
use crate::object::{Handle, Kind as _, Object};

export! {
    fn cuLibraryLoadData(to: *mut Handle, image: *const c_void, _jit: *mut u32, _jit_values: *mut *mut c_void, _jit_count: u32, _options: *mut u32, _values: *mut *mut c_void, _count: u32) {
        driver()?;
        put(to, create(image)?.handle())
    }
    fn cuLibraryLoadFromFile(to: *mut Handle, path: *const c_char, _jit: *mut u32, _jit_values: *mut *mut c_void, _jit_count: u32, _options: *mut u32, _values: *mut *mut c_void, _count: u32) {
        driver()?;
        put(to, create_from_file(path)?.handle())
    }
    fn cuLibraryUnload(library: Handle) {
        driver()?;
        let ended = Object::<Module>::find(library)?.unload();
        ended.then_some(()).ok_or(Module::WRONG)
    }
    fn cuLibraryGetModule(to: *mut Handle, library: Handle) {
        driver()?;
        put(to, Object::<Module>::find(library)?.handle())
    }
    fn cuLibraryGetKernel(to: *mut Handle, library: Handle, name: *const c_char) {
        put(to, function_of(library, name)?)
    }
    fn cuLibraryGetGlobal(to: *mut u64, bytes: *mut usize, library: Handle, name: *const c_char) {
        global_of(library, name, to, bytes)
    }
    fn cuLibraryGetManaged(to: *mut u64, bytes: *mut usize, library: Handle, name: *const c_char) {
        global_of(library, name, to, bytes)
    }
    fn cuLibraryGetKernelCount(count: *mut u32, library: Handle) {
        driver()?;
        put(count, u32::try_from(Object::<Module>::find(library)?.names().len()).unwrap_or(0))
    }
    fn cuLibraryEnumerateKernels(to: *mut Handle, room: u32, library: Handle) {
        driver()?;
        enumerate(Object::<Module>::find(library)?, to, room)
    }
}
