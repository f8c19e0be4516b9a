//! Local memory: the machine's driver takes it when a kernel is launched that needs more than any earlier one, for as
//! many threads as the GPU runs at a time. The share is charged before.

use tranche_shim_tests::{Driver, Machine, Probe, Share, World};

use crate::cap::{BLOCK, CAP, one_gpu, ready};

const OUT_OF_MEMORY: i64 = 2;
/// The simulated H100's value.
const THREADS: u64 = 132 * 2048;

/// The charge of the kernels' code.
const CODE: u64 = BLOCK;

/// The charge of a share without the code of its kernels.
fn charged(share: &Share) -> u64 {
    share.used() - CODE
}

/// On the simple machine, where code takes no memory.
fn container(cap: u64) -> (World, Share, Probe) {
    let world = World::new(Driver::Machine(Machine::Simple, 1));
    let gpu = world.node().gpus()[0].uuid.clone();
    let share = world.share("gpu-0", &gpu, Some(cap));
    let mut probe = world.probe("name");
    probe.must("init");
    probe.must("primary 0");
    (world, share, probe)
}

/// How much a kernel with so many bytes per thread takes, beyond what every context has.
fn taken(bytes: u64) -> u64 {
    ((bytes - 1024) * THREADS).next_multiple_of(BLOCK)
}

/// What the GPU holds beside the context, as the machine counts it.
fn held(world: &World) -> u64 {
    const CONTEXT: u64 = 518 << 20;
    world.node().gpus()[0].used - CONTEXT
}

fn kernel(probe: &mut Probe, bytes: u64) -> u64 {
    probe
        .must(&format!("kernel sim_busy_1us_sim_local_{bytes}"))
        .number(0)
}

#[test]
fn local_memory_is_charged_before_the_launch() {
    let (world, share, mut probe) = container(CAP);
    let small = kernel(&mut probe, 512);
    probe.must(&format!("launch-grid {small} 1 0"));
    assert_eq!(
        (charged(&share), held(&world)),
        (0, 0),
        "part of the context"
    );
    let large = kernel(&mut probe, 65_536);
    assert_eq!(charged(&share), 0, "not for a look-up");
    for grid in 1..10 {
        probe.must(&format!("launch-grid {large} {grid} 0"));
    }
    let whole = taken(65_536);
    assert_eq!((charged(&share), held(&world)), (whole, whole));
    // Kernels that need less use what is there, and it stays.
    let medium = kernel(&mut probe, 32_768);
    for kernel in [medium, small, large] {
        probe.must(&format!("launch-grid {kernel} 1 0"));
    }
    assert_eq!((charged(&share), held(&world)), (whole, whole));
    probe.must("unprimary 0");
    assert_eq!(share.used(), 0);
}

/// If the GPU has room but the share does not, the launch is refused with the driver's error, and nothing is taken.
#[test]
fn a_launch_that_does_not_fit_is_refused() {
    let cap = taken(65_536) - BLOCK;
    let (world, share, mut probe) = container(cap + CODE);
    let large = kernel(&mut probe, 65_536);
    for _ in 0..3 {
        assert_eq!(
            probe.ask(&format!("launch-grid {large} 1 0")).code,
            OUT_OF_MEMORY
        );
    }
    assert_eq!((charged(&share), held(&world)), (0, 0));
    assert!(share.read(|account| account.refused()) >= 3);
    // A kernel that fits runs, and then less is left for others.
    let medium = kernel(&mut probe, 4096);
    probe.must(&format!("launch-grid {medium} 1 0"));
    assert_eq!((charged(&share), held(&world)), (taken(4096), taken(4096)));
    assert_eq!(
        probe.ask(&format!("alloc {}", cap - taken(4096) + 1)).code,
        OUT_OF_MEMORY
    );
    probe.must(&format!("alloc {}", cap - taken(4096)));
}

/// Every way to launch charges it; for a kernel in a graph at the latest before the graph's launch.
#[test]
fn every_way_to_launch_charges_local_memory() {
    for how in [
        "cooperative",
        "ex",
        "ex-ptsz",
        "plain-ptsz",
        "graph",
        "graph-ptsz",
    ] {
        let (world, share, mut probe) = container(CAP);
        let large = kernel(&mut probe, 16_384);
        probe.must(&format!("launch {how} {large} 10 0"));
        let whole = taken(16_384);
        assert_eq!((charged(&share), held(&world)), (whole, whole), "{how}");
    }
}

