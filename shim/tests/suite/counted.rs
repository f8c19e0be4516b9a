//! The number of instructions that the shim adds to a call, because times vary on a machine with other work.
//! Counted by valgrind's callgrind, with a driver that does almost nothing.

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;

use tranche_shim_core::ComputePolicy;
use tranche_shim_tests::{DRIVER, Driver, Probe, World, built, compile, probe_path, text};

use crate::cap::{CAP, GPU_0};
use crate::families::{with_variable, write};

/// Calls, live allocations meanwhile, the number of instructions when this was written, and the largest allowed number:
/// a tenth more, for another compiler, or half more, if most of it are the loader's look-ups.
const CALLS: [(&str, u32, u64, u64); 12] = [
    ("pass", 0, 7, 8),
    ("alloc-free", 0, 580, 580),
    ("alloc-free", 10_000, 593, 595),
    ("refused", 0, 191, 195),
    ("full", 0, 370, 380),
    // With the driver's own cuCtxGetDevice: 200, 213 or 217, and always the same in one world.
    ("info", 0, 200, 220),
    ("address", 0, 290, 320),
    ("first-address", 0, 145_064, 200_000),
    ("launch", 0, 149, 165),
    ("async-pair", 0, 674, 740),
    ("sync-pool", 0, 29, 33),
    ("info-pool", 0, 227, 250),
];

/// Locked instructions of an allocation and a free: the process takes and gives its spare, and enters and removes the pointer
/// and its block.
const LOCKED: u64 = 6;

/// Of one call: instructions, how many of those of the shim are locked, and system calls.
fn count(world: &World, how: &str, what: &str, live: u32) -> (u64, u64, u64) {
    let out = world.folder().join("callgrind");
    let mut command = world.command("valgrind");
    command
        .args(["--tool=callgrind", "--toggle-collect=counted_calls"])
        .args(["--dump-instr=yes", "--collect-systime=yes"])
        .arg(format!("--callgrind-out-file={}", out.display()))
        .arg(probe_path())
        .arg(how)
        .env("LD_PRELOAD", world.folder().join("clock.so"));
    let mut probe = Probe::by(&mut command);
    for command in ["count", "steer devices 1", "init", "context 0"] {
        probe.ask(command);
    }
    if what.contains("async") || what.contains("pool") {
        probe.must("async 4096");
    }
    probe.ask("steer fast 1");
    // Most programs have a kernel; it must not make other calls longer.
    write(&mut probe, &with_variable(8));
    assert_eq!(
        probe.call("cuModuleLoadData &0 &100"),
        0,
        "cuModuleLoadData"
    );
    let calls = probe.must(&format!("instructions {what} {live}")).number(0);
    probe.must("end");
    let output = probe.wait();
    let mut collected = output
        .lines()
        .find_map(|line| line.split("Collected : ").nth(1))
        .unwrap_or_else(|| panic!("callgrind: {output}"))
        .split_whitespace()
        .map(|count| count.parse::<u64>().unwrap());
    // Numbers at the end that are 0 are not printed.
    let (instructions, system_calls) = (collected.next().unwrap(), collected.next().unwrap_or(0));
    assert!(instructions > calls, "callgrind counted nothing: {output}");
    let locked: u64 = executed(&fs::read_to_string(out).unwrap())
        .filter(|(at, _)| locked().contains(at))
        .map(|(_, times)| times)
        .sum();
    (instructions / calls, locked / calls, system_calls)
}

/// The shim's instructions in a dump of callgrind: address and number of times. (Valgrind's manual, "Callgrind Format
/// Specification".)
fn executed(dump: &str) -> impl Iterator<Item = (u64, u64)> {
    let (mut at, mut is_shim, mut is_call) = (0u64, false, false);
    let mut names = std::collections::BTreeMap::new();
    dump.lines().filter_map(move |line| {
        if let Some(object) = line.strip_prefix("ob=").or(line.strip_prefix("cob=")) {
            // The first time with its name, then by its number.
            let (number, name) = object.split_once(' ').unwrap_or((object, ""));
            let known = names
                .entry(number.to_owned())
                .or_insert(name == "/usr/lib/tranche/libcuda.so.1");
            if line.starts_with("ob=") {
                is_shim = *known;
            }
            return None;
        }
        let is_of_call = std::mem::replace(&mut is_call, line.starts_with("calls="));
        let mut words = line.split(' ');
        let (place, _line, cost) = (words.next()?, words.next()?, words.next()?);
        let number = |text: &str| text.parse::<u64>().ok();
        at = if let Some(address) = place.strip_prefix("0x") {
            u64::from_str_radix(address, 16).ok()?
        } else if let Some(forward) = place.strip_prefix('+') {
            at + number(forward)?
        } else if let Some(back) = place.strip_prefix('-') {
            at - number(back)?
        } else if place == "*" {
            at
        } else {
            return None;
        };
        let cost = number(cost)?;
        (is_shim && !is_of_call).then_some((at, cost))
    })
}

/// The addresses of the shim's locked instructions: an exchange with memory is locked without the prefix.
fn locked() -> &'static BTreeSet<u64> {
    static LOCKED: std::sync::OnceLock<BTreeSet<u64>> = std::sync::OnceLock::new();
    LOCKED.get_or_init(|| {
        let mut objdump = Command::new("objdump");
        objdump.args(["-d", "--no-show-raw-insn"]);
        let done = objdump.arg(built("libcuda.so.1")).output().unwrap();
        assert!(done.status.success(), "objdump: {}", text(&done.stderr));
        let is_locked = |code: &str| {
            code.starts_with("lock ") || code.starts_with("xchg ") && code.contains('(')
        };
        text(&done.stdout)
            .lines()
            .filter_map(|line| line.trim_start().split_once(":\t"))
            .filter(|(_, code)| is_locked(code))
            .filter_map(|(at, _)| u64::from_str_radix(at, 16).ok())
            .collect()
    })
}

#[test]
fn calls_take_few_instructions() {
    let version = Command::new("valgrind").arg("--version").output();
    assert!(
        version.is_ok_and(|ran| ran.status.success()),
        "valgrind is missing: shim/tests/install-tools installs it"
    );
    let world = World::new(Driver::Odd);
    // A share of almost all of the GPU's time: its launches are priced, but none waits.
    let strict = ComputePolicy::Strict;
    let share = world.share_of_time("gpu-0", GPU_0, Some(CAP), Some(99), strict);
    share.grant(1_000_000_000_000);
    let clock = world.folder().join("clock.so");
    compile("standing-clock.c", clock, &["-shared", "-fPIC"]);
    let mut over = Vec::new();
    for (what, live, counted, most) in CALLS {
        let (without, ..) = count(&world, DRIVER, what, live);
        let (with, locked, system_calls) = count(&world, "name", what, live);
        let added = with.saturating_sub(without);
        assert_eq!(system_calls, 0, "system calls of {what} with {live} live");
        if what == "alloc-free" {
            assert_eq!(
                locked, LOCKED,
                "locked instructions of {what} with {live} live"
            );
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
