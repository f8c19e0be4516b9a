//! NVML's calls for MIG, which nvml-wrapper does not have: how a GPU can be divided, and how GPU instances and compute
//! instances are listed, created and removed. Also the state that must outlive a call: the samples of GPM ([`gpm`]),
//! the counters of NVLinks ([`nvlink`]) and the event set of Xids ([`xids`]).
//!
//! ```text
//!  Mig ──► profiles with their placements     (what the model can do)
//!      ──► GPU instances and their compute instances, each a MIG device with a UUID
//!      ──► MIG mode on and off; create and destroy, one call each
//! ```
//!
//! This is the only crate besides the shim and the simulator with unsafe code. Every instance is looked up by its id
//! for each call, so a handle of an instance that somebody else has removed is never used.

pub mod gpm;
pub mod nvlink;
pub mod xids;

use std::ffi::{CStr, c_char};
use std::ptr;

use nvml_wrapper::{Device, Nvml};
use nvml_wrapper_sys::bindings as sys;
use sys::NvmlLib;

/// A call that failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{call}: {reason}")]
pub struct Error {
    /// The NVML function.
    pub call: &'static str,
    /// What it returned.
    pub reason: Reason,
}

/// Why a call failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Reason {
    /// `NVML_ERROR_IN_USE`: a process, or another client of the driver, uses the instance.
    #[error("it is in use by another client")]
    InUse,
    /// `NVML_ERROR_INSUFFICIENT_RESOURCES`: the placement, or something else that the instance takes, is not free.
    #[error("the GPU has not enough free resources")]
    InsufficientResources,
    /// `NVML_ERROR_NOT_FOUND`.
    #[error("not found")]
    NotFound,
    /// `NVML_ERROR_NOT_SUPPORTED`: the model or the driver does not have it, or MIG mode is off.
    #[error("not supported")]
    NotSupported,
    /// `NVML_ERROR_INVALID_ARGUMENT`.
    #[error("invalid argument")]
    InvalidArgument,
    /// `NVML_ERROR_GPU_IS_LOST`.
    #[error("the GPU is lost")]
    GpuLost,
    /// `NVML_ERROR_RESET_REQUIRED`: the driver cannot reset the GPU, which the change needs.
    #[error("the GPU must be reset for it")]
    ResetRequired,
    /// The driver's library does not have the function.
    #[error("the driver does not have the function")]
    NoFunction,
    /// Any other code, with NVML's text for it.
    #[error("{text} (code {code})")]
    Other {
        /// `nvmlReturn_t`.
        code: u32,
        /// `nvmlErrorString`.
        text: String,
    },
}

/// A profile of GPU instances, with its possible placements.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Profile {
    /// Without the word MIG: `1g.10gb+me`.
    pub name: String,
    /// The id by which instances are created and listed.
    pub id: u32,
    /// `sliceCount`.
    pub compute_slices: u32,
    /// Most instances at the same time.
    pub instances: u32,
    /// MiB.
    pub memory_mib: u64,
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Copy engines, decoders, encoders, JPEG engines and OFA engines.
    pub engines: [u32; 5],
    /// The possible placements: where an instance may begin, and how many memory slices it takes there.
    pub placements: Vec<Placement>,
}

/// Adjacent memory slices.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Placement {
    /// The first.
    pub start: u32,
    /// How many.
    pub size: u32,
}

/// A GPU instance.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Instance {
    /// Its id on the GPU.
    pub id: u32,
    /// Its profile's id.
    pub profile: u32,
    /// Its memory slices.
    pub placement: Placement,
    /// Its compute instances.
    pub compute: Vec<ComputeInstance>,
}

/// A compute instance, which is what programs use: a MIG device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ComputeInstance {
    /// Its id in its GPU instance.
    pub id: u32,
    /// The UUID of the MIG device, `MIG-…`.
    pub uuid: String,
    /// Compute slices.
    pub slices: u32,
}

/// The number of profiles that are tried: `NVML_GPU_INSTANCE_PROFILE_COUNT` and its like for compute instances are below
/// this in all drivers so far.
const PROFILES: u32 = 32;
/// Most instances that a list is read for; a GPU has at most seven, and a GPU instance as many compute instances.
const MOST: usize = 64;

