//! This process in its shares.
//!
//! The process's state lies in one private mapping that the kernel wipes in a forked child. So a child
//! starts as if it had never called CUDA, without its parent's slots, charges and pointers, and joins at its
//! first call that needs a share. It inherits the descriptors of its parent's slots, as it inherits the
//! driver's: after the parent has ended, its charge stays until the child has closed them, which is when the
//! driver frees the memory. `exec` closes both.

use core::cell::UnsafeCell;
use core::mem::MaybeUninit;
use core::ptr;
use core::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};

use tranche_shim_core::paths::MAX_SHARES;
use tranche_shim_core::{Blocks, GpuUuid, Physical, Table};
use tranche_shim_runtime::complain::Refused;
use tranche_shim_runtime::container_shares::{self, Share};
use tranche_shim_runtime::lock::Guarded;
use tranche_shim_runtime::sys::{self, NotMapped};

use crate::abi::{CUdevice, CUresult, CUstream, CUuuid};
use crate::contexts::Contexts;
use crate::current_pools::CurrentPools;
use crate::device::{self, Device, JoinedShare, Residence};
use crate::driver::{Call, real};
use crate::driver_pools::DriverPools;
use crate::ends::Ends;
use crate::fitting::Fitting;
use crate::launches::Launches;
use crate::libraries::Libraries;
use crate::mps;
use crate::stream::{LAST_IMPLICIT_STREAM, context_of, within};

/// The state of this process. The order of the fields matters: the parts that every process uses are adjacent.
#[repr(C)]
pub struct Process {
    state: AtomicU32,
    joined: UnsafeCell<Joined>,
    /// Its device pointers, and the handles of other charged memory (see [`crate::keys`]).
    pub pointers: Table,
    pub launches: Launches,
    /// The kernels whose local memory is charged.
    pub fitting: Fitting,
    /// The blocks of its small allocations.
    pub blocks: Blocks,
    /// The physical memory that it created.
    pub physical: Guarded<Physical>,
    /// Whether it ever exported memory by a descriptor.
    pub has_exports: AtomicBool,
    /// The memory that the driver keeps for its pools, graphs and modules.
    pub driver_pools: Guarded<DriverPools>,
    pub libraries: Guarded<Libraries>,
    /// Whether the driver can be asked about any of them: pools or graphs.
    pub has_driver_pools: AtomicBool,
    /// Whether any of them may have something to give back. Changed while `driver_pools` is locked.
    pub watches_pools: AtomicBool,
    /// How often the program has waited since it had pools, about.
    pub waits: AtomicU32,
    pub current_pools: CurrentPools,
    pub contexts: Contexts,
    pub ends: Ends,
    /// Locked while memory is reserved from several shares, or given back to them.
    pub dividing: Guarded<()>,
}

// Zero, as in a new mapping and after a fork.
const NOT_JOINED: u32 = 0;
const JOINING: u32 = 1;
const JOINED: u32 = 2;
const REFUSED: u32 = 3;

// SAFETY: `joined` is written only by the thread that set the state to JOINING, and read only after
// that thread set it to JOINED.
unsafe impl Sync for Process {}

/// All zeros is valid: no device and no share.
#[repr(C)]
struct Joined {
    /// Whether it has one device, which is capped, and one share.
    is_sole: bool,
    /// Whether it has a device whose ordinary allocations may move.
    is_oversubscribed: bool,
    device_count: usize,
    share_count: usize,
    devices: [Device; MAX_SHARES],
    shares: [MaybeUninit<JoinedShare>; MAX_SHARES],
}

static PROCESS: AtomicPtr<Process> = AtomicPtr::new(ptr::null_mut());

/// `cuInit`: calls the driver's, which takes no memory on a GPU. Then the process joins its shares; without that, later
/// calls are refused. The environment that the driver reads for a share with MPS is set before.
pub fn initialise(driver: Call<'_>) -> CUresult {
    if let Err(code) = mps::prepare() {
        return code;
    }
    let result = driver.make();
    if !result.is_ok() {
        return result;
    }
    if let Some(process) = existing() {
        // The program may call cuInit again after an error whose cause is gone.
        let _ = process.state.compare_exchange(
            REFUSED,
            NOT_JOINED,
            Ordering::Relaxed,
            Ordering::Relaxed,
        );
    }
    match current() {
        Ok(_) => CUresult::SUCCESS,
        Err(code) => code,
    }
}

