//! Modules.

use std::ffi::{c_char, c_void};

use tranche_simulator_machine::layout::Habit;

use crate::context::current;
use crate::driver::{driver, has};
use crate::export::{export, put};
use crate::module::{
    Module, create_from_file, enumerate, function_of, global_of, is_eager, load_here, load_if_eager,
};
use crate::object::{Handle, Kind as _, Object};

/// `CUmoduleLoadingMode`
const EAGER: u32 = 1;
const LAZY: u32 = 2;

export! {
    fn cuModuleLoadData(to: *mut Handle, image: *const c_void) {
        put(to, load_here(image)?)
    }
    fn cuModuleLoadDataEx(to: *mut Handle, image: *const c_void, _count: u32, _options: *mut u32, _values: *mut *mut c_void) {
        put(to, load_here(image)?)
    }
    fn cuModuleLoadFatBinary(to: *mut Handle, image: *const c_void) {
        put(to, load_here(image)?)
    }
    fn cuModuleLoad(to: *mut Handle, path: *const c_char) {
        put(to, load_if_eager(create_from_file(path)?, current()?)?)
    }
    fn cuModuleUnload(module: Handle) {
        driver()?;
        let ended = Object::<Module>::find(module)?.unload();
        ended.then_some(()).ok_or(Module::WRONG)
    }
    fn cuModuleGetFunction(to: *mut Handle, module: Handle, name: *const c_char) {
        put(to, function_of(module, name)?)
    }
    fn cuModuleGetGlobal_v2(to: *mut u64, bytes: *mut usize, module: Handle, name: *const c_char) {
        global_of(module, name, to, bytes)
    }
    fn cuModuleGetLoadingMode(mode: *mut u32) {
        put(mode, if has(Habit::LazyLoading) && !is_eager() { LAZY } else { EAGER })
    }
    fn cuModuleGetFunctionCount(count: *mut u32, module: Handle) {
        driver()?;
        put(count, u32::try_from(Object::<Module>::find(module)?.names().len()).unwrap_or(0))
    }
    fn cuModuleEnumerateFunctions(to: *mut Handle, room: u32, module: Handle) {
        driver()?;
        enumerate(Object::<Module>::find(module)?, to, room)
    }
}
