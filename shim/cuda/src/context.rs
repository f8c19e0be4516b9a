//! Contexts. Each takes memory, which the node measured once per model of GPU and wrote into the cap page. The share has
//! room for one context beside its memory, so that a single process can use all of its memory; every further one is
//! charged.
//!
//! A driver reuses the handle of a context that has ended. So entries under a handle are taken out before the driver ends
//! the context, and put back if it refuses; and allocations are stamped with the number of contexts that had ended
//! ([`tranche_shim_core::table::stamped`]). Several users retain and release a primary context: the last of concurrent
//! calls asks the driver whether it still exists.

use tranche_shim_core::paths::MAX_SHARES;
use tranche_shim_core::table::{STAMPS_KEPT, unstamped};
use tranche_shim_core::{Entry, Physical};

use crate::abi::{CUcontext, CUdevice, CUresult};
use crate::array;
use crate::charge::{Reserved, note, return_charge};
use crate::contexts::{Ending, Endings, has_primary, primary_handle, primary_key};
use crate::device::Device;
use crate::driver::{Call, real};
use crate::keys::{Kind, key};
use crate::loading;
use crate::local;
use crate::process::{self, Process};
use crate::settle;
use crate::stream::current_context;

/// A new context on a device.
pub fn make(context: *mut CUcontext, handle: CUdevice, driver: Call<'_>) -> CUresult {
    let process = match process::current() {
        Ok(process) => process,
        Err(code) => return code,
    };
    let Some(device) = process.device(handle) else {
        // The driver refuses a device that does not exist.
        return driver.make();
    };
    process.fitting.add_context(device);
    let _ = process.contexts.changing.begin();
    let result = make_charged(context, handle, driver);
    process.contexts.changing.leave();
    if !result.is_ok() {
        process.fitting.end_context(device);
    }
    result
}

fn make_charged(context: *mut CUcontext, device: CUdevice, driver: Call<'_>) -> CUresult {
    let reserved = match reserve(device) {
        Ok(Some(reserved)) if !context.is_null() => reserved,
        Ok(_) => return driver.make(),
        Err(code) => return code,
    };
    let result = driver.make();
    if result.is_ok() {
        // SAFETY: not null, and the driver has just written to it.
        reserved.note(key(Kind::Context, unsafe { context.read() } as u64), 0);
    }
    result
}

/// Reserves what a context takes of a device, and charges the libraries there; `None` if nothing is charged for the
/// context.
fn reserve(device: CUdevice) -> Result<Option<Reserved>, CUresult> {
    let process = process::current()?;
    let Some(device) = process.device(device).filter(|device| device.is_capped()) else {
        // The driver refuses a device that does not exist.
        return Ok(None);
    };
    let reserved = match device.context {
        0 => None,
        bytes => Some(Reserved::new(process, device, bytes, bytes)?),
    };
    loading::reach(process, device)?;
    Ok(reserved)
}

/// A call that retains a device's primary context, and creates it if there is none. The handle is null if the driver does
/// not return it, because it makes a green context.
pub fn retain_primary(context: *mut CUcontext, handle: CUdevice, driver: Call<'_>) -> CUresult {
    let process = match process::current() {
        Ok(process) => process,
        Err(code) => return code,
    };
    let Some(device) = process.device(handle) else {
        // The driver returns the error.
        return driver.make();
    };
    if context.is_null() {
        process.contexts.add_green();
    }
    process.fitting.add_primary(device);
    let primary = primary_key(handle);
    let is_charged = process.contexts.noting.with(|_| {
        let _ = process.contexts.primary(device).begin();
        process.pointers.get(primary).is_some()
    });
    let reserved = if is_charged {
        Ok(None)
    } else {
        reserve(handle)
    };
    let result = match reserved {
        Ok(reserved) => {
            let result = driver.make();
            if let Some(reserved) = reserved
                && has_primary(handle)
            {
                let context = if context.is_null() || !result.is_ok() {
                    0
                } else {
                    // SAFETY: not null, and the driver has just written to it.
                    unsafe { context.read() }
                };
                let context = process.contexts.stamp(context);
                reserved.note(primary, context);
            }
            result
        }
        Err(code) => code,
    };
    leave_primary(process, device, None);
    result
}

/// How often a call asks again whether a primary context exists, if other calls began or ended meanwhile.
const ASKS: usize = 16;

