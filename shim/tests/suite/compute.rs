//! The compute share on the simulated machine: how much of the GPU's time programs get, as the GPU counts
//! it.

use std::sync::Arc;

use tranche_node::sampler::now;
use tranche_shim_core::ComputePolicy;
use tranche_shim_core::compute::costs::HOLDS_NANOS;
use tranche_shim_tests::gpu_time::{
    contended, percent_of_gpu, percent_of_gpu_in, program, sample_until,
};
use tranche_shim_tests::{Driver, Machine, Node, Probe, Share, World};

use crate::cap::{CAP, GPU_0, ready};

/// A container with a share of `cores` percent of the only GPU.
fn container(cores: u8) -> (World, Share) {
    container_on(Machine::Realistic, cores)
}

fn container_on(machine: Machine, cores: u8) -> (World, Share) {
    let world = World::new(Driver::Machine(machine, 1));
    let gpu = world.node().gpus()[0].uuid.clone();
    let share = world.share_of_time("gpu-0", &gpu, Some(CAP), Some(cores), ComputePolicy::Strict);
    (world, share)
}

/// How long the tests measure, in milliseconds.
const MILLIS: u64 = 2000;

/// The percentage of the GPU's time for a program that launched so many kernels of `nanos` in [`MILLIS`].
fn percent(launches: u64, nanos: u64) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "small numbers")]
    let part = (launches * nanos) as f64 / (MILLIS * 1_000_000) as f64;
    part * 100.0
}

fn assert_near(what: &str, found: f64, wanted: f64) {
    println!("{what}: {found:.1} % of {wanted:.1} %");
    assert!(
        (found - wanted).abs() <= 5.0,
        "{what}: {found:.1} % instead of {wanted:.1} %"
    );
}

#[test]
fn every_way_to_launch_is_held_to_the_share() {
    for (machine, cores) in [
        (Machine::Simple, 10),
        (Machine::Realistic, 10),
        (Machine::Realistic, 50),
    ] {
        let (world, share) = container_on(machine, cores);
        for (how, kernels) in [
            ("plain", 1),
            ("plain-ptsz", 1),
            ("cooperative", 1),
            ("cooperative-ptsz", 1),
            ("ex", 1),
            ("ex-ptsz", 1),
            ("graph", 10),
            ("graph-ptsz", 10),
        ] {
            let (mut probe, kernel) = program(&world, "sim_busy_200us");
            let answer = probe.must(&format!("launch {how} {kernel} {MILLIS} 0"));
            let found = percent(answer.number(0) * kernels, 200_000);
            let what = format!("{how}, {cores}, {machine:?}");
            assert_near(&what, found, f64::from(cores));
        }
        assert!(share.read(|account| account.launches()) > 0);
        assert!(share.read(|account| account.throttled_nanos()) > 0);
    }
}

#[test]
fn all_of_a_gpu_is_never_held_back() {
    for cores in [100, 99] {
        let (world, share) = container(cores);
        if cores == 99 {
            share.grant(4_000_000);
        }
        let (mut probe, kernel) = program(&world, "sim_busy_200us");
        let mut launches = 0;
        // If the program is not scheduled for some time, its queue runs empty.
        let percents = (0..3).map(|_| {
            let answer = probe.must(&format!("launch plain {kernel} {MILLIS} 0"));
            launches += answer.number(0);
            // What is queued has not run yet.
            percent(answer.number(0), 200_000)
        });
        let found: Vec<_> = percents.take_while(|&it| it < 99.0).collect();
        assert!(found.len() < 3, "{found:?} % of {cores}");
        // With 99 percent, launches wait for the kernel's first measurement.
        let most = if cores == 100 { 0 } else { HOLDS_NANOS };
        let throttled = share.read(|account| account.throttled_nanos());
        assert!(throttled <= most, "{throttled} ns with {cores}");
        let counted = share.read(|account| account.launches());
        assert!(counted + 256 >= launches, "{counted} of {launches}");
    }
}

