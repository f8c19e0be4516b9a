//! Memory of graphs.

use std::sync::Arc;

use tranche_simulator_machine::layout::Habit;

use crate::code::Code;
use crate::context::Context;
use crate::device::Device;
use crate::driver::has;
use crate::heap::BLOCK;
use crate::memory;
use crate::space::MemoryKind;

/// Memory of a graph. Its addresses are allocated from the node's creation until the last graph with the node, executable or
/// not, is destroyed. A free node frees nothing, because the next launch needs the memory at the same address. The memory is
/// in the graph pool. It is charged when the addresses are allocated, or with [`Habit::GraphMemoryStays`] at the first launch.
#[derive(Debug)]
pub struct GraphMemory {
    pub address: u64,
    /// The allocation's id, which no later one at the address has.
    id: u64,
    pub bytes: usize,
    /// Whole blocks.
    taken: u64,
    device: &'static Device,
}

impl GraphMemory {
    /// Allocates whole blocks.
    pub fn allocate(context: &Context, bytes: usize) -> Result<Arc<Self>, Code> {
        let taken = (bytes as u64)
            .checked_next_multiple_of(BLOCK)
            .ok_or(Code::OUT_OF_MEMORY)?;
        let device = context.device;
        let address = memory::place(device.ordinal, MemoryKind::Graph, context.id, taken)?;
        let memory = Self {
            address,
            id: memory::id_of(address),
            bytes,
            taken,
            device,
        };
        if !has(Habit::GraphMemoryStays) {
            memory.attach()?;
        }
        Ok(Arc::new(memory))
    }

    /// Gives it memory of the graph pool, if it has none.
    pub fn attach(&self) -> Result<(), Code> {
        memory::with_room(self.device, || {
            self.device
                .graph_pool()
                .attach(self.id, self.taken, |more| self.device.charge(more))
        })
    }
}

impl Drop for GraphMemory {
    fn drop(&mut self) {
        // It may have been freed with its context.
        memory::free_exactly(self.address, self.id);
        let mut graph_pool = self.device.graph_pool();
        graph_pool.detach(self.id);
        if !has(Habit::GraphMemoryStays) {
            self.device.release(graph_pool.trim());
        }
    }
}
