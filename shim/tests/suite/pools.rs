//! What a pool gives back is free for every process of the share, although the driver is rarely asked about it.

use std::time::{Duration, Instant};

use tranche_shim_tests::{Machine, Probe};

use crate::cap::{BLOCK, CAP, one_gpu, ready};
use crate::families::Case;

const INVALID_VALUE: i64 = 1;
const OUT_OF_MEMORY: i64 = 2;

/// After so many waits, the driver is asked about one more pool.
const WAITS: u64 = 64;

/// How often the driver was asked about streams and pools since the last time.
fn asked(probe: &mut Probe, before: &mut i64) -> i64 {
    let now = probe.ask("steer asked 0").code;
    now - std::mem::replace(before, now)
}

#[test]
fn the_driver_is_rarely_asked() {
    const PAIRS: u64 = 400;
    let (world, share) = one_gpu();
    let mut probe = ready(&world, 1);
    probe.must("async 4096");
    let mut before = 0;
    asked(&mut probe, &mut before);
    for _ in 0..PAIRS {
        let pointer = probe.must("async 4096").number(0);
        probe.must(&format!("free-async {pointer}"));
        // Half of the most that is noted without asking.
        assert!((BLOCK..=BLOCK + (16 << 20)).contains(&share.used()));
    }
    // At first the process has no spare: it grows by a block with each time that the driver is asked.
    let most = i64::try_from(PAIRS / 8).unwrap() + 20;
    let found = asked(&mut probe, &mut before);
    assert!((1..=most).contains(&found), "{found} times");
    // The first of these asks.
    probe.must("synchronize");
    assert_eq!(share.used(), BLOCK);
    asked(&mut probe, &mut before);
    for _ in 0..WAITS {
        probe.must("synchronize");
        assert_eq!(probe.must("info").number(0), CAP - BLOCK);
    }
    assert_eq!(asked(&mut probe, &mut before), 1);
}

/// A pool that may keep what it does not use is not asked about, and what it gives back nevertheless is noticed.
#[test]
fn a_pool_below_its_threshold_is_rarely_asked_about() {
    let (world, share) = one_gpu();
    let mut probe = ready(&world, 1);
    probe.ask("steer pool_keeps 1");
    let pointer = probe.must(&format!("async {}", 8 * BLOCK)).number(0);
    probe.must(&format!("free-async {pointer}"));
    probe.must("synchronize");
    let mut before = 0;
    asked(&mut probe, &mut before);
    for _ in 0..10 {
        probe.must("synchronize");
    }
    assert_eq!(asked(&mut probe, &mut before), 0);
    assert_eq!(share.used(), 8 * BLOCK);
    // Not the driver's promise.
    probe.ask("steer pool_keeps 0");
    for _ in 0..WAITS {
        probe.must("synchronize");
    }
    assert_eq!(share.used(), 0);
}

/// A stream's free is carried out after other streams were waited for, several times.
#[test]
fn what_is_given_back_at_the_last_wait_is_free_for_others() {
    const MOST: u64 = CAP / 2;
    let mut case = Case::on(Machine::Realistic);
    let mut other = case.world.probe("name");
    other.must("init");
    other.must("primary 0");
    let probe = &mut case.probe;
    let slow = probe.must("kernel sim_busy_1000ms").number(0);
    // Its code is loaded by its first launch.
    probe.must(&format!("launch-grid {slow} 1 0"));
    probe.must("synchronize");
    let [busy, idle] = [(); 2].map(|()| probe.get("cuStreamCreate &0 1"));
    let pointer = probe.get(&format!("cuMemAllocAsync &0 {MOST} {busy}"));
    let start = Instant::now();
    probe.must(&format!("launch-grid {slow} 1 {busy}"));
    assert_eq!(probe.call(&format!("cuMemFreeAsync {pointer} {busy}")), 0);
    for _ in 0..4 {
        assert_eq!(probe.call(&format!("cuStreamSynchronize {idle}")), 0);
    }
    let all = format!("alloc {}", CAP - (1 << 30));
    if start.elapsed() < Duration::from_millis(900) {
        assert_eq!(other.ask(&all).code, OUT_OF_MEMORY, "it is in use");
    }
    assert_eq!(probe.call(&format!("cuStreamSynchronize {busy}")), 0);
    other.must(&all);
}

/// What is out of use only after the program has waited, but before the driver is asked, is given back by the next wait.
#[test]
fn what_goes_out_of_use_after_a_wait_is_given_back_by_the_next() {
    let (world, share) = one_gpu();
    let mut probe = ready(&world, 1);
    probe.ask("steer frees_wait 1");
    for late in 1..5 {
        let pointer = probe.must(&format!("async {}", CAP / 2)).number(0);
        probe.ask(&format!("steer frees_last {late}"));
        probe.must(&format!("free-async {pointer}"));
        for _ in 0..late {
            probe.must("synchronize");
            assert_eq!(share.used(), CAP / 2, "late by {late}");
        }
        probe.must("synchronize");
        assert_eq!(share.used(), 0, "late by {late}");
    }
}

