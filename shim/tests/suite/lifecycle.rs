//! Processes start, end, are killed at any instruction, and fill the account: the charge of each ends with it.

use std::collections::BTreeSet;
use std::fs::{File, OpenOptions};
use std::os::fd::AsRawFd as _;
use std::os::unix::fs::OpenOptionsExt as _;
use std::process::Command;

use tranche_shim_core::ComputePolicy;
use tranche_shim_core::layout::SLOTS;
use tranche_shim_tests::{Driver, Probe, Share, Traced, World, probe_path};

use crate::cap::{BLOCK, CAP, GPU_0, one_gpu, ready};
use crate::loading::capped;

const NOT_PERMITTED: i64 = 800;

/// A killed process leaves only its share's page, and the kernel drops its locks. So the page is checked after
/// every instruction of `what`, and a process is killed before and after each instruction that changed the page,
/// and at every hundredth. Returns the number of instructions.
fn killed_at_every_instruction_of(what: &str) -> usize {
    let world = World::new(Driver::Odd);
    // A share of almost all of the GPU's time: launches are priced, but none waits.
    let strict = ComputePolicy::Strict;
    let share = world.share_of_time("gpu-0", GPU_0, Some(CAP), Some(99), strict);
    share.grant(1_000_000_000_000);
    let (mut probe, traced) = at_breakpoint(&world, &share, what);
    let (mut page, mut instructions) = (share.account(), 0);
    let mut deaths = BTreeSet::new();
    while !traced.step() {
        instructions += 1;
        check(&share, what, instructions);
        let now = share.account();
        if now != page {
            deaths.extend([instructions - 1, instructions]);
            page = now;
        } else if instructions % 100 == 0 {
            deaths.insert(instructions);
        }
    }
    probe.kill();
    println!(
        "{what}: {instructions} instructions, killed at {}",
        deaths.len()
    );
    for steps in deaths {
        let (mut probe, traced) = at_breakpoint(&world, &share, what);
        // Code that reads the clock may take another path; if it ends earlier, it is killed there.
        let _ = (0..steps).any(|_| traced.step());
        probe.kill();
        check(&share, what, steps);
    }
    at_breakpoint(&world, &share, what).0.kill();
    instructions
}

/// A process that is about to do `what`. Its query reclaims the slots of dead processes, so everything that
/// the last one left is returned.
fn at_breakpoint(world: &World, share: &Share, what: &str) -> (Probe, Traced) {
    let mut probe = ready(world, 1);
    probe.must("info");
    assert_eq!(share.used(), 0, "{what}: the one before left something");
    assert_eq!(share.read(|account| account.processes().count()), 1);
    probe.ask("steer fast 1");
    let traced = Traced::seize(probe.pid());
    probe.send(&format!("between-breakpoints {what}"));
    traced.to_breakpoint();
    (probe, traced)
}

/// No less is reserved than what is charged to living and dead processes.
fn check(share: &Share, what: &str, steps: usize) {
    share.read(|account| {
        let charged: u64 = account.processes().map(|process| process.charged).sum();
        let reserved = account.reserved();
        assert!(
            charged <= reserved && reserved <= CAP,
            "{what}: {reserved} reserved and {charged} charged after {steps} instructions"
        );
    });
}

#[test]
fn killed_at_any_instruction_of_allocate_and_free() {
    // From the process's spare, from the share, and from the share after all spares were collected.
    for what in ["alloc-free", "alloc-free-much", "alloc-free-all"] {
        let steps = killed_at_every_instruction_of(what);
        assert!(steps > 100, "{steps} instructions are none of ours");
    }
}

#[test]
fn killed_at_any_instruction_of_a_refusal() {
    let steps = killed_at_every_instruction_of("refused");
    assert!(steps > 20, "{steps} instructions are none of ours");
}

#[test]
fn killed_at_any_instruction_of_a_launch() {
    let steps = killed_at_every_instruction_of("launch");
    assert!(steps > 100, "{steps} instructions are none of ours");
}

/// The account has 1,024 slots: all of them are taken, one more process is refused, and one that ends makes room.
#[test]
fn a_thousand_processes_come_and_go() {
    more_descriptors();
    let (world, share) = one_gpu();
    let start = |world: &World| {
        let mut probe = world.probe("name");
        for command in [
            "count",
            "steer devices 1",
            "init",
            "context 0",
            "alloc 2097152",
        ] {
            probe.send(command);
        }
        probe
    };
    let mut probes: Vec<Probe> = (0..SLOTS).map(|_| start(&world)).collect();
    for probe in &mut probes {
        let answers: Vec<i64> = (0..5).map(|_| probe.receive().code).collect();
        assert_eq!(answers[2..], [0, 0, 0]);
    }
    assert_eq!(share.used(), SLOTS as u64 * BLOCK);
    let mut last = world.probe("name");
    last.ask("count");
    last.ask("steer devices 1");
    assert_eq!(last.ask("init").code, NOT_PERMITTED);
    assert_eq!(share.read(|account| account.processes().count()), SLOTS);
    // A process that ends makes room, also for one that was refused.
    probes.truncate(SLOTS - 1);
    last.must("init");
    last.must("context 0");
    last.must("alloc 2097152");
    assert_eq!(share.used(), SLOTS as u64 * BLOCK);
    drop(probes);
    let mut other = ready(&world, 1);
    assert_eq!(other.must("info").number(0), CAP - BLOCK);
    assert_eq!(share.used(), BLOCK);
    other.must(&format!("alloc {}", CAP - BLOCK));
    assert_eq!(share.read(|account| account.processes().count()), 2);
    let errors = last.stderr();
    assert!(
        errors.contains("1024 processes use the share already"),
        "{errors}"
    );
}

