//! The shares that this process joined, on the GPUs that it sees: reserving from them, giving back,
//! and what they leave.

use tranche_shim_core::compute::{Bucket, RefillPage};
use tranche_shim_core::{Account, GpuUuid, Pace, SlotIndex, paths};
use tranche_shim_runtime::accounts::Live;
use tranche_shim_runtime::complain::Refused;
use tranche_shim_runtime::shares::{BLOCK, Name, Share};
use tranche_shim_runtime::sys::{self, File};

use crate::abi::{CUdevice, CUmemAllocationProp, CUmemLocation, CUresult};
use crate::driver::real;
use crate::pool;
use crate::process::Process;

/// A GPU that this process sees.
pub struct Device {
    /// The driver's name for it.
    pub handle: CUdevice,
    /// Its UUID.
    pub gpu: GpuUuid,
    /// What is known of it.
    pub kind: Kind,
    /// Its place among the process's devices.
    pub number: u8,
    /// Bytes of the blocks in which the driver takes its memory.
    pub block: u64,
    /// Bytes that a context takes.
    pub context: u64,
    /// A bit for each share of the process that lies on it.
    pub shares: u64,
    /// Percent of its time that they have together; 0 for all of it.
    pub cores: u8,
}

/// What the shares say of a device.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// Nothing.
    Unknown = 0,
    /// It has a cap: the sum of theirs.
    Capped,
    /// One of them has no limit: so has the device none.
    Uncapped,
}

/// A share in whose account this process has a slot.
pub struct Held {
    live: Live,
    slot: SlotIndex,
    /// Never used: the slot is this process's as long as it is open, here or in a child.
    files: File,
    /// All that its processes may hold: its memory, and one context.
    limit: u64,
    /// Percent of the GPU's time, and what the node grants of it.
    cores: u8,
    refill: &'static RefillPage,
    /// Bytes of it that are for that context.
    context: u64,
    name: Name,
    /// When it looked for dead processes.
    looks: Pace,
}

impl Held {
    /// Takes a slot in the account of a share of `memory` bytes, and beside them `context` for a
    /// context that costs nothing.
    pub fn take(share: &Share, memory: u64, context: u64) -> Result<Self, Refused> {
        let name = share.name;
        let refill = share.map_refill()?;
        let (file, live) = Live::map(&name)?;
        let (slot, files) = match Self::join(&name, &live, &file) {
            Ok(joined) => joined,
            Err(refused) => {
                // SAFETY: nobody has seen it.
                unsafe { live.unmap() };
                return Err(refused);
            }
        };
        // The mapping keeps its description, and with it the slot's lock.
        drop(file);
        live.reclaim_by(&files);
        Ok(Self {
            live,
            slot,
            files,
            limit: memory.saturating_add(context),
            context,
            cores: share.cores.unwrap_or(100),
            refill,
            name,
            looks: Pace::new(),
        })
    }

    fn join(name: &Name, live: &Live, file: &File) -> Result<(SlotIndex, File), Refused> {
        // Children by fork get it, as they get the driver's files: what the driver has for this process
        // is charged until they have closed both.
        let files = name
            .reopen_account(true)
            .and_then(File::above_standard)
            .map_err(|errno| name.refuse_unreadable(paths::ACCOUNT, errno))?;
        let pid = sys::pid();
        #[expect(clippy::cast_possible_truncation, reason = "spreads the search")]
        let slot = live
            .account
            .join(file, &files, pid, pid as usize)
            .map_err(|_| name.refuse_full())?;
        Ok((slot, files))
    }

    /// Leaves the account.
    ///
    /// # Safety
    ///
    /// Nobody uses it any more.
    pub unsafe fn leave(self) {
        drop(self.files);
        // SAFETY: the caller's promise.
        unsafe { self.live.unmap() };
    }

    /// The account.
    pub fn account(&self) -> &Account {
        self.live.account
    }

    /// Notes launches that were held back for `throttled` nanoseconds together.
    pub fn note_launches(&self, count: u64, throttled: u64) {
        self.live
            .account
            .note_launches(self.slot, count, throttled, sys::now());
    }

    fn reserve(&self, least: u64, most: u64) -> Option<u64> {
        self.live
            .account
            .reserve(self.slot, least, most, self.limit)
    }

    fn free(&self) -> u64 {
        self.limit.saturating_sub(self.live.account.used())
    }

    /// What programs are told of it: the first context is not theirs to see.
    fn told(&self) -> Cap {
        let total = self.limit - self.context;
        let used = self.live.account.used().saturating_sub(self.context);
        Cap {
            total,
            free: total.saturating_sub(used),
        }
    }

    /// Takes back what dead processes left, unless this process asks again and again; returns
    /// whether it looked.
    fn reclaim(&self) -> bool {
        let looks = self.looks.admit(sys::now());
        if looks {
            self.live.reclaim(&self.name);
        }
        looks
    }
}

