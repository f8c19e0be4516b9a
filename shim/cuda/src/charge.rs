//! Charging a share: reserve, ask the driver, keep the charge or give it back.

use core::mem;

use tranche_shim_core::Entry;
use tranche_shim_core::physical::{Id, Imported};

use crate::abi::{CUcontext, CUresult};
use crate::device::{Device, Residence};
use crate::driver::Call;
use crate::driver_pools::State;
use crate::ends::Charges;
use crate::keys::{self, Kind};
use crate::process::{self, Process};
use crate::settle;

/// Bytes of a device that are charged to this process but not in use yet. Dropping it gives them back.
pub struct Reserved {
    pub process: &'static Process,
    pub device: &'static Device,
    pub residence: Residence,
    pub bytes: u64,
}

impl Reserved {
    /// Reserves `most` bytes of memory on the GPU, or what the cap leaves if that is at least `least`.
    pub fn new(
        process: &'static Process,
        device: &'static Device,
        least: u64,
        most: u64,
    ) -> Result<Self, CUresult> {
        Self::of(process, device, Residence::Gpu, (least, most))
    }

    /// The same for memory of a given residence; the pair is the least and the most.
    #[inline(never)]
    pub fn of(
        process: &'static Process,
        device: &'static Device,
        residence: Residence,
        (least, most): (u64, u64),
    ) -> Result<Self, CUresult> {
        Ok(Self {
            process,
            device,
            residence,
            bytes: process.reserve(device, residence, least, most)?,
        })
    }

    /// Gives all but `bytes` back.
    pub fn shrink(&mut self, bytes: u64) {
        let surplus = self.bytes.saturating_sub(bytes);
        self.process
            .release_as(self.device, self.residence, surplus);
        self.bytes -= surplus;
    }

    /// Reserves more, up to `bytes` in all, and up to whole blocks if there is room.
    pub fn grow(&mut self, bytes: u64) -> Result<(), CUresult> {
        let (least, most) = (
            bytes.saturating_sub(self.bytes),
            self.device.taken_by(bytes).saturating_sub(self.bytes),
        );
        if least > 0 {
            self.bytes += self
                .process
                .reserve(self.device, self.residence, least, most)?;
        }
        Ok(())
    }

    /// Hands the charge to the caller, who must give it back.
    pub fn keep(self) -> u64 {
        let bytes = self.bytes;
        mem::forget(self);
        bytes
    }

    /// Notes an allocation in the table, under `key`. It ends with `context`, or with none if that is 0.
    pub fn note(self, key: u64, context: u64) {
        let (process, device) = (self.process, self.device.number);
        let entry = Entry {
            bytes: self.keep(),
            device,
            context,
        };
        note(process, key, entry);
    }

    /// Charges what another process exported and the driver has imported under a handle, which ends with `context`, if
    /// that is not 0. Another thread may have imported the same at the same time.
    pub fn import(self, handle: u64, context: CUcontext) {
        let (process, device, bytes) = (self.process, self.device.number, self.bytes);
        let noted = process.note_physical(|physical, freed| {
            physical.import((handle, context as u64), bytes, device, freed)
        });
        // If there is no room to note it, it stays charged until the process ends.
        if noted != Ok(Imported::Again) {
            self.keep();
        }
    }

    /// Notes a pointer to memory on the GPU, with its own charge or with its block's.
    pub fn commit(self, pointer: u64, small: bool) {
        self.commit_as(pointer, small, 0);
    }

    /// Notes a pointer to memory that may move. `is_converted`: the program asked for device memory and got managed memory.
    #[cold]
    #[inline(never)]
    pub fn commit_movable(self, pointer: u64, small: bool, is_converted: bool) {
        let converted = if is_converted { CONVERTED } else { 0 };
        self.commit_as(pointer, small, MOVABLE | converted);
    }

    /// `kind` is the flag bits of the entry's bytes.
    #[inline]
    fn commit_as(self, pointer: u64, small: bool, kind: u64) {
        let (process, device) = (self.process, self.device);
        let context = process.contexts.current();
        let entered = if small && self.bytes == device.block {
            process.blocks.enter(device.block_number(pointer)).ok()
        } else {
            None
        };
        let bytes = match entered {
            None => self.keep(),
            Some(first) => {
                if first {
                    self.keep();
                }
                // Otherwise the block is charged already, and the reservation is given back.
                IN_ITS_BLOCK
            }
        };
        let entry = Entry {
            bytes: bytes | kind,
            device: device.number,
            context,
        };
        note(process, pointer, entry);
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        self.process
            .release_as(self.device, self.residence, self.bytes);
    }
}

/// The entry's bytes for a pointer whose block is charged.
pub const IN_ITS_BLOCK: u64 = 0;

/// Flag in the entry's bytes: the pointer is charged as memory that the driver may move to the host.
const MOVABLE: u64 = 1 << 47;
/// Flag in the entry's bytes: it is managed memory, but the program asked for device memory.
const CONVERTED: u64 = 1 << 46;

/// Whether a pointer is charged as memory that the driver may move to the host.
pub fn is_movable(entry: Entry) -> bool {
    entry.device != AS_PHYSICAL && entry.bytes & MOVABLE != 0
}

/// Whether a pointer is managed memory for which the program asked as device memory.
pub fn is_converted(entry: Entry) -> bool {
    entry.device != AS_PHYSICAL && entry.bytes & CONVERTED != 0
}