/// Pipes for a thousand probes.
fn more_descriptors() {
    let limit = libc::rlimit {
        rlim_cur: 8192,
        rlim_max: 8192,
    };
    // SAFETY: reads the local.
    let done = unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit) };
    assert_eq!(done, 0, "{}", std::io::Error::last_os_error());
}

/// A child that calls exec at once, as subprocesses do (vfork, posix_spawn), takes nothing from its parent
/// and leaves nothing.
#[test]
fn a_child_that_becomes_another_program_leaves_its_parent_alone() {
    let (world, share) = one_gpu();
    let mut parent = ready(&world, 1);
    let whole = parent.must(&format!("alloc {CAP}")).number(0);
    let mut other = ready(&world, 1);
    for _ in 0..20 {
        // The other has two GPUs and one share, so its cuInit is refused; it joins nothing.
        assert_eq!(parent.ask("spawn").code, 1);
        assert_eq!(other.ask("alloc 1").code, 2);
        assert_eq!(share.used(), CAP);
    }
    assert_eq!(share.read(|account| account.processes().count()), 2);
    parent.must(&format!("free {whole}"));
    assert_eq!(share.used(), 0);
}

/// The order in which Linux closes a killed process's files: the driver frees memory when its files are
/// closed, which must happen before the slot is reclaimed (ADR 0013).
#[test]
fn a_slot_is_free_when_other_files_are_closed_and_not_before() {
    let (world, share) = one_gpu();
    let account = share.account_file();
    let fifo = world.folder().join("fifo");
    assert!(
        Command::new("mkfifo")
            .arg(&fifo)
            .status()
            .unwrap()
            .success()
    );
    for _ in 0..100 {
        let mut probe = ready(&world, 1);
        let reader = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(&fifo)
            .unwrap();
        // A file that the probe opens itself, because a concurrent fork in another test may inherit the files with which the
        // probe is started.
        probe.must(&format!("open-to-write {}", fifo.display()));
        assert!(account.is_in_use().unwrap() && !has_hung_up(&reader));
        probe.begin_to_kill();
        while account.is_in_use().unwrap() {}
        assert!(has_hung_up(&reader), "a file of it is still open");
    }
}

/// Whether the other end of a pipe is closed.
fn has_hung_up(reader: &File) -> bool {
    let mut watched = libc::pollfd {
        fd: reader.as_raw_fd(),
        events: 0,
        revents: 0,
    };
    // SAFETY: one entry, which is writable; the call does not wait.
    unsafe { libc::poll(&raw mut watched, 1, 0) == 1 }
}

/// Grandchildren, and children of many concurrent forks, each with its own slot.
#[test]
fn children_of_children_are_counted_once_each() {
    let (world, share) = one_gpu();
    let mut probe = ready(&world, 1);
    probe.must("alloc 2097152");
    for generation in 2..=5 {
        assert_eq!(probe.ask("fork").values, ["child"]);
        probe.must("alloc 2097152");
        assert_eq!(share.used(), generation * BLOCK);
    }
    for generation in (1..5).rev() {
        probe.send("end");
        assert_eq!(probe.receive().code, 0);
        assert_eq!(probe.receive().values, ["parent"]);
        let info = probe.must("info");
        assert_eq!(info.number(0), CAP - generation * BLOCK);
    }
}

/// A login, which replaces the environment.
#[test]
fn a_login_does_not_remove_the_cap() {
    let world = World::new(Driver::Odd);
    world.share("gpu-0", GPU_0, Some(CAP));
    let probe = format!("exec {} name", probe_path().display());
    let login = ["-", "root", "-s", "/bin/sh", "-c", &probe];
    capped(&mut Probe::by(
        world.command("su").args(login).env("LD_PRELOAD", ""),
    ));
}

/// Many processes join one share concurrently, and each gets its slot.
#[test]
fn three_hundred_processes_join_at_once() {
    let (world, share) = one_gpu();
    let mut probes: Vec<_> = (0..300).map(|_| world.probe("name")).collect();
    for probe in &mut probes {
        probe.send("count");
        probe.send("steer devices 1");
        probe.send("init");
        probe.send("context 0");
        probe.send("alloc 4096");
    }
    for probe in &mut probes {
        probe.receive();
        probe.receive();
        for _ in 0..3 {
            assert_eq!(probe.receive().code, 0);
        }
    }
    assert_eq!(share.used(), 300 * BLOCK);
    assert_eq!(share.read(|account| account.processes().count()), 300);
    drop(probes);
    let mut last = ready(&world, 1);
    last.must(&format!("alloc {CAP}"));
    assert_eq!(share.read(|account| account.processes().count()), 1);
}
