//! Physical memory by handle. It is charged when it is created; the charge is given back when no handle, mapping or
//! descriptor holds it any more. `tranche_shim_core::physical` notes the uses and explains why this is correct.
//!
//! Memory that another process exported is charged to this process as well while it holds it: the exporter may end
//! first, and the memory exists until its last holder has released it. The driver does not return the size of a handle's
//! memory, so parts of it are mapped to find it out. If the driver maps only whole allocations, the import is charged a
//! block, and what it lacks before the program's first mapping.

use core::cell::Cell;

use tranche_shim_core::Freed;
use tranche_shim_core::physical::{Id, Mark, Physical};
use tranche_shim_runtime::sys;

use crate::abi::{
    CUarrayMapInfo, CUdeviceptr, CUmemAllocationProp, CUmemGenericAllocationHandle as Handle,
    CUresult,
};
use crate::charge::{Reserved, charge, let_go};
use crate::device::{Device, Residence};
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
        // None if it has no cap, or if there is no such device; then the driver returns the error.
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

/// If there is no room to note it, it stays charged until the process ends.
fn note_created(handle: Handle, reserved: Reserved) {
    let (process, number) = (reserved.process, reserved.device.number);
    let bytes = reserved.keep();
    process.note_physical(|physical, freed| {
        let _ = physical.create(handle, bytes, number, freed);
    });
}

/// Makes a call, and notes its beginning and its result. `begin` and `end` run under the lock and must not call the
/// driver.
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

/// Whether the size of a handle's memory is not known.
#[inline(never)]
pub fn is_unsized(process: &Process, handle: Handle) -> bool {
    process.physical.with(|physical| {
        let id = physical.id_of(handle);
        id.is_some_and(|id| physical.unsized_charge(id).is_some())
    })
}

