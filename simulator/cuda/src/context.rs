//! Contexts: a GPU as one part of a program uses it.

use std::cell::{Cell, RefCell};
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use crate::code::Code;
use crate::device::{Device, device};
use crate::driver::{self, driver};
use crate::export::{export, get, put, put_wanted};
use crate::heap::BLOCK;
use crate::memory;
use crate::object::{Handle, Kind, Object};
use crate::stream::Stream;

/// A context.
#[derive(Debug)]
pub struct Context {
    pub device: &'static Device,
    /// Never used twice in a process.
    pub id: u64,
    pub flags: AtomicU64,
    /// The mark of the last work queued in it.
    pub latest: AtomicU64,
    /// The mark of the last work that the null stream waits for.
    pub latest_blocking: AtomicU64,
    null_stream: OnceLock<&'static Object<Stream>>,
    limits: [AtomicU64; LIMITS],
    /// Bytes that the first limits take beyond their defaults.
    taken: Mutex<[u64; TAKING]>,
    /// Bytes of local memory per thread that kernels have needed so far.
    local: AtomicU64,
    /// The code that was loaded at its first use.
    code: Mutex<LoadedCode>,
}

/// Code in a context beside what every context has, in bytes.
#[derive(Debug, Default)]
struct LoadedCode {
    used: u64,
    /// Whole blocks of the GPU's.
    taken: u64,
}

impl Kind for Context {
    const TAG: u64 = 0x4354_5800_0000_0001;
    const WRONG: Code = Code::INVALID_CONTEXT;
}

/// The primary context of a GPU.
#[derive(Debug, Default)]
pub struct Primary {
    pub context: Option<&'static Object<Context>>,
    users: u32,
    flags: u32,
}

/// `CUlimit` values that are kept: stack, printf, heap, sync depth, launch count,
/// L2 granularity, L2 size.
const LIMITS: usize = 7;
/// Those that take memory: stack, printf, heap.
const TAKING: usize = 3;
/// The first of them.
const STACK: usize = 0;
/// What a thread's stack has beside what its kernel needs, and what local memory per thread is rounded up
/// to, in bytes.
const SYSTEM_STACK: u64 = 512;
const LOCAL_STEP: u64 = 256;
const DEFAULT_LIMITS: [u64; LIMITS] = [1024, 1 << 20, 8 << 20, 2, 2048, 128, 0];

thread_local! {
    static CURRENT: Cell<Option<&'static Object<Context>>> = const { Cell::new(None) };
    /// What is below the current one.
    static BELOW: RefCell<Vec<Option<&'static Object<Context>>>> = const { RefCell::new(Vec::new()) };
}

/// The calling thread's context, if it has one.
pub fn current_or_none() -> Option<&'static Object<Context>> {
    CURRENT.try_with(Cell::get).ok().flatten()
}

/// The calling thread's context.
pub fn current() -> Result<&'static Object<Context>, Code> {
    driver()?;
    let context = current_or_none().ok_or(Code::INVALID_CONTEXT)?;
    if context.alive() {
        context.device.check_present()?;
        Ok(context)
    } else {
        Err(Code::CONTEXT_IS_DESTROYED)
    }
}

/// The id of the calling thread's context, or 0 where it has none that is alive.
pub fn context_id() -> u64 {
    current_or_none()
        .filter(|c| Object::alive(c))
        .map_or(0, |context| context.id)
}

impl Context {
    fn create(device: &'static Device, flags: u32) -> Result<&'static Object<Self>, Code> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        // A context's own memory: code, stacks, buffers.
        let driver = driver()?;
        driver
            .shared
            .open_context(driver.slot, device.gpu, || driver.settle())?;
        let context = Object::create(Self {
            device,
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            flags: AtomicU64::new(u64::from(flags)),
            latest: AtomicU64::new(0),
            latest_blocking: AtomicU64::new(0),
            null_stream: OnceLock::new(),
            limits: DEFAULT_LIMITS.map(AtomicU64::new),
            taken: Mutex::default(),
            local: AtomicU64::new(0),
            code: Mutex::default(),
        });
        let _ = context
            .null_stream
            .set(Object::create(Stream::null(context)));
        Ok(context)
    }

    /// Ends the context and frees what was allocated in it.
    fn end(context: &'static Object<Self>) {
        if let Some(stream) = context.null_stream.get() {
            stream.destroy();
        }
        memory::free_all(context);
        let taken = context.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let limits: u64 = taken.iter().sum();
        drop(taken);
        let code = std::mem::take(&mut *context.code()).taken;
        context
            .device
            .release(context.device.state.context_bytes + limits + code);
        context.destroy();
    }

