//! Multicast objects. A write to one does not reach the memory that is bound to it.

use rustix::fs::{MemfdFlags, ftruncate, memfd_create};

use crate::code::Code;
use crate::device::{Device, device, devices};
use crate::heap::BLOCK;
use crate::vmm::{ADDED, Bound, Physical, Team, next_handle, vmm, wait_for_team, whole_blocks};

/// cuda.h's `CUmulticastObjectProp`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Properties {
    devices: u32,
    bytes: usize,
    handle_kinds: u64,
    flags: u64,
}

impl Properties {
    /// Its size and all offsets in it are multiples of this.
    pub fn granularity(&self) -> Result<u64, Code> {
        if self.devices == 0 || self.bytes == 0 || self.flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        Ok(BLOCK)
    }
}

/// Creates a multicast object without devices; its handle.
pub fn create(properties: Properties) -> Result<u64, Code> {
    let bytes = properties.bytes as u64;
    if !bytes.is_multiple_of(properties.granularity()?) {
        return Err(Code::INVALID_VALUE);
    }
    if properties.handle_kinds != 0 || !devices()?.iter().any(Device::has_multicast) {
        return Err(Code::NOT_SUPPORTED);
    }
    let file = memfd_create(c"simulated-multicast", MemfdFlags::CLOEXEC)
        .and_then(|file| ftruncate(&file, bytes).map(|()| file))
        .map_err(|_| Code::OUT_OF_MEMORY)?;
    let handle = next_handle();
    let object = Physical {
        file,
        bytes,
        device: devices()?[0].ordinal,
        handle_kinds: 0,
        handles: 1,
        mappings: 0,
        kept: 0,
        is_exported: false,
        is_charged: false,
        team: Some(Team {
            size: properties.devices as usize,
            devices: Vec::new(),
            bound: Vec::new(),
        }),
    };
    vmm().physical.insert(handle, object);
    Ok(handle)
}

/// Adds a device to a multicast object.
pub fn add_device(object: u64, ordinal: i32) -> Result<(), Code> {
    if !device(ordinal)?.has_multicast() {
        return Err(Code::INVALID_DEVICE);
    }
    let mut vmm = vmm();
    let team = vmm.team(object)?;
    if team.devices.len() == team.size || team.devices.contains(&ordinal) {
        return Err(Code::INVALID_VALUE);
    }
    team.devices.push(ordinal);
    ADDED.notify_all();
    Ok(())
}

/// Memory to be bound to a multicast object: `bytes` of an allocation, from `from` on.
pub struct Binding {
    pub offset: u64,
    pub memory: u64,
    pub from: u64,
    pub bytes: u64,
    /// The device, if the program names it; it must be that of the memory.
    pub device: Option<i32>,
}

/// Binds memory to a multicast object.
pub fn bind(object: u64, binding: &Binding) -> Result<(), Code> {
    let Binding {
        offset,
        memory,
        from,
        bytes,
        device,
    } = *binding;
    if !whole_blocks(bytes) || !offset.is_multiple_of(BLOCK) || !from.is_multiple_of(BLOCK) {
        return Err(Code::INVALID_VALUE);
    }
    let fits = |within: u64, start: u64| start.checked_add(bytes).is_some_and(|end| end <= within);
    let mut vmm = wait_for_team(object)?;
    let physical = vmm.get(memory)?;
    let own = physical.device;
    if physical.team.is_some()
        || !fits(physical.bytes, from)
        || device.is_some_and(|named| named != own)
    {
        return Err(Code::INVALID_VALUE);
    }
    if !fits(vmm.get(object)?.bytes, offset) {
        return Err(Code::INVALID_VALUE);
    }
    let team = vmm.team(object)?;
    if !team.devices.contains(&own) {
        return Err(Code::INVALID_DEVICE);
    }
    let is_in_the_way = |it: &Bound| {
        it.device == own && it.offset < offset + bytes && offset < it.offset + it.bytes
    };
    if team.bound.iter().any(is_in_the_way) {
        return Err(Code::INVALID_VALUE);
    }
    team.bound.push(Bound {
        device: own,
        offset,
        bytes,
        handle: memory,
    });
    vmm.get(memory)?.kept += 1;
    Ok(())
}

/// Undoes a binding.
pub fn unbind(object: u64, ordinal: i32, offset: u64, bytes: u64) -> Result<(), Code> {
    let mut vmm = vmm();
    let team = vmm.team(object)?;
    let is_it = |it: &Bound| (it.device, it.offset, it.bytes) == (ordinal, offset, bytes);
    let at = team.bound.iter().position(is_it);
    let bound = team.bound.swap_remove(at.ok_or(Code::INVALID_VALUE)?);
    vmm.let_go(bound.handle);
    Ok(())
}
