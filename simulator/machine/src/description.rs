//! The machine file: the GPUs of a simulated machine, in TOML.

use std::path::Path;

use serde::Deserialize;

use crate::mig::ModelName;

/// The most GPUs of a machine.
pub const MAX_GPUS: usize = 16;

/// The beginning of every product name of a simulated GPU.
pub const NAME_PREFIX: &str = "Simulated ";

/// Bytes in a MiB, the unit of memory in machine files.
pub const MIB: u64 = 1 << 20;

/// A machine file that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DescriptionError {
    /// The file cannot be read.
    #[error("machine file {path}: {source}")]
    Read {
        path: String,
        source: std::io::Error,
    },
    /// The file is not valid TOML, or has fields that do not exist.
    #[error("machine file {path}: {message}")]
    Parse {
        path: String,
        /// Line, field and reason.
        message: String,
    },
    /// A value is out of its range.
    #[error("machine file {path}: {field}: {reason}")]
    Value {
        path: String,
        field: String,
        reason: String,
    },
}

/// A machine: its driver and its GPUs.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Description {
    /// The kernel driver's version, as in `/proc/driver/nvidia/version`.
    pub driver_version: String,
    /// The CUDA version the driver supports: 1000 × major + 10 × minor.
    pub cuda_version: u32,
    /// The minor numbers of the GPUs, for a kernel that has probed them in another order than that of their PCI
    /// addresses; 0, 1, … by default. They do not change a GPU's UUID and address.
    #[serde(default)]
    pub minors: Vec<u32>,
    /// The GPUs, in the order in which NVML counts them.
    #[serde(rename = "gpu")]
    pub gpus: Vec<GpuDescription>,
    /// Habits of real drivers. All are off without `[habits]`.
    #[serde(default)]
    pub habits: Habits,
}

/// Habits of real drivers that make accounting of memory and time harder. README.md lists the source of each and the
/// test that shows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[expect(clippy::struct_excessive_bools, reason = "independent switches")]
pub struct Habits {
    /// `cuMemFree` waits for all work of its context. Memory that `cuMemFreeAsync` frees is in use until its stream reaches
    /// the free, and a pool returns memory to the GPU at the next synchronization.
    pub frees_wait: bool,
    /// A module's code and variables take memory when the first of them is used in a context
    /// (`CUDA_MODULE_LOADING=LAZY`, the default), or when it is loaded (`EAGER`).
    pub lazy_loading: bool,
    /// A graph's memory is allocated at its first launch and stays in the GPU's graph pool after the graph is destroyed,
    /// until `cuDeviceGraphMemTrim`.
    pub graph_memory_stays: bool,
    /// Managed memory takes GPU memory when the GPU uses it, and is evicted when other allocations need room.
    pub managed_memory_occupies: bool,
    /// Allocations smaller than a block of 2 MiB share blocks, whatever their sizes.
    pub mixed_blocks: bool,
    /// `cuMemMap` maps whole physical allocations and multicast objects only.
    pub whole_maps: bool,
    /// Time that a launch keeps the calling thread busy, in nanoseconds; at most a second.
    pub launch_nanos: u32,
    /// Time for which a GPU is idle when it switches to another process, in microseconds; at most a second.
    pub switch_micros: u32,
}