/// The process, after it has joined its shares.
#[inline]
pub fn current() -> Result<&'static Process, CUresult> {
    match existing() {
        Some(process) if process.state.load(Ordering::Acquire) == JOINED => Ok(process),
        _ => join(),
    }
}

/// The process if it has joined. Before that it has no pointers.
#[inline]
pub fn joined() -> Option<&'static Process> {
    existing().filter(|process| process.state.load(Ordering::Acquire) == JOINED)
}

#[inline]
fn existing() -> Option<&'static Process> {
    // SAFETY: null, or a mapping of a `Process` that is never unmapped.
    unsafe { PROCESS.load(Ordering::Acquire).as_ref() }
}

#[cold]
#[inline(never)]
fn join() -> Result<&'static Process, CUresult> {
    let process = match existing() {
        Some(process) => process,
        None => map().map_err(|why| code_of(container_shares::refuse_memory(why)))?,
    };
    let state = &process.state;
    if state.load(Ordering::Acquire) == REFUSED {
        return Err(CUresult::NOT_PERMITTED);
    }
    // Every thread asks the driver first: the driver must not be called while other threads wait for this one, because a
    // tool's callback in it may call this function.
    let visible = Visible::ask()?;
    loop {
        match state.compare_exchange(NOT_JOINED, JOINING, Ordering::Acquire, Ordering::Acquire) {
            Ok(_) => {
                // SAFETY: this thread set JOINING, so that it alone uses `joined`.
                let joined = unsafe { &mut *process.joined.get() };
                let result = joined.make(&visible);
                if result.is_err() {
                    // The next attempt takes new slots.
                    joined.leave();
                }
                let (now, answer) = match result {
                    Ok(()) => (JOINED, Ok(process)),
                    Err(Refused) => (REFUSED, Err(CUresult::NOT_PERMITTED)),
                };
                state.store(now, Ordering::Release);
                return answer;
            }
            Err(JOINED) => return Ok(process),
            Err(REFUSED) => return Err(CUresult::NOT_PERMITTED),
            Err(_) => sys::give_way(),
        }
    }
}

/// Maps the state of a process that has not joined.
fn map() -> Result<&'static Process, NotMapped> {
    let mapping = sys::map_private(size_of::<Process>())?;
    let fresh = mapping.start.as_ptr().cast::<Process>();
    match PROCESS.compare_exchange(ptr::null_mut(), fresh, Ordering::AcqRel, Ordering::Acquire) {
        // SAFETY: a mapping of the right size, page-aligned, whose zeros are a `Process` that has
        // not joined: `joined` is not read in that state, and zeros are an empty table, no blocks, no
        // physical memory, no pools, no libraries, no launches, no kernels and free locks.
        Ok(_) => Ok(unsafe { &*fresh }),
        Err(other) => {
            // SAFETY: nothing else uses this one.
            unsafe { sys::unmap(mapping) };
            // SAFETY: as above, of the thread that was first.
            Ok(unsafe { &*other })
        }
    }
}

fn code_of(_: Refused) -> CUresult {
    CUresult::NOT_PERMITTED
}

/// The GPUs that the driver shows.
struct Visible {
    count: usize,
    devices: [MaybeUninit<Device>; MAX_SHARES],
}

fn ask(result: CUresult) -> Result<(), CUresult> {
    if result.is_ok() { Ok(()) } else { Err(result) }
}

impl Visible {
    fn ask() -> Result<Self, CUresult> {
        let mut visible = Self {
            count: 0,
            devices: [const { MaybeUninit::uninit() }; MAX_SHARES],
        };
        let mut count = 0;
        // SAFETY: writes to the local number.
        ask(unsafe { real!(cuDeviceGetCount: fn(*mut i32))(&raw mut count) })?;
        for ordinal in 0..count {
            let (handle, gpu) = identify(ordinal)?;
            let number = visible.count;
            let place = visible
                .devices
                .get_mut(number)
                .ok_or_else(|| code_of(container_shares::refuse_too_many()))?;
            place.write(Device::new(
                handle,
                gpu,
                u8::try_from(number).unwrap_or(u8::MAX),
            ));
            visible.count += 1;
        }
        Ok(visible)
    }

