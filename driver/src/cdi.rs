//! The Container Device Interface: what a container runtime must add to a container.
//!
//! ```text
//!  gpu.tranche.dev/claim=<uid>-<request>-<n>   device node, cap page, account
//!  gpu.tranche.dev/driver=full|capped|…        libraries, binaries, hooks, shim
//! ```
//!
//! The kubelet gets ids of both kinds for each prepared device. A node has one file of each kind. The model is our own and covers
//! only what we write. A spec declares the lowest version that has everything it uses, because a runtime refuses a whole file for
//! one field that is newer than its declared version.

mod capability;
mod claim_devices;
mod driver_spec;
mod name;

use serde::{Deserialize, Serialize};

pub use capability::Capability;
pub use claim_devices::ClaimDevices;
pub use driver_spec::{DriverDevice, DriverFile, DriverFiles, Library, Link, Shim, driver_spec};
pub use name::NameError;

use tranche_api::names::DRIVER;

/// The class of the devices of claims.
pub const CLAIM_CLASS: &str = "claim";
/// The class of the driver's devices.
pub const DRIVER_CLASS: &str = "driver";

/// Paths inside containers. The shim knows the same ones.
pub mod container_path {
    /// The folder of our files in a container.
    pub const ROOT: &str = "/usr/lib/tranche";
    /// A folder per share, with its pages in it.
    pub const SHARES: &str = "/usr/lib/tranche/shares";
    /// The real driver's libraries, in containers with the shim.
    pub const REAL_DRIVER: &str = "/usr/lib/tranche/driver";
    /// The list of libraries that the loader loads into every process.
    pub const PRELOAD: &str = "/etc/ld.so.preload";
    /// The sockets of the GPU's MPS daemon: the driver's own default.
    pub const MPS_PIPES: &str = "/tmp/nvidia-mps";
    /// The memory that MPS clients share with their server. Driver 535 has this path compiled in.
    pub const MPS_SHM: &str = "/dev/shm";
}

/// In the folder of a GPU's MPS daemon.
pub mod mps_path {
    /// Its sockets.
    pub const PIPES: &str = "pipe";
    /// The memory that its clients share with it.
    pub const SHM: &str = "shm";
}

/// Folders on the host.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodePaths {
    /// A folder per claim, in it a folder per device with its pages: `/run/tranche/shares`.
    pub shares: String,
    /// The hook and its ldconfig, in a folder from which runtimes can execute them in user
    /// namespaces.
    pub hooks: String,
    /// A folder per claim, in it a file per request: `/run/tranche/metadata`. Without it containers get no such file.
    pub metadata: Option<String>,
    /// The MPS supervisor's folder, in it a folder per GPU or MIG device: `/run/tranche/mps`.
    pub mps: String,
    /// A folder per GPU or MIG device with its load page: `/run/tranche/load`.
    pub load: String,
    /// The root of the driver's device nodes: `/`, or the driver root if it has its own `dev`.
    pub dev_root: String,
}

/// The id of a claim's device, `gpu.tranche.dev/claim=<key>`.
pub fn claim_device_id(key: &str) -> Result<String, NameError> {
    name::check(key)?;
    Ok(format!("{DRIVER}/{CLAIM_CLASS}={key}"))
}

/// The name of the file, in a CDI folder, of the devices of all claims.
#[must_use]
pub fn claims_file_name() -> String {
    format!("{DRIVER}-{CLAIM_CLASS}.json")
}

/// The name of the file, in a CDI folder, of the driver's spec.
#[must_use]
pub fn driver_file_name() -> String {
    format!("{DRIVER}-{DRIVER_CLASS}.json")
}

/// One file of a CDI folder.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Spec {
    cdi_version: Version,
    kind: String,
    devices: Vec<Device>,
    #[serde(default, skip_serializing_if = "ContainerEdits::is_empty")]
    container_edits: ContainerEdits,
}

/// The versions of CDI that added something that we use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Version {
    /// The first version that runtimes accept.
    #[serde(rename = "0.3.0")]
    V0_3,
    /// Mounts with a type.
    #[serde(rename = "0.4.0")]
    V0_4,
    /// Device names that start with a digit; device nodes with another path on the host.
    #[serde(rename = "0.5.0")]
    V0_5,
}

/// A device that a container can be given by name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Device {
    /// Unique in its kind over all files.
    pub name: String,
    /// Its changes to a container; never empty.
    pub container_edits: ContainerEdits,
}

/// Changes to a container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct ContainerEdits {
    /// `NAME=value`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub env: Vec<String>,
    /// Device nodes.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub device_nodes: Vec<DeviceNode>,
    /// Bind mounts.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub mounts: Vec<Mount>,
    /// Programs that run on the host while the container is made.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub hooks: Vec<Hook>,
}

/// A device node. Its numbers and type are read from the host's node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DeviceNode {
    /// In the container.
    pub path: String,
    /// On the host, if it differs.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_path: Option<String>,
    /// Of `r`, `w`, `m`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub permissions: String,
}

