//! One row per driver function that does more than forward: its name and arguments as in cuda.h, and
//! the code around the call of the real function, which is `driver` here; or the kernel that it
//! launches, and the stream.

use core::ffi::{c_char, c_int, c_void};

use crate::abi::{
    ArrayShape2, ArrayShape3, CUDA_KERNEL_NODE_PARAMS, CUDA_MEM_ALLOC_NODE_PARAMS, CUarray,
    CUarrayMapInfo, CUcontext, CUdevice, CUdeviceptr, CUdeviceptr_v1, CUfunction, CUgraph,
    CUgraphExec, CUgraphNodeParams, CUipcMemHandle, CUlaunchConfig, CUlaunchParams,
    CUmemAllocationProp, CUmemGenericAllocationHandle, CUmemLocation, CUmemPoolProps, CUmemoryPool,
    CUresult, CUstream, Function,
};
use crate::driver::{Call, real};
use crate::kernel::Kernel;
use crate::launch;
use crate::managed;
use crate::memory::{Asked, Rows};
use crate::module::{self, NO_OPTIONS, Within};
use crate::settle::{settle_after, settle_pool_after};
use crate::stream::{Stream, own};
use crate::{
    array, capture, context, dma_buf, graph, ipc, lookup, memory, multicast, pool, process,
    resolve, vmm,
};