    fn devices(&self) -> impl Iterator<Item = &Device> {
        // SAFETY: those before `count` are written.
        let read = |place: &'_ MaybeUninit<Device>| unsafe { &*place.as_ptr() };
        self.devices.iter().take(self.count).map(read)
    }
}

impl Joined {
    /// Finds the share of every GPU that the driver shows, and takes a slot in each share's account.
    fn make(&mut self, visible: &Visible) -> Result<(), Refused> {
        (self.device_count, self.share_count) = (visible.count, 0);
        for (place, device) in self.devices.iter_mut().zip(visible.devices()) {
            *place = *device;
        }
        container_shares::each(&mut |share| self.add(share))?;
        let is_unknown = |device: &&Device| device.kind == device::Kind::Unknown;
        if let Some(device) = self.devices().iter().find(is_unknown) {
            // Fails closed: this container was not given this GPU.
            return Err(container_shares::refuse_gpu(device.gpu));
        }
        let moves = |it: &Device| it.is_capped() && it.residence == Residence::Movable;
        self.is_oversubscribed = self.devices().iter().any(moves);
        self.is_sole = matches!(self.devices(), [only] if only.is_capped() && only.shares == 1);
        Ok(())
    }

    /// Adds a share, if its GPU is visible to this process.
    fn add(&mut self, share: &Share) -> Result<(), Refused> {
        let count = self.device_count;
        let mut devices = self.devices.iter_mut().take(count);
        let Some(device) = devices.find(|device| device.gpu == share.gpu) else {
            return Ok(());
        };
        mps::check(share)?;
        device.add_residence(share)?;
        match share.limit {
            None => device.kind = device::Kind::Uncapped,
            Some(limit) => {
                let place = self
                    .shares
                    .get_mut(self.share_count)
                    .ok_or_else(container_shares::refuse_too_many)?;
                // Of several shares of one GPU, only the first has room for a context beside its memory.
                let context = if device.shares == 0 { share.context } else { 0 };
                place.write(JoinedShare::take(share, limit, context)?);
                device.add_cores(share.cores);
                device.add_priority(share.priority);
                device.context = device.context.max(share.context);
                device.shares |= 1 << self.share_count;
                self.share_count += 1;
                if device.kind == device::Kind::Unknown {
                    device.kind = device::Kind::Capped;
                }
            }
        }
        Ok(())
    }

    /// Gives the slots back.
    fn leave(&mut self) {
        let count = core::mem::take(&mut self.share_count);
        for place in self.shares.iter().take(count) {
            // SAFETY: those before `share_count` were written, and are read for the last time. The
            // process has not joined, so nothing else uses them.
            unsafe { place.assume_init_read().leave() };
        }
    }

    fn devices(&self) -> &[Device] {
        self.devices.get(..self.device_count).unwrap_or(&[])
    }

    fn share(&self, number: usize) -> Option<&JoinedShare> {
        let place = self.shares.get(..self.share_count)?.get(number)?;
        // SAFETY: those before `share_count` are written.
        Some(unsafe { place.assume_init_ref() })
    }
}

impl Process {
    #[inline]
    fn joined(&self) -> &Joined {
        // SAFETY: a `Process` is handed out only after it has joined, and then it is not written to.
        unsafe { &*self.joined.get() }
    }

    /// The device and the share of a process that has one of each, as most processes have.
    #[inline]
    pub fn sole(&self) -> Option<(&Device, &JoinedShare)> {
        let joined = self.joined();
        // SAFETY: `make` found that its only device has the first share, which is written then.
        let share = || unsafe { joined.shares[0].assume_init_ref() };
        joined.is_sole.then(|| (&joined.devices[0], share()))
    }

    /// Whether it has a device whose ordinary allocations may move.
    #[inline]
    pub fn is_oversubscribed(&self) -> bool {
        self.joined().is_oversubscribed
    }

    /// The current context's device, if its ordinary allocations may move.
    #[inline]
    pub fn current_movable(&self) -> Option<&Device> {
        if self.is_oversubscribed() {
            self.movable_of_several()
        } else {
            None
        }
    }

    #[cold]
    #[inline(never)]
    fn movable_of_several(&self) -> Option<&Device> {
        let device = self.current_capped().ok()??;
        (device.residence == Residence::Movable).then_some(device)
    }

