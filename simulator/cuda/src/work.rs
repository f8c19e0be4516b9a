//! Work of nodes in the order of a stream.

use crate::code::Code;
use crate::fault;
use crate::graph::Node;
use crate::stream::Stream;

/// Adds a node to the stream's capture, or queues its work if the stream does not capture.
pub fn submit(node: &Node, stream: &Stream) -> Result<(), Code> {
    match stream.with_capture(|capture| capture.add(node.clone())) {
        Some(_) => Ok(()),
        None => run(node, stream),
    }
}

/// Queues the work of a node.
fn run(node: &Node, stream: &Stream) -> Result<(), Code> {
    match *node {
        Node::Empty | Node::Child(_) | Node::Free => {}
        Node::Memory(ref memory) => memory.attach()?,
        Node::Kernel(launch) => {
            launch.prepare(stream.context)?;
            stream.run(launch.nanos)?;
            if launch.faults() {
                fault::at(stream.context.device.gpu, stream.earliest());
            }
        }
        // SAFETY: CUDA's contract: a copy's memory is valid until the stream has done it.
        Node::Copy(copy) => stream.in_order(move || unsafe { copy.run() }),
        // SAFETY: as above.
        Node::Box(copy) => stream.in_order(move || unsafe { copy.run() }),
        Node::Fill(fill) => stream.in_order(move || fill.run()),
        Node::Host { function, data } => stream.enqueue_function(function, data),
    }
    Ok(())
}