/// `count` equal GPUs.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GpuDescription {
    /// Their number; 1 by default.
    #[serde(default = "one")]
    pub count: u32,
    /// Product name; begins with [`NAME_PREFIX`].
    pub name: String,
    /// NVML's architecture number (`NVML_DEVICE_ARCH_*`).
    pub architecture: Architecture,
    /// CUDA compute capability, major and minor.
    pub compute_capability: [u32; 2],
    /// `nvmlBrandType_t`: 14 is the data-centre brand, plain "NVIDIA".
    #[serde(default = "nvidia_brand")]
    pub brand: u32,
    /// Total memory in MiB as NVML reports it, with the driver's reserve.
    pub memory_mib: u64,
    /// The driver's reserve in MiB. CUDA's total is the rest.
    pub reserved_mib: u64,
    /// Memory of one process's context in MiB.
    pub context_mib: u64,
    /// BAR1 aperture in MiB.
    pub bar1_mib: u64,
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Resident threads of one multiprocessor.
    pub threads_per_multiprocessor: u32,
    /// Shared memory of one multiprocessor, in KiB.
    pub shared_memory_kib: u32,
    /// Level-2 cache in KiB.
    pub l2_cache_kib: u32,
    /// Width of the memory bus in bits.
    pub memory_bus_bits: u32,
    /// Highest SM clock in MHz.
    pub sm_clock_mhz: u32,
    /// Memory clock in MHz.
    pub memory_clock_mhz: u32,
    /// Board power limit in watts.
    pub power_limit_watts: u32,
    /// Board power when idle, in watts.
    pub idle_watts: u32,
    /// PCI device id and vendor id (`0x233010de` for an H100 SXM5).
    pub pci_device_id: u32,
    pub pci_subsystem_id: u32,
    /// PCI express generation and lanes.
    pub pcie: [u32; 2],
    /// PCI addresses of the `count` GPUs (`0000:1b:00.0`); spread over the bus by default.
    #[serde(default)]
    pub pci_bus_ids: Vec<String>,
    /// NUMA nodes of the `count` GPUs; node 0 by default.
    #[serde(default)]
    pub numa_nodes: Vec<i32>,
    /// The model whose MIG geometry the GPU has; without it the GPU has no MIG modes.
    #[serde(default)]
    pub mig: Option<ModelName>,
    /// Whether a change of the MIG mode takes effect only at a reset of the GPU, as for an Ampere GPU that is passed through to
    /// a virtual machine which cannot reset it; false by default.
    #[serde(default)]
    pub mig_needs_reset: bool,
    /// The GPU's part in virtualization; none by default. A `vgpu` has no MIG modes, as in NVIDIA's kernel modules
    /// (`subdeviceCtrlCmdGpuSetPartitioningMode_IMPL`).
    #[serde(default)]
    pub virtualization: Virtualization,
    /// Whether `dma-buf`s can be made of its memory, as with the open kernel modules; false by default.
    #[serde(default)]
    pub dma_buf: bool,
    /// Whether multicast objects can be bound to its memory, as on boards with NVSwitch of the third generation; false by
    /// default.
    #[serde(default)]
    pub multicast: bool,
    /// NVLinks of the board; 0 by default.
    #[serde(default)]
    pub nvlinks: u32,
    /// Virtual time of a kernel whose name contains no time, in microseconds.
    #[serde(default = "ten")]
    pub kernel_micros: u32,
}

/// GPU architectures, spelled as NVML's `NVML_DEVICE_ARCH_*`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Architecture {
    /// Compute capability 7.5.
    Turing = 6,
    /// Compute capability 8.0 to 8.7.
    Ampere = 7,
    /// Compute capability 8.9.
    Ada = 8,
    /// Compute capability 9.0.
    Hopper = 9,
    /// Compute capability 10.0 and later.
    Blackwell = 10,
}

/// `nvmlGpuVirtualizationMode_t`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Virtualization {
    /// The machine is not virtual, or does not know that it is.
    #[default]
    None = 0,
    /// The machine is virtual and has the whole GPU.
    Passthrough = 1,
    /// The machine is virtual, and the GPU is a vGPU.
    Vgpu = 2,
    /// The machine makes vGPUs of the GPU.
    HostVgpu = 3,
    /// The machine shares the GPU for graphics (vSGA).
    HostVsga = 4,
}

fn one() -> u32 {
    1
}

fn ten() -> u32 {
    10
}

