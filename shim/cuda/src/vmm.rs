//! Physical memory by handle. It is charged when it is created, and given back when neither a handle nor a mapping holds
//! it any more, nor a descriptor; `tranche_shim_core::physical` keeps the books, and argues.
//!
//! What another process exported is charged to this one as well, for as long as it holds it: the exporter may end first,
//! and the memory is there until its last holder has let go. How much it is the driver does not say of a handle, so it
//! is mapped to find out.

use core::cell::Cell;

use tranche_shim_core::Freed;
use tranche_shim_core::physical::{Id, Mark, Physical};
use tranche_shim_runtime::sys;

use crate::abi::{
    CUarrayMapInfo, CUdevice, CUdeviceptr, CUmemAllocationProp,
    CUmemGenericAllocationHandle as Handle, CUresult,
};
use crate::charge::{Reserved, charge, let_go};
use crate::device::Device;
use crate::driver::{Call, real};
use crate::exports::{self, FILE_DESCRIPTOR};
use crate::keys::{Kind, key};
use crate::process::{self, Process};

/// Creates physical memory.
pub fn create(
    handle: *mut Handle,
    bytes: usize,
    properties: *const CUmemAllocationProp,
    driver: Call<'_>,
) -> CUresult {
    if handle.is_null() || properties.is_null() || bytes == 0 {
        return driver.make();
    }
    // SAFETY: not null, and the driver reads them next.
    let location = unsafe { (*properties).location };
    if location.is_host() {
        return driver.make();
    }
    let device = |process: &'static Process| match location.device() {
        // None if it has no cap; or if there is no such device, which the driver says itself.
        Some(handle) => Ok(process.device(handle).filter(|device| device.is_capped())),
        None => process.current_capped(),
    };
    let bytes = bytes as u64;
    charge(
        device,
        |device| Ok((bytes, device.taken_by(bytes))),
        driver,
        |reserved| {
            // SAFETY: not null, and the driver has just written to it.
            note_created(unsafe { handle.read() }, reserved);
            Ok(())
        },
    )
}

/// Without room to note it, it stays charged to the end of the process.
fn note_created(handle: Handle, reserved: Reserved) {
    let (process, number) = (reserved.process, reserved.device.number);
    let bytes = reserved.keep();
    process.note_physical(|physical, freed| {
        let _ = physical.create(handle, bytes, number, freed);
    });
}

/// Notes the beginning of a call, makes it, and notes what came of it. `begin` and `end` have the books, and no driver
/// is called meanwhile.
pub fn with<T>(
    driver: Call<'_>,
    begin: impl FnOnce(&mut Physical) -> T,
    end: impl FnOnce(&mut Physical, T, bool, &mut dyn FnMut(Freed)),
) -> CUresult {
    let Some(process) = process::joined() else {
        return driver.make();
    };
    let noted = process.physical.with(begin);
    let result = driver.make();
    let has_left = process.note_physical(|physical, freed| {
        end(physical, noted, result.is_ok(), freed);
        physical.has_left()
    });
    if has_left {
        exports::settle_some(process, false);
    }
    result
}

/// Releases a handle.
pub fn release(handle: Handle, driver: Call<'_>) -> CUresult {
    with(
        driver,
        |physical| physical.begin_release(handle),
        |physical, release, done, freed| physical.end_release(&release, done, freed),
    )
}

/// Maps memory at an address.
pub fn map(address: CUdeviceptr, bytes: usize, handle: Handle, driver: Call<'_>) -> CUresult {
    with(
        driver,
        |physical| physical.hold(handle),
        |physical, held, done, freed| match held {
            // What cannot be noted holds its memory to the end of the process.
            Some(held) if done => {
                let _ = physical.bind(address, held, bytes as u64, 0, freed);
            }
            Some(held) => physical.let_go(held, freed),
            // Memory that is not noted here.
            None if done => {
                physical.unbind(address, freed);
            }
            None => {}
        },
    )
}

/// Unmaps whatever is mapped at a range of addresses.
pub fn unmap(address: CUdeviceptr, bytes: usize, driver: Call<'_>) -> CUresult {
    with(driver, Physical::mark, |physical, mark, done, freed| {
        if done {
            physical.unbind_range(address, bytes as u64, STEP, mark, freed);
        }
    })
}

/// What mappings are multiples of: the smallest pages of any driver.
const STEP: u64 = 64 << 10;

/// Another handle, of the memory at an address.
pub fn retain(handle: *mut Handle, address: CUdeviceptr, driver: Call<'_>) -> CUresult {
    with(
        driver,
        |physical| {
            let shown = physical.shown_at(address)?;
            physical.hold_id(shown)
        },
        |physical, held, done, freed| end_hold(physical, held, done, handle, freed),
    )
}

