//! The device nodes that a container needs to use a partition, beside the GPU's own.
//!
//! A process may use a GPU instance and a compute instance if it can open the device node of each,
//! `/dev/nvidia-caps/nvidia-cap<minor>`. The kernel module reports the minor number in a file for each,
//! `/proc/driver/nvidia/capabilities/gpu<minor>/mig/gi<id>/access` and `…/gi<id>/ci<id>/access`, which exists as long as the
//! instance (NVIDIA's MIG User Guide, "Device Nodes and Capabilities"). The major number is in `/proc/devices`.
//!
//! On the host `nvidia-modprobe` creates a node when a program of the host first needs it, so it may be missing.
//! [`CapabilityNode::make`] creates it, because a container runtime reads the numbers of the host's node, or, in a
//! container with a user namespace, binds it (`createDeviceNode` of runc).

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::{major, makedev};

use crate::devices::make;

/// The driver's name in `/proc/devices`.
const DRIVER: &str = "nvidia-caps";

/// A capability's device node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CapabilityNode {
    /// In a container, and below the root that has the driver's device nodes.
    pub path: String,
    /// The character device's numbers.
    pub major: u32,
    /// See `major`.
    pub minor: u32,
    /// The permission bits: who can open it can use the instance.
    pub mode: u32,
    /// Whether the kernel module allows programs to create it and change its mode (`DeviceFileModify`).
    may_make: bool,
    /// The root that has it, as the host's first process sees it.
    of_init: PathBuf,
}

/// Why a partition's device nodes are not known or cannot be created.
#[derive(Debug, thiserror::Error)]
pub enum CapabilityError {
    /// The kernel module's file.
    #[error(
        "the capability file {path} cannot be read: {source}: the partition's instance was removed, or the kernel module \
         nvidia is not loaded (`nvidia-smi mig -lgi` and `nvidia-smi mig -lci` list the instances)"
    )]
    File {
        /// As this process sees it.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// Its content.
    #[error(
        "the capability file {path} has no {field}: this release does not know the driver's format"
    )]
    Field {
        /// As this process sees it.
        path: PathBuf,
        /// The field that is missing or is not a number.
        field: &'static str,
    },
    /// The major number is not known.
    #[error(
        "{devices} has no {DRIVER}, and there is no device node {node}: the kernel module nvidia is not loaded"
    )]
    NoMajor {
        /// `/proc/devices`, as this process sees it.
        devices: PathBuf,
        /// The node, as this process sees it.
        node: PathBuf,
    },
    /// The node cannot be created.
    #[error(
        "cannot make the device node {path}: {source}: make it on the node by `nvidia-modprobe -f <capability file>`"
    )]
    Make {
        /// As this process sees it.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
}

/// The device nodes of a GPU instance and of a compute instance in it, in this order. `gpu_minor` is the GPU's minor number,
/// the others are the instances' ids. `proc` is the host's `/proc`, in the host's root, and `root` the root that has the
/// driver's device nodes, as this process sees them.
pub fn of_partition(
    proc: &Path,
    root: &Path,
    gpu_minor: u32,
    instance: u32,
    compute: u32,
) -> Result<[CapabilityNode; 2], CapabilityError> {
    let folder = proc
        .join("driver/nvidia/capabilities")
        .join(format!("gpu{gpu_minor}/mig/gi{instance}"));
    let host = proc.parent().unwrap_or(proc);
    let on_host = root.strip_prefix(host).unwrap_or(Path::new(""));
    let of_init = proc.join("1/root").join(on_host);
    let read = |file: PathBuf| {
        let access = Access::read(&file)?;
        let path = format!("/dev/{DRIVER}/nvidia-cap{}", access.minor);
        Ok(CapabilityNode {
            major: major_of(proc, &root.join(&path[1..]))?,
            path,
            minor: access.minor,
            mode: access.mode,
            may_make: access.may_make,
            of_init: of_init.clone(),
        })
    };
    Ok([
        read(folder.join("access"))?,
        read(folder.join(format!("ci{compute}/access")))?,
    ])
}

