//! One row per driver function that does more than pass: its name and arguments as in cuda.h, and
//! what is done around the call of the real function, here `driver`.

use core::ffi::{c_char, c_int};

use tranche_shim_runtime::library::Ours;

use crate::abi::{
    CUcontext, CUdevice, CUdeviceptr, CUdeviceptr_v1, CUfunction, CUlaunchConfig, CUlaunchParams,
    CUmemPoolProps, CUmemoryPool, CUresult, CUstream, Function,
};
use crate::driver::real;
use crate::launch::{self, Kernel, own};
use crate::memory::{self, Place};
use crate::{process, resolve};

macro_rules! hooks {
    ($(fn $name:ident($($argument:ident: $type:ty),*) |$driver:ident| $body:expr;)*) => {
        $(
            #[unsafe(no_mangle)]
            pub unsafe extern "C" fn $name($($argument: $type),*) -> CUresult {
                let real = real!($name: fn($($type),*));
                // SAFETY: the arguments are the caller's, who owes the real function what it owes
                // this one: valid pointers, where cuda.h does not allow null.
                let $driver = || unsafe { real($($argument),*) };
                $body
            }
        )*

        /// The functions above, in the order of their indices: that of their names.
        pub static HANDLED: &[Ours] = &[$(Ours($name as *const ())),*];

        /// The order of the table above is that of the generated list.
        const _: () = {
            let mut nth = $crate::driver::PASSING;
            $(
                assert!($crate::driver::index::$name == nth, "rows must be sorted, as symbols.txt is");
                nth += 1;
            )*
            assert!(nth == $crate::driver::SYMBOLS, "a symbol has a class but no row");
        };
    };
}

