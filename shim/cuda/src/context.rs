//! Contexts: each takes memory of its own, which the node measured once per model of GPU and wrote
//! into the cap page. The share has room for one beside its memory, so that a lone process has all of
//! that; every further one is charged like any memory.

use tranche_shim_core::Entry;

use crate::abi::{CUcontext, CUdevice, CUresult};
use crate::driver::{Call, real};
use crate::local;
use crate::memory::{Reserved, current_capped, give_back, note};
use crate::pool;
use crate::process::{self, Kind, Process, current_context, key};
use crate::share::Device;

/// A new context on a device.
pub fn make(context: *mut CUcontext, device: CUdevice, driver: Call<'_>) -> CUresult {
    if let Some(process) = process::joined() {
        process.fitting.add_context();
    }
    let reserved = match reserve(device) {
        Ok(Some(reserved)) if !context.is_null() => reserved,
        Ok(_) => return driver.make(),
        Err(code) => return code,
    };
    // The handle is another one's again as soon as it is free.
    reserved.process.contexts.with(|()| {
        let result = driver.make();
        if result.is_ok() {
            // SAFETY: not null, and the driver has just written to it.
            reserved.note(key(Kind::Context, unsafe { context.read() } as u64), 0);
        }
        result
    })
}

/// What a context takes of a device; `None` where nothing is charged for it.
fn reserve(device: CUdevice) -> Result<Option<Reserved>, CUresult> {
    let process = process::current()?;
    match process.device(device) {
        Some(device) if device.is_capped() && device.context > 0 => {
            Reserved::new(process, device, device.context, device.context).map(Some)
        }
        // A device that there is not the driver refuses.
        _ => Ok(None),
    }
}

/// Whatever retains a device's primary context, which makes it if there is none; null where the driver
/// does not tell its handle.
pub fn retain_primary(context: *mut CUcontext, device: CUdevice, driver: Call<'_>) -> CUresult {
    let process = match process::current() {
        Ok(process) => process,
        Err(code) => return code,
    };
    let primary = key(Kind::Primary, device_key(device));
    if let Some(device) = process.device(device) {
        process.fitting.add_primary(device);
    }
    process.contexts.with(|()| {
        if process.pointers.get(primary).is_some() {
            return driver.make();
        }
        let reserved = match reserve(device) {
            Ok(reserved) => reserved,
            Err(code) => return code,
        };
        let result = driver.make();
        if let Some(reserved) = reserved
            && has_primary(device)
        {
            let handle = if context.is_null() {
                0
            } else {
                // SAFETY: not null, and the driver has just written to it.
                unsafe { context.read() }
            };
            reserved.note(primary, handle as u64);
        }
        result
    })
}

/// The end of a context: the driver frees its memory with it.
pub fn end(context: CUcontext, driver: Call<'_>) -> CUresult {
    let Some(process) = process::joined() else {
        return driver.make();
    };
    let result = process.contexts.with(|()| {
        let result = process.launches.measuring.across(|| {
            let result = driver.make();
            (result, move |ended| result.is_ok() && ended == context)
        });
        if result.is_ok() {
            forget(process, context);
            take(process, key(Kind::Context, context as u64));
        }
        result
    });
    if result.is_ok() {
        pool::look(process);
    }
    result
}

/// The end, maybe, of primary contexts, at a last release or a reset.
pub fn end_primary(driver: Call<'_>) -> CUresult {
    end_with(None, driver)
}

/// The end of a green context, and maybe of its primary one.
pub fn end_green(green: usize, driver: Call<'_>) -> CUresult {
    let mut context = 0;
    // SAFETY: what the program passes to the driver as a green context; writes to the local handle.
    let result =
        unsafe { real!(cuCtxFromGreenCtx: fn(*mut CUcontext, usize))(&raw mut context, green) };
    end_with(result.is_ok().then_some(context), driver)
}

/// Makes a call at which the context `green` ends, and primary contexts may.
fn end_with(green: Option<CUcontext>, driver: Call<'_>) -> CUresult {
    let Some(process) = process::joined() else {
        return driver.make();
    };
    let result = process.contexts.with(|()| {
        let mut contexts = [None; tranche_shim_core::paths::MAX_SHARES];
        for (context, device) in contexts.iter_mut().zip(process.devices()) {
            *context = primary(process, device.handle);
        }
        let ended = &mut contexts;
        let result = process.launches.measuring.across(move || {
            let result = driver.make();
            for (context, device) in ended.iter_mut().zip(process.devices()) {
                *context = context.filter(|_| !has_primary(device.handle));
            }
            let green = green.filter(|_| result.is_ok());
            let has_ended = move |context| green == Some(context) || ended.contains(&Some(context));
            (result, has_ended)
        });
        for (&context, device) in contexts.iter().zip(process.devices()) {
            if let Some(context) = context {
                forget(process, context);
                take(process, key(Kind::Primary, device_key(device.handle)));
            }
        }
        result
    });
    pool::look(process);
    result
}

