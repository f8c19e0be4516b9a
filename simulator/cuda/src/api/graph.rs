//! Graphs.

use std::ffi::c_void;
use std::sync::{Arc, Mutex, PoisonError};

use crate::abi::PoolProperties;
use crate::code::Code;
use crate::context::current;
use crate::copy::{BoxMove, Copy3};
use crate::driver::driver;
use crate::export::{export, get, put, put_wanted};
use crate::fill::Fill;
use crate::graph::{Executable, Graph, Node, NodeObject};
use crate::graph_memory::GraphMemory;
use crate::host::HostFunction;
use crate::launch::{self, Launch};
use crate::module::Function;
use crate::object::{Handle, Object, Token};
use crate::stream;
use crate::work;

/// cuda.h's `CUDA_KERNEL_NODE_PARAMS`. Its second version continues with a kernel and a context.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct KernelParameters {
    function: Handle,
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    parameters: *mut *mut c_void,
    extra: *mut *mut c_void,
}

#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct KernelParameters2 {
    first: KernelParameters,
    kernel: Handle,
    context: Handle,
}

/// cuda.h's `CUDA_MEMSET_NODE_PARAMS`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct FillParameters {
    to: u64,
    pitch: usize,
    value: u32,
    element: u32,
    width: usize,
    height: usize,
}

/// cuda.h's `CUDA_HOST_NODE_PARAMS`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct HostParameters {
    function: Option<HostFunction>,
    data: *mut c_void,
}

/// # Safety
/// As [`Object::find`].
unsafe fn kernel_node(parameters: KernelParameters) -> Result<Node, Code> {
    launch::check(parameters.grid, parameters.block)?;
    let context = current()?;
    // SAFETY: the caller's contract.
    let function = unsafe { Object::<Function>::find(parameters.function)? };
    Ok(Node::Kernel(Launch::new(
        function,
        context,
        parameters.grid,
    )))
}

/// cuda.h's `CUDA_MEM_ALLOC_NODE_PARAMS`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct MemoryParameters {
    pool: PoolProperties,
    access: *const c_void,
    access_count: usize,
    bytes: usize,
    address: u64,
}

/// cuda.h's `CUgraphNodeParams`: a kind, and a struct that depends on it.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Parameters {
    kind: u32,
    reserved: [u32; 3],
    body: [u64; 29],
    reserved_too: u64,
}

/// Allocates the memory of an allocation node and writes its address.
///
/// # Safety
/// `parameters` is null or valid.
unsafe fn memory_node(parameters: *mut MemoryParameters) -> Result<Node, Code> {
    let context = current()?;
    // SAFETY: the caller's contract.
    let given = unsafe { get(parameters)? };
    let memory = GraphMemory::allocate(context, given.bytes)?;
    // SAFETY: not null, see above.
    unsafe { (&raw mut (*parameters).address).write_unaligned(memory.address) };
    Ok(Node::Memory(memory))
}

/// The node that the parameters of `cuGraphAddNode` describe.
///
/// # Safety
/// `parameters` is null or valid, with the body of its kind.
unsafe fn node_of(parameters: *mut Parameters) -> Result<Node, Code> {
    // SAFETY: the caller's contract: the body is that of the kind, and every kind's struct is smaller than the union.
    unsafe {
        let kind = get(parameters)?.kind;
        let body = (&raw mut (*parameters).body).cast::<u64>();
        Ok(match kind {
            0 => {
                let second = get(body.cast::<KernelParameters2>())?;
                let mut first = second.first;
                if first.function.is_null() {
                    first.function = second.kernel;
                }
                kernel_node(first)?
            }
            // Flags and a context come before the copy.
            1 => BoxMove::new(&get(body.add(2).cast::<Copy3>())?)?.map_or(Node::Empty, Node::Box),
            2 => {
                let p = get(body.cast::<FillParameters>())?;
                Node::Fill(Fill::new(
                    p.to, p.pitch, p.value, p.element, p.width, p.height,
                )?)
            }
            3 => {
                let p = get(body.cast::<HostParameters>())?;
                Node::Host {
                    function: p.function.ok_or(Code::INVALID_VALUE)?,
                    data: Token(p.data),
                }
            }
            4 => Node::Child(Arc::new(
                Object::<Graph>::find(get(body.cast::<Handle>())?)?.work(),
            )),
            5 => Node::Empty,
            10 => memory_node(body.cast())?,
            11 => Node::Free,
            _ => return Err(Code::NOT_SUPPORTED),
        })
    }
}

/// # Safety
/// As [`Object::find`]; `to` is null or valid.
unsafe fn add(to: *mut Handle, graph: Handle, node: Node) -> Result<(), Code> {
    driver()?;
    // SAFETY: the caller's contract.
    unsafe {
        let handle = Object::<Graph>::find(graph)?.push(node);
        put(to, handle)
    }
}

