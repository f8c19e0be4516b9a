//! A simulated machine for a test, and CUDA programs on it.
//!
//! The machine is a temporary root with its own daemon, laid out from target/simulator, which `make simulator` builds. A
//! CUDA program is this test program started again as [`program`], with the root's libraries in the loader's path: unmodified
//! cudarc on the simulated libcuda.
use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::time::{Duration, Instant};

use nvml_wrapper::Nvml;

pub mod program;

pub const MIB: u64 = 1 << 20;
pub const GIB: u64 = 1 << 30;

/// A root with a running daemon.
pub struct Machine {
    root: tempfile::TempDir,
    daemon: Option<Child>,
}

/// The folder that `make simulator` fills.
pub fn parts() -> PathBuf {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/simulator");
    assert!(
        folder.join("nvidia-smi").is_file(),
        "{} is not complete: run `make simulator` first",
        folder.display()
    );
    folder
}

impl Machine {
    pub fn start(model: &str, gpus: u32) -> Self {
        let root = tempfile::tempdir().unwrap();
        let status = Command::new(parts().join("install-root"))
            .arg(root.path())
            .args(["--gpu-model", model, "--gpus", &gpus.to_string()])
            .status()
            .unwrap();
        assert!(status.success());
        let mut machine = Self { root, daemon: None };
        machine.start_daemon();
        machine
    }

    /// With a driver of another version than the machine file's.
    pub fn start_with_driver(model: &str, gpus: u32, version: &str) -> Self {
        let root = tempfile::tempdir().unwrap();
        let shipped = parts().join(format!("machines/{model}.toml"));
        let text = std::fs::read_to_string(shipped).unwrap();
        let file = root.path().join("machine.toml");
        std::fs::write(&file, text.replace("535.261.03", version)).unwrap();
        let status = Command::new(parts().join("install-root"))
            .arg(root.path())
            .arg("--machine")
            .arg(&file)
            .args(["--gpus", &gpus.to_string()])
            .status()
            .unwrap();
        assert!(status.success());
        let mut machine = Self { root, daemon: None };
        machine.start_daemon();
        machine
    }

    pub fn path(&self, below: &str) -> PathBuf {
        self.root.path().join(below)
    }

    pub fn library(&self, name: &str) -> PathBuf {
        self.path("usr/lib/x86_64-linux-gnu").join(name)
    }

    pub fn start_daemon(&mut self) {
        let mut daemon = Command::new(self.path("usr/bin/nvidia-sim-persistenced"))
            .arg("--root")
            .arg(self.root.path())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // The daemon writes this line when it listens.
        let mut line = String::new();
        BufReader::new(daemon.stderr.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        assert!(line.contains("simulated GPUs at"), "{line}");
        self.daemon = Some(daemon);
    }

    pub fn kill_daemon(&mut self) {
        let mut daemon = self.daemon.take().unwrap();
        daemon.kill().unwrap();
        daemon.wait().unwrap();
    }

    pub fn nvml(&self) -> Nvml {
        self.try_nvml().unwrap()
    }

    pub fn try_nvml(&self) -> Result<Nvml, nvml_wrapper::error::NvmlError> {
        Nvml::builder()
            .lib_path(self.library("libnvidia-ml.so.1").as_os_str())
            .init()
    }

    /// A command with the root's libraries in its loader's path.
    pub fn command(&self, program: impl AsRef<Path>) -> Command {
        let mut command = Command::new(program.as_ref());
        command.env("LD_LIBRARY_PATH", self.path("usr/lib/x86_64-linux-gnu"));
        command
    }

    /// Runs a command of the daemon's program.
    pub fn control(&self, arguments: &[&str]) {
        let status = self
            .command(self.path("usr/bin/nvidia-sim-persistenced"))
            .arg("--root")
            .arg(self.root.path())
            .args(arguments)
            .status()
            .unwrap();
        assert!(status.success(), "{arguments:?}");
    }

    /// Runs the real nvidia-smi.
    pub fn smi(&self, arguments: &[&str]) -> String {
        let output = self
            .command(self.path("usr/bin/nvidia-smi"))
            .args(arguments)
            .output()
            .unwrap();
        assert!(
            output.status.success(),
            "nvidia-smi {arguments:?}: {output:?}"
        );
        String::from_utf8(output.stdout).unwrap()
    }

    /// Starts a CUDA program.
    pub fn program(&self) -> Program {
        self.program_with(&[])
    }

    pub fn program_with(&self, environment: &[(&str, &str)]) -> Program {
        let mut command = self.command(std::env::current_exe().unwrap());
        command.envs(environment.iter().copied());
        Self::start_program(command)
    }

    /// Starts a CUDA program without `CAP_SYS_ADMIN`.
    pub fn program_without_administration(&self) -> Program {
        Self::start_program(self.unprivileged(std::env::current_exe().unwrap()))
    }

    /// A command without `CAP_SYS_ADMIN`, as in a container.
    pub fn unprivileged(&self, program: impl AsRef<Path>) -> Command {
        let mut command = self.command("setpriv");
        command
            .arg("--bounding-set=-sys_admin")
            .arg(program.as_ref());
        command
    }

    fn start_program(mut command: Command) -> Program {
        command.args([
            "--ignored",
            "--exact",
            "common::program::run",
            "--nocapture",
        ]);
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().unwrap());
        Program {
            child,
            input,
            output,
        }
    }