#[test]
fn collective_kernels_and_graphs_with_them_pay_and_never_wait() {
    for (how, name, nanos) in [
        ("plain", "_Z13ncclDevKernel_sim_busy_200us", 200_000),
        ("graph", "_Z13ncclDevKernel_sim_busy_200us", 2_000_000),
        (
            "plain",
            "_ZN4vllm26cross_device_reduce_1stageI_sim_busy_200us",
            200_000,
        ),
    ] {
        let (world, share) = container(10);
        let (mut probe, kernel) = program(&world, name);
        let answer = probe.must(&format!("launch {how} {kernel} 500 0"));
        let throttled = share.read(|account| account.throttled_nanos());
        assert_eq!(throttled, 0, "{how} {name}");
        let spent = share.read(|account| account.spent_nanos());
        // The first graphs pay a provisional price until one was measured.
        let least = answer.number(0).saturating_sub(20) * nanos;
        assert!(spent >= least, "{spent} for {answer:?}, {how} {name}");
        // Other kernels wait for the debt.
        let other = probe.must("kernel sim_busy_100us").number(0);
        probe.must(&format!("launch plain {other} 1 0"));
        assert!(share.read(|account| account.throttled_nanos()) > 0);
    }
}

/// Sequences of any length: a shape that was never launched is priced by the kernel's other grids, and no launch waits for
/// its measurement. The share counts each nanosecond for which a launch waits.
#[test]
fn a_known_kernel_with_a_new_grid_is_not_held_back() {
    let (world, share) = container(99);
    // Far more than the GPU has, so that launches could wait only for a first measurement.
    share.grant(1_000_000_000);
    let (mut probe, kernel) = program(&world, "sim_busy_1us_per_block");
    let throttled = || share.read(|account| account.throttled_nanos());
    // The first launches, of an unknown kernel.
    probe.must(&format!("launch-growing {kernel} 100 3"));
    probe.must("synchronize");
    let at_first = throttled();
    let answer = probe.must(&format!("launch-growing {kernel} 1000 1499"));
    assert!(answer.number(1) > 1000, "{answer:?}");
    assert_eq!(throttled(), at_first, "{answer:?}");
}

/// Such a program still gets only its share, because launches pay for the measured work of the GPU.
#[test]
fn grids_that_never_come_again_are_held_to_the_share() {
    let (world, _share) = container(20);
    let (mut probe, kernel) = program(&world, "sim_busy_1us_per_block");
    let answer = probe.must(&format!("launch-growing {kernel} {} 4001", 2 * MILLIS));
    let found = percent(answer.number(0), 1000) / 2.0;
    assert_near("grids from 1 to 4001", found, 20.0);
}

/// A captured launch takes no GPU time before its graph is launched.
#[test]
fn capturing_is_free() {
    let (world, share) = container(10);
    let (mut probe, kernel) = program(&world, "sim_busy_50ms");
    for _ in 0..20 {
        probe.must(&format!("launch graph {kernel} 0 0"));
    }
    assert_eq!(share.read(|account| account.spent_nanos()), 0);
}

/// If a node of an executable graph gets another kernel, the graph pays for that one.
#[test]
fn a_graph_whose_kernel_was_changed_pays_for_the_new_one() {
    const LAUNCHES: u64 = 1000;
    for change in [
        "cuGraphExecKernelNodeSetParams_v2 $0 1 0",
        "cuGraphExecNodeSetParams $0 1 0",
        "cuGraphNodeSetEnabled $0 1 1",
    ] {
        let world = World::new(Driver::Odd);
        let strict = ComputePolicy::Strict;
        let share = world.share_of_time("gpu-0", GPU_0, Some(CAP), Some(99), strict);
        share.grant(1_000_000_000_000);
        let mut probe = ready(&world, 1);
        probe.get("cuGraphCreate &8 0");
        assert_eq!(probe.call("cuGraphInstantiateWithFlags &0 $8 0"), 0);
        let spent = || share.read(|account| account.spent_nanos());
        let launches = |probe: &mut Probe| {
            let before = spent();
            for _ in 0..LAUNCHES {
                assert_eq!(probe.call("cuGraphLaunch $0 0"), 0);
            }
            spent() - before
        };
        let cheap = launches(&mut probe);
        assert!(cheap < LAUNCHES * 100_000, "{change}: {cheap}");
        probe.ask("steer event_nanos 1000000");
        assert_eq!(probe.call(change), 0, "{change}");
        let dear = launches(&mut probe);
        assert!(dear > LAUNCHES * 900_000, "{change}: {dear}");
    }
}

