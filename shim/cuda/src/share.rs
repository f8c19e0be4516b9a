//! The GPUs that this process sees, and its places in the accounts of the shares that lie on them.

use tranche_shim_core::compute::{Bucket, RefillPage};
use tranche_shim_core::{Account, GpuUuid, Pace, SlotIndex, paths};
use tranche_shim_runtime::accounts::Live;
use tranche_shim_runtime::complain::Refused;
use tranche_shim_runtime::shares::{BLOCK, Name, Share};
use tranche_shim_runtime::sys::{self, File};

use crate::abi::{CUdevice, CUmemAllocationProp, CUmemLocation};
use crate::driver::real;

/// A GPU that this process sees.
#[derive(Clone, Copy)]
pub struct Device {
    /// The driver's name for it.
    pub handle: CUdevice,
    /// Its UUID.
    pub gpu: GpuUuid,
    /// What is known of it.
    pub kind: Kind,
    /// Its place among the process's devices.
    pub number: u8,
    /// Bytes of the blocks in which the driver takes its memory, a power of two.
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

    /// Reserves `bytes` of what this process keeps of the share, if it keeps so much; whether it does.
    #[inline]
    pub fn take_spare(&self, bytes: u64) -> bool {
        self.live.account.take_spare(self.slot, bytes)
    }

    /// Reserves as much as the share has left, but no less than `least` and no more than `most` bytes.
    #[inline(never)]
    pub fn reserve(&self, least: u64, most: u64) -> Option<u64> {
        self.live
            .account
            .reserve(self.slot, least, most, self.limit)
    }

    /// Gives `bytes` back, or as much of them as the process is charged; returns how much that was.
    #[inline]
    pub fn release(&self, bytes: u64) -> u64 {
        self.live.account.release(self.slot, bytes)
    }

    /// Notes that the cap refused something.
    pub fn note_refusal(&self) {
        self.live.account.note_refusal(self.slot);
    }

    /// All that its processes may hold, in bytes.
    pub fn limit(&self) -> u64 {
        self.limit
    }

    /// What is granted of its GPU time, at `now`.
    #[inline(never)]
    pub fn bucket(&self, now: u64) -> Bucket {
        loop {
            // The node writes it ten times a second, some hundred nanoseconds.
            match self.refill.read() {
                Some(refill) => return Bucket::new(&refill, self.cores, now),
                None => sys::give_way(),
            }
        }
    }

    /// Bytes that it has left.
    pub fn free(&self) -> u64 {
        self.limit.saturating_sub(self.live.account.used())
    }

    /// What programs see of it: without the first context.
    pub fn visible(&self) -> Cap {
        let total = self.limit - self.context;
        let used = self.live.account.used().saturating_sub(self.context);
        Cap {
            total,
            free: total.saturating_sub(used),
        }
    }

    /// Takes back what dead processes left, unless this process asks again and again; returns
    /// whether it looked.
    pub fn reclaim(&self) -> bool {
        let looks = self.looks.admit(sys::now());
        if looks {
            self.live.reclaim(&self.name);
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
        let rest = self.block - 1;
        bytes.checked_add(rest).map_or(bytes, |sum| sum & !rest)
    }

    /// The number of the block that an address is in.
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

/// How much memory a device seems to have.
#[derive(Clone, Copy)]
pub struct Cap {
    /// In bytes.
    pub total: u64,
    /// In bytes, of the total.
    pub free: u64,
}
