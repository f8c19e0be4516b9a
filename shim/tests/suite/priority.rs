//! Shares of high and low priority on one GPU of the simulated machine.

use std::fs;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use tranche_node::sampler::now;
use tranche_shim_core::Priority;
use tranche_shim_core::load::{LEN, MOST_AHEAD_NANOS, PLACES};
use tranche_shim_tests::gpu_time::{percent_of_gpu, percent_of_gpu_in};
use tranche_shim_tests::priority::{GpuWithLoad, requests_beside};

/// The percentage of the GPU's time of a program with low priority and no floor that launches as much as it may, beside
/// a program with high priority that executes `command` with its kernel.
fn share_beside(gpu: &GpuWithLoad, command: impl Fn(u64) -> String + Sync) -> f64 {
    let start = Barrier::new(2);
    std::thread::scope(|scope| {
        let high = scope.spawn(|| {
            let (_world, _share, mut probe, kernel) =
                gpu.container(Priority::High, "sim_busy_200us");
            start.wait();
            probe.must(&command(kernel));
        });
        let low = scope.spawn(|| {
            let (_world, _share, mut probe, kernel) =
                gpu.container(Priority::Low { floor: 0 }, "sim_busy_200us");
            start.wait();
            percent_of_gpu(&gpu.node, &mut probe, kernel, MILLIS)
        });
        high.join().unwrap();
        low.join().unwrap()
    })
}

/// How long the tests measure, in milliseconds.
const MILLIS: u64 = 2000;

/// Writes into each place of a load page that there is work, until it is told to stop.
fn always_busy(load: &Path, stop: &AtomicBool) {
    let file = fs::File::options().write(true).open(load).unwrap();
    while !stop.load(Ordering::Relaxed) {
        let until = (now() + MOST_AHEAD_NANOS / 2).to_le_bytes();
        file.write_all_at(&until.repeat(PLACES), 0).unwrap();
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Compares what the neighbours add to a request: a machine with other work adds as much to each of the three. They are
/// measured in turns, for its work comes and goes.
#[test]
fn a_request_of_high_priority_is_nearly_as_fast_beside_a_low_share_as_alone() {
    let low = Priority::Low { floor: 10 };
    let mut medians = [None, Some(Priority::Normal), Some(low)].map(|it| (it, Vec::new()));
    for _ in 0..3 {
        for (neighbour, medians) in &mut medians {
            medians.push(requests_beside(*neighbour, 20).p50);
        }
    }
    let [alone, normal, low] = medians.map(|(_, mut medians)| {
        medians.sort_unstable();
        medians[1]
    });
    let found = format!("in µs: alone {alone}, beside normal {normal}, beside low {low}");
    println!("{found}");
    assert!(low < 2 * alone, "{found}");
    let added = |beside: u64| beside.saturating_sub(alone);
    assert!(3 * added(low) < added(normal), "{found}");
}

#[test]
fn a_low_share_gets_the_gaps() {
    let gpu = GpuWithLoad::new();
    let found = share_beside(&gpu, |kernel| format!("launch plain {kernel} {MILLIS} 0"));
    println!("beside work: {found:.1} %");
    // If the machine has other work, the program of high priority is not always there.
    assert!(found < 25.0, "beside work: {found:.1} %");
    // Requests of 2 ms, with pauses of 40 ms.
    let found = share_beside(&gpu, |kernel| format!("requests {kernel} 45 10 40000"));
    println!("beside requests: {found:.1} %");
    assert!(found > 35.0, "beside requests: {found:.1} %");
    let found = share_beside(&gpu, |_| "count".to_owned());
    println!("beside an idle share: {found:.1} %");
    let off = (found - 50.0).abs();
    assert!(off < 5.0, "beside an idle share: {found:.1} %");
}

#[test]
fn a_low_share_keeps_its_floor() {
    // In percent of half of the GPU.
    for (floor, percent) in [(0, 0.0), (20, 10.0), (100, 50.0)] {
        let (found, _) = beside_page(floor, "plain", "sim_busy_200us", always_busy);
        println!("floor {floor}: {found:.1} % of {percent} %");
        assert!(
            (found - percent).abs() < 3.0,
            "floor {floor}: {found:.1} % of {percent} %"
        );
    }
}

/// A program of low priority without a floor launches as much as it may beside a load page that says something. Returns
/// the percentage of the GPU's time that it gets, and for how long its launches waited, in nanoseconds.
fn beside_page(
    floor: u8,
    how: &str,
    kernel: &str,
    write: impl FnOnce(&Path, &AtomicBool) + Send,
) -> (f64, u64) {
    let gpu = GpuWithLoad::new();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let low = Priority::Low { floor };
        let (_world, share, mut probe, kernel) = gpu.container(low, kernel);
        scope.spawn(|| write(&gpu.load, &stop));
        std::thread::sleep(Duration::from_millis(50));
        let throttled = || share.read(|account| account.throttled_nanos());
        let (before, command) = (throttled(), format!("launch {how} {kernel} {MILLIS} 0"));
        let found = percent_of_gpu_in(&gpu.node, &mut probe, &command);
        stop.store(true, Ordering::Relaxed);
        (found, throttled() - before)
    })
}

