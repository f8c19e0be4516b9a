//! One row per driver function that does more than pass: its name and arguments as in cuda.h, and
//! what is done around the call of the real function, here `driver`.

use core::ffi::{c_char, c_int};

use tranche_shim_runtime::library::Ours;

use crate::abi::{
    CUcontext, CUdevice, CUdeviceptr, CUdeviceptr_v1, CUmemPoolProps, CUmemoryPool, CUresult,
    CUstream, Function,
};
use crate::driver::real;
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
    fn cuCtxDestroy(context: CUcontext) |driver| memory::end_context(context, driver);
    fn cuCtxDestroy_v2(context: CUcontext) |driver| memory::end_context(context, driver);
    fn cuDevicePrimaryCtxRelease(device: CUdevice) |driver| memory::end_primary_context(device, driver);
    fn cuDevicePrimaryCtxRelease_v2(device: CUdevice) |driver| memory::end_primary_context(device, driver);
    fn cuDevicePrimaryCtxReset(device: CUdevice) |driver| memory::end_primary_context(device, driver);
    fn cuDevicePrimaryCtxReset_v2(device: CUdevice) |driver| memory::end_primary_context(device, driver);
    fn cuDeviceTotalMem(bytes: *mut u32, device: CUdevice) |driver| memory::tell_total(bytes, device, driver);
    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: CUdevice) |driver| memory::tell_total(bytes, device, driver);
    fn cuGetProcAddress(symbol: *const c_char, function: *mut Function, version: c_int, flags: u64)
        |driver| resolve::ours(symbol, function, core::ptr::null_mut(), driver);
    fn cuGetProcAddress_v2(symbol: *const c_char, function: *mut Function, version: c_int, flags: u64, status: *mut c_int)
        |driver| resolve::ours(symbol, function, status, driver);
    fn cuInit(flags: u32) |driver| process::initialise(driver);
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
}