    /// The stream 0 of this context.
    pub fn null_stream(&self) -> Result<&'static Object<Stream>, Code> {
        self.null_stream.get().copied().ok_or(Code::INVALID_CONTEXT)
    }

    /// Sees that there is local memory for a kernel that needs `bytes` of it per thread. There is one
    /// allocation per context, for as many threads as the GPU runs at a time; it grows when a launch
    /// needs more, and does not shrink afterwards (CUDA's documentation of `cuCtxSetLimit` and of
    /// `CU_CTX_LMEM_RESIZE_TO_MAX`, which is the default by now).
    pub fn grow_local(&self, bytes: u64) -> Result<(), Code> {
        if bytes <= self.local.load(Ordering::Relaxed) {
            return Ok(());
        }
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let stack = self.limits[STACK].load(Ordering::Relaxed);
        self.take(&mut taken[STACK], self.local_bytes(stack.max(bytes))?)?;
        self.local.fetch_max(bytes, Ordering::Relaxed);
        Ok(())
    }

    fn code(&self) -> MutexGuard<'_, LoadedCode> {
        self.code.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes memory for `bytes` of code.
    pub fn load_code(&self, bytes: u64) -> Result<(), Code> {
        let mut code = self.code();
        let used = code.used.checked_add(bytes).ok_or(Code::OUT_OF_MEMORY)?;
        self.take(&mut code.taken, used.next_multiple_of(BLOCK))?;
        code.used = used;
        Ok(())
    }

    /// Gives it back.
    pub fn unload_code(&self, bytes: u64) {
        let mut code = self.code();
        code.used = code.used.saturating_sub(bytes);
        let least = code.used.next_multiple_of(BLOCK);
        // Less is never refused.
        let _ = self.take(&mut code.taken, least);
    }

    /// Bytes that `each` of local memory takes for all threads, beyond the default.
    fn local_bytes(&self, each: u64) -> Result<u64, Code> {
        let state = self.device.state;
        // What the driver's own calls need on every stack.
        let whole = |each: u64| (each + SYSTEM_STACK).next_multiple_of(LOCAL_STEP);
        let threads =
            u64::from(state.multiprocessors) * u64::from(state.threads_per_multiprocessor);
        whole(each)
            .saturating_sub(whole(DEFAULT_LIMITS[STACK]))
            .checked_mul(threads)
            .and_then(|bytes| bytes.checked_next_multiple_of(BLOCK))
            .ok_or(Code::OUT_OF_MEMORY)
    }

    /// Takes as much more, or less, of the GPU as it takes to have `bytes`.
    fn take(&self, taken: &mut u64, bytes: u64) -> Result<(), Code> {
        if bytes > *taken {
            self.device.charge(bytes - *taken)?;
        } else {
            self.device.release(*taken - bytes);
        }
        *taken = bytes;
        Ok(())
    }

    /// Waits for everything queued in this context.
    pub fn synchronize(&self) {
        driver::wait(self.device.gpu, self.latest.load(Ordering::Relaxed));
        crate::host::drain();
    }
}

fn pop() -> Option<&'static Object<Context>> {
    let top = CURRENT.get();
    let below = BELOW.with_borrow_mut(Vec::pop).flatten();
    CURRENT.set(below);
    top
}

fn push(context: &'static Object<Context>) {
    let top = CURRENT.replace(Some(context));
    BELOW.with_borrow_mut(|below| below.push(top));
}

