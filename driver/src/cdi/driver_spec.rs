//! The spec of the node's driver: its files, and the shim in front of them.
//!
//! Two devices. `full` is the driver as a host has it. `capped` puts the shim where programs look
//! for `libcuda.so.1` and `libnvidia-ml.so.1`, and the real ones where only the shim looks. A
//! container may take both (claims of two tiers): then the shim is in front of both, and the cap
//! pages say of every GPU what holds.

use std::collections::BTreeSet;

use super::{
    CdiError, ContainerEdits, DRIVER_CLASS, Device, Hook, HookName, Mount, NodePaths, Spec,
    absolute, bind, container_path, device_node, read_only,
};
use tranche_api::names::DRIVER;

/// The libraries that the shim stands in for, by SONAME.
const SHIMMED: [&str; 2] = ["libcuda.so.1", "libnvidia-ml.so.1"];

/// The devices of the driver's spec.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DriverDevice {
    /// The driver as the host has it.
    Full,
    /// The driver behind the shim.
    Capped,
}

impl DriverDevice {
    /// The name in the spec.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Capped => "capped",
        }
    }

    /// The qualified id.
    #[must_use]
    pub fn id(self) -> String {
        format!("{DRIVER}/{DRIVER_CLASS}={}", self.name())
    }
}

/// The driver's files, as they were found under the driver root. All paths are absolute.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DriverFiles {
    /// Shared libraries, each with its versioned name.
    pub libraries: Vec<Library>,
    /// Programs: `nvidia-smi` and the like.
    pub binaries: Vec<DriverFile>,
    /// Firmware of the GPU's system processor.
    pub firmware: Vec<DriverFile>,
    /// Sockets: of nvidia-persistenced, of the fabric manager.
    pub sockets: Vec<DriverFile>,
    /// Files such as ICDs and X configuration.
    pub config_files: Vec<DriverFile>,
    /// Device nodes that serve all GPUs, by their path in a container: `/dev/nvidiactl`.
    pub control_nodes: Vec<String>,
}

/// A file of the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DriverFile {
    /// On the host.
    pub host_path: String,
    /// In a container.
    pub container_path: String,
}

/// A shared library of the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Library {
    /// The versioned file.
    pub file: DriverFile,
    /// The name by which programs ask the loader for it.
    pub soname: String,
    /// Links to make in a container, in order.
    pub links: Vec<Link>,
}

/// A symbolic link in a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    /// What it says.
    pub target: String,
    /// Where it is.
    pub path: String,
}

/// What every container that uses a GPU gets of the driver.
pub fn driver_spec(files: &DriverFiles, paths: &NodePaths) -> Result<Spec, CdiError> {
    files.check()?;
    absolute("the folder of libraries", &paths.libraries)?;
    absolute("the root of device nodes", &paths.dev_root)?;
    let shimmed = SHIMMED
        .iter()
        .map(|soname| {
            files
                .libraries
                .iter()
                .find(|library| library.soname == *soname)
                .ok_or(CdiError::NoLibrary { soname })
        })
        .collect::<Result<Vec<_>, _>>()?;
    let folders: BTreeSet<&str> = files
        .libraries
        .iter()
        .map(|library| folder(&library.file.container_path))
        .collect();
    let full = ContainerEdits {
        mounts: shimmed.iter().map(|library| mount(&library.file)).collect(),
        hooks: hooks(files, |_| true, &folders, paths),
        ..ContainerEdits::default()
    };
    // A name on which the shim is mounted is no link.
    let covered: BTreeSet<String> = shimmed.iter().map(|library| covered(library)).collect();
    let capped = ContainerEdits {
        mounts: shim_mounts(&shimmed, paths),
        hooks: hooks(files, |link| !covered.contains(&link.path), &folders, paths),
        ..ContainerEdits::default()
    };
    let device = |device: DriverDevice, container_edits| Device {
        name: device.name().to_owned(),
        container_edits,
    };
    Spec::new(
        DRIVER_CLASS,
        vec![
            device(DriverDevice::Full, full),
            device(DriverDevice::Capped, capped),
        ],
        common(files, paths),
    )
}

