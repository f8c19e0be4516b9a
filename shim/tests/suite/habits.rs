//! The habits of the realistic machine's driver that the simple one does not have, as a program without the shim sees
//! them. The other suites on that machine rely on these habits.

use std::path::Path;
use std::time::{Duration, Instant};

use tranche_shim_tests::{DRIVER, Driver, Machine, Probe, World, install, real_drivers};

use crate::families::{create, reserve};
use crate::real::{RELEASES, functions};

const MIB: u64 = 1 << 20;
const BLOCK: u64 = 2 * MIB;
const DONE: i64 = 0;
const OUT_OF_MEMORY: i64 = 2;

/// A program on a machine with one GPU.
struct Bare {
    world: World,
    probe: Probe,
    /// What the GPU holds without any allocation.
    context: u64,
}

impl Bare {
    fn on(machine: Machine) -> Self {
        let world = World::new(Driver::Machine(machine, 1));
        let mut bare = Self {
            probe: world.probe(DRIVER),
            world,
            context: 0,
        };
        start(&mut bare.probe);
        bare.context = bare.world.node().gpus()[0].used;
        bare
    }

    /// Bytes of the GPU beside the context.
    fn held(&self) -> u64 {
        self.world.node().gpus()[0].used - self.context
    }

    fn call(&mut self, call: &str) {
        assert_eq!(self.probe.call(call), DONE, "{call}");
    }
}

fn start(probe: &mut Probe) {
    probe.must("init");
    probe.must("primary 0");
}

/// The results of the same steps on the simple and on the realistic machine.
fn on_both(steps: impl Fn(&mut Bare) -> Vec<u64>) -> [Vec<u64>; 2] {
    Machine::ALL.map(|machine| steps(&mut Bare::on(machine)))
}

/// The functions of a driver's libcuda are those of the simulated one that is installed for its CUDA version.
#[test]
fn a_drivers_functions_are_what_a_machine_of_its_version_has() {
    for (release, cuda) in RELEASES.into_iter().zip([12_020, 12_040]) {
        let driver = real_drivers().join(release);
        let version = std::fs::read_to_string(driver.join("version")).unwrap();
        let root =
            std::env::temp_dir().join(format!("tranche-api-{release}-{}", std::process::id()));
        install(&root, Machine::Realistic, 1, (version.trim(), cuda));
        let of_cuda = |library: &Path| {
            let mut functions = functions(library);
            // The debugger's interface is not part of CUDA.
            functions.retain(|name| name.starts_with("cu") && !name.starts_with("cudbg"));
            functions
        };
        let ours = of_cuda(&root.join("usr/lib/x86_64-linux-gnu/libcuda.so.1"));
        let theirs = of_cuda(&driver.join("libcuda.so.1"));
        std::fs::remove_dir_all(&root).unwrap();
        assert!(theirs.len() > 500, "{release}");
        assert_eq!(ours, theirs, "{release}");
    }
}

#[test]
fn a_pool_returns_memory_when_the_program_waits() {
    let found = on_both(|bare| {
        let first = bare.probe.must(&format!("async {}", 64 * MIB)).number(0);
        bare.probe.must(&format!("free-async {first}"));
        let freed = bare.held();
        bare.probe.must("synchronize");
        vec![freed, bare.held()]
    });
    assert_eq!(found, [vec![0, 0], vec![64 * MIB, 0]]);
}

#[test]
fn what_a_stream_frees_is_in_use_until_the_stream_gets_there() {
    let mut bare = Bare::on(Machine::Realistic);
    let used = |bare: &mut Bare, pool: u64| {
        bare.call(&format!("cuMemPoolGetAttribute {pool} 7 &8"));
        bare.probe.must("words 8 1").number(0)
    };
    let pool = bare.probe.get("cuDeviceGetDefaultMemPool &0 0");
    let slow = bare.probe.must("kernel sim_busy_2000ms").number(0);
    let first = bare.probe.must(&format!("async {}", 64 * MIB)).number(0);
    bare.probe.must(&format!("launch-grid {slow} 1 0"));
    bare.probe.must(&format!("free-async {first}"));
    assert_eq!(used(&mut bare, pool), 64 * MIB, "the kernel still runs");
    assert_ne!(
        bare.probe.call(&format!("cuMemFreeAsync {first} 0")),
        DONE,
        "freed twice"
    );
    // Another stream's allocation takes new memory; the same stream's reuses the freed memory.
    let other = bare.probe.get("cuStreamCreate &0 1");
    bare.probe
        .get(&format!("cuMemAllocAsync &0 {} {other}", 64 * MIB));
    bare.call(&format!("cuMemPoolGetAttribute {pool} 5 &8"));
    assert_eq!(bare.probe.must("words 8 1").number(0), 128 * MIB);
    let again = bare.probe.must(&format!("async {}", 64 * MIB)).number(0);
    assert_eq!(again, first);
    bare.probe.must("synchronize");
    assert_eq!(used(&mut bare, pool), 128 * MIB);
}

