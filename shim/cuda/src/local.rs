//! Local memory: what each thread has for its stack, for spilled registers and for arrays of its own.
//!
//! A context has one allocation of it, for as many threads as the GPU runs at a time. It grows when a
//! kernel is launched that needs more per thread than any before, and does not shrink afterwards: 64 KiB
//! per thread are 17 GiB on an H100. So before a kernel is launched for the first time, or becomes part of a
//! graph, what it needs is asked of the driver, and charged to its context.
//!
//! ```text
//!  launch ─► is the kernel known to fit ? ──yes──► on
//!               └──no──► its local memory per thread ─► charge what the context lacks ─► known
//! ```
//!
//! Forgotten is what is known when a module is unloaded (another kernel may get the handle), when a
//! context is made or ends, and when the limit of stacks changes.

use core::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use tranche_shim_core::Entry;
use tranche_shim_runtime::lock::Guarded;

use crate::abi::{CUcontext, CUdevice, CUfunction, CUresult};
use crate::driver::real;
use crate::measure::relaxed;
use crate::memory::{Reserved, note};
use crate::process::{Kind, Process, current_context, key};
use crate::share::Device;

/// The kernels that are known to fit. All zeros is none.
pub struct Fitting {
    /// Handles, each with the device and the epoch in which it was found to fit.
    known: [AtomicU64; KNOWN],
    /// The epoch, at its place in them.
    epoch: AtomicU64,
    /// Contexts that were made so far, a device's primary one once; and of which devices that was.
    contexts: AtomicU32,
    primaries: AtomicU64,
    /// Held while what a context is charged changes.
    charges: Guarded<()>,
}

const KNOWN: usize = 4096;

/// Above the addresses of user space: the epoch, then the device's number.
const EPOCH: u64 = 1 << 48;
const DEVICE_SHIFT: u32 = 58;
const EPOCHS: u64 = 1 << DEVICE_SHIFT;

/// `CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES`.
const LOCAL_SIZE: i32 = 3;

/// The limit of stacks that a context begins with: what it takes lies in the context.
pub const DEFAULT_STACK: u64 = 1 << 10;

/// What the driver has on each stack for its own calls, and a multiple of what it rounds up to, in bytes
/// (NVIDIA's developer forum, "Memory required for kernel launch").
const SYSTEM_STACK: u64 = 512;
const STEP: u64 = 512;

impl Fitting {
    /// Whether a kernel is known to fit on a device.
    #[inline]
    pub fn knows(&self, device: &Device, handle: CUfunction) -> bool {
        let (place, value) = self.place(device, handle);
        place.load(Ordering::Relaxed) == value
    }

    #[inline]
    fn place(&self, device: &Device, handle: CUfunction) -> (&AtomicU64, u64) {
        let handle = handle as u64;
        // An entry that was never written is 0, which no handle is, in no epoch.
        let epoch = self.epoch.load(Ordering::Relaxed);
        let value = handle ^ epoch ^ u64::from(device.number) << DEVICE_SHIFT;
        let hash = handle.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (u64::BITS - KNOWN.ilog2());
        #[expect(clippy::cast_possible_truncation, reason = "below the table's length")]
        let place = &self.known[hash as usize % KNOWN];
        (place, value)
    }

    /// Notes that one fits.
    pub fn note(&self, device: &Device, handle: CUfunction) {
        let (place, value) = self.place(device, handle);
        place.store(value, Ordering::Relaxed);
    }

    /// Forgets all.
    pub fn forget(&self) {
        let next = |epoch: u64| Some((epoch + EPOCH) % EPOCHS);
        let former = self
            .epoch
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, next);
        if former.is_ok_and(|former| next(former) == Some(0)) {
            for place in &self.known {
                place.store(0, Ordering::Relaxed);
            }
        }
    }

    /// A device's primary context was retained.
    pub fn add_primary(&self, device: &Device) {
        let bit = 1 << (device.number % 64);
        if self.primaries.fetch_or(bit, Ordering::Relaxed) & bit == 0 {
            self.add_context();
        }
    }

    /// A context was made.
    pub fn add_context(&self) {
        self.contexts.fetch_add(1, Ordering::Relaxed);
        self.forget();
    }
}

/// Sees that the current context has, and its share is charged, the local memory of a kernel.
#[cold]
#[inline(never)]
pub fn ensure(
    process: &'static Process,
    device: &'static Device,
    handle: CUfunction,
) -> Result<(), CUresult> {
    let fitting = &process.fitting;
    // Before the driver is asked: what is forgotten meanwhile stays forgotten.
    let (place, known) = fitting.place(device, handle);
    if !device.is_capped() {
        place.store(known, Ordering::Relaxed);
        return Ok(());
    }
    let is_kernel = process
        .pointers
        .get(key(Kind::Kernel, handle as u64))
        .is_some();
    // Elsewhere somebody may capture a stream, which must survive that a kernel is loaded for this.
    let Some(bytes) = relaxed(|| local_size(handle, is_kernel)) else {
        // The driver says itself what is wrong with it.
        return Ok(());
    };
    if bytes > DEFAULT_STACK {
        charge(process, device, current_context(), bytes)?;
    }
    // A kernel of a library is one handle in all contexts.
    let one_context =
        fitting.contexts.load(Ordering::Relaxed) as usize <= process.devices().count();
    if !is_kernel || one_context {
        place.store(known, Ordering::Relaxed);
    }
    Ok(())
}