/// MIG of one GPU.
#[derive(Clone, Copy)]
pub struct Mig<'a> {
    lib: &'a NvmlLib,
    /// Invariant: a handle of the started NVML that `lib` is the library of, for as long as `'a`.
    device: sys::nvmlDevice_t,
}

impl std::fmt::Debug for Mig<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Mig").finish_non_exhaustive()
    }
}

/// Calls a function of NVML by its name; the arguments come after the name.
macro_rules! call {
    ($mig:expr, $name:ident($($argument:expr),*)) => {
        match &$mig.lib.$name {
            Ok(function) => $mig.check(stringify!($name), function($($argument),*)),
            Err(_) => Err(Error { call: stringify!($name), reason: Reason::NoFunction }),
        }
    };
}

impl<'a> Mig<'a> {
    /// MIG of `device`, which is one of `nvml`'s.
    #[must_use]
    pub fn of(nvml: &'a Nvml, device: &Device<'a>) -> Self {
        Self {
            lib: nvml.lib(),
            // SAFETY: it is used as long as NVML is started, which `'a` says, and never freed.
            device: unsafe { device.handle() },
        }
    }

    /// Switches MIG mode at once. If that is not possible the mode stays as it is, also after the GPU's next reset.
    ///
    /// # Errors
    /// [`Reason::InUse`] while a process or another client uses the GPU, or, to switch it off, while there are
    /// instances. [`Reason::ResetRequired`] where the GPU must be reset and the driver cannot: before Hopper, in a
    /// virtual machine.
    pub fn switch(&self, on: bool) -> Result<(), Error> {
        let changed = self.set_mode(on)?;
        if changed.is_err() {
            // It is pending: without this, a reset for another reason would change the mode.
            let _ = self.set_mode(!on);
        }
        changed
    }

    /// Sets the mode for the next reset, and whether it has changed at once (`activationStatus`).
    fn set_mode(&self, on: bool) -> Result<Result<(), Error>, Error> {
        let mut status = sys::nvmlReturn_enum_NVML_SUCCESS;
        // SAFETY: the handle is valid by the invariant.
        unsafe {
            call!(
                self,
                nvmlDeviceSetMigMode(self.device, u32::from(on), &raw mut status)
            )?;
        }
        Ok(self.check("nvmlDeviceSetMigMode", status))
    }

    /// The profiles of GPU instances that the model and the driver have.
    pub fn profiles(&self) -> Result<Vec<Profile>, Error> {
        let mut profiles = Vec::new();
        for number in 0..PROFILES {
            match self.profile(number) {
                Ok(profile) => profiles.push(profile),
                Err(error) if is_absent(&error) => {}
                Err(error) => return Err(error),
            }
        }
        profiles.sort_by_key(|profile| profile.id);
        Ok(profiles)
    }

    fn profile(&self, number: u32) -> Result<Profile, Error> {
        // SAFETY: of integers and characters alone, so all zeros is a value.
        let mut info: sys::nvmlGpuInstanceProfileInfo_v2_t = unsafe { std::mem::zeroed() };
        info.version = version(&info, 2);
        // SAFETY: the handle is valid by the invariant; the struct is of the version that it says.
        unsafe {
            call!(
                self,
                nvmlDeviceGetGpuInstanceProfileInfoV(self.device, number, &raw mut info)
            )?;
        }
        Ok(Profile {
            name: text(&info.name).trim_start_matches("MIG ").to_owned(),
            id: info.id,
            compute_slices: info.sliceCount,
            instances: info.instanceCount,
            memory_mib: info.memorySizeMB,
            multiprocessors: info.multiprocessorCount,
            engines: [
                info.copyEngineCount,
                info.decoderCount,
                info.encoderCount,
                info.jpegCount,
                info.ofaCount,
            ],
            placements: self.placements(info.id)?,
        })
    }

    fn placements(&self, profile: u32) -> Result<Vec<Placement>, Error> {
        let mut count = 0;
        // SAFETY: the handle is valid by the invariant; without a place for placements only their number is written.
        unsafe {
            call!(
                self,
                nvmlDeviceGetGpuInstancePossiblePlacements_v2(
                    self.device,
                    profile,
                    ptr::null_mut(),
                    &raw mut count
                )
            )?;
        }
        let none = sys::nvmlGpuInstancePlacement_t { start: 0, size: 0 };
        let mut placements = vec![none; count as usize];
        // SAFETY: as above, and there is a place for `count` placements.
        unsafe {
            call!(
                self,
                nvmlDeviceGetGpuInstancePossiblePlacements_v2(
                    self.device,
                    profile,
                    placements.as_mut_ptr(),
                    &raw mut count
                )
            )?;
        }
        placements.truncate(count as usize);
        Ok(placements.into_iter().map(Placement::from).collect())
    }

