//! Memory nodes of graphs: what they allocate is charged as their device's reserve for graphs is
//! ([`crate::pool`]), and at least with the sizes of the nodes of every executable graph.

use core::ptr;

use tranche_shim_core::Entry;

use crate::abi::{
    CUDA_KERNEL_NODE_PARAMS, CUDA_MEM_ALLOC_NODE_PARAMS, CUfunction, CUgraph, CUgraphExec,
    CUgraphNodeParams, CUresult, CUstream,
};
use crate::driver::{Call, index, real, real_if_any};
use crate::local;
use crate::memory::{self, current_capped};
use crate::pool::{self, Source, device_of_stream};
use crate::process::{self, Kind, Process, key};

/// A stream, and whether 0 means the calling thread's.
#[derive(Clone, Copy)]
pub struct Stream {
    pub handle: CUstream,
    pub per_thread: bool,
}

impl Stream {
    pub fn legacy(handle: CUstream) -> Self {
        Self {
            handle,
            per_thread: false,
        }
    }

    pub fn per_thread(handle: CUstream) -> Self {
        Self {
            handle,
            per_thread: true,
        }
    }

    /// The handle that means this stream to the functions without suffix.
    pub fn handle(self) -> CUstream {
        const PER_THREAD: CUstream = 2;
        if self.per_thread && self.handle == 0 {
            PER_THREAD
        } else {
            self.handle
        }
    }

    /// Whether what is put into the stream becomes part of a graph.
    pub fn captures(self) -> bool {
        let mut status = 0;
        // SAFETY: `stream` is what the program passes to the driver as a stream; writes to the local.
        let result = unsafe {
            real!(cuStreamIsCapturing: fn(CUstream, *mut u32))(self.handle(), &raw mut status)
        };
        result.is_ok() && status == 1
    }

    /// The graph that is captured.
    fn graph(self) -> Option<CUgraph> {
        let (mut status, mut id, mut graph, none) = (0, 0, 0, ptr::null_mut::<usize>());
        // SAFETY: as above; null where nothing is asked for. Either version is there, and writes the
        // graph as its fourth.
        let result = unsafe {
            if real_if_any(index::cuStreamGetCaptureInfo_v2).is_some() {
                real!(cuStreamGetCaptureInfo_v2: fn(CUstream, *mut u32, *mut u64, *mut CUgraph, *mut usize, *mut usize))(
                    self.handle(),
                    &raw mut status,
                    &raw mut id,
                    &raw mut graph,
                    none,
                    none,
                )
            } else {
                real!(cuStreamGetCaptureInfo_v3: fn(CUstream, *mut u32, *mut u64, *mut CUgraph, *mut usize, *mut usize, *mut usize))(
                    self.handle(),
                    &raw mut status,
                    &raw mut id,
                    &raw mut graph,
                    none,
                    none,
                    none,
                )
            }
        };
        (result.is_ok() && graph != 0).then_some(graph)
    }
}

