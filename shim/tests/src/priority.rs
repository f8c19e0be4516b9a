//! Shares of different priorities on one GPU of the simulated machine.

use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Barrier};

use tranche_node::sampler::now;
use tranche_shim_core::Priority;
use tranche_shim_core::load::LEN;

use crate::gpu_time::program;
use crate::{Machine, Node, Probe, Share, World};

/// The memory of each share.
const LIMIT: u64 = 16 << 30;

/// A GPU with its load page.
#[derive(Debug)]
pub struct GpuWithLoad {
    pub node: Arc<Node>,
    pub uuid: String,
    pub load: PathBuf,
}

impl GpuWithLoad {
    #[must_use]
    #[expect(clippy::new_without_default, reason = "it starts a machine")]
    pub fn new() -> Self {
        let root = std::env::temp_dir().join(format!(
            "tranche-shim-{}-priority-{}",
            std::process::id(),
            now()
        ));
        let node = Arc::new(Node::start(root, Machine::Realistic, 1));
        let load = node.root().join("load");
        fs::write(&load, [0; LEN]).unwrap();
        Self {
            uuid: node.gpus()[0].uuid.clone(),
            node,
            load,
        }
    }

    /// A container with half of the GPU, for the calling thread, and a program in it with a kernel.
    pub fn container(&self, priority: Priority, kernel: &str) -> (World, Share, Probe, u64) {
        let world = World::on(&self.node);
        let share = world.share_of_priority("gpu-0", &self.uuid, LIMIT, priority, &self.load);
        let (mut probe, handle) = program(&world, kernel);
        // The kernel's price becomes known.
        probe.must(&format!("launch plain {handle} 200 1"));
        (world, share, probe, handle)
    }
}

/// The times of requests, in microseconds.
#[derive(Clone, Copy, Debug)]
pub struct Latencies {
    pub p50: u64,
    pub p99: u64,
}

/// The times of `count` requests of 2 ms with high priority, alone or beside a program that launches as much as it may.
#[must_use]
pub fn requests_beside(neighbour: Option<Priority>, count: u64) -> Latencies {
    let gpu = GpuWithLoad::new();
    let start = Barrier::new(1 + usize::from(neighbour.is_some()));
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        if let Some(priority) = neighbour {
            let (gpu, start, over) = (&gpu, &start, &over);
            scope.spawn(move || {
                let (_world, _share, mut probe, kernel) = gpu.container(priority, "sim_busy_200us");
                start.wait();
                while !over.load(Ordering::Relaxed) {
                    probe.must(&format!("launch plain {kernel} 500 0"));
                }
            });
        }
        let (_world, _share, mut probe, kernel) = gpu.container(Priority::High, "sim_busy_200us");
        start.wait();
        let answer = probe.must(&format!("requests {kernel} {count} 10 20000"));
        over.store(true, Ordering::Relaxed);
        let [p50, p99] = [0, 1].map(|at| answer.number(at));
        Latencies { p50, p99 }
    })
}
