//! From NVML's description and the kernel's PCI tree to the inventory that the cluster sees.

use std::path::Path;

use tranche_api::Quantity;
use tranche_api::gpu_node::{Gpu, Inventory};
use tranche_api::mig::{MigGeometry, MigProfile};
use tranche_driver::gpu_state::AtVfio;

use crate::nvml::{Description, GpuDescription};
use crate::vgpu;

/// Merges both by the GPUs' PCI addresses.
///
/// `sysfs` is where the kernel's `sys` tree is mounted; facts that it does not have are left out.
#[must_use]
pub fn inventory(description: &Description, sysfs: &Path) -> Inventory {
    let mut inventory = Inventory::new(
        description.driver_version.clone(),
        description.cuda_driver_version.clone(),
        description
            .gpus
            .iter()
            .map(|gpu| describe(gpu, sysfs))
            .collect(),
    );
    inventory.mig_geometries = geometries(&description.gpus);
    inventory.heterogeneous_memory = heterogeneous_memory(sysfs);
    inventory
}

/// What nvidia-uvm's parameter `uvm_disable_hmm` says: `Y` or `N`.
fn heterogeneous_memory(sysfs: &Path) -> Option<bool> {
    let file = sysfs.join("module/nvidia_uvm/parameters/uvm_disable_hmm");
    match std::fs::read_to_string(file).ok()?.trim() {
        "N" | "0" => Some(true),
        "Y" | "1" => Some(false),
        _ => None,
    }
}

/// Adds the GPUs that are at VFIO and that NVML does not describe, as they were described before. Their devices stay
/// published, because their claims take all of their counters. NVML numbers only the GPUs that it has. In the inventory
/// all GPUs keep the numbers that they have together; otherwise a policy that names GPUs by number would apply to other
/// GPUs.
pub fn add_at_vfio<'a>(inventory: &mut Inventory, at: impl IntoIterator<Item = &'a AtVfio>) {
    let is_described = |at: &&AtVfio| inventory.gpus.iter().any(|gpu| gpu.uuid == at.gpu.uuid);
    let mut missing: Vec<&AtVfio> = at.into_iter().filter(|at| !is_described(at)).collect();
    missing.sort_by_key(|at| at.gpu.index);
    for AtVfio {
        gpu, mig_profiles, ..
    } in missing
    {
        for other in &mut inventory.gpus {
            match (&mut other.index, gpu.index) {
                (Some(other), Some(index)) if *other >= index => *other += 1,
                _ => {}
            }
        }
        inventory.extend([gpu.clone()]);
        add_geometry(&mut inventory.mig_geometries, &gpu.uuid, mig_profiles);
    }
    put_in_order(&mut inventory.mig_geometries);
}

/// The profiles of the GPUs; equal GPUs are listed together.
fn geometries(gpus: &[GpuDescription]) -> Vec<MigGeometry> {
    let mut geometries = Vec::new();
    for gpu in gpus {
        add_geometry(&mut geometries, &gpu.uuid, &gpu.mig_profiles);
    }
    put_in_order(&mut geometries);
    geometries
}

/// Adds the profiles of a GPU, if it has any.
fn add_geometry(geometries: &mut Vec<MigGeometry>, uuid: &str, profiles: &[MigProfile]) {
    if profiles.is_empty() {
        return;
    }
    let known = geometries
        .iter_mut()
        .find(|known| known.profiles == profiles);
    match known {
        Some(known) => known.gpus.push(uuid.to_owned()),
        None => geometries.push(MigGeometry {
            gpus: vec![uuid.to_owned()],
            profiles: profiles.to_vec(),
        }),
    }
}

/// NVML's order follows the probe order, which changes; the inventory's must not.
fn put_in_order(geometries: &mut [MigGeometry]) {
    for geometry in geometries.iter_mut() {
        geometry.gpus.sort();
    }
    geometries.sort_by(|a, b| a.gpus.cmp(&b.gpus));
}

fn describe(gpu: &GpuDescription, sysfs: &Path) -> Gpu {
    let pci_bus_id = gpu.pci_bus_id();
    let folder = sysfs.join("bus/pci/devices").join(&pci_bus_id);
    Gpu {
        uuid: gpu.uuid.clone(),
        minor: gpu.minor,
        index: Some(gpu.index),
        product_name: gpu.name.clone(),
        brand: gpu.brand.clone(),
        architecture: gpu.architecture.clone(),
        cuda_compute_capability: gpu.compute_capability.clone(),
        pcie_root: pcie_root(&folder),
        numa_node: numa_node(&folder),
        pci_bus_id,
        memory: Quantity::from_bytes(gpu.memory_total),
        reserved_memory: Quantity::from_bytes(gpu.memory_reserved),
        context_memory: None,
        multiprocessors: gpu.multiprocessors,
        mig_capable: gpu.mig_capable,
        mig_mode: gpu.mig_mode,
        mig_instances: gpu.mig_instances.clone(),
        vfio: None,
        vgpu: vgpu::read(&folder, gpu.vgpu_role),
    }
}

/// The root complex: the first component below `/sys/devices` on the path to the device, in the form `pciDDDD:BB` that
/// `k8s.io/dynamic-resource-allocation/deviceattribute` uses.
fn pcie_root(folder: &Path) -> Option<String> {
    let real = std::fs::canonicalize(folder).ok()?;
    real.iter()
        .filter_map(|component| component.to_str())
        .find(|component| is_root_complex(component))
        .map(str::to_owned)
}