    /// Bytes in use on a GPU without the driver's reserve, from NVML.
    pub fn used(&self, gpu: u32) -> u64 {
        let nvml = self.nvml();
        let memory = nvml.device_by_index(gpu).unwrap().memory_info().unwrap();
        memory.used
    }

    /// Waits until a GPU has `bytes` in use.
    pub fn wait_for_used(&self, gpu: u32, bytes: u64) {
        wait_until(
            || self.used(gpu) == bytes,
            || format!("{} in use, not {bytes}", self.used(gpu)),
        );
    }

    /// Waits until NVML lists no process on a GPU.
    pub fn wait_for_no_process(&self, gpu: u32) {
        let nvml = self.nvml();
        let device = nvml.device_by_index(gpu).unwrap();
        let listed = || device.running_compute_processes().unwrap();
        wait_until(|| listed().is_empty(), || format!("{:?}", listed()));
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        if let Some(mut daemon) = self.daemon.take() {
            let _ = daemon.kill();
            let _ = daemon.wait();
        }
    }
}

/// A running CUDA program that executes commands, one per line.
pub struct Program {
    pub child: Child,
    input: Option<ChildStdin>,
    output: BufReader<std::process::ChildStdout>,
}

impl Program {
    /// Sends a command; returns its answer.
    pub fn ask(&mut self, line: &str) -> String {
        writeln!(self.input.as_mut().unwrap(), "{line}").unwrap();
        self.answer()
    }

    pub fn answer(&mut self) -> String {
        // The test harness writes lines too; the program's begin with an arrow.
        loop {
            let mut line = String::new();
            assert!(
                self.output.read_line(&mut line).unwrap() > 0,
                "the program ended"
            );
            // The harness may have written the beginning of the line.
            if let Some((_, answer)) = line.split_once("=> ") {
                return answer.trim().to_owned();
            }
        }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Ends it by SIGKILL.
    pub fn kill(self) {
        drop(self);
    }

    /// Closes its input, at which it ends.
    pub fn end(mut self) {
        drop(self.input.take());
        let mut rest = String::new();
        self.output.read_to_string(&mut rest).unwrap();
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits until `done`; fails after ten seconds with the text of `state`.
pub fn wait_until(done: impl Fn() -> bool, state: impl Fn() -> String) {
    let deadline = Instant::now() + Duration::from_secs(10);
    while !done() {
        assert!(Instant::now() < deadline, "{}", state());
        std::thread::sleep(Duration::from_millis(2));
    }
}
