//! What the kernel's `sys` tree shows of vGPUs, and which GPUs are withheld because of them.
//!
//! ```text
//!  <GPU or virtfnN>/mdev_supported_types/nvidia-N/name                what can be made, on kernels where the driver uses mdev
//!                                       /devices/<UUID>               what was made
//!  <GPU>/virtfnN/nvidia/creatable_vgpu_types   "ID : vGPU Name"       what can be made now, on other kernels
//!                      /current_vgpu_type      an ID, 0 for none      what was made
//! ```
//!
//! From the kernel's `vfio-mediated-device.rst` and NVIDIA's vGPU user guide; NVIDIA's vgpu-device-manager reads the same files.

use std::collections::BTreeSet;
use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use tranche_api::WithheldGpu;
use tranche_api::gpu_node::{Gpu, Inventory};
use tranche_api::tier::Tier;
use tranche_api::vgpu::{GpuVgpu, LONGEST_TYPE, MOST_TYPES, VgpuRole};
use tranche_api::withheld::reason;

use crate::nvml::Description;

/// The vGPU facts of the GPU of a folder of `bus/pci/devices`; `role` is its role as far as NVML reports it.
#[must_use]
pub fn read(device: &Path, role: Option<VgpuRole>) -> Option<GpuVgpu> {
    let virtual_functions = virtual_functions(device);
    let mut types = BTreeSet::new();
    let mut devices = 0_usize;
    for function in virtual_functions
        .iter()
        .map(PathBuf::as_path)
        .chain([device])
    {
        for of_type in entries(&function.join("mdev_supported_types")) {
            types.extend(fs::read_to_string(of_type.join("name")).ok());
            devices += entries(&of_type.join("devices")).len();
        }
        let vendor = function.join("nvidia");
        let creatable = fs::read_to_string(vendor.join("creatable_vgpu_types"));
        types.extend(creatable.iter().flat_map(|text| names(text)));
        devices += usize::from(is_set(fs::read_to_string(vendor.join("current_vgpu_type"))));
    }
    let types: BTreeSet<_> = types.iter().filter_map(|name| short(name)).collect();
    let can_host = !types.is_empty() || devices > 0;
    Some(GpuVgpu {
        role: role.or_else(|| can_host.then_some(VgpuRole::Host))?,
        types: types.into_iter().take(MOST_TYPES).collect(),
        devices: u32::try_from(devices).unwrap_or(u32::MAX),
        virtual_functions: u32::try_from(virtual_functions.len()).unwrap_or(u32::MAX),
    })
}

/// The GPUs with vGPUs; and those with virtual functions, which no virtual machine can get as a whole.
#[must_use]
pub fn withheld(inventory: &Inventory) -> Vec<WithheldGpu> {
    inventory.gpus.iter().filter_map(on_host).collect()
}

/// Whether the driver makes vGPUs of all of its GPUs.
#[must_use]
pub fn is_host(description: &Description) -> bool {
    let mut gpus = description.gpus.iter();
    !description.gpus.is_empty()
        && gpus.all(|gpu| gpu.vgpu_role.is_some_and(|it| it != VgpuRole::Guest))
}

/// All GPUs of a host whose driver is only for vGPUs, as `error` shows: NVIDIA's packages for such hosts have no CUDA.
#[must_use]
pub fn without_cuda(inventory: &Inventory, error: &dyn std::error::Error) -> Vec<WithheldGpu> {
    let message = format!(
        "the node's driver makes vGPUs and has no CUDA: {error}; Tranche does not serve vGPUs: leave the node to them, or install \
         a driver with CUDA"
    );
    let withheld = |gpu: &Gpu| WithheldGpu::whole(&gpu.uuid, reason::VGPU_HOST, message.clone());
    inventory.gpus.iter().map(withheld).collect()
}

