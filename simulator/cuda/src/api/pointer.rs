//! Attributes of pointers.

use std::ffi::c_void;

use crate::code::Code;
use crate::device::device;
use crate::driver::driver;
use crate::export::{export, get, put};
use crate::lifecycle;
use crate::object::{Handle, Object};
use crate::space::{MemoryKind, Region, containing, regions};

/// The context of a region if it is the GPU's primary context; null for other contexts.
fn context_of(region: &Region) -> Handle {
    let primary = device(region.device)
        .and_then(lifecycle::primary)
        .ok()
        .and_then(|primary| primary.context);
    primary
        .filter(|context| context.id == region.context)
        .map_or(std::ptr::null_mut(), Object::handle)
}

/// Writes attribute `which` of the pointer `address`.
///
/// # Safety
/// `to` is null or valid for the attribute's type.
unsafe fn attribute(to: *mut c_void, which: u32, address: u64) -> Result<(), Code> {
    let mut regions = regions();
    let (start, region) = containing(&mut regions, address).ok_or(Code::INVALID_VALUE)?;
    let on_device = region.on_device();
    let managed = matches!(region.kind, MemoryKind::Managed);
    // SAFETY: the caller's contract: each attribute has the type written here.
    unsafe {
        match which {
            1 => put(to.cast::<Handle>(), context_of(region)),
            // Device or host memory.
            2 => put(to.cast::<u32>(), if on_device || managed { 2 } else { 1 }),
            4 if on_device => Err(Code::INVALID_VALUE),
            3 | 4 => put(to.cast::<u64>(), address),
            7 | 20 => put(to.cast::<u64>(), region.id),
            8 => put(to.cast::<u32>(), u32::from(managed)),
            9 => put(to.cast::<i32>(), region.device),
            10 => put(
                to.cast::<u32>(),
                u32::from(matches!(region.kind, MemoryKind::Device)),
            ),
            11 | 19 => put(to.cast::<u64>(), start),
            12 | 18 => put(to.cast::<u64>(), region.bytes),
            13 => put(to.cast::<u32>(), 1),
            14 => put(to.cast::<u64>(), 0),
            6 | 15 => put(to.cast::<u32>(), 0),
            16 => put(to.cast::<u32>(), 3),
            17 => put(
                to.cast::<Handle>(),
                match region.kind {
                    MemoryKind::Pooled(pool) => pool.handle(),
                    _ => std::ptr::null_mut(),
                },
            ),
            _ => Err(Code::INVALID_VALUE),
        }
    }
}

/// Bytes of an attribute's value.
fn width(which: u32) -> usize {
    match which {
        2 | 6 | 8 | 9 | 10 | 13 | 15 | 16 => 4,
        _ => 8,
    }
}

export! {
    fn cuPointerGetAttribute(to: *mut c_void, which: u32, address: u64) {
        driver()?;
        attribute(to, which, address)
    }
    fn cuPointerGetAttributes(count: u32, which: *const u32, to: *mut *mut c_void, address: u64) {
        driver()?;
        for index in 0..count as usize {
            let (which, to) = (get(which.wrapping_add(index))?, get(to.wrapping_add(index))?);
            // Unlike cuPointerGetAttribute, this function returns zero for an unknown pointer.
            if attribute(to, which, address).is_err() && !to.is_null() {
                to.cast::<u8>().write_bytes(0, width(which));
                if which == 9 {
                    // CU_DEVICE_INVALID
                    put(to.cast::<i32>(), -2)?;
                }
            }
        }
        Ok(())
    }
    fn cuPointerSetAttribute(_value: *const c_void, which: u32, address: u64) {
        driver()?;
        if which != 6 || containing(&mut regions(), address).is_none() {
            return Err(Code::INVALID_VALUE);
        }
        Ok(())
    }
}
