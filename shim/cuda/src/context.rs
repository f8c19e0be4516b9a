//! Contexts: each takes memory of its own, which the node measured once per model of GPU and wrote
//! into the cap page. The share has room for one beside its memory, so that a lone process has all of
//! that; every further one is charged like any memory.

use tranche_shim_core::Entry;

use crate::abi::{CUcontext, CUdevice, CUresult};
use crate::driver::{Call, real};
use crate::memory::{Reserved, give_back};
use crate::pool;
use crate::process::{self, Kind, Process, key};

/// A new context on a device.
pub fn make(context: *mut CUcontext, device: CUdevice, driver: Call<'_>) -> CUresult {
    let reserved = match reserve(device) {
        Ok(reserved) if !context.is_null() => reserved,
        Ok(_) => return driver.make(),
        Err(code) => return code,
    };
    let result = driver.make();
    if let (true, Some(reserved)) = (result.is_ok(), reserved) {
        // SAFETY: not null, and the driver has just written to it.
        reserved.note(key(Kind::Context, unsafe { context.read() } as u64), 0);
    }
    result
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

/// Whatever retains a device's primary context, which makes it if there is none.
pub fn retain_primary(device: CUdevice, driver: Call<'_>) -> CUresult {
    let process = match process::current() {
        Ok(process) => process,
        Err(code) => return code,
    };
    let primary = key(Kind::Primary, device_key(device));
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
            reserved.note(primary, 0);
        }
        result
    })
}

/// The end of a context: the driver frees its memory with it.
pub fn end(context: CUcontext, driver: Call<'_>) -> CUresult {
    let result = driver.make();
    if let (true, Some(process)) = (result.is_ok(), process::joined()) {
        forget(process, context);
        take(process, key(Kind::Context, context as u64));
        pool::look(process);
    }
    result
}

/// The end, maybe, of primary contexts: at a last release, at a reset, or with a green context.
pub fn end_primary(driver: Call<'_>) -> CUresult {
    let Some(process) = process::joined() else {
        return driver.make();
    };
    let result = process.contexts.with(|()| {
        let mut contexts = [None; tranche_shim_core::paths::MAX_SHARES];
        for (context, device) in contexts.iter_mut().zip(process.devices()) {
            *context = primary(device.handle);
        }
        let result = driver.make();
        for (context, device) in contexts.iter().zip(process.devices()) {
            if let &Some(context) = context
                && !has_primary(device.handle)
            {
                forget(process, context);
                take(process, key(Kind::Primary, device_key(device.handle)));
            }
        }
        result
    });
    pool::look(process);
    result
}

fn forget(process: &'static Process, context: CUcontext) {
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

/// The primary context's handle, if there is one: only retaining it tells.
fn primary(device: CUdevice) -> Option<CUcontext> {
    if !has_primary(device) {
        return None;
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
