//! Kernel launches.

use std::ffi::c_void;

use crate::code::Code;
use crate::context::Context;
use crate::driver::driver;
use crate::export::{export, get};
use crate::graph::Node;
use crate::managed;
use crate::module::Function;
use crate::object::{self, Handle, Object};
use crate::stream::{self, Stream};

/// The largest block on every GPU here.
const MAX_THREADS: u64 = 1024;

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

/// Checks a launch's shape as the driver does.
pub fn check(grid: [u32; 3], block: [u32; 3]) -> Result<(), Code> {
    let threads: u64 = block.iter().map(|n| u64::from(*n)).product();
    if grid.contains(&0) || threads == 0 || threads > MAX_THREADS || block[2] > 64 {
        return Err(Code::INVALID_VALUE);
    }
    Ok(())
}

/// A kernel with all that a launch of it needs.
#[derive(Debug, Clone, Copy)]
pub struct Launch {
    function: &'static Object<Function>,
    nanos: u64,
}

impl Launch {
    pub fn new(function: &'static Object<Function>, context: &Context, grid: [u32; 3]) -> Self {
        Self {
            function,
            nanos: function.nanos(context, grid),
        }
    }

    /// Queues it in a stream, once its code and its local memory are there.
    pub fn run(self, stream: &Stream) -> Result<(), Code> {
        let context = stream.context;
        if self.function.alive() {
            self.function.load(context)?;
        }
        context.grow_local(self.function.local)?;
        if self.function.touches_managed {
            managed::touch_all(context);
        }
        stream.run(self.nanos)
    }
}

/// # Safety
/// As [`Object::find`] for both handles.
unsafe fn launch(
    function: Handle,
    grid: [u32; 3],
    block: [u32; 3],
    stream: Handle,
) -> Result<(), Code> {
    driver()?;
    // SAFETY: the caller's contract.
    let function = unsafe { Object::<Function>::find(function)? };
    check(grid, block)?;
    // SAFETY: the caller's contract.
    let stream = unsafe { stream::find(stream)? };
    let launch = Launch::new(function, stream.context, grid);
    if stream::captured(stream, |capture| capture.add(Node::Kernel(launch))).is_some() {
        return Ok(());
    }
    launch.run(stream)
}

export! {
    fn cuLaunchKernel, cuLaunchKernel_ptsz [stream] (function: Handle, gx: u32, gy: u32, gz: u32, bx: u32, by: u32, bz: u32, _shared: u32, stream: Handle, _parameters: *mut *mut c_void, _extra: *mut *mut c_void) {
        launch(function, [gx, gy, gz], [bx, by, bz], stream)
    }
    fn cuLaunchCooperativeKernel, cuLaunchCooperativeKernel_ptsz [stream] (function: Handle, gx: u32, gy: u32, gz: u32, bx: u32, by: u32, bz: u32, _shared: u32, stream: Handle, _parameters: *mut *mut c_void) {
        launch(function, [gx, gy, gz], [bx, by, bz], stream)
    }
    fn cuLaunchKernelEx(config: *const Config, function: Handle, _parameters: *mut *mut c_void, _extra: *mut *mut c_void) {
        let config = get(config)?;
        launch(function, config.grid, config.block, config.stream)
    }
    fn cuLaunchKernelEx_ptsz(config: *const Config, function: Handle, _parameters: *mut *mut c_void, _extra: *mut *mut c_void) {
        let config = get(config)?;
        launch(function, config.grid, config.block, object::per_thread(config.stream))
    }
}