fn nvidia_brand() -> u32 {
    14
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PciAddress {
    /// Domain, 0 on most machines.
    pub domain: u32,
    pub bus: u32,
    /// Device on the bus.
    pub device: u32,
}

impl PciAddress {
    /// Reads `0000:1b:00.0`, `00000000:1B:00.0` or `1b:00.0`.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let (text, function) = text.trim().split_once('.').unwrap_or((text.trim(), "0"));
        let mut parts = text.rsplit(':');
        let device = hexadecimal(parts.next()?, 0x1f)?;
        let bus = hexadecimal(parts.next()?, 0xff)?;
        let domain = parts.next().map_or(Some(0), |d| hexadecimal(d, u32::MAX))?;
        (parts.next().is_none() && function == "0").then_some(Self {
            domain,
            bus,
            device,
        })
    }

    /// The default address of GPU `index`: one GPU behind each root port, as in a server with eight GPUs.
    #[must_use]
    pub fn spread(index: u32) -> Self {
        Self {
            domain: 0,
            bus: (0x1b + 0x10 * index) & 0xff,
            device: 0,
        }
    }
}

fn hexadecimal(digits: &str, max: u32) -> Option<u32> {
    // from_str_radix accepts a sign, which an address does not have.
    if digits.is_empty() || !digits.bytes().all(|b| b.is_ascii_hexdigit()) {
        return None;
    }
    u32::from_str_radix(digits, 16).ok().filter(|v| *v <= max)
}

impl Description {
    /// Reads and checks a machine file.
    pub fn read(path: &Path) -> Result<Self, DescriptionError> {
        let text = std::fs::read_to_string(path).map_err(|source| DescriptionError::Read {
            path: path.display().to_string(),
            source,
        })?;
        Self::parse(&text, &path.display().to_string())
    }

    /// Checks the text of the machine file `path`.
    pub fn parse(text: &str, path: &str) -> Result<Self, DescriptionError> {
        let parsed: Self = toml::from_str(text).map_err(|error| DescriptionError::Parse {
            path: path.to_owned(),
            message: error.to_string().trim().to_owned(),
        })?;
        parsed.check(path)?;
        Ok(parsed)
    }

    /// The number of GPUs.
    #[must_use]
    pub fn gpu_count(&self) -> u64 {
        self.gpus.iter().map(|gpu| u64::from(gpu.count)).sum()
    }

    fn check(&self, path: &str) -> Result<(), DescriptionError> {
        let refuse = |field: String, reason: String| {
            Err(DescriptionError::Value {
                path: path.to_owned(),
                field,
                reason,
            })
        };
        if self.driver_version.is_empty()
            || self.driver_version.len() > 30
            || !self
                .driver_version
                .bytes()
                .all(|b| b.is_ascii_digit() || b == b'.')
        {
            return refuse(
                "driver_version".into(),
                "must be digits and dots, as in 535.261.03".into(),
            );
        }
        if !(11_040..=19_990).contains(&self.cuda_version) {
            return refuse(
                "cuda_version".into(),
                "must be 1000 × major + 10 × minor, from 11040".into(),
            );
        }
        let count = self.gpu_count();
        if count == 0 || count > MAX_GPUS as u64 {
            return refuse(
                "gpu".into(),
                format!("{count} GPUs; must be 1 to {MAX_GPUS}"),
            );
        }
        let mut sorted = self.minors.clone();
        sorted.sort_unstable();
        if !sorted.is_empty() && !sorted.iter().map(|n| u64::from(*n)).eq(0..count) {
            return refuse(
                "minors".into(),
                format!(
                    "must be the numbers 0 to {} in any order, or none",
                    count - 1
                ),
            );
        }
        if self.habits.launch_nanos > 1_000_000_000 {
            return refuse(
                "habits.launch_nanos".into(),
                "must be at most 1000000000".into(),
            );
        }
        if self.habits.switch_micros > 1_000_000 {
            return refuse(
                "habits.switch_micros".into(),
                "must be at most 1000000".into(),
            );
        }
        for (index, gpu) in self.gpus.iter().enumerate() {
            if let Err((field, reason)) = gpu.check() {
                return refuse(format!("gpu[{index}].{field}"), reason);
            }
        }
        Ok(())
    }
}

