//! Contexts, and the stack of them that each thread has.

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use crate::code::Code;
use crate::device::Device;
use crate::driver::{self, driver};
use crate::heap::BLOCK;
use crate::host;
use crate::object::{Kind, Object, StoredHandle};

#[derive(Debug)]
pub struct Context {
    pub device: &'static Device,
    /// Unique in the process.
    pub id: u64,
    pub flags: AtomicU64,
    /// The mark of the last work queued in it.
    pub latest: AtomicU64,
    /// The mark of the last work that its null stream waits for.
    pub latest_blocking: AtomicU64,
    /// The handle of its null stream.
    pub null_stream: OnceLock<StoredHandle>,
    limits: [AtomicU64; LIMITS],
    /// Bytes charged for the first limits beyond their defaults.
    taken: Mutex<[u64; TAKING]>,
    /// Bytes of local memory per thread that kernels have needed so far.
    local: AtomicU64,
    /// The code that was loaded at its first use.
    code: Mutex<LoadedCode>,
}

/// Code that was loaded into a context, in bytes.
#[derive(Debug, Default)]
struct LoadedCode {
    used: u64,
    /// Charged to the GPU, in whole blocks.
    taken: u64,
}

impl Kind for Context {
    const TAG: u64 = 0x4354_5800_0000_0001;
    const WRONG: Code = Code::INVALID_CONTEXT;
}

/// The values of `CUlimit`: stack, printf, heap, sync depth, launch count, L2 granularity, L2 size.
const LIMITS: usize = 7;
/// The first of them take memory: stack, printf, heap.
const TAKING: usize = 3;
/// The index of the stack's limit.
const STACK: usize = 0;
/// Bytes of each thread's stack beyond those that its kernel needs, and the step to which local memory per thread is
/// rounded up.
const SYSTEM_STACK: u64 = 512;
const LOCAL_STEP: u64 = 256;
const DEFAULT_LIMITS: [u64; LIMITS] = [1024, 1 << 20, 8 << 20, 2, 2048, 128, 0];

thread_local! {
    static CURRENT: Cell<Option<&'static Object<Context>>> = const { Cell::new(None) };
    /// The stack below the current context.
    static BELOW: RefCell<Vec<Option<&'static Object<Context>>>> = const { RefCell::new(Vec::new()) };
}

/// The calling thread's context, if it has one.
pub fn current_or_none() -> Option<&'static Object<Context>> {
    CURRENT.try_with(Cell::get).ok().flatten()
}

/// The calling thread's context.
pub fn current() -> Result<&'static Object<Context>, Code> {
    if let Some(client) = &driver()?.mps {
        client.check()?;
    }
    let context = current_or_none().ok_or(Code::INVALID_CONTEXT)?;
    if context.is_alive() {
        context.device.check()?;
        Ok(context)
    } else {
        Err(Code::CONTEXT_IS_DESTROYED)
    }
}

/// The id of the calling thread's context, or 0 if it has no live one.
pub fn context_id() -> u64 {
    current_or_none()
        .filter(|c| Object::is_alive(c))
        .map_or(0, |context| context.id)
}

impl Context {
    /// A context whose memory (`context_mib`) is charged already.
    pub fn new(device: &'static Device, flags: u32) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self {
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
        }
    }

    /// Bytes charged for this context beyond `context_mib`: for limits and for code.
    pub fn taken(&self) -> u64 {
        let limits = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        limits.iter().sum::<u64>() + self.code().taken
    }

    /// Grows local memory for a kernel that uses `bytes` of it per thread. A context has one allocation, for as many
    /// threads as the GPU runs at a time. It grows when a launch needs more and does not shrink afterwards
    /// (cuda.h: `cuCtxSetLimit`, and `CU_CTX_LMEM_RESIZE_TO_MAX`, which is the default).
    pub fn grow_local(&self, bytes: u64) -> Result<(), Code> {
        if bytes <= self.local.load(Ordering::Relaxed) {
            return Ok(());
        }
        let mut taken = self.taken.lock().unwrap_or_else(PoisonError::into_inner);
        let stack = self.limits[STACK].load(Ordering::Relaxed);
        self.recharge(&mut taken[STACK], self.local_bytes(stack.max(bytes))?)?;
        self.local.fetch_max(bytes, Ordering::Relaxed);
        Ok(())
    }

    fn code(&self) -> MutexGuard<'_, LoadedCode> {
        self.code.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Charges memory for `bytes` of code.
    pub fn load_code(&self, bytes: u64) -> Result<(), Code> {
        let mut code = self.code();
        let used = code.used.checked_add(bytes).ok_or(Code::OUT_OF_MEMORY)?;
        self.recharge(&mut code.taken, used.next_multiple_of(BLOCK))?;
        code.used = used;
        Ok(())
    }

    /// Returns the memory of `bytes` of code.
    pub fn unload_code(&self, bytes: u64) {
        let mut code = self.code();
        code.used = code.used.saturating_sub(bytes);
        let least = code.used.next_multiple_of(BLOCK);
        // A smaller charge is never refused.
        let _ = self.recharge(&mut code.taken, least);
    }

    /// Bytes that all threads take beyond the default when each has `each` bytes of local memory.
    fn local_bytes(&self, each: u64) -> Result<u64, Code> {
        let state = self.device.state;
        let whole = |each: u64| (each + SYSTEM_STACK).next_multiple_of(LOCAL_STEP);
        let threads =
            u64::from(self.device.multiprocessors()) * u64::from(state.threads_per_multiprocessor);
        whole(each)
            .saturating_sub(whole(DEFAULT_LIMITS[STACK]))
            .checked_mul(threads)
            .and_then(|bytes| bytes.checked_next_multiple_of(BLOCK))
            .ok_or(Code::OUT_OF_MEMORY)
    }

    /// Changes a charge of `taken` bytes to `bytes`.
    fn recharge(&self, taken: &mut u64, bytes: u64) -> Result<(), Code> {
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
        host::drain();
    }
}

/// Removes the calling thread's context from its stack.
pub fn pop() -> Option<&'static Object<Context>> {
    let top = CURRENT.get();
    let below = BELOW.with_borrow_mut(Vec::pop).flatten();
    CURRENT.set(below);
    top
}

/// Replaces the calling thread's context.
pub fn replace(context: &'static Object<Context>) {
    CURRENT.set(Some(context));
}

/// Makes a context the calling thread's, above its present one.
pub fn push(context: &'static Object<Context>) {
    let top = CURRENT.replace(Some(context));
    BELOW.with_borrow_mut(|below| below.push(top));
}

/// Sets a limit. Those of stack, printf and heap take GPU memory at once, in whole blocks.
pub fn set_limit(which: u32, value: u64) -> Result<(), Code> {
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
        context.recharge(&mut taken[which], bytes)?;
    }
    limit.store(value, Ordering::Relaxed);
    Ok(())
}

/// A limit of the calling thread's context.
pub fn limit(which: u32) -> Result<&'static AtomicU64, Code> {
    current()?.limits_of(which)
}

impl Object<Context> {
    fn limits_of(&'static self, which: u32) -> Result<&'static AtomicU64, Code> {
        self.limits.get(which as usize).ok_or(Code::INVALID_VALUE)
    }
}