/// The driver cannot be asked about a pool that it has destroyed.
#[test]
fn what_a_destroyed_pool_has_yet_to_free_is_charged() {
    const MOST: u64 = CAP / 2;
    for is_freed_first in [true, false] {
        let mut case = Case::on(Machine::Realistic);
        let probe = &mut case.probe;
        let slow = probe.must("kernel sim_busy_1000ms").number(0);
        probe.must(&format!("launch-grid {slow} 1 0"));
        probe.must("synchronize");
        let default = probe.get("cuDeviceGetMemPool &0 0");
        let busy = probe.get("cuStreamCreate &0 1");
        probe.must("set 16 1 1 0 0 0 0 0 0 0 0 0");
        let pool = probe.get("cuMemPoolCreate &0 &16");
        assert_eq!(probe.call(&format!("cuDeviceSetMemPool 0 {pool}")), 0);
        let pointer = probe.get(&format!("cuMemAllocAsync &0 {MOST} {busy}"));
        let start = Instant::now();
        probe.must(&format!("launch-grid {slow} 1 {busy}"));
        let free = format!("cuMemFreeAsync {pointer} {busy}");
        let destroy = format!("cuMemPoolDestroy {pool}");
        let [first, last] = if is_freed_first {
            [free, destroy.clone()]
        } else {
            [destroy.clone(), free]
        };
        assert_eq!(probe.call(&first), 0);
        assert_eq!(probe.call(&last), 0);
        // For the program it is destroyed.
        assert_eq!(probe.get("cuDeviceGetMemPool &0 0"), default);
        assert_eq!(probe.call(&destroy), INVALID_VALUE);
        let held = case.world.node().gpus()[0].used;
        if start.elapsed() < Duration::from_millis(900) {
            assert!(held >= MOST, "the call has waited for the kernel");
        }
        assert!(held <= case.share.used(), "{held} bytes are held");
        let probe = &mut case.probe;
        assert_eq!(probe.call(&format!("cuStreamSynchronize {busy}")), 0);
        assert!(case.share.used() < MOST);
        assert!(case.world.node().gpus()[0].used < MOST);
        // Also for the driver.
        let ask = format!("cuMemPoolGetAttribute {pool} 5 &32");
        assert_ne!(case.probe.call(&ask), 0);
    }
}

/// A process can have 1,024 pools at a time, and any number one after another.
#[test]
fn destroyed_pools_leave_room_for_others() {
    let mut case = Case::new();
    for _ in 0..1_100 {
        let probe = &mut case.probe;
        probe.must("set 16 1 1 0 0 0 0 0 0 0 0 0");
        let pool = probe.get("cuMemPoolCreate &0 &16");
        let pointer = probe.get(&format!("cuMemAllocFromPoolAsync &0 4096 {pool} 0"));
        assert_eq!(probe.call(&format!("cuMemPoolDestroy {pool}")), 0);
        assert_eq!(probe.call(&format!("cuMemFreeAsync {pointer} 0")), 0);
    }
    case.holds(0);
}

/// A pool that keeps its memory gives it back when its threshold is lowered, or when it is trimmed.
#[test]
fn a_quiet_pool_gives_back_when_the_program_says_so() {
    const PIECE: u64 = 64 << 20;
    for simple in [true, false] {
        let machine = if simple {
            Machine::Simple
        } else {
            Machine::Realistic
        };
        let mut case = Case::on(machine);
        let pool = case.probe.get("cuDeviceGetDefaultMemPool &0 0");
        for change in ["cuMemPoolTrimTo {} 0", "cuMemPoolSetAttribute {} 4 &40"] {
            let probe = &mut case.probe;
            probe.must(&format!("set 32 {}", u64::MAX));
            probe.must("set 40 0");
            let call = format!("cuMemPoolSetAttribute {pool} 4 &32");
            assert_eq!(probe.call(&call), 0);
            let pointer = probe.must(&format!("async {PIECE}")).number(0);
            probe.must(&format!("free-async {pointer}"));
            for _ in 0..4 {
                probe.must("synchronize");
            }
            case.holds(PIECE);
            let probe = &mut case.probe;
            assert_eq!(probe.call(&change.replace("{}", &pool.to_string())), 0);
            // The realistic driver gives back what is above the threshold at the next wait.
            if !simple {
                probe.must("synchronize");
            }
            case.holds(0);
        }
    }
}