impl DriverFiles {
    fn check(&self) -> Result<(), CdiError> {
        let libraries = self.libraries.iter().map(|library| &library.file);
        let files = libraries
            .chain(&self.binaries)
            .chain(&self.firmware)
            .chain(&self.sockets)
            .chain(&self.config_files);
        for file in files {
            absolute("the driver's file", &file.host_path)?;
            absolute("the driver's file", &file.container_path)?;
        }
        for link in self.libraries.iter().flat_map(|library| &library.links) {
            absolute("the driver's link", &link.path)?;
        }
        for node in &self.control_nodes {
            absolute("the control node", node)?;
        }
        Ok(())
    }
}

/// What both devices need.
fn common(files: &DriverFiles, paths: &NodePaths) -> ContainerEdits {
    let libraries = files
        .libraries
        .iter()
        .filter(|library| !SHIMMED.contains(&library.soname.as_str()))
        .map(|library| &library.file);
    let mut mounts: Vec<Mount> = libraries
        .chain(&files.binaries)
        .chain(&files.firmware)
        .chain(&files.config_files)
        .map(mount)
        .collect();
    mounts.extend(files.sockets.iter().map(|socket| {
        bind(
            socket.host_path.clone(),
            socket.container_path.clone(),
            &["ro", "nosuid", "nodev", "noexec"],
        )
    }));
    ContainerEdits {
        // Keeps NVIDIA's own runtime, where it is the default one, from adding GPUs.
        env: vec!["NVIDIA_VISIBLE_DEVICES=void".to_owned()],
        device_nodes: files
            .control_nodes
            .iter()
            .map(|node| device_node(node, &paths.dev_root))
            .collect(),
        mounts,
        hooks: Vec::new(),
    }
}

/// The shim under its own path and over the driver's names, the real libraries behind it.
fn shim_mounts(shimmed: &[&Library], paths: &NodePaths) -> Vec<Mount> {
    let ours = |name: &str| format!("{}/{name}", paths.libraries);
    let mut mounts = vec![read_only(
        ours("ld.so.preload"),
        container_path::PRELOAD.to_owned(),
    )];
    for library in shimmed {
        let soname = &library.soname;
        mounts.extend([
            read_only(ours(soname), format!("{}/{soname}", container_path::ROOT)),
            read_only(ours(soname), covered(library)),
            read_only(
                library.file.host_path.clone(),
                format!("{}/{soname}", container_path::REAL_DRIVER),
            ),
        ]);
    }
    mounts
}

/// The driver's own name for the library, which the shim covers.
fn covered(library: &Library) -> String {
    format!(
        "{}/{}",
        folder(&library.file.container_path),
        library.soname
    )
}

fn mount(file: &DriverFile) -> Mount {
    read_only(file.host_path.clone(), file.container_path.clone())
}

fn folder(path: &str) -> &str {
    path.rsplit_once('/').map_or("", |(folder, _)| folder)
}

/// Links first, the loader's cache after: it is made from the links.
fn hooks(
    files: &DriverFiles,
    wanted: impl Fn(&Link) -> bool,
    folders: &BTreeSet<&str>,
    paths: &NodePaths,
) -> Vec<Hook> {
    let hook = |subcommand: &str, args: Vec<String>| Hook {
        hook_name: HookName::CreateContainer,
        path: format!("{}/tranche-cdi-hook", paths.libraries),
        args: ["tranche-cdi-hook", subcommand]
            .map(str::to_owned)
            .into_iter()
            .chain(args)
            .collect(),
    };
    let links: Vec<String> = files
        .libraries
        .iter()
        .flat_map(|library| &library.links)
        .filter(|link| wanted(link))
        .flat_map(|link| {
            [
                "--link".to_owned(),
                format!("{}::{}", link.target, link.path),
            ]
        })
        .collect();
    let mut hooks = Vec::new();
    if !links.is_empty() {
        hooks.push(hook("create-links", links));
    }
    let mut cache: Vec<String> = folders
        .iter()
        .flat_map(|folder| ["--folder".to_owned(), (*folder).to_owned()])
        .collect();
    cache.extend([
        "--ldconfig".to_owned(),
        format!("{}/ldconfig", paths.libraries),
    ]);
    hooks.push(hook("update-ldcache", cache));
    hooks
}
