//! The spec of the node's driver: its files, and the shim in front of them.
//!
//! `full` is the driver as on the host. `capped` puts the shim at the paths where programs search for `libcuda.so.1`
//! and `libnvidia-ml.so.1`, and the real libraries at paths that only the shim uses; it mounts no other libraries than
//! those of CUDA and NVML. Each further capability that a policy allows to a capped share is a device of its own:
//! `video`, `graphics`, `ngx`, `opencl`, `other`. A container may get both `full` and `capped` (claims of two tiers):
//! then the shim is in front of both, and the cap page of each GPU has its limits. Each version of the pages has its
//! own `capped` device; from the second version on its name is `capped-<version>`.

use std::collections::BTreeSet;

use super::capability::{Capability, stem};
use super::{
    CdiError, ContainerEdits, DRIVER_CLASS, Device, Hook, HookName, Mount, NodePaths, Spec,
    absolute, bind, container_path, device_node, read_only,
};
use tranche_api::names::DRIVER;

/// The libraries that the shim replaces, by SONAME.
const SHIMMED: [&str; 2] = ["libcuda.so.1", "libnvidia-ml.so.1"];

/// Keeps NVIDIA's own runtime, where it is the default one, from adding GPUs.
const NO_GPUS_OF_NVIDIAS: &str = "NVIDIA_VISIBLE_DEVICES=void";

/// The devices of the driver's spec.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DriverDevice {
    /// The driver as on the host.
    Full,
    /// The driver behind the shim, for CUDA and NVML.
    Capped {
        /// The version of the pages that the shim reads ([`PAGES`](crate::preparation::PAGES)). Each version has its
        /// own device: a container that restarts after an update of the node's plugin keeps its old pages, and so needs
        /// the shim that reads them.
        pages: u32,
    },
    /// Libraries that no limit applies to, in addition to [`DriverDevice::Capped`].
    Extra(Capability),
}

/// The shim for pages of one version.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shim {
    /// The version of the pages.
    pub pages: u32,
    /// The folder on the host that has its libraries and `ld.so.preload`.
    pub folder: String,
}

