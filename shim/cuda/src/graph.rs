//! Nodes of graphs. The memory of memory nodes is charged to their device's pool for graphs ([`crate::pool_allocator`]):
//! at least the sizes of the nodes of all executable graphs. A kernel's local memory is charged when the kernel becomes
//! part of a graph.

use tranche_shim_core::Entry;

use crate::abi::{
    CUDA_KERNEL_NODE_PARAMS, CUDA_MEM_ALLOC_NODE_PARAMS, CUcontext, CUfunction, CUgraph,
    CUgraphExec, CUgraphNodeParams, CUresult,
};
use crate::charge;
use crate::collective;
use crate::driver::Call;
use crate::driver_pools::State;
use crate::keys::{Kind, key};
use crate::local;
use crate::pool_allocator::PoolAllocator;
use crate::process::{self, Process};
use crate::settle::{lower_floor, settle_watched};
use crate::stream::Stream;

/// An allocation in a captured stream, which becomes a node of the graph.
pub fn capture(
    process: &'static Process,
    stream: Stream,
    bytes: u64,
    driver: Call<'_>,
) -> CUresult {
    let allocator = match process.device_of_stream(stream.handle()) {
        Ok(device) if device.is_capped() => PoolAllocator::graphs(process, device),
        Ok(_) => return driver.make(),
        Err(code) => Err(code),
    };
    let allocator = match allocator {
        Ok(allocator) => allocator,
        Err(code) => return code,
    };
    let result = allocator.grow(bytes, driver, Call::of(&|| CUresult::SUCCESS));
    if result.is_ok() {
        note(allocator, stream.graph(), bytes);
    }
    result
}

/// A node that allocates.
pub fn add_allocation(
    graph: CUgraph,
    parameters: *const CUDA_MEM_ALLOC_NODE_PARAMS,
    driver: Call<'_>,
) -> CUresult {
    if parameters.is_null() {
        return driver.make();
    }
    // SAFETY: not null, and the driver reads them next.
    let (location, bytes) = unsafe { ((*parameters).pool.location, (*parameters).bytes as u64) };
    let allocator = process::current().and_then(|process| {
        let device = match location.device() {
            Some(handle) => process.device(handle).filter(|device| device.is_capped()),
            None if location.is_host() => None,
            None => process.current_capped()?,
        };
        device
            .map(|device| PoolAllocator::graphs(process, device))
            .transpose()
    });
    let allocator = match allocator {
        Ok(Some(allocator)) => allocator,
        Ok(None) => return driver.make(),
        Err(code) => return code,
    };
    let result = allocator.grow(bytes, driver, Call::of(&|| CUresult::SUCCESS));
    if result.is_ok() {
        note(allocator, Some(graph), bytes);
    }
    result
}

/// A node of any kind.
pub fn add(graph: CUgraph, parameters: *const CUgraphNodeParams, driver: Call<'_>) -> CUresult {
    if parameters.is_null() {
        return driver.make();
    }
    // SAFETY: not null, and the driver reads them next; the body is the kind's.
    let (kind, body) = unsafe { ((*parameters).kind, &raw const (*parameters).body) };
    match kind {
        CUgraphNodeParams::MEM_ALLOC => add_allocation(graph, body.cast(), driver),
        CUgraphNodeParams::KERNEL => add_kernel(Some(graph), body.cast(), driver),
        CUgraphNodeParams::GRAPH => {
            // SAFETY: a graph's handle comes first.
            let child = unsafe { body.cast::<CUgraph>().read() };
            add_child(graph, child, driver)
        }
        _ => driver.make(),
    }
}

/// Changes the parameters of a node of any kind.
pub fn set(parameters: *const CUgraphNodeParams, driver: Call<'_>) -> CUresult {
    // SAFETY: null, or what the driver reads next; the body is the kind's.
    match unsafe { parameters.as_ref() } {
        Some(set) if set.kind == CUgraphNodeParams::KERNEL => {
            add_kernel(None, (&raw const set.body).cast(), driver)
        }
        _ => driver.make(),
    }
}

/// A kernel of a graph, which is known if the kernel is new there. Its local memory is charged to its context now, so that a
/// launch of the graph need not check it. `parameters` are of the version that has the fields `kernel` and `context`.
pub fn add_kernel(
    graph: Option<CUgraph>,
    parameters: *const CUDA_KERNEL_NODE_PARAMS,
    driver: Call<'_>,
) -> CUresult {
    // SAFETY: null, or what the driver reads next.
    let (context, handle) = unsafe { parameters.as_ref() }.map_or((0, 0), |set| {
        if set.function == 0 {
            (set.context, set.kernel)
        } else {
            (0, set.function)
        }
    });
    add_function(graph, context, handle, driver)
}

