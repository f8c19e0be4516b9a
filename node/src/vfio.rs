//! A GPU's IOMMU group in the kernel's `sys` tree: read for [`tranche_driver::vfio`], and changed by its decisions.
//!
//! After each write the tree is read until it shows the effect. `drivers_probe` does not report whether a driver took the
//! function, and a driver's `unbind` file may be a queue.

use std::collections::BTreeSet;
use std::fmt;
use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use tranche_api::PciAddress;
use tranche_api::gpu_node::GpuVfio;
use tranche_driver::vfio::{
    Actual, Change, Function, Next, Obstacle, User, VFIO_DRIVER, VfioRecord, next, obstacle,
};

/// How long a write may take to show its effect: NVIDIA's driver needs seconds to start or stop a GPU.
const PATIENCE: Duration = Duration::from_mins(1);
/// A group has at most 8 functions of one device, with a few steps each.
const MOST_STEPS: usize = 60;
const PAUSE: Duration = Duration::from_millis(20);

/// Why the functions of a group cannot be read or changed.
#[derive(Debug, thiserror::Error)]
pub enum VfioError {
    /// A file.
    #[error(
        "{path}: {source}: the node plugin needs the host's /sys, writable, and its /dev and /proc"
    )]
    File {
        /// The file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// A file of the kernel has another form than expected.
    #[error("{path} has {text:?}, which is not {expected}")]
    Strange {
        /// The file.
        path: PathBuf,
        /// What it has.
        text: String,
        /// What it should have.
        expected: &'static str,
    },
    /// The write succeeded and had no effect.
    #[error("{change:?} has had no effect for {} s: the kernel's log says why (`dmesg`)", .waited.as_secs())]
    NoEffect {
        /// The write.
        change: Change,
        /// How long.
        waited: Duration,
    },
}

/// How a program gets a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Interface {
    /// `/dev/vfio/vfio` and the node of the group.
    Group,
    /// `/dev/iommu` and one node per function.
    Iommufd,
}

/// The IOMMU groups of a machine.
pub trait Groups: fmt::Debug + Send + Sync {
    /// The kernel's boot id.
    fn boot(&self) -> Result<String, VfioError>;

    /// The GPU's group as it is now. `minor` is the GPU's minor number where NVIDIA's driver has it.
    fn read(&self, gpu: PciAddress, minor: Option<u32>) -> Result<Actual, VfioError>;

    /// Writes to sysfs, and waits for the effect.
    fn change(&self, change: &Change) -> Result<(), VfioError>;

    /// The host's device nodes for a program that gets the group, once its functions are bound to VFIO.
    fn nodes(&self, actual: &Actual) -> Result<Vec<String>, VfioError>;

    /// Whether a virtual machine can get the GPU, whatever uses it now; `None` if it has no group.
    fn inspect(&self, gpu: PciAddress) -> Result<Option<GpuVfio>, VfioError>;
}

/// The kernel's trees.
#[derive(Clone, Debug)]
pub struct Vfio {
    sys: PathBuf,
    dev: PathBuf,
    proc: PathBuf,
    patience: Duration,
}

impl Vfio {
    /// Uses the `sys`, `dev` and `proc` of the host at their mount points.
    pub fn new(sys: impl Into<PathBuf>, dev: impl Into<PathBuf>, proc: impl Into<PathBuf>) -> Self {
        Self {
            sys: sys.into(),
            dev: dev.into(),
            proc: proc.into(),
            patience: PATIENCE,
        }
    }

    /// Gives up on a write without effect after this time instead of a minute.
    #[must_use]
    pub fn with_patience(self, patience: Duration) -> Self {
        Self { patience, ..self }
    }

    fn device(&self, address: PciAddress) -> PathBuf {
        self.sys.join("bus/pci/devices").join(address.to_string())
    }

    fn group(&self, address: PciAddress) -> Result<Option<u32>, VfioError> {
        let link = self.device(address).join("iommu_group");
        let Some(name) = name_of_link(&link)? else {
            return Ok(None);
        };
        let strange = |text| VfioError::Strange {
            path: link,
            text,
            expected: "the number of a group",
        };
        name.parse().map(Some).map_err(|_| strange(name))
    }

    fn members(&self, group: u32) -> Result<Vec<Function>, VfioError> {
        let folder = self
            .sys
            .join(format!("kernel/iommu_groups/{group}/devices"));
        let addresses = list(&folder)?.into_iter().map(|name| {
            name.parse::<PciAddress>().map_err(|_| VfioError::Strange {
                path: folder.clone(),
                text: name,
                expected: "a PCI address",
            })
        });
        addresses
            .map(|address| self.function(address?))
            .collect::<Result<_, _>>()
    }

