//! Real programs, unmodified: NVIDIA's cuda-bindings and cuda-core, and numba-cuda, fill a share of the
//! simulated machine by one family of calls after another. They come from PyPI (`client-environment`).

use std::path::{Path, PathBuf};
use std::process::Command;

use tranche_shim_tests::text;

use crate::cap::CAP;
use crate::families::Case;

/// The smallest piece that `fill.py` asks for.
const PIECE: u64 = 2 << 20;

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The Python of a generation of the clients.
fn python(generation: &str) -> PathBuf {
    let script = repository().join("simulator/client-environment");
    let done = Command::new(script).arg(generation).output().unwrap();
    assert!(done.status.success(), "{}", text(&done.stderr));
    Path::new(text(&done.stdout).trim()).join("bin/python")
}

/// Each family gets the cap, all but what is less than a piece, and never more; then nothing is left.
fn fill(generation: &str, families: &[&str]) {
    let python = python(generation);
    let mut case = Case::new();
    case.probe.kill();
    let script = repository().join("e2e/clients/fill.py");
    for family in families {
        let ran = case
            .world
            .command(&python)
            .env("CUDA_PYTHON_DISABLE_MAJOR_VERSION_WARNING", "1")
            .arg("-B")
            .arg(&script)
            .arg(family)
            .output()
            .unwrap();
        let said = text(&ran.stdout);
        assert!(
            ran.status.success(),
            "{family}: {said}{}",
            text(&ran.stderr)
        );
        let number = |field: &str| -> u64 {
            let (_, rest) = said.split_once(&format!("\"{field}\": ")).unwrap();
            let digits: String = rest.chars().take_while(char::is_ascii_digit).collect();
            digits.parse().unwrap()
        };
        assert!(said.contains("OUT_OF_MEMORY"), "{said}");
        assert_eq!((number("total"), number("nvml")), (CAP, CAP), "{said}");
        let held = number("held");
        assert!(held <= CAP && held + 2 * PIECE > CAP, "{said}");
        // numba gives back later, and cuda-core's pool keeps all for itself.
        let keeps = matches!(*family, "numba" | "core");
        assert!(keeps || number("free") + 2 * PIECE > CAP, "{said}");
        let limit = CAP + case.context;
        assert!(case.peak() <= limit, "{family}: {} of {limit}", case.peak());
    }
    let mut last = case.world.probe("name");
    last.must("init");
    assert_eq!(case.share.used(), 0);
}

#[test]
fn cuda_12_bindings_and_numba() {
    let families = [
        "alloc",
        "managed",
        "pitch",
        "stream_ordered",
        "pool",
        "vmm",
        "array",
        "graph",
        "numba",
    ];
    fill("cuda12", &families);
}

#[test]
fn cuda_13_bindings_and_core() {
    let families = [
        "alloc",
        "managed",
        "pitch",
        "stream_ordered",
        "pool",
        "vmm",
        "array",
        "graph",
        "core",
    ];
    fill("cuda13", &families);
}
