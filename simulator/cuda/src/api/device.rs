//! GPUs and their attributes.

use std::ffi::{CStr, c_char};

use tranche_simulator_machine::description::PciAddress;

use crate::code::Code;
use crate::device::{SHARED_MEMORY_PER_BLOCK, attribute, device, devices, int};
use crate::export::{export, get, put};

/// cuda.h's `CUdevprop`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Properties {
    max_threads_per_block: i32,
    max_threads_dim: [i32; 3],
    max_grid_size: [i32; 3],
    shared_memory_per_block: i32,
    total_constant_memory: i32,
    warp_size: i32,
    memory_pitch: i32,
    registers_per_block: i32,
    clock_rate: i32,
    texture_alignment: i32,
}

export! {
    fn cuDeviceGetName(name: *mut c_char, length: i32, of: i32) {
        let text = device(of)?.name();
        let room = usize::try_from(length).map_err(|_| Code::INVALID_VALUE)?;
        if name.is_null() || room == 0 {
            return Err(Code::INVALID_VALUE);
        }
        let count = text.len().min(room - 1);
        name.cast::<u8>().copy_from_nonoverlapping(text.as_ptr(), count);
        put(name.add(count), 0)
    }
    fn cuDeviceGetUuid(uuid: *mut [u8; 16], of: i32) { put(uuid, device(of)?.state.uuid) }
    fn cuDeviceGetUuid_v2(uuid: *mut [u8; 16], of: i32) {
        // cuda.h: the UUID of the MIG device. The first version returns its GPU's.
        let device = device(of)?;
        put(uuid, device.partition.map_or(device.state.uuid, |it| it.uuid))
    }
    fn cuDeviceGetAttribute(value: *mut i32, which: u32, of: i32) {
        let device = device(of)?;
        put(value, attribute(device, which)?)
    }
    fn cuDeviceTotalMem_v2(bytes: *mut usize, of: i32) {
        put(bytes, usize::try_from(device(of)?.total()).unwrap_or(usize::MAX))
    }
    fn cuDeviceComputeCapability(major: *mut i32, minor: *mut i32, of: i32) {
        let [a, b] = device(of)?.state.compute_capability;
        put(major, int(a))?;
        put(minor, int(b))
    }
    fn cuDeviceGetProperties(properties: *mut Properties, of: i32) {
        let gpu = device(of)?.state;
        put(properties, Properties {
            max_threads_per_block: 1024,
            max_threads_dim: [1024, 1024, 64],
            max_grid_size: [i32::MAX, 65_535, 65_535],
            shared_memory_per_block: SHARED_MEMORY_PER_BLOCK,
            total_constant_memory: 65_536,
            warp_size: 32,
            memory_pitch: i32::MAX,
            registers_per_block: 65_536,
            clock_rate: int(gpu.sm_clock_mhz * 1000),
            texture_alignment: 512,
        })
    }
    fn cuDeviceGetPCIBusId(id: *mut c_char, length: i32, of: i32) {
        let gpu = device(of)?.state;
        let text = format!("{:04x}:{:02x}:{:02x}.0", gpu.pci_domain, gpu.pci_bus, gpu.pci_device);
        if id.is_null() || usize::try_from(length).unwrap_or(0) <= text.len() {
            return Err(Code::INVALID_VALUE);
        }
        id.cast::<u8>().copy_from_nonoverlapping(text.as_ptr(), text.len());
        put(id.add(text.len()), 0)
    }
    fn cuDeviceGetByPCIBusId(to: *mut i32, id: *const c_char) {
        get(id)?;
        let text = CStr::from_ptr(id).to_str().map_err(|_| Code::INVALID_VALUE)?;
        let wanted = PciAddress::parse(text).ok_or(Code::INVALID_VALUE)?;
        let found = devices()?.iter().find(|device| {
            let gpu = device.state;
            (gpu.pci_domain, gpu.pci_bus, gpu.pci_device) == (wanted.domain, wanted.bus, wanted.device)
        });
        put(to, found.ok_or(Code::INVALID_DEVICE)?.ordinal)
    }
    fn cuDeviceCanAccessPeer(can: *mut i32, of: i32, peer: i32) {
        device(of)?;
        device(peer)?;
        put(can, 0)
    }
    fn cuDeviceGetP2PAttribute(value: *mut i32, _attribute: u32, of: i32, peer: i32) {
        device(of)?;
        device(peer)?;
        put(value, 0)
    }
    fn cuDeviceGetTexture1DLinearMaxWidth(width: *mut usize, _format: u32, _channels: u32, of: i32) {
        device(of)?;
        put(width, 1 << 28)
    }
    fn cuDeviceGetExecAffinitySupport(supported: *mut i32, _kind: u32, of: i32) {
        device(of)?;
        put(supported, 0)
    }
}