impl CapabilityNode {
    /// Creates the node below a root, if it is missing there or has other numbers, as `nvidia-modprobe` does. If this
    /// process sees the root read-only, it goes through the mounts of the host's first process, which needs the
    /// capability `CAP_SYS_PTRACE`.
    pub fn make(&self, root: &Path) -> Result<(), CapabilityError> {
        if !self.may_make {
            return Ok(());
        }
        let make = |root: &Path| {
            let path = root.join(&self.path[1..]);
            let number = makedev(self.major, self.minor);
            make(&path, number, self.mode).map_err(|source| CapabilityError::Make { path, source })
        };
        make(root).or_else(|error| make(&self.of_init).map_err(|_| error))
    }
}

/// What the kernel module reports about a capability's node.
struct Access {
    minor: u32,
    mode: u32,
    may_make: bool,
}

impl Access {
    fn read(path: &Path) -> Result<Self, CapabilityError> {
        let text = fs::read_to_string(path).map_err(|source| CapabilityError::File {
            path: path.to_owned(),
            source,
        })?;
        let number = |field: &'static str| {
            let mut values = text
                .lines()
                .filter_map(|line| line.split_once(':'))
                .filter(|(name, _)| name.trim() == field);
            let value = values
                .next()
                .and_then(|(_, value)| value.trim().parse().ok());
            value.ok_or(CapabilityError::Field {
                path: path.to_owned(),
                field,
            })
        };
        Ok(Self {
            minor: number("DeviceFileMinor")?,
            mode: number("DeviceFileMode")? & 0o777,
            may_make: number("DeviceFileModify")? != 0,
        })
    }
}

/// The driver's major number, which the kernel chooses when the module is loaded: from the kernel's list, or else from
/// the node, if there is one.
fn major_of(proc: &Path, node: &Path) -> Result<u32, CapabilityError> {
    let devices = proc.join("devices");
    let listed = fs::read_to_string(&devices)
        .ok()
        .and_then(|text| character_major(&text));
    let made = || {
        let metadata = node.symlink_metadata().ok()?;
        let is_node = metadata.file_type().is_char_device();
        is_node.then(|| major(metadata.rdev()))
    };
    listed
        .or_else(made)
        .ok_or_else(|| CapabilityError::NoMajor {
            devices,
            node: node.to_owned(),
        })
}

