//! Host memory that CUDA allocates or registers.

use std::ffi::c_void;

use crate::code::Code;
use crate::context::current;
use crate::driver::driver;
use crate::export::{export, put};
use crate::memory::{map_host, remove};
use crate::space::{MemoryKind, Region, containing, regions};

fn allocate(bytes: usize) -> Result<u64, Code> {
    let context = current()?;
    let address = map_host(bytes as u64)?;
    let region = Region::new(
        bytes as u64,
        MemoryKind::Host,
        context.device.ordinal,
        context.id,
    );
    regions().insert(address, region);
    Ok(address)
}

fn register(address: u64, bytes: usize) -> Result<(), Code> {
    let context = current()?;
    if address == 0 || bytes == 0 {
        return Err(Code::INVALID_VALUE);
    }
    let mut regions = regions();
    if containing(&mut regions, address).is_some() {
        return Err(Code::HOST_MEMORY_ALREADY_REGISTERED);
    }
    let region = Region::new(
        bytes as u64,
        MemoryKind::Registered,
        context.device.ordinal,
        context.id,
    );
    regions.insert(address, region);
    Ok(())
}

export! {
    fn cuMemAllocHost_v2(to: *mut *mut c_void, bytes: usize) {
        put(to, allocate(bytes)? as *mut c_void)
    }
    fn cuMemHostAlloc(to: *mut *mut c_void, bytes: usize, flags: u32) {
        if flags > 7 {
            return Err(Code::INVALID_VALUE);
        }
        put(to, allocate(bytes)? as *mut c_void)
    }
    fn cuMemFreeHost(address: *mut c_void) {
        driver()?;
        let mut regions = regions();
        match regions.get(&(address as u64)) {
            Some(Region { kind: MemoryKind::Host, .. }) => remove(&mut regions, address as u64),
            _ => Err(Code::INVALID_VALUE),
        }
    }
    fn cuMemHostGetDevicePointer_v2(to: *mut u64, address: *mut c_void, _flags: u32) {
        driver()?;
        let mut regions = regions();
        match containing(&mut regions, address as u64) {
            Some((_, Region { kind: MemoryKind::Host | MemoryKind::Registered | MemoryKind::Managed, .. })) => put(to, address as u64),
            _ => Err(Code::INVALID_VALUE),
        }
    }
    fn cuMemHostGetFlags(flags: *mut u32, address: *mut c_void) {
        driver()?;
        let mut regions = regions();
        match containing(&mut regions, address as u64) {
            Some((_, Region { kind: MemoryKind::Host | MemoryKind::Registered, .. })) => put(flags, 2),
            _ => Err(Code::INVALID_VALUE),
        }
    }
    fn cuMemHostRegister(address: *mut c_void, bytes: usize, _flags: u32) {
        register(address as u64, bytes)
    }
    fn cuMemHostRegister_v2(address: *mut c_void, bytes: usize, _flags: u32) {
        register(address as u64, bytes)
    }
    fn cuMemHostUnregister(address: *mut c_void) {
        driver()?;
        let mut regions = regions();
        match regions.get(&(address as u64)) {
            Some(Region { kind: MemoryKind::Registered, .. }) => remove(&mut regions, address as u64),
            _ => Err(Code::HOST_MEMORY_NOT_REGISTERED),
        }
    }
}