macro_rules! hook {
    ($name:ident $arguments:tt |$driver:ident| $body:expr) => {
        hook! { #[unsafe(no_mangle)] pub $name $arguments calls $name |$driver| $body }
    };
    // Most launches are paid from a batch. Then the code jumps to the driver's function and leaves the
    // arguments where they are.
    ($name:ident($($argument:ident: $type:ty),*) launches($kernel:expr, $stream:expr)) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> CUresult {
            hook! {
                #[cold] #[inline(never)] unpaid($($argument: $type),*) calls $name
                    |driver| launch::launch($kernel, $stream, driver)
            }
            let kernel: Kernel = $kernel;
            let next: unsafe extern "C" fn($($type),*) -> CUresult =
                if kernel.is_paid() { real!($name: fn($($type),*)) } else { unpaid };
            // SAFETY: as below.
            unsafe { next($($argument),*) }
        }
    };
    ($(#[$attribute:meta])* $visibility:vis $hook:ident($($argument:ident: $type:ty),*) calls $name:ident
        |$driver:ident| $body:expr) => {
        $(#[$attribute])*
        $visibility unsafe extern "C" fn $hook($($argument: $type),*) -> CUresult {
            let real = real!($name: fn($($type),*));
            // SAFETY: the arguments are the caller's, who owes the real function what it owes this
            // one: valid pointers, where cuda.h does not allow null.
            let driver = || unsafe { real($($argument),*) };
            let $driver = Call::of(&driver);
            $body
        }
    };
}

macro_rules! hooks {
    ($(fn $name:ident $arguments:tt $(launches $launch:tt)? $(|$driver:ident| $body:expr)?;)*) => {
        $(hook! { $name $arguments $(launches $launch)? $(|$driver| $body)? })*

        /// The rows are those of the generated list of addresses, in its order.
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
    fn cuArray3DCreate(array: *mut CUarray, shape: *const ArrayShape3<u32>)
        |driver| array::make(array, shape3(shape), driver);
    fn cuArray3DCreate_v2(array: *mut CUarray, shape: *const ArrayShape3<usize>)
        |driver| array::make(array, shape3(shape), driver);
    fn cuArrayCreate(array: *mut CUarray, shape: *const ArrayShape2<u32>)
        |driver| array::make(array, shape2(shape), driver);
    fn cuArrayCreate_v2(array: *mut CUarray, shape: *const ArrayShape2<usize>)
        |driver| array::make(array, shape2(shape), driver);
    fn cuArrayDestroy(array: CUarray) |driver| array::end(array, driver);
    fn cuCheckpointProcessRestore(process: c_int, arguments: *const [u64; 8]) |driver| context::restore(arguments, driver);
    fn cuCtxCreate(context: *mut CUcontext, flags: u32, device: CUdevice)
        |driver| context::make(context, device, driver);
    fn cuCtxCreate_v2(context: *mut CUcontext, flags: u32, device: CUdevice)
        |driver| context::make(context, device, driver);
    fn cuCtxCreate_v3(context: *mut CUcontext, affinity: *mut c_void, count: c_int, flags: u32, device: CUdevice)
        |driver| context::make(context, device, driver);
    fn cuCtxCreate_v4(context: *mut CUcontext, parameters: *mut c_void, flags: u32, device: CUdevice)
        |driver| context::make(context, device, driver);
    fn cuCtxDestroy(context: CUcontext) |driver| context::end(context, driver);
    fn cuCtxDestroy_v2(context: CUcontext) |driver| context::end(context, driver);
    fn cuCtxSetLimit(which: u32, value: usize) |driver| context::set_limit(which, value, driver);
    fn cuCtxSynchronize() |driver| settle_after(driver);
    fn cuCtxSynchronize_v2(context: CUcontext) |driver| settle_after(driver);
    fn cuDeviceGraphMemTrim(device: CUdevice) |driver| settle_after(driver);
    fn cuDevicePrimaryCtxRelease(device: CUdevice) |driver| context::end_primary(device, driver);
    fn cuDevicePrimaryCtxRelease_v2(device: CUdevice) |driver| context::end_primary(device, driver);
    fn cuDevicePrimaryCtxReset(device: CUdevice) |driver| context::end_primary(device, driver);
    fn cuDevicePrimaryCtxReset_v2(device: CUdevice) |driver| context::end_primary(device, driver);
    fn cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice)
        |driver| context::retain_primary(context, device, driver);
    fn cuDeviceSetMemPool(device: CUdevice, pool: CUmemoryPool) |driver| pool::switch(driver);
    fn cuDeviceTotalMem(bytes: *mut u32, device: CUdevice) |driver| memory::correct_total(bytes, device, driver);
    fn cuDeviceTotalMem_v2(bytes: *mut usize, device: CUdevice) |driver| memory::correct_total(bytes, device, driver);
    fn cuEventSynchronize(event: usize) |driver| settle_after(driver);
    fn cuGLCtxCreate(context: *mut CUcontext, flags: u32, device: CUdevice)
        |driver| context::make(context, device, driver);
    fn cuGLCtxCreate_v2(context: *mut CUcontext, flags: u32, device: CUdevice)
        |driver| context::make(context, device, driver);
    fn cuGetProcAddress(symbol: *const c_char, function: *mut Function, version: c_int, flags: u64)
        |driver| resolve::ours(symbol, function, core::ptr::null_mut(), driver);
    fn cuGetProcAddress_v2(symbol: *const c_char, function: *mut Function, version: c_int, flags: u64, status: *mut c_int)
        |driver| resolve::ours(symbol, function, status, driver);
    fn cuGraphAddChildGraphNode(node: *mut usize, graph: CUgraph, dependencies: *const usize, count: usize, child: CUgraph)
        |driver| graph::add_child(graph, child, driver);
    fn cuGraphAddKernelNode(node: *mut usize, graph: CUgraph, dependencies: *const usize, count: usize, parameters: *const CUDA_KERNEL_NODE_PARAMS)
        |driver| graph::add_function_of(Some(graph), parameters, driver);
    fn cuGraphAddKernelNode_v2(node: *mut usize, graph: CUgraph, dependencies: *const usize, count: usize, parameters: *const CUDA_KERNEL_NODE_PARAMS)
        |driver| graph::add_kernel(Some(graph), parameters, driver);
    fn cuGraphAddMemAllocNode(node: *mut usize, graph: CUgraph, dependencies: *const usize, count: usize, parameters: *mut CUDA_MEM_ALLOC_NODE_PARAMS)
        |driver| graph::add_allocation(graph, parameters, driver);
    fn cuGraphAddNode(node: *mut usize, graph: CUgraph, dependencies: *const usize, count: usize, parameters: *mut CUgraphNodeParams)
        |driver| graph::add(graph, parameters, driver);
    fn cuGraphAddNode_v2(node: *mut usize, graph: CUgraph, dependencies: *const usize, edges: *const c_void, count: usize, parameters: *mut CUgraphNodeParams)
        |driver| graph::add(graph, parameters, driver);
    fn cuGraphAddNode_v3(node: *mut usize, graph: CUgraph, dependencies: *const usize, edges: *const c_void, count: usize, parameters: *mut CUgraphNodeParams)
        |driver| graph::add(graph, parameters, driver);
    fn cuGraphClone(copy: *mut CUgraph, graph: CUgraph) |driver| graph::copy(copy, graph, driver);
    fn cuGraphDestroy(graph: CUgraph) |driver| graph::end(graph, driver);
    fn cuGraphExecChildGraphNodeSetParams(graph: CUgraphExec, node: usize, child: CUgraph) |driver| launch::change_graph(graph, driver);
    fn cuGraphExecDestroy(graph: CUgraphExec) |driver| launch::end_graph(graph, Call::of(&|| graph::end_executable(graph, driver)));
    fn cuGraphExecKernelNodeSetParams(graph: CUgraphExec, node: usize, parameters: *const CUDA_KERNEL_NODE_PARAMS)
        |driver| launch::change_graph(graph, Call::of(&|| graph::add_function_of(None, parameters, driver)));
    fn cuGraphExecKernelNodeSetParams_v2(graph: CUgraphExec, node: usize, parameters: *const CUDA_KERNEL_NODE_PARAMS)
        |driver| launch::change_graph(graph, Call::of(&|| graph::add_kernel(None, parameters, driver)));
    fn cuGraphExecNodeSetParams(graph: CUgraphExec, node: usize, parameters: *mut CUgraphNodeParams)
        |driver| launch::change_graph(graph, Call::of(&|| graph::set(parameters, driver)));
    fn cuGraphExecUpdate(graph: CUfunction, from: usize, node: *mut usize, result: *mut u32) |driver| launch::update_graph(graph, from, driver);
    fn cuGraphExecUpdate_v2(graph: CUfunction, from: usize, result: *mut u32) |driver| launch::update_graph(graph, from, driver);
    fn cuGraphInstantiate(executable: *mut CUgraphExec, graph: CUgraph, node: *mut usize, log: *mut c_char, size: usize)
        |driver| graph::instantiate(executable, graph, driver);
    fn cuGraphInstantiateWithFlags(executable: *mut CUgraphExec, graph: CUgraph, flags: u64)
        |driver| graph::instantiate(executable, graph, driver);
    fn cuGraphInstantiateWithParams(executable: *mut CUgraphExec, graph: CUgraph, parameters: *mut c_void)
        |driver| graph::instantiate(executable, graph, driver);
    fn cuGraphInstantiateWithParams_ptsz(executable: *mut CUgraphExec, graph: CUgraph, parameters: *mut c_void)
        |driver| graph::instantiate(executable, graph, driver);
    fn cuGraphInstantiate_v2(executable: *mut CUgraphExec, graph: CUgraph, node: *mut usize, log: *mut c_char, size: usize)
        |driver| graph::instantiate(executable, graph, driver);
    fn cuGraphKernelNodeSetParams(node: usize, parameters: *const CUDA_KERNEL_NODE_PARAMS)
        |driver| graph::add_function_of(None, parameters, driver);
    fn cuGraphKernelNodeSetParams_v2(node: usize, parameters: *const CUDA_KERNEL_NODE_PARAMS)
        |driver| graph::add_kernel(None, parameters, driver);
    fn cuGraphLaunch(graph: CUfunction, stream: CUstream) launches(Kernel::graph(graph), stream);
    fn cuGraphLaunch_ptsz(graph: CUfunction, stream: CUstream) launches(Kernel::graph(graph), own(stream));
    fn cuGraphNodeSetEnabled(graph: CUgraphExec, node: usize, enabled: u32) |driver| launch::change_graph(graph, driver);
    fn cuGraphNodeSetParams(node: usize, parameters: *mut CUgraphNodeParams) |driver| graph::set(parameters, driver);
    fn cuGraphNodeSetParams_v2(node: usize, parameters: *mut CUgraphNodeParams) |driver| graph::set(parameters, driver);
    fn cuGreenCtxCreate(context: *mut usize, description: usize, device: CUdevice, flags: u32)
        |driver| context::retain_primary(core::ptr::null_mut(), device, driver);
    fn cuGreenCtxDestroy(context: usize) |driver| context::end_green(context, driver);
    fn cuInit(flags: u32) |driver| process::initialise(driver);
    fn cuIpcCloseMemHandle(pointer: CUdeviceptr) |driver| ipc::close(pointer, driver);
    fn cuIpcGetMemHandle(handle: *mut CUipcMemHandle, pointer: CUdeviceptr) |driver| managed::export(pointer, driver);
    fn cuIpcOpenMemHandle(pointer: *mut CUdeviceptr, handle: CUipcMemHandle, flags: u32) |driver| ipc::open(pointer, driver);
    fn cuIpcOpenMemHandle_v2(pointer: *mut CUdeviceptr, handle: CUipcMemHandle, flags: u32) |driver| ipc::open(pointer, driver);
    fn cuKernelGetFunction(function: *mut CUfunction, kernel: CUfunction) |driver| lookup::find_function(function, kernel, driver);
    fn cuLaunch(function: CUfunction) launches(Kernel::of(function), 0);
    fn cuLaunchCooperativeKernel(function: CUfunction, gx: u32, gy: u32, gz: u32, bx: u32, by: u32, bz: u32, shared: u32, stream: CUstream, parameters: *mut Function)
        launches(Kernel { handle: function, grid: [gx, gy, gz], block: [bx, by, bz] }, stream);
    fn cuLaunchCooperativeKernelMultiDevice(list: *mut CUlaunchParams, count: u32, flags: u32)
        |driver| launch::launch_on_each(list, count, driver);
    fn cuLaunchCooperativeKernel_ptsz(function: CUfunction, gx: u32, gy: u32, gz: u32, bx: u32, by: u32, bz: u32, shared: u32, stream: CUstream, parameters: *mut Function)
        launches(Kernel { handle: function, grid: [gx, gy, gz], block: [bx, by, bz] }, own(stream));
    fn cuLaunchGrid(function: CUfunction, width: i32, height: i32)
        launches(Kernel { handle: function, grid: [width.cast_unsigned(), height.cast_unsigned(), 1], block: [0; 3] }, 0);
    fn cuLaunchGridAsync(function: CUfunction, width: i32, height: i32, stream: CUstream)
        launches(Kernel { handle: function, grid: [width.cast_unsigned(), height.cast_unsigned(), 1], block: [0; 3] }, stream);
    fn cuLaunchKernel(function: CUfunction, gx: u32, gy: u32, gz: u32, bx: u32, by: u32, bz: u32, shared: u32, stream: CUstream, parameters: *mut Function, extra: *mut Function)
        launches(Kernel { handle: function, grid: [gx, gy, gz], block: [bx, by, bz] }, stream);
    fn cuLaunchKernelEx(config: *const CUlaunchConfig, function: CUfunction, parameters: *mut Function, extra: *mut Function)
        launches(Kernel::configured(config, function), launch::configured_stream(config));
    fn cuLaunchKernelEx_ptsz(config: *const CUlaunchConfig, function: CUfunction, parameters: *mut Function, extra: *mut Function)
        launches(Kernel::configured(config, function), own(launch::configured_stream(config)));
    fn cuLaunchKernel_ptsz(function: CUfunction, gx: u32, gy: u32, gz: u32, bx: u32, by: u32, bz: u32, shared: u32, stream: CUstream, parameters: *mut Function, extra: *mut Function)
        launches(Kernel { handle: function, grid: [gx, gy, gz], block: [bx, by, bz] }, own(stream));
    fn cuLibraryEnumerateKernels(kernels: *mut CUfunction, count: u32, library: usize) |driver| lookup::list_kernels(kernels, count, driver);
    fn cuLibraryGetKernel(kernel: *mut CUfunction, library: usize, name: *const c_char) |driver| lookup::find_library_kernel(kernel, name, driver);
    fn cuLibraryLoadData(library: *mut usize, image: *const u8, jit: *mut c_void, jit_values: *mut c_void, jit_count: u32, options: *mut c_void, values: *mut c_void, count: u32)
        |driver| module::load(library, image, Within::Process, (jit.cast(), jit_count), driver);
    fn cuLibraryLoadFromFile(library: *mut usize, path: *const c_char, jit: *mut c_void, jit_values: *mut c_void, jit_count: u32, options: *mut c_void, values: *mut c_void, count: u32)
        |driver| module::load_file(library, path, Within::Process, (jit.cast(), jit_count), driver);
    fn cuLibraryUnload(library: usize) |driver| module::unload(library, driver);
    fn cuMemAlloc(pointer: *mut CUdeviceptr_v1, bytes: u32)
        |driver| memory::allocate(Asked::Device, u64::from(bytes), pointer, driver);
    fn cuMemAllocAsync(pointer: *mut CUdeviceptr, bytes: usize, stream: CUstream)
        |driver| pool::allocate(None, Stream::legacy(stream), bytes, pointer, driver);
    fn cuMemAllocAsync_ptsz(pointer: *mut CUdeviceptr, bytes: usize, stream: CUstream)
        |driver| pool::allocate(None, Stream::per_thread(stream), bytes, pointer, driver);
    fn cuMemAllocFromPoolAsync(pointer: *mut CUdeviceptr, bytes: usize, pool: CUmemoryPool, stream: CUstream)
        |driver| pool::allocate(Some(pool), Stream::legacy(stream), bytes, pointer, driver);
    fn cuMemAllocFromPoolAsync_ptsz(pointer: *mut CUdeviceptr, bytes: usize, pool: CUmemoryPool, stream: CUstream)
        |driver| pool::allocate(Some(pool), Stream::per_thread(stream), bytes, pointer, driver);
    fn cuMemAllocManaged(pointer: *mut CUdeviceptr, bytes: usize, flags: u32)
        |driver| memory::allocate(Asked::Managed, bytes as u64, pointer, driver);
    fn cuMemAllocPitch(pointer: *mut CUdeviceptr_v1, pitch: *mut u32, width: u32, height: u32, element: u32)
        |driver| memory::allocate_pitched(pointer, pitch, Rows { width: u64::from(width), height: u64::from(height), element }, driver,
            // SAFETY: frees what the driver has just allocated and nothing else uses.
            |pointer| unsafe { real!(cuMemFree: fn(CUdeviceptr_v1))(pointer) });
    fn cuMemAllocPitch_v2(pointer: *mut CUdeviceptr, pitch: *mut usize, width: usize, height: usize, element: u32)
        |driver| memory::allocate_pitched(pointer, pitch, Rows { width: width as u64, height: height as u64, element }, driver,
            // SAFETY: frees what the driver has just allocated and nothing else uses.
            |pointer| unsafe { real!(cuMemFree_v2: fn(CUdeviceptr))(pointer) });
    fn cuMemAlloc_v2(pointer: *mut CUdeviceptr, bytes: usize)
        |driver| memory::allocate(Asked::Device, bytes as u64, pointer, driver);
    fn cuMemCreate(handle: *mut CUmemGenericAllocationHandle, bytes: usize, properties: *const CUmemAllocationProp, flags: u64)
        |driver| vmm::create(handle, bytes, properties, driver);
    fn cuMemExportToShareableHandle(token: *mut c_void, handle: CUmemGenericAllocationHandle, kind: u32, flags: u64)
        |driver| vmm::export(token.cast(), kind, handle, driver);
    fn cuMemFree(pointer: CUdeviceptr_v1) |driver| memory::free_as(u64::from(pointer), false, driver);
    fn cuMemFreeAsync(pointer: CUdeviceptr, stream: CUstream) |driver| memory::free_as(pointer, true, driver);
    fn cuMemFreeAsync_ptsz(pointer: CUdeviceptr, stream: CUstream) |driver| memory::free_as(pointer, true, driver);
    fn cuMemFree_v2(pointer: CUdeviceptr) |driver| memory::free(pointer, driver);
    fn cuMemGetDefaultMemPool(pool: *mut CUmemoryPool, location: *mut CUmemLocation, kind: u32)
        |driver| pool::get(pool, location, driver);
    fn cuMemGetHandleForAddressRange(handle: *mut c_void, start: CUdeviceptr, bytes: usize, kind: u32, flags: u64)
        |driver| dma_buf::make(start, bytes, driver);
    fn cuMemGetInfo(free: *mut u32, total: *mut u32) |driver| memory::correct_info(free, total, driver);
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) |driver| memory::correct_info(free, total, driver);
    fn cuMemGetMemPool(pool: *mut CUmemoryPool, location: *mut CUmemLocation, kind: u32)
        |driver| pool::get(pool, location, driver);
    fn cuMemImportFromShareableHandle(handle: *mut CUmemGenericAllocationHandle, token: usize, kind: u32)
        |driver| vmm::import(handle, token, kind, driver);
    fn cuMemMap(address: CUdeviceptr, bytes: usize, offset: usize, handle: CUmemGenericAllocationHandle, flags: u64)
        |driver| vmm::map(address, bytes, handle, driver);
    fn cuMemMapArrayAsync(list: *mut CUarrayMapInfo, count: u32, stream: CUstream)
        |driver| vmm::map_tiles(list, count, driver);
    fn cuMemMapArrayAsync_ptsz(list: *mut CUarrayMapInfo, count: u32, stream: CUstream)
        |driver| vmm::map_tiles(list, count, driver);
    fn cuMemPoolCreate(pool: *mut CUmemoryPool, properties: *const CUmemPoolProps)
        |driver| pool::make(pool, properties, driver);
    fn cuMemPoolDestroy(pool: CUmemoryPool) |driver| pool::end(pool, driver);
    fn cuMemPoolExportToShareableHandle(descriptor: *mut c_void, pool: CUmemoryPool, kind: u32, flags: u64)
        |driver| pool::export(descriptor.cast(), pool, kind, driver);
    fn cuMemPoolImportPointer(pointer: *mut CUdeviceptr, pool: CUmemoryPool, data: *const c_void)
        |driver| ipc::import_from_pool(pointer, driver);
    fn cuMemPoolSetAttribute(pool: CUmemoryPool, attribute: u32, value: *mut c_void)
        |driver| settle_pool_after(pool, driver);
    fn cuMemPoolTrimTo(pool: CUmemoryPool, bytes: usize) |driver| settle_pool_after(pool, driver);
    fn cuMemRelease(handle: CUmemGenericAllocationHandle) |driver| vmm::release(handle, driver);
    fn cuMemRetainAllocationHandle(handle: *mut CUmemGenericAllocationHandle, address: *mut c_void)
        |driver| vmm::retain(handle, address as CUdeviceptr, driver);
    fn cuMemSetMemPool(location: *mut CUmemLocation, kind: u32, pool: CUmemoryPool)
        |driver| pool::switch(driver);
    fn cuMemUnmap(address: CUdeviceptr, bytes: usize) |driver| vmm::unmap(address, bytes, driver);
    fn cuMipmappedArrayCreate(array: *mut CUarray, shape: *const ArrayShape3<usize>, levels: u32)
        |driver| array::make(array, mipmap(shape, levels), driver);
    fn cuMipmappedArrayDestroy(array: CUarray) |driver| array::end(array, driver);
    fn cuModuleGetFunction(function: *mut CUfunction, module: usize, name: *const c_char) |driver| lookup::find_kernel(function, name, driver);
    fn cuModuleLoad(module: *mut usize, path: *const c_char) |driver| module::load_file(module, path, Within::Context, NO_OPTIONS, driver);
    fn cuModuleLoadData(module: *mut usize, image: *const u8) |driver| module::load(module, image, Within::Context, NO_OPTIONS, driver);
    fn cuModuleLoadDataEx(module: *mut usize, image: *const u8, count: u32, options: *mut c_void, values: *mut c_void)
        |driver| module::load(module, image, Within::Context, (options.cast(), count), driver);
    fn cuModuleLoadFatBinary(module: *mut usize, image: *const u8) |driver| module::load(module, image, Within::Context, NO_OPTIONS, driver);
    fn cuModuleUnload(module: usize) |driver| module::unload(module, driver);
    fn cuMulticastBindAddr(object: CUmemGenericAllocationHandle, offset: usize, address: CUdeviceptr, bytes: usize, flags: u64)
        |driver| multicast::bind_address(object, offset, address, driver);
    fn cuMulticastBindAddr_v2(object: CUmemGenericAllocationHandle, device: CUdevice, offset: usize, address: CUdeviceptr, bytes: usize, flags: u64)
        |driver| multicast::bind_address(object, offset, address, driver);
    fn cuMulticastBindMem(object: CUmemGenericAllocationHandle, offset: usize, memory: CUmemGenericAllocationHandle, from: usize, bytes: usize, flags: u64)
        |driver| multicast::bind(object, offset, memory, driver);
    fn cuMulticastBindMem_v2(object: CUmemGenericAllocationHandle, device: CUdevice, offset: usize, memory: CUmemGenericAllocationHandle, from: usize, bytes: usize, flags: u64)
        |driver| multicast::bind(object, offset, memory, driver);
    fn cuMulticastCreate(object: *mut CUmemGenericAllocationHandle, properties: *const c_void)
        |driver| multicast::create(object, driver);
    fn cuMulticastUnbind(object: CUmemGenericAllocationHandle, device: CUdevice, offset: usize, bytes: usize)
        |driver| multicast::unbind(object, device, offset, driver);
    fn cuPointerGetAttribute(value: *mut c_void, attribute: u32, pointer: CUdeviceptr)
        |driver| managed::correct(value, attribute, pointer, driver);
    fn cuPointerGetAttributes(count: u32, attributes: *const u32, values: *const *mut c_void, pointer: CUdeviceptr)
        |driver| managed::correct_each(count, attributes, values, pointer, driver);
    fn cuStreamBeginCapture(stream: CUstream) |driver| capture::begin(Stream::legacy(stream), driver);
    fn cuStreamBeginCaptureToGraph(stream: CUstream, graph: usize, dependencies: *const usize, edges: *const u8, count: usize, mode: u32)
        |driver| capture::begin(Stream::legacy(stream), driver);
    fn cuStreamBeginCaptureToGraph_ptsz(stream: CUstream, graph: usize, dependencies: *const usize, edges: *const u8, count: usize, mode: u32)
        |driver| capture::begin(Stream::per_thread(stream), driver);
    fn cuStreamBeginCapture_ptsz(stream: CUstream) |driver| capture::begin(Stream::per_thread(stream), driver);
    fn cuStreamBeginCapture_v2(stream: CUstream, mode: u32) |driver| capture::begin(Stream::legacy(stream), driver);
    fn cuStreamBeginCapture_v2_ptsz(stream: CUstream, mode: u32) |driver| capture::begin(Stream::per_thread(stream), driver);
    fn cuStreamBeginRecaptureToGraph(stream: CUstream, mode: u32, graph: CUgraph, callback: Function, data: *mut c_void)
        |driver| capture::begin(Stream::legacy(stream), driver);
    fn cuStreamBeginRecaptureToGraph_ptsz(stream: CUstream, mode: u32, graph: CUgraph, callback: Function, data: *mut c_void)
        |driver| capture::begin(Stream::per_thread(stream), driver);
    fn cuStreamDestroy(stream: CUstream) |driver| capture::destroy(stream, driver);
    fn cuStreamDestroy_v2(stream: CUstream) |driver| capture::destroy(stream, driver);
    fn cuStreamEndCapture(stream: CUstream, graph: *mut usize) |driver| capture::end(Stream::legacy(stream), driver);
    fn cuStreamEndCapture_ptsz(stream: CUstream, graph: *mut usize) |driver| capture::end(Stream::per_thread(stream), driver);
    fn cuStreamSynchronize(stream: CUstream) |driver| settle_after(driver);
    fn cuStreamSynchronize_ptsz(stream: CUstream) |driver| settle_after(driver);
    fn cuVDPAUCtxCreate(context: *mut CUcontext, flags: u32, device: CUdevice, display: u32, function: *mut c_void)
        |driver| context::make(context, device, driver);
    fn cuVDPAUCtxCreate_v2(context: *mut CUcontext, flags: u32, device: CUdevice, display: u32, function: *mut c_void)
        |driver| context::make(context, device, driver);
}

/// What is to be made.
fn shape2<S: memory::Width>(shape: *const ArrayShape2<S>) -> Option<array::Shape> {
    // SAFETY: null, or what the driver reads next.
    unsafe { array::flat(shape) }
}

fn shape3<S: memory::Width>(shape: *const ArrayShape3<S>) -> Option<array::Shape> {
    // SAFETY: as above.
    unsafe { array::deep(shape) }.map(array::Shape::Array)
}

fn mipmap(shape: *const ArrayShape3<usize>, levels: u32) -> Option<array::Shape> {
    // SAFETY: as above.
    unsafe { array::deep(shape) }.map(|shape| array::Shape::Mipmap(shape, levels))
}