/// The major number of the driver in the kernel's list: lines of a number and a name, first the character devices, then the
/// block devices.
fn character_major(devices: &str) -> Option<u32> {
    let lines = devices.lines().take_while(|line| *line != "Block devices:");
    let mut entries = lines.filter_map(|line| line.trim().split_once(' '));
    let (number, _) = entries.find(|(_, name)| *name == DRIVER)?;
    number.parse().ok()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    /// In the form of proc(5); the numbers are examples.
    const DEVICES: &str = "Character devices:\n  1 mem\n195 nvidia\n195 nvidia-modeset\n195 nvidiactl\n235 nvidia-caps-imex-channels\n\
                           236 nvidia-caps\n510 nvidia-uvm\n\nBlock devices:\n  7 loop\n 99 nvidia-caps\n";

    /// The files of the MIG User Guide's example: GPU instance 3 of GPU 0, and its compute instance.
    fn host() -> tempfile::TempDir {
        let host = tempfile::tempdir().unwrap();
        let folder = host
            .path()
            .join("proc/driver/nvidia/capabilities/gpu0/mig/gi3");
        fs::create_dir_all(folder.join("ci0")).unwrap();
        let content =
            |minor| format!("DeviceFileMinor: {minor}\nDeviceFileMode: 292\nDeviceFileModify: 1\n");
        fs::write(folder.join("access"), content(30)).unwrap();
        fs::write(folder.join("ci0/access"), content(31)).unwrap();
        fs::write(host.path().join("proc/devices"), DEVICES).unwrap();
        host
    }

    fn of(host: &Path, compute: u32) -> Result<[CapabilityNode; 2], CapabilityError> {
        of_partition(&host.join("proc"), host, 0, 3, compute)
    }

    #[test]
    fn numbers_are_those_of_the_kernel_module() {
        let host = host();
        let node = |minor| CapabilityNode {
            path: format!("/dev/nvidia-caps/nvidia-cap{minor}"),
            major: 236,
            minor,
            mode: 0o444,
            may_make: true,
            of_init: host.path().join("proc/1/root"),
        };
        assert_eq!(of(host.path(), 0).unwrap(), [node(30), node(31)]);
        let error = of(host.path(), 1).unwrap_err().to_string();
        assert!(
            error.contains("gi3/ci1/access") && error.contains("-lci"),
            "{error}"
        );
    }

    #[test]
    fn a_file_that_cannot_be_understood_is_named_with_the_field() {
        let host = host();
        let file = "proc/driver/nvidia/capabilities/gpu0/mig/gi3/access";
        for (content, field) in [
            ("", "DeviceFileMinor"),
            ("DeviceFileMinor: x\n", "DeviceFileMinor"),
            ("DeviceFileMinor: -1\n", "DeviceFileMinor"),
            ("DeviceFileMinor: 30\n", "DeviceFileMode"),
            (
                "DeviceFileMinor: 30\nDeviceFileMode: 292\n",
                "DeviceFileModify",
            ),
        ] {
            fs::write(host.path().join(file), content).unwrap();
            let error = of(host.path(), 0).unwrap_err().to_string();
            assert!(error.contains(file) && error.contains(field), "{error}");
        }
    }

    #[test]
    fn a_node_of_a_read_only_root_is_made_by_the_hosts_mounts() {
        let (host, init) = (host(), tempfile::tempdir().unwrap());
        let root = host.path().join("run/driver");
        fs::create_dir_all(&root).unwrap();
        fs::write(root.join("dev"), "no folder can be made here").unwrap();
        let process = host.path().join("proc/1");
        fs::write(&process, "nor there").unwrap();
        let nodes = of_partition(&host.path().join("proc"), &root, 0, 3, 0).unwrap();
        let error = nodes[0].make(&root).unwrap_err().to_string();
        let path = root.join("dev/nvidia-caps/nvidia-cap30");
        assert!(error.contains(&*path.to_string_lossy()), "{error}");

        fs::remove_file(&process).unwrap();
        fs::create_dir(&process).unwrap();
        std::os::unix::fs::symlink(init.path(), process.join("root")).unwrap();
        nodes[0].make(&root).unwrap();
        let made = init.path().join("run/driver/dev/nvidia-caps/nvidia-cap30");
        assert_eq!(made.symlink_metadata().unwrap().rdev(), makedev(236, 30));
    }

    #[test]
    fn a_missing_node_is_made_and_a_wrong_one_is_replaced() {
        let host = host();
        let [node, _] = of(host.path(), 0).unwrap();
        let path = host.path().join("dev/nvidia-caps/nvidia-cap30");
        let there = || {
            let metadata = path.symlink_metadata().unwrap();
            (metadata.rdev(), metadata.permissions().mode() & 0o777)
        };
        for _ in 0..2 {
            node.make(host.path()).unwrap();
            assert_eq!(there(), (makedev(236, 30), 0o444));
        }
        // The module was loaded again.
        let later = DEVICES.replace("236", "240");
        fs::write(host.path().join("proc/devices"), later).unwrap();
        let [node, _] = of(host.path(), 0).unwrap();
        node.make(host.path()).unwrap();
        assert_eq!(there(), (makedev(240, 30), 0o444));
        // Without the kernel's list, the node's number is used; without both it is not known.
        fs::remove_file(host.path().join("proc/devices")).unwrap();
        let error = of(host.path(), 0).unwrap_err().to_string();
        assert!(error.contains("nvidia-cap31"), "{error}");
        fs::rename(&path, path.with_file_name("nvidia-cap31")).unwrap();
        let error = of(host.path(), 0).unwrap_err().to_string();
        assert!(error.contains("nvidia-cap30"), "{error}");

        let fixed = CapabilityNode {
            may_make: false,
            ..node
        };
        fixed.make(host.path()).unwrap();
        assert!(!path.exists(), "the module does not let it be made");
    }
}
