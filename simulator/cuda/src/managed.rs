//! Managed memory: moves between the host and GPUs.

use tranche_simulator_machine::layout::Habit;

use crate::code::Code;
use crate::context::Context;
use crate::device::{Device, device};
use crate::driver::has;
use crate::memory::{self, free_resident, resident_bytes};
use crate::space::{MemoryKind, Region, Regions, containing, regions};

/// Moves the managed allocation at `address` to the GPU, with [`Habit::ManagedMemoryOccupies`]. A GPU without room reads
/// it from the host.
fn occupy(device: &'static Device, address: u64) {
    if !has(Habit::ManagedMemoryOccupies) {
        return;
    }
    let (moving, missing) = {
        let regions = regions();
        let Some(region) = regions
            .get(&address)
            .filter(|region| matches!(region.kind, MemoryKind::Managed))
        else {
            return;
        };
        let bytes = resident_bytes(region.bytes);
        if region.resident {
            // Another process may have moved it to the host meanwhile.
            (None, bytes.min(evicted(device, &regions)))
        } else {
            (Some(region.id), bytes)
        }
    };
    if missing == 0 || memory::charge_managed(device, missing).is_err() {
        return;
    }
    let Some(id) = moving else {
        return;
    };
    match regions().get_mut(&address) {
        Some(region) if !region.resident && region.id == id => {
            region.resident = true;
            region.device = device.ordinal;
        }
        // Another thread has moved it first, or freed it.
        _ => device.release_managed(missing),
    }
}

/// Bytes of managed memory that this process has moved to the GPU and other processes have moved away.
fn evicted(device: &Device, regions: &Regions) -> u64 {
    let on_gpu = |region: &&Region| region.resident && region.device == device.ordinal;
    let moved: u64 = regions
        .values()
        .filter(on_gpu)
        .map(|region| resident_bytes(region.bytes))
        .sum();
    moved.saturating_sub(device.managed())
}

/// Records that the GPU of `context` uses the allocation that `address` is in.
pub fn touch(context: &Context, address: u64) {
    let start = containing(&mut regions(), address).map(|(start, _)| start);
    if let Some(start) = start {
        occupy(context.device, start);
    }
}

/// Records that the GPU of `context` uses all managed memory of the context.
pub fn touch_all(context: &Context) {
    let managed: Vec<u64> = regions()
        .iter()
        .filter(|(_, region)| {
            region.context == context.id && matches!(region.kind, MemoryKind::Managed)
        })
        .map(|(address, _)| *address)
        .collect();
    for address in managed {
        occupy(context.device, address);
    }
}

/// Moves managed memory to the GPU `to`, or to the host.
pub fn prefetch(address: u64, bytes: usize, to: Option<i32>) -> Result<(), Code> {
    check(address, bytes)?;
    let start = containing(&mut regions(), address).map_or(address, |(start, _)| start);
    if let Some(ordinal) = to {
        occupy(device(ordinal)?, start);
    } else if let Some(region) = regions().get_mut(&start)
        && std::mem::take(&mut region.resident)
    {
        free_resident(device(region.device)?, region.bytes);
    }
    Ok(())
}

/// Checks that a range is managed memory.
pub fn check(address: u64, bytes: usize) -> Result<(), Code> {
    let mut regions = regions();
    match containing(&mut regions, address) {
        Some((start, region))
            if matches!(region.kind, MemoryKind::Managed)
                && address - start + bytes as u64 <= region.bytes =>
        {
            Ok(())
        }
        _ => Err(Code::INVALID_VALUE),
    }
}