/// A mount.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Mount {
    /// On the host.
    pub host_path: String,
    /// In the container.
    pub container_path: String,
    /// As in fstab.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub options: Vec<String>,
    /// The file system's type, where it is not a bind mount.
    #[serde(default, rename = "type", skip_serializing_if = "String::is_empty")]
    pub kind: String,
}

/// A program that runs on the host while the container is made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Hook {
    /// When, as OCI names it.
    pub hook_name: HookName,
    /// On the host.
    pub path: String,
    /// The program's name first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub args: Vec<String>,
}

/// When a hook runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum HookName {
    /// In the runtime's namespaces, after the mounts and before the root is changed.
    CreateContainer,
}

/// Why a spec cannot be made.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CdiError {
    /// A name that CDI does not allow.
    #[error(transparent)]
    Name(#[from] NameError),
    /// A library without which no container can use a GPU.
    #[error("the driver's files have no {soname}: is the driver root complete?")]
    NoLibrary {
        /// Its SONAME.
        soname: &'static str,
    },
    /// A partition that is not there yet.
    #[error("{0}: the MIG device of the partition is not known")]
    NoMigDevice(String),
    /// A GPU that is not at VFIO yet.
    #[error("{0}: the VFIO group of the GPU is not known")]
    NoVfioGroup(String),
    /// A path that is not absolute.
    #[error("{what} {path:?} is not an absolute path")]
    Path {
        /// What the path is.
        what: &'static str,
        /// The path.
        path: String,
    },
}

impl Spec {
    /// A spec of `devices` of the class `class`, all of which need `edits`.
    pub fn new(class: &str, devices: Vec<Device>, edits: ContainerEdits) -> Result<Self, CdiError> {
        name::check_class(class)?;
        for device in &devices {
            name::check(&device.name)?;
        }
        Ok(Self {
            cdi_version: lowest_version(&devices, &edits),
            kind: format!("{DRIVER}/{class}"),
            devices,
            container_edits: edits,
        })
    }

    /// The version that the spec declares.
    #[must_use]
    pub fn version(&self) -> Version {
        self.cdi_version
    }

    /// The devices.
    #[must_use]
    pub fn devices(&self) -> &[Device] {
        &self.devices
    }

    /// The changes for every device.
    #[must_use]
    pub fn container_edits(&self) -> &ContainerEdits {
        &self.container_edits
    }

    /// Reads a file's content; fails if it is not of this release.
    pub fn decode(content: &[u8]) -> Result<Self, serde_json::Error> {
        serde_json::from_slice(content)
    }

    /// The file's content, the same for the same spec. Without spaces, as a runtime reads all files again whenever one changes.
    ///
    /// # Panics
    ///
    /// Never: serializing to memory fails only for maps whose keys are not strings, and there are
    /// none.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = serde_json::to_vec(self).expect("a spec has only strings for keys");
        bytes.push(b'\n');
        bytes
    }
}

impl ContainerEdits {
    fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// The lowest version that has everything that the spec uses.
fn lowest_version(devices: &[Device], edits: &ContainerEdits) -> Version {
    let all = || {
        devices
            .iter()
            .map(|device| &device.container_edits)
            .chain([edits])
    };
    let digit_first = |device: &Device| device.name.starts_with(|c: char| c.is_ascii_digit());
    if devices.iter().any(digit_first)
        || all()
            .flat_map(|edits| &edits.device_nodes)
            .any(|node| node.host_path.is_some())
    {
        Version::V0_5
    } else if all()
        .flat_map(|edits| &edits.mounts)
        .any(|mount| !mount.kind.is_empty())
    {
        Version::V0_4
    } else {
        Version::V0_3
    }
}

/// A read-only bind mount.
pub(crate) fn read_only(host_path: String, container_path: String) -> Mount {
    bind(host_path, container_path, &["ro", "nosuid", "nodev"])
}

pub(crate) fn bind(host_path: String, container_path: String, options: &[&str]) -> Mount {
    Mount {
        host_path,
        container_path,
        options: options
            .iter()
            .chain(&["rbind", "rprivate"])
            .map(ToString::to_string)
            .collect(),
        kind: String::new(),
    }
}

/// A device node at `path` in the container and below `dev_root` on the host.
pub(crate) fn device_node(path: &str, dev_root: &str) -> DeviceNode {
    let host_path = below(dev_root, path);
    DeviceNode {
        host_path: (host_path != path).then_some(host_path),
        path: path.to_owned(),
        permissions: "rw".to_owned(),
    }
}

/// The absolute `path` below `root`.
fn below(root: &str, path: &str) -> String {
    format!("{}{path}", root.trim_end_matches('/'))
}

pub(crate) fn absolute(what: &'static str, path: &str) -> Result<(), CdiError> {
    if path.starts_with('/') {
        Ok(())
    } else {
        Err(CdiError::Path {
            what,
            path: path.to_owned(),
        })
    }
}

#[cfg(test)]
mod tests;
