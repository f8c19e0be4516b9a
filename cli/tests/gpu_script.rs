//! `bench/gpu/run`, as far as it goes without a GPU: so that it works where there is one.

#![allow(
    clippy::unwrap_used,
    reason = "a test that cannot go on should say where"
)]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use tranche_shim_tests::{Node, target, text};

fn script(root: &Path, arguments: &[&str]) -> Output {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    Command::new(repository.join("bench/gpu/run"))
        .arg("--driver-root")
        .arg(root)
        .args(arguments)
        .output()
        .unwrap()
}

/// A program of another package, built into the same folder.
fn built(name: &str) -> String {
    let path = PathBuf::from(env!("CARGO_BIN_EXE_tranche")).with_file_name(name);
    assert!(
        path.exists(),
        "{}: missing: run `cargo build -p tranche-bench -p tranche-shim-tests`",
        path.display()
    );
    path.to_str().unwrap().to_owned()
}

#[test]
fn all_of_it_that_needs_no_gpu() {
    let name = format!("tranche-gpu-script-{}", std::process::id());
    let node = Node::start(std::env::temp_dir().join(name), 2);
    let (bench, probe) = (built("tranche-bench"), built("tranche-shim-probe"));
    let shim = target().join("shim").canonicalize().unwrap();
    let options = ["--no-build", "--tranche", env!("CARGO_BIN_EXE_tranche")];
    let paths = [
        "--bench",
        &bench,
        "--probe",
        &probe,
        "--shim",
        shim.to_str().unwrap(),
    ];
    let amounts = [
        "--gpu",
        "1",
        "--memory",
        "8",
        "--processes",
        "2",
        "--rounds",
        "1",
        "--seconds",
        "1",
    ];
    let ran = script(node.root(), &[&options[..], &paths, &amounts].concat());
    let table = text(&ran.stdout);
    assert!(ran.status.success(), "{table}{}", text(&ran.stderr));
    for row in [
        "Simulated H100",
        "gate: the shim is in the program",
        "ways around the cap: 120 tried",
        "IS-001",
        "IS-006",
        "IS-009",
        "OH-004",
        "launch, 2 process(es)",
        "cuGetProcAddress, 2 process(es)",
        "The GPU is simulated",
    ] {
        assert!(table.contains(row), "{row}: {table}");
    }
    assert!(!table.contains("FAILED"), "{table}");
}

#[test]
fn without_a_gpu_it_says_so() {
    let empty = tempfile::tempdir().unwrap();
    let ran = script(empty.path(), &[]);
    assert!(!ran.status.success());
    assert!(
        text(&ran.stderr).contains("no NVIDIA GPU"),
        "{}",
        text(&ran.stderr)
    );
}
