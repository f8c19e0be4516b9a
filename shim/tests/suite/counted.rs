//! The number of instructions that the shim adds to a call, because times vary on a machine with other work.
//! Counted by valgrind's callgrind, with a driver that does almost nothing.

use std::process::Command;

use tranche_shim_core::ComputePolicy;
use tranche_shim_tests::{Driver, Probe, World, compile, probe_path};

use crate::cap::{CAP, GPU_0};
use crate::families::{with_variable, write};

/// Calls, allocations that live meanwhile, instructions that were counted when this was written, and the most
/// that may be: a tenth more, for another compiler, or half, where the loader's look-ups are most of it.
const CALLS: [(&str, u32, u64, u64); 9] = [
    ("pass", 0, 7, 8),
    ("alloc-free", 0, 789, 830),
    ("alloc-free", 10_000, 826, 870),
    ("refused", 0, 171, 190),
    ("full", 0, 437, 460),
    ("info", 0, 209, 215),
    ("address", 0, 290, 320),
    ("first-address", 0, 148_702, 200_000),
    ("launch", 0, 149, 165),
];

/// Instructions of one call.
fn count(world: &World, how: &str, what: &str, live: u32) -> u64 {
    let out = world.folder().join("callgrind");
    let mut command = world.command("valgrind");
    command
        .args(["--tool=callgrind", "--toggle-collect=counted_calls"])
        .arg(format!("--callgrind-out-file={}", out.display()))
        .arg(probe_path())
        .arg(how)
        .env("LD_PRELOAD", world.folder().join("clock.so"));
    let mut probe = Probe::by(&mut command);
    for command in [
        "count",
        "steer devices 1",
        "init",
        "context 0",
        "steer fast 1",
    ] {
        probe.ask(command);
    }
    // As every program with a kernel has one; it must not make other calls longer.
    write(&mut probe, &with_variable(8));
    assert_eq!(
        probe.call("cuModuleLoadData &0 &100"),
        0,
        "cuModuleLoadData"
    );
    let calls = probe.must(&format!("instructions {what} {live}")).number(0);
    probe.must("end");
    let output = probe.wait();
    let collected = output
        .lines()
        .find_map(|line| line.split("Collected : ").nth(1))
        .unwrap_or_else(|| panic!("callgrind: {output}"));
    let collected = collected.trim().parse::<u64>().unwrap();
    assert!(collected > calls, "callgrind counted nothing: {output}");
    collected / calls
}

#[test]
fn calls_take_few_instructions() {
    let version = Command::new("valgrind").arg("--version").output();
    assert!(
        version.is_ok_and(|ran| ran.status.success()),
        "valgrind is missing: shim/tests/install-tools installs it"
    );
    let world = World::new(Driver::Odd);
    // A share of almost all of the GPU's time: its launches are priced, and none waits.
    let strict = ComputePolicy::Strict;
    let share = world.share_of_time("gpu-0", GPU_0, Some(CAP), Some(99), strict);
    share.grant(1_000_000_000_000);
    let clock = world.folder().join("clock.so");
    compile("standing-clock.c", clock, &["-shared", "-fPIC"]);
    let mut over = Vec::new();
    for (what, live, counted, most) in CALLS {
        let without = count(&world, "/usr/lib/tranche/driver/libcuda.so.1", what, live);
        let mut added = count(&world, "name", what, live).saturating_sub(without);
        if added > most {
            // Once in many runs of the whole suite every call took some instructions more, for a reason outside of the
            // library: a call that takes too many does so twice.
            let again = count(&world, "name", what, live).saturating_sub(without);
            added = added.min(again);
        }
        println!(
            "{what:>10} with {live:>6} live: {added:>5} instructions added, {counted} when written"
        );
        if added > most {
            over.push(format!(
                "{what} with {live} live: {added} added, more than {most}"
            ));
        }
    }
    assert!(over.is_empty(), "{}", over.join("; "));
}
