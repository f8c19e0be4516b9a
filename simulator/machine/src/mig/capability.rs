//! The capabilities that give a process access to MIG instances: files below `/proc/driver/nvidia/capabilities`, and the
//! device nodes whose numbers they contain.
//!
//! Paths, numbers and modes are those of NVIDIA's MIG User Guide, "Device Nodes and Capabilities", and of `nv_caps.c` in
//! NVIDIA's open kernel modules.

use crate::root::DriverRoot;

/// The folder of device nodes below `dev`.
pub const NODES: &str = "nvidia-caps";
/// A usual major of nvidia-caps, which the kernel chooses at load time.
pub const MAJOR: u32 = 508;
/// GPU instances of a GPU: ids 0 to 14.
pub const GPU_INSTANCES: usize = 15;
/// Compute instances of a GPU instance: ids 0 to 7.
pub const COMPUTE_INSTANCES: usize = 8;
/// The number of GPUs that have capability numbers.
const GPUS: u32 = 32;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Capability {
    /// To create and destroy instances.
    Config,
    /// To see all instances.
    Monitor,
    /// To use a GPU instance: the GPU's minor number, and the instance's id.
    GpuInstance(u32, u32),
    /// To use a compute instance: the GPU's minor number, and the ids of the GPU instance and the compute instance.
    ComputeInstance(u32, u32, u32),
}

impl Capability {
    /// The minor number of its device node.
    #[must_use]
    pub fn minor(self) -> u32 {
        // A GPU instance has a number, and so has each of its 8 compute instances.
        let first = |gpu: u32, instance: u32| 3 + (gpu * 15 + instance) * 9;
        match self {
            Self::Config => 1,
            Self::Monitor => 2,
            Self::GpuInstance(gpu, instance) => first(gpu, instance),
            Self::ComputeInstance(gpu, instance, compute) => first(gpu, instance) + 1 + compute,
        }
    }

    /// The device node's name below `dev`.
    #[must_use]
    pub fn node(self) -> String {
        format!("{NODES}/nvidia-cap{}", self.minor())
    }

    /// The file's path below `/proc/driver/nvidia/capabilities`.
    #[must_use]
    pub fn file(self) -> String {
        match self {
            Self::Config => "mig/config".into(),
            Self::Monitor => "mig/monitor".into(),
            Self::GpuInstance(gpu, instance) => format!("gpu{gpu}/mig/gi{instance}/access"),
            Self::ComputeInstance(gpu, instance, compute) => {
                format!("gpu{gpu}/mig/gi{instance}/ci{compute}/access")
            }
        }
    }

    /// The mode of file and node.
    #[must_use]
    pub fn mode(self) -> u32 {
        if self == Self::Config { 0o400 } else { 0o444 }
    }

    #[must_use]
    pub fn content(self) -> String {
        format!(
            "DeviceFileMinor: {}\nDeviceFileMode: {}\nDeviceFileModify: 1\n",
            self.minor(),
            self.mode()
        )
    }
}

/// The content of `/proc/driver/nvidia-caps/mig-minors`.
#[must_use]
pub fn minors() -> String {
    use std::fmt::Write as _;
    let mut text = String::from("config 1\nmonitor 2\n");
    for gpu in 0..GPUS {
        for instance in 0..15 {
            let minor = Capability::GpuInstance(gpu, instance).minor();
            let _ = writeln!(text, "gpu{gpu}/gi{instance}/access {minor}");
            for compute in 0..8 {
                let minor = Capability::ComputeInstance(gpu, instance, compute).minor();
                let _ = writeln!(text, "gpu{gpu}/gi{instance}/ci{compute}/access {minor}");
            }
        }
    }
    text
}

/// What a process may do with MIG instances.
#[derive(Debug, Clone)]
pub struct Rights<'a> {
    root: &'a DriverRoot,
    is_administrator: bool,
}

impl<'a> Rights<'a> {
    /// The rights of this process below `root`. `CAP_SYS_ADMIN` gives all rights, as in the real driver.
    #[must_use]
    pub fn of_this_process(root: &'a DriverRoot) -> Self {
        Self {
            root,
            is_administrator: is_administrator(),
        }
    }

    fn has(&self, capability: Capability) -> bool {
        self.is_administrator || self.root.can_read_node(&capability.node())
    }

    /// Whether it may create and destroy instances.
    #[must_use]
    pub fn can_configure(&self) -> bool {
        self.has(Capability::Config)
    }

    /// Whether it may use a compute instance: the GPU's minor number, and the ids of the two instances.
    #[must_use]
    pub fn can_use(&self, gpu: u32, instance: u32, compute: u32) -> bool {
        self.has(Capability::GpuInstance(gpu, instance))
            && self.has(Capability::ComputeInstance(gpu, instance, compute))
    }

    /// Whether it may see all instances.
    #[must_use]
    pub fn can_monitor(&self) -> bool {
        self.has(Capability::Config) || self.has(Capability::Monitor)
    }
}

/// Whether this thread has `CAP_SYS_ADMIN`.
fn is_administrator() -> bool {
    const SYS_ADMIN: u64 = 1 << 21;
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
    let effective = status
        .lines()
        .find_map(|line| line.strip_prefix("CapEff:"))
        .and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok());
    effective.is_some_and(|mask| mask & SYS_ADMIN != 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The numbers that the guide shows.
    #[test]
    fn minors_are_those_of_the_kernel_module() {
        let text = minors();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(
            &lines[..6],
            [
                "config 1",
                "monitor 2",
                "gpu0/gi0/access 3",
                "gpu0/gi0/ci0/access 4",
                "gpu0/gi0/ci1/access 5",
                "gpu0/gi0/ci2/access 6"
            ]
        );
        assert_eq!(lines.last(), Some(&"gpu31/gi14/ci7/access 4322"));
        assert_eq!(
            Capability::GpuInstance(0, 1).node(),
            "nvidia-caps/nvidia-cap12"
        );
        assert_eq!(Capability::ComputeInstance(0, 1, 2).minor(), 15);
        assert_eq!(
            Capability::Config.content(),
            "DeviceFileMinor: 1\nDeviceFileMode: 256\nDeviceFileModify: 1\n"
        );
    }
}
