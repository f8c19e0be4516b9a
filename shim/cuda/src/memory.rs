//! Memory by pointer: reserve, ask the driver, keep the charge or give it back.

use core::mem;

use tranche_shim_core::Entry;

use crate::abi::{CUdevice, CUdeviceptr, CUdeviceptr_v1, CUresult};
use crate::driver::Call;
use crate::module;
use crate::pool;
use crate::process::{self, Process, current_context};
use crate::share::{Cap, Device};

/// A number in one of the driver's two widths: of today, or of before CUDA 3.2.
pub trait Width: Copy {
    fn wide(self) -> u64;
    fn narrow(wide: u64) -> Self;
}

impl Width for usize {
    fn wide(self) -> u64 {
        self as u64
    }
    #[expect(clippy::cast_possible_truncation, reason = "64 bits")]
    fn narrow(wide: u64) -> Self {
        wide as usize
    }
}

impl Width for CUdeviceptr {
    fn wide(self) -> u64 {
        self
    }
    fn narrow(wide: u64) -> Self {
        wide
    }
}

impl Width for CUdeviceptr_v1 {
    fn wide(self) -> u64 {
        u64::from(self)
    }
    fn narrow(wide: u64) -> Self {
        Self::try_from(wide).unwrap_or(Self::MAX)
    }
}

/// Bytes of a device that are charged to this process and nobody's yet: given back when dropped.
pub struct Reserved {
    pub process: &'static Process,
    pub device: &'static Device,
    pub bytes: u64,
}

impl Reserved {
    /// Reserves `most` bytes, or what the cap leaves if that is at least `least`.
    #[inline]
    pub fn new(
        process: &'static Process,
        device: &'static Device,
        least: u64,
        most: u64,
    ) -> Result<Self, CUresult> {
        Ok(Self {
            process,
            device,
            bytes: process.reserve(device, least, most)?,
        })
    }

    /// Gives all but `bytes` back.
    pub fn shrink(&mut self, bytes: u64) {
        let surplus = self.bytes.saturating_sub(bytes);
        self.process.release(self.device, surplus);
        self.bytes -= surplus;
    }

    /// Reserves more, to `bytes` in all, and better to whole blocks.
    fn grow(&mut self, bytes: u64) -> Result<(), CUresult> {
        let (least, most) = (
            bytes.saturating_sub(self.bytes),
            self.device.taken_by(bytes).saturating_sub(self.bytes),
        );
        if least > 0 {
            self.bytes += self.process.reserve(self.device, least, most)?;
        }
        Ok(())
    }

    /// The charge is its caller's from now on.
    pub fn keep(self) -> u64 {
        let bytes = self.bytes;
        mem::forget(self);
        bytes
    }

    /// Notes what was allocated under a number of the table, which goes with a context or none (0).
    pub fn note(self, key: u64, context: u64) {
        let (process, device) = (self.process, self.device.number);
        let entry = Entry {
            bytes: self.keep(),
            device,
            context,
        };
        note(process, key, entry);
    }

    /// Notes a pointer: with a charge of its own, or with its block's.
    fn commit(self, pointer: u64, small: bool) {
        let (process, device) = (self.process, self.device);
        let context = current_context() as u64;
        let entered = if small && self.bytes == device.block {
            process.blocks.enter(pointer / device.block).ok()
        } else {
            None
        };
        let bytes = match entered {
            None => self.keep(),
            Some(first) => {
                if first {
                    self.keep();
                }
                // Else the block is charged already, and the reservation goes.
                IN_ITS_BLOCK
            }
        };
        let entry = Entry {
            bytes,
            device: device.number,
            context,
        };
        note(process, pointer, entry);
    }
}

impl Drop for Reserved {
    fn drop(&mut self) {
        self.process.release(self.device, self.bytes);
    }
}

/// The bytes of a pointer whose block is charged.
const IN_ITS_BLOCK: u64 = 0;

/// Notes a charge. A table full of a million: it stays to the end of the process.
pub fn note(process: &'static Process, key: u64, entry: Entry) {
    if let Ok(Some(former)) = process.pointers.put(key, entry) {
        // Freed behind our back: the driver would not have given the number out again.
        give_back(process, key, former);
    }
}

/// Gives back what a number of the table was charged.
pub fn give_back(process: &'static Process, key: u64, entry: Entry) {
    if module::is_module(key) {
        module::give_back(process, entry);
        return;
    }
    let Some(device) = process.device_numbered(entry.device) else {
        return;
    };
    if let Some(reserve) = pool::reserve_of(entry) {
        pool::freed(process, reserve);
    } else if entry.bytes != IN_ITS_BLOCK {
        process.release(device, entry.bytes);
    } else if process.blocks.leave(key / device.block) {
        process.release(device, device.block);
    }
}

