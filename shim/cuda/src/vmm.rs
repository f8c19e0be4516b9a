//! Physical memory by handle. It is charged when it is created, and given back when neither a handle
//! nor a mapping holds it any more; `tranche_shim_core::physical` keeps the books, and argues.
//!
//! What another process exported is that process's to be charged for: importing it takes nothing.

use tranche_shim_core::{Freed, Physical};

use crate::abi::{
    CUarrayMapInfo, CUdevice, CUdeviceptr, CUmemAllocationProp,
    CUmemGenericAllocationHandle as Handle, CUresult,
};
use crate::driver::Call;
use crate::memory::{charge, current_capped};
use crate::process::{self, Kind, Process, key};

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
        None => current_capped(process),
    };
    let bytes = bytes as u64;
    charge(
        device,
        |device| Ok((bytes, device.taken_by(bytes))),
        driver,
        |reserved| {
            // SAFETY: not null, and the driver has just written to it.
            let handle = unsafe { handle.read() };
            let (process, number) = (reserved.process, reserved.device.number);
            let bytes = reserved.keep();
            process.physical.with(|physical| {
                // Without room to note it, it stays charged to the end of the process.
                if let Ok(Some(former)) = physical.create(handle, bytes, number) {
                    give_back(process, former);
                }
            });
            Ok(())
        },
    )
}

fn give_back(process: &'static Process, freed: Freed) {
    if let Some(device) = process.device_numbered(freed.device) {
        process.release(device, freed.bytes);
    }
}

/// Asks the driver and then notes what that changed, as one act.
fn with(driver: Call<'_>, note: impl FnOnce(&mut Physical, &mut dyn FnMut(Freed))) -> CUresult {
    let Some(process) = process::joined() else {
        return driver.make();
    };
    process.physical.with(|physical| {
        let result = driver.make();
        if result.is_ok() {
            note(physical, &mut |freed| give_back(process, freed));
        }
        result
    })
}

/// Releases a handle.
pub fn release(handle: Handle, driver: Call<'_>) -> CUresult {
    with(driver, |physical, freed| physical.release(handle, freed))
}

/// Maps memory at an address.
pub fn map(address: CUdeviceptr, bytes: usize, handle: Handle, driver: Call<'_>) -> CUresult {
    with(driver, |physical, freed| {
        // What cannot be noted holds its memory to the end of the process.
        let _ = physical.bind(address, handle, bytes as u64, 0, freed);
    })
}

/// Unmaps whatever is mapped at a range of addresses.
pub fn unmap(address: CUdeviceptr, bytes: usize, driver: Call<'_>) -> CUresult {
    with(driver, |physical, freed| {
        physical.unbind_range(address, bytes as u64, STEP, freed);
    })
}

/// What mappings are multiples of: the smallest pages of any driver.
const STEP: u64 = 64 << 10;

/// Another handle, of the memory at an address.
pub fn retain(handle: *mut Handle, driver: Call<'_>) -> CUresult {
    with(driver, |physical, _| {
        // SAFETY: the driver has just written to it, which it does not to null.
        physical.retain(unsafe { handle.read() });
    })
}

/// A token by which the handle's memory can be imported, here or elsewhere.
pub fn export(token: *const u8, kind: u32, handle: Handle, driver: Call<'_>) -> CUresult {
    with(driver, |physical, _| {
        // SAFETY: the driver has just written a token of this kind.
        if let Some(token) = unsafe { token_at(token, kind) } {
            physical.export(token, handle);
        }
    })
}

/// A handle of memory that was exported, here or elsewhere.
pub fn import(handle: *mut Handle, token: usize, kind: u32, driver: Call<'_>) -> CUresult {
    with(driver, |physical, _| {
        let token = if kind == FILE {
            Some(file_token(token as u64))
        } else {
            // SAFETY: the driver has just read a token of this kind there.
            unsafe { token_at(token as *const u8, kind) }
        };
        if let Some(token) = token {
            // SAFETY: the driver has just written to it.
            let _ = physical.import(token, unsafe { handle.read() });
        }
    })
}