/// The same in the current context, for what a graph will launch. 0 is no kernel.
pub fn ensure_current(process: &'static Process, handle: CUfunction) -> Result<(), CUresult> {
    match process.current_device() {
        Ok(device) if handle != 0 && !process.fitting.knows(device, handle) => {
            ensure(process, device, handle)
        }
        _ => Ok(()),
    }
}

/// Bytes of local memory per thread.
fn local_size(handle: CUfunction, is_kernel: bool) -> Option<u64> {
    let mut function = handle;
    if is_kernel {
        // SAFETY: writes the local handle; the kernel is one that the driver gave out.
        let result = unsafe {
            real!(cuKernelGetFunction: fn(*mut CUfunction, CUfunction))(&raw mut function, handle)
        };
        if !result.is_ok() {
            return None;
        }
    }
    let mut bytes = 0;
    // SAFETY: writes the local number; the handle is what the program passes to the driver as a function.
    let result = unsafe {
        real!(cuFuncGetAttribute: fn(*mut i32, i32, CUfunction))(
            &raw mut bytes,
            LOCAL_SIZE,
            function,
        )
    };
    match result {
        CUresult::SUCCESS => Some(u64::from(bytes.unsigned_abs())),
        // No driver is without it.
        CUresult::NOT_FOUND => Some(0),
        _ => None,
    }
}

/// Charges a context with `each` bytes of local memory per thread, if it was charged less so far.
fn charge(
    process: &'static Process,
    device: &'static Device,
    context: CUcontext,
    each: u64,
) -> Result<(), CUresult> {
    let needed = bytes_for(device, each);
    loop {
        let (stack, local) = charged(process, context);
        let more = needed.saturating_sub(stack + local);
        if more == 0 {
            return Ok(());
        }
        let reserved = Reserved::new(process, device, more, more)?;
        let done = process.fitting.charges.with(|()| {
            let is_as_before = charged(process, context) == (stack, local);
            if is_as_before {
                reserved.keep();
                set(process, device, context, Kind::Local, local + more);
            }
            is_as_before
        });
        if done {
            return Ok(());
        }
    }
}

/// What a context is charged for the limit of its stacks, and what its kernels need beyond that.
fn charged(process: &Process, context: CUcontext) -> (u64, u64) {
    let bytes = |kind| {
        let entry = process.pointers.get(key(kind, context as u64));
        entry.map_or(0, |entry| entry.bytes)
    };
    (bytes(Kind::Limit), bytes(Kind::Local))
}

fn set(process: &'static Process, device: &Device, context: CUcontext, kind: Kind, bytes: u64) {
    let key = key(kind, context as u64);
    process.pointers.take(key);
    if bytes > 0 {
        let entry = Entry {
            bytes,
            device: device.number,
            context: context as u64,
        };
        note(process, key, entry);
    }
}

/// The limit of the current context's stacks was set to `each` bytes, for which `reserved` was reserved:
/// what it takes from now on is charged, and what its kernels needed so far still is.
pub fn set_stack(reserved: Reserved, each: u64) {
    let (process, device, context) = (reserved.process, reserved.device, current_context());
    process.fitting.charges.with(|()| {
        let (stack, local) = charged(process, context);
        let limit = bytes_for(device, each);
        let highest = if local > 0 { stack + local } else { 0 };
        let beyond = highest.saturating_sub(limit);
        let (before, after) = (stack + local + reserved.keep(), limit + beyond);
        set(process, device, context, Kind::Limit, limit);
        set(process, device, context, Kind::Local, beyond);
        process.release(device, before.saturating_sub(after));
    });
    // Kernels that fitted below the former limit.
    process.fitting.forget();
}

/// What more there is to reserve before the limit of the current context's stacks is set.
pub fn missing_for_stack(process: &Process, device: &Device, each: u64) -> u64 {
    let (stack, local) = charged(process, current_context());
    bytes_for(device, each).saturating_sub(stack + local)
}

/// Bytes that `each` bytes per thread take of a device, beyond the default, in whole blocks.
fn bytes_for(device: &Device, each: u64) -> u64 {
    let whole = |each: u64| {
        each.saturating_add(SYSTEM_STACK)
            .checked_next_multiple_of(STEP)
    };
    let beyond = whole(each)
        .unwrap_or(u64::MAX)
        .saturating_sub(DEFAULT_STACK + SYSTEM_STACK);
    if beyond == 0 {
        return 0;
    }
    device.taken_by(beyond.saturating_mul(threads(device)))
}

/// How many threads a device runs at a time: each has local memory.
fn threads(device: &Device) -> u64 {
    const MULTIPROCESSORS: i32 = 16;
    const THREADS_PER_MULTIPROCESSOR: i32 = 39;
    let ask = |attribute| {
        let mut value = 0;
        // SAFETY: writes to the local number.
        let result = unsafe {
            real!(cuDeviceGetAttribute: fn(*mut i32, i32, CUdevice))(
                &raw mut value,
                attribute,
                device.handle,
            )
        };
        if result.is_ok() {
            u64::from(value.unsigned_abs())
        } else {
            1
        }
    };
    ask(MULTIPROCESSORS) * ask(THREADS_PER_MULTIPROCESSOR)
}
