//! A driver that calls back: in each of its calls, including those of the shim itself, a callback uses CUDA functions of
//! every family. There must be no deadlock and no wrong account.

use std::fmt::Write as _;
use std::fs;
use std::process::Command;

use tranche_shim_tests::{Probe, World, compile, text};

use crate::cap::CAP;
use crate::families::Case;

const FOLDER: &str = "/usr/lib/tranche/driver";

/// Puts the driver that calls back before the simulated one.
fn install(world: &World) {
    let real = format!("{FOLDER}/libcuda-simulated.so");
    fs::rename(format!("{FOLDER}/libcuda.so.1"), &real).unwrap();
    let listed = Command::new("nm")
        .args(["-D", "--defined-only", "--format=just-symbols", &real])
        .output()
        .unwrap();
    assert!(listed.status.success(), "nm: {}", text(&listed.stderr));
    let mut list = String::from("#define EACH(X)");
    let names = text(&listed.stdout);
    for (number, name) in names
        .lines()
        .filter(|name| name.starts_with("cu"))
        .enumerate()
    {
        write!(list, " X({number}, {name})").unwrap();
    }
    let header = world.folder().join("functions.h");
    fs::write(&header, list).unwrap();
    compile(
        "calling-driver.c",
        format!("{FOLDER}/libcuda.so.1"),
        &[
            "-shared",
            "-fPIC",
            "-ldl",
            "-Wl,-soname,libcuda.so.1",
            "-Wl,-Bsymbolic",
            &format!("-DREAL=\"{real}\""),
            "-include",
            header.to_str().unwrap(),
        ],
    );
}

/// A process in whose driver callbacks run already before it joins.
fn start(case: &Case, families: u64) -> Probe {
    let mut probe = case.world.probe("name");
    // The driver is opened by the first call.
    probe.ask("count");
    probe.ask(&format!("steer callback {families}"));
    probe.must("init");
    probe.must("primary 0");
    let kernel = probe.must("kernel sim_busy_1us").number(0);
    probe.ask(&format!("steer callback_kernel {kernel}"));
    probe
}

/// A bit for each family that the callbacks use.
const FAMILIES: u64 = 10;
const ALL: u64 = (1 << FAMILIES) - 1;

/// Threads take memory in every way, and launch; then contexts end, and all is given back.
fn run(families: u64, operations: u64) {
    let mut case = Case::new();
    case.probe.must("unprimary 0");
    install(&case.world);
    let mut probe = start(&case, families);
    let answer = probe.must(&format!("storm 3 {operations} {}", CAP / 16));
    assert!(answer.number(0) > 0 && answer.number(2) == 0, "{answer:?}");
    let kernel = probe.must("kernel sim_busy_1us_sim_local_4096").number(0);
    for how in ["plain", "ex", "graph"] {
        probe.must(&format!("launch {how} {kernel} 10 0"));
    }
    assert!(probe.ask("steer callbacks 0").code > 100);
    let limit = CAP + case.context;
    let peak = case.peak();
    assert!(peak <= limit, "{peak} of {limit}, with {families:b}");
    probe.ask("steer callback 0");
    probe.must("synchronize");
    let context = probe.must("context 0").number(0);
    probe.ask(&format!("steer callback {families}"));
    probe.must(&format!("destroy {context}"));
    probe.must("reset 0");
    probe.ask("steer callback 0");
    // The driver was not asked about the last callbacks' frees. There is no context, but the shim asks nevertheless.
    probe.ask("synchronize");
    assert_eq!(case.share.used(), 0, "with {families:b}");
    assert_eq!(case.world.node().gpus()[0].used, 0);
}

#[test]
fn a_callback_in_any_call_of_the_driver_may_use_cuda() {
    run(ALL, 150);
}

#[test]
fn a_callback_may_use_each_family_alone() {
    for family in 0..FAMILIES {
        run(1 << family, 150);
    }
}

/// A callback resets a primary context, with later allocations in it, inside a call that releases it: the call that notes
/// the end is not the one that ended it.
#[test]
fn a_context_that_ends_within_another_call_leaves_no_charge() {
    let mut case = Case::new();
    case.probe.must("unprimary 0");
    install(&case.world);
    let mut probe = case.world.probe("name");
    probe.ask("count");
    for command in ["init", "primary 0", "primary 0"] {
        probe.must(command);
    }
    probe.ask("steer reset_at_release 1");
    // The driver finds it reset.
    assert_ne!(probe.ask("unprimary 0").code, 0);
    let held = case.world.node().gpus()[0].used;
    assert_eq!((held, case.share.used()), (0, 0));
}