fn is_root_complex(component: &str) -> bool {
    component.strip_prefix("pci").is_some_and(|rest| {
        rest.split_once(':').is_some_and(|(domain, bus)| {
            [domain, bus]
                .iter()
                .all(|part| !part.is_empty() && part.bytes().all(|b| b.is_ascii_hexdigit()))
        })
    })
}

/// The kernel reports -1 on a machine without NUMA.
fn numa_node(folder: &Path) -> Option<u32> {
    let text = std::fs::read_to_string(folder.join("numa_node")).ok()?;
    text.trim().parse().ok()
}

#[cfg(any(test, feature = "testing"))]
#[allow(
    clippy::unwrap_used,
    clippy::missing_panics_doc,
    reason = "a test that cannot be set up fails"
)]
pub mod testing {
    //! For tests.

    use tranche_api::gpu_node::MigMode;

    use super::{Description, GpuDescription};

    /// Two described H100, the second first.
    #[must_use]
    pub fn two_h100() -> Description {
        h100(2)
    }

    /// This many H100, the last one first; at most ten.
    #[must_use]
    pub fn h100(count: u32) -> Description {
        let gpu = |minor: u32| GpuDescription {
            uuid: format!("GPU-{minor:08}-0000-0000-0000-00000000000{minor}"),
            index: minor,
            minor,
            name: "NVIDIA H100 80GB HBM3".into(),
            brand: "Nvidia".into(),
            architecture: "Hopper".into(),
            compute_capability: "9.0".into(),
            pci: (0, 0x1b + minor, 0),
            memory_total: 81_559 << 20,
            memory_reserved: 551 << 20,
            multiprocessors: Some(132),
            mig_capable: true,
            mig_mode: MigMode::default(),
            mig_profiles: Vec::new(),
            mig_instances: Vec::new(),
            vgpu_role: None,
        };
        Description {
            driver_version: "535.261.03".into(),
            cuda_driver_version: "12.2".into(),
            gpus: (0..count).rev().map(gpu).collect(),
            broken: Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn the_kernel_tells_root_complex_and_numa_node() {
        let sys = tempfile::tempdir().unwrap();
        let device = "devices/pci0000:16/0000:16:01.0/0000:1b:00.0";
        std::fs::create_dir_all(sys.path().join(device)).unwrap();
        std::fs::create_dir_all(sys.path().join("bus/pci/devices")).unwrap();
        std::fs::write(sys.path().join(device).join("numa_node"), "1\n").unwrap();
        symlink(
            sys.path().join(device),
            sys.path().join("bus/pci/devices/0000:1b:00.0"),
        )
        .unwrap();

        let inventory = inventory(&testing::two_h100(), sys.path());
        let [zero, one] = &inventory.gpus[..] else {
            panic!("{inventory:?}")
        };
        assert_eq!((zero.minor, one.minor), (0, 1));
        assert_eq!(zero.pci_bus_id, "0000:1b:00.0");
        assert_eq!(zero.pcie_root.as_deref(), Some("pci0000:16"));
        assert_eq!(zero.numa_node, Some(1));
        assert_eq!((one.pcie_root.as_deref(), one.numa_node), (None, None));
        assert_eq!(zero.memory, Quantity::from_bytes(81_559 << 20));
    }

    #[test]
    fn nvidia_uvm_says_whether_it_moves_host_memory() {
        let sys = tempfile::tempdir().unwrap();
        let folder = sys.path().join("module/nvidia_uvm/parameters");
        let seen = || inventory(&testing::two_h100(), sys.path()).heterogeneous_memory;
        assert_eq!(seen(), None);
        std::fs::create_dir_all(&folder).unwrap();
        for (text, moves) in [("N\n", Some(true)), ("Y\n", Some(false)), ("?\n", None)] {
            std::fs::write(folder.join("uvm_disable_hmm"), text).unwrap();
            assert_eq!(seen(), moves);
        }
    }

    #[test]
    fn gpus_keep_place_and_number_while_others_are_at_vfio() {
        let whole = testing::h100(4);
        let all = inventory(&whole, Path::new("/nowhere"));
        let at_vfio = |gpu: &Gpu| AtVfio {
            drivers: tranche_driver::vfio::VfioRecord::default(),
            gpu: gpu.clone(),
            mig_profiles: Vec::new(),
        };
        for away in 0_u32..1 << 4 {
            let is_away = |index: u32| away >> index & 1 == 1;
            let mut left = whole.clone();
            left.gpus.retain(|gpu| !is_away(gpu.index));
            // NVML numbers the GPUs that it has.
            left.gpus.sort_by_key(|gpu| gpu.index);
            let numbered = (0..).zip(&mut left.gpus);
            numbered.for_each(|(index, gpu)| gpu.index = index);
            let mut seen = inventory(&left, Path::new("/nowhere"));
            // The last first, and where that one is back, its record is still there.
            let records: Vec<AtVfio> = all
                .gpus
                .iter()
                .rev()
                .filter(|gpu| gpu.index.is_some_and(|it| it == 3 || is_away(it)))
                .map(at_vfio)
                .collect();
            add_at_vfio(&mut seen, &records);
            assert_eq!(seen, all, "{away:04b}");
        }
    }

    #[test]
    fn a_machine_without_numa_has_no_node_minus_one() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("numa_node"), "-1\n").unwrap();
        assert_eq!(numa_node(dir.path()), None);
    }
}