impl Process {
    /// Reserves `most` bytes on a capped device, or what is left of its caps if that is at least
    /// `least`; returns how much.
    #[inline]
    pub fn reserve(&self, device: &Device, least: u64, most: u64) -> Result<u64, CUresult> {
        if device.shares.is_power_of_two()
            && let Some(only) = self.shares(device).next()
            && let Some(granted) = only.reserve(least, most)
        {
            return Ok(granted);
        }
        self.reserve_slowly(device, least, most)
    }

    /// From several shares, or from one that is full.
    #[inline(never)]
    fn reserve_slowly(&self, device: &Device, least: u64, most: u64) -> Result<u64, CUresult> {
        let whole = self
            .shares(device)
            .fold(0u64, |sum, share| sum.saturating_add(share.limit));
        if least <= whole {
            if let Some(granted) = self.reserve_in_parts(device, least, most) {
                return Ok(granted);
            }
            let mut looked = false;
            for share in self.shares(device) {
                looked |= share.reclaim();
            }
            // Whoever found something: this process, or another that looked at the same time.
            if looked && let Some(granted) = self.reserve_in_parts(device, least, most) {
                return Ok(granted);
            }
            // What this process's own pools keep for later is there for who needs it now.
            let free = self
                .shares(device)
                .fold(0u64, |sum, share| sum.saturating_add(share.free()));
            if pool::trim(self, device, most.saturating_sub(free))
                && let Some(granted) = self.reserve_in_parts(device, least, most)
            {
                return Ok(granted);
            }
        }
        if let Some(share) = self.shares(device).next() {
            share.live.account.note_refusal(share.slot);
        }
        Err(CUresult::OUT_OF_MEMORY)
    }

    /// Reserves from each share of the device what it has left, until it is enough; or nothing.
    pub fn reserve_in_parts(&self, device: &Device, least: u64, most: u64) -> Option<u64> {
        let mut shares = self.shares(device);
        if device.shares.is_power_of_two() {
            return shares.next()?.reserve(least, most);
        }
        // A part that is taken and given back could refuse another's request meanwhile.
        let free = shares.fold(0u64, |sum, share| sum.saturating_add(share.free()));
        if free < least {
            return None;
        }
        let mut granted = 0;
        for share in self.shares(device) {
            granted += share.reserve(0, most - granted).unwrap_or(0);
            if granted == most {
                break;
            }
        }
        if granted >= least {
            return Some(granted);
        }
        self.release(device, granted);
        None
    }

    /// Gives `bytes` back. Which of the device's shares gets them is of no importance: their sum is
    /// what the process may hold.
    #[inline]
    pub fn release(&self, device: &Device, bytes: u64) {
        let mut left = bytes;
        for share in self.shares(device) {
            if left == 0 {
                return;
            }
            left -= share.live.account.release(share.slot, left);
        }
    }

    /// The share of a device that has most of its GPU time left at `now`; `None` where none is held
    /// back.
    pub fn bucket(&self, device: &Device, now: u64) -> Option<(&Held, Bucket)> {
        self.shares(device)
            .map(|share| {
                let refill = loop {
                    // It writes ten times a second, some hundred nanoseconds.
                    match share.refill.read() {
                        Some(refill) => break refill,
                        None => sys::give_way(),
                    }
                };
                (share, Bucket::new(&refill, share.cores, now))
            })
            .max_by_key(|(share, bucket)| bucket.left(share.account()))
    }

    /// The sum of the device's caps and what is left of them, in bytes.
    pub fn cap(&self, device: &Device) -> Cap {
        let mut cap = Cap { total: 0, free: 0 };
        for share in self.shares(device) {
            share.reclaim();
            let told = share.told();
            cap.total = cap.total.saturating_add(told.total);
            cap.free = cap.free.saturating_add(told.free);
        }
        cap
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
        // Where it cannot be asked.
        _ => BLOCK,
    }
}

impl Device {
    /// A device of which no share is known yet.
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
        }
    }

    /// Adds a share's cores; a share without a limit, or all of the GPU, has none.
    pub fn add_cores(&mut self, cores: Option<u8>) {
        let first = self.shares == 0;
        let sum = match cores {
            Some(cores) if first || self.cores > 0 => self.cores.saturating_add(cores),
            _ => 0,
        };
        self.cores = if sum < 100 { sum } else { 0 };
    }

    /// What an allocation of `bytes` takes of the device, at most: whole blocks.
    #[inline]
    pub fn taken_by(&self, bytes: u64) -> u64 {
        bytes.checked_next_multiple_of(self.block).unwrap_or(bytes)
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

/// How much memory a device seems to have.
#[derive(Clone, Copy)]
pub struct Cap {
    /// In bytes.
    pub total: u64,
    /// In bytes, of the total.
    pub free: u64,
}