    /// One function.
    pub fn function(&self, address: PciAddress) -> Result<Function, VfioError> {
        let folder = self.device(address);
        let path = folder.join("class");
        let text = read(&path)?;
        let class = text
            .strip_prefix("0x")
            .and_then(|it| u32::from_str_radix(it, 16).ok());
        let driver_override = read(&folder.join("driver_override"))?;
        Ok(Function {
            address,
            class: class.ok_or(VfioError::Strange {
                path,
                text,
                expected: "a class such as 0x030200",
            })?,
            driver: name_of_link(&folder.join("driver"))?,
            driver_override: Some(driver_override).filter(|it| !it.is_empty() && it != "(null)"),
        })
    }

    /// NVSwitches are bridges of NVIDIA's that are no PCI bridges (class 0x0680).
    fn has_nvswitch(&self) -> Result<bool, VfioError> {
        let folder = self.sys.join("bus/pci/devices");
        for name in list(&folder)? {
            let device = folder.join(name);
            let is_nvidia = read(&device.join("vendor"))? == "0x10de";
            if is_nvidia && read(&device.join("class"))?.starts_with("0x0680") {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The host's device nodes for a program that gets the group by an interface of the kernel.
    fn nodes_by(&self, actual: &Actual, interface: Interface) -> Result<Vec<String>, VfioError> {
        let mut paths = Vec::new();
        if interface == Interface::Iommufd {
            paths.push("/dev/iommu".to_owned());
            for function in &actual.functions {
                let folder = self.device(function.address).join("vfio-dev");
                if function.driver.as_deref() == Some(VFIO_DRIVER) {
                    let names = list(&folder)?.into_iter();
                    paths.extend(names.map(|name| format!("/dev/vfio/devices/{name}")));
                }
            }
        } else {
            paths.push("/dev/vfio/vfio".to_owned());
            paths.extend(actual.group.map(|group| format!("/dev/vfio/{group}")));
        }
        for path in &paths {
            let here = self.dev.join(path.trim_start_matches("/dev/"));
            fs::metadata(&here).map_err(|source| VfioError::File { path: here, source })?;
        }
        Ok(paths)
    }

    /// A process that has the GPU's node or a VFIO node of its group open.
    fn user(
        &self,
        functions: &[Function],
        group: Option<u32>,
        minor: Option<u32>,
    ) -> Result<Option<User>, VfioError> {
        let mut paths = Vec::new();
        paths.extend(minor.map(|minor| self.dev.join(format!("nvidia{minor}"))));
        paths.extend(group.map(|group| self.dev.join(format!("vfio/{group}"))));
        for function in functions {
            let names = list_if_there(&self.device(function.address).join("vfio-dev"))?;
            paths.extend(
                names
                    .iter()
                    .map(|it| self.dev.join("vfio/devices").join(it)),
            );
        }
        // A node that does not exist is open nowhere.
        let nodes: BTreeSet<Node> = paths.iter().filter_map(|it| Node::of(it).ok()).collect();
        if nodes.is_empty() {
            return Ok(None);
        }
        for name in list(&self.proc)? {
            let Ok(pid) = name.parse() else { continue };
            // Processes and descriptors end while they are listed.
            let Ok(files) = list(&self.proc.join(&name).join("fd")) else {
                continue;
            };
            let folder = self.proc.join(&name).join("fd");
            let mut nodes_of = files
                .iter()
                .filter_map(|it| Node::of(&folder.join(it)).ok());
            if nodes_of.any(|it| nodes.contains(&it)) {
                // It may have ended meanwhile.
                let name = read(&self.proc.join(&name).join("comm")).unwrap_or_default();
                return Ok(Some(User { pid, name }));
            }
        }
        Ok(None)
    }
}

impl Groups for Vfio {
    fn boot(&self) -> Result<String, VfioError> {
        read(&self.proc.join("sys/kernel/random/boot_id"))
    }

    fn read(&self, gpu: PciAddress, minor: Option<u32>) -> Result<Actual, VfioError> {
        let group = self.group(gpu)?;
        let functions = match group {
            Some(group) => self.members(group)?,
            None if self.device(gpu).exists() => vec![self.function(gpu)?],
            None => Vec::new(),
        };
        Ok(Actual {
            gpu,
            group,
            user: self.user(&functions, group, minor)?,
            functions,
            has_vfio: self.sys.join("bus/pci/drivers").join(VFIO_DRIVER).exists(),
            has_nvswitch: self.has_nvswitch()?,
            boot: self.boot()?,
        })
    }

    fn change(&self, change: &Change) -> Result<(), VfioError> {
        let (address, path, text) = match change {
            Change::Override(address, driver) => (
                *address,
                self.device(*address).join("driver_override"),
                driver.clone().unwrap_or_default(),
            ),
            Change::Unbind(address, driver) => (
                *address,
                self.sys.join("bus/pci/drivers").join(driver).join("unbind"),
                address.to_string(),
            ),
            Change::Probe(address) => (
                *address,
                self.sys.join("bus/pci/drivers_probe"),
                address.to_string(),
            ),
        };
        write(&path, &text)?;
        let deadline = Instant::now() + self.patience;
        loop {
            let function = self.function(address)?;
            let is_done = match change {
                Change::Override(_, driver) => function.driver_override == *driver,
                Change::Unbind(_, driver) => function.driver.as_ref() != Some(driver),
                Change::Probe(_) => function.driver.is_some(),
            };
            if is_done {
                return Ok(());
            }
            if Instant::now() >= deadline {
                return Err(VfioError::NoEffect {
                    change: change.clone(),
                    waited: self.patience,
                });
            }
            std::thread::sleep(PAUSE);
        }
    }

    fn nodes(&self, actual: &Actual) -> Result<Vec<String>, VfioError> {
        // Kernels may be built without the interface of groups.
        let group = self.dev.join("vfio/vfio");
        let interface = if group.exists() {
            Interface::Group
        } else {
            Interface::Iommufd
        };
        self.nodes_by(actual, interface)
    }

    fn inspect(&self, gpu: PciAddress) -> Result<Option<GpuVfio>, VfioError> {
        let Some(iommu_group) = self.group(gpu)? else {
            return Ok(None);
        };
        let actual = self.read(gpu, None)?;
        Ok(Some(GpuVfio {
            iommu_group,
            obstacle: obstacle(&actual).map(|it| it.to_string()),
        }))
    }
}

/// Why a group is not as wanted.
#[derive(Debug, thiserror::Error)]
pub enum ReconcileError {
    /// Something is in the way.
    #[error(transparent)]
    Obstacle(#[from] Obstacle),
    /// The kernel.
    #[error(transparent)]
    Vfio(#[from] VfioError),
    /// Its state keeps changing.
    #[error("the drivers of GPU {0} keep changing: does somebody else bind them?")]
    Restless(PciAddress),
}

/// Takes a GPU's group to VFIO, or back to the drivers that it had before, step by step. `write` stores the record.
/// After a failure, the next call continues where this one ended.
pub fn reconcile<E: From<ReconcileError>>(
    groups: &dyn Groups,
    gpu: (PciAddress, Option<u32>),
    wanted: bool,
    mut record: Option<VfioRecord>,
    write: &mut dyn FnMut(Option<&VfioRecord>) -> Result<(), E>,
) -> Result<Actual, E> {
    for _ in 0..MOST_STEPS {
        let actual = groups.read(gpu.0, gpu.1).map_err(ReconcileError::Vfio)?;
        match next(wanted, record.as_ref(), &actual).map_err(ReconcileError::Obstacle)? {
            Next::Write(changed) => {
                write(changed.as_ref())?;
                record = changed;
            }
            Next::Change(change) => groups.change(&change).map_err(ReconcileError::Vfio)?,
            Next::Done => return Ok(actual),
        }
    }
    Err(ReconcileError::Restless(gpu.0).into())
}

/// What a file is, whatever its name: a device is identified by its number, so that the nodes of containers are found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Node {
    Device(u64),
    File(u64, u64),
}

impl Node {
    fn of(path: &Path) -> io::Result<Self> {
        let metadata = fs::metadata(path)?;
        Ok(if metadata.file_type().is_char_device() {
            Self::Device(metadata.rdev())
        } else {
            Self::File(metadata.dev(), metadata.ino())
        })
    }
}

fn read(path: &Path) -> Result<String, VfioError> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(text.trim().to_owned()),
        Err(source) => Err(failed(path, source)),
    }
}

/// Writes one line to an existing file. Non-blocking, so that a queue without a reader is an error.
fn write(path: &Path, text: &str) -> Result<(), VfioError> {
    let mut options = OpenOptions::new();
    options.write(true).truncate(true);
    options.custom_flags(rustix::fs::OFlags::NONBLOCK.bits().cast_signed());
    let written = options.open(path).and_then(|mut file| {
        let line = format!("{text}\n");
        file.write_all(line.as_bytes())
    });
    written.map_err(|source| failed(path, source))
}

fn list(folder: &Path) -> Result<Vec<String>, VfioError> {
    let names = fs::read_dir(folder).and_then(|entries| {
        let names = entries.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()));
        names.collect::<io::Result<Vec<_>>>()
    });
    let mut names = names.map_err(|source| failed(folder, source))?;
    names.sort_unstable();
    Ok(names)
}

/// Like [`list`], but empty for a folder that does not exist, or is removed while it is read.
fn list_if_there(folder: &Path) -> Result<Vec<String>, VfioError> {
    match list(folder) {
        Err(VfioError::File { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
            Ok(Vec::new())
        }
        listed => listed,
    }
}

/// The last part of a link's target; `None` if the link does not exist.
fn name_of_link(link: &Path) -> Result<Option<String>, VfioError> {
    match fs::read_link(link) {
        Ok(target) => Ok(target
            .file_name()
            .map(|it| it.to_string_lossy().into_owned())),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(source) => Err(failed(link, source)),
    }
}

fn failed(path: &Path, source: io::Error) -> VfioError {
    VfioError::File {
        path: path.to_owned(),
        source,
    }
}

#[cfg(test)]
mod tests;