/// Ends a call that may create or end a device's primary context. If it is the last such call and the context is gone,
/// gives the context's charges back. `context` is the handle, if it is known.
fn leave_primary(process: &'static Process, device: &Device, context: Option<CUcontext>) {
    let calls = process.contexts.primary(device);
    let primary = primary_key(device.handle);
    for _ in 0..ASKS {
        let seen = calls.observe();
        let is_gone = !has_primary(device.handle);
        let taken = process.contexts.noting.with(|endings| {
            calls.end_if_unchanged(seen).then(|| {
                let is_over = seen.is_last() && is_gone;
                if is_over {
                    process.fitting.end_primary(device);
                }
                is_over.then(|| (process.pointers.take(primary), endings.last(device)))
            })
        });
        let Some(left) = taken else { continue };
        if let Some((taken, ending)) = left {
            loading::leave(process, device);
            let noted = taken.map(|entry| unstamped(entry.context));
            let handle = context.map(|context| context as u64).or(noted);
            // Any of the calls may have ended it.
            if let Some(ending) = ending {
                forget(process, handle.unwrap_or(0), ending);
            }
            if let Some(entry) = taken {
                return_charge(process, primary, entry);
            }
        }
        return;
    }
    // It stays charged until another call checks it.
    calls.leave();
}

/// Must be called before a call that may end contexts.
fn begin_end(process: &Process) -> Ending {
    let ended = process.contexts.begin_end();
    if ended.is_multiple_of(STAMPS_KEPT) {
        process.pointers.keep_stamps(ended);
    }
    let mark = process.physical.with(Physical::mark);
    Ending { ended, mark }
}

/// The end of a context, with which the driver frees its memory.
pub fn end(context: CUcontext, driver: Call<'_>) -> CUresult {
    let Some(process) = process::joined() else {
        return driver.make();
    };
    let number = key(Kind::Context, context as u64);
    let _ = process.contexts.changing.begin();
    let ending = begin_end(process);
    let taken = process.pointers.take(number);
    let unmeasured = process.launches.measuring.leave(&[context]);
    let result = driver.make();
    drop(unmeasured);
    if result.is_ok() {
        forget(process, context as u64, ending);
    }
    if let Some(entry) = taken {
        if result.is_ok() {
            if let Some(device) = process.device_numbered(entry.device) {
                process.fitting.end_context(device);
                loading::leave(process, device);
            }
            return_charge(process, number, entry);
        } else {
            note(process, number, entry);
        }
    }
    process.contexts.changing.leave();
    if result.is_ok() {
        settle::settle_all(process);
    }
    result
}

/// The possible end of a device's primary context, at its last release or at a reset.
pub fn end_primary(device: CUdevice, driver: Call<'_>) -> CUresult {
    end_with(None, Some(device), driver)
}

/// The end of a green context, and possibly of its primary context.
pub fn end_green(green: usize, driver: Call<'_>) -> CUresult {
    let mut context = 0;
    // SAFETY: what the program passes to the driver as a green context; writes to the local handle.
    let result =
        unsafe { real!(cuCtxFromGreenCtx: fn(*mut CUcontext, usize))(&raw mut context, green) };
    end_with(result.is_ok().then_some(context), None, driver)
}

/// Makes a call that ends the context `green`, and may end the primary context of one device, or of any device.
fn end_with(green: Option<CUcontext>, only: Option<CUdevice>, driver: Call<'_>) -> CUresult {
    let Some(process) = process::joined() else {
        return driver.make();
    };
    let devices = || {
        process
            .devices()
            .filter(move |device| only.is_none_or(|only| only == device.handle))
    };
    for device in devices() {
        process.contexts.noting.with(|_| {
            let _ = process.contexts.primary(device).begin();
        });
    }
    let ending = begin_end(process);
    let mut contexts = [0; MAX_SHARES + 1];
    for (context, device) in contexts.iter_mut().zip(devices()) {
        // Asked after the instant was taken, so that a context that reuses the handle is younger.
        let found = primary(process, device.handle);
        if found.is_some() {
            let note = |endings: &mut Endings| endings.note(device, ending);
            process.contexts.noting.with(note);
        }
        *context = found.unwrap_or(0);
    }
    contexts[MAX_SHARES] = green.unwrap_or(0);
    let unmeasured = process.launches.measuring.leave(&contexts);
    // A reset may make the default pool the current one.
    let result = process.current_pools.switch(driver);
    drop(unmeasured);
    for (&context, device) in contexts.iter().zip(devices()) {
        leave_primary(process, device, Some(context).filter(|it| *it != 0));
    }
    if let Some(green) = green.filter(|_| result.is_ok()) {
        forget(process, green as u64, ending);
    }
    if result.is_ok() {
        settle::settle_all(process);
    }
    result
}

/// `cuCheckpointProcessRestore`. Its arguments can move the memory of a process to another GPU, where it would not be charged:
/// refused if they are not all zero, as cuda.h wants what it does not name.
pub fn restore(arguments: *const [u64; 8], driver: Call<'_>) -> CUresult {
    // SAFETY: null, or the program's, for the driver to read; cuda.h gives the structure 64 bytes.
    let asks = unsafe { arguments.as_ref() }.is_some_and(|arguments| *arguments != [0; 8]);
    let is_capped =
        process::joined().is_some_and(|process| process.devices().any(Device::is_capped));
    if asks && is_capped {
        return CUresult::NOT_SUPPORTED;
    }
    driver.make()
}

