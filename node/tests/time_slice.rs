//! The length of a simulated GPU's time slices, set by the driver's own nvidia-smi.

use crate::common;

use common::{Host, smi};
use tranche_api::sharing_policy::Interval;
use tranche_node::nvml::Driver as _;

#[test]
fn the_length_is_set_and_read_for_one_gpu() {
    let mut host = Host::new();
    host.install("/run/nvidia/driver");
    let root = host.at("/run/nvidia/driver");
    let opened = host.driver(None).open().unwrap();
    let gpus = opened.nvml.describe().unwrap().gpus;
    let [first, second] = [0, 1].map(|at: usize| gpus[at].uuid.as_str());
    for interval in [
        Interval::Short,
        Interval::Medium,
        Interval::Long,
        Interval::Default,
    ] {
        opened.nvml.set_time_slice(second, interval).unwrap();
        assert_eq!(opened.nvml.time_slice(second), Ok(interval));
        assert_eq!(opened.nvml.time_slice(first), Ok(Interval::Default));
        let listed = smi(&root, &["compute-policy", "-l"]);
        assert!(listed.contains(&format!("{interval:?}")), "{listed}");
    }
}

#[test]
fn a_gpu_that_is_not_there_and_a_missing_program_are_named() {
    let mut host = Host::new();
    host.install("/run/nvidia/driver");
    let gone = "GPU-00000000-0000-0000-0000-000000000000";
    let opened = host.driver(None).open().unwrap();
    let error = opened
        .nvml
        .set_time_slice(gone, Interval::Long)
        .unwrap_err()
        .to_string();
    assert!(
        error.contains(gone) && error.contains("exit status"),
        "{error}"
    );
    drop(opened);
    std::fs::remove_file(host.at("/run/nvidia/driver/usr/bin/nvidia-smi")).unwrap();
    let opened = host.driver(None).open().unwrap();
    let error = opened.nvml.time_slice(gone).unwrap_err().to_string();
    assert!(error.contains("has no nvidia-smi"), "{error}");
}
