//! What NVML says of NVLinks, in the units of the usage API.

use crate::common;

use std::path::Path;
use std::thread::sleep;
use std::time::{Duration, Instant};

use common::{Host, count_nvlink};
use tranche_api::usage::Sensors;
use tranche_node::nvml::{Driver as _, Nvml, Opened};

const ROOT: &str = "/run/nvidia/driver";
const MIB: u64 = 1 << 20;

/// A machine with two GPUs of a model, and the UUID of the first.
fn machine(model: &str) -> (Host, Opened, String) {
    let mut host = Host::new();
    host.install_for(model, ROOT);
    let opened = host.driver(None).open().unwrap();
    let first = opened.nvml.describe().unwrap().gpus[0].uuid.clone();
    (host, opened, first)
}

fn sensors(nvml: &dyn Nvml, uuid: &str) -> Sensors {
    nvml.usage(uuid).unwrap().sensors
}

/// What is told between two readings while the GPU sends 600 MiB and receives 1800, and how many seconds that took, at least and
/// at most.
fn transferred(nvml: &dyn Nvml, uuid: &str, root: &Path) -> (Sensors, [f64; 2]) {
    let before = Instant::now();
    let first = sensors(nvml, uuid);
    assert_eq!((first.nvlink_data, first.nvlink_sent), (None, None));
    let begun = Instant::now();
    count_nvlink(root, "sent", 600 << 10);
    count_nvlink(root, "received", 1_800 << 10);
    sleep(Duration::from_millis(500));
    let least = begun.elapsed();
    let second = sensors(nvml, uuid);
    let most = before.elapsed();
    (second, [least, most].map(|it| it.as_secs_f64()))
}

/// Whether a rate is that of so many MiB.
fn is_of(rate: Option<u64>, mib: u32, [least, most]: [f64; 2]) -> bool {
    let rate = rate.unwrap() / MIB;
    let wanted = f64::from(mib);
    (wanted / most * 0.99..=wanted / least * 1.01)
        .contains(&f64::from(u32::try_from(rate).unwrap()))
}

#[test]
fn bytes_on_nvlink_are_those_between_two_readings() {
    let (host, opened, uuid) = machine("H100-80");
    let (told, seconds) = transferred(&*opened.nvml, &uuid, &host.at(ROOT));
    let context = format!("{told:?} in {seconds:?} s");
    assert!(is_of(told.nvlink_sent, 600, seconds), "{context}");
    assert!(is_of(told.nvlink_received, 1_800, seconds), "{context}");
    assert!(is_of(told.nvlink_data, 2_400, seconds), "{context}");
    // Nothing since then.
    sleep(Duration::from_millis(200));
    let idle = sensors(&*opened.nvml, &uuid);
    assert_eq!((idle.nvlink_data, idle.nvlink_sent), (Some(0), Some(0)));
}

#[test]
fn before_hopper_there_is_the_sum_of_both_directions() {
    let (host, opened, uuid) = machine("A100-80");
    let (told, seconds) = transferred(&*opened.nvml, &uuid, &host.at(ROOT));
    assert!(is_of(told.nvlink_data, 2_400, seconds), "{told:?}");
    assert_eq!((told.nvlink_sent, told.nvlink_received), (None, None));
}

#[test]
fn errors_on_nvlink_are_told_apart() {
    let (host, opened, uuid) = machine("H100-80");
    let counters = ["flit-errors", "data-errors", "replays", "recoveries"];
    for (counter, count) in counters.into_iter().zip(3..) {
        count_nvlink(&host.at(ROOT), counter, count);
    }
    let told = sensors(&*opened.nvml, &uuid);
    let errors = [
        told.nvlink_flit_errors,
        told.nvlink_data_errors,
        told.nvlink_replays,
        told.nvlink_recoveries,
    ];
    assert_eq!(errors, [Some(3), Some(4), Some(5), Some(6)]);
}

#[test]
fn what_a_model_does_not_have_is_absent() {
    let (_host, opened, uuid) = machine("B200");
    let told = sensors(&*opened.nvml, &uuid);
    assert_eq!((told.nvlink_flit_errors, told.nvlink_replays), (None, None));
    sleep(Duration::from_millis(200));
    assert_eq!(sensors(&*opened.nvml, &uuid).nvlink_data, Some(0));
    // It has GPM, and no NVLink.
    for model in ["T4", "L4", "RTX-PRO-6000"] {
        let (_host, opened, uuid) = machine(model);
        sensors(&*opened.nvml, &uuid);
        sleep(Duration::from_millis(200));
        let told = sensors(&*opened.nvml, &uuid);
        assert_eq!(told.pcie_sent.is_some(), model == "RTX-PRO-6000", "{model}");
        let without = Sensors {
            nvlink_sent: None,
            nvlink_received: None,
            nvlink_data: None,
            nvlink_flit_errors: None,
            nvlink_data_errors: None,
            nvlink_replays: None,
            nvlink_recoveries: None,
            ..told.clone()
        };
        assert_eq!(told, without, "{model}");
    }
}
