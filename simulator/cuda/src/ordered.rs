//! Allocation and freeing in the order of a stream.

use std::sync::atomic::Ordering;

use crate::code::Code;
use crate::context::context_id;
use crate::memory;
use crate::object::Object;
use crate::pool::{PendingFree, Pool};
use crate::space::{MemoryKind, regions};
use crate::stream::Stream;

fn address_of(stream: &Stream) -> usize {
    std::ptr::from_ref(stream) as usize
}

/// Allocates `bytes` of a pool for use in `stream`.
pub fn allocate(pool: &'static Object<Pool>, bytes: usize, stream: &Stream) -> Result<u64, Code> {
    if bytes == 0 {
        return Err(Code::INVALID_VALUE);
    }
    memory::carry_out_frees(pool, Some(address_of(stream)));
    let place = || {
        memory::place(
            pool.device,
            MemoryKind::Pooled(pool),
            context_id(),
            bytes as u64,
        )
    };
    let address = loop {
        match place() {
            Err(Code::OUT_OF_MEMORY) if depend_on_oldest(pool, stream) => {}
            other => break other?,
        }
    };
    pool.record_allocation(bytes as u64);
    Ok(address)
}

/// Makes `stream` wait for the oldest pending free of a pool, and does it; false if there is none.
fn depend_on_oldest(pool: &Pool, stream: &Stream) -> bool {
    let Some(oldest) = pool.take_oldest_free() else {
        return false;
    };
    let (gpu, mark) = oldest.after;
    stream.wait_for(gpu, mark);
    stream
        .functions
        .fetch_max(oldest.function, Ordering::AcqRel);
    memory::free_exactly(oldest.address, oldest.id);
    true
}

/// Frees `address` when `stream` reaches the free.
pub fn free(address: u64, stream: &'static Stream) -> Result<(), Code> {
    let mut regions = regions();
    let region = regions.get_mut(&address).ok_or(Code::INVALID_VALUE)?;
    let MemoryKind::Pooled(pool) = region.kind else {
        drop(regions);
        // No pool can keep it until then.
        stream.synchronize();
        return memory::free(address);
    };
    if std::mem::replace(&mut region.freed, true) {
        return Err(Code::INVALID_VALUE);
    }
    let free = PendingFree {
        address,
        id: region.id,
        stream: address_of(stream),
        after: (stream.context.device.gpu, stream.earliest()),
        function: stream.functions.load(Ordering::Acquire),
    };
    drop(regions);
    pool.add_pending_free(free);
    Ok(())
}