/// Notes a charge. If the table is full (a million entries), the charge stays until the process ends.
#[inline]
pub fn note(process: &'static Process, key: u64, entry: Entry) {
    if let Ok(Some(former)) = process.pointers.put(key, entry) {
        // It was freed unnoticed: otherwise the driver would not have reused the number.
        return_charge(process, key, former);
    }
}

/// Makes a call that ends what `keys` stand for, and gives their charges back by `give_back` if it has ended.
///
/// The charges are taken out first, because a driver reuses the handle of what has ended, and put back if it has not.
pub fn end<const N: usize>(
    process: &'static Process,
    keys: [u64; N],
    act: impl FnOnce() -> CUresult,
    give_back: impl Fn(u64, Entry),
) -> CUresult {
    let object = keys[0];
    process.ends.begin(object);
    let found = Charges::take(keys, |key| process.pointers.take(key));
    let result = act();
    let (charges, is_over) = process.ends.end(object, result.is_ok(), found);
    if is_over {
        charges.each(give_back);
    } else {
        charges.each(|key, entry| note(process, key, entry));
    }
    result
}

/// Gives back the charge of an entry of the table.
pub fn return_charge(process: &'static Process, key: u64, entry: Entry) {
    // Keys of pointers have no kind.
    if key >> 56 != 0
        && let Some(state) = state_of(key)
    {
        return_module_charge(process, state, entry);
        return;
    }
    let Some(device) = process.device_numbered(entry.device) else {
        end_as_physical(process, entry);
        return;
    };
    if let Some(place) = settle::driver_pool_of(entry) {
        settle::freed(process, place, entry.bytes, false);
        return;
    }
    let (mut bytes, residence) = if entry.bytes < CONVERTED {
        (entry.bytes, Residence::Gpu)
    } else {
        (entry.bytes & (CONVERTED - 1), Residence::Movable)
    };
    if bytes == IN_ITS_BLOCK {
        if !process.blocks.leave(device.block_number(key)) {
            return;
        }
        bytes = device.block;
    }
    process.release_as(device, residence, bytes);
}

/// The device number of a pointer whose charge is noted as physical memory; no device has this number. The entry's bytes
/// are the allocation's [`Id`]. The pointer is one of its uses.
pub const AS_PHYSICAL: u8 = u8::MAX - 1;

#[cold]
#[inline(never)]
fn end_as_physical(process: &Process, entry: Entry) {
    if entry.device == AS_PHYSICAL
        && let Some(id) = Id::of(entry.bytes)
    {
        let_go(process, id);
    }
}

/// Ends a use of physical memory.
#[inline(never)]
pub fn let_go(process: &Process, held: Id) {
    process.note_physical(|physical, freed| physical.let_go(held, freed));
}

/// The device number of a library's entry: it is charged on every device that has a context.
pub const EVERY_DEVICE: u8 = u8::MAX;

/// Which memory of a module or library a key stands for.
#[cold]
#[inline(never)]
fn state_of(key: u64) -> Option<State> {
    if keys::is_of(key, Kind::Module) {
        Some(State::Modules)
    } else if keys::is_of(key, Kind::Code) {
        Some(State::Code)
    } else {
        None
    }
}

/// Gives back the charge of the variables or the code of a module or library.
fn return_module_charge(process: &Process, state: State, entry: Entry) {
    let devices = if entry.device == EVERY_DEVICE {
        process
            .libraries
            .with(|libraries| libraries.remove(state, entry.bytes))
    } else {
        process.device_numbered(entry.device).map_or(0, Device::bit)
    };
    lower_floors(process, state, entry.bytes, devices);
}

/// Gives back the charge of variables or code on the devices whose bits are set.
pub fn lower_floors(process: &Process, state: State, bytes: u64, devices: u64) {
    for device in process.devices() {
        if bytes > 0 && device.is_capped() && devices & device.bit() != 0 {
            settle::lower_floor(process, state, device, bytes);
        }
    }
}

/// Makes a call that takes memory on a GPU: reserves, calls the driver, then keeps the charge or gives it back.
///
/// `device` returns the device of the memory, or `None` if that has no cap; `bytes` returns the least and the most that
/// the call takes; `keep` notes the new memory, or returns an error if the program cannot have it.
#[inline]
pub fn charge(
    device: impl FnOnce(&'static Process) -> Result<Option<&'static Device>, CUresult>,
    bytes: impl FnOnce(&'static Device) -> Result<(u64, u64), CUresult>,
    driver: Call<'_>,
    keep: impl FnOnce(Reserved) -> Result<(), CUresult>,
) -> CUresult {
    match process::current() {
        Ok(process) => charge_in(process, device, bytes, driver, keep),
        Err(code) => code,
    }
}

/// The same for a process that has joined.
#[inline]
pub fn charge_in(
    process: &'static Process,
    device: impl FnOnce(&'static Process) -> Result<Option<&'static Device>, CUresult>,
    bytes: impl FnOnce(&'static Device) -> Result<(u64, u64), CUresult>,
    driver: Call<'_>,
    keep: impl FnOnce(Reserved) -> Result<(), CUresult>,
) -> CUresult {
    let reserve = |device| {
        let (least, most) = bytes(device)?;
        let residence = Residence::Gpu;
        Ok(Reserved {
            process,
            device,
            residence,
            bytes: process.reserve(device, residence, least, most)?,
        })
    };
    let reserved = match device(process).map(|device| device.map(reserve)) {
        Ok(None) => return driver.make(),
        Ok(Some(Ok(reserved))) => reserved,
        Ok(Some(Err(code))) | Err(code) => return code,
    };
    let result = driver.make();
    if result.is_ok()
        && let Err(code) = keep(reserved)
    {
        return code;
    }
    result
}
