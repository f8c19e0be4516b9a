//! Kernels: functions of modules, and kernels of libraries.

use std::ffi::c_char;
use std::sync::atomic::Ordering;

use tranche_simulator_machine::layout::Habit;

use crate::code::Code;
use crate::context::current;
use crate::device::devices;
use crate::driver::{driver, has};
use crate::export::{export, put};
use crate::module::{Function, Module};
use crate::object::{Handle, Object};

fn function_attribute(function: &Function, which: u32) -> Result<i32, Code> {
    Ok(match which {
        0 => 1024,
        3 => i32::try_from(function.local).unwrap_or(i32::MAX),
        1 | 2 | 7 | 10..=15 => 0,
        4 => 32,
        // PTX and binary version, as 10 × major + minor.
        5 | 6 => {
            let [major, minor] = devices()?[0].state.compute_capability;
            i32::try_from(major * 10 + minor).unwrap_or(0)
        }
        8 => function.dynamic_shared.load(Ordering::Relaxed),
        9 => function.carveout.load(Ordering::Relaxed),
        _ => return Err(Code::INVALID_VALUE),
    })
}

fn set_function_attribute(function: &Function, which: u32, value: i32) -> Result<(), Code> {
    match which {
        8 => function.dynamic_shared.store(value, Ordering::Relaxed),
        9 => function.carveout.store(value, Ordering::Relaxed),
        10..=15 => {}
        _ => return Err(Code::INVALID_VALUE),
    }
    Ok(())
}

export! {
    fn cuKernelGetFunction(to: *mut Handle, kernel: Handle) {
        current()?;
        put(to, Object::<Function>::find(kernel)?.handle())
    }
    fn cuKernelGetLibrary(to: *mut Handle, kernel: Handle) {
        driver()?;
        put(to, Object::<Function>::find(kernel)?.module.0)
    }
    fn cuKernelGetName(to: *mut *const c_char, kernel: Handle) {
        driver()?;
        put(to, Object::<Function>::find(kernel)?.name.as_ptr())
    }
    fn cuKernelGetAttribute(value: *mut i32, which: u32, kernel: Handle, _device: i32) {
        driver()?;
        put(value, function_attribute(Object::<Function>::find(kernel)?, which)?)
    }
    fn cuKernelSetAttribute(which: u32, value: i32, kernel: Handle, _device: i32) {
        driver()?;
        set_function_attribute(Object::<Function>::find(kernel)?, which, value)
    }
    fn cuKernelSetCacheConfig(kernel: Handle, _config: u32, _device: i32) {
        driver()?;
        Object::<Function>::find(kernel).map(drop)
    }
    fn cuFuncGetModule(to: *mut Handle, function: Handle) {
        driver()?;
        put(to, Object::<Function>::find(function)?.module.0)
    }
    fn cuFuncGetName(to: *mut *const c_char, function: Handle) {
        driver()?;
        put(to, Object::<Function>::find(function)?.name.as_ptr())
    }
    fn cuFuncGetAttribute(value: *mut i32, which: u32, function: Handle) {
        driver()?;
        put(value, function_attribute(Object::<Function>::find(function)?, which)?)
    }
    fn cuFuncSetAttribute(function: Handle, which: u32, value: i32) {
        driver()?;
        set_function_attribute(Object::<Function>::find(function)?, which, value)
    }
    fn cuFuncSetCacheConfig(function: Handle, _config: u32) {
        driver()?;
        Object::<Function>::find(function).map(drop)
    }
    fn cuFuncSetSharedMemConfig(function: Handle, _config: u32) {
        driver()?;
        Object::<Function>::find(function).map(drop)
    }
    fn cuFuncIsLoaded(state: *mut u32, function: Handle) {
        let context = current()?;
        let function = Object::<Function>::find(function)?;
        let module = Object::<Module>::find(function.module.0)?;
        put(state, u32::from(module.is_loaded(context) || !has(Habit::LazyLoading)))
    }
    fn cuFuncLoad(function: Handle) {
        let context = current()?;
        Object::<Function>::find(function)?.load(context)
    }
}
