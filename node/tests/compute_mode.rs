//! The compute mode of a simulated GPU, with the real nvidia-smi as the administrator.

use crate::common;

use common::{Host, smi};
use tranche_driver::gpu_state::ComputeMode;
use tranche_node::nvml::Driver as _;

#[test]
fn a_gpus_compute_mode_is_read_and_set() {
    let mut host = Host::new();
    // It has no MIG.
    host.install_for("T4", "/");
    let root = host.at("/");
    let nvml = host.driver(None).open().unwrap().nvml;
    let gpus = nvml.describe().unwrap().gpus;
    let [first, second] = [0, 1].map(|at| gpus[at].uuid.as_str());
    let query = ["--query-gpu=compute_mode", "--format=csv,noheader"];
    let shown = || smi(&root, &query).trim().replace('\n', " ");
    for (mode, name) in [
        (ComputeMode::ExclusiveProcess, "Exclusive_Process"),
        (ComputeMode::Prohibited, "Prohibited"),
        (ComputeMode::Default, "Default"),
    ] {
        nvml.set_compute_mode(second, mode).unwrap();
        assert_eq!(nvml.compute_mode(second).unwrap(), mode);
        assert_eq!(nvml.compute_mode(first).unwrap(), ComputeMode::Default);
        assert_eq!(shown(), format!("Default {name}"));
    }
    smi(&root, &["-i", first, "-c", "EXCLUSIVE_PROCESS"]);
    assert_eq!(
        nvml.compute_mode(first).unwrap(),
        ComputeMode::ExclusiveProcess
    );
}
