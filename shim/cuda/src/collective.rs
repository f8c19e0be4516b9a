//! Kernels that wait on their GPU for the same kernel on other GPUs, and graphs with such kernels. They pay for their GPU
//! time and never wait for it: if one were delayed, the others would occupy their GPUs meanwhile.

use tranche_shim_core::Entry;

use crate::abi::{CUfunction, CUgraph, CUgraphExec};
use crate::kernel::Kernel;
use crate::keys::{Kind, key};
use crate::process::Process;

/// Marks such a kernel.
pub fn mark(process: &Process, handle: CUfunction) {
    let kernel = Kernel::of(handle).family();
    process.launches.costs.set_exempt(kernel, true);
}

/// Whether a kernel is marked.
pub fn is_marked(process: &Process, handle: CUfunction) -> bool {
    process
        .launches
        .costs
        .is_exempt(Kernel::of(handle).family())
}

/// Marks a graph. If there is no room for that, it is treated like an ordinary one.
pub fn mark_graph(process: &Process, graph: CUgraph) {
    let entry = Entry {
        bytes: 0,
        device: u8::MAX,
        context: 0,
    };
    let _ = process.pointers.put(number(graph), entry);
}

/// Whether a graph is marked.
pub fn is_marked_graph(process: &Process, graph: CUgraph) -> bool {
    process.pointers.get(number(graph)).is_some()
}

/// An executable graph was made, perhaps with the handle of one that has ended.
pub fn instantiate(process: &Process, executable: CUgraphExec, graph: CUgraph) {
    let family = Kernel::graph(executable).family();
    let waits = !is_marked_graph(process, graph);
    process.launches.costs.set_exempt(family, !waits);
}

/// An executable graph was updated from a graph.
pub fn update(process: &Process, executable: CUgraphExec, graph: CUgraph) {
    if is_marked_graph(process, graph) {
        let family = Kernel::graph(executable).family();
        process.launches.costs.set_exempt(family, true);
    }
}

/// A graph ends.
pub fn end(process: &Process, graph: CUgraph) {
    process.pointers.take(number(graph));
}

fn number(graph: CUgraph) -> u64 {
    key(Kind::CollectiveGraph, graph as u64)
}