/// Kinds of tokens: a file descriptor, and 64 bytes that other nodes of a fabric understand.
const FILE: u32 = 1;
const FABRIC: u32 = 8;

fn file_token(descriptor: u64) -> u64 {
    descriptor.wrapping_add(1)
}

/// # Safety
///
/// A token of this kind is readable there.
unsafe fn token_at(token: *const u8, kind: u32) -> Option<u64> {
    match kind {
        // SAFETY: the caller's promise.
        FILE => Some(file_token(u64::from(unsafe {
            token.cast::<u32>().read_unaligned()
        }))),
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
    with(driver, |physical, freed| {
        if list.is_null() {
            return;
        }
        // SAFETY: the driver has just read so many.
        let list = unsafe { core::slice::from_raw_parts(list, count as usize) };
        for act in list {
            let owner = array_key(act.resource);
            let tile = act.subresource.iter().fold(owner, |sum, &word| {
                (sum.rotate_left(7) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15)
            });
            let place = place_of(tile ^ u64::from(act.subresource_type));
            if act.operation == CUarrayMapInfo::MAP {
                let _ = physical.bind(place, act.memory, 0, owner, freed);
            } else {
                physical.unbind(place, freed);
            }
        }
    })
}

fn array_key(array: usize) -> u64 {
    key(Kind::Array, array as u64)
}

/// A place that is no address.
fn place_of(mixed: u64) -> u64 {
    key(Kind::Tile, mixed & ((1 << 56) - 1) | 1)
}

/// An array is gone, and what its tiles showed is shown no more.
pub fn end_array(process: &'static Process, array: usize) {
    process.physical.with(|physical| {
        physical.end_owner(array_key(array), &mut |freed| give_back(process, freed));
    });
}

/// A multicast object: no memory of its own, but it holds what is bound to it.
pub fn create_multicast(handle: *mut Handle, driver: Call<'_>) -> CUresult {
    // Joined, or nothing would be noted.
    if let Err(code) = process::current() {
        return code;
    }
    with(driver, |physical, freed| {
        // SAFETY: the driver has just written to it.
        if let Ok(Some(former)) = physical.create(unsafe { handle.read() }, 0, 0) {
            freed(former);
        }
    })
}

/// Binds memory to a multicast object, at an offset.
pub fn bind(object: Handle, offset: usize, memory: Handle, driver: Call<'_>) -> CUresult {
    with(driver, |physical, freed| {
        bind_noted(physical, object, offset, memory, freed);
    })
}

/// The same, with the memory that is mapped at an address.
pub fn bind_address(
    object: Handle,
    offset: usize,
    address: CUdeviceptr,
    driver: Call<'_>,
) -> CUresult {
    with(driver, |physical, freed| {
        if let Some(memory) = physical.shown_at(address) {
            bind_noted(physical, object, offset, memory, freed);
        }
    })
}

fn bind_noted(
    physical: &mut Physical,
    object: Handle,
    offset: usize,
    memory: Handle,
    freed: &mut dyn FnMut(Freed),
) {
    if let Some(device) = physical.device_of(memory) {
        let place = bound_at(object, device, offset);
        let _ = physical.bind(place, memory, 0, object, freed);
    }
}

/// Undoes a binding of a device's memory.
pub fn unbind(object: Handle, device: CUdevice, offset: usize, driver: Call<'_>) -> CUresult {
    let number = process::joined()
        .and_then(|process| process.device(device))
        .map_or(u8::MAX, |device| device.number);
    with(driver, |physical, freed| {
        physical.unbind(bound_at(object, number, offset), freed);
    })
}

/// Several devices bind at the same offset, each its own memory.
fn bound_at(object: Handle, device: u8, offset: usize) -> u64 {
    let mixed = (object.rotate_left(17) ^ u64::from(device)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    place_of((mixed ^ offset as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15))
}
