//! Managed memory.

use crate::abi::{Location, ON_DEVICE};
use crate::code::Code;
use crate::context::current;
use crate::driver::driver;
use crate::export::{export, put};
use crate::managed::{check, prefetch};
use crate::memory::map_host;
use crate::object::Handle;
use crate::space::{MemoryKind, Region, regions};
use crate::stream;

export! {
    fn cuMemAllocManaged(to: *mut u64, bytes: usize, flags: u32) {
        let context = current()?;
        if to.is_null() || !matches!(flags, 1 | 2) {
            return Err(Code::INVALID_VALUE);
        }
        // No GPU has managed memory before it uses it.
        let address = map_host(bytes as u64)?;
        let region = Region::new(bytes as u64, MemoryKind::Managed, context.device.ordinal, context.id);
        regions().insert(address, region);
        put(to, address)
    }
    fn cuMemPrefetchAsync, cuMemPrefetchAsync_ptsz [stream] (address: u64, bytes: usize, to: i32, stream: Handle) {
        stream::find(stream)?;
        // CU_DEVICE_CPU is -1.
        prefetch(address, bytes, (to != -1).then_some(to))
    }
    fn cuMemPrefetchAsync_v2, cuMemPrefetchAsync_v2_ptsz [stream] (address: u64, bytes: usize, to: Location, _flags: u32, stream: Handle) {
        stream::find(stream)?;
        prefetch(address, bytes, (to.kind == ON_DEVICE).then_some(to.id))
    }
    fn cuMemAdvise_v2(address: u64, bytes: usize, _advice: u32, _location: Location) {
        driver()?;
        check(address, bytes)
    }
    fn cuMemAdvise(address: u64, bytes: usize, _advice: u32, _device: i32) {
        driver()?;
        check(address, bytes)
    }
}
