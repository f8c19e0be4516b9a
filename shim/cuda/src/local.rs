//! Local memory: each thread's stack, spilled registers and arrays.
//!
//! A context has one allocation of it, for as many threads as the GPU runs at a time. It grows when a
//! kernel is launched that needs more per thread than any before, and does not shrink afterwards: 64 KiB
//! per thread are 17 GiB on an H100. So before a kernel is launched for the first time, or becomes part of a
//! graph, the driver is asked how much it needs, and that is charged to its context.
//!
//! ```text
//!  launch ─► is the kernel known to fit ? ──yes──► the driver
//!               └──no──► its local memory per thread ─► charge what the context lacks ─► known
//! ```
//!
//! This knowledge is discarded when a module is unloaded (another kernel may get the handle), when a context is made
//! or ends, and when the stack limit changes.

use tranche_shim_core::Entry;

use crate::abi::{CUcontext, CUdevice, CUfunction, CUresult};
use crate::charge::{Reserved, note};
use crate::device::Device;
use crate::driver::{Call, real};
use crate::keys::{Kind, key};
use crate::loading;
use crate::process::Process;
use crate::stream::{current_context, relaxed, within};

/// `CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES`.
const LOCAL_SIZE: i32 = 3;

/// The stack limit of a new context, in bytes. The memory for it is part of the context's size.
pub const DEFAULT_STACK: u64 = 1 << 10;

/// What the driver adds to each stack for its own calls, and the multiple to which it rounds up, in bytes
/// (NVIDIA's developer forum, "Memory required for kernel launch").
const SYSTEM_STACK: u64 = 512;
const STEP: u64 = 512;

/// Charges the current context for a kernel's local memory, if it was charged less so far.
#[cold]
#[inline(never)]
pub fn ensure(
    process: &'static Process,
    device: &'static Device,
    handle: CUfunction,
) -> Result<(), CUresult> {
    let fitting = &process.fitting;
    // Read before the driver is asked, so that an entry that is discarded meanwhile is not restored.
    let fit = fitting.fit(device, handle);
    if !device.is_capped() {
        fitting.note(fit);
        return Ok(());
    }
    process.notice_context(device)?;
    loading::reach(process, device)?;
    let is_kernel = process
        .pointers
        .get(key(Kind::Kernel, handle as u64))
        .is_some();
    // Another thread may capture a stream, and the driver may load the kernel for this call.
    let Some(bytes) = relaxed(|| local_size(handle, is_kernel)) else {
        // The driver will return the error.
        return Ok(());
    };
    if bytes > DEFAULT_STACK {
        charge(process, device, current_context(), bytes)?;
    }
    // A library's kernel has one handle in all contexts. It fits in each, unless it needs more than all of them have.
    if !is_kernel || bytes <= DEFAULT_STACK || fitting.has_one_context(device) {
        fitting.note(fit);
    }
    Ok(())
}

/// The same for `context`, or the current one (0), and a kernel that a graph will launch. A handle of 0 means no kernel.
pub fn ensure_in(
    process: &'static Process,
    context: CUcontext,
    handle: CUfunction,
) -> Result<(), CUresult> {
    if context == 0 {
        return ensure_current(process, handle);
    }
    // If it cannot become current, the driver will return the error.
    within(context, || Some(ensure_current(process, handle))).unwrap_or(Ok(()))
}

fn ensure_current(process: &'static Process, handle: CUfunction) -> Result<(), CUresult> {
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
        // Every driver has this attribute.
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

/// The charge of a context for its stack limit, and for what its kernels need beyond that.
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
            context: process.contexts.stamp(context),
        };
        note(process, key, entry);
    }
}

/// Sets the current context's stack limit to `each` bytes: charges for that, and at least for what its kernels have needed
/// so far.
pub fn set_stack_limit(
    process: &'static Process,
    device: &'static Device,
    each: u64,
    driver: Call<'_>,
) -> CUresult {
    let (context, limit) = (current_context(), bytes_for(device, each));
    // In one step, so that no call that ends in between gives back what this one relies on.
    let (begun, (stack, local)) = process.fitting.charges.with(|()| {
        let begun = process.contexts.limits.begin();
        (begun, charged(process, context))
    });
    let missing = limit.saturating_sub(stack + local);
    let reserved = match Reserved::new(process, device, missing, missing) {
        Ok(reserved) => reserved,
        Err(code) => {
            process.contexts.limits.end(&begun);
            return code;
        }
    };
    let result = driver.make();
    process.fitting.charges.with(|()| {
        let was_alone = process.contexts.limits.end(&begun);
        if result.is_ok() {
            note_stack(reserved, context, limit, was_alone);
        }
    });
    // Kernels that fit with the former limit may not fit now.
    process.fitting.forget();
    result
}

/// It is unknown which of two concurrent calls the driver executed last, so the higher limit counts.
fn note_stack(reserved: Reserved, context: CUcontext, limit: u64, was_alone: bool) {
    let (process, device) = (reserved.process, reserved.device);
    let (stack, local) = charged(process, context);
    let limit = if was_alone { limit } else { limit.max(stack) };
    let highest = if local > 0 { stack + local } else { 0 };
    let beyond = highest.saturating_sub(limit);
    let (before, after) = (stack + local + reserved.keep(), limit + beyond);
    set(process, device, context, Kind::Limit, limit);
    set(process, device, context, Kind::Local, beyond);
    process.release(device, before.saturating_sub(after));
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

/// How many threads a device runs at a time; each has local memory.
fn threads(device: &Device) -> u64 {
    const THREADS_PER_MULTIPROCESSOR: i32 = 39;
    ask(device, MULTIPROCESSORS) * ask(device, THREADS_PER_MULTIPROCESSOR)
}

/// How many blocks a device runs at a time.
pub fn blocks(device: &Device) -> u64 {
    const BLOCKS_PER_MULTIPROCESSOR: i32 = 106;
    ask(device, MULTIPROCESSORS) * ask(device, BLOCKS_PER_MULTIPROCESSOR)
}

const MULTIPROCESSORS: i32 = 16;

/// An attribute of a device, which every driver has; otherwise 1.
fn ask(device: &Device, attribute: i32) -> u64 {
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
}
