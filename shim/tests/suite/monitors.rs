//! Monitors that people use, unmodified, in a share: nvidia-smi, nvitop, gpustat and nvtop show the share's size and its
//! processes, and no neighbour.

use std::collections::BTreeSet;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::{Arc, Barrier, mpsc};

use tranche_shim_core::ComputePolicy;
use tranche_shim_tests::{Machine, Node, Probe, Share, World, text};

use crate::cap::CAP;
use crate::programs::{clients, repository};

const MIB: u64 = 1 << 20;

/// A container on the machine's GPU, for the calling thread, with a program that holds memory.
fn container(node: &Arc<Node>, bytes: u64) -> (World, Share, Probe) {
    let world = World::on(node);
    let uuid = node.gpus()[0].uuid.clone();
    let strict = ComputePolicy::Strict;
    let share = world.share_of_time("gpu-0", &uuid, Some(CAP), Some(25), strict);
    let mut probe = world.probe("name");
    probe.must("init");
    probe.must("primary 0");
    probe.must(&format!("alloc {bytes}"));
    (world, share, probe)
}

/// The numbers in a text, as far as they stand alone: a PID is one.
fn numbers(shown: &str) -> BTreeSet<u64> {
    let words = shown.split(|it: char| !it.is_ascii_digit());
    words.filter_map(|word| word.parse().ok()).collect()
}

fn shown(ran: &Output) -> String {
    assert!(
        ran.status.success(),
        "{}{}",
        text(&ran.stdout),
        text(&ran.stderr)
    );
    text(&ran.stdout)
}

/// nvtop, from Debian.
fn nvtop() -> std::path::PathBuf {
    let script = repository().join("simulator/debian-driver");
    let done = Command::new(script)
        .args(["nvtop", "3.0.1-1", "contrib"])
        .output()
        .unwrap();
    Path::new(shown(&done).trim()).join("usr/bin/nvtop")
}

#[test]
fn monitors_show_a_shares_own_processes_and_its_size() {
    let root = std::env::temp_dir().join(format!("tranche-shim-{}-monitors", std::process::id()));
    let node = Arc::new(Node::start(root, Machine::Realistic, 1));
    let (monitors, nvtop) = (clients("monitors"), nvtop());
    let (there, over) = (Barrier::new(2), Barrier::new(2));
    std::thread::scope(|scope| {
        let neighbour = scope.spawn(|| {
            let (_world, _share, probe) = container(&node, 3000 * MIB);
            there.wait();
            over.wait();
            u64::from(probe.pid())
        });
        // A terminal of the host, which a container here has not; the program itself enters the container.
        let (to_terminal, pids) = mpsc::channel::<String>();
        let terminal = scope.spawn(|| {
            let script = concat!(env!("CARGO_MANIFEST_DIR"), "/terminal.py");
            let pid = pids.into_iter().next().unwrap();
            let enter = ["nsenter", "--mount", "--target", &pid];
            let mut command = Command::new(monitors.join("python"));
            command.args([script, &pid]).args(enter).arg(&nvtop);
            command.args(["--delay", "1"]).output()
        });
        let (world, share, probe) = container(&node, 500 * MIB);
        there.wait();
        let run = |program: &Path, arguments: &[&str]| {
            let mut command = world.command(program);
            command.args(arguments).output()
        };
        let own = u64::from(probe.pid());
        let used = share.used() / MIB;
        to_terminal.send(own.to_string()).unwrap();
        let show_pids = ["--show-pid", "--no-color"];
        let all = [
            (
                "nvidia-smi",
                run(&node.root().join("usr/bin/nvidia-smi"), &[]),
            ),
            ("nvitop", run(&monitors.join("nvitop"), &["--once"])),
            ("gpustat", run(&monitors.join("gpustat"), &show_pids)),
            ("nvtop", terminal.join().unwrap()),
        ];
        // Nothing fails before: the neighbour would wait for ever.
        over.wait();
        let foreign = neighbour.join().unwrap();
        for (name, ran) in all {
            let shown = shown(&ran.unwrap());
            println!("{name}:\n{shown}");
            let numbers = numbers(&shown);
            assert!(
                numbers.contains(&own),
                "{name} does not show {own}: {shown}"
            );
            assert!(
                !numbers.contains(&foreign),
                "{name} shows {foreign}: {shown}"
            );
            assert!(
                !numbers.contains(&(used + 3000)),
                "{name} shows the neighbour's memory: {shown}"
            );
        }
    });
}
