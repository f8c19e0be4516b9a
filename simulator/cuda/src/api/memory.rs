//! Device memory.

use tranche_simulator_machine::layout::Habit;

use crate::code::Code;
use crate::context::current;
use crate::driver::has;
use crate::export::{export, put, put_wanted};
use crate::memory;
use crate::space::{containing, regions};

/// Rows of a pitched allocation start at multiples of this, in bytes.
const PITCH: u64 = 512;

export! {
    fn cuMemAlloc_v2(to: *mut u64, bytes: usize) {
        let context = current()?;
        if to.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        put(to, memory::allocate(context, bytes as u64)?)
    }
    fn cuMemFree_v2(address: u64) {
        let context = current()?;
        if address == 0 {
            return Ok(());
        }
        if has(Habit::FreesWait) {
            context.synchronize();
        }
        memory::free(address)
    }
    fn cuMemAllocPitch_v2(to: *mut u64, pitch: *mut usize, width: usize, height: usize, element: u32) {
        let context = current()?;
        if to.is_null() || pitch.is_null() || width == 0 || height == 0 || !matches!(element, 4 | 8 | 16) {
            return Err(Code::INVALID_VALUE);
        }
        let row = (width as u64).checked_next_multiple_of(PITCH).ok_or(Code::OUT_OF_MEMORY)?;
        let bytes = row.checked_mul(height as u64).ok_or(Code::OUT_OF_MEMORY)?;
        put(to, memory::allocate(context, bytes)?)?;
        put(pitch, usize::try_from(row).unwrap_or(usize::MAX))
    }
    fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) {
        let device = current()?.device;
        put_wanted(free, usize::try_from(device.free()).unwrap_or(usize::MAX));
        put_wanted(total, usize::try_from(device.total()).unwrap_or(usize::MAX));
        Ok(())
    }
    fn cuMemGetAddressRange_v2(start: *mut u64, bytes: *mut usize, address: u64) {
        current()?;
        let mut regions = regions();
        let (base, region) = containing(&mut regions, address).ok_or(Code::NOT_FOUND)?;
        put_wanted(start, base);
        put_wanted(bytes, usize::try_from(region.bytes).unwrap_or(usize::MAX));
        Ok(())
    }
}