/// Maps memory at an address. If the size of the memory is not known, the mapping shows that it has at least so many bytes:
/// what it is charged less is reserved before the driver is called, and charged when it has agreed.
pub fn map(address: CUdeviceptr, bytes: usize, handle: Handle, driver: Call<'_>) -> CUresult {
    let Some(process) = process::joined() else {
        return driver.make();
    };
    let bytes = bytes as u64;
    let (held, charge) = process.physical.with(|physical| {
        let held = physical.hold(handle);
        (held, held.and_then(|held| physical.unsized_charge(held)))
    });
    let mut reserved = None;
    if let Some(charge) = charge
        && let Some(device) = process.device_numbered(charge.device)
    {
        let missing = bytes.saturating_sub(charge.bytes);
        match Reserved::new(process, device, missing, missing) {
            Ok(missing) => reserved = Some(missing),
            Err(code) => {
                if let Some(held) = held {
                    let_go(process, held);
                }
                return code;
            }
        }
    }
    with(
        driver,
        |_| (),
        |physical, (), done, freed| match held {
            // If there is no room to note it, the memory stays held until the process ends.
            Some(held) if done => {
                if let Some(reserved) = &mut reserved {
                    // Another mapping may have shown it meanwhile; then the rest is given back.
                    reserved.bytes -= physical.show_bytes(held, bytes).min(reserved.bytes);
                }
                let _ = physical.bind(address, held, bytes, 0, freed);
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

/// Unmaps a range of addresses.
pub fn unmap(address: CUdeviceptr, bytes: usize, driver: Call<'_>) -> CUresult {
    with(driver, Physical::mark, |physical, mark, done, freed| {
        if done {
            physical.unbind_range(address, bytes as u64, STEP, mark, freed);
        }
    })
}

/// Mappings are multiples of this: the smallest pages of any driver.
const STEP: u64 = 64 << 10;

/// Retains the handle of the memory at an address.
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

/// Notes the handle that the driver has written, or ends the use if the driver has refused.
fn end_hold(
    physical: &mut Physical,
    held: Option<Id>,
    done: bool,
    handle: *const Handle,
    freed: &mut dyn FnMut(Freed),
) {
    match held {
        Some(held) if done => {
            // SAFETY: the call succeeded, so the pointer is not null and was written to. If there is no room for the
            // handle, its use never ends.
            let _ = physical.name(unsafe { handle.read() }, held, freed);
        }
        Some(held) => physical.let_go(held, freed),
        None => {}
    }
}

/// Exports the handle's memory by a token or a descriptor, for an import in any process. A descriptor keeps the memory.
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
        // SAFETY: the call succeeded, so the pointer is not null and has a descriptor.
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

/// Imports memory that this or another process exported.
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

/// Charges memory that another process exported; releases the handle if the share has no room for it.
fn charge_imported(process: &'static Process, handle: Handle) -> CUresult {
    let Some(device) = device_of(process, handle).filter(|device| device.is_capped()) else {
        // It has no device memory. If it is a multicast object, what is bound to it ends with it.
        let note = |physical: &mut Physical, freed: &mut dyn FnMut(Freed)| {
            let _ = physical.import((handle, 0), 0, 0, freed);
        };
        process.note_physical(note);
        return CUresult::SUCCESS;
    };
    if process.physical.with(|physical| physical.use_again(handle)) {
        // It was imported before under the same handle.
        return CUresult::SUCCESS;
    }
    let size = size_of_imported(process, device, handle);
    let bytes = size.unwrap_or(device.block);
    match Reserved::new(process, device, bytes, bytes) {
        Ok(reserved) => {
            reserved.import(handle, 0);
            if size.is_none() {
                process
                    .physical
                    .with(|physical| physical.set_unsized(handle));
            }
            CUresult::SUCCESS
        }
        Err(code) => {
            // SAFETY: the driver has just handed out this handle, and nothing else uses it.
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

/// The size of another process's memory: the most that can be mapped of it. If that is more than the device's shares may
/// hold, or cannot be found out, a size that is more than that. `None` if the driver maps no part of it: then only the
/// program's own mapping shows the size.
///
/// It is found out before the program has the handle, because the handle alone keeps the memory when its exporter has freed
/// it.
fn size_of_imported(process: &Process, device: &Device, handle: Handle) -> Option<u64> {
    let block = device.block;
    let too_much = (process.limit(device, Residence::Gpu) | (block - 1)) + 1;
    let mut range = 0;
    // SAFETY: writes the local number.
    let result = unsafe {
        real!(cuMemAddressReserve: fn(*mut CUdeviceptr, u64, usize, CUdeviceptr, u64))(
            &raw mut range,
            too_much,
            0,
            0,
            0,
        )
    };
    if !result.is_ok() {
        return Some(too_much);
    }
    let find = || {
        // Blocks that can be mapped, and that cannot.
        let (mut most, mut too_many) = (1, too_much / block + 1);
        while too_many - most > 1 {
            let middle = u64::midpoint(most, too_many);
            if can_map(range, middle * block, handle)? {
                most = middle;
            } else {
                too_many = middle;
            }
        }
        Some(most * block)
    };
    let maps_parts = can_map(range, block, handle) == Some(true);
    let found = maps_parts.then(|| find().unwrap_or(too_much));
    // SAFETY: our own range, in which nothing is mapped.
    unsafe {
        real!(cuMemAddressFree: fn(CUdeviceptr, u64))(range, too_much);
    }
    found
}

/// Whether so many bytes of a handle's memory can be mapped; `None` for an error that says nothing about the size. The range
/// is this module's own.
#[inline(never)]
fn can_map(range: CUdeviceptr, bytes: u64, handle: Handle) -> Option<bool> {
    // SAFETY: maps the memory to a range of our own, and unmaps it.
    let result = unsafe {
        match real!(cuMemMap: fn(CUdeviceptr, u64, usize, Handle, u64))(range, bytes, 0, handle, 0)
        {
            CUresult::INVALID_VALUE => return Some(false),
            CUresult::SUCCESS => real!(cuMemUnmap: fn(CUdeviceptr, u64))(range, bytes),
            code => code,
        }
    };
    result.is_ok().then_some(true)
}

/// The kind of tokens of 64 bytes that other nodes of a fabric understand.
const FABRIC: u32 = 8;

/// A number that identifies the memory of a token, if the kind of token allows that. A descriptor's number does not
/// identify its memory: see [`exports::hold`].
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
    // Tiles do not show how much memory they keep.
    let is_unsized = |process| {
        let mut tiles = list.iter().filter(is_map);
        tiles.any(|tile| is_unsized(process, tile.memory))
    };
    if process::joined().is_some_and(is_unsized) {
        return CUresult::NOT_SUPPORTED;
    }
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

/// A place that is not an address.
pub fn place_of(mixed: u64) -> u64 {
    key(Kind::Tile, mixed & ((1 << 56) - 1) | 1)
}

/// Destroys an array, which also ends the mappings to its tiles.
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
