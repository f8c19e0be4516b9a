//! Virtual memory management.

use std::ffi::c_void;
use std::os::fd::{BorrowedFd, IntoRawFd as _};

use crate::abi::{Location, ON_DEVICE};
use crate::code::Code;
use crate::device::device;
use crate::driver::driver;
use crate::export::{export, get, put};
use crate::heap::BLOCK;
use crate::vmm::{self, Access, FILE_DESCRIPTOR, Properties};

export! {
    fn cuMemGetAllocationGranularity(bytes: *mut usize, properties: *const Properties, _option: u32) {
        driver()?;
        device(get(properties)?.location.id)?;
        put(bytes, usize::try_from(BLOCK).unwrap_or(0))
    }
    fn cuMemCreate(to: *mut u64, bytes: usize, properties: *const Properties, flags: u64) {
        driver()?;
        if flags != 0 || to.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        put(to, vmm::create(bytes, get(properties)?)?)
    }
    fn cuMemRelease(handle: u64) {
        driver()?;
        vmm::release(handle)
    }
    fn cuMemAddressReserve(to: *mut u64, bytes: usize, alignment: usize, _address: u64, flags: u64) {
        driver()?;
        if flags != 0 || to.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        put(to, vmm::reserve(bytes, alignment)?)
    }
    fn cuMemAddressFree(address: u64, bytes: usize) {
        driver()?;
        vmm::free_reserved(address, bytes)
    }
    fn cuMemMap(address: u64, bytes: usize, offset: usize, handle: u64, flags: u64) {
        driver()?;
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        vmm::map(address, bytes as u64, offset, handle)
    }
    fn cuMemUnmap(address: u64, bytes: usize) {
        driver()?;
        vmm::unmap(address, bytes as u64)
    }
    fn cuMemSetAccess(address: u64, bytes: usize, list: *const Access, count: usize) {
        driver()?;
        for index in 0..count {
            let access = get(list.wrapping_add(index))?;
            if access.location.kind != ON_DEVICE {
                return Err(Code::INVALID_VALUE);
            }
            device(access.location.id)?;
            vmm::set_access(address, bytes as u64, access.flags)?;
        }
        Ok(())
    }
    fn cuMemGetAccess(flags: *mut u64, _location: *const Location, address: u64) {
        driver()?;
        put(flags, u64::from(vmm::access(address)?))
    }
    fn cuMemGetAllocationPropertiesFromHandle(to: *mut Properties, handle: u64) {
        driver()?;
        put(to, vmm::properties(handle)?)
    }
    fn cuMemRetainAllocationHandle(to: *mut u64, address: *mut c_void) {
        driver()?;
        put(to, vmm::retain(address as u64)?)
    }
    fn cuMemExportToShareableHandle(to: *mut i32, handle: u64, kind: u32, flags: u64) {
        driver()?;
        if kind != FILE_DESCRIPTOR || flags != 0 || to.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        put(to, vmm::export_file(handle)?.into_raw_fd())
    }
    fn cuMemImportFromShareableHandle(to: *mut u64, given: *mut c_void, kind: u32) {
        driver()?;
        let number = i32::try_from(given as usize).map_err(|_| Code::INVALID_VALUE)?;
        if kind != FILE_DESCRIPTOR || number < 0 || to.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        put(to, vmm::import_file(BorrowedFd::borrow_raw(number))?)
    }
}