/// If there is no memory, an allocation waits for another stream's free.
#[test]
fn an_allocation_waits_for_another_streams_free_before_it_fails() {
    let mut bare = Bare::on(Machine::Realistic);
    let free = bare.probe.must("info").number(0);
    let slow = bare.probe.must("kernel sim_busy_100ms").number(0);
    // Its code takes memory too.
    bare.probe.must(&format!("launch-grid {slow} 1 0"));
    let most = free / BLOCK * BLOCK - BLOCK;
    let all = bare.probe.must(&format!("async {most}")).number(0);
    assert_eq!(
        bare.probe.ask(&format!("async {BLOCK}")).code,
        OUT_OF_MEMORY
    );
    bare.probe.must(&format!("launch-grid {slow} 1 0"));
    bare.probe.must(&format!("free-async {all}"));
    let other = bare.probe.get("cuStreamCreate &0 1");
    bare.probe
        .get(&format!("cuMemAllocAsync &0 {most} {other}"));
}

#[test]
fn a_free_waits_for_the_work_of_its_context() {
    let took = |machine| {
        let mut bare = Bare::on(machine);
        let slow = bare.probe.must("kernel sim_busy_200ms").number(0);
        let memory = bare.probe.must("alloc 4096").number(0);
        let start = Instant::now();
        bare.probe.must(&format!("launch-grid {slow} 1 0"));
        bare.probe.must(&format!("free {memory}"));
        start.elapsed()
    };
    let quickest = |machine| (0..3).map(|_| took(machine)).min().unwrap();
    let [simple, realistic] = Machine::ALL.map(quickest);
    // The kernel cannot have ended earlier.
    let kernel = Duration::from_millis(200);
    assert!(
        simple < kernel && realistic >= kernel,
        "{realistic:?} {simple:?}"
    );
}

#[test]
fn code_takes_memory_at_its_first_launch() {
    let found = on_both(|bare| {
        let kernel = bare.probe.must("kernel sim_busy_1us").number(0);
        let looked_up = bare.held();
        bare.call(&format!("cuFuncIsLoaded &8 {kernel}"));
        let was_loaded = bare.probe.must("words 8 1").number(0) & 1;
        bare.probe.must(&format!("launch-grid {kernel} 1 0"));
        let launched = bare.held();
        bare.probe.must("unload-last");
        vec![looked_up, was_loaded, launched, bare.held()]
    });
    assert_eq!(found, [vec![0, 1, 0, 0], vec![0, 0, BLOCK, 0]]);
    // Or at once, if the program wants that.
    let world = World::new(Driver::Simulator(1));
    let mut command = world.command(tranche_shim_tests::probe_path());
    let mut probe = Probe::by(command.arg(DRIVER).env("CUDA_MODULE_LOADING", "EAGER"));
    start(&mut probe);
    let context = world.node().gpus()[0].used;
    probe.must("kernel sim_busy_1us");
    assert_eq!(world.node().gpus()[0].used - context, BLOCK);
}

#[test]
fn a_graphs_memory_is_there_from_its_launch_until_a_trim() {
    let found = on_both(|bare| {
        let graph = bare.probe.get("cuGraphCreate &0 0");
        bare.probe
            .must(&format!("set 16 1 1 0 0 0 0 0 0 0 0 0 0 0 {} 0", 64 * MIB));
        bare.probe
            .get(&format!("cuGraphAddMemAllocNode &0 {graph} 0 0 &16"));
        let executable = bare
            .probe
            .get(&format!("cuGraphInstantiateWithFlags &0 {graph} 0"));
        let mut held = vec![bare.held()];
        for call in [
            format!("cuGraphLaunch {executable} 0"),
            format!("cuGraphExecDestroy {executable}"),
            format!("cuGraphDestroy {graph}"),
            "cuCtxSynchronize".into(),
            "cuDeviceGraphMemTrim 0".into(),
        ] {
            bare.call(&call);
            held.push(bare.held() / MIB);
        }
        held
    });
    assert_eq!(found[0][1..], [64, 64, 0, 0, 0]);
    assert_eq!(found[1], [0, 64, 64, 64, 64, 0]);
    assert_eq!(found[0][0], 64 * MIB);
}