impl GpuDescription {
    fn check(&self) -> Result<(), (&'static str, String)> {
        if !self.name.starts_with(NAME_PREFIX) || self.name.len() > 63 {
            return Err((
                "name",
                format!("must begin with {NAME_PREFIX:?} and have at most 63 bytes"),
            ));
        }
        if self.memory_mib == 0 || self.memory_mib > 1 << 24 {
            return Err(("memory_mib", "must be 1 to 16777216".into()));
        }
        if self.reserved_mib.saturating_add(self.context_mib) >= self.memory_mib {
            return Err((
                "reserved_mib",
                "with context_mib, must be less than memory_mib".into(),
            ));
        }
        if self.multiprocessors == 0 || self.threads_per_multiprocessor == 0 {
            return Err(("multiprocessors", "must be more than 0".into()));
        }
        if !self.pci_bus_ids.is_empty() && self.pci_bus_ids.len() != self.count as usize {
            return Err(("pci_bus_ids", "must name `count` addresses or none".into()));
        }
        if let Some(bad) = self
            .pci_bus_ids
            .iter()
            .find(|id| PciAddress::parse(id).is_none())
        {
            return Err((
                "pci_bus_ids",
                format!("{bad:?} is not a PCI address such as 0000:1b:00.0"),
            ));
        }
        if !self.numa_nodes.is_empty() && self.numa_nodes.len() != self.count as usize {
            return Err(("numa_nodes", "must name `count` nodes or none".into()));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const H100: &str = include_str!("../../machines/H100-80.toml");

    #[test]
    fn every_shipped_machine_is_valid() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../machines");
        let mut seen = 0;
        for entry in std::fs::read_dir(folder).unwrap() {
            Description::read(&entry.unwrap().path()).unwrap();
            seen += 1;
        }
        assert!(seen >= 5);
    }

    #[test]
    fn errors_name_the_field() {
        let cases = [
            (H100.replace("Simulated H100", "H100"), "gpu[0].name"),
            (
                H100.replace("memory_mib = 81559", "memory_mib = 0"),
                "gpu[0].memory_mib",
            ),
            (H100.replace("count = 1", "count = 99"), "99 GPUs"),
            (H100.replace("count = 1", "colour = 1"), "colour"),
            (H100.replace("535.261.03", "five"), "driver_version"),
            (format!("{H100}[habits]\nlaunches = 1\n"), "launches"),
            (
                format!("{H100}[habits]\nswitch_micros = 1000001\n"),
                "habits.switch_micros",
            ),
        ];
        for (text, expected) in cases {
            let message = Description::parse(&text, "m.toml").unwrap_err().to_string();
            assert!(message.starts_with("machine file m.toml: "), "{message}");
            assert!(message.contains(expected), "{message}");
        }
    }

    #[test]
    fn pci_addresses_are_read_as_nvml_and_sysfs_write_them() {
        let expected = PciAddress {
            domain: 0,
            bus: 0x1b,
            device: 2,
        };
        for text in ["0000:1b:02.0", "00000000:1B:02.0", "1b:02.0", "1b:02"] {
            assert_eq!(PciAddress::parse(text), Some(expected), "{text}");
        }
        for text in [
            "",
            "1b",
            "0000:1b:02.1",
            "0:0000:1b:02.0",
            "0000:+b:02.0",
            "0000:1bb:00.0",
        ] {
            assert_eq!(PciAddress::parse(text), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn no_text_panics(text in ".{0,200}") {
            let _ = Description::parse(&text, "m.toml");
            let _ = PciAddress::parse(&text);
        }
    }
}
