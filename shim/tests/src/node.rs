//! The node of a container: the simulated machine, seen from outside of containers.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tranche_simulator_machine::{Access, Attachment, DriverRoot};

use crate::target;

/// A simulated machine and its daemon; gone when dropped.
#[derive(Debug)]
pub struct Node {
    root: PathBuf,
    daemon: Child,
    /// A shell outside of the container's mounts.
    shell: Mutex<Child>,
}

/// The simulated machines that tests run on, of H100s of 80 GB.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Machine {
    /// Its driver has none of the habits that complicate accounting: the account and the GPU's memory can be compared at
    /// any time, to the byte.
    Simple,
    /// Its driver behaves as a real one (`[habits]` of the machine file).
    Realistic,
}

impl Machine {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Simple, Self::Realistic];

    fn model(self) -> &'static str {
        match self {
            Self::Simple => "H100-80",
            Self::Realistic => "H100-80-realistic",
        }
    }
}

/// A GPU as the node sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// `GPU-…`.
    pub uuid: String,
    /// Bytes in use by all processes.
    pub used: u64,
}

impl Node {
    /// Starts a machine. Call it before the thread has its own mounts.
    #[must_use]
    pub fn start(root: PathBuf, machine: Machine, gpus: u32) -> Self {
        install(&root, machine, gpus, NEWEST);
        let daemon = Command::new(root.join("usr/bin/nvidia-sim-persistenced"))
            .arg("--root")
            .arg(&root)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let shell = Command::new("sh")
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let node = Self {
            root,
            daemon,
            shell: Mutex::new(shell),
        };
        let start = Instant::now();
        while !node.root.join("run/nvidia-persistenced/socket").exists() {
            assert!(
                start.elapsed() < Duration::from_secs(10),
                "the simulator's daemon does not listen"
            );
            std::thread::sleep(Duration::from_millis(5));
        }
        node
    }

    /// Its root folder: a driver root.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The most bytes that a GPU's processes ever had together, as the machine itself counts them.
    #[must_use]
    pub fn peak(&self, gpu: usize) -> u64 {
        let page = Attachment::new(&DriverRoot::new(&self.root), Access::Observe).unwrap();
        page.shared().gpus()[gpu].peak.load(Ordering::Relaxed)
    }

    /// Nanoseconds for which a GPU has stood still so far to switch between processes.
    #[must_use]
    pub fn stood_still(&self, gpu: usize) -> u64 {
        let page = Attachment::new(&DriverRoot::new(&self.root), Access::Observe).unwrap();
        page.shared().gpus()[gpu].stood_still()
    }

    /// Nanoseconds for which a GPU has worked so far for a process that runs.
    #[must_use]
    pub fn worked_for(&self, pid: u32, gpu: usize) -> u64 {
        let page = Attachment::new(&DriverRoot::new(&self.root), Access::Observe).unwrap();
        let shared = page.shared();
        let slots = shared.slots.iter().enumerate();
        slots
            .filter(|(_, slot)| slot.pid.load(Ordering::Relaxed).cast_unsigned() == pid)
            .map(|(slot, _)| shared.ran(slot, gpu))
            .sum()
    }

    /// The GPUs, as the node's own `nvidia-smi` reports them.
    #[must_use]
    pub fn gpus(&self) -> Vec<Gpu> {
        self.query("gpu=uuid,memory.used")
            .iter()
            .map(|line| {
                let (uuid, used) = line
                    .split_once(", ")
                    .unwrap_or_else(|| panic!("nvidia-smi: {line}"));
                Gpu {
                    uuid: uuid.into(),
                    used: used.trim().parse::<u64>().unwrap() << 20,
                }
            })
            .collect()
    }

    /// Percent of the last second in which kernels of any process ran on the busiest GPU.
    #[must_use]
    pub fn busiest(&self) -> u64 {
        let answers = self.query("gpu=utilization.gpu");
        let percents = answers.iter().map(|line| line.trim().parse().unwrap());
        percents.max().unwrap_or(0)
    }

    /// Bytes that each process of the machine has, as the node's own `nvidia-smi` reports them.
    #[must_use]
    pub fn processes(&self) -> Vec<u64> {
        let answers = self.query("compute-apps=used_memory");
        let mebibytes = answers
            .iter()
            .map(|line| line.trim().parse::<u64>().unwrap());
        mebibytes.map(|number| number << 20).collect()
    }

    fn query(&self, what: &str) -> Vec<String> {
        let root = self.root.display();
        let query = format!(
            "LD_LIBRARY_PATH={root}/usr/lib/x86_64-linux-gnu {root}/usr/bin/nvidia-smi \
             --query-{what} --format=csv,noheader,nounits </dev/null; echo end"
        );
        let mut shell = self.shell.lock().unwrap();
        writeln!(shell.stdin.as_mut().unwrap(), "{query}").unwrap();
        BufReader::new(shell.stdout.as_mut().unwrap())
            .lines()
            .map(Result::unwrap)
            .take_while(|line| line != "end")
            .collect()
    }
}

/// A driver: its version, and its CUDA version as 1000 × major + 10 × minor.
pub type Version<'a> = (&'a str, u32);

/// The driver of the tests' machines: the newest that the shim knows, so that it has every function.
const NEWEST: Version<'_> = ("580.65.06", 13_000);

/// Lays out the root of a machine with a driver of that version, without a daemon.
pub fn install(root: &Path, machine: Machine, gpus: u32, (version, cuda): Version<'_>) {
    let simulator = target().join("simulator");
    let install = simulator.join("install-root");
    assert!(
        install.exists(),
        "{}: missing: run `make simulator` first",
        install.display()
    );
    let model = simulator.join(format!("machines/{}.toml", machine.model()));
    let file = root.with_extension("toml");
    let description = fs::read_to_string(model)
        .unwrap()
        .replace("\"535.261.03\"", &format!("\"{version}\""))
        .replace("cuda_version = 12020", &format!("cuda_version = {cuda}"));
    fs::write(&file, description).unwrap();
    let done = Command::new(install)
        .arg(root)
        .arg("--machine")
        .arg(&file)
        .args(["--gpus", &gpus.to_string()])
        .output()
        .unwrap();
    assert!(
        done.status.success(),
        "install-root: {}",
        crate::text(&done.stderr)
    );
    fs::remove_file(file).unwrap();
}

impl Drop for Node {
    fn drop(&mut self) {
        for child in [&mut self.daemon, &mut *self.shell.lock().unwrap()] {
            let _ = child.kill();
            let _ = child.wait();
        }
        let _ = fs::remove_dir_all(&self.root);
    }
}