impl DriverDevice {
    /// The name in the spec.
    #[must_use]
    pub fn name(self) -> String {
        match self {
            Self::Full => "full".to_owned(),
            // The first version had no number.
            Self::Capped { pages: 1 } => "capped".to_owned(),
            Self::Capped { pages } => format!("capped-{pages}"),
            Self::Extra(capability) => capability.name().to_owned(),
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
    /// Device nodes for all GPUs, by their path in a container: `/dev/nvidiactl`.
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
    /// Its target.
    pub target: String,
    /// Its path.
    pub path: String,
}

/// What every container that uses a GPU gets of the driver, for each of `shims`.
pub fn driver_spec(
    files: &DriverFiles,
    paths: &NodePaths,
    shims: &[Shim],
) -> Result<Spec, CdiError> {
    files.check()?;
    for shim in shims {
        absolute("the folder of the shim", &shim.folder)?;
    }
    absolute("the folder of hooks", &paths.hooks)?;
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
    let not_capped = files
        .libraries
        .iter()
        .filter(|library| !library.is_capped());
    let full = ContainerEdits {
        mounts: not_capped
            .chain(shimmed.iter().copied())
            .map(|library| mount(&library.file))
            .collect(),
        hooks: hook(
            &[
                create_links(files.libraries.iter(), |_| true),
                enable_compat(&shimmed),
                update_cache(files, &folders, paths),
            ],
            paths,
        ),
        ..ContainerEdits::default()
    };
    // The shim is mounted on these names, so they are not links.
    let covered: BTreeSet<String> = shimmed
        .iter()
        .map(|library| in_its_folder(library))
        .collect();
    let behind = || files.libraries.iter().filter(|library| library.is_capped());
    let capped = |shim: &Shim| ContainerEdits {
        mounts: shim_mounts(&shimmed, shim),
        hooks: hook(
            &[
                create_links(behind(), |link| !covered.contains(&link.path)),
                cover_libraries(files, &shimmed),
                update_cache(files, &folders, paths),
            ],
            paths,
        ),
        ..ContainerEdits::default()
    };
    let device = |device: DriverDevice, container_edits| Device {
        name: device.name(),
        container_edits,
    };
    let mut devices = vec![device(DriverDevice::Full, full)];
    devices.extend(shims.iter().map(|shim| {
        let name = DriverDevice::Capped { pages: shim.pages };
        device(name, capped(shim))
    }));
    devices.extend(Capability::EXTRA.map(|capability| {
        let edits = extra(files, capability, paths);
        device(DriverDevice::Extra(capability), edits)
    }));
    Spec::new(DRIVER_CLASS, devices, common(files, paths))
}

/// The changes for one more capability. They come before `capped`, whose hook makes the loader's cache.
fn extra(files: &DriverFiles, capability: Capability, paths: &NodePaths) -> ContainerEdits {
    let libraries = || {
        files
            .libraries
            .iter()
            .filter(move |library| library.capability() == capability)
    };
    ContainerEdits {
        // A driver may have no file of this capability, and runtimes refuse a device without edits.
        env: vec![NO_GPUS_OF_NVIDIAS.to_owned()],
        mounts: libraries().map(|library| mount(&library.file)).collect(),
        hooks: hook(&[create_links(libraries(), |_| true)], paths),
        ..ContainerEdits::default()
    }
}

impl Library {
    /// Its purpose.
    #[must_use]
    pub fn capability(&self) -> Capability {
        Capability::of_library(self.file_name())
    }

    /// Whether every capped share has it, under any policy.
    fn is_capped(&self) -> bool {
        Capability::CAPPED.contains(&self.capability())
    }

    fn is_shimmed(&self) -> bool {
        SHIMMED.contains(&self.soname.as_str())
    }

    fn file_name(&self) -> &str {
        let path = &self.file.container_path;
        path.rsplit_once('/').map_or(path, |(_, name)| name)
    }
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

/// The changes for all devices.
fn common(files: &DriverFiles, paths: &NodePaths) -> ContainerEdits {
    let libraries = files
        .libraries
        .iter()
        .filter(|library| library.is_capped() && !library.is_shimmed())
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
        env: vec![NO_GPUS_OF_NVIDIAS.to_owned()],
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
fn shim_mounts(shimmed: &[&Library], shim: &Shim) -> Vec<Mount> {
    let ours = |name: &str| format!("{}/{name}", shim.folder);
    let mut mounts = vec![read_only(
        ours("ld.so.preload"),
        container_path::PRELOAD.to_owned(),
    )];
    for library in shimmed {
        let soname = &library.soname;
        mounts.extend([
            read_only(ours(soname), format!("{}/{soname}", container_path::ROOT)),
            read_only(ours(soname), in_its_folder(library)),
            read_only(
                library.file.host_path.clone(),
                format!("{}/{soname}", container_path::REAL_DRIVER),
            ),
        ]);
    }
    mounts
}

/// The library under the name by which programs ask for it; the shim's libraries cover two of these.
fn in_its_folder(library: &Library) -> String {
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

/// A command of our hook with its options, or `None`.
type Command = Vec<String>;

/// Our hook with all its commands in their order, in one process. `None` without a command.
fn hook(commands: &[Command], paths: &NodePaths) -> Vec<Hook> {
    let commands = commands.concat();
    if commands.is_empty() {
        return Vec::new();
    }
    let mut args = vec!["tranche-cdi-hook".to_owned()];
    args.extend(commands);
    vec![Hook {
        hook_name: HookName::CreateContainer,
        path: format!("{}/tranche-cdi-hook", paths.hooks),
        args,
    }]
}

fn command(name: &str, options: Vec<String>) -> Command {
    let mut command = vec![name.to_owned()];
    command.extend(options);
    command
}

/// An option and its value.
fn option(name: &str, value: String) -> [String; 2] {
    [format!("--{name}"), value]
}

/// Makes the links under which programs find the libraries, if there are any.
fn create_links<'a>(
    libraries: impl Iterator<Item = &'a Library>,
    wanted: impl Fn(&Link) -> bool,
) -> Command {
    let links: Vec<String> = libraries
        .flat_map(|library| &library.links)
        .filter(|link| wanted(link))
        .flat_map(|link| option("link", format!("{}::{}", link.target, link.path)))
        .collect();
    if links.is_empty() {
        return Vec::new();
    }
    command("create-links", links)
}

/// Covers an image's own copies of the libraries with the shim.
fn cover_libraries(files: &DriverFiles, shimmed: &[&Library]) -> Command {
    let stand_in =
        |library: &Library, path: &str| format!("{}.so::{path}", stem(library.file_name()));
    let mut args = Vec::new();
    for library in shimmed {
        let shim = format!("{}/{}", container_path::ROOT, library.soname);
        args.extend(option("shim", stand_in(library, &shim)));
    }
    let companions = files
        .libraries
        .iter()
        .filter(|library| library.capability() == Capability::Compute && !library.is_shimmed());
    for library in companions {
        let value = stand_in(library, &library.file.container_path);
        args.extend(option("companion", value));
    }
    args.extend(option("real-cuda", real_cuda()));
    args.extend(option("host-driver-version", version(shimmed)));
    command("cover-libraries", args)
}

/// Enables an image's own libcuda for forward compatibility, as NVIDIA's container toolkit does. In
/// a container that also has capped shares, `cover-libraries` does it.
fn enable_compat(shimmed: &[&Library]) -> Command {
    let mut args = Vec::from(option("host-driver-version", version(shimmed)));
    args.extend(option("unless", real_cuda()));
    command("enable-cuda-compat", args)
}

/// The path at which the shim opens the driver's libcuda.
fn real_cuda() -> String {
    format!("{}/{}", container_path::REAL_DRIVER, SHIMMED[0])
}

/// The driver's version, from the suffix of its libcuda.
fn version(shimmed: &[&Library]) -> String {
    let name = shimmed.first().map_or("", |library| library.file_name());
    let (_, version) = name.split_once(".so.").unwrap_or_default();
    version.to_owned()
}

/// Adds the libraries that the container has to the loader's cache, by all names under which programs find them.
fn update_cache(files: &DriverFiles, folders: &BTreeSet<&str>, paths: &NodePaths) -> Command {
    let mut args: Vec<String> = folders
        .iter()
        .flat_map(|folder| option("folder", (*folder).to_owned()))
        .collect();
    let found: BTreeSet<String> = files
        .libraries
        .iter()
        .flat_map(|library| {
            let links = library.links.iter().map(|link| link.path.clone());
            links.chain([in_its_folder(library)])
        })
        .collect();
    args.extend(found.into_iter().flat_map(|path| {
        let name = path.rsplit_once('/').map_or(&*path, |(_, name)| name);
        option("library", format!("{name}::{path}"))
    }));
    args.extend(option("ldconfig", format!("{}/ldconfig", paths.hooks)));
    command("update-ldcache", args)
}