/// The driver has written that handle, or refused.
fn end_hold(
    physical: &mut Physical,
    held: Option<Id>,
    done: bool,
    handle: *const Handle,
    freed: &mut dyn FnMut(Freed),
) {
    match held {
        Some(held) if done => {
            // SAFETY: the driver has just written to it, which it does not to null. Without room for the name, its use
            // never ends.
            let _ = physical.name(unsafe { handle.read() }, held, freed);
        }
        Some(held) => physical.let_go(held, freed),
        None => {}
    }
}

/// A token or a descriptor by which the handle's memory can be imported, here or elsewhere. A descriptor keeps it.
pub fn export(token: *const u8, kind: u32, handle: Handle, driver: Call<'_>) -> CUresult {
    let Some(process) = process::joined() else {
        return driver.make();
    };
    let held = process.physical.with(|physical| physical.hold(handle));
    let result = driver.make();
    let Some(held) = held else {
        return result;
    };
    if result.is_ok() && kind == FILE_DESCRIPTOR {
        // SAFETY: the driver has just written a descriptor, which it does not to null.
        exports::add(
            process,
            unsafe { token.cast::<i32>().read_unaligned() },
            held,
        );
        return result;
    }
    if result.is_ok() {
        // SAFETY: the driver has just written a token of this kind.
        let token = unsafe { token_at(token, kind) };
        if let Some(token) = token {
            process
                .physical
                .with(|physical| physical.add_token(token, handle));
        }
    }
    let_go(process, held);
    result
}

/// A handle of memory that was exported, here or elsewhere.
pub fn import(handle: *mut Handle, token: usize, kind: u32, driver: Call<'_>) -> CUresult {
    let process = match process::current() {
        Ok(process) => process,
        Err(code) => return code,
    };
    if handle.is_null() {
        return driver.make();
    }
    let held = if kind == FILE_DESCRIPTOR {
        i32::try_from(token)
            .ok()
            .and_then(|descriptor| exports::hold(process, descriptor))
    } else {
        // SAFETY: the driver reads a token of this kind there next.
        let token = unsafe { token_at(token as *const u8, kind) };
        token.and_then(|token| {
            let hold = |physical: &mut Physical| physical.hold_exported(token);
            process.physical.with(hold)
        })
    };
    let result = driver.make();
    if held.is_some() {
        process.note_physical(|physical, freed| {
            end_hold(physical, held, result.is_ok(), handle, freed);
        });
    } else if result.is_ok() {
        // SAFETY: not null, and the driver has just written to it.
        return charge_imported(process, unsafe { handle.read() });
    }
    result
}

/// Charges memory that another process exported; gives the handle up where the share has no room for it.
fn charge_imported(process: &'static Process, handle: Handle) -> CUresult {
    let Some(device) = device_of(process, handle).filter(|device| device.is_capped()) else {
        // Nothing of a device's. What is bound to it, if it is a multicast object, goes with it.
        let note = |physical: &mut Physical, freed: &mut dyn FnMut(Freed)| {
            let _ = physical.import((handle, 0), 0, 0, freed);
        };
        process.note_physical(note);
        return CUresult::SUCCESS;
    };
    if process.physical.with(|physical| physical.use_again(handle)) {
        // Imported before, under the same handle.
        return CUresult::SUCCESS;
    }
    let bytes = size_of_imported(device, handle);
    match Reserved::new(process, device, bytes, bytes) {
        Ok(reserved) => {
            reserved.import(handle, 0);
            CUresult::SUCCESS
        }
        Err(code) => {
            // SAFETY: the driver has just given this handle out, and nobody has seen it.
            unsafe { real!(cuMemRelease: fn(Handle))(handle) };
            code
        }
    }
}