const STACK_SIZE: u32 = 0;
const PRINTF_FIFO_SIZE: u32 = 1;
const MALLOC_HEAP_SIZE: u32 = 2;
const DEV_RUNTIME_SYNC_DEPTH: u32 = 3;
/// From pending launches of the device runtime, of which it is not documented how much memory one takes, to the shared memory of
/// graphics contexts.
const TAKES_NOTHING_FROM: u32 = 4;
const TAKES_NOTHING_TO: u32 = 9;
/// Since CUDA 13.5: memory for each block that runs.
const PER_BLOCK_MEMORY_SIZE: u32 = 10;

/// Bytes that each level of kernels which wait for their own kernels takes, at most (CUDA C++ Programming
/// Guide, "Memory Allocation and Lifetime" of the device runtime's first version).
const SYNC_LEVEL: u64 = 860 << 20;

/// `cuCtxSetLimit`: the driver takes more or less memory for the stacks, the heap or the output of the current
/// context's kernels. The measured size of a context includes the defaults.
pub fn set_limit(which: u32, value: usize, driver: Call<'_>) -> CUresult {
    let process = match process::current() {
        Ok(process) => process,
        Err(code) => return code,
    };
    let Ok(Some(device)) = process.current_capped() else {
        return driver.make();
    };
    let value = value as u64;
    let bytes = match which {
        STACK_SIZE => return local::set_stack_limit(process, device, value, driver),
        PRINTF_FIFO_SIZE => value.saturating_sub(1 << 20),
        MALLOC_HEAP_SIZE => value.saturating_sub(8 << 20),
        DEV_RUNTIME_SYNC_DEPTH => value.saturating_sub(2).saturating_mul(SYNC_LEVEL),
        PER_BLOCK_MEMORY_SIZE => value.saturating_mul(local::blocks(device)),
        TAKES_NOTHING_FROM..=TAKES_NOTHING_TO => return driver.make(),
        // As by a driver that does not know it.
        _ => return CUresult::UNSUPPORTED_LIMIT,
    };
    set_charged_limit(process, device, which, device.taken_by(bytes), driver)
}

/// It is unknown which of two concurrent calls the driver executed last, so the higher limit counts.
fn set_charged_limit(
    process: &'static Process,
    device: &'static Device,
    which: u32,
    bytes: u64,
    driver: Call<'_>,
) -> CUresult {
    let contexts = &process.contexts;
    let context = current_context();
    let key = key(Kind::Limit, context as u64 | u64::from(which) << 48);
    // In one step, so that no call that ends in between gives back what this one relies on.
    let (begun, former) = contexts.noting.with(|_| {
        let begun = contexts.limits.begin();
        (begun, process.pointers.get(key))
    });
    let former = former.map_or(0, |entry| entry.bytes);
    let missing = bytes.saturating_sub(former);
    let reserved = match Reserved::new(process, device, missing, missing) {
        Ok(reserved) => reserved,
        Err(code) => {
            contexts.limits.end(&begun);
            return code;
        }
    };
    let result = driver.make();
    contexts.noting.with(|_| {
        let was_alone = contexts.limits.end(&begun);
        if !result.is_ok() {
            return;
        }
        let noted = process.pointers.take(key).map_or(0, |entry| entry.bytes);
        let charged = noted + reserved.keep();
        let bytes = if was_alone { bytes } else { bytes.max(noted) };
        process.release(device, charged.saturating_sub(bytes));
        if bytes > 0 {
            let entry = Entry {
                bytes,
                device: device.number,
                context: contexts.stamp(context),
            };
            note(process, key, entry);
        }
    });
    result
}

/// Gives back the charges of a context that ended: of its allocations, its imports, and the mappings to its arrays.
fn forget(process: &'static Process, context: u64, ending: Ending) {
    process.fitting.forget();
    if context == 0 {
        return;
    }
    #[expect(
        clippy::cast_possible_truncation,
        reason = "a handle has 64 bits at most"
    )]
    process.launches.captures.forget(context as CUcontext);
    let Ending { ended, mark } = ending;
    process
        .pointers
        .take_context(context, ended, &mut |key, entry| {
            array::forget(process, key, mark);
            return_charge(process, key, entry);
        });
    process.note_physical(|physical, freed| physical.end_context(context, mark, freed));
}

/// The primary context's handle, if there is one: from the program's call, or from the driver.
fn primary(process: &Process, device: CUdevice) -> Option<CUcontext> {
    let noted = process.pointers.get(primary_key(device));
    match noted.filter(|noted| noted.context != 0) {
        Some(noted) if has_primary(device) => usize::try_from(unstamped(noted.context)).ok(),
        Some(_) => None,
        None => primary_handle(device),
    }
}
