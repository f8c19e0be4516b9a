//! Memory that is known by its pointer, and the amount of memory that programs are shown.

use crate::abi::{CUdevice, CUdeviceptr, CUdeviceptr_v1, CUresult};
use crate::charge::{charge, note, return_charge};
use crate::driver::Call;
use crate::exports;
use crate::kept;
use crate::process::{self, Process};
use crate::share::{Cap, Device};

/// A number in one of the driver's two widths: today's, or that of before CUDA 3.2.
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

/// An allocation of `bytes` in the current context, whose address the driver writes to `pointer`.
#[inline]
pub fn allocate<P: Width>(bytes: u64, pointer: *mut P, driver: Call<'_>) -> CUresult {
    let is_wide = size_of::<P>() == size_of::<CUdeviceptr>();
    allocate_at(bytes, pointer.cast(), is_wide, driver)
}

/// `pointer` is to a pointer of today's width, or of before CUDA 3.2.
fn allocate_at(bytes: u64, pointer: *mut u8, is_wide: bool, driver: Call<'_>) -> CUresult {
    if pointer.is_null() || bytes == 0 {
        // The driver refuses it, in its own words.
        return driver.make();
    }
    charge(
        Process::current_capped,
        |device| Ok((bytes, device.taken_by(bytes))),
        driver,
        |reserved| {
            let small = reserved.device.is_small(bytes);
            // SAFETY: not null, of the width that is said, and the driver has just written to it.
            let address = unsafe {
                if is_wide {
                    pointer.cast::<CUdeviceptr>().read_unaligned()
                } else {
                    pointer.cast::<CUdeviceptr_v1>().read_unaligned().wide()
                }
            };
            reserved.commit(address, small);
            Ok(())
        },
    )
}

/// Rows of `width` bytes, which the driver pads: to this many bytes on all hardware so far.
const PITCH: u64 = 512;

/// A pitched allocation. Only the driver knows how much it takes, afterwards. So the size that all hardware so far took
/// is reserved first; if the driver took more, the difference is reserved then, or the memory is freed again.
pub fn allocate_pitched<P: Width, S: Width>(
    pointer: *mut P,
    pitch: *mut S,
    extent: (u64, u64),
    driver: Call<'_>,
    free: impl Fn(P) -> CUresult,
) -> CUresult {
    if pointer.is_null() || pitch.is_null() || extent.0 == 0 || extent.1 == 0 {
        return driver.make();
    }
    // SAFETY: neither is null, and the driver has written to both.
    let read = || unsafe { (pointer.read().wide(), pitch.read().wide()) };
    charge_rows(extent, driver, &read, &|address| free(P::narrow(address)))
}

/// `read` is the address and the pitch, when the driver has written them.
fn charge_rows(
    (width, height): (u64, u64),
    driver: Call<'_>,
    read: &dyn Fn() -> (u64, u64),
    free: &dyn Fn(u64) -> CUresult,
) -> CUresult {
    let bytes = |device: &'static Device| {
        let bytes = width
            .checked_next_multiple_of(PITCH)
            .and_then(|row| row.checked_mul(height))
            .ok_or(CUresult::OUT_OF_MEMORY)?;
        Ok((bytes, device.taken_by(bytes)))
    };
    charge(Process::current_capped, bytes, driver, |mut reserved| {
        let (address, pitch) = read();
        let bytes = pitch.saturating_mul(height);
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
        return kept::settle_after(driver);
    };
    let result = driver.make();
    if result.is_ok() {
        return_charge(process, pointer, entry);
    } else {
        note(process, pointer, entry);
    }
    result
}

/// What the driver says of a device's memory, corrected to what this container has of it.
pub fn correct_info<S: Width>(free: *mut S, total: *mut S, driver: Call<'_>) -> CUresult {
    let result = driver.make();
    if !result.is_ok() {
        return result;
    }
    let corrected = process::current().and_then(|process| {
        kept::settle_all(process);
        exports::settle_all(process);
        if let Some(device) = process.current_capped()? {
            correct(process.cap(device), free, total);
        }
        Ok(())
    });
    corrected.err().unwrap_or(result)
}

/// The total memory of a device, as this container has it.
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

/// Neither more than the cap leaves nor more than the device has. Either pointer may be null.
fn correct<S: Width>(cap: Cap, free: *mut S, total: *mut S) {
    for (value, at_most) in [(free, cap.free), (total, cap.total)] {
        if !value.is_null() {
            // SAFETY: not null, and the driver has just written to it.
            unsafe { value.write(S::narrow(at_most.min(value.read().wide()))) };
        }
    }
}
