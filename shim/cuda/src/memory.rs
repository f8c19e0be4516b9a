//! Memory by pointer, and the amount of memory that programs see.

use crate::abi::{CUdevice, CUdeviceptr, CUdeviceptr_v1, CUresult};
use crate::charge::{Reserved, charge_in, note, return_charge};
use crate::device::{Device, Residence, VisibleMemory};
use crate::driver::Call;
use crate::exports;
use crate::managed;
use crate::process::{self, Process};
use crate::settle;

/// A number in one of the driver's two widths: today's, or the one used before CUDA 3.2.
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

/// The kind of memory for which a program asks.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Asked {
    /// Device memory. If the share is oversubscribed, the program gets managed memory.
    Device,
    /// Device memory with a pointer of before CUDA 3.2, which is too narrow for managed memory.
    Narrow,
    Managed,
}

/// An allocation of `bytes` in the current context, whose address the driver writes to `pointer`.
#[inline]
pub fn allocate<P: Width>(asked: Asked, bytes: u64, pointer: *mut P, driver: Call<'_>) -> CUresult {
    let is_wide = size_of::<P>() == size_of::<CUdeviceptr>();
    let asked = if is_wide { asked } else { Asked::Narrow };
    allocate_at(asked, bytes, pointer.cast(), driver)
}

fn allocate_at(asked: Asked, bytes: u64, pointer: *mut u8, driver: Call<'_>) -> CUresult {
    if pointer.is_null() || bytes == 0 {
        // The driver returns the error.
        return driver.make();
    }
    let process = match process::current() {
        Ok(process) => process,
        Err(code) => return code,
    };
    // SAFETY: not null, of this width, and the driver has written to it.
    let read = || unsafe {
        if asked == Asked::Narrow {
            pointer.cast::<CUdeviceptr_v1>().read_unaligned().wide()
        } else {
            pointer.cast::<CUdeviceptr>().read_unaligned()
        }
    };
    if asked != Asked::Narrow
        && let Some(device) = process.current_movable()
    {
        let make = || match asked {
            // SAFETY: not null, and of today's width.
            Asked::Device => unsafe { managed::make(device, bytes, pointer.cast()) },
            Asked::Narrow | Asked::Managed => driver.make(),
        };
        return allocate_movable(process, device, (asked, bytes), Call::of(&make), &read);
    }
    charge_in(
        process,
        Process::current_capped,
        |device| Ok((bytes, device.taken_by(bytes))),
        driver,
        |reserved| {
            let small = reserved.device.is_small(bytes);
            reserved.commit(read(), small);
            Ok(())
        },
    )
}

/// An allocation of `bytes` that may move. `read` returns its address after it was made.
#[cold]
#[inline(never)]
fn allocate_movable(
    process: &'static Process,
    device: &'static Device,
    (asked, bytes): (Asked, u64),
    make: Call<'_>,
    read: &dyn Fn() -> u64,
) -> CUresult {
    let sizes = (bytes, device.taken_by(bytes));
    let reserved = match Reserved::of(process, device, Residence::Movable, sizes) {
        Ok(reserved) => reserved,
        Err(code) => return code,
    };
    let result = make.make();
    if result.is_ok() {
        let is_small = device.is_small(bytes);
        reserved.commit_movable(read(), is_small, asked == Asked::Device);
    }
    result
}

/// Rows of a width in bytes, and the size of their elements in bytes.
#[derive(Clone, Copy)]
pub struct Rows {
    pub width: u64,
    pub height: u64,
    pub element: u32,
}

/// The driver pads rows to a multiple of this many bytes on all hardware so far.
const PITCH: u64 = 512;

impl Rows {
    /// Bytes from one row to the next, and of all rows.
    fn padded(self) -> Option<(u64, u64)> {
        let pitch = self.width.checked_next_multiple_of(PITCH)?;
        Some((pitch, pitch.checked_mul(self.height)?))
    }

    /// Whether the driver accepts this size of elements.
    fn has_valid_elements(self) -> bool {
        matches!(self.element, 4 | 8 | 16)
    }
}

