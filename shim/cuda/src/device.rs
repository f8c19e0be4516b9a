//! The GPUs that this process sees, and its slots in the accounts of their shares.

use tranche_shim_core::compute::{Bucket, RefillPage};
use tranche_shim_core::pool_charge::Size;
use tranche_shim_core::{Account, GpuUuid, Pace, Priority, SlotIndex, paths};
use tranche_shim_runtime::accounts::Live;
use tranche_shim_runtime::complain::Refused;
use tranche_shim_runtime::container_shares::{BLOCK, Name, Share};
use tranche_shim_runtime::sys::{self, File};

use crate::abi::{CUdevice, CUmemAllocationProp, CUmemLocation};
use crate::driver::real;

/// A GPU that this process sees.
#[derive(Clone, Copy)]
pub struct Device {
    /// The driver's handle.
    pub handle: CUdevice,
    /// Its UUID.
    pub gpu: GpuUuid,
    /// What its shares say about its memory.
    pub kind: Kind,
    /// Its index among the process's devices.
    pub number: u8,
    /// Bytes of the blocks in which the driver takes its memory, a power of two.
    pub block: u64,
    /// Bytes that a context takes.
    pub context: u64,
    /// A bit for each share of the process on this device.
    pub shares: u64,
    /// Percent of its time that these shares have together; 0 for all of it.
    pub cores: u8,
    /// Whose launches come first.
    pub priority: Priority,
    /// For which the driver loads machine code: 90 for compute capability 9.0; 0 if it is unknown.
    pub architecture: u64,
    /// Whether its driver can move managed memory to the host and back.
    moves_managed: bool,
    /// Where its ordinary allocations lie: movable if all of its shares are oversubscribed.
    pub residence: Residence,
}

/// What the shares say about the memory of a device.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// The device has no known share yet.
    Unknown = 0,
    /// It has a cap: the sum of its shares' caps.
    Capped,
    /// It has no cap, because one of its shares has none.
    Uncapped,
}

/// Where a share's memory may lie.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Residence {
    /// On its GPU: the driver cannot move it.
    Gpu = 0,
    /// On the GPU or on the host: the driver moves it to the host when the GPU is full, and back when it is used.
    Movable,
}

/// A share in whose accounts this process has a slot.
pub struct JoinedShare {
    /// The slot in the account of all memory of the share.
    memory: Slot,
    /// If the GPU's memory is oversubscribed: the slot in the account of memory that cannot move, which is a part of all.
    resident: Option<Slot>,
    /// Percent of the GPU's time.
    cores: u8,
    pub priority: Priority,
    /// The GPU time that the node grants.
    refill: &'static RefillPage,
    /// Bytes of the limits that are for the first context.
    context: u64,
    pub name: Name,
    /// Limits how often this process searches for dead ones.
    looks: Pace,
}

/// This process's slot in an account.
struct Slot {
    live: Live,
    at: SlotIndex,
    /// Never read: the slot belongs to this process while this file is open, here or in a child.
    files: File,
    /// Bytes that the account's processes may hold: the share's limit, and one context.
    limit: u64,
    /// The account's file name.
    account: &'static str,
}

impl Slot {
    fn take(name: &Name, account: &'static str, limit: u64) -> Result<Self, Refused> {
        let (file, live) = Live::map(name, account)?;
        let (at, files) = match Self::join(name, account, &live, &file) {
            Ok(joined) => joined,
            Err(refused) => {
                // SAFETY: nothing else uses it yet.
                unsafe { live.unmap() };
                return Err(refused);
            }
        };
        // The mapping keeps its description, and with it the slot's lock.
        drop(file);
        Ok(Self {
            live,
            at,
            files,
            limit,
            account,
        })
    }

    fn join(
        name: &Name,
        account: &str,
        live: &Live,
        file: &File,
    ) -> Result<(SlotIndex, File), Refused> {
        // Forked children inherit it, as they inherit the driver's files: this process's memory stays charged
        // until they have closed both.
        let files = name
            .reopen_account(account, true)
            .and_then(File::above_standard)
            .map_err(|errno| name.refuse_unreadable(account, errno))?;
        let pid = sys::pid();
        #[expect(clippy::cast_possible_truncation, reason = "spreads the search")]
        let at = live
            .account
            .join(file, &files, pid, pid as usize)
            .map_err(|_| name.refuse_full(account))?;
        Ok((at, files))
    }

