//! A host with a simulated driver.
//!
//! Needs the simulator in `target/simulator` (`make simulator`).

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tranche_node::nvml::search::InstalledDriver;

/// A host without a driver.
pub struct Host {
    pub dir: tempfile::TempDir,
    daemons: Vec<Child>,
}

impl Drop for Host {
    fn drop(&mut self) {
        for daemon in &mut self.daemons {
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
    }
}

impl Host {
    pub fn new() -> Self {
        Self {
            dir: tempfile::tempdir().unwrap(),
            daemons: Vec::new(),
        }
    }

    pub fn at(&self, path: &str) -> PathBuf {
        self.dir.path().join(path.trim_start_matches('/'))
    }

    /// Installs a driver with two T4 in a folder of the host, and loads it.
    pub fn install(&mut self, root: &str) {
        self.install_for("T4", root);
    }

    /// The same with two GPUs of a model.
    pub fn install_for(&mut self, model: &str, root: &str) {
        self.lay_out(model, root);
        self.load(root);
    }

    /// The driver's files.
    pub fn lay_out(&self, model: &str, root: &str) {
        let installed = Command::new(daemon())
            .arg("install-root")
            .arg(self.at(root))
            .args(["--gpu-model", model, "--gpus", "2"])
            .status();
        assert!(installed.unwrap().success());
    }

    /// Loads the driver that is laid out.
    pub fn load(&mut self, root: &str) {
        let root = self.at(root);
        let daemon = Command::new(daemon())
            .arg("--root")
            .arg(&root)
            .stderr(Stdio::null())
            .spawn();
        self.daemons.push(daemon.unwrap());
        let socket = root.join("run/nvidia-persistenced/socket");
        wait_until(|| {
            let refused = std::os::unix::net::UnixStream::connect(&socket).err();
            // It is not a stream socket: this error shows that it is listening.
            let code = refused.and_then(|e| e.raw_os_error());
            code == Some(rustix::io::Errno::PROTOTYPE.raw_os_error())
        });
    }

    pub fn driver(&self, root: Option<&str>) -> InstalledDriver {
        InstalledDriver::new(self.dir.path(), root.map(Path::new)).with_dev(&self.at("own-dev"))
    }

    /// The device nodes of this host that this process has open.
    pub fn open_nodes(&self) -> Vec<PathBuf> {
        let files = fs::read_dir("/proc/self/fd").unwrap();
        let mut open: Vec<_> = files
            .filter_map(|file| fs::read_link(file.ok()?.path()).ok())
            .filter(|path| path.starts_with(self.dir.path()))
            .filter(|path| path.parent().is_some_and(|folder| folder.ends_with("dev")))
            .collect();
        open.sort();
        open
    }
}

fn daemon() -> PathBuf {
    let simulator = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/simulator");
    let program = simulator.join("nvidia-sim-persistenced");
    assert!(program.exists(), "run `make simulator` first");
    program
}

/// Adds to a counter of all NVLinks of the first GPU.
pub fn count_nvlink(root: &Path, counter: &str, amount: u32) {
    let status = Command::new(daemon())
        .arg("--root")
        .arg(root)
        .args(["count-nvlink", "0", counter, &amount.to_string()])
        .status();
    assert!(status.unwrap().success(), "{counter}");
}

/// Waits until something is so; fails after half a minute.
pub fn wait_until(is_so: impl Fn() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < Duration::from_secs(30), "it is never so");
        std::thread::yield_now();
    }
}

/// Runs the real nvidia-smi in a root.
pub fn smi(root: &Path, arguments: &[&str]) -> String {
    let output = Command::new(root.join("usr/bin/nvidia-smi"))
        .args(arguments)
        .env("LD_LIBRARY_PATH", root.join("usr/lib/x86_64-linux-gnu"))
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{arguments:?}: {text}");
    text
}