/// The device that a handle's memory lies on.
fn device_of(process: &'static Process, handle: Handle) -> Option<&'static Device> {
    let mut properties = CUmemAllocationProp::default();
    // SAFETY: writes the local properties.
    let result = unsafe {
        real!(cuMemGetAllocationPropertiesFromHandle: fn(*mut CUmemAllocationProp, Handle))(
            &raw mut properties,
            handle,
        )
    };
    if !result.is_ok() || properties.location.is_host() {
        return None;
    }
    process.device(properties.location.device()?)
}

/// Bytes of memory that another process made: the most that can be mapped of it. Where that cannot be found, all that
/// the device has.
fn size_of_imported(device: &Device, handle: Handle) -> u64 {
    let mut total = 0usize;
    let mut range = 0;
    // SAFETY: writes the local numbers.
    let result = unsafe {
        real!(cuDeviceTotalMem_v2: fn(*mut usize, CUdevice))(&raw mut total, device.handle);
        real!(cuMemAddressReserve: fn(*mut CUdeviceptr, usize, usize, CUdeviceptr, u64))(
            &raw mut range,
            total,
            0,
            0,
            0,
        )
    };
    let total = total as u64;
    if !result.is_ok() {
        return total;
    }
    let can_map = |bytes: u64| {
        let bytes = usize::try_from(bytes).unwrap_or(usize::MAX);
        // SAFETY: maps the handle's memory to a range of our own, and unmaps it.
        unsafe {
            let map = real!(cuMemMap: fn(CUdeviceptr, usize, usize, Handle, u64));
            let mapped = map(range, bytes, 0, handle, 0).is_ok();
            if mapped {
                real!(cuMemUnmap: fn(CUdeviceptr, usize))(range, bytes);
            }
            mapped
        }
    };
    // Blocks that can be mapped, and that cannot.
    let (mut most, mut too_many) = (0, total / device.block + 1);
    while too_many - most > 1 {
        let middle = most + (too_many - most) / 2;
        if can_map(middle * device.block) {
            most = middle;
        } else {
            too_many = middle;
        }
    }
    // SAFETY: our own range, in which nothing is mapped.
    unsafe {
        real!(cuMemAddressFree: fn(CUdeviceptr, usize))(range, usize::try_from(total).unwrap_or(0));
    }
    if most == 0 {
        total
    } else {
        most * device.block
    }
}

/// The kind of tokens of 64 bytes that other nodes of a fabric understand.
const FABRIC: u32 = 8;

/// What identifies the memory of a token, where that can be told. Of a descriptor the number does not:
/// [`exports::hold`].
///
/// # Safety
///
/// A token of this kind is readable there.
unsafe fn token_at(token: *const u8, kind: u32) -> Option<u64> {
    match kind {
        // SAFETY: the caller's promise.
        FABRIC => Some(mix(unsafe { core::slice::from_raw_parts(token, 64) })),
        _ => None,
    }
}

/// A number for bytes: FNV-1a; never 0.
fn mix(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |sum: u64, &byte| {
        (sum ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
    }) | 1 << 55
}

/// Maps memory to tiles of sparse arrays, and unmaps it.
pub fn map_tiles(list: *const CUarrayMapInfo, count: u32, driver: Call<'_>) -> CUresult {
    if list.is_null() {
        return driver.make();
    }
    // SAFETY: not null, and the driver reads so many next.
    let list = unsafe { core::slice::from_raw_parts(list, count as usize) };
    let is_map = |tile: &&CUarrayMapInfo| tile.operation == CUarrayMapInfo::MAP;
    let Ok(scratch) = sys::map_private(size_of_val(list)) else {
        return CUresult::OUT_OF_MEMORY;
    };
    // SAFETY: a mapping of this function's own, longer than this; zeros are no allocation.
    let held: &[Cell<Option<Id>>] =
        unsafe { core::slice::from_raw_parts(scratch.start.as_ptr().cast(), list.len()) };
    let begin = |physical: &mut Physical| {
        for (held, tile) in held.iter().zip(list).filter(|(_, tile)| is_map(tile)) {
            held.set(physical.hold(tile.memory));
        }
        physical.mark()
    };
    let result = with(driver, begin, |physical, mark, done, freed| {
        let since = physical.mark();
        for (held, tile) in held.iter().zip(list) {
            let place = place_of_tile(tile);
            match held.get() {
                Some(memory) if done => {
                    let owner = array_key(tile.resource);
                    let _ = physical.bind(place, memory, 0, owner, freed);
                }
                Some(memory) => physical.let_go(memory, freed),
                None if done => physical.unbind_older(place, mark, since, freed),
                None => {}
            }
        }
    });
    // SAFETY: this function's own, and used no more.
    unsafe { sys::unmap(scratch) };
    result
}

fn place_of_tile(tile: &CUarrayMapInfo) -> u64 {
    let mixed = tile
        .subresource
        .iter()
        .fold(array_key(tile.resource), |sum, &word| {
            (sum.rotate_left(7) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15)
        });
    place_of(mixed ^ u64::from(tile.subresource_type))
}

/// The number under which an array is noted, in the table as well.
pub fn array_key(array: usize) -> u64 {
    key(Kind::Array, array as u64)
}

/// A place that is no address.
pub fn place_of(mixed: u64) -> u64 {
    key(Kind::Tile, mixed & ((1 << 56) - 1) | 1)
}

/// Destroys an array: what its tiles showed is shown no more.
pub fn end_array(process: &'static Process, array: usize, driver: Call<'_>) -> CUresult {
    let mark: Mark = process.physical.with(Physical::mark);
    let result = driver.make();
    if result.is_ok() {
        process.note_physical(|physical, freed| {
            physical.end_owner(array_key(array), mark, freed);
        });
    }
    result
}