    /// The GPU instances that exist, by id; empty without MIG mode.
    pub fn instances(&self, profiles: &[Profile]) -> Result<Vec<Instance>, Error> {
        let mut instances = Vec::new();
        for profile in profiles {
            let mut handles = [ptr::null_mut(); MOST];
            let mut count = 0;
            // SAFETY: the handle is valid by the invariant; a profile has at most as many instances as there is place for.
            let listed = unsafe {
                call!(
                    self,
                    nvmlDeviceGetGpuInstances(
                        self.device,
                        profile.id,
                        handles.as_mut_ptr(),
                        &raw mut count
                    )
                )
            };
            match listed {
                Err(error) if is_absent(&error) => continue,
                listed => listed?,
            }
            for handle in handles.iter().take(count as usize) {
                instances.push(self.instance(*handle)?);
            }
        }
        instances.sort_by_key(|instance| instance.id);
        Ok(instances)
    }

    fn instance(&self, handle: sys::nvmlGpuInstance_t) -> Result<Instance, Error> {
        let info = self.instance_info(handle)?;
        Ok(Instance {
            id: info.id,
            profile: info.profileId,
            placement: info.placement.into(),
            compute: self.compute_instances(handle, info.id)?,
        })
    }

    fn instance_info(
        &self,
        handle: sys::nvmlGpuInstance_t,
    ) -> Result<sys::nvmlGpuInstanceInfo_t, Error> {
        // SAFETY: of integers and a pointer, so all zeros is a value.
        let mut info: sys::nvmlGpuInstanceInfo_t = unsafe { std::mem::zeroed() };
        // SAFETY: NVML has just returned the handle; it checks it.
        unsafe { call!(self, nvmlGpuInstanceGetInfo(handle, &raw mut info))? };
        Ok(info)
    }

    fn compute_instances(
        &self,
        of: sys::nvmlGpuInstance_t,
        instance: u32,
    ) -> Result<Vec<ComputeInstance>, Error> {
        let mut found = Vec::new();
        for profile in self.compute_profiles(of)? {
            let mut handles = [ptr::null_mut(); MOST];
            let mut count = 0;
            // SAFETY: NVML has just returned the handle; a profile has at most as many instances as there is place for.
            let listed = unsafe {
                call!(
                    self,
                    nvmlGpuInstanceGetComputeInstances(
                        of,
                        profile.id,
                        handles.as_mut_ptr(),
                        &raw mut count
                    )
                )
            };
            match listed {
                Err(error) if is_absent(&error) => continue,
                listed => listed?,
            }
            for handle in handles.iter().take(count as usize) {
                found.push(self.compute_instance(*handle, instance, profile.sliceCount)?);
            }
        }
        found.sort_by_key(|it| it.id);
        Ok(found)
    }