/// An allocation that becomes a node of the graph that its stream captures.
pub fn capture(
    process: &'static Process,
    stream: Stream,
    bytes: u64,
    driver: Call<'_>,
) -> CUresult {
    let source = match device_of_stream(process, stream.handle()) {
        Ok(device) if device.is_capped() => Source::graphs(process, device),
        Ok(_) => return driver.make(),
        Err(code) => Err(code),
    };
    let source = match source {
        Ok(source) => source,
        Err(code) => return code,
    };
    let result = source.grow(bytes, driver, Call::of(&|| CUresult::SUCCESS));
    if result.is_ok() {
        note(source, stream.graph(), bytes);
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
    let source = process::current().and_then(|process| {
        let device = match location.device() {
            Some(handle) => process.device(handle).filter(|device| device.is_capped()),
            None if location.is_host() => None,
            None => current_capped(process)?,
        };
        device
            .map(|device| Source::graphs(process, device))
            .transpose()
    });
    let source = match source {
        Ok(Some(source)) => source,
        Ok(None) => return driver.make(),
        Err(code) => return code,
    };
    let result = source.grow(bytes, driver, Call::of(&|| CUresult::SUCCESS));
    if result.is_ok() {
        note(source, Some(graph), bytes);
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
        CUgraphNodeParams::KERNEL => add_kernel(body.cast(), driver),
        CUgraphNodeParams::GRAPH => {
            // SAFETY: a graph's handle comes first.
            let child = unsafe { body.cast::<CUgraph>().read() };
            add_child(graph, child, driver)
        }
        _ => driver.make(),
    }
}

/// What a node of any kind is from now on.
pub fn set(parameters: *const CUgraphNodeParams, driver: Call<'_>) -> CUresult {
    // SAFETY: null, or what the driver reads next; the body is the kind's.
    match unsafe { parameters.as_ref() } {
        Some(set) if set.kind == CUgraphNodeParams::KERNEL => {
            add_kernel((&raw const set.body).cast(), driver)
        }
        _ => driver.make(),
    }
}

/// A kernel of a graph: it has its local memory from now on, so that the launch of the graph need not look.
/// `parameters` are of the version that has the field `kernel`.
pub fn add_kernel(parameters: *const CUDA_KERNEL_NODE_PARAMS, driver: Call<'_>) -> CUresult {
    // SAFETY: null, or what the driver reads next.
    let handle = unsafe { parameters.as_ref() }.map_or(0, |set| {
        if set.function == 0 {
            set.kernel
        } else {
            set.function
        }
    });
    add_function(handle, driver)
}

/// The same of the version before, which has a function.
pub fn add_function_of(parameters: *const CUDA_KERNEL_NODE_PARAMS, driver: Call<'_>) -> CUresult {
    // SAFETY: null, or what the driver reads next: the function comes first in all versions.
    let handle = unsafe { parameters.cast::<CUfunction>().as_ref() };
    add_function(handle.copied().unwrap_or(0), driver)
}

fn add_function(handle: CUfunction, driver: Call<'_>) -> CUresult {
    match process::joined().map_or(Ok(()), |process| local::ensure_current(process, handle)) {
        Ok(()) => driver.make(),
        Err(code) => code,
    }
}

/// A graph as a node of another, with the memory that it needs.
pub fn add_child(graph: CUgraph, child: CUgraph, driver: Call<'_>) -> CUresult {
    let result = driver.make();
    if result.is_ok()
        && let Some(process) = process::joined()
        && let Some(of_child) = process.pointers.get(graph_key(child))
        && let Some(device) = process.device_numbered(of_child.device)
        && let Ok(source) = Source::graphs(process, device)
    {
        note(source, Some(graph), of_child.bytes);
    }
    result
}

/// A copy of a graph, with the memory that it needs.
pub fn copy(copy: *mut CUgraph, graph: CUgraph, driver: Call<'_>) -> CUresult {
    let result = driver.make();
    if result.is_ok() {
        // SAFETY: the driver has just written to it.
        return add_child(unsafe { copy.read() }, graph, Call::of(&|| result));
    }
    result
}

/// Notes that a graph needs so much more. Where that cannot be noted, it is charged to the end of the
/// process.
fn note(source: Source, graph: Option<CUgraph>, bytes: u64) {
    let (process, device) = (source.process, source.device);
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
        source.raise_floor(bytes, Call::of(&|| CUresult::SUCCESS));
    }
}

/// An executable graph: its memory is charged from now on, whether or not it was launched.
pub fn instantiate(executable: *mut CUgraphExec, graph: CUgraph, driver: Call<'_>) -> CUresult {
    let Some(process) = process::joined() else {
        return driver.make();
    };
    let Some(needs) = process.pointers.get(graph_key(graph)) else {
        return driver.make();
    };
    let Some(device) = process.device_numbered(needs.device) else {
        return driver.make();
    };
    let source = match Source::graphs(process, device) {
        Ok(source) => source,
        Err(code) => return code,
    };
    let result = source.raise_floor(needs.bytes, driver);
    if result.is_ok() {
        // SAFETY: the driver has just written to it.
        let executable = unsafe { executable.read() };
        let _ = process.pointers.put(executable_key(executable), needs);
    }
    result
}

/// The end of an executable graph.
pub fn end_executable(executable: CUgraphExec, driver: Call<'_>) -> CUresult {
    let Some(process) = process::joined() else {
        return driver.make();
    };
    // Before the driver may hand the handle out again.
    let taken = process.pointers.take(executable_key(executable));
    let result = driver.make();
    let Some(needed) = taken else {
        return result;
    };
    if !result.is_ok() {
        memory::note(process, executable_key(executable), needed);
    } else if let Some(device) = process.device_numbered(needed.device)
        && let Ok(source) = Source::graphs(process, device)
    {
        source.lower_floor(needed.bytes);
    }
    result
}

/// The end of a graph.
pub fn end(graph: CUgraph, driver: Call<'_>) -> CUresult {
    let Some(process) = process::joined() else {
        return driver.make();
    };
    let taken = process.pointers.take(graph_key(graph));
    let result = driver.make();
    match taken {
        Some(needs) if !result.is_ok() => memory::note(process, graph_key(graph), needs),
        _ => pool::look(process),
    }
    result
}

fn graph_key(graph: CUgraph) -> u64 {
    key(Kind::Graph, graph as u64)
}

fn executable_key(executable: CUgraphExec) -> u64 {
    key(Kind::Executable, executable as u64)
}