fn on_host(gpu: &Gpu) -> Option<WithheldGpu> {
    let vgpu = gpu.vgpu.as_ref()?;
    let whole = |message| Some(WithheldGpu::whole(&gpu.uuid, reason::VGPU_HOST, message));
    if vgpu.role == VgpuRole::SharedGraphicsHost {
        return whole(
            "the hypervisor shares the GPU for graphics (vSGA), and its memory is taken as virtual machines need it: put the GPU \
             into another mode"
                .to_owned(),
        );
    }
    if vgpu.devices > 0 {
        return whole(format!(
            "vGPUs of the GPU exist ({}), and its memory is theirs until they are removed; Tranche does not serve vGPUs: remove \
             them, or leave the GPU to them",
            vgpu.devices
        ));
    }
    (vgpu.virtual_functions > 0).then(|| WithheldGpu {
        tiers: vec![Tier::Passthrough],
        ..WithheldGpu::whole(
            &gpu.uuid,
            reason::VGPU_HOST,
            format!(
                "{} virtual functions of the GPU are on, which would go when the GPU is given to a virtual machine: switch them \
                 off (`sriov-manage -d {}`), or do not offer the tier passthrough for this GPU",
                vgpu.virtual_functions, gpu.pci_bus_id
            ),
        )
    })
}

fn virtual_functions(device: &Path) -> Vec<PathBuf> {
    let is_function = |path: &PathBuf| {
        let name = path.file_name().and_then(|name| name.to_str());
        let number = name.and_then(|name| name.strip_prefix("virtfn"));
        number.is_some_and(|number| number.parse::<u32>().is_ok())
    };
    entries(device).into_iter().filter(is_function).collect()
}

/// The paths in a folder; empty if it cannot be listed.
fn entries(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten();
    entries
        .filter_map(|entry| Some(entry.ok()?.path()))
        .collect()
}

/// The names in lines such as `1428 : NVIDIA H200X-141C`; the first line may be a heading.
fn names(lines: &str) -> impl Iterator<Item = String> {
    lines.lines().filter_map(|line| {
        let (id, name) = line.split_once(':')?;
        id.trim().parse::<u32>().ok()?;
        Some(name.to_owned())
    })
}

/// A name in the form that the cluster's API accepts.
fn short(name: &str) -> Option<String> {
    let name = name.trim();
    let mut end = name.len().min(LONGEST_TYPE);
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    (end > 0).then(|| name[..end].to_owned())
}