// Of `CUlimit`.
const STACK_SIZE: u32 = 0;
const PRINTF_FIFO_SIZE: u32 = 1;
const MALLOC_HEAP_SIZE: u32 = 2;
const DEV_RUNTIME_SYNC_DEPTH: u32 = 3;

/// Bytes that each level of kernels which wait for their own kernels takes, at most (CUDA C++ Programming
/// Guide, "Memory Allocation and Lifetime" of the device runtime's first version).
const SYNC_LEVEL: u64 = 860 << 20;

/// `cuCtxSetLimit`: the driver takes more, or less, for stacks, heap or output of the current context's
/// kernels. What was measured of a context has its defaults.
pub fn set_limit(which: u32, value: usize, driver: Call<'_>) -> CUresult {
    let process = match process::current() {
        Ok(process) => process,
        Err(code) => return code,
    };
    let Ok(Some(device)) = current_capped(process) else {
        return driver.make();
    };
    let value = value as u64;
    let bytes = match which {
        STACK_SIZE => return set_stack_limit(process, device, value, driver),
        PRINTF_FIFO_SIZE => value.saturating_sub(1 << 20),
        MALLOC_HEAP_SIZE => value.saturating_sub(8 << 20),
        DEV_RUNTIME_SYNC_DEPTH => value.saturating_sub(2).saturating_mul(SYNC_LEVEL),
        _ => return driver.make(),
    };
    let bytes = device.taken_by(bytes);
    let context = current_context() as u64;
    let key = key(Kind::Limit, context | u64::from(which) << 48);
    process.contexts.with(|()| {
        let former = process.pointers.get(key).map_or(0, |entry| entry.bytes);
        let more = bytes.saturating_sub(former);
        let reserved = match Reserved::new(process, device, more, more) {
            Ok(reserved) => reserved,
            Err(code) => return code,
        };
        let result = driver.make();
        if result.is_ok() {
            reserved.keep();
            process.pointers.take(key);
            process.release(device, former.saturating_sub(bytes));
            if bytes > 0 {
                let device = device.number;
                note(
                    process,
                    key,
                    Entry {
                        bytes,
                        device,
                        context,
                    },
                );
            }
        }
        result
    })
}

fn set_stack_limit(
    process: &'static Process,
    device: &'static Device,
    value: u64,
    driver: Call<'_>,
) -> CUresult {
    let more = local::missing_for_stack(process, device, value);
    let reserved = match Reserved::new(process, device, more, more) {
        Ok(reserved) => reserved,
        Err(code) => return code,
    };
    let result = driver.make();
    if result.is_ok() {
        local::set_stack(reserved, value);
    }
    result
}

fn forget(process: &'static Process, context: CUcontext) {
    process.fitting.forget();
    if context != 0 {
        process.pointers.take_context(context as u64, |key, entry| {
            give_back(process, key, entry);
        });
    }
}

fn take(process: &'static Process, key: u64) {
    if let Some(Entry { bytes, device, .. }) = process.pointers.take(key)
        && let Some(device) = process.device_numbered(device)
    {
        process.release(device, bytes);
    }
}

/// A device's handle may be 0, which is no key.
fn device_key(device: CUdevice) -> u64 {
    u64::from(device.unsigned_abs()) + 1
}

fn has_primary(device: CUdevice) -> bool {
    let (mut flags, mut active) = (0, 0);
    // SAFETY: writes to the local numbers.
    let result = unsafe {
        real!(cuDevicePrimaryCtxGetState: fn(CUdevice, *mut u32, *mut i32))(
            device,
            &raw mut flags,
            &raw mut active,
        )
    };
    result.is_ok() && active != 0
}

/// The primary context's handle, if there is one: as it was told, or by retaining it once more, which a
/// context after a fault may refuse.
fn primary(process: &Process, device: CUdevice) -> Option<CUcontext> {
    if !has_primary(device) {
        return None;
    }
    let noted = process.pointers.get(key(Kind::Primary, device_key(device)));
    if let Some(noted) = noted.filter(|noted| noted.context != 0) {
        return usize::try_from(noted.context).ok();
    }
    let mut context = 0;
    // SAFETY: writes to the local handle; the reference is given back at once.
    let result = unsafe {
        let result =
            real!(cuDevicePrimaryCtxRetain: fn(*mut CUcontext, CUdevice))(&raw mut context, device);
        if result.is_ok() {
            real!(cuDevicePrimaryCtxRelease_v2: fn(CUdevice))(device);
        }
        result
    };
    result.is_ok().then_some(context)
}