/// In a graph that is built and not captured, a node is refused if its kernel does not fit.
#[test]
fn a_graphs_kernel_node_is_charged() {
    let (world, share, mut probe) = container(taken(16_384) + CODE);
    let (fits, large) = (kernel(&mut probe, 16_384), kernel(&mut probe, 20_000));
    let graph = probe.get("cuGraphCreate &0 0");
    let mut add = |kernel: u64| {
        // func, grid and block in pairs, shared, parameters, extra.
        let two = |low: u64, high: u64| high << 32 | low;
        let pairs = format!("{} {} {} 0", two(1, 1), two(1, 32), two(1, 1));
        probe.must(&format!("set 16 {kernel} {pairs} 0 0"));
        probe.call(&format!("cuGraphAddKernelNode &8 {graph} 0 0 &16"))
    };
    assert_eq!(add(large), OUT_OF_MEMORY);
    assert_eq!(add(fits), 0);
    assert_eq!(charged(&share), taken(16_384));
    let executable = probe.get(&format!("cuGraphInstantiateWithFlags &0 {graph} 0"));
    assert_eq!(probe.call(&format!("cuGraphLaunch {executable} 0")), 0);
    probe.must("synchronize");
    assert_eq!(held(&world), taken(16_384));
}

/// If a node of a graph, executable or not, gets another kernel, its local memory is charged before it can run.
#[test]
fn a_kernel_that_a_node_gets_later_is_charged() {
    for set in [
        "cuGraphNodeSetParams 1 &16",
        "cuGraphKernelNodeSetParams_v2 1 &18",
        "cuGraphExecNodeSetParams 0 1 &16",
        "cuGraphExecKernelNodeSetParams_v2 0 1 &18",
    ] {
        let (world, share) = one_gpu();
        let mut probe = ready(&world, 1);
        probe.ask("steer local_size 65536");
        // A node's kind, and a kernel's parameters behind it.
        probe.must("set 16 0 0 77 0 0 0 0 0 0 0 0");
        assert_eq!(probe.call(set), 0, "{set}");
        assert_eq!(share.used(), BLOCK, "{set}");
    }
}

/// The stack limit and the kernels' local memory use the same memory.
#[test]
fn local_memory_and_stacks_share_one_charge() {
    let (world, share, mut probe) = container(CAP);
    assert_eq!(probe.call("cuCtxSetLimit 0 16384"), 0);
    assert_eq!((share.used(), held(&world)), (taken(16_384), taken(16_384)));
    let less = kernel(&mut probe, 8192);
    probe.must(&format!("launch-grid {less} 1 0"));
    assert_eq!(
        (charged(&share), held(&world)),
        (taken(16_384), taken(16_384))
    );
    let more = kernel(&mut probe, 32_768);
    probe.must(&format!("launch-grid {more} 1 0"));
    assert_eq!(
        (charged(&share), held(&world)),
        (taken(32_768), taken(32_768))
    );
    // A lower limit does not free what a kernel has needed.
    assert_eq!(probe.call("cuCtxSetLimit 0 1024"), 0);
    assert_eq!(
        (charged(&share), held(&world)),
        (taken(32_768), taken(32_768))
    );
    probe.must(&format!("launch-grid {more} 1 0"));
    assert_eq!(
        (charged(&share), held(&world)),
        (taken(32_768), taken(32_768))
    );
    probe.must("reset 0");
    assert_eq!(share.used(), 0);
}

/// After a module is unloaded, another kernel may get the handle of one of its kernels.
#[test]
fn what_is_known_of_a_handle_ends_with_its_module() {
    let (_world, share, mut probe) = container(CAP);
    for bytes in [512, 4096, 512, 8192] {
        let function = kernel(&mut probe, bytes);
        probe.must(&format!("launch-grid {function} 1 0"));
        probe.must("synchronize");
        probe.must("unload-last");
    }
    assert_eq!(share.used(), taken(8192));
}