#[test]
fn managed_memory_is_the_gpus_while_the_gpu_uses_it() {
    let found = on_both(|bare| {
        let memory = bare.probe.must(&format!("managed {}", 64 * MIB)).number(0);
        let mut held = vec![bare.held() / MIB];
        for (gpu, step) in [("to the GPU", 0), ("to the host", -1), ("and back", 0)] {
            // A negative number, as a word.
            let step = i64::from(step).cast_unsigned();
            assert_eq!(
                bare.probe.call(&format!(
                    "cuMemPrefetchAsync {memory} {} {step} 0",
                    64 * MIB
                )),
                DONE,
                "{gpu}"
            );
            held.push(bare.held() / MIB);
        }
        bare.probe.must(&format!("free {memory}"));
        held.push(bare.held() / MIB);
        // A kernel that uses it, and others that need the room.
        let more = bare.probe.must(&format!("managed {}", 64 * MIB)).number(0);
        let kernel = bare
            .probe
            .must("kernel sim_busy_1us_sim_touch_managed")
            .number(0);
        bare.probe.must(&format!("launch-grid {kernel} 1 0"));
        bare.probe.must("unload-last");
        held.push(bare.held() / MIB);
        let free = bare.probe.must("info").number(0);
        let all = bare
            .probe
            .must(&format!("alloc {}", free + held[5] * MIB))
            .number(0);
        bare.probe.must(&format!("free {all}"));
        held.push(bare.held() / MIB);
        bare.probe.must(&format!("free {more}"));
        held
    });
    assert_eq!(found, [vec![0; 7], vec![0, 64, 0, 64, 0, 64, 0]]);
}

/// On the simple machine managed memory takes no GPU memory.
#[test]
fn managed_memory_gives_way_to_other_processes() {
    let mut bare = Bare::on(Machine::Realistic);
    let free = bare.probe.must("info").number(0);
    let half = (free / 2) & !(BLOCK - 1);
    let memory = bare.probe.must(&format!("managed {half}")).number(0);
    let prefetch = format!("cuMemPrefetchAsync {memory} {half} 0 0");
    bare.call(&prefetch);
    assert_eq!(bare.held(), half);
    let mut other = bare.world.probe(DRIVER);
    start(&mut other);
    let left = other.must("info").number(0);
    // The free memory, and half of what the first process has there.
    let most = left + half / 2;
    let taken = other.must(&format!("alloc {most}")).number(0);
    let total = bare.world.node().gpus()[0].used;
    assert!(bare.held() < half + most, "{total} bytes");
    assert_eq!(other.must("info").number(0), 0);
    // Memory that cannot move is not evicted.
    assert_eq!(other.ask(&format!("alloc {half}")).code, OUT_OF_MEMORY);
    // It moves back when it is used, if there is room.
    other.must(&format!("free {taken}"));
    let without = bare.held();
    bare.call(&prefetch);
    assert!(bare.held() > without, "{} bytes", bare.held());
    bare.probe.must(&format!("free {memory}"));
    assert_eq!(bare.world.node().gpus()[0].used, 2 * bare.context);
}

/// NVML counts managed memory for the GPU, and for no process.
#[test]
fn managed_memory_counts_for_no_process() {
    let mut bare = Bare::on(Machine::Realistic);
    let memory = bare.probe.must(&format!("managed {}", 64 * MIB)).number(0);
    bare.call(&format!("cuMemPrefetchAsync {memory} {} 0 0", 64 * MIB));
    assert_eq!(bare.held(), 64 * MIB);
    assert_eq!(bare.world.node().processes(), [bare.context]);
}

#[test]
fn whatever_is_smaller_than_a_block_shares_blocks() {
    let found = on_both(|bare| {
        // On the simple one, each size class has a block, and an allocation larger than half a block has its own.
        for bytes in [512, 4096, 100_000, 3 * BLOCK / 4] {
            bare.probe.must(&format!("alloc {bytes}"));
        }
        vec![bare.held() / BLOCK]
    });
    assert_eq!(found, [vec![4], vec![1]]);
}

#[test]
fn only_whole_allocations_are_mapped() {
    let found = on_both(|bare| {
        let handle = create(&mut bare.probe, 4 * BLOCK);
        let base = reserve(&mut bare.probe, 8 * BLOCK);
        let map = |blocks| {
            let bytes = blocks * BLOCK;
            let call = format!("cuMemMap {base} {bytes} 0 {handle} 0");
            let is_mapped = bare.probe.call(&call) == DONE;
            if is_mapped {
                bare.call(&format!("cuMemUnmap {base} {bytes}"));
            }
            u64::from(is_mapped)
        };
        [1, 2, 3, 4, 5].map(map).to_vec()
    });
    assert_eq!(found, [[1, 1, 1, 1, 0], [0, 0, 0, 1, 0]]);
}

#[test]
fn a_launch_takes_time_and_waits_where_a_thousand_wait() {
    let mut bare = Bare::on(Machine::Realistic);
    let empty = bare.probe.must("kernel sim_busy_0us").number(0);
    let start = Instant::now();
    for _ in 0..100 {
        bare.probe.must(&format!("launch-grid {empty} 1 0"));
    }
    assert!(start.elapsed() >= Duration::from_micros(100 * 4));
    // 1,024 kernels of a millisecond are queued; the next has to wait for the first.
    let kernel = bare.probe.must("kernel sim_busy_1ms").number(0);
    let start = Instant::now();
    let answer = bare.probe.must(&format!("launch plain {kernel} 1200 0"));
    assert!(answer.number(0) > 1024, "{answer:?}");
    assert!(start.elapsed() >= Duration::from_millis(answer.number(0) - 1024 - 1));
}
