//! The Xids of GPUs, from NVML's critical events.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

use nvml_wrapper::error::{NvmlError, nvml_try};
use nvml_wrapper::{Device, Nvml};
use nvml_wrapper_sys::bindings as sys;

/// `nvmlEventTypeXidCriticalError` of nvml.h.
const XID_CRITICAL_ERROR: u64 = 0x8;
/// Most events of one reading; the rest is for the next one.
const MOST: usize = 256;

/// Collects the Xids of the GPUs that it watches.
#[derive(Debug)]
pub struct Xids {
    nvml: Arc<Nvml>,
    watched: Mutex<Option<Watched>>,
}

/// An event set.
#[derive(Debug)]
struct Watched {
    /// Invariant: a set that the started NVML has made, that nobody else has, and that is not freed yet.
    set: sys::nvmlEventSet_t,
    /// The UUIDs of its GPUs by their handles: NVML does not report the UUID of a lost GPU.
    gpus: BTreeMap<usize, String>,
}

// SAFETY: NVML is thread-safe (nvml.h), and a set belongs to no thread.
unsafe impl Send for Watched {}

impl Xids {
    /// Watches no GPU yet.
    #[must_use]
    pub fn new(nvml: Arc<Nvml>) -> Self {
        Self {
            nvml,
            watched: Mutex::default(),
        }
    }

    /// The Xids since the last reading, with the UUIDs of their GPUs. A GPU is watched from its first reading on.
    ///
    /// # Errors
    /// `NotSupported` and `FunctionNotFound` if the model or the driver does not have such events.
    pub fn read(&self, uuids: &[&str]) -> Result<Vec<(String, u64)>, NvmlError> {
        let mut watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        let watched = match &mut *watched {
            Some(watched) => watched,
            none => none.insert(Watched {
                set: self.create()?,
                gpus: BTreeMap::new(),
            }),
        };
        for uuid in uuids {
            if watched.gpus.values().any(|known| known == uuid) {
                continue;
            }
            // A GPU that is lost or has no such events must not prevent that the others are watched.
            let device = self.nvml.device_by_uuid(*uuid);
            if let Some(handle) = device
                .ok()
                .and_then(|it| self.register(watched.set, &it).ok())
            {
                watched.gpus.insert(handle as usize, (*uuid).to_owned());
            }
        }
        let mut found = Vec::new();
        for _ in 0..MOST {
            let Some((handle, xid)) = self.next(watched.set)? else {
                break;
            };
            let uuid = watched.gpus.get(&(handle as usize));
            found.extend(uuid.map(|uuid| (uuid.clone(), xid)));
        }
        Ok(found)
    }

    fn create(&self) -> Result<sys::nvmlEventSet_t, NvmlError> {
        let create = function(&self.nvml.lib().nvmlEventSetCreate)?;
        let mut set: sys::nvmlEventSet_t = std::ptr::null_mut();
        // SAFETY: NVML is started, and writes one handle.
        nvml_try(unsafe { create(&raw mut set) })?;
        Ok(set)
    }

    fn register(
        &self,
        set: sys::nvmlEventSet_t,
        device: &Device<'_>,
    ) -> Result<sys::nvmlDevice_t, NvmlError> {
        let register = function(&self.nvml.lib().nvmlDeviceRegisterEvents)?;
        // SAFETY: it is used while NVML is started, and never freed.
        let handle = unsafe { device.handle() };
        // SAFETY: the device is of this NVML, and the set is by the invariant.
        nvml_try(unsafe { register(handle, XID_CRITICAL_ERROR, set) })?;
        Ok(handle)
    }

    /// The next event that has happened: the GPU's handle, and the Xid.
    fn next(
        &self,
        set: sys::nvmlEventSet_t,
    ) -> Result<Option<(sys::nvmlDevice_t, u64)>, NvmlError> {
        let wait = function(&self.nvml.lib().nvmlEventSetWait_v2)?;
        // SAFETY: of handles and integers alone, so all zeros is a value.
        let mut event: sys::nvmlEventData_t = unsafe { std::mem::zeroed() };
        // SAFETY: the set is by the invariant; NVML writes one event. Without a time to wait it returns at once.
        match nvml_try(unsafe { wait(set, &raw mut event, 0) }) {
            Ok(()) => Ok(Some((event.device, event.eventData))),
            Err(NvmlError::Timeout) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

impl Drop for Xids {
    fn drop(&mut self) {
        let watched = self
            .watched
            .get_mut()
            .unwrap_or_else(PoisonError::into_inner);
        if let (Some(watched), Ok(free)) =
            (watched.take(), function(&self.nvml.lib().nvmlEventSetFree))
        {
            // SAFETY: the set is by the invariant, and nobody has it any more.
            unsafe {
                free(watched.set);
            }
        }
    }
}

/// A function that the driver's library may not have.
fn function<T: Copy, E>(symbol: &Result<T, E>) -> Result<T, NvmlError> {
    symbol
        .as_ref()
        .copied()
        .map_err(|_| NvmlError::FunctionNotFound)
}
