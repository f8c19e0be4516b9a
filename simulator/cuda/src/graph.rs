//! Graphs and stream capture, thin: a graph is a list of work in an order that
//! keeps every dependency, and launching it does the list.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::abi::PoolProperties;
use crate::code::Code;
use crate::context::current;
use crate::copy::{BoxMove, Copy3, Move, in_order};
use crate::driver::driver;
use crate::export::{export, get, put, put_wanted};
use crate::fill::Fill;
use crate::graph_memory::GraphMemory;
use crate::host::HostFunction;
use crate::launch::{self, Launch};
use crate::module::Function;
use crate::object::{Handle, Kind, Object, Token};
use crate::stream::{self, Stream};

/// Work in a graph.
#[derive(Debug, Clone)]
pub enum Node {
    Empty,
    Kernel(Launch),
    Copy(Move),
    Box(BoxMove),
    Fill(Fill),
    Host { function: HostFunction, data: Token },
    Child(Arc<Vec<Node>>),
    Memory(Arc<GraphMemory>),
    Free,
}

/// A graph's node behind its handle.
#[derive(Debug)]
pub struct NodeObject {
    work: Mutex<Node>,
}

impl Kind for NodeObject {
    const TAG: u64 = 0x4e4f_4400_0000_0001;
    const WRONG: Code = Code::INVALID_VALUE;
}

impl NodeObject {
    fn work(&self) -> MutexGuard<'_, Node> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Object<NodeObject> {
    /// Ends the node. Its memory goes now, not when its handle leaves quarantine.
    fn end(&'static self) {
        *self.work() = Node::Empty;
        self.destroy();
    }
}

/// A graph.
#[derive(Debug, Default)]
pub struct Graph {
    nodes: Mutex<Vec<&'static Object<NodeObject>>>,
}

impl Kind for Graph {
    const TAG: u64 = 0x4752_4100_0000_0001;
    const WRONG: Code = Code::INVALID_VALUE;
}

/// A graph that can be launched.
#[derive(Debug)]
pub struct Executable {
    nodes: Mutex<Vec<Node>>,
}

impl Kind for Executable {
    const TAG: u64 = 0x4758_4300_0000_0001;
    const WRONG: Code = Code::INVALID_VALUE;
}

/// A capture that one or more streams take part in.
#[derive(Debug, Clone)]
pub struct Capture {
    graph: &'static Object<Graph>,
    id: u64,
    /// The address of the stream that began it.
    origin: usize,
    /// Streams that joined and did not come back yet.
    members: Arc<Mutex<Vec<usize>>>,
    broken: Arc<AtomicU32>,
}

/// An event's place in a capture.
#[derive(Debug)]
pub struct CaptureMark(Capture);

impl Capture {
    fn begin(stream: &'static Object<Stream>, graph: &'static Object<Graph>) -> Result<(), Code> {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        let mut place = stream
            .capture
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if place.is_some() {
            return Err(Code::ILLEGAL_STATE);
        }
        *place = Some(Self {
            graph,
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            origin: std::ptr::from_ref(stream) as usize,
            members: Arc::default(),
            broken: Arc::default(),
        });
        stream.capturing.store(true, Ordering::Release);
        Ok(())
    }

    /// Adds work. What joins streams has been put in order by the program's own
    /// calls, so the order of the calls keeps every dependency.
    pub fn add(&mut self, node: Node) -> Handle {
        self.graph.push(node)
    }

    /// A mark for other streams to join by.
    pub fn mark(&mut self) -> CaptureMark {
        CaptureMark(self.clone())
    }
}

impl CaptureMark {
    /// Makes `stream` take part; false if the capture is over.
    pub fn join(&self, stream: &Stream) -> bool {
        if self.0.broken.load(Ordering::Acquire) != 0 {
            return false;
        }
        let mut place = stream
            .capture
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some(already) = place.as_ref() {
            return already.id == self.0.id;
        }
        *place = Some(self.0.clone());
        stream.capturing.store(true, Ordering::Release);
        let mut members = self
            .0
            .members
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        members.push(std::ptr::from_ref(stream) as usize);
        true
    }
}

