//! Captures: the work of streams becomes a graph. stream.rs begins and ends them.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::graph::{Graph, Node};
use crate::object::{Handle, Object};

/// A capture of one or more streams.
#[derive(Debug, Clone)]
pub struct Capture {
    pub graph: &'static Object<Graph>,
    pub id: u64,
    /// The address of the stream that began it.
    pub origin: usize,
    /// The addresses of the streams that joined it.
    members: Arc<Mutex<Vec<usize>>>,
    has_ended: Arc<AtomicBool>,
}

/// An event's place in a capture.
#[derive(Debug)]
pub struct CaptureMark(pub Capture);

impl Capture {
    /// A capture that begins in the stream at address `origin`.
    pub fn new(graph: &'static Object<Graph>, origin: usize) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self {
            graph,
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            origin,
            members: Arc::default(),
            has_ended: Arc::default(),
        }
    }

    /// Adds work; returns the handle of its node. The program's own calls order the streams of a capture, so the order of
    /// the calls keeps every dependency.
    pub fn add(&mut self, node: Node) -> Handle {
        self.graph.push(node)
    }

    /// A mark by which other streams can join.
    pub fn mark(&mut self) -> CaptureMark {
        CaptureMark(self.clone())
    }

    /// The addresses of the streams that joined it.
    pub fn members(&self) -> MutexGuard<'_, Vec<usize>> {
        self.members.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub fn has_ended(&self) -> bool {
        self.has_ended.load(Ordering::Acquire)
    }

    /// Ends the capture, so that no stream can join it any more.
    pub fn end(&self) {
        self.has_ended.store(true, Ordering::Release);
    }
}
