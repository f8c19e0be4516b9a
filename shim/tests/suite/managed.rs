//! Shares of a GPU whose memory is oversubscribed: with managed memory they have more together than the GPU.

use std::sync::{Arc, Barrier};
use std::time::{Duration, Instant};

use tranche_shim_tests::{Driver, Machine, Node, Probe, Share, World};

use crate::cap::{BLOCK, CAP, GPU_0};
use crate::escape::WAYS;
use crate::families::context_memory;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const OUT_OF_MEMORY: i64 = 2;
const NOT_SUPPORTED: i64 = 801;
/// How much of the share's memory may be memory that cannot move.
const RESIDENT: u64 = CAP / 2;

/// A container with an oversubscribed share of the machine's GPU.
struct Oversubscribed {
    world: World,
    share: Share,
    context: u64,
    probe: Probe,
}

impl Oversubscribed {
    fn on(machine: Machine) -> Self {
        let world = World::new(Driver::Machine(machine, 1));
        let gpu = world.node().gpus().remove(0).uuid;
        let context = context_memory(&world);
        let share = world.share_oversubscribed("gpu-0", &gpu, (CAP, RESIDENT), context);
        let mut probe = world.probe("name");
        start(&mut probe);
        Self {
            world,
            share,
            context,
            probe,
        }
    }

    /// The accounts without the context: of all memory, and of memory that cannot move.
    fn used(&self) -> (u64, u64) {
        let beside = |bytes: u64| bytes - self.context;
        (beside(self.share.used()), beside(self.share.resident()))
    }

    /// Bytes of memory that cannot move, by NVML's count for its processes.
    fn unmovable(&self) -> u64 {
        self.world.node().processes().iter().sum()
    }
}

fn start(probe: &mut Probe) {
    probe.must("init");
    probe.must("primary 0");
}

/// Queries an attribute of a pointer; returns the code and the word.
fn attribute(probe: &mut Probe, which: u32, pointer: u64) -> (i64, u64) {
    probe.must("set 0 0");
    let code = probe.call(&format!("cuPointerGetAttribute &0 {which} {pointer}"));
    (code, probe.must("words 0 1").number(0))
}

#[test]
fn what_is_asked_for_as_device_memory_may_move() {
    for machine in Machine::ALL {
        let mut case = Oversubscribed::on(machine);
        let probe = &mut case.probe;
        let large = probe.must(&format!("alloc {GIB}")).number(0);
        let pitched = probe.must("pitch 1000 2048").number(0);
        let small: Vec<u64> = (0..4).map(|_| probe.must("alloc 4096").number(0)).collect();
        let managed = probe.must(&format!("managed {GIB}")).number(0);
        // The small ones may lie in two blocks.
        let used = case.used().0;
        assert_eq!(case.used().1, 0, "{machine:?}");
        assert!((2 * GIB + 2 * BLOCK..=2 * GIB + 3 * BLOCK).contains(&used));
        assert_eq!(case.unmovable(), case.context, "{machine:?}");
        let info = case.probe.must("info");
        assert_eq!((info.number(0), info.number(1)), (CAP - used, CAP));
        // All of the share, though only half of it may be memory that cannot move.
        let rest = case.probe.must(&format!("alloc {}", CAP - used)).number(0);
        assert_eq!(case.used(), (CAP, 0), "{machine:?}");
        for one in ["alloc 1", "managed 1", "async 1", "pitch 4 4"] {
            assert_eq!(case.probe.ask(one).code, OUT_OF_MEMORY, "{one}");
        }
        for pointer in [large, pitched, managed, rest].into_iter().chain(small) {
            case.probe.must(&format!("free {pointer}"));
        }
        assert_eq!(case.used(), (0, 0), "{machine:?}");
    }
}

#[test]
fn memory_that_cannot_move_has_its_own_limit() {
    let mut case = Oversubscribed::on(Machine::Realistic);
    let pooled = case
        .probe
        .must(&format!("async {}", RESIDENT / 2))
        .number(0);
    assert_eq!(case.used(), (RESIDENT / 2, RESIDENT / 2));
    case.probe.must("set 16 4294967297 1 0 0");
    let create = |bytes: u64| format!("cuMemCreate &0 {bytes} &16 0");
    let more = RESIDENT / 2 + BLOCK;
    assert_eq!(case.probe.call(&create(more)), OUT_OF_MEMORY);
    assert_eq!(case.probe.call(&create(RESIDENT / 2)), 0);
    assert_eq!(case.used(), (RESIDENT, RESIDENT));
    assert_eq!(case.probe.ask("async 1").code, OUT_OF_MEMORY);
    // The rest of its memory may move.
    case.probe.must(&format!("alloc {}", CAP - RESIDENT));
    assert_eq!(case.probe.ask("alloc 1").code, OUT_OF_MEMORY);
    // If movable memory takes all, nothing is left for memory that cannot move.
    case.probe.must(&format!("free-async {pooled}"));
    case.probe.must("synchronize");
    case.probe.must(&format!("alloc {}", RESIDENT / 2));
    assert_eq!(case.used(), (CAP, RESIDENT / 2));
    assert_eq!(case.probe.ask("async 1").code, OUT_OF_MEMORY);
}