    /// The device of the calling thread's current context.
    #[inline]
    pub fn current_device(&self) -> Result<&Device, CUresult> {
        match self.only_device() {
            Some(only) => Ok(only),
            None => self.device_of_current_context(),
        }
    }

    /// The device of a process that sees only one. Then it is the device of every context.
    #[inline]
    pub fn only_device(&self) -> Option<&Device> {
        match self.joined().devices() {
            [only] => Some(only),
            _ => None,
        }
    }

    /// The same, also for a process with one device: an error if the context has ended.
    #[inline(never)]
    pub fn device_of_current_context(&self) -> Result<&Device, CUresult> {
        let mut handle = 0;
        // SAFETY: writes to the local handle.
        let result = unsafe { real!(cuCtxGetDevice: fn(*mut CUdevice))(&raw mut handle) };
        if result.is_ok() {
            self.device(handle).ok_or(CUresult::NOT_PERMITTED)
        } else {
            Err(result)
        }
    }

    /// Whether the process has only one device.
    pub fn has_one_device(&self) -> bool {
        self.joined().device_count == 1
    }

    /// The device of a stream.
    pub fn device_of_stream(&self, stream: CUstream) -> Result<&Device, CUresult> {
        if self.has_one_device() || stream <= LAST_IMPLICIT_STREAM {
            return self.current_device();
        }
        let context = context_of(stream);
        within(context, || Some(self.current_device())).unwrap_or(Err(CUresult::INVALID_CONTEXT))
    }

    /// The current context's device, if it has a cap.
    #[inline]
    pub fn current_capped(&self) -> Result<Option<&Device>, CUresult> {
        match self.sole() {
            Some((device, _)) => Ok(Some(device)),
            None => self.current_capped_of_several(),
        }
    }

    #[inline(never)]
    fn current_capped_of_several(&self) -> Result<Option<&Device>, CUresult> {
        self.current_device()
            .map(|device| Some(device).filter(|device| device.is_capped()))
    }

    /// The device with a handle.
    pub fn device(&self, handle: CUdevice) -> Option<&Device> {
        self.devices().find(|device| device.handle == handle)
    }

    pub fn devices(&self) -> impl Iterator<Item = &Device> {
        self.joined().devices().iter()
    }

    /// The device with a number.
    #[inline]
    pub fn device_numbered(&self, number: u8) -> Option<&Device> {
        self.joined().devices().get(usize::from(number))
    }

    /// The share of a device that has only one.
    #[inline]
    pub fn only_share(&self, device: &Device) -> Option<&JoinedShare> {
        match self.sole() {
            Some((_, share)) => Some(share),
            None => self.only_share_of(device),
        }
    }

    #[inline(never)]
    fn only_share_of(&self, device: &Device) -> Option<&JoinedShare> {
        let number = device.shares.trailing_zeros() as usize;
        let is_only = device.shares.is_power_of_two();
        is_only.then(|| self.joined().share(number))?
    }

    /// The shares of a device.
    pub fn shares<'a>(
        &'a self,
        device: &Device,
    ) -> impl Iterator<Item = &'a JoinedShare> + use<'a> {
        let mut rest = device.shares;
        core::iter::from_fn(move || {
            let next = usize::try_from(rest.trailing_zeros()).ok()?;
            rest &= rest.wrapping_sub(1);
            self.joined().share(next)
        })
    }
}

/// The handle and UUID of the device `ordinal`. A MIG device has its own UUID, which only the
/// newer function returns.
#[inline(never)]
fn identify(ordinal: i32) -> Result<(CUdevice, GpuUuid), CUresult> {
    let (mut handle, mut uuid) = (0, CUuuid::default());
    // SAFETY: writes to the local handle.
    ask(unsafe { real!(cuDeviceGet: fn(*mut CUdevice, i32))(&raw mut handle, ordinal) })?;
    // SAFETY: writes 16 bytes to the local UUID.
    let newer =
        unsafe { real!(cuDeviceGetUuid_v2: fn(*mut CUuuid, CUdevice))(&raw mut uuid, handle) };
    if newer == CUresult::NOT_FOUND {
        // SAFETY: as above.
        ask(unsafe { real!(cuDeviceGetUuid: fn(*mut CUuuid, CUdevice))(&raw mut uuid, handle) })?;
    } else {
        ask(newer)?;
    }
    Ok((handle, GpuUuid(uuid)))
}
