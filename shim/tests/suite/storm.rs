//! Processes and threads that take memory at random, in every way. The machine counts whether they ever had
//! more than their cap, at any instant.
//!
//! The number of operations is small, because the suite runs often; `TRANCHE_STORM` multiplies it:
//!
//! ```console
//! $ TRANCHE_STORM=10000 cargo test --release -p tranche-shim-tests storm -- --nocapture
//! ```

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use tranche_shim_tests::{Answer, Machine, Probe};

use crate::cap::{CAP, one_gpu, ready};
use crate::families::Case;

const THREADS: u64 = 4;

/// Operations of each thread.
fn operations(few: u64) -> u64 {
    let times = std::env::var("TRANCHE_STORM").map_or(1, |times| times.parse().unwrap());
    few * times
}

/// It is random which of the processes finds the cap full, but one of them always does.
fn check(answers: &[Answer]) {
    let [taken, refused, failed] = [0, 1, 2].map(|nth| {
        let each = answers.iter().map(|answer| answer.number(nth));
        each.sum::<u64>()
    });
    println!("{taken} times memory was taken, {refused} times refused");
    assert!(
        taken > 0 && refused > 0,
        "the cap was never full: {answers:?}"
    );
    assert_eq!(failed, 0, "no other error");
}

#[test]
fn two_processes_never_have_more_than_the_cap() {
    for machine in Machine::ALL {
        two_processes(machine);
    }
}

fn two_processes(machine: Machine) {
    let mut case = Case::on(machine);
    let mut probes: Vec<Probe> = (0..2).map(|_| case.world.probe("name")).collect();
    for probe in &mut probes {
        probe.must("init");
        probe.must("primary 0");
    }
    case.probe.must("unprimary 0");
    // Up to a sixteenth of the cap: two processes of four threads fill it.
    for probe in &mut probes {
        probe.send(&format!(
            "storm {THREADS} {} {}",
            operations(2000),
            CAP / 16
        ));
    }
    let answers: Vec<Answer> = probes.iter_mut().map(Probe::receive).collect();
    check(&answers);
    let limit = CAP + case.context;
    let (peak, counted) = (case.peak(), case.share.read(|account| account.peak()));
    println!("{machine:?}: {peak} bytes of {limit} at most, {counted} counted");
    assert!(
        peak <= limit && counted <= limit,
        "{machine:?}: {peak} {counted} {limit}"
    );
    assert!(
        peak > limit / 4 * 3,
        "{machine:?}: it was never full: {peak} of {limit}"
    );
    // All was given back, except for two contexts.
    for probe in &mut probes {
        probe.must("synchronize");
        assert_eq!(probe.call("cuDeviceGraphMemTrim 0"), 0);
    }
    case.holds(case.context);
}

/// The same with processes that are killed meanwhile: their neighbours can use what they had.
#[test]
fn killed_processes_never_have_more_than_the_cap() {
    for machine in Machine::ALL {
        with_kills(machine, 2, 1, THREADS, operations(3000));
    }
}

/// As many processes and threads as in a busy share. With `TRANCHE_STORM=10000` these are a hundred million operations.
#[test]
fn sixteen_processes_never_have_more_than_the_cap() {
    for machine in Machine::ALL {
        with_kills(machine, 12, 4, 8, operations(100));
    }
}

/// So many processes of so many threads and operations each, and beside them so many that are killed
/// and started again until the others are done.
fn with_kills(machine: Machine, steady: usize, killed: usize, threads: u64, operations: u64) {
    let mut case = Case::on(machine);
    let mut steady: Vec<Probe> = (0..steady).map(|_| case.world.probe("name")).collect();
    for probe in &mut steady {
        probe.must("init");
        probe.must("primary 0");
    }
    let work = format!("storm {threads} {operations} {}", CAP / 16);
    for probe in &mut steady {
        probe.send(&work);
    }
    let limit = CAP + case.context;
    let kills = AtomicU64::new(0);
    let answers = std::thread::scope(|scope| {
        let workers: Vec<_> = steady
            .iter_mut()
            .map(|probe| scope.spawn(|| probe.receive()))
            .collect();
        let busy = || workers.iter().any(|worker| !worker.is_finished());
        let (case, kills) = (&case, &kills);
        std::thread::scope(|scope| {
            for _ in 0..killed {
                scope.spawn(|| {
                    while kills.load(Ordering::Relaxed) < 10 || busy() {
                        let mut victim = case.world.probe("name");
                        victim.must("init");
                        // A full share has no room for another context.
                        if victim.ask("primary 0").code == 0 {
                            victim.send(&format!("storm {threads} 1000000 {}", CAP / 16));
                            std::thread::sleep(Duration::from_millis(5));
                        }
                        assert!(case.share.used() <= limit);
                        victim.kill();
                        kills.fetch_add(1, Ordering::Relaxed);
                    }
                });
            }
        });
        workers
            .into_iter()
            .map(|worker| worker.join().unwrap())
            .collect::<Vec<_>>()
    });
    println!(
        "{} operations, {} kills",
        steady.len() as u64 * threads * operations,
        kills.into_inner()
    );
    check(&answers);
    let (peak, counted) = (case.peak(), case.share.read(|account| account.peak()));
    println!("{machine:?}: {peak} bytes of {limit} at most, {counted} counted");
    assert!(
        peak <= limit && counted <= limit,
        "{machine:?}: {peak} {counted} {limit}"
    );
    drop(steady);
    // A process that needs it reclaims what dead ones had; the daemon needs a moment to notice their end.
    case.probe.kill();
    let start = Instant::now();
    loop {
        let mut last = case.world.probe("name");
        last.must("init");
        let context = last.ask("primary 0").code;
        let all = last.ask(&format!("alloc {CAP}")).code;
        let used = case.share.used();
        if (used, context, all) == (limit, 0, 0) {
            break;
        }
        assert!(
            start.elapsed() < Duration::from_secs(5),
            "{used} bytes stay charged; a context: {context}, all of the cap: {all}"
        );
    }
}

/// Plain allocations with the scripted driver, where threads are fast.
#[test]
fn a_fast_driver_never_gives_more_than_the_cap() {
    let (world, share) = one_gpu();
    let mut probe = ready(&world, 1);
    let answer = probe.must(&format!("threads 8 {} {}", operations(20_000), CAP / 16));
    check(&[answer]);
    assert!(share.read(|account| account.peak()) <= CAP);
    assert_eq!(share.used(), 0);
}
