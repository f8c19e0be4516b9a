//! Contexts: creation, the stack of each thread, synchronisation, limits.

use std::ffi::c_void;
use std::sync::atomic::Ordering;

use crate::code::Code;
use crate::context::{self, Context, current, current_or_none, limit, pop, push, set_limit};
use crate::device::device;
use crate::driver::driver;
use crate::export::{export, get, put, put_wanted};
use crate::lifecycle;
use crate::memory;
use crate::object::{Handle, Object};

/// # Safety
/// `to` is null or valid for a write.
unsafe fn create(to: *mut Handle, flags: u32, of: i32) -> Result<(), Code> {
    let device = device(of)?;
    if to.is_null() {
        return Err(Code::INVALID_VALUE);
    }
    let context = lifecycle::create(device, flags)?;
    push(context);
    // SAFETY: not null, see above.
    unsafe { put(to, context.handle()) }
}

/// The UUID of NVIDIA's private table with a function that makes contexts.
const PRIVATE_TABLE: [u8; 16] = [
    0x0c, 0xa5, 0x0b, 0x8c, 0x10, 0x04, 0x92, 0x9a, 0x89, 0xa7, 0xd0, 0xdf, 0x10, 0xe7, 0x72, 0x86,
];

/// That table: its bytes, and the function (ZLUDA's `dark_api`, `CTX_CREATE_BYPASS`).
fn private_table() -> *const c_void {
    type Create = unsafe extern "C" fn(*mut Handle, u32, i32) -> u32;
    #[repr(C)]
    struct Table(usize, Create);
    static TABLE: Table = Table(size_of::<Table>(), create_privately);
    (&raw const TABLE).cast()
}

/// # Safety
/// `to` is null or valid for a write.
unsafe extern "C" fn create_privately(to: *mut Handle, flags: u32, of: i32) -> u32 {
    // SAFETY: the caller's contract.
    unsafe { create(to, flags, of) }.map_or_else(|code| code.0, |()| 0)
}

/// # Safety
/// As [`Object::find`].
unsafe fn destroy(context: Handle) -> Result<(), Code> {
    driver()?;
    // SAFETY: the caller's contract.
    let context = unsafe { Object::<Context>::find(context)? };
    let primary = lifecycle::primary(context.device)?.context;
    if primary.is_some_and(|primary| std::ptr::eq(primary, context)) {
        return Err(Code::INVALID_CONTEXT);
    }
    if current_or_none().is_some_and(|c| std::ptr::eq(c, context)) {
        pop();
    }
    lifecycle::end(context);
    Ok(())
}

/// # Safety
/// As [`Object::find`].
unsafe fn push_handle(context: Handle) -> Result<(), Code> {
    driver()?;
    // SAFETY: the caller's contract.
    push(unsafe { Object::<Context>::find(context)? });
    Ok(())
}

/// # Safety
/// `to` is null or valid for a write.
unsafe fn pop_handle(to: *mut Handle) -> Result<(), Code> {
    driver()?;
    let top = pop().ok_or(Code::INVALID_CONTEXT)?;
    // SAFETY: the caller's contract.
    unsafe { put_wanted(to, top.handle()) };
    Ok(())
}