hooks! {
    fn cuCtxDestroy(context: CUcontext) |driver| memory::end_context(context, || { launch::forget_events(Some(context)); driver() });
    fn cuCtxDestroy_v2(context: CUcontext) |driver| memory::end_context(context, || { launch::forget_events(Some(context)); driver() });
    fn cuDevicePrimaryCtxRelease(device: CUdevice) |driver| memory::end_primary_context(device, || { launch::forget_events(None); driver() });
    fn cuDevicePrimaryCtxRelease_v2(device: CUdevice) |driver| memory::end_primary_context(device, || { launch::forget_events(None); driver() });
    fn cuDevicePrimaryCtxReset(device: CUdevice) |driver| memory::end_primary_context(device, || { launch::forget_events(None); driver() });
    fn cuDevicePrimaryCtxReset_v2(device: CUdevice) |driver| memory::end_primary_context(device, || { launch::forget_events(None); driver() });
    fn cuDeviceTotalMem(bytes: *mut u32, device: CUdevice) |driver| memory::tell_total(bytes, device, driver);
    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: CUdevice) |driver| memory::tell_total(bytes, device, driver);
    fn cuGetProcAddress(symbol: *const c_char, function: *mut Function, version: c_int, flags: u64)
        |driver| resolve::ours(symbol, function, core::ptr::null_mut(), driver);
    fn cuGetProcAddress_v2(symbol: *const c_char, function: *mut Function, version: c_int, flags: u64, status: *mut c_int)
        |driver| resolve::ours(symbol, function, status, driver);
    fn cuGraphExecDestroy(graph: CUfunction) |driver| launch::forget_graph(graph, driver);
    fn cuGraphExecUpdate(graph: CUfunction, from: usize, node: *mut usize, result: *mut u32) |driver| launch::forget_graph(graph, driver);
    fn cuGraphExecUpdate_v2(graph: CUfunction, from: usize, result: *mut u32) |driver| launch::forget_graph(graph, driver);
    fn cuGraphLaunch(graph: CUfunction, stream: CUstream) |driver| launch::launch(Kernel::of(graph), stream, driver);
    fn cuGraphLaunch_ptsz(graph: CUfunction, stream: CUstream) |driver| launch::launch(Kernel::of(graph), own(stream), driver);
    fn cuInit(flags: u32) |driver| process::initialise(driver);
    fn cuKernelGetFunction(function: *mut CUfunction, kernel: CUfunction) |driver| launch::find_function(function, kernel, driver);
    fn cuLaunch(function: CUfunction) |driver| launch::launch(Kernel::of(function), 0, driver);
    fn cuLaunchCooperativeKernel(function: CUfunction, gx: u32, gy: u32, gz: u32, bx: u32, by: u32, bz: u32, shared: u32, stream: CUstream, parameters: *mut Function)
        |driver| launch::launch(Kernel { handle: function, grid: [gx, gy, gz], block: [bx, by, bz] }, stream, driver);
    fn cuLaunchCooperativeKernelMultiDevice(list: *mut CUlaunchParams, count: u32, flags: u32)
        |driver| launch::launch_on_each(list, count, driver);
    fn cuLaunchCooperativeKernel_ptsz(function: CUfunction, gx: u32, gy: u32, gz: u32, bx: u32, by: u32, bz: u32, shared: u32, stream: CUstream, parameters: *mut Function)
        |driver| launch::launch(Kernel { handle: function, grid: [gx, gy, gz], block: [bx, by, bz] }, own(stream), driver);
    fn cuLaunchGrid(function: CUfunction, width: i32, height: i32)
        |driver| launch::launch(Kernel { handle: function, grid: [width.cast_unsigned(), height.cast_unsigned(), 1], block: [0; 3] }, 0, driver);
    fn cuLaunchGridAsync(function: CUfunction, width: i32, height: i32, stream: CUstream)
        |driver| launch::launch(Kernel { handle: function, grid: [width.cast_unsigned(), height.cast_unsigned(), 1], block: [0; 3] }, stream, driver);
    fn cuLaunchKernel(function: CUfunction, gx: u32, gy: u32, gz: u32, bx: u32, by: u32, bz: u32, shared: u32, stream: CUstream, parameters: *mut Function, extra: *mut Function)
        |driver| launch::launch(Kernel { handle: function, grid: [gx, gy, gz], block: [bx, by, bz] }, stream, driver);
    fn cuLaunchKernelEx(config: *const CUlaunchConfig, function: CUfunction, parameters: *mut Function, extra: *mut Function)
        |driver| launch::launch_config(config, function, launch::legacy, driver);
    fn cuLaunchKernelEx_ptsz(config: *const CUlaunchConfig, function: CUfunction, parameters: *mut Function, extra: *mut Function)
        |driver| launch::launch_config(config, function, own, driver);
    fn cuLaunchKernel_ptsz(function: CUfunction, gx: u32, gy: u32, gz: u32, bx: u32, by: u32, bz: u32, shared: u32, stream: CUstream, parameters: *mut Function, extra: *mut Function)
        |driver| launch::launch(Kernel { handle: function, grid: [gx, gy, gz], block: [bx, by, bz] }, own(stream), driver);
    fn cuLibraryGetKernel(kernel: *mut CUfunction, library: usize, name: *const c_char) |driver| launch::find_kernel(kernel, name, driver);
    fn cuMemAlloc(pointer: *mut CUdeviceptr_v1, bytes: u32)
        |driver| memory::allocate(Place::Current, u64::from(bytes), pointer, driver);
    fn cuMemAllocAsync(pointer: *mut CUdeviceptr, bytes: usize, stream: CUstream)
        |driver| memory::allocate(Place::Stream(stream), bytes as u64, pointer, driver);
    fn cuMemAllocAsync_ptsz(pointer: *mut CUdeviceptr, bytes: usize, stream: CUstream)
        |driver| memory::allocate(Place::Stream(stream), bytes as u64, pointer, driver);
    fn cuMemAllocFromPoolAsync(pointer: *mut CUdeviceptr, bytes: usize, pool: CUmemoryPool, stream: CUstream)
        |driver| memory::allocate(Place::Pool(pool, stream), bytes as u64, pointer, driver);
    fn cuMemAllocFromPoolAsync_ptsz(pointer: *mut CUdeviceptr, bytes: usize, pool: CUmemoryPool, stream: CUstream)
        |driver| memory::allocate(Place::Pool(pool, stream), bytes as u64, pointer, driver);
    fn cuMemAllocManaged(pointer: *mut CUdeviceptr, bytes: usize, flags: u32)
        |driver| memory::allocate(Place::Current, bytes as u64, pointer, driver);
    fn cuMemAllocPitch(pointer: *mut CUdeviceptr_v1, pitch: *mut u32, width: u32, height: u32, element: u32)
        |driver| memory::allocate_pitched(pointer, pitch, (u64::from(width), u64::from(height)), driver,
            // SAFETY: frees what the driver has just allocated and nobody has seen.
            |pointer| unsafe { real!(cuMemFree: fn(CUdeviceptr_v1))(pointer) });
    fn cuMemAllocPitch_v2(pointer: *mut CUdeviceptr, pitch: *mut usize, width: usize, height: usize, element: u32)
        |driver| memory::allocate_pitched(pointer, pitch, (width as u64, height as u64), driver,
            // SAFETY: frees what the driver has just allocated and nobody has seen.
            |pointer| unsafe { real!(cuMemFree_v2: fn(CUdeviceptr))(pointer) });
    fn cuMemAlloc_v2(pointer: *mut CUdeviceptr, bytes: usize)
        |driver| memory::allocate(Place::Current, bytes as u64, pointer, driver);
    fn cuMemFree(pointer: CUdeviceptr_v1) |driver| memory::free(u64::from(pointer), driver);
    fn cuMemFreeAsync(pointer: CUdeviceptr, stream: CUstream) |driver| memory::free(pointer, driver);
    fn cuMemFreeAsync_ptsz(pointer: CUdeviceptr, stream: CUstream) |driver| memory::free(pointer, driver);
    fn cuMemFree_v2(pointer: CUdeviceptr) |driver| memory::free(pointer, driver);
    fn cuMemGetInfo(free: *mut u32, total: *mut u32) |driver| memory::tell(free, total, driver);
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) |driver| memory::tell(free, total, driver);
    fn cuMemPoolCreate(pool: *mut CUmemoryPool, properties: *const CUmemPoolProps)
        |driver| memory::make_pool(pool, properties, driver);
    fn cuMemPoolDestroy(pool: CUmemoryPool) |driver| memory::end_pool(pool, driver);
    fn cuModuleGetFunction(function: *mut CUfunction, module: usize, name: *const c_char) |driver| launch::find_kernel(function, name, driver);
    fn cuStreamBeginCapture(stream: CUstream) |driver| launch::begin_capture(driver);
    fn cuStreamBeginCaptureToGraph(stream: CUstream, graph: usize, dependencies: *const usize, edges: *const u8, count: usize, mode: u32)
        |driver| launch::begin_capture(driver);
    fn cuStreamBeginCaptureToGraph_ptsz(stream: CUstream, graph: usize, dependencies: *const usize, edges: *const u8, count: usize, mode: u32)
        |driver| launch::begin_capture(driver);
    fn cuStreamBeginCapture_ptsz(stream: CUstream) |driver| launch::begin_capture(driver);
    fn cuStreamBeginCapture_v2(stream: CUstream, mode: u32) |driver| launch::begin_capture(driver);
    fn cuStreamBeginCapture_v2_ptsz(stream: CUstream, mode: u32) |driver| launch::begin_capture(driver);
    fn cuStreamEndCapture(stream: CUstream, graph: *mut usize) |driver| launch::end_capture(driver);
    fn cuStreamEndCapture_ptsz(stream: CUstream, graph: *mut usize) |driver| launch::end_capture(driver);
}