    /// Leaves the account.
    ///
    /// # Safety
    ///
    /// Nothing uses it any more.
    unsafe fn leave(self) {
        drop(self.files);
        // SAFETY: the caller's promise.
        unsafe { self.live.unmap() };
    }

    #[inline(never)]
    fn reserve(&self, least: u64, most: u64) -> Option<u64> {
        self.live.account.reserve(self.at, least, most, self.limit)
    }

    #[inline]
    fn release(&self, bytes: u64) -> u64 {
        self.live.account.release(self.at, bytes)
    }

    #[inline]
    fn free(&self) -> u64 {
        self.limit.saturating_sub(self.live.account.used())
    }

    #[inline]
    fn charged(&self) -> u64 {
        self.live.account.charged(self.at)
    }
}

impl JoinedShare {
    /// Takes a slot in the accounts of a share of `memory` bytes, with `context` more bytes for a
    /// context that is not charged.
    pub fn take(share: &Share, memory: u64, context: u64) -> Result<Self, Refused> {
        let name = share.name;
        let refill = share.map_refill()?;
        let take = |account, bytes: u64| Slot::take(&name, account, bytes.saturating_add(context));
        let memory = take(paths::ACCOUNT, memory)?;
        let resident = match share.resident {
            None => None,
            Some(bytes) => match take(paths::RESIDENT, bytes) {
                Ok(resident) => Some(resident),
                Err(refused) => {
                    // SAFETY: nothing else uses it yet.
                    unsafe { memory.leave() };
                    return Err(refused);
                }
            },
        };
        Ok(Self {
            memory,
            resident,
            context,
            cores: share.cores.unwrap_or(100),
            priority: share.priority,
            refill,
            name,
            looks: Pace::new(),
        })
    }

    /// Leaves the accounts.
    ///
    /// # Safety
    ///
    /// Nothing uses it any more.
    pub unsafe fn leave(self) {
        // SAFETY: the caller's promise.
        unsafe {
            self.memory.leave();
            if let Some(resident) = self.resident {
                resident.leave();
            }
        }
    }

    #[inline]
    pub fn account(&self) -> &Account {
        self.memory.live.account
    }

    /// Notes `count` launches, which were delayed for `throttled` nanoseconds in all.
    pub fn note_launches(&self, count: u64, throttled: u64) {
        self.account()
            .note_launches(self.memory.at, count, throttled, sys::now());
    }

    /// The account of memory that cannot move, if such memory is charged to it.
    #[inline]
    fn resident(&self, residence: Residence) -> Option<&Slot> {
        let resident = self.resident.as_ref()?;
        (residence == Residence::Gpu).then_some(resident)
    }

    /// Reserves `bytes` from this process's spare; returns whether the spare was large enough.
    #[inline]
    pub fn take_spare(&self, residence: Residence, bytes: u64) -> bool {
        self.resident(residence).is_none() && self.account().take_spare(self.memory.at, bytes)
    }

    /// Reserves as much as the share has left, but no less than `least` and no more than `most` bytes.
    #[inline]
    pub fn reserve(&self, residence: Residence, least: u64, most: u64) -> Option<u64> {
        match self.resident(residence) {
            None => self.memory.reserve(least, most),
            Some(resident) => self.reserve_resident(resident, least, most),
        }
    }

    #[cold]
    #[inline(never)]
    fn reserve_resident(&self, resident: &Slot, least: u64, most: u64) -> Option<u64> {
        // If it reserved a part and gave it back, another process could be refused meanwhile.
        if resident.free() < least {
            return None;
        }
        let granted = self.memory.reserve(least, most)?;
        let kept = resident.reserve(least, granted);
        self.memory.release(granted - kept.unwrap_or(0));
        kept
    }