    /// The profiles of compute instances of a GPU instance with the usual engine profile.
    fn compute_profiles(
        &self,
        instance: sys::nvmlGpuInstance_t,
    ) -> Result<Vec<sys::nvmlComputeInstanceProfileInfo_t>, Error> {
        let mut profiles = Vec::new();
        for number in 0..PROFILES {
            // SAFETY: of integers alone, so all zeros is a value.
            let mut info: sys::nvmlComputeInstanceProfileInfo_t = unsafe { std::mem::zeroed() };
            // SAFETY: NVML has just returned the handle; it checks the numbers.
            let known = unsafe {
                call!(
                    self,
                    nvmlGpuInstanceGetComputeInstanceProfileInfo(
                        instance,
                        number,
                        sys::NVML_COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED,
                        &raw mut info
                    )
                )
            };
            match known {
                Ok(()) => profiles.push(info),
                Err(error) if is_absent(&error) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(profiles)
    }

    fn compute_instance(
        &self,
        handle: sys::nvmlComputeInstance_t,
        instance: u32,
        slices: u32,
    ) -> Result<ComputeInstance, Error> {
        // SAFETY: of integers and pointers, so all zeros is a value.
        let mut info: sys::nvmlComputeInstanceInfo_t = unsafe { std::mem::zeroed() };
        // SAFETY: NVML has just returned the handle; it checks it.
        unsafe {
            call!(self, nvmlComputeInstanceGetInfo_v2(handle, &raw mut info))?;
        }
        let device = self.mig_device(&info, instance)?;
        let mut uuid = [0; sys::NVML_DEVICE_UUID_V2_BUFFER_SIZE as usize];
        let length = sys::NVML_DEVICE_UUID_V2_BUFFER_SIZE;
        // SAFETY: NVML has just returned the handle; the buffer has the length that is said.
        unsafe {
            call!(self, nvmlDeviceGetUUID(device, uuid.as_mut_ptr(), length))?;
        }
        Ok(ComputeInstance {
            id: info.id,
            uuid: text(&uuid),
            slices,
        })
    }

    /// The MIG device of a compute instance. nvml.h calls the device in its description the parent, but drivers return
    /// the MIG device itself, and NVIDIA's DRA driver relies on that. A search of all MIG devices takes up to ten
    /// seconds on a GPU in use, so it is only for drivers that do what nvml.h says.
    fn mig_device(
        &self,
        info: &sys::nvmlComputeInstanceInfo_t,
        instance: u32,
    ) -> Result<sys::nvmlDevice_t, Error> {
        let mut is_mig = 0;
        let mut count = 0;
        // SAFETY: NVML has just returned the first handle; the second is valid by the invariant.
        unsafe {
            call!(
                self,
                nvmlDeviceIsMigDeviceHandle(info.device, &raw mut is_mig)
            )?;
            if is_mig != 0 {
                return Ok(info.device);
            }
            call!(
                self,
                nvmlDeviceGetMaxMigDeviceCount(self.device, &raw mut count)
            )?;
        }
        for index in 0..count {
            let mut device = ptr::null_mut();
            // SAFETY: the handle is valid by the invariant.
            let listed = unsafe {
                call!(
                    self,
                    nvmlDeviceGetMigDeviceHandleByIndex(self.device, index, &raw mut device)
                )
            };
            match listed {
                Err(error) if is_absent(&error) => continue,
                listed => listed?,
            }
            let mut ids = [0; 2];
            let [of, id] = &mut ids;
            // SAFETY: NVML has just returned the handle.
            unsafe {
                call!(self, nvmlDeviceGetGpuInstanceId(device, of))?;
                call!(self, nvmlDeviceGetComputeInstanceId(device, id))?;
            }
            if ids == [instance, info.id] {
                return Ok(device);
            }
        }
        Err(Error {
            call: "nvmlDeviceGetMigDeviceHandleByIndex",
            reason: Reason::NotFound,
        })
    }

    /// Creates a GPU instance at a placement and returns its id. If the placement is taken, also by an equal instance,
    /// the reason is [`Reason::InsufficientResources`].
    pub fn create_instance(&self, profile: u32, placement: Placement) -> Result<u32, Error> {
        let Placement { start, size } = placement;
        let placement = sys::nvmlGpuInstancePlacement_t { start, size };
        let mut handle = ptr::null_mut();
        // SAFETY: the handle is valid by the invariant; NVML checks the profile and the placement.
        unsafe {
            call!(
                self,
                nvmlDeviceCreateGpuInstanceWithPlacement(
                    self.device,
                    profile,
                    &raw const placement,
                    &raw mut handle
                )
            )?;
        }
        Ok(self.instance_info(handle)?.id)
    }

    /// Creates the compute instance that has all slices of a GPU instance.
    pub fn create_compute_instance(&self, instance: u32) -> Result<ComputeInstance, Error> {
        let handle = self.find(instance)?;
        let profiles = self.compute_profiles(handle)?;
        let size =
            |it: &&sys::nvmlComputeInstanceProfileInfo_t| (it.sliceCount, it.multiprocessorCount);
        let largest = profiles.iter().max_by_key(size);
        let profile = largest.ok_or(Error {
            call: "nvmlGpuInstanceGetComputeInstanceProfileInfo",
            reason: Reason::NotFound,
        })?;
        let mut compute = ptr::null_mut();
        // SAFETY: NVML has just returned the handle; it checks the profile.
        unsafe {
            call!(
                self,
                nvmlGpuInstanceCreateComputeInstance(handle, profile.id, &raw mut compute)
            )?;
        }
        self.compute_instance(compute, instance, profile.sliceCount)
    }

    /// Removes a compute instance.
    pub fn destroy_compute_instance(&self, instance: u32, compute: u32) -> Result<(), Error> {
        let handle = self.find(instance)?;
        let mut found = ptr::null_mut();
        // SAFETY: NVML has just returned the handle; the second call gets what the first has written.
        unsafe {
            call!(
                self,
                nvmlGpuInstanceGetComputeInstanceById(handle, compute, &raw mut found)
            )?;
            call!(self, nvmlComputeInstanceDestroy(found))
        }
    }

    /// Removes a GPU instance, which must have no compute instance.
    pub fn destroy_instance(&self, instance: u32) -> Result<(), Error> {
        let handle = self.find(instance)?;
        // SAFETY: NVML has just returned the handle.
        unsafe { call!(self, nvmlGpuInstanceDestroy(handle)) }
    }

    fn find(&self, instance: u32) -> Result<sys::nvmlGpuInstance_t, Error> {
        let mut handle = ptr::null_mut();
        // SAFETY: the handle is valid by the invariant.
        unsafe {
            call!(
                self,
                nvmlDeviceGetGpuInstanceById(self.device, instance, &raw mut handle)
            )?;
        }
        Ok(handle)
    }

    fn check(&self, call: &'static str, code: sys::nvmlReturn_t) -> Result<(), Error> {
        let reason = match code {
            sys::nvmlReturn_enum_NVML_SUCCESS => return Ok(()),
            sys::nvmlReturn_enum_NVML_ERROR_IN_USE => Reason::InUse,
            sys::nvmlReturn_enum_NVML_ERROR_INSUFFICIENT_RESOURCES => Reason::InsufficientResources,
            sys::nvmlReturn_enum_NVML_ERROR_NOT_FOUND => Reason::NotFound,
            sys::nvmlReturn_enum_NVML_ERROR_NOT_SUPPORTED => Reason::NotSupported,
            sys::nvmlReturn_enum_NVML_ERROR_INVALID_ARGUMENT => Reason::InvalidArgument,
            sys::nvmlReturn_enum_NVML_ERROR_GPU_IS_LOST => Reason::GpuLost,
            sys::nvmlReturn_enum_NVML_ERROR_RESET_REQUIRED => Reason::ResetRequired,
            code => Reason::Other {
                code,
                text: self.error_text(code),
            },
        };
        Err(Error { call, reason })
    }

    fn error_text(&self, code: sys::nvmlReturn_t) -> String {
        let Ok(function) = &self.lib.nvmlErrorString else {
            return "error".to_owned();
        };
        // SAFETY: takes any code, and returns a text of the library.
        let text = unsafe { function(code) };
        if text.is_null() {
            return "error".to_owned();
        }
        // SAFETY: not null, ends with a zero, and is a constant of the library, which is loaded.
        let text = unsafe { CStr::from_ptr(text) };
        text.to_string_lossy().into_owned()
    }
}

/// Errors for what a model does not have, or a driver does not know. Numbers beyond its last profile are invalid
/// arguments.
fn is_absent(error: &Error) -> bool {
    matches!(
        error.reason,
        Reason::NotSupported | Reason::InvalidArgument | Reason::NotFound | Reason::NoFunction
    )
}

/// The version of a struct: its size, and its number from bit 24 on (`NVML_STRUCT_VERSION`).
fn version<T>(_: &T, number: u32) -> u32 {
    u32::try_from(size_of::<T>()).unwrap_or(u32::MAX) | number << 24
}

/// A text that ends at its first zero byte, or at the end of its field.
fn text(characters: &[c_char]) -> String {
    let bytes: Vec<u8> = characters
        .iter()
        .map(|it| it.to_ne_bytes()[0])
        .take_while(|byte| *byte != 0)
        .collect();
    String::from_utf8_lossy(&bytes).into_owned()
}

impl From<sys::nvmlGpuInstancePlacement_t> for Placement {
    fn from(placement: sys::nvmlGpuInstancePlacement_t) -> Self {
        Self {
            start: placement.start,
            size: placement.size,
        }
    }
}