#[test]
fn a_page_with_nonsense_delays_nobody() {
    let too_far = (now() + 3600 * 1_000_000_000).to_le_bytes().repeat(PLACES);
    for (what, content) in [
        ("too far ahead", too_far),
        ("ones", vec![0xff; LEN]),
        ("empty", vec![]),
        ("cut off", vec![7; 13]),
        ("longer", vec![1; 1 << 20]),
    ] {
        let write = |load: &Path, _: &AtomicBool| fs::write(load, content).unwrap();
        let (found, _) = beside_page(0, "plain", "sim_busy_200us", write);
        assert!((found - 50.0).abs() < 5.0, "{what}: {found:.1} %");
    }
}

#[test]
fn collective_kernels_do_not_wait_for_others() {
    let collective = "_Z13ncclDevKernel_sim_busy_200us";
    let (found, throttled) = beside_page(0, "plain", collective, always_busy);
    assert!(
        found > 90.0 && throttled == 0,
        "{found:.1} %, waited {throttled} ns"
    );
}

/// A launch into a capture takes no GPU time.
#[test]
fn launches_into_a_capture_do_not_wait_for_others() {
    let gpu = GpuWithLoad::new();
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let low = Priority::Low { floor: 0 };
        let (_world, _share, mut probe, kernel) = gpu.container(low, "sim_busy_50ms");
        scope.spawn(|| always_busy(&gpu.load, &stop));
        std::thread::sleep(Duration::from_millis(50));
        let start = Instant::now();
        // Ten launches each.
        for _ in 0..20 {
            probe.must(&format!("launch graph {kernel} 0 0"));
        }
        let took = start.elapsed();
        stop.store(true, Ordering::Relaxed);
        assert!(took < Duration::from_secs(1), "{took:?}");
    });
}

#[test]
fn a_dead_high_share_frees_the_low_ones() {
    let gpu = GpuWithLoad::new();
    let (start, killed) = (Barrier::new(2), Barrier::new(2));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (_world, _share, mut probe, kernel) = gpu.container(Priority::High, "sim_busy_1ms");
            start.wait();
            probe.send(&format!("launch plain {kernel} 60000 0"));
            std::thread::sleep(Duration::from_millis(500));
            probe.begin_to_kill();
            killed.wait();
        });
        let low = Priority::Low { floor: 0 };
        let (_world, _share, mut probe, kernel) = gpu.container(low, "sim_busy_200us");
        start.wait();
        std::thread::sleep(Duration::from_millis(100));
        probe.send(&format!("launch plain {kernel} 1000 0"));
        killed.wait();
        let (before, since) = (gpu.node.worked_for(probe.pid(), 0), Instant::now());
        while gpu.node.worked_for(probe.pid(), 0) < before + 5_000_000 {
            let elapsed = since.elapsed();
            assert!(
                elapsed < Duration::from_millis(200),
                "it waits for a dead share"
            );
            std::thread::sleep(Duration::from_millis(1));
        }
    });
}
