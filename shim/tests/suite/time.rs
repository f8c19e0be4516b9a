//! The time that the shim adds to a call, with a driver that does almost nothing. The bounds are
//! wide, because other tests run at the same time; SPECIFICATION.md has the figures. They detect a
//! system call or a search on a hot path.

use std::path::Path;
use std::time::{Duration, Instant};

use tranche_shim_core::ComputePolicy;
use tranche_shim_tests::{Driver, World, probe_path};

use crate::cap::{CAP, GPU_0, GPU_1, one_gpu, ready};

fn measure(what: &str, live: u32) -> (u64, u64) {
    let world = World::new(Driver::Odd);
    // A share of almost all of the GPU's time: its launches are priced, but none waits.
    let all = ComputePolicy::Strict;
    let share = world.share_of_time("gpu-0", GPU_0, Some(CAP), Some(99), all);
    share.grant(1_000_000_000);
    let mut shimmed = ready(&world, 1);
    let mut bare = world.probe("/usr/lib/tranche/driver/libcuda.so.1");
    bare.must("init");
    bare.must("context 0");
    for probe in [&mut shimmed, &mut bare] {
        probe.ask("steer fast 1");
    }
    let command = format!("time {what} {live}");
    // Nanoseconds for 1,000 are picoseconds for one.
    (
        shimmed.must(&command).number(0),
        bare.must(&command).number(0),
    )
}

#[test]
fn calls_stay_cheap() {
    for (what, live, most_ns) in [
        ("pass", 0, 20),
        ("alloc-free", 0, 600),
        ("alloc-free", 10_000, 800),
        ("refused", 0, 300),
        ("full", 0, 300),
        ("info", 0, 200),
        ("address", 0, 400),
        ("launch", 0, 60),
    ] {
        let (with, without) = measure(what, live);
        let added = with.saturating_sub(without) / 1000;
        println!(
            "{what:>10} with {live:>6} live: {:>7.1} ns, {:>6.1} ns without",
            Duration::from_nanos(with).as_secs_f64() * 1e6,
            Duration::from_nanos(without).as_secs_f64() * 1e6
        );
        assert!(added <= most_ns, "{what}: {added} ns added");
    }
}

/// Another program's work may last for a whole round.
const ROUNDS: usize = 10;

/// The tenth lowest of a hundred.
fn quick(times: impl Iterator<Item = Duration>) -> Duration {
    let mut times: Vec<_> = times.collect();
    times.sort_unstable();
    times[10]
}

#[test]
fn loading_stays_cheap() {
    let world = World::new(Driver::Odd);
    world.share("gpu-0", GPU_0, Some(CAP));
    world.share("gpu-1", GPU_1, Some(CAP));
    let time = |program: &Path, arguments: &[&str]| {
        let start = Instant::now();
        assert!(world.run(program, arguments).status.success());
        start.elapsed()
    };
    let programs = |driver: &str| {
        [
            time(Path::new("/bin/true"), &[]),
            time(&probe_path(), &[driver, "init"]),
        ]
    };
    // Alternating, because other work on the machine varies.
    let added = || {
        let turns: Vec<_> = (0..100)
            .map(|_| {
                world.with_preload();
                let with = programs("name");
                world.without_preload();
                (with, programs("/usr/lib/tranche/driver/libcuda.so.1"))
            })
            .collect();
        [(0, "a program without CUDA"), (1, "load and cuInit")].map(|(nth, what)| {
            let with = quick(turns.iter().map(|(with, _)| with[nth]));
            let without = quick(turns.iter().map(|(_, without)| without[nth]));
            println!("{what}: {with:?} and {without:?} without the shim");
            with.saturating_sub(without)
        })
    };
    let is_cheap = |[bare, init]: [Duration; 2]| {
        bare < Duration::from_millis(1) && init < Duration::from_millis(2)
    };
    assert!((0..ROUNDS).any(|_| is_cheap(added())));
}

/// Many processes join one share concurrently, and each gets its slot.
#[test]
fn three_hundred_processes_join_at_once() {
    let (world, share) = one_gpu();
    let start = Instant::now();
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
    println!("300 processes: {:?}", start.elapsed());
    assert_eq!(share.used(), 300 * crate::cap::BLOCK);
    assert_eq!(share.read(|account| account.processes().count()), 300);
    drop(probes);
    let mut last = ready(&world, 1);
    last.must(&format!("alloc {CAP}"));
    assert_eq!(share.read(|account| account.processes().count()), 1);
}