/// The current context's device, if it has a cap.
pub fn current_capped(process: &'static Process) -> Result<Option<&'static Device>, CUresult> {
    process
        .current_device()
        .map(|device| Some(device).filter(|device| device.is_capped()))
}

/// Makes a call that takes memory: reserves, asks the driver, keeps the charge or gives it back.
///
/// `device` is where the memory lies, if that has a cap; `bytes` is how much it takes, at least and at
/// most; `keep` notes what the driver has made, or says why the program cannot have it.
#[inline]
pub fn charge(
    device: impl FnOnce(&'static Process) -> Result<Option<&'static Device>, CUresult>,
    bytes: impl FnOnce(&'static Device) -> Result<(u64, u64), CUresult>,
    driver: Call<'_>,
    keep: impl FnOnce(Reserved) -> Result<(), CUresult>,
) -> CUresult {
    let reserved = process::current().and_then(|process| {
        let Some(device) = device(process)? else {
            return Ok(None);
        };
        let (least, most) = bytes(device)?;
        Reserved::new(process, device, least, most).map(Some)
    });
    let reserved = match reserved {
        Ok(Some(reserved)) => reserved,
        Ok(None) => return driver.make(),
        Err(code) => return code,
    };
    let result = driver.make();
    if result.is_ok()
        && let Err(code) = keep(reserved)
    {
        return code;
    }
    result
}

/// An allocation of `bytes` in the current context, whose address the driver writes to `pointer`.
#[inline]
pub fn allocate<P: Width>(bytes: u64, pointer: *mut P, driver: Call<'_>) -> CUresult {
    if pointer.is_null() || bytes == 0 {
        // The driver refuses it, in its own words.
        return driver.make();
    }
    charge(
        current_capped,
        |device| Ok((bytes, device.taken_by(bytes))),
        driver,
        |reserved| {
            let small = reserved.device.is_small(bytes);
            // SAFETY: not null, and the driver has just written to it.
            reserved.commit(unsafe { pointer.read() }.wide(), small);
            Ok(())
        },
    )
}

/// Rows of `width` bytes, which the driver pads: to this many bytes on all hardware so far.
const PITCH: u64 = 512;

/// A pitched allocation. How much it takes only the driver knows, afterwards: reserved is what it
/// took so far on all hardware, and what it takes more is reserved then, or the memory freed again.
pub fn allocate_pitched<P: Width, S: Width>(
    pointer: *mut P,
    pitch: *mut S,
    (width, height): (u64, u64),
    driver: Call<'_>,
    free: impl FnOnce(P) -> CUresult,
) -> CUresult {
    if pointer.is_null() || pitch.is_null() || width == 0 || height == 0 {
        return driver.make();
    }
    let bytes = |device: &'static Device| {
        let bytes = width
            .checked_next_multiple_of(PITCH)
            .and_then(|row| row.checked_mul(height))
            .ok_or(CUresult::OUT_OF_MEMORY)?;
        Ok((bytes, device.taken_by(bytes)))
    };
    charge(current_capped, bytes, driver, |mut reserved| {
        // SAFETY: neither is null, and the driver has just written to both.
        let (address, rows) =
            unsafe { (pointer.read(), pitch.read().wide().saturating_mul(height)) };
        if let Err(code) = reserved.grow(rows) {
            free(address);
            return Err(code);
        }
        let device = reserved.device;
        reserved.shrink(device.taken_by(rows));
        reserved.commit(address.wide(), device.is_small(rows));
        Ok(())
    })
}

/// Frees a pointer, of whatever family; one that we do not know reaches the driver as well.
#[inline]
pub fn free(pointer: u64, driver: Call<'_>) -> CUresult {
    let Some(process) = process::joined() else {
        return driver.make();
    };
    let Some(entry) = process.pointers.take(pointer) else {
        return pool::looked_at(driver);
    };
    let result = driver.make();
    if result.is_ok() {
        give_back(process, pointer, entry);
    } else {
        note(process, pointer, entry);
    }
    result
}

/// What the driver has just said of a device's memory, to be what this container has of it.
pub fn tell<S: Width>(free: *mut S, total: *mut S, driver: Call<'_>) -> CUresult {
    let result = pool::looked_at(driver);
    if !result.is_ok() {
        return result;
    }
    let told = process::current().and_then(|process| {
        if let Some(device) = current_capped(process)? {
            correct(process.cap(device), free, total);
        }
        Ok(())
    });
    told.err().unwrap_or(result)
}

/// The total memory of a device, as this container has it.
pub fn tell_total<S: Width>(total: *mut S, handle: CUdevice, driver: Call<'_>) -> CUresult {
    let result = driver.make();
    if !result.is_ok() {
        return result;
    }
    match process::current() {
        Ok(process) => match process.device(handle) {
            Some(device) if device.is_capped() => {
                correct(process.cap(device), core::ptr::null_mut(), total);
                result
            }
            Some(_) => result,
            None => CUresult::NOT_PERMITTED,
        },
        Err(code) => code,
    }
}

/// Neither more than the cap leaves nor more than the device has. Either pointer may be null.
fn correct<S: Width>(cap: Cap, free: *mut S, total: *mut S) {
    for (value, at_most) in [(free, cap.free), (total, cap.total)] {
        if !value.is_null() {
            // SAFETY: not null, and the driver has just written to it.
            unsafe { value.write(S::narrow(at_most.min(value.read().wide()))) };
        }
    }
}
