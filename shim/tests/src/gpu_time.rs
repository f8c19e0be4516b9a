//! How much of the simulated GPU's time programs get, as the GPU counts it.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Barrier, mpsc};
use std::thread::ScopedJoinHandle;
use std::time::Duration;

use tranche_node::compute::PERIOD_NANOS;
use tranche_node::nvml::search::InstalledDriver;
use tranche_node::sampler::{Sampler, now};
use tranche_node::utilization::NvmlUtilization;
use tranche_shim_core::ComputePolicy;

use crate::{Machine, Node, Probe, World};

/// The memory of each share.
const LIMIT: u64 = 16 << 30;

/// A process with a context, and a kernel with this name.
pub fn program(world: &World, kernel: &str) -> (Probe, u64) {
    let mut probe = world.probe("name");
    probe.must("init");
    probe.must("primary 0");
    let kernel = probe.must(&format!("kernel {kernel}")).number(0);
    (probe, kernel)
}

/// Runs containers of one GPU, each in a thread with a program that launches as much as it may, and the node's sampler.
/// Returns the percentage of the GPU's time for each in `millis` milliseconds, after `settles` others, and the
/// percentage that switches between them took.
pub fn contended(
    machine: Machine,
    settles: u64,
    millis: u64,
    shares: &[(u8, ComputePolicy, &str)],
) -> (Vec<f64>, f64) {
    let root = std::env::temp_dir().join(format!(
        "tranche-shim-{}-shared-{}",
        std::process::id(),
        now()
    ));
    let node = Arc::new(Node::start(root, machine, 1));
    let gpu = node.gpus()[0].uuid.clone();
    let start = Barrier::new(shares.len());
    let began = now();
    let (to_sampler, folders) = mpsc::channel::<PathBuf>();
    std::thread::scope(|scope| {
        let containers: Vec<_> = shares
            .iter()
            .map(|&(cores, policy, kernel)| {
                let (node, gpu, start, to_sampler) = (&node, &gpu, &start, to_sampler.clone());
                scope.spawn(move || {
                    let world = World::on(node);
                    let share = world.share_of_time("gpu-0", gpu, Some(LIMIT), Some(cores), policy);
                    to_sampler.send(share.pages_from_outside()).unwrap();
                    drop(to_sampler);
                    let (mut probe, handle) = program(&world, kernel);
                    start.wait();
                    percent_of_gpu(node, &mut probe, handle, settles);
                    let found = percent_of_gpu(node, &mut probe, handle, millis);
                    // This thread gives access to the share's pages, so it ends last.
                    start.wait();
                    found
                })
            })
            .collect();
        drop(to_sampler);
        let folders: Vec<PathBuf> = folders.iter().collect();
        let is_over = || containers.iter().any(ScopedJoinHandle::is_finished);
        sample_until(&node, &folders, is_over);
        let parts = containers
            .into_iter()
            .map(|container| container.join().unwrap())
            .collect();
        #[expect(clippy::cast_precision_loss, reason = "some seconds")]
        let stood_still = node.stood_still(0) as f64 / (now() - began) as f64;
        (parts, stood_still * 100.0)
    })
}

/// The node's sampler.
pub fn sample_until(node: &Node, folders: &[PathBuf], is_over: impl Fn() -> bool) {
    let driver = InstalledDriver::new(Path::new("/"), Some(node.root()));
    let mut utilization = NvmlUtilization::new(Box::new(driver));
    let mut sampler = Sampler::new("/proc");
    while !is_over() {
        for sampled in sampler.step(now(), folders, &mut utilization) {
            assert!(sampled.outcome.is_ok() || is_over(), "{sampled:?}");
        }
        std::thread::sleep(Duration::from_nanos(PERIOD_NANOS));
    }
}

/// The percentage of the GPU's time for a process that launches as much as it may for `millis`.
pub fn percent_of_gpu(node: &Node, probe: &mut Probe, handle: u64, millis: u64) -> f64 {
    percent_of_gpu_in(node, probe, &format!("launch plain {handle} {millis} 0"))
}

/// The percentage of the GPU's time for a process while it executes a command.
pub fn percent_of_gpu_in(node: &Node, probe: &mut Probe, command: &str) -> f64 {
    let (worked, began) = (node.worked_for(probe.pid(), 0), now());
    probe.must(command);
    let (worked, took) = (node.worked_for(probe.pid(), 0) - worked, now() - began);
    #[expect(clippy::cast_precision_loss, reason = "some seconds")]
    let part = worked as f64 / took as f64;
    part * 100.0
}
