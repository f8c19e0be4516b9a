//! The node that a container is on: the simulated machine, seen from outside every container.

use std::fs;
use std::io::{BufRead as _, BufReader, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use tranche_simulator_machine::{Access, Attachment, DriverRoot};

use crate::{target, text};

/// A simulated machine and its daemon; gone when dropped.
#[derive(Debug)]
pub struct Node {
    root: PathBuf,
    daemon: Child,
    /// A shell with the mounts that the container does not have.
    shell: Mutex<Child>,
}

/// A GPU as the node sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// `GPU-…`.
    pub uuid: String,
    /// Bytes in use, by whatever process and for whatever purpose.
    pub used: u64,
}

impl Node {
    /// Starts a machine with H100s of 80 GB. Call it before the thread has mounts of its own.
    #[must_use]
    pub fn start(root: PathBuf, gpus: u32) -> Self {
        let simulator = target().join("simulator");
        let install = simulator.join("install-root");
        assert!(
            install.exists(),
            "{}: missing: run `make simulator` first",
            install.display()
        );
        let done = Command::new(install)
            .arg(&root)
            .args(["--gpu-model", "H100-80", "--gpus", &gpus.to_string()])
            .output()
            .unwrap();
        assert!(
            done.status.success(),
            "install-root: {}",
            text(&done.stderr)
        );
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

    /// The GPUs, as the node's own `nvidia-smi` reports them.
    #[must_use]
    pub fn gpus(&self) -> Vec<Gpu> {
        self.query("uuid,memory.used")
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

    /// Percent of the last second in which kernels ran on the busiest GPU, whoever's.
    #[must_use]
    pub fn busiest(&self) -> u64 {
        let answers = self.query("utilization.gpu");
        let percents = answers.iter().map(|line| line.trim().parse().unwrap());
        percents.max().unwrap_or(0)
    }

    fn query(&self, what: &str) -> Vec<String> {
        let root = self.root.display();
        let query = format!(
            "LD_LIBRARY_PATH={root}/usr/lib/x86_64-linux-gnu {root}/usr/bin/nvidia-smi \
             --query-gpu={what} --format=csv,noheader,nounits </dev/null; echo end"
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

impl Drop for Node {
    fn drop(&mut self) {
        for child in [&mut self.daemon, &mut *self.shell.lock().unwrap()] {
            let _ = child.kill();
            let _ = child.wait();
        }
        let _ = fs::remove_dir_all(&self.root);
    }
}