/// The same for the earlier version, which has a function.
pub fn add_function_of(
    graph: Option<CUgraph>,
    parameters: *const CUDA_KERNEL_NODE_PARAMS,
    driver: Call<'_>,
) -> CUresult {
    // SAFETY: null, or what the driver reads next: the function comes first in all versions.
    let handle = unsafe { parameters.cast::<CUfunction>().as_ref() };
    add_function(graph, 0, handle.copied().unwrap_or(0), driver)
}

/// `context` is where the kernel will run; 0 for the current one.
fn add_function(
    graph: Option<CUgraph>,
    context: CUcontext,
    handle: CUfunction,
    driver: Call<'_>,
) -> CUresult {
    let Some(process) = process::joined() else {
        return driver.make();
    };
    if let Err(code) = local::ensure_in(process, context, handle) {
        return code;
    }
    if let Some(graph) = graph.filter(|_| collective::is_marked(process, handle)) {
        collective::mark_graph(process, graph);
    }
    driver.make()
}

/// Adds a graph as a node of another one, with the memory that it needs.
pub fn add_child(graph: CUgraph, child: CUgraph, driver: Call<'_>) -> CUresult {
    let result = driver.make();
    let Some(process) = process::joined().filter(|_| result.is_ok()) else {
        return result;
    };
    if collective::is_marked_graph(process, child) {
        collective::mark_graph(process, graph);
    }
    if let Some(of_child) = process.pointers.get(graph_key(child))
        && let Some(device) = process.device_numbered(of_child.device)
        && let Ok(allocator) = PoolAllocator::graphs(process, device)
    {
        note(allocator, Some(graph), of_child.bytes);
    }
    result
}

/// Copies a graph, with the memory that it needs.
pub fn copy(copy: *mut CUgraph, graph: CUgraph, driver: Call<'_>) -> CUresult {
    let result = driver.make();
    if result.is_ok() {
        // SAFETY: the driver has just written to it.
        return add_child(unsafe { copy.read() }, graph, Call::of(&|| result));
    }
    result
}

/// Notes that a graph needs `bytes` more. If there is no room to note it, they stay charged until the process ends.
fn note(allocator: PoolAllocator, graph: Option<CUgraph>, bytes: u64) {
    let (process, device) = (allocator.process, allocator.device);
    let bytes = device.taken_by(bytes);
    let noted = graph.is_some_and(|graph| {
        let former = process.pointers.get(graph_key(graph));
        if former.is_some_and(|former| former.device != device.number) {
            return false;
        }
        let entry = Entry {
            bytes: former.map_or(0, |former| former.bytes) + bytes,
            device: device.number,
            context: 0,
        };
        process.pointers.put(graph_key(graph), entry).is_ok()
    });
    if !noted {
        allocator.raise_floor(bytes, Call::of(&|| CUresult::SUCCESS));
    }
}

/// An executable graph: its memory is charged from now on, whether or not it was launched.
pub fn instantiate(executable: *mut CUgraphExec, graph: CUgraph, driver: Call<'_>) -> CUresult {
    let Some(process) = process::joined() else {
        return driver.make();
    };
    let needs = process.pointers.get(graph_key(graph));
    let device = needs.and_then(|needs| process.device_numbered(needs.device));
    let result = match needs.zip(device) {
        None => driver.make(),
        Some((needs, device)) => match PoolAllocator::graphs(process, device) {
            Ok(allocator) => allocator.raise_floor(needs.bytes, driver),
            Err(code) => return code,
        },
    };
    if result.is_ok() && !executable.is_null() {
        // SAFETY: not null, and the driver has just written to it.
        let executable = unsafe { executable.read() };
        collective::instantiate(process, executable, graph);
        if let Some(needs) = needs.filter(|_| device.is_some()) {
            let _ = process.pointers.put(executable_key(executable), needs);
        }
    }
    result
}

/// The end of an executable graph.
pub fn end_executable(executable: CUgraphExec, driver: Call<'_>) -> CUresult {
    let Some(process) = process::joined() else {
        return driver.make();
    };
    charge::end(
        process,
        [executable_key(executable)],
        || driver.make(),
        |_, needed| {
            if let Some(device) = process.device_numbered(needed.device) {
                lower_floor(process, State::Graphs, device, needed.bytes);
            }
        },
    )
}

/// The end of a graph.
pub fn end(graph: CUgraph, driver: Call<'_>) -> CUresult {
    let Some(process) = process::joined() else {
        return driver.make();
    };
    let taken = process.pointers.take(graph_key(graph));
    collective::end(process, graph);
    let result = driver.make();
    match taken {
        Some(needs) if !result.is_ok() => charge::note(process, graph_key(graph), needs),
        _ => settle_watched(process),
    }
    result
}

fn graph_key(graph: CUgraph) -> u64 {
    key(Kind::Graph, graph as u64)
}

fn executable_key(executable: CUgraphExec) -> u64 {
    key(Kind::Executable, executable as u64)
}
