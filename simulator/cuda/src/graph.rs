//! Graphs: lists of work in an order that keeps every dependency.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::code::Code;
use crate::copy::{BoxMove, Move};
use crate::fill::Fill;
use crate::graph_memory::GraphMemory;
use crate::host::HostFunction;
use crate::launch::Launch;
use crate::object::{Handle, Kind, Object, Token};

/// The work of a graph's node.
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
    pub fn work(&self) -> MutexGuard<'_, Node> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Object<NodeObject> {
    /// Ends the node. Its memory is freed now, not when its handle leaves quarantine.
    pub fn end(&'static self) {
        *self.work() = Node::Empty;
        self.destroy();
    }
}

#[derive(Debug, Default)]
pub struct Graph {
    pub nodes: Mutex<Vec<&'static Object<NodeObject>>>,
}

impl Kind for Graph {
    const TAG: u64 = 0x4752_4100_0000_0001;
    const WRONG: Code = Code::INVALID_VALUE;
}

/// A graph that can be launched.
#[derive(Debug)]
pub struct Executable {
    pub nodes: Mutex<Vec<Node>>,
}

impl Kind for Executable {
    const TAG: u64 = 0x4758_4300_0000_0001;
    const WRONG: Code = Code::INVALID_VALUE;
}

impl Object<Graph> {
    /// Adds a node; its handle.
    pub fn push(&self, node: Node) -> Handle {
        let node = Object::create(NodeObject {
            work: Mutex::new(node),
        });
        self.nodes
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(node);
        node.handle()
    }

    /// The work of all nodes, in their order.
    pub fn work(&self) -> Vec<Node> {
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
