//! Multicast objects: a write to one is a write to the memory of several devices that is bound to it.
//!
//! An object has no memory of its own. It is noted as physical memory of 0 bytes, with handles, mappings and descriptors
//! like any other. Memory that is bound to it is held until it is unbound, or until the object has no use left.

use tranche_shim_core::Physical;
use tranche_shim_core::physical::Id;

use crate::abi::{CUdevice, CUdeviceptr, CUmemGenericAllocationHandle as Handle, CUresult};
use crate::dma_buf::hold_at;
use crate::driver::Call;
use crate::process;
use crate::vmm::{is_unsized, place_of, with};

/// A new object.
pub fn create(handle: *const Handle, driver: Call<'_>) -> CUresult {
    // The process must have joined, so that the object is noted.
    if let Err(code) = process::current() {
        return code;
    }
    with(
        driver,
        |_| (),
        |physical, (), done, freed| {
            if done {
                // SAFETY: the driver has just written to it.
                let _ = physical.create(unsafe { handle.read() }, 0, 0, freed);
            }
        },
    )
}

/// Binds memory to an object, at an offset. A binding does not show how much memory it keeps.
pub fn bind(object: Handle, offset: usize, memory: Handle, driver: Call<'_>) -> CUresult {
    let Some(process) = process::joined() else {
        return driver.make();
    };
    if is_unsized(process, memory) {
        return CUresult::NOT_SUPPORTED;
    }
    let held = process.physical.with(|physical| physical.hold(memory));
    bind_held((object, offset), held, driver)
}

/// The same for the memory at an address, which is mapped or a pool's. It is unknown in which piece of the pool it lies,
/// so all that the pool has is charged once more while it is bound.
pub fn bind_address(
    object: Handle,
    offset: usize,
    address: CUdeviceptr,
    driver: Call<'_>,
) -> CUresult {
    let Some(process) = process::joined() else {
        return driver.make();
    };
    match hold_at(process, address, true) {
        Ok(found) => {
            let held = found.and_then(|(piece, _)| piece.held);
            bind_held((object, offset), held, driver)
        }
        Err(code) => code,
    }
}

/// Binds memory that is held. It ends with the object to which it is bound.
fn bind_held((object, offset): (Handle, usize), held: Option<Id>, driver: Call<'_>) -> CUresult {
    with(
        driver,
        |physical| {
            let device = physical.device_of(held?)?;
            Some((bound_at(object, device, offset), physical.id_of(object)))
        },
        |physical, place, done, freed| match (held, place) {
            // If there is no room to note it, the memory stays held until the process ends.
            (Some(held), Some((place, owner))) if done => {
                let _ = physical.bind(place, held, 0, owner.map_or(0, Id::number), freed);
            }
            (Some(held), _) => physical.let_go(held, freed),
            (None, _) => {}
        },
    )
}

/// Undoes a binding of a device's memory.
pub fn unbind(object: Handle, device: CUdevice, offset: usize, driver: Call<'_>) -> CUresult {
    let number = process::joined()
        .and_then(|process| process.device(device))
        .map_or(u8::MAX, |device| device.number);
    with(driver, Physical::mark, |physical, mark, done, freed| {
        if done {
            let none_since = physical.mark();
            physical.unbind_older(bound_at(object, number, offset), mark, none_since, freed);
        }
    })
}

/// A place for a device and an offset: several devices bind their own memory at the same offset.
fn bound_at(object: Handle, device: u8, offset: usize) -> u64 {
    let mixed = (object.rotate_left(17) ^ u64::from(device)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    place_of((mixed ^ offset as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15))
}
