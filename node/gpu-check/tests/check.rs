//! The check on simulated GPUs, as the node plugin runs it.
#![allow(
    clippy::unwrap_used,
    reason = "a test that cannot go on should say where"
)]

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// A simulated machine with two GPUs.
struct Machine {
    root: tempfile::TempDir,
    daemon: Child,
}

impl Machine {
    fn start() -> Self {
        let parts = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target/simulator");
        let install = parts.join("install-root");
        assert!(install.is_file(), "run `make simulator` first");
        let root = tempfile::tempdir().unwrap();
        let installed = Command::new(install)
            .arg(root.path())
            .args(["--gpu-model", "H100-80", "--gpus", "2"])
            .status();
        assert!(installed.unwrap().success());
        let mut daemon = Command::new(root.path().join("usr/bin/nvidia-sim-persistenced"))
            .arg("--root")
            .arg(root.path())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        // The daemon writes a line when it listens.
        let mut line = String::new();
        let mut output = BufReader::new(daemon.stderr.take().unwrap());
        output.read_line(&mut line).unwrap();
        assert!(line.contains("simulated GPUs at"), "{line}");
        Self { root, daemon }
    }

    fn at(&self, path: &str) -> PathBuf {
        self.root.path().join(path)
    }

    fn control(&self, arguments: &[&str]) {
        let status = Command::new(self.at("usr/bin/nvidia-sim-persistenced"))
            .arg("--root")
            .arg(self.root.path())
            .args(arguments)
            .status();
        assert!(status.unwrap().success(), "{arguments:?}");
    }

    fn uuids(&self) -> Vec<String> {
        let listed = Command::new(self.at("usr/bin/nvidia-smi"))
            .arg("-L")
            .env("LD_LIBRARY_PATH", self.at("usr/lib/x86_64-linux-gnu"))
            .output()
            .unwrap();
        let text = String::from_utf8(listed.stdout).unwrap();
        let uuid = |line: &str| {
            let (_, uuid) = line.split_once("UUID: ")?;
            Some(uuid.trim_end_matches(')').to_owned())
        };
        text.lines().filter_map(uuid).collect()
    }

    /// Whether a GPU passes, and what the program says.
    fn check(&self, uuid: &str) -> (bool, String) {
        let output = Command::new(env!("CARGO_BIN_EXE_tranche-gpu-check"))
            .arg(self.at("usr/lib/x86_64-linux-gnu/libcuda.so.1"))
            .env("CUDA_VISIBLE_DEVICES", uuid)
            .output()
            .unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        (output.status.success(), said)
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let _ = self.daemon.kill();
        let _ = self.daemon.wait();
    }
}

#[test]
fn a_gpu_that_works_passes_and_a_fault_is_named() {
    let machine = Machine::start();
    let [first, second] = <[String; 2]>::try_from(machine.uuids()).unwrap();
    for uuid in [&first, &second] {
        assert_eq!(machine.check(uuid), (true, String::new()));
    }
    // Another GPU's fault does not matter.
    machine.control(&["lose-gpu", &first]);
    assert_eq!(machine.check(&second), (true, String::new()));
    let (passes, said) = machine.check(&first);
    assert!(!passes && said.contains("returned error"), "{said}");
    machine.control(&["restore-gpu", &first]);
    assert_eq!(machine.check(&first), (true, String::new()));
    let faults = machine.at("etc/nvidia-sim/faults.toml");
    for (call, code) in [
        ("cuCtxCreate", "304"),
        ("cuMemAlloc", "2"),
        ("cuLaunchKernel", "719"),
        ("cuCtxSynchronize", "700"),
        ("cuMemcpyDtoH", "214"),
    ] {
        let fault = format!("[[fault]]\ncall = \"{call}\"\ncode = {code}\n");
        std::fs::write(&faults, fault).unwrap();
        let (passes, said) = machine.check(&first);
        assert!(
            !passes && said.contains(call) && said.contains(code),
            "{call}: {said}"
        );
    }
}

#[test]
fn a_library_that_cannot_be_used_is_named() {
    let check = |arguments: &[&str]| {
        let output = Command::new(env!("CARGO_BIN_EXE_tranche-gpu-check"))
            .args(arguments)
            .output()
            .unwrap();
        let said = String::from_utf8(output.stderr).unwrap();
        (output.status.code(), said)
    };
    let (code, said) = check(&["/no/libcuda.so.1"]);
    assert!(
        code == Some(1) && said.contains("/no/libcuda.so.1"),
        "{said}"
    );
    let (code, said) = check(&[]);
    assert!(code == Some(2) && said.contains("usage"), "{said}");
}