impl Object<Graph> {
    fn push(&self, node: Node) -> Handle {
        let node = Object::create(NodeObject {
            work: Mutex::new(node),
        });
        self.nodes
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(node);
        node.handle()
    }

    fn work(&self) -> Vec<Node> {
        self.nodes
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .iter()
            .flat_map(|node| match &*node.work() {
                Node::Child(nodes) => nodes.to_vec(),
                other => vec![other.clone()],
            })
            .collect()
    }
}

fn run(node: &Node, stream: &Stream) -> Result<(), Code> {
    match *node {
        Node::Empty | Node::Child(_) | Node::Free => {}
        Node::Memory(ref memory) => memory.attach()?,
        Node::Kernel(launch) => launch.run(stream)?,
        // SAFETY: CUDA's contract: what a graph names lives while it is launched.
        Node::Copy(copy) => in_order(stream, move || unsafe { copy.run() }),
        // SAFETY: as above.
        Node::Box(copy) => in_order(stream, move || unsafe { copy.run() }),
        Node::Fill(fill) => in_order(stream, move || fill.run()),
        Node::Host { function, data } => stream.enqueue_function(function, data),
    }
    Ok(())
}

/// Ends the capture that `stream` began.
fn end(stream: &'static Object<Stream>) -> Result<&'static Object<Graph>, Code> {
    let mut place = stream
        .capture
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    let capture = place.take().ok_or(Code::ILLEGAL_STATE)?;
    if capture.origin != std::ptr::from_ref(stream) as usize {
        *place = Some(capture);
        // CUDA_ERROR_STREAM_CAPTURE_UNMATCHED
        return Err(Code(903));
    }
    stream.capturing.store(false, Ordering::Release);
    drop(place);
    capture.broken.store(1, Ordering::Release);
    let members = std::mem::take(
        &mut *capture
            .members
            .lock()
            .unwrap_or_else(PoisonError::into_inner),
    );
    for member in members {
        // SAFETY: an address that `join` took from a stream; quarantine keeps it
        // readable should the program have destroyed it since.
        if let Ok(member) = unsafe { Object::<Stream>::find(member as Handle) } {
            *member
                .capture
                .lock()
                .unwrap_or_else(PoisonError::into_inner) = None;
            member.capturing.store(false, Ordering::Release);
        }
    }
    Ok(capture.graph)
}

/// cuda.h's `CUDA_KERNEL_NODE_PARAMS` up to what matters here; its second
/// version continues with a kernel and a context.
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

/// The second version.
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

/// Makes the memory of an allocation node and says its address.
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

/// The node of the general form.
///
/// # Safety
/// `parameters` is null or valid, with the body of its kind.
unsafe fn any_node(parameters: *mut Parameters) -> Result<Node, Code> {
    // SAFETY: the caller's contract: the body is what the kind says, and every
    // kind's struct is smaller than the union.
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

/// # Safety
/// As [`stream::find`].
unsafe fn capture_info(
    stream: Handle,
    status: *mut u32,
    id: *mut u64,
    graph: *mut Handle,
) -> Result<(), Code> {
    // SAFETY: the caller's contract.
    let stream = unsafe { stream::find(stream)? };
    let place = stream
        .capture
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    // SAFETY: the caller's contract.
    unsafe {
        put(status, u32::from(place.is_some()))?;
        if let Some(capture) = place.as_ref() {
            put_wanted(id, capture.id);
            put_wanted(graph, capture.graph.handle());
        }
    }
    Ok(())
}

type Nodes = *const Handle;

export! {
    fn cuStreamBeginCapture, cuStreamBeginCapture_ptsz [stream] (stream: Handle) {
        Capture::begin(stream::find(stream)?, Object::create(Graph::default()))
    }
    fn cuStreamBeginCapture_v2, cuStreamBeginCapture_v2_ptsz [stream] (stream: Handle, _mode: u32) {
        if stream.is_null() {
            return Err(Code::STREAM_CAPTURE_UNSUPPORTED);
        }
        Capture::begin(stream::find(stream)?, Object::create(Graph::default()))
    }
    fn cuStreamBeginCaptureToGraph, cuStreamBeginCaptureToGraph_ptsz [stream] (stream: Handle, graph: Handle, _dependencies: Nodes, _edges: *const c_void, _count: usize, _mode: u32) {
        Capture::begin(stream::find(stream)?, Object::<Graph>::find(graph)?)
    }
    fn cuStreamEndCapture, cuStreamEndCapture_ptsz [stream] (stream: Handle, to: *mut Handle) {
        put(to, end(stream::find(stream)?)?.handle())
    }
    fn cuStreamIsCapturing, cuStreamIsCapturing_ptsz [stream] (stream: Handle, status: *mut u32) {
        put(status, u32::from(stream::find(stream)?.capturing.load(Ordering::Acquire)))
    }
    fn cuStreamGetCaptureInfo, cuStreamGetCaptureInfo_ptsz [stream] (stream: Handle, status: *mut u32, id: *mut u64) {
        capture_info(stream, status, id, std::ptr::null_mut())
    }
    fn cuStreamGetCaptureInfo_v2, cuStreamGetCaptureInfo_v2_ptsz [stream] (stream: Handle, status: *mut u32, id: *mut u64, graph: *mut Handle, dependencies: *mut Nodes, count: *mut usize) {
        capture_info(stream, status, id, graph)?;
        put_wanted(dependencies, std::ptr::null());
        put_wanted(count, 0);
        Ok(())
    }
    fn cuStreamGetCaptureInfo_v3, cuStreamGetCaptureInfo_v3_ptsz [stream] (stream: Handle, status: *mut u32, id: *mut u64, graph: *mut Handle, dependencies: *mut Nodes, edges: *mut *const c_void, count: *mut usize) {
        capture_info(stream, status, id, graph)?;
        put_wanted(dependencies, std::ptr::null());
        put_wanted(edges, std::ptr::null());
        put_wanted(count, 0);
        Ok(())
    }
    fn cuThreadExchangeStreamCaptureMode(mode: *mut u32) {
        driver()?;
        get(mode).map(drop)
    }

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
        let mut said = get(parameters)?;
        said.address = memory.address;
        said.bytes = memory.bytes;
        put(parameters, said)
    }
    fn cuGraphAddMemFreeNode(to: *mut Handle, graph: Handle, _dependencies: Nodes, _count: usize, _address: u64) {
        add(to, graph, Node::Free)
    }
    fn cuGraphAddNode(to: *mut Handle, graph: Handle, _dependencies: Nodes, _count: usize, parameters: *mut Parameters) {
        let node = any_node(parameters)?;
        add(to, graph, node)
    }
    fn cuGraphAddNode_v2(to: *mut Handle, graph: Handle, _dependencies: Nodes, _edges: *const c_void, _count: usize, parameters: *mut Parameters) {
        let node = any_node(parameters)?;
        add(to, graph, node)
    }
    fn cuGraphAddDependencies(graph: Handle, _from: Nodes, _to: Nodes, _count: usize) {
        // The order of creation keeps them, or the program adds a node before what
        // it depends on, which a list cannot say.
        driver()?;
        Object::<Graph>::find(graph).map(drop)
    }
    fn cuGraphDestroyNode(node: Handle) {
        driver()?;
        // It stays in its graph's list, as nothing.
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
        // Flags and upload stream stay; there is no failing node, and the result
        // is CUDA_GRAPH_INSTANTIATE_SUCCESS.
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
        for node in nodes.iter() {
            if stream::captured(stream, |capture| capture.add(node.clone())).is_none() {
                run(node, stream)?;
            }
        }
        Ok(())
    }
}

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
