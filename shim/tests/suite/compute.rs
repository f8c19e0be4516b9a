//! The compute share on the simulated machine: how much of the GPU's time programs get, as the GPU
//! itself counts it.

use tranche_shim_core::ComputePolicy;
use tranche_shim_tests::{Driver, Probe, Share, World};

use crate::cap::CAP;

/// A container with a share of `cores` percent of the only GPU.
fn container(cores: u8) -> (World, Share) {
    let world = World::new(Driver::Simulator(1));
    let gpu = world.node().gpus()[0].uuid.clone();
    let share = world.share_of_time("gpu-0", &gpu, Some(CAP), Some(cores), ComputePolicy::Strict);
    (world, share)
}

/// A process with a context, and a kernel of that name.
fn program(world: &World, kernel: &str) -> (Probe, u64) {
    let mut probe = world.probe("name");
    probe.must("init");
    probe.must("primary 0");
    let kernel = probe.must(&format!("kernel {kernel}")).number(0);
    (probe, kernel)
}

/// How long the tests look, in milliseconds.
const MILLIS: u64 = 2000;

/// Percent of the GPU's time that a program had which launched kernels of `nanos` for [`MILLIS`].
fn percent(launches: u64, nanos: u64) -> f64 {
    #[expect(clippy::cast_precision_loss, reason = "small numbers")]
    let part = (launches * nanos) as f64 / (MILLIS * 1_000_000) as f64;
    part * 100.0
}

fn assert_near(what: &str, found: f64, wanted: f64) {
    println!("{what}: {found:.1} % of {wanted} %");
    assert!(
        (found - wanted).abs() <= 5.0,
        "{what}: {found:.1} % instead of {wanted} %"
    );
}

#[test]
fn every_way_to_launch_is_held_to_the_share() {
    for cores in [10, 50] {
        let (world, share) = container(cores);
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
            assert_near(&format!("{how}, {cores}"), found, f64::from(cores));
        }
        assert!(share.look(|account| account.launches()) > 0);
        assert!(share.look(|account| account.throttled_nanos()) > 0);
    }
}
