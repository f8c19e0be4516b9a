//! Kernel launches.

use std::ffi::c_void;

use crate::code::Code;
use crate::driver::driver;
use crate::export::{export, get};
use crate::graph::Node;
use crate::launch::{Launch, check};
use crate::module::Function;
use crate::object::{self, Handle, Object};
use crate::stream;
use crate::work;

/// cuda.h's `CUlaunchConfig`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Config {
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    stream: Handle,
    attributes: *mut c_void,
    attribute_count: u32,
}

/// # Safety
/// As [`Object::find`] for both handles. `parameters` is null, or what the function needs.
unsafe fn launch(
    function: Handle,
    grid: [u32; 3],
    block: [u32; 3],
    stream: Handle,
    parameters: *const *const c_void,
) -> Result<(), Code> {
    driver()?;
    // SAFETY: the caller's contract.
    let function = unsafe { Object::<Function>::find(function)? };
    check(grid, block)?;
    // SAFETY: the caller's contract.
    let stream = unsafe { stream::find(stream)? };
    let launch = Launch::new(function, stream.context, grid);
    work::submit(&Node::Kernel(launch), stream)?;
    let threads: u64 = grid.iter().chain(&block).map(|n| u64::from(*n)).product();
    // SAFETY: the caller's contract.
    unsafe { launch.write_results(threads, parameters) }
}

export! {
    fn cuLaunchKernel, cuLaunchKernel_ptsz [stream] (function: Handle, gx: u32, gy: u32, gz: u32, bx: u32, by: u32, bz: u32, _shared: u32, stream: Handle, parameters: *mut *mut c_void, _extra: *mut *mut c_void) {
        launch(function, [gx, gy, gz], [bx, by, bz], stream, parameters.cast())
    }
    fn cuLaunchCooperativeKernel, cuLaunchCooperativeKernel_ptsz [stream] (function: Handle, gx: u32, gy: u32, gz: u32, bx: u32, by: u32, bz: u32, _shared: u32, stream: Handle, _parameters: *mut *mut c_void) {
        launch(function, [gx, gy, gz], [bx, by, bz], stream, std::ptr::null())
    }
    fn cuLaunchKernelEx(config: *const Config, function: Handle, _parameters: *mut *mut c_void, _extra: *mut *mut c_void) {
        let config = get(config)?;
        launch(function, config.grid, config.block, config.stream, std::ptr::null())
    }
    fn cuLaunchKernelEx_ptsz(config: *const Config, function: Handle, _parameters: *mut *mut c_void, _extra: *mut *mut c_void) {
        let config = get(config)?;
        launch(function, config.grid, config.block, object::per_thread(config.stream), std::ptr::null())
    }
}
