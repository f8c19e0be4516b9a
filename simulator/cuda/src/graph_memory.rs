//! Memory of graphs.

use std::sync::Arc;

use tranche_simulator_machine::layout::Habit;

use crate::code::Code;
use crate::context::Context;
use crate::device::Device;
use crate::driver::has;
use crate::heap::BLOCK;
use crate::memory;
use crate::space::What;

/// Memory of a graph: its addresses from the node's creation until the last graph, executable or not, that
/// has the node is gone. A free node frees nothing, as the next launch would need it again at the same
/// address. Its memory is the graph pool's, taken with the addresses, or at the first launch where graph
/// memory stays ([`Habit::GraphMemoryStays`]).
#[derive(Debug)]
pub struct GraphMemory {
    pub address: u64,
    /// Tells the allocation from later ones at its address.
    id: u64,
    pub bytes: usize,
    /// Whole blocks.
    taken: u64,
    device: &'static Device,
}

impl GraphMemory {
    /// In blocks of its own, which it shares with nothing.
    pub fn allocate(context: &Context, bytes: usize) -> Result<Arc<Self>, Code> {
        let taken = (bytes as u64)
            .checked_next_multiple_of(BLOCK)
            .ok_or(Code::OUT_OF_MEMORY)?;
        let device = context.device;
        let address = memory::place(device.ordinal, What::Graph, context.id, taken)?;
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

    /// Gives it memory of the graph pool's, if it has none.
    pub fn attach(&self) -> Result<(), Code> {
        memory::with_room(self.device, || {
            self.device
                .graph_books()
                .attach(self.id, self.taken, |more| self.device.charge(more))
        })
    }
}

impl Drop for GraphMemory {
    fn drop(&mut self) {
        // It may be gone with its context.
        memory::free_exactly(self.address, self.id);
        let mut books = self.device.graph_books();
        books.detach(self.id);
        if !has(Habit::GraphMemoryStays) {
            self.device.release(books.trim());
        }
    }
}