/// In no way does a share get more memory that cannot move than its limit for that.
#[test]
fn no_way_to_take_memory_exceeds_the_resident_limit() {
    for (how, fill) in WAYS {
        let mut case = Oversubscribed::on(Machine::Realistic);
        let most = RESIDENT + case.context;
        for _ in 0..24 {
            fill(&mut case.probe, CAP / 20);
            let (unmovable, charged) = (case.unmovable(), case.share.resident());
            assert!(
                unmovable <= most && charged <= most && unmovable <= charged,
                "{how}: {unmovable} bytes, {charged} charged, of {most}"
            );
        }
        let (peak, limit) = (case.world.node().peak(0), CAP + case.context);
        assert!(peak <= limit, "{how}: {peak} bytes of {limit}");
    }
}

/// Two containers with more memory together than the GPU has; both use all of it.
#[test]
fn shares_have_more_together_than_the_gpu() {
    const EACH: u64 = 60 * GIB;
    const GPU: u64 = 80 * GIB;
    let root = std::env::temp_dir().join(format!("tranche-shim-{}-over", std::process::id()));
    let node = Arc::new(Node::start(root, Machine::Realistic, 1));
    let gpu = node.gpus().remove(0).uuid;
    let turns = Barrier::new(2);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                let world = World::on(&node);
                let sizes = (EACH, EACH / 2);
                let share = world.share_oversubscribed("gpu-0", &gpu, sizes, GIB);
                let mut probe = world.probe("name");
                start(&mut probe);
                let touch = "kernel sim_busy_1us_sim_touch_managed";
                let touch = probe.must(touch).number(0);
                let all = probe.must(&format!("alloc {}", EACH - GIB)).number(0);
                for _ in 0..4 {
                    turns.wait();
                    probe.must(&format!("launch-grid {touch} 1 0"));
                    probe.must("synchronize");
                    let used = node.gpus()[0].used;
                    assert!((EACH..=GPU).contains(&used), "{used} bytes of the GPU");
                }
                turns.wait();
                probe.must(&format!("free {all}"));
                assert!(share.used() < 2 * GIB);
            });
        }
    });
}

#[test]
fn managed_memory_is_described_as_device_memory() {
    const MEMORY_TYPE: u32 = 2;
    const HOST_POINTER: u32 = 4;
    const IS_MANAGED: u32 = 8;
    let mut case = Oversubscribed::on(Machine::Realistic);
    let probe = &mut case.probe;
    let pointer = probe.must(&format!("alloc {}", 4 * MIB)).number(0);
    for at in [pointer, pointer + 3 * MIB] {
        assert_eq!(attribute(probe, IS_MANAGED, at), (0, 0));
        assert_eq!(attribute(probe, MEMORY_TYPE, at), (0, 2));
        assert_eq!(attribute(probe, HOST_POINTER, at).0, 1, "invalid value");
        // As cudaPointerGetAttributes asks: the type, the pointer for the host, and whether it is managed.
        probe.must("set 0 9 9 9");
        probe.must(&format!(
            "set 8 {} {IS_MANAGED}",
            u64::from(MEMORY_TYPE) | u64::from(HOST_POINTER) << 32
        ));
        for (word, value) in [(16, 0), (17, 1), (18, 2)] {
            probe.must(&format!("address-of {word} {value}"));
        }
        assert_eq!(
            probe.call(&format!("cuPointerGetAttributes 3 &8 &16 {at}")),
            0
        );
        let told = probe.must("words 0 3");
        let low = |nth: usize| told.number(nth) & u64::from(u32::MAX);
        assert_eq!((low(0), told.number(1), low(2)), (2, 0, 0));
    }
    // Memory that was asked for as managed memory is described as such.
    let managed = probe.must(&format!("managed {}", 4 * MIB)).number(0);
    assert_eq!(attribute(probe, IS_MANAGED, managed), (0, 1));
    assert_eq!(attribute(probe, HOST_POINTER, managed), (0, managed));
}

#[test]
fn it_has_no_handle_for_other_processes() {
    let world = World::new(Driver::Odd);
    world.share_oversubscribed("gpu-0", GPU_0, (CAP, RESIDENT), 0);
    let mut probe = world.probe("name");
    probe.ask("steer devices 1");
    probe.ask("steer moves_managed 1");
    start_odd(&mut probe);
    let pointer = probe.must("alloc 4096").number(0);
    let export = |pointer: u64| format!("cuIpcGetMemHandle &0 {pointer}");
    assert_eq!(probe.call(&export(pointer)), NOT_SUPPORTED);
    let pooled = probe.must("async 4096").number(0);
    assert_eq!(probe.call(&export(pooled)), 0);
}

fn start_odd(probe: &mut Probe) {
    probe.must("init");
    probe.must("context 0");
}

/// A process that is killed leaves nothing in either account.
#[test]
fn what_dead_processes_left_is_taken_back_from_both_accounts() {
    let mut case = Oversubscribed::on(Machine::Realistic);
    let mut other = case.world.probe("name");
    start(&mut other);
    other.must(&format!("async {GIB}"));
    other.must(&format!("alloc {}", CAP - 4 * GIB));
    other.kill();
    // More than the two processes leave for each other.
    let start = Instant::now();
    while case.probe.ask(&format!("alloc {}", CAP - 4 * GIB)).code != 0 {
        assert!(start.elapsed() < Duration::from_secs(20), "still charged");
        std::thread::yield_now();
    }
    case.probe.must(&format!("async {}", 2 * GIB));
    let (memory, resident) = case.used();
    assert_eq!((memory, resident), (CAP - 2 * GIB, 2 * GIB));
}