/// A program with many kernels.
struct Program {
    name: &'static str,
    kernels: u32,
    /// The time of its shortest and of its longest kernel, in microseconds.
    micros: (u32, u32),
    /// Each launch has a grid that was not launched before.
    new_grids: bool,
    /// Captures before, which ended with their streams.
    captures: u32,
}

const PROGRAMS: [Program; 6] = [
    Program {
        name: "ten kernels of 200 µs",
        kernels: 10,
        micros: (200, 200),
        new_grids: false,
        captures: 0,
    },
    Program {
        name: "a kernel of 200 µs, new grids",
        kernels: 1,
        micros: (200, 200),
        new_grids: true,
        captures: 0,
    },
    Program {
        name: "a kernel of 20 µs, new grids",
        kernels: 1,
        micros: (20, 20),
        new_grids: true,
        captures: 0,
    },
    Program {
        name: "a thousand kernels of 20 µs",
        kernels: 1000,
        micros: (20, 20),
        new_grids: false,
        captures: 0,
    },
    Program {
        name: "ten kernels of 200 µs, after captures",
        kernels: 10,
        micros: (200, 200),
        new_grids: false,
        captures: 3,
    },
    Program {
        name: "300 kernels of 5 to 500 µs",
        kernels: 300,
        micros: (5, 500),
        new_grids: false,
        captures: 0,
    },
];

/// Programs with many, short and ever new kernels get their share from the start.
#[test]
fn programs_of_any_kernels_get_the_share_at_once() {
    for machine in Machine::ALL {
        for program in &PROGRAMS {
            let (first, second) = halves(machine, 25, program);
            let what = format!("{}, {machine:?}", program.name);
            assert_near(&format!("{what}, first half"), first, 25.0);
            assert_near(&format!("{what}, second half"), second, 25.0);
        }
    }
}

/// The percentages of the GPU's time that a program gets in its first and in its next [`MILLIS`].
fn halves(machine: Machine, cores: u8, program: &Program) -> (f64, f64) {
    let root = std::env::temp_dir().join(format!(
        "tranche-shim-{}-halves-{}",
        std::process::id(),
        now()
    ));
    let node = Arc::new(Node::start(root, machine, 1));
    let gpu = node.gpus()[0].uuid.clone();
    let world = World::on(&node);
    let share = world.share_of_time("gpu-0", &gpu, Some(CAP), Some(cores), ComputePolicy::Strict);
    let folders = [share.pages_from_outside()];
    std::thread::scope(|scope| {
        let running = scope.spawn(|| {
            let mut probe = world.probe("name");
            probe.must("init");
            probe.must("primary 0");
            for _ in 0..program.captures {
                probe.must("abandon-capture");
            }
            let (least, most) = program.micros;
            let (count, least, most) = (program.kernels, least * 1000, most * 1000);
            probe.must(&format!("kernels {count} {least} {most}"));
            let grids = if program.new_grids { "new" } else { "same" };
            let launches = format!("launch-all {MILLIS} {grids}");
            let mut half = || percent_of_gpu_in(&node, &mut probe, &launches);
            (half(), half())
        });
        sample_until(&node, &folders, || running.is_finished());
        running.join().unwrap()
    })
}

/// An open capture in another stream does not change what launches pay, even if it never ends.
#[test]
fn an_open_capture_does_not_change_what_launches_pay() {
    const PER_THREAD_STREAM: u32 = 2;
    let (world, _share) = container(20);
    let (mut probe, kernel) = program(&world, "sim_busy_20ms");
    assert_eq!(
        probe.call(&format!("cuStreamBeginCapture_v2 {PER_THREAD_STREAM} 0")),
        0
    );
    let answer = probe.must(&format!("launch plain {kernel} {MILLIS} 0"));
    assert_near(
        "beside a capture",
        percent(answer.number(0), 20_000_000),
        20.0,
    );
}

