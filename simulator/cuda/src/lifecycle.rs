//! How contexts begin and end, primary contexts included.

use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use crate::code::Code;
use crate::context::Context;
use crate::device::{Device, devices};
use crate::driver::driver;
use crate::memory;
use crate::object::Object;
use crate::stream;

/// The primary context of a GPU.
#[derive(Debug, Default)]
pub struct Primary {
    /// The context, if it is active.
    pub context: Option<&'static Object<Context>>,
    users: u32,
    pub flags: u32,
}

/// Creates a context, if the GPU's compute mode and its memory allow one.
pub fn create(device: &'static Device, flags: u32) -> Result<&'static Object<Context>, Code> {
    let driver = driver()?;
    let bytes = driver.shared.context_bytes(driver.slot, device.gpu);
    device.within_mps_limit(bytes, || {
        let reclaim = || driver.reclaim();
        Ok(driver
            .shared
            .open_context(driver.slot, device.gpu, reclaim)?)
    })?;
    let context = Object::create(Context::new(device, flags));
    stream::create_null(context);
    Ok(context)
}

/// Ends a context and frees what was allocated in it.
pub fn end(context: &'static Object<Context>) {
    if let Ok(stream) = stream::null(context) {
        stream.destroy();
    }
    memory::free_all(context);
    let device = context.device;
    if let Ok(driver) = driver() {
        device.release(driver.shared.context_bytes(driver.slot, device.gpu) + context.taken());
    }
    context.destroy();
}

/// The primary context of a GPU, active or not.
pub fn primary(of: &Device) -> Result<MutexGuard<'static, Primary>, Code> {
    static ALL: OnceLock<Vec<Mutex<Primary>>> = OnceLock::new();
    let devices = devices()?;
    let all = ALL.get_or_init(|| devices.iter().map(|_| Mutex::default()).collect());
    let index = usize::try_from(of.ordinal).map_err(|_| Code::INVALID_DEVICE)?;
    let primary = all.get(index).ok_or(Code::INVALID_DEVICE)?;
    Ok(primary.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Retains the primary context of a GPU; activates it for the first user.
pub fn retain_primary(of: &'static Device) -> Result<&'static Object<Context>, Code> {
    let mut primary = primary(of)?;
    let context = match primary.context {
        Some(context) => context,
        None => create(of, primary.flags)?,
    };
    primary.context = Some(context);
    primary.users += 1;
    Ok(context)
}

/// Ends one use of a GPU's primary context, and the context itself with its last.
pub fn release_primary(of: &Device) -> Result<(), Code> {
    let mut primary = primary(of)?;
    primary.users = primary.users.checked_sub(1).ok_or(Code::INVALID_CONTEXT)?;
    let ended = (primary.users == 0)
        .then(|| primary.context.take())
        .flatten();
    drop(primary);
    ended.into_iter().for_each(end);
    Ok(())
}

/// Ends a GPU's primary context, even if it is in use.
pub fn reset_primary(of: &Device) -> Result<(), Code> {
    let mut primary = primary(of)?;
    primary.users = 0;
    let ended = primary.context.take();
    drop(primary);
    ended.into_iter().for_each(end);
    Ok(())
}

/// Sets the flags of a GPU's primary context.
pub fn set_primary_flags(of: &Device, flags: u32) -> Result<(), Code> {
    let mut primary = primary(of)?;
    primary.flags = flags;
    if let Some(context) = primary.context {
        context.flags.store(u64::from(flags), Ordering::Relaxed);
    }
    Ok(())
}
