//! Real programs, unmodified: NVIDIA's cuda-bindings and cuda-core, and numba-cuda, fill a share of the
//! simulated machine by one family of calls after another. They come from PyPI (`client-environment`).

use std::path::{Path, PathBuf};
use std::process::Command;

use tranche_shim_tests::text;

use crate::cap::CAP;
use crate::families::Case;

pub fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The programs of an environment with clients: `python` and what came with its packages.
pub fn clients(list: &str) -> PathBuf {
    let script = repository().join("simulator/client-environment");
    let done = Command::new(script).arg(list).output().unwrap();
    assert!(done.status.success(), "{}", text(&done.stderr));
    Path::new(text(&done.stdout).trim()).join("bin")
}

/// Each family can take the cap, except for a rest that is smaller than a piece, and never more (`fill.py` checks
/// that); then nothing is left.
fn fill(generation: &str) {
    let python = clients(generation).join("python");
    let mut case = Case::new();
    case.probe.kill();
    let ran = case
        .world
        .command(&python)
        .env("CUDA_PYTHON_DISABLE_MAJOR_VERSION_WARNING", "1")
        .arg("-B")
        .arg(repository().join("e2e/clients/fill.py"))
        .args([generation, &CAP.to_string()])
        .output()
        .unwrap();
    let output = text(&ran.stdout);
    assert!(ran.status.success(), "{output}{}", text(&ran.stderr));
    let limit = CAP + case.context;
    assert!(case.peak() <= limit, "{} of {limit}: {output}", case.peak());
    let mut last = case.world.probe("name");
    last.must("init");
    last.must("primary 0");
    assert_eq!(last.must("info").number(0), CAP);
    assert_eq!(case.share.used(), case.context);
}

#[test]
fn cuda_12_bindings_and_numba() {
    fill("cuda12");
}

#[test]
fn cuda_13_bindings_and_core() {
    fill("cuda13");
}