/// Whether a vGPU exists: a type that is not 0. A file that cannot be read may stand for one.
fn is_set(current: io::Result<String>) -> bool {
    match current {
        Ok(id) => !matches!(id.trim(), "" | "0"),
        Err(error) => error.kind() != ErrorKind::NotFound,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::inventory::{inventory, testing::two_h100};

    const GPU: &str = "0000:1b:00.0";

    /// The `sys` tree of a machine.
    struct Sys(tempfile::TempDir);

    impl Sys {
        fn new() -> Self {
            let sys = Self(tempfile::tempdir().unwrap());
            fs::create_dir_all(sys.device(GPU)).unwrap();
            sys
        }

        fn device(&self, address: &str) -> PathBuf {
            self.0.path().join("bus/pci/devices").join(address)
        }

        fn write(&self, address: &str, file: &str, text: &str) {
            let file = self.device(address).join(file);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        }

        fn virtual_function(&self, number: u32) -> String {
            let address = format!("0000:1b:00.{}", number + 4);
            fs::create_dir_all(self.device(&address)).unwrap();
            let link = self.device(GPU).join(format!("virtfn{number}"));
            symlink(Path::new("..").join(&address), link).unwrap();
            address
        }

        /// The folder of the first GPU.
        fn read(&self) -> Option<GpuVgpu> {
            read(&self.device(GPU), None)
        }

        fn withheld(&self) -> Vec<WithheldGpu> {
            withheld(&inventory(&two_h100(), self.0.path()))
        }
    }

    fn tiers(withheld: &[WithheldGpu]) -> Vec<Tier> {
        let uuid = &inventory(&two_h100(), Path::new("/nowhere")).gpus[0].uuid;
        assert!(
            withheld
                .iter()
                .all(|it| it.reason == reason::VGPU_HOST && it.gpu == *uuid)
        );
        let covers = |tier: &Tier| withheld.iter().any(|it| it.covers(uuid, *tier));
        Tier::ALL.into_iter().filter(covers).collect()
    }

    #[test]
    fn types_by_mdev_are_listed_and_a_vgpu_takes_the_gpu() {
        let sys = Sys::new();
        assert_eq!((sys.read(), sys.withheld()), (None, vec![]));
        let at = |number: u32, file: &str| format!("mdev_supported_types/nvidia-{number}/{file}");
        sys.write(GPU, &at(233, "name"), "GRID T4-4Q\n");
        sys.write(GPU, &at(233, "available_instances"), "4\n");
        sys.write(GPU, &at(231, "name"), "GRID T4-1Q\n");
        fs::create_dir_all(sys.device(GPU).join(at(231, "devices"))).unwrap();
        let none = GpuVgpu {
            role: VgpuRole::Host,
            types: vec!["GRID T4-1Q".to_owned(), "GRID T4-4Q".to_owned()],
            devices: 0,
            virtual_functions: 0,
        };
        assert_eq!((sys.read(), sys.withheld()), (Some(none.clone()), vec![]));

        sys.write(
            GPU,
            &at(231, "devices/070bcb42-18fc-4971-9aa9-67f5ee1281c3"),
            "",
        );
        let one = GpuVgpu { devices: 1, ..none };
        assert_eq!(sys.read(), Some(one));
        assert_eq!(tiers(&sys.withheld()), Tier::ALL);
    }

    #[test]
    fn virtual_function_types_are_listed_and_a_vgpu_takes_the_gpu() {
        let sys = Sys::new();
        let functions = [0, 1].map(|number| sys.virtual_function(number));
        let [creatable, current] = ["nvidia/creatable_vgpu_types", "nvidia/current_vgpu_type"];
        let list = "ID    : vGPU Name\n1428  : NVIDIA H200X-141C\n1414 : NVIDIA H200X-1-18C\n";
        for function in &functions {
            sys.write(function, creatable, list);
            sys.write(function, current, "0\n");
        }
        let none = GpuVgpu {
            role: VgpuRole::Host,
            types: vec![
                "NVIDIA H200X-1-18C".to_owned(),
                "NVIDIA H200X-141C".to_owned(),
            ],
            devices: 0,
            virtual_functions: 2,
        };
        assert_eq!(sys.read(), Some(none.clone()));
        // The functions would disappear with the GPU.
        let withheld = sys.withheld();
        assert_eq!(tiers(&withheld), [Tier::Passthrough]);
        assert!(withheld[0].message.contains(GPU), "{withheld:?}");

        // It leaves no room for others.
        sys.write(&functions[1], current, "1428\n");
        for function in &functions {
            sys.write(function, creatable, "");
        }
        let one = GpuVgpu {
            devices: 1,
            types: vec![],
            ..none
        };
        assert_eq!(sys.read(), Some(one));
        assert_eq!(tiers(&sys.withheld()), Tier::ALL);
    }

    #[test]
    fn a_vgpu_of_which_the_type_cannot_be_read_takes_the_gpu() {
        let sys = Sys::new();
        let function = sys.virtual_function(0);
        fs::create_dir_all(sys.device(&function).join("nvidia/current_vgpu_type")).unwrap();
        assert_eq!(tiers(&sys.withheld()), Tier::ALL);
    }

    #[test]
    fn a_driver_with_too_many_or_long_names_leaves_a_valid_status() {
        let sys = Sys::new();
        for number in 0..200 {
            let name = format!("{number:03} {}", "é".repeat(LONGEST_TYPE));
            sys.write(
                GPU,
                &format!("mdev_supported_types/nvidia-{number}/name"),
                &name,
            );
        }
        let types = sys.read().unwrap().types;
        assert_eq!(types.len(), MOST_TYPES);
        assert!(types.iter().all(|name| name.len() <= LONGEST_TYPE));
    }

    #[test]
    fn what_nvml_says_holds_without_anything_in_sysfs() {
        let with = |role| {
            let mut description: Description = two_h100();
            let first = description.gpus.iter_mut().find(|gpu| gpu.index == 0);
            first.unwrap().vgpu_role = role;
            inventory(&description, Path::new("/nowhere"))
        };
        let guest = with(Some(VgpuRole::Guest));
        assert!(guest.gpus[0].is_vgpu() && guest.gpus[1].vgpu.is_none());
        assert_eq!(withheld(&guest), []);
        assert_eq!(withheld(&with(Some(VgpuRole::Host))), []);
        let shared = with(Some(VgpuRole::SharedGraphicsHost));
        assert_eq!(tiers(&withheld(&shared)), Tier::ALL);
    }
}
