//! GPUs of a vGPU's host and of a virtual machine that has a vGPU.

use crate::common;

use std::fs;

use common::Host;
use tranche_api::gpu_node::Inventory;
use tranche_api::tier::Tier;
use tranche_api::vgpu::VgpuRole;
use tranche_driver::gpu_state::ComputeMode;
use tranche_node::inventory::inventory;
use tranche_node::nvml::{Driver as _, Opened};
use tranche_node::vgpu::withheld;

const ROOT: &str = "/run/nvidia/driver";
const FIRST: &str = "0000:1b:00.0";

/// A machine with two H100, of which NVML says this.
fn machine(virtualization: &str) -> (Host, Opened) {
    let mut host = Host::new();
    host.lay_out("H100-80", ROOT);
    let file = host.at(ROOT).join("etc/nvidia-sim/machine.toml");
    let text = fs::read_to_string(&file).unwrap();
    let line = format!("[[gpu]]\nvirtualization = \"{virtualization}\"");
    fs::write(&file, text.replace("[[gpu]]", &line)).unwrap();
    host.load(ROOT);
    let opened = host.driver(None).open().unwrap();
    (host, opened)
}

fn describe(host: &Host, opened: &Opened) -> Inventory {
    inventory(&opened.nvml.describe().unwrap(), &host.at("sys"))
}

#[test]
fn a_vgpu_is_known_by_nvml_and_has_no_mig() {
    let (host, opened) = machine("vgpu");
    let seen = describe(&host, &opened);
    assert_eq!((seen.gpu_count, seen.mig_geometries), (2, Vec::new()));
    for gpu in &seen.gpus {
        assert!(gpu.is_vgpu() && !gpu.mig_capable, "{gpu:?}");
        // The driver in the virtual machine keeps it.
        let nvml = &opened.nvml;
        let mode = ComputeMode::ExclusiveProcess;
        nvml.set_compute_mode(&gpu.uuid, mode).unwrap();
        assert_eq!(nvml.compute_mode(&gpu.uuid).unwrap(), mode);
    }
}

#[test]
fn a_host_of_vgpus_keeps_its_gpus_until_a_vgpu_is_made() {
    let (host, opened) = machine("host-vgpu");
    let function = host
        .at("sys/bus/pci/devices")
        .join(FIRST)
        .join("virtfn0/nvidia");
    fs::create_dir_all(&function).unwrap();
    let list = "ID    : vGPU Name\n1135  : NVIDIA H100-80C\n";
    fs::write(function.join("creatable_vgpu_types"), list).unwrap();
    fs::write(function.join("current_vgpu_type"), "0\n").unwrap();
    let seen = describe(&host, &opened);
    let roles = seen
        .gpus
        .iter()
        .map(|gpu| gpu.vgpu.as_ref().map(|it| it.role));
    assert_eq!(roles.collect::<Vec<_>>(), [Some(VgpuRole::Host); 2]);
    assert_eq!(seen.gpus[0].pci_bus_id, FIRST);
    assert_eq!(
        seen.gpus[0].vgpu.as_ref().unwrap().types,
        ["NVIDIA H100-80C"]
    );
    assert!(seen.gpus.iter().all(|gpu| gpu.mig_capable), "{seen:?}");
    assert!(
        withheld(&seen)
            .iter()
            .all(|it| it.tiers == [Tier::Passthrough])
    );

    fs::write(function.join("current_vgpu_type"), "1135\n").unwrap();
    let seen = describe(&host, &opened);
    let taken = withheld(&seen);
    assert_eq!(taken.len(), 1);
    assert!(
        taken[0].covers(&seen.gpus[0].uuid, Tier::Exclusive),
        "{taken:?}"
    );
}

#[test]
fn a_gpu_given_whole_to_a_virtual_machine_is_like_any_other() {
    let (host, opened) = machine("passthrough");
    let seen = describe(&host, &opened);
    assert!(
        seen.gpus
            .iter()
            .all(|gpu| gpu.vgpu.is_none() && gpu.mig_capable)
    );
}
