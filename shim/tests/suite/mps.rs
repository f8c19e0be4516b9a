//! Concurrent shares: on the simulated machine, with NVIDIA's own MPS control daemon.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tranche_shim_tests::{Driver, Probe, World, probe_path, text};

use crate::cap::CAP;

const MIB: u64 = 1 << 20;
const OUT_OF_MEMORY: i64 = 2;
const NOT_PERMITTED: i64 = 800;
const MPS_CONNECTION_FAILED: i64 = 805;
const MPS_RPC_FAILURE: i64 = 806;
/// `CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT`.
const MULTIPROCESSORS: u32 = 16;
/// Where the node mounts a daemon's sockets.
const PIPES: &str = "/tmp/nvidia-mps";

/// Variables that a tenant may set.
const HOSTILE: [(&str, &str); 4] = [
    ("CUDA_MPS_PIPE_DIRECTORY", "/nowhere"),
    ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "100"),
    ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "0=70G"),
    (
        "CUDA_MPS_ENABLE_PER_CTX_DEVICE_MULTIPROCESSOR_PARTITIONING",
        "1",
    ),
];

/// A daemon whose sockets are mounted in the container.
struct Daemon {
    folder: PathBuf,
    process: Option<Child>,
}

impl Daemon {
    fn none(world: &World) -> Self {
        let folder = world.folder().join("mps");
        fs::create_dir(&folder).unwrap();
        fs::create_dir_all(PIPES).unwrap();
        world.mount(&folder, Path::new(PIPES));
        Self {
            folder,
            process: None,
        }
    }

    fn started(world: &World) -> Self {
        let mut daemon = Self::none(world);
        daemon.start();
        daemon
    }