    /// Gives `bytes` back, or as much of them as the process is charged; returns how much that was.
    #[expect(
        clippy::inline_always,
        reason = "otherwise every free takes 13 instructions more, as `counted.rs` counts them"
    )]
    #[inline(always)]
    pub fn release(&self, residence: Residence, bytes: u64) -> u64 {
        match self.resident(residence) {
            None => self.memory.release(bytes),
            Some(resident) => self.release_resident(resident, bytes),
        }
    }

    #[cold]
    #[inline(never)]
    fn release_resident(&self, resident: &Slot, bytes: u64) -> u64 {
        self.memory.release(resident.release(bytes))
    }

    /// Bytes that the process is charged for memory of this kind. Exact only if no other thread changes it meanwhile.
    #[inline]
    pub fn charged(&self, residence: Residence) -> u64 {
        let resident = self.resident.as_ref().map(Slot::charged);
        let all = self.memory.charged();
        match residence {
            Residence::Gpu => resident.unwrap_or(all),
            Residence::Movable => all.saturating_sub(resident.unwrap_or(0)),
        }
    }

    /// Notes that the cap refused something.
    pub fn note_refusal(&self) {
        self.account().note_refusal(self.memory.at);
    }

    /// Bytes of memory of this kind that its processes may hold.
    #[inline]
    pub fn limit(&self, residence: Residence) -> u64 {
        let resident = self.resident(residence);
        resident.map_or(self.memory.limit, |resident| resident.limit)
    }

    /// The GPU time that is granted at `now`.
    #[inline(never)]
    pub fn bucket(&self, now: u64) -> Bucket {
        loop {
            // The node writes the page ten times a second, for a few hundred nanoseconds each time.
            match self.refill.read() {
                Some(refill) => return Bucket::new(&refill, self.cores, now),
                None => sys::give_way(),
            }
        }
    }

    /// Bytes that it has left for memory of this kind.
    #[inline]
    pub fn free(&self, residence: Residence) -> u64 {
        let free = self.memory.free();
        let resident = self.resident(residence);
        resident.map_or(free, |resident| free.min(resident.free()))
    }

    /// The memory that programs see: without the first context.
    pub fn visible(&self) -> VisibleMemory {
        let total = self.memory.limit - self.context;
        let used = self.account().used().saturating_sub(self.context);
        VisibleMemory {
            total,
            free: total.saturating_sub(used),
        }
    }

    /// Reclaims what dead processes left, unless this process has asked too often; returns
    /// whether it searched.
    pub fn reclaim(&self) -> bool {
        let looks = self.looks.admit(sys::now());
        if looks {
            for slot in [Some(&self.memory), self.resident.as_ref()]
                .into_iter()
                .flatten()
            {
                slot.live.reclaim(&self.name, slot.account);
            }
        }
        looks
    }
}

/// The smallest blocks of any driver: its small pages.
const LEAST_BLOCK: u64 = 64 << 10;

/// Bytes of the blocks in which the driver takes a device's memory.
fn block_of(handle: CUdevice) -> u64 {
    let memory = CUmemAllocationProp {
        kind: CUmemAllocationProp::PINNED,
        location: CUmemLocation {
            kind: CUmemLocation::DEVICE,
            id: handle,
        },
        ..CUmemAllocationProp::default()
    };
    let mut block = 0;
    // SAFETY: reads the properties, writes the local number.
    let result = unsafe {
        real!(cuMemGetAllocationGranularity: fn(*mut usize, *const CUmemAllocationProp, u32))(
            &raw mut block,
            &raw const memory,
            CUmemAllocationProp::GRANULARITY_MINIMUM,
        )
    };
    match block as u64 {
        block
            if result.is_ok()
                && block.is_power_of_two()
                && (LEAST_BLOCK..=64 * BLOCK).contains(&block) =>
        {
            block
        }
        // The driver did not return a valid size.
        _ => BLOCK,
    }
}

/// Whether the driver moves managed memory page by page when it is used. Then more of it may be allocated than the device
/// has. Otherwise the driver moves all of it to the device at each launch.
fn moves_managed(handle: CUdevice) -> bool {
    const CONCURRENT_MANAGED_ACCESS: u32 = 89;
    attribute(handle, CONCURRENT_MANAGED_ACCESS) == Some(1)
}