/// How long programs run before the tests measure, in milliseconds, with kernels shorter than a time slice.
const SETTLES: u64 = 6_000;

/// The same with kernels longer than a time slice, which may have been measured with their neighbours' work in them: the scale
/// follows within 5 s, and the debts until then are repaid (`node/tests/share.rs` tests the whole course).
const SETTLES_LONG_KERNELS: u64 = 16_000;

/// How long the tests measure then, in milliseconds.
const LOOKS: u64 = 10_000;

/// Programs of a share that follow each other, each with other kernels: no program is charged for an earlier one.
#[test]
fn a_program_after_another_gets_the_share() {
    let root = std::env::temp_dir().join(format!(
        "tranche-shim-{}-after-{}",
        std::process::id(),
        now()
    ));
    let node = Arc::new(Node::start(root, Machine::Realistic, 1));
    let gpu = node.gpus()[0].uuid.clone();
    let world = World::on(&node);
    let share = world.share_of_time("gpu-0", &gpu, Some(CAP), Some(25), ComputePolicy::Strict);
    let folders = [share.pages_from_outside()];
    std::thread::scope(|scope| {
        let programs = scope.spawn(|| {
            ["1ms", "10us", "50ms", "1ms"].map(|kernel| {
                let kernel = format!("sim_busy_{kernel}");
                let (mut probe, handle) = program(&world, &kernel);
                let found = percent_of_gpu(&node, &mut probe, handle, LOOKS);
                (kernel, found)
            })
        });
        sample_until(&node, &folders, || programs.is_finished());
        for (kernel, found) in programs.join().unwrap() {
            assert_near(&kernel, found, 25.0);
        }
    });
}

#[test]
fn shares_of_thirty_and_seventy_percent_get_them() {
    for machine in Machine::ALL {
        for (short, long) in [
            ("sim_busy_200us", "sim_busy_200us"),
            ("sim_busy_100us", "sim_busy_20ms"),
        ] {
            let shares = [
                (30, ComputePolicy::Strict, short),
                (70, ComputePolicy::WorkConserving, long),
            ];
            let (found, switching) = contended(machine, SETTLES, LOOKS, &shares);
            assert_near(&format!("{short}, {machine:?}"), found[0], 30.0);
            // A work-conserving share gets at least its cores, and the time that the other does not use, except
            // for the time of switches.
            println!(
                "{long}, {machine:?}: {:.1} % of 70 %, {switching:.1} % for switching",
                found[1]
            );
            let reached = found[1] + switching;
            assert!(
                reached >= 65.0,
                "{long}, {machine:?}: {found:?} {switching}"
            );
        }
    }
}

#[test]
fn four_equal_shares_are_equal() {
    let kernels = [
        "sim_busy_100us",
        "sim_busy_500us",
        "sim_busy_3ms",
        "sim_busy_20ms",
    ];
    for machine in Machine::ALL {
        let shares = kernels.map(|kernel| (25, ComputePolicy::Strict, kernel));
        let (found, switching) = contended(machine, SETTLES_LONG_KERNELS, LOOKS, &shares);
        let (sum, squares) = found.iter().fold((0.0, 0.0), |(sum, squares), part| {
            (sum + part, squares + part * part)
        });
        let jain = sum * sum / (4.0 * squares);
        println!("{machine:?}: {found:.1?}: Jain's index {jain:.4}");
        assert!(jain >= 0.99, "{machine:?}: {found:?}: {jain}");
        // The index is also 1 if all shares get equally little. So the sum is checked too: all of the GPU, except
        // for the time of switches, and never more.
        assert!(
            sum + switching >= 80.0 && sum <= 105.0,
            "{machine:?}: {found:?} {switching}"
        );
    }
}

#[test]
fn a_work_conserving_share_gets_what_is_left() {
    for machine in Machine::ALL {
        let shares = [(20, ComputePolicy::WorkConserving, "sim_busy_200us")];
        let (found, _) = contended(machine, SETTLES, LOOKS, &shares);
        assert!(found[0] >= 95.0, "alone, {machine:?}: {found:?}");
    }
}