/// A pitched allocation. Its size is known only after the driver's call. So the size that it takes on all hardware so far
/// is reserved first. If the driver took more, the difference is reserved then; if that fails, the memory is freed again.
pub fn allocate_pitched<P: Width, S: Width>(
    pointer: *mut P,
    pitch: *mut S,
    rows: Rows,
    driver: Call<'_>,
    free: impl Fn(P) -> CUresult,
) -> CUresult {
    if pointer.is_null() || pitch.is_null() || rows.width == 0 || rows.height == 0 {
        return driver.make();
    }
    let process = match process::current() {
        Ok(process) => process,
        Err(code) => return code,
    };
    // SAFETY: neither is null, and both have been written to.
    let read = || unsafe { (pointer.read().wide(), pitch.read().wide()) };
    let is_wide = size_of::<P>() == size_of::<CUdeviceptr>();
    if is_wide
        && rows.has_valid_elements()
        && let Some(device) = process.current_movable()
    {
        let Some((row, bytes)) = rows.padded() else {
            return CUresult::OUT_OF_MEMORY;
        };
        // SAFETY: neither is null, and the program's to be written to.
        let make = || unsafe {
            pitch.write(S::narrow(row));
            managed::make(device, bytes, pointer.cast())
        };
        let asked = (Asked::Device, bytes);
        return allocate_movable(process, device, asked, Call::of(&make), &|| read().0);
    }
    charge_rows(process, rows, driver, &read, &|address| {
        free(P::narrow(address))
    })
}

/// `read` returns the address and the pitch after the driver has written them.
fn charge_rows(
    process: &'static Process,
    rows: Rows,
    driver: Call<'_>,
    read: &dyn Fn() -> (u64, u64),
    free: &dyn Fn(u64) -> CUresult,
) -> CUresult {
    let bytes = |device: &'static Device| {
        let (_, bytes) = rows.padded().ok_or(CUresult::OUT_OF_MEMORY)?;
        Ok((bytes, device.taken_by(bytes)))
    };
    let device = Process::current_capped;
    charge_in(process, device, bytes, driver, |mut reserved| {
        let (address, pitch) = read();
        let bytes = pitch.saturating_mul(rows.height);
        if let Err(code) = reserved.grow(bytes) {
            free(address);
            return Err(code);
        }
        let device = reserved.device;
        reserved.shrink(device.taken_by(bytes));
        reserved.commit(address, device.is_small(bytes));
        Ok(())
    })
}

/// Frees a pointer of any family. An unknown pointer is passed to the driver too.
#[inline]
pub fn free(pointer: u64, driver: Call<'_>) -> CUresult {
    let Some(process) = process::joined() else {
        return driver.make();
    };
    let Some(entry) = process.pointers.take(pointer) else {
        let result = driver.make();
        settle::settle_some(process);
        return result;
    };
    let result = driver.make();
    if result.is_ok() {
        return_charge(process, pointer, entry);
    } else {
        note(process, pointer, entry);
    }
    result
}

/// The same for calls other than today's `cuMemFree`. `in_stream`: in the order of a stream.
#[inline(never)]
pub fn free_as(pointer: u64, in_stream: bool, driver: Call<'_>) -> CUresult {
    let Some(process) = process::joined() else {
        return driver.make();
    };
    let Some(entry) = process.pointers.take(pointer) else {
        return settle::settle_after(driver);
    };
    let result = driver.make();
    if !result.is_ok() {
        note(process, pointer, entry);
    } else if let Some(place) = settle::driver_pool_of(entry) {
        settle::freed(process, place, entry.bytes, in_stream);
    } else {
        return_charge(process, pointer, entry);
    }
    result
}

/// Corrects the driver's answer about a device's memory to what this container has of it.
pub fn correct_info<S: Width>(free: *mut S, total: *mut S, driver: Call<'_>) -> CUresult {
    let result = driver.make();
    if !result.is_ok() {
        return result;
    }
    let corrected = process::current().and_then(|process| {
        settle::settle_watched(process);
        exports::settle_all(process);
        if let Some(device) = process.current_capped()? {
            correct(process.cap(device), free, total);
        }
        Ok(())
    });
    corrected.err().unwrap_or(result)
}

/// Corrects the total memory of a device to what this container has of it.
pub fn correct_total<S: Width>(total: *mut S, handle: CUdevice, driver: Call<'_>) -> CUresult {
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

/// Lowers both values to what the cap allows. Either pointer may be null.
fn correct<S: Width>(cap: VisibleMemory, free: *mut S, total: *mut S) {
    for (value, at_most) in [(free, cap.free), (total, cap.total)] {
        if !value.is_null() {
            // SAFETY: not null, and the driver has just written to it.
            unsafe { value.write(S::narrow(at_most.min(value.read().wide()))) };
        }
    }
}