fn retain(of: &'static Device) -> Result<&'static Object<Context>, Code> {
    let mut primary = of.primary.lock().unwrap_or_else(PoisonError::into_inner);
    let context = match primary.context {
        Some(context) => context,
        None => Context::create(of, primary.flags)?,
    };
    primary.context = Some(context);
    primary.users += 1;
    Ok(context)
}

fn release_primary(of: &'static Device) -> Result<(), Code> {
    let mut primary = of.primary.lock().unwrap_or_else(PoisonError::into_inner);
    primary.users = primary.users.checked_sub(1).ok_or(Code::INVALID_CONTEXT)?;
    let ended = (primary.users == 0)
        .then(|| primary.context.take())
        .flatten();
    drop(primary);
    if let Some(context) = ended {
        Context::end(context);
    }
    Ok(())
}

fn reset_primary(of: &'static Device) {
    let mut primary = of.primary.lock().unwrap_or_else(PoisonError::into_inner);
    primary.users = 0;
    let ended = primary.context.take();
    drop(primary);
    if let Some(context) = ended {
        Context::end(context);
    }
}

fn set_primary_flags(of: i32, flags: u32) -> Result<(), Code> {
    let device = device(of)?;
    let mut primary = device
        .primary
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    primary.flags = flags;
    if let Some(context) = primary.context {
        context.flags.store(u64::from(flags), Ordering::Relaxed);
    }
    Ok(())
}

/// # Safety
/// `to` is null or valid for a write.
unsafe fn create(to: *mut Handle, flags: u32, of: i32) -> Result<(), Code> {
    let device = device(of)?;
    if to.is_null() {
        return Err(Code::INVALID_VALUE);
    }
    let context = Context::create(device, flags)?;
    push(context);
    // SAFETY: not null, see above.
    unsafe { put(to, context.handle()) }
}

/// # Safety
/// As [`Object::find`].
unsafe fn destroy(context: Handle) -> Result<(), Code> {
    driver()?;
    // SAFETY: the caller's contract.
    let context = unsafe { Object::<Context>::find(context)? };
    if context
        .device
        .primary_context()
        .is_some_and(|p| std::ptr::eq(p, context))
    {
        return Err(Code::INVALID_CONTEXT);
    }
    if current_or_none().is_some_and(|c| std::ptr::eq(c, context)) {
        pop();
    }
    Context::end(context);
    Ok(())
}

/// # Safety
/// As [`Object::find`].
unsafe fn enter(context: Handle) -> Result<(), Code> {
    driver()?;
    // SAFETY: the caller's contract.
    push(unsafe { Object::<Context>::find(context)? });
    Ok(())
}

/// # Safety
/// `to` is null or valid for a write.
unsafe fn leave(to: *mut Handle) -> Result<(), Code> {
    driver()?;
    let top = pop().ok_or(Code::INVALID_CONTEXT)?;
    // SAFETY: the caller's contract.
    unsafe { put_wanted(to, top.handle()) };
    Ok(())
}

/// Sets a limit; those of stack, output and heap take the GPU's memory at once, in whole blocks.
fn set_limit(which: u32, value: u64) -> Result<(), Code> {
    let context = current()?;
    let limit = context.limits_of(which)?;
    let which = which as usize;
    if which < TAKING {
        let bytes = if which == STACK {
            context.local_bytes(value.max(context.local.load(Ordering::Relaxed)))?
        } else {
            value
                .saturating_sub(DEFAULT_LIMITS[which])
                .checked_next_multiple_of(BLOCK)
                .ok_or(Code::OUT_OF_MEMORY)?
        };
        let mut taken = context.taken.lock().unwrap_or_else(PoisonError::into_inner);
        context.take(&mut taken[which], bytes)?;
    }
    limit.store(value, Ordering::Relaxed);
    Ok(())
}

fn limit(which: u32) -> Result<&'static AtomicU64, Code> {
    current()?.limits_of(which)
}

impl Object<Context> {
    fn limits_of(&'static self, which: u32) -> Result<&'static AtomicU64, Code> {
        self.limits.get(which as usize).ok_or(Code::INVALID_VALUE)
    }
}

export! {
    fn cuDevicePrimaryCtxRetain(to: *mut Handle, of: i32) {
        let device = device(of)?;
        if to.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        put(to, retain(device)?.handle())
    }
    fn cuDevicePrimaryCtxRelease(of: i32) { release_primary(device(of)?) }
    fn cuDevicePrimaryCtxRelease_v2(of: i32) { release_primary(device(of)?) }
    fn cuDevicePrimaryCtxReset(of: i32) { reset_primary(device(of)?); Ok(()) }
    fn cuDevicePrimaryCtxReset_v2(of: i32) { reset_primary(device(of)?); Ok(()) }
    fn cuDevicePrimaryCtxSetFlags(of: i32, flags: u32) { set_primary_flags(of, flags) }
    fn cuDevicePrimaryCtxSetFlags_v2(of: i32, flags: u32) { set_primary_flags(of, flags) }
    fn cuDevicePrimaryCtxGetState(of: i32, flags: *mut u32, active: *mut i32) {
        let primary = device(of)?.primary.lock().unwrap_or_else(PoisonError::into_inner);
        put(flags, primary.flags)?;
        put(active, i32::from(primary.context.is_some()))
    }

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
    fn cuCtxPushCurrent(context: Handle) { enter(context) }
    fn cuCtxPushCurrent_v2(context: Handle) { enter(context) }
    fn cuCtxPopCurrent(to: *mut Handle) { leave(to) }
    fn cuCtxPopCurrent_v2(to: *mut Handle) { leave(to) }
    fn cuCtxSetCurrent(context: Handle) {
        driver()?;
        if context.is_null() {
            pop();
        } else {
            CURRENT.set(Some(Object::<Context>::find(context)?));
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
        context.device.check_present()
    }
    fn cuCtxSynchronize_v2(context: Handle) {
        driver()?;
        let context = Object::<Context>::find(context)?;
        context.synchronize();
        memory::trim_pools_after_wait(context.device);
        context.device.check_present()
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
}