/// The architecture of a device; 0 if the driver ignores machine code and compiles the PTX.
fn architecture_of(handle: CUdevice) -> u64 {
    const MAJOR: u32 = 75;
    const MINOR: u32 = 76;
    let compiles = [c"CUDA_FORCE_PTX_JIT", c"CUDA_FORCE_JIT"];
    let compiles = compiles.iter().any(|name| !sys::environment_is(name, None));
    match attribute(handle, MAJOR).zip(attribute(handle, MINOR)) {
        Some((major, minor)) if !compiles => u64::from(major) * 10 + u64::from(minor),
        _ => 0,
    }
}

/// What the driver says about a device; `None` if it does not know that attribute.
fn attribute(handle: CUdevice, attribute: u32) -> Option<u32> {
    let mut value = 0;
    // SAFETY: writes to the local number.
    let result = unsafe {
        real!(cuDeviceGetAttribute: fn(*mut i32, u32, CUdevice))(&raw mut value, attribute, handle)
    };
    result.is_ok().then_some(value.unsigned_abs())
}

impl Device {
    /// A device without a known share yet.
    pub fn new(handle: CUdevice, gpu: GpuUuid, number: u8) -> Self {
        Self {
            handle,
            gpu,
            kind: Kind::Unknown,
            number,
            block: block_of(handle),
            context: 0,
            shares: 0,
            cores: 0,
            priority: Priority::Normal,
            architecture: architecture_of(handle),
            moves_managed: moves_managed(handle),
            residence: Residence::Movable,
        }
    }

    /// Adds a share's memory. If the share is oversubscribed, the driver must be able to move memory.
    pub fn add_residence(&mut self, share: &Share) -> Result<(), Refused> {
        if share.resident.is_none() {
            self.residence = Residence::Gpu;
        } else if !self.moves_managed {
            return Err(share.name.refuse_immovable());
        }
        Ok(())
    }

    /// Adds a share's cores; `None` means all of the GPU's time.
    pub fn add_cores(&mut self, cores: Option<u8>) {
        let first = self.shares == 0;
        let sum = match cores {
            Some(cores) if first || self.cores > 0 => self.cores.saturating_add(cores),
            _ => 0,
        };
        self.cores = if sum < 100 { sum } else { 0 };
    }

    /// Adds a share's priority, before the share itself: a process with several shares of the device has high priority if
    /// one of them has, and low priority if all of them have.
    pub fn add_priority(&mut self, share: Priority) {
        use Priority::{High, Low, Normal};
        self.priority = match (self.priority, share) {
            (_, share) if self.shares == 0 => share,
            (High, _) | (_, High) => High,
            (Low { floor }, Low { floor: other }) => Low {
                floor: floor.max(other),
            },
            (Normal, _) | (_, Normal) => Normal,
        };
    }

    /// Its bit in a set of devices.
    pub fn bit(&self) -> u64 {
        1 << (self.number % 64)
    }

    /// The most that an allocation of `bytes` takes of the device: whole blocks.
    #[inline]
    pub fn taken_by(&self, bytes: u64) -> u64 {
        let rest = self.block - 1;
        bytes.checked_add(rest).map_or(bytes, |sum| sum & !rest)
    }

    /// The size of an allocation of `bytes` from a pool.
    #[inline]
    pub fn size_of(&self, bytes: u64) -> Size {
        let blocks = self.taken_by(bytes);
        Size { bytes, blocks }
    }

    /// The number of the block in which an address lies.
    #[inline]
    pub fn block_number(&self, address: u64) -> u64 {
        address >> self.block.trailing_zeros()
    }

    /// Whether the driver puts an allocation of `bytes` into a block with others.
    #[inline]
    pub fn is_small(&self, bytes: u64) -> bool {
        bytes <= self.block / 2
    }

    /// Whether the device's memory is capped for this container.
    #[inline]
    pub fn is_capped(&self) -> bool {
        self.kind == Kind::Capped
    }
}

/// The memory of a device that programs see.
#[derive(Clone, Copy)]
pub struct VisibleMemory {
    /// In bytes.
    pub total: u64,
    /// In bytes, of the total.
    pub free: u64,
}