export! {
    fn cuCtxCreate(to: *mut Handle, flags: u32, of: i32) { create(to, flags, of) }
    fn cuCtxCreate_v2(to: *mut Handle, flags: u32, of: i32) { create(to, flags, of) }
    fn cuCtxCreate_v3(to: *mut Handle, _affinity: *mut c_void, _count: i32, flags: u32, of: i32) {
        create(to, flags, of)
    }
    fn cuCtxCreate_v4(to: *mut Handle, _parameters: *mut c_void, flags: u32, of: i32) {
        create(to, flags, of)
    }
    fn cuCtxDestroy(context: Handle) { destroy(context) }
    fn cuCtxDestroy_v2(context: Handle) { destroy(context) }
    fn cuCtxPushCurrent(context: Handle) { push_handle(context) }
    fn cuCtxPushCurrent_v2(context: Handle) { push_handle(context) }
    fn cuCtxPopCurrent(to: *mut Handle) { pop_handle(to) }
    fn cuCtxPopCurrent_v2(to: *mut Handle) { pop_handle(to) }
    fn cuCtxSetCurrent(context: Handle) {
        driver()?;
        if context.is_null() {
            pop();
        } else {
            context::replace(Object::<Context>::find(context)?);
        }
        Ok(())
    }
    fn cuCtxGetCurrent(to: *mut Handle) {
        driver()?;
        put(to, current_or_none().map_or(std::ptr::null_mut(), Object::handle))
    }
    fn cuCtxGetDevice(to: *mut i32) { put(to, current()?.device.ordinal) }
    fn cuCtxGetDevice_v2(to: *mut i32, context: Handle) {
        driver()?;
        put(to, Object::<Context>::find(context)?.device.ordinal)
    }
    fn cuCtxGetFlags(flags: *mut u32) {
        let value = current()?.flags.load(Ordering::Relaxed);
        put(flags, u32::try_from(value).unwrap_or(0))
    }
    fn cuCtxSetFlags(flags: u32) {
        current()?.flags.store(u64::from(flags), Ordering::Relaxed);
        Ok(())
    }
    fn cuCtxGetId(context: Handle, id: *mut u64) {
        let of = if context.is_null() { current()? } else { Object::<Context>::find(context)? };
        put(id, of.id)
    }
    fn cuCtxGetApiVersion(context: Handle, version: *mut u32) {
        if context.is_null() { current()? } else { Object::<Context>::find(context)? };
        put(version, 3020)
    }
    fn cuCtxSynchronize() {
        let context = current()?;
        context.synchronize();
        memory::trim_pools_after_wait(context.device);
        context.device.check()
    }
    fn cuCtxSynchronize_v2(context: Handle) {
        driver()?;
        let context = Object::<Context>::find(context)?;
        context.synchronize();
        memory::trim_pools_after_wait(context.device);
        context.device.check()
    }
    fn cuCtxGetLimit(value: *mut usize, which: u32) {
        put(value, usize::try_from(limit(which)?.load(Ordering::Relaxed)).unwrap_or(0))
    }
    fn cuCtxSetLimit(which: u32, value: usize) {
        set_limit(which, value as u64)
    }
    fn cuCtxGetStreamPriorityRange(least: *mut i32, greatest: *mut i32) {
        current()?;
        put_wanted(least, 0);
        put_wanted(greatest, -5);
        Ok(())
    }
    fn cuCtxGetCacheConfig(config: *mut u32) {
        current()?;
        put(config, 0)
    }
    fn cuCtxSetCacheConfig(_config: u32) { current().map(drop) }
    fn cuCtxGetSharedMemConfig(config: *mut u32) {
        current()?;
        put(config, 1)
    }
    fn cuCtxSetSharedMemConfig(_config: u32) { current().map(drop) }
    fn cuCtxResetPersistingL2Cache() { current().map(drop) }
    fn cuCtxEnablePeerAccess(peer: Handle, _flags: u32) {
        current()?;
        Object::<Context>::find(peer)?;
        Err(Code::PEER_ACCESS_UNSUPPORTED)
    }
    fn cuCtxDisablePeerAccess(peer: Handle) {
        current()?;
        Object::<Context>::find(peer)?;
        // CUDA_ERROR_PEER_ACCESS_NOT_ENABLED
        Err(Code(705))
    }
    fn cuCtxAttach(to: *mut Handle, _flags: u32) { put(to, current()?.handle()) }
    fn cuCtxGetExecAffinity(affinity: *mut c_void, _kind: u32) {
        get(affinity.cast::<u8>())?;
        Err(Code::NOT_SUPPORTED)
    }
    fn cuGetExportTable(table: *mut *const c_void, id: *const [u8; 16]) {
        // NVIDIA's private interfaces. libcudart checks most of them in ways that are not simulated.
        let found = (get(id)? == PRIVATE_TABLE).then(private_table);
        put(table, found.unwrap_or(std::ptr::null()))?;
        found.map(drop).ok_or(Code::NOT_FOUND)
    }
}