    fn start(&mut self) {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../simulator/debian-driver");
        let output = Command::new(script)
            .arg("nvidia-cuda-mps")
            .output()
            .unwrap();
        assert!(output.status.success(), "{}", text(&output.stderr));
        let package = PathBuf::from(text(&output.stdout).trim());
        let process = Command::new(package.join("usr/bin/nvidia-cuda-mps-control"))
            .arg("-f")
            .env("CUDA_MPS_PIPE_DIRECTORY", &self.folder)
            .env("CUDA_MPS_LOG_DIRECTORY", &self.folder)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        self.process = Some(process);
        let deadline = Instant::now() + Duration::from_secs(30);
        while !self.folder.join("control").exists() {
            assert!(Instant::now() < deadline, "no daemon");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn kill(&mut self) {
        if let Some(mut process) = self.process.take() {
            process.kill().unwrap();
            process.wait().unwrap();
        }
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        self.kill();
    }
}

fn gpus(world: &World) -> Vec<String> {
    world
        .node()
        .gpus()
        .into_iter()
        .map(|gpu| gpu.uuid)
        .collect()
}

fn hostile(world: &World) -> Probe {
    Probe::by(world.command(probe_path()).arg("name").envs(HOSTILE))
}

fn ready(probe: &mut Probe) {
    probe.must("init");
    probe.must("primary 0");
}

fn multiprocessors(probe: &mut Probe) -> u64 {
    probe.must(&format!("call cuDeviceGetAttribute &0 {MULTIPROCESSORS} 0"));
    // The driver writes a number of 32 bits.
    probe.must("words 0 1").number(0) & u64::from(u32::MAX)
}

#[test]
fn the_environment_does_not_change_threads_and_memory() {
    let world = World::new(Driver::Simulator(1));
    let [gpu] = &gpus(&world)[..] else {
        panic!("one GPU");
    };
    let whole = {
        let share = world.share("gpu-0", gpu, Some(CAP));
        let mut probe = world.probe("name");
        ready(&mut probe);
        let whole = multiprocessors(&mut probe);
        probe.kill();
        world.remove(&share);
        whole
    };
    let _daemon = Daemon::started(&world);
    world.share_by_mps("gpu-0", gpu, CAP, 25);
    let mut probe = hostile(&world);
    ready(&mut probe);
    assert_eq!(multiprocessors(&mut probe), whole.div_ceil(4));
    assert_eq!(
        probe.ask(&format!("alloc {}", CAP + MIB)).code,
        OUT_OF_MEMORY
    );
    // The limits that the driver has read.
    let script = "import ctypes
ctypes.CDLL('libcuda.so.1').cuInit(0)
getenv = ctypes.CDLL(None).getenv
getenv.restype = ctypes.c_char_p
names = ['PIPE_DIRECTORY', 'ACTIVE_THREAD_PERCENTAGE', 'PINNED_DEVICE_MEM_LIMIT', 'ENABLE_PER_CTX_DEVICE_MULTIPROCESSOR_PARTITIONING']
print(*[getenv(b'CUDA_MPS_' + name.encode()) for name in names])";
    let ran = world
        .command("/usr/bin/python3")
        .args(["-c", script])
        .envs(HOSTILE)
        .output()
        .unwrap();
    let memory = CAP / MIB;
    assert_eq!(
        text(&ran.stdout),
        format!("b'/tmp/nvidia-mps' b'25' b'0={memory}M' None\n"),
        "{}",
        text(&ran.stderr)
    );
}

/// The limits apply to each process, the cap to the claim.
#[test]
fn processes_of_a_share_have_its_memory_together() {
    let world = World::new(Driver::Simulator(1));
    let _daemon = Daemon::started(&world);
    world.share_by_mps("gpu-0", &gpus(&world)[0], CAP, 50);
    let (mut first, mut second) = (world.probe("name"), world.probe("name"));
    ready(&mut first);
    first.must(&format!("alloc {}", CAP / 2));
    ready(&mut second);
    assert_eq!(
        second.ask(&format!("alloc {}", CAP * 3 / 4)).code,
        OUT_OF_MEMORY
    );
}

#[test]
fn shares_of_one_gpu_add_up() {
    let world = World::new(Driver::Simulator(1));
    let _daemon = Daemon::started(&world);
    let gpu = &gpus(&world)[0];
    world.share_by_mps("gpu-0-a", gpu, CAP, 25);
    world.share_by_mps("gpu-0-b", gpu, CAP, 50);
    let mut probe = hostile(&world);
    ready(&mut probe);
    probe.must(&format!("alloc {}", CAP + CAP / 2));
}

#[test]
fn without_a_daemon_cuda_is_refused_and_with_it_comes_back() {
    let world = World::new(Driver::Simulator(1));
    let mut daemon = Daemon::none(&world);
    world.share_by_mps("gpu-0", &gpus(&world)[0], CAP, 25);
    let mut probe = world.probe("name");
    for _ in 0..2 {
        assert_eq!(probe.ask("init").code, MPS_CONNECTION_FAILED);
    }
    daemon.start();
    ready(&mut probe);
    probe.must(&format!("alloc {MIB}"));
    let stderr = probe.stderr();
    assert_eq!(stderr.lines().count(), 1, "{stderr}");
    for word in ["tranche: MPS: ", "/tmp/nvidia-mps/control", "tranche-mps"] {
        assert!(stderr.contains(word), "{word}: {stderr}");
    }
}

#[test]
fn clients_of_a_daemon_that_died_fail() {
    let world = World::new(Driver::Simulator(1));
    let mut daemon = Daemon::started(&world);
    world.share_by_mps("gpu-0", &gpus(&world)[0], CAP, 25);
    let mut probe = world.probe("name");
    ready(&mut probe);
    probe.must(&format!("alloc {MIB}"));
    daemon.kill();
    assert_eq!(probe.ask(&format!("alloc {MIB}")).code, MPS_RPC_FAILURE);
    let mut next = world.probe("name");
    assert_eq!(next.ask("init").code, MPS_CONNECTION_FAILED);
}

#[test]
fn without_the_daemons_folder_a_concurrent_share_is_refused() {
    let world = World::new(Driver::Simulator(1));
    world.share_by_mps("gpu-0", &gpus(&world)[0], CAP, 25);
    let empty = world.folder().join("empty");
    fs::create_dir(&empty).unwrap();
    // Started before the mount, because its program may be below /tmp.
    let mut probe = world.probe("name");
    probe.ask("count");
    world.mount(&empty, Path::new("/tmp"));
    assert_eq!(probe.ask("init").code, NOT_PERMITTED);
    world.unmount(Path::new("/tmp"));
    let stderr = probe.stderr();
    assert!(stderr.contains("/tmp/nvidia-mps is missing"), "{stderr}");
}

#[test]
fn concurrent_shares_of_two_gpus_are_refused() {
    let world = World::new(Driver::Simulator(2));
    let _daemon = Daemon::started(&world);
    for (key, gpu) in ["gpu-0", "gpu-1"].iter().zip(gpus(&world)) {
        world.share_by_mps(key, &gpu, CAP, 25);
    }
    let mut probe = world.probe("name");
    assert_eq!(probe.ask("init").code, NOT_PERMITTED);
    let stderr = probe.stderr();
    assert!(stderr.contains("two GPUs"), "{stderr}");
}

/// An image may have the folder: it has no effect without a concurrent share.
#[test]
fn a_capped_share_needs_no_daemon() {
    let world = World::new(Driver::Simulator(1));
    let _no_daemon = Daemon::none(&world);
    world.share("gpu-0", &gpus(&world)[0], Some(CAP));
    let mut probe = world.probe("name");
    ready(&mut probe);
    probe.must(&format!("alloc {MIB}"));
}
