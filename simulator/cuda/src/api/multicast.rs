//! Multicast objects.

use crate::code::Code;
use crate::device::device;
use crate::driver::driver;
use crate::export::{export, get, put};
use crate::multicast::{Binding, Properties, add_device, create, unbind};
use crate::{multicast, vmm};

/// Binds `bytes` of the memory that is mapped at an address.
fn bind_address(
    object: u64,
    device: Option<i32>,
    offset: usize,
    address: u64,
    bytes: usize,
    flags: u64,
) -> Result<(), Code> {
    driver()?;
    let (memory, from) = vmm::mapped_at(address)?;
    bind(object, device, offset, (memory, from), bytes, flags)
}

fn bind(
    object: u64,
    device: Option<i32>,
    offset: usize,
    (memory, from): (u64, u64),
    bytes: usize,
    flags: u64,
) -> Result<(), Code> {
    driver()?;
    if flags != 0 {
        return Err(Code::INVALID_VALUE);
    }
    let binding = Binding {
        offset: offset as u64,
        memory,
        from,
        bytes: bytes as u64,
        device,
    };
    multicast::bind(object, &binding)
}

export! {
    fn cuMulticastGetGranularity(bytes: *mut usize, properties: *const Properties, option: u32) {
        driver()?;
        // CU_MULTICAST_GRANULARITY_MINIMUM and CU_MULTICAST_GRANULARITY_RECOMMENDED
        if option > 1 {
            return Err(Code::INVALID_VALUE);
        }
        put(bytes, usize::try_from(get(properties)?.granularity()?).unwrap_or(0))
    }
    fn cuMulticastCreate(to: *mut u64, properties: *const Properties) {
        driver()?;
        if to.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        put(to, create(get(properties)?)?)
    }
    fn cuMulticastAddDevice(object: u64, of: i32) {
        add_device(object, of)
    }
    fn cuMulticastBindMem(object: u64, offset: usize, memory: u64, from: usize, bytes: usize, flags: u64) {
        bind(object, None, offset, (memory, from as u64), bytes, flags)
    }
    fn cuMulticastBindMem_v2(object: u64, of: i32, offset: usize, memory: u64, from: usize, bytes: usize, flags: u64) {
        bind(object, Some(of), offset, (memory, from as u64), bytes, flags)
    }
    fn cuMulticastBindAddr(object: u64, offset: usize, address: u64, bytes: usize, flags: u64) {
        bind_address(object, None, offset, address, bytes, flags)
    }
    fn cuMulticastBindAddr_v2(object: u64, of: i32, offset: usize, address: u64, bytes: usize, flags: u64) {
        bind_address(object, Some(of), offset, address, bytes, flags)
    }
    fn cuMulticastUnbind(object: u64, of: i32, offset: usize, bytes: usize) {
        device(of)?;
        unbind(object, of, offset as u64, bytes as u64)
    }
}