/// # Safety
/// As [`Object::find`]; `to` is null or valid.
unsafe fn instantiate(to: *mut Handle, graph: Handle) -> Result<(), Code> {
    driver()?;
    // SAFETY: the caller's contract.
    unsafe {
        let nodes = Object::<Graph>::find(graph)?.work();
        put(
            to,
            Object::create(Executable {
                nodes: Mutex::new(nodes),
            })
            .handle(),
        )
    }
}

type Nodes = *const Handle;

/// # Safety
/// As [`Object::find`].
unsafe fn update(executable: Handle, graph: Handle) -> Result<(), Code> {
    // SAFETY: the caller's contract.
    let (executable, graph) = unsafe {
        (
            Object::<Executable>::find(executable)?,
            Object::<Graph>::find(graph)?,
        )
    };
    *executable
        .nodes
        .lock()
        .unwrap_or_else(PoisonError::into_inner) = graph.work();
    Ok(())
}

export! {
    fn cuGraphCreate(to: *mut Handle, _flags: u32) {
        driver()?;
        put(to, Object::create(Graph::default()).handle())
    }
    fn cuGraphDestroy(graph: Handle) {
        driver()?;
        let graph = Object::<Graph>::find(graph)?;
        for node in std::mem::take(&mut *graph.nodes.lock().unwrap_or_else(PoisonError::into_inner)) {
            node.end();
        }
        graph.destroy();
        Ok(())
    }
    fn cuGraphClone(to: *mut Handle, graph: Handle) {
        driver()?;
        let copy = Object::create(Graph::default());
        for node in Object::<Graph>::find(graph)?.work() {
            copy.push(node);
        }
        put(to, copy.handle())
    }
    fn cuGraphAddKernelNode(to: *mut Handle, graph: Handle, _dependencies: Nodes, _count: usize, parameters: *const KernelParameters) {
        add(to, graph, kernel_node(get(parameters)?)?)
    }
    fn cuGraphAddKernelNode_v2(to: *mut Handle, graph: Handle, _dependencies: Nodes, _count: usize, parameters: *const KernelParameters2) {
        let second = get(parameters)?;
        let mut first = second.first;
        if first.function.is_null() {
            first.function = second.kernel;
        }
        add(to, graph, kernel_node(first)?)
    }
    fn cuGraphAddMemcpyNode(to: *mut Handle, graph: Handle, _dependencies: Nodes, _count: usize, copy: *const Copy3, _context: Handle) {
        let node = BoxMove::new(&get(copy)?)?.map_or(Node::Empty, Node::Box);
        add(to, graph, node)
    }
    fn cuGraphAddMemsetNode(to: *mut Handle, graph: Handle, _dependencies: Nodes, _count: usize, parameters: *const FillParameters, _context: Handle) {
        let p = get(parameters)?;
        add(to, graph, Node::Fill(Fill::new(p.to, p.pitch, p.value, p.element, p.width, p.height)?))
    }
    fn cuGraphAddHostNode(to: *mut Handle, graph: Handle, _dependencies: Nodes, _count: usize, parameters: *const HostParameters) {
        let p = get(parameters)?;
        let function = p.function.ok_or(Code::INVALID_VALUE)?;
        add(to, graph, Node::Host { function, data: Token(p.data) })
    }
    fn cuGraphAddEmptyNode(to: *mut Handle, graph: Handle, _dependencies: Nodes, _count: usize) {
        add(to, graph, Node::Empty)
    }
    fn cuGraphAddChildGraphNode(to: *mut Handle, graph: Handle, _dependencies: Nodes, _count: usize, child: Handle) {
        driver()?;
        let nodes = Object::<Graph>::find(child)?.work();
        add(to, graph, Node::Child(Arc::new(nodes)))
    }
    fn cuGraphAddMemAllocNode(to: *mut Handle, graph: Handle, _dependencies: Nodes, _count: usize, parameters: *mut MemoryParameters) {
        let node = memory_node(parameters)?;
        add(to, graph, node)
    }
    fn cuGraphMemAllocNodeGetParams(node: Handle, parameters: *mut MemoryParameters) {
        driver()?;
        let Node::Memory(memory) = Object::<NodeObject>::find(node)?.work().clone() else {
            return Err(Code::INVALID_VALUE);
        };
        let mut filled = get(parameters)?;
        filled.address = memory.address;
        filled.bytes = memory.bytes;
        put(parameters, filled)
    }
    fn cuGraphAddMemFreeNode(to: *mut Handle, graph: Handle, _dependencies: Nodes, _count: usize, _address: u64) {
        add(to, graph, Node::Free)
    }
    fn cuGraphAddNode(to: *mut Handle, graph: Handle, _dependencies: Nodes, _count: usize, parameters: *mut Parameters) {
        let node = node_of(parameters)?;
        add(to, graph, node)
    }
    fn cuGraphAddNode_v2(to: *mut Handle, graph: Handle, _dependencies: Nodes, _edges: *const c_void, _count: usize, parameters: *mut Parameters) {
        let node = node_of(parameters)?;
        add(to, graph, node)
    }
    fn cuGraphAddDependencies(graph: Handle, _from: Nodes, _to: Nodes, _count: usize) {
        // Nodes run in the order of their creation, which keeps all dependencies on earlier nodes. A dependency on a later
        // node is not simulated.
        driver()?;
        Object::<Graph>::find(graph).map(drop)
    }
    fn cuGraphDestroyNode(node: Handle) {
        driver()?;
        // It stays in its graph's list without work.
        Object::<NodeObject>::find(node)?.end();
        Ok(())
    }
    fn cuGraphExecGetFlags(executable: Handle, flags: *mut u64) {
        driver()?;
        Object::<Executable>::find(executable)?;
        put(flags, 0)
    }
    fn cuGraphGetNodes(graph: Handle, to: *mut Handle, count: *mut usize) {
        driver()?;
        let nodes = Object::<Graph>::find(graph)?.nodes.lock().unwrap_or_else(PoisonError::into_inner);
        if to.is_null() {
            return put(count, nodes.len());
        }
        let room = get(count)?;
        for (index, node) in nodes.iter().take(room).enumerate() {
            put(to.wrapping_add(index), node.handle())?;
        }
        put(count, nodes.len().min(room))
    }
    fn cuGraphNodeGetType(node: Handle, kind: *mut u32) {
        driver()?;
        put(kind, match &*Object::<NodeObject>::find(node)?.work() {
            Node::Kernel(_) => 0,
            Node::Copy(_) | Node::Box(_) => 1,
            Node::Fill(_) => 2,
            Node::Host { .. } => 3,
            Node::Child(_) => 4,
            Node::Empty => 5,
            Node::Memory(_) => 10,
            Node::Free => 11,
        })
    }

    fn cuGraphInstantiate(to: *mut Handle, graph: Handle, _node: *mut Handle, _log: *mut i8, _size: usize) {
        instantiate(to, graph)
    }
    fn cuGraphInstantiate_v2(to: *mut Handle, graph: Handle, _node: *mut Handle, _log: *mut i8, _size: usize) {
        instantiate(to, graph)
    }
    fn cuGraphInstantiateWithFlags(to: *mut Handle, graph: Handle, _flags: u64) { instantiate(to, graph) }
    fn cuGraphInstantiateWithParams, cuGraphInstantiateWithParams_ptsz [] (to: *mut Handle, graph: Handle, parameters: *mut [u64; 4]) {
        get(parameters)?;
        instantiate(to, graph)?;
        // Flags and upload stream stay. No node fails, and the result is CUDA_GRAPH_INSTANTIATE_SUCCESS.
        let fields = parameters.cast::<u64>();
        put(fields.add(2), 0)?;
        put(fields.add(3).cast::<u32>(), 0)
    }
    fn cuGraphExecUpdate(executable: Handle, graph: Handle, _node: *mut Handle, result: *mut u32) {
        driver()?;
        update(executable, graph)?;
        put_wanted(result, 0);
        Ok(())
    }
    fn cuGraphExecUpdate_v2(executable: Handle, graph: Handle, result: *mut u32) {
        driver()?;
        update(executable, graph)?;
        put_wanted(result, 0);
        Ok(())
    }
    fn cuGraphExecDestroy(executable: Handle) {
        driver()?;
        let executable = Object::<Executable>::find(executable)?;
        executable.nodes.lock().unwrap_or_else(PoisonError::into_inner).clear();
        executable.destroy();
        Ok(())
    }
    fn cuGraphUpload, cuGraphUpload_ptsz [stream] (executable: Handle, stream: Handle) {
        stream::find(stream)?;
        let executable = Object::<Executable>::find(executable)?;
        let nodes = executable.nodes.lock().unwrap_or_else(PoisonError::into_inner);
        nodes.iter().try_for_each(|node| match node {
            Node::Memory(memory) => memory.attach(),
            _ => Ok(()),
        })
    }
    fn cuGraphLaunch, cuGraphLaunch_ptsz [stream] (executable: Handle, stream: Handle) {
        let stream = stream::find(stream)?;
        let executable = Object::<Executable>::find(executable)?;
        let nodes = executable.nodes.lock().unwrap_or_else(PoisonError::into_inner);
        nodes.iter().try_for_each(|node| work::submit(node, stream))
    }
}
