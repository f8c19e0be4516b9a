//! The current state of the node's driver: whether it is installed, its GPUs, its files.
//!
//! One task keeps it up to date. Without a driver (its container may still be building, or it was
//! removed) the plugin keeps running: prepared claims can be unprepared, and the driver is searched
//! for repeatedly.
//!
//! NVML is open only while the driver is described: an open NVML has open device nodes, and the kernel
//! module could not be unloaded. Between two descriptions only the driver's traces are compared: its
//! files, its device nodes, and its entries in `/proc`.
//!
//! One failed check withdraws nothing: a driver that was ready is absent when checks have failed for [`LASTING`], or when its
//! library or its kernel module is gone. A driver that hangs keeps its inventory, and its GPUs are withheld.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};
use tranche_api::WithheldGpu;
use tranche_api::gpu_node::Inventory;
use tranche_api::withheld::reason;
use tranche_driver::cdi::{CdiError, Shim, driver_spec};
use tranche_driver::gpu_state::GpuChanges;

use crate::gpu::context_sizes::Contexts;
use crate::gpu::records::GpuRecords;
use crate::host::fs::{self, Fs, FsError};
use crate::host::layout::Layout;
use tranche_node::devices::{DeviceError, DeviceNodes};
use tranche_node::discover::{DiscoverError, Found, discover};
use tranche_node::inventory::{add_at_vfio, inventory};
use tranche_node::nvml::{Description, Driver, Hang, Hangs, NvmlError, Opened, Traces};
use tranche_node::root::{DriverRoot, Kind, RootError};
use tranche_node::untested::{UntestedError, unknown_functions};
use tranche_node::vfio::Groups;
use tranche_node::vgpu;
use tranche_node::withheld::KnownGpus;

/// How often its traces are compared.
const CHECK: Duration = Duration::from_secs(2);
/// When a driver whose traces changed is described once more. While the watchdog has NVML open, all parts of this process share
/// that NVML, with the GPUs that it found when it started.
const AGAIN: Duration = Duration::from_secs(10);
/// How long checks fail until a driver that was ready counts as absent.
const LASTING: Duration = Duration::from_secs(5);
/// The first pause before a missing driver is searched for again; it doubles.
const FIRST_RETRY: Duration = Duration::from_millis(500);
/// The longest such pause.
const LAST_RETRY: Duration = Duration::from_secs(15);

/// Why there is no usable driver.
#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    #[error(transparent)]
    Nvml(#[from] NvmlError),
    #[error(transparent)]
    Root(#[from] RootError),
    #[error(transparent)]
    Discover(#[from] DiscoverError),
    /// The functions of its libcuda.
    #[error(transparent)]
    Untested(#[from] UntestedError),
    #[error(transparent)]
    Devices(#[from] DeviceError),
    /// What Tranche has changed on GPUs is not known.
    #[error("records of GPUs: {0}")]
    Records(#[source] FsError),
    /// The driver's CDI spec cannot be made.
    #[error("CDI spec of the driver: {0}")]
    Cdi(#[from] CdiError),
    /// The driver's CDI spec cannot be written.
    #[error("CDI spec of the driver: {0}")]
    Fs(#[from] FsError),
}

impl DriverError {
    /// Whether NVML answers, but something else that a CUDA program needs is missing.
    fn is_without_cuda(&self) -> bool {
        matches!(
            self,
            Self::Devices(DeviceError::Missing { .. })
                | Self::Discover(DiscoverError::Library { .. })
        )
    }

    /// Whether NVML does not answer.
    const fn is_hang(&self) -> bool {
        matches!(self, Self::Nvml(NvmlError::Hangs { .. }))
    }

    /// Whether the next check may succeed: the driver's files are there.
    const fn may_pass(&self) -> bool {
        matches!(
            self,
            Self::Nvml(
                NvmlError::Start { .. }
                    | NvmlError::GpuLost { .. }
                    | NvmlError::Call { .. }
                    | NvmlError::NotSupported { .. }
            ) | Self::Fs(_)
                | Self::Records(_)
        )
    }

    /// The reason for conditions and events.
    #[must_use]
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Nvml(NvmlError::NotFound { .. } | NvmlError::Root(_)) | Self::Root(_) => {
                "DriverNotFound"
            }
            Self::Nvml(NvmlError::Hangs { .. }) => "DriverHangs",
            Self::Nvml(
                NvmlError::Start { .. }
                | NvmlError::GpuLost { .. }
                | NvmlError::Call { .. }
                | NvmlError::NotSupported { .. },
            ) => "DriverNotAnswering",
            Self::Nvml(NvmlError::Devices(_)) | Self::Devices(_) => "DeviceNodesMissing",
            Self::Discover(_) | Self::Untested(_) => "DriverIncomplete",
            Self::Cdi(_) | Self::Fs(_) => "NoContainerSpec",
            Self::Records(_) => "NoRecords",
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct Ready {
    /// The inventory for the GpuNode.
    pub inventory: Inventory,
    /// GPUs that are withheld because of what NVML reports.
    pub withheld: Vec<WithheldGpu>,
    /// Why the driver cannot be checked: it hangs. The rest is from before, and all GPUs are withheld.
    pub hang: Option<Arc<str>>,
    /// The driver's CDI spec, the content of its file in the CDI folder; none for a vGPU host's driver without CUDA.
    pub spec: Option<Vec<u8>>,
    /// The root that has the device nodes, as this process sees it.
    pub dev_root: PathBuf,
    /// The same path as the host sees it.
    pub dev_root_on_host: PathBuf,
}

impl fmt::Display for Ready {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let inventory = &self.inventory;
        write!(
            f,
            "driver {} with CUDA {} and {} GPUs",
            inventory.driver_version, inventory.cuda_driver_version, inventory.gpu_count
        )
    }
}

impl Ready {
    /// The same with a driver that hangs.
    fn hanging(&self, error: &DriverError) -> Self {
        let why = error.to_string();
        let gpus = self.inventory.gpus.iter();
        let withheld =
            gpus.map(|gpu| WithheldGpu::whole(&gpu.uuid, reason::DRIVER_HANGS, why.clone()));
        Self {
            withheld: withheld.collect(),
            hang: Some(why.into()),
            ..self.clone()
        }
    }

    /// Whether NVML cannot describe a GPU that it described before, for a reason that may pass.
    fn lacks_one_of(&self, before: &Self) -> bool {
        let mut withheld = self.withheld.iter();
        withheld.any(|it| {
            let mut gpus = before.inventory.gpus.iter();
            it.reason == reason::NOT_DESCRIBED && gpus.any(|gpu| gpu.uuid == it.gpu)
        })
    }
}

/// The driver at the last check.
#[derive(Clone, Debug, Default)]
pub enum DriverState {
    /// Not checked yet.
    #[default]
    Unknown,
    /// There is no usable driver.
    Absent(Arc<DriverError>),
    /// There is a usable driver.
    Ready(Arc<Ready>),
}

/// The driver's CDI spec on the disk.
#[derive(Debug)]
pub struct SpecFile {
    fs: Arc<dyn Fs>,
    path: PathBuf,
    /// One writer at a time: many claims check the file.
    writer: Mutex<()>,
}

impl SpecFile {
    /// The file at the path of `layout`.
    #[must_use]
    pub fn new(fs: Arc<dyn Fs>, layout: &Layout) -> Self {
        Self {
            fs,
            path: layout.driver_spec(),
            writer: Mutex::default(),
        }
    }

    /// Writes the file if it is missing or different.
    pub fn ensure(&self, spec: &[u8]) -> Result<(), FsError> {
        let _one = self.writer.lock().unwrap_or_else(PoisonError::into_inner);
        fs::ensure(&*self.fs, &self.path, spec, 0o644)
    }
}

#[derive(Debug)]
pub struct Observer {
    /// The source of NVML.
    pub driver: Box<dyn Driver>,
    /// Which calls of the driver do not return.
    pub hangs: Hangs,
    /// The kernel's `sys` tree.
    pub sysfs: PathBuf,
    /// The GPUs' IOMMU groups.
    pub groups: Arc<dyn Groups>,
    /// The file of its CDI spec.
    pub spec_file: Arc<SpecFile>,
    pub layout: Layout,
    pub shims: Vec<Shim>,
    /// The measured sizes of contexts.
    pub contexts: Arc<Contexts>,
    /// What Tranche has changed on GPUs.
    pub records: GpuRecords,
    /// What was seen of the GPUs earlier.
    pub known_gpus: Mutex<KnownGpus>,
    /// How often a driver with unchanged traces is described again, because a GPU may be lost.
    pub refresh: Duration,
}

/// What shows of the driver without asking it.
#[derive(Debug, PartialEq)]
struct Signs {
    traces: Traces,
    /// The calls that do not return.
    hangs: Vec<Hang>,
}

/// The pause before the next attempt, which grows.
fn next_pause(retry: &mut Duration) -> Duration {
    let pause = *retry;
    *retry = (pause * 2).min(LAST_RETRY);
    pause
}

impl Observer {
    /// Keeps `state` up to date until cancelled.
    pub async fn run(self, state: watch::Sender<DriverState>, stop: CancellationToken) {
        let this = Arc::new(self);
        let mut retry = FIRST_RETRY;
        let mut has_changed = false;
        // Since when checks of a driver that was ready fail.
        let mut failing = None;
        loop {
            let observer = Arc::clone(&this);
            // NVML and the search may block.
            let check = tokio::task::spawn_blocking(move || {
                // Read before the check, so that a change during the check is detected.
                let signs = observer.signs();
                (signs, observer.check())
            });
            // This fails only at shutdown, when the runtime accepts no more blocking work.
            let Ok((signs, check)) = check.await else {
                return;
            };
            let before = match &*state.borrow() {
                DriverState::Ready(ready) => Some(Arc::clone(ready)),
                DriverState::Unknown | DriverState::Absent(_) => None,
            };
            let since = *failing.get_or_insert_with(Instant::now);
            let grace = LASTING.saturating_sub(since.elapsed());
            let pause = match (check, before) {
                (Ok(ready), Some(before)) if ready.lacks_one_of(&before) && !grace.is_zero() => {
                    warn!(withheld = ?ready.withheld, "a GPU cannot be described; it is withheld if that lasts");
                    next_pause(&mut retry).min(grace)
                }
                (Ok(ready), _) => {
                    failing = None;
                    retry = FIRST_RETRY;
                    publish(&state, ready);
                    if has_changed { AGAIN } else { this.refresh }
                }
                (Err(error), Some(before)) if error.is_hang() => {
                    failing = None;
                    publish(&state, before.hanging(&error));
                    next_pause(&mut retry)
                }
                (Err(error), Some(_))
                    if error.may_pass() && !signs.traces.lack_module() && !grace.is_zero() =>
                {
                    warn!(%error, "the driver cannot be checked; its GPUs are withdrawn if that lasts");
                    next_pause(&mut retry).min(grace)
                }
                (Err(error), _) => {
                    failing = None;
                    // Logged once for each new reason, not at every check.
                    let known = matches!(&*state.borrow(), DriverState::Absent(old) if old.to_string() == error.to_string());
                    if !known {
                        warn!(%error, "there is no usable driver; searching until there is one");
                        state.send_replace(DriverState::Absent(Arc::new(error)));
                    }
                    next_pause(&mut retry)
                }
            };
            has_changed = tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(pause) => false,
                () = this.changed(signs) => true,
            };
            if has_changed {
                retry = FIRST_RETRY;
            }
        }
    }

    fn signs(&self) -> Signs {
        Signs {
            traces: self.driver.traces(),
            hangs: self.hangs.now(),
        }
    }

    /// Waits until the driver's signs differ from these.
    async fn changed(self: &Arc<Self>, signs: Signs) {
        loop {
            tokio::time::sleep(CHECK).await;
            let observer = Arc::clone(self);
            let now = tokio::task::spawn_blocking(move || observer.signs()).await;
            if now.is_ok_and(|now| now != signs) {
                return;
            }
        }
    }

    /// The GPUs without Tranche's partitions, and those that are withheld.
    fn known(
        &self,
        description: Description,
        ours: &BTreeMap<String, GpuChanges>,
    ) -> (Description, Vec<WithheldGpu>) {
        let mut known = self
            .known_gpus
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        let description = known.at_rest(description, ours);
        let withheld = known.withheld(&description);
        (description, withheld)
    }

    /// Writes into the inventory whether virtual machines can get the GPUs.
    fn inspect_groups(&self, inventory: &mut Inventory) {
        for gpu in &mut inventory.gpus {
            let Ok(address) = gpu.pci_bus_id.parse() else {
                continue;
            };
            gpu.vfio = self.groups.inspect(address).unwrap_or_else(|error| {
                warn!(gpu = gpu.uuid, %error, "it is not known whether a virtual machine can get the GPU");
                None
            });
        }
    }

    /// The described GPUs for which a call of another part of this process does not return.
    fn hanging(&self, inventory: &Inventory, withheld: &[WithheldGpu]) -> Vec<WithheldGpu> {
        let is_known = |hang: &Hang| {
            let mut gpus = inventory.gpus.iter();
            let mut known = withheld.iter();
            gpus.any(|gpu| gpu.uuid == hang.object) && !known.any(|it| it.gpu == hang.object)
        };
        let hangs = self.hangs.now().into_iter().filter(is_known);
        hangs
            .map(|hang| {
                let gpu = hang.object.clone();
                let error = NvmlError::from(hang);
                WithheldGpu::whole(&gpu, reason::DRIVER_HANGS, error.to_string())
            })
            .collect()
    }

    fn ours(&self) -> Result<BTreeMap<String, GpuChanges>, DriverError> {
        self.records.readable().map_err(DriverError::Records)
    }

    /// Checks once. NVML is closed before the files are searched.
    fn check(&self) -> Result<Ready, DriverError> {
        // Instances and GPUs may come or go during the description: what is ours before or after it counts as ours.
        let mut ours = self.ours()?;
        let Opened {
            nvml, root, nodes, ..
        } = self.driver.open()?;
        let description = nvml.describe();
        for (gpu, record) in self.ours()? {
            ours.entry(gpu).or_default().add(record);
        }
        drop(nvml);
        let (description, mut withheld) = self.known(description?, &ours);
        let mut inventory = inventory(&description, &self.sysfs);
        let found = match container_files(&root, &nodes, &description) {
            Err(error) if error.is_without_cuda() && vgpu::is_host(&description) => {
                withheld.extend(vgpu::without_cuda(&inventory, &error));
                None
            }
            found => {
                withheld.extend(vgpu::withheld(&inventory));
                Some(found?)
            }
        };
        let dev_root = nodes.root();
        withheld.extend(without_node(&inventory, dev_root));
        withheld.extend(self.hanging(&inventory, &withheld));
        let mut spec = None;
        if let Some(found) = found {
            let files = found.driver_files(root.on_host(), nodes.control());
            let paths = self.layout.node_paths(dev_root.on_host());
            let content = driver_spec(&files, &paths, &self.shims)?.encode();
            self.spec_file.ensure(&content)?;
            spec = Some(content);
            inventory.unknown_functions = unknown_functions(&root, &found)?;
        }
        let at_vfio = ours.values().filter_map(|record| record.vfio.as_deref());
        add_at_vfio(&mut inventory, at_vfio);
        self.inspect_groups(&mut inventory);
        self.contexts.describe(&mut inventory);
        Ok(Ready {
            inventory,
            withheld,
            hang: None,
            spec,
            dev_root: dev_root.path().to_owned(),
            dev_root_on_host: dev_root.on_host().to_owned(),
        })
    }
}

/// The GPUs without the device node that containers need.
fn without_node(inventory: &Inventory, root: &DriverRoot) -> Vec<WithheldGpu> {
    let is_there = |node: &str| {
        matches!(
            root.resolve(Path::new(node)),
            Ok(Some((_, Kind::CharDevice)))
        )
    };
    let mut withheld = Vec::new();
    for gpu in &inventory.gpus {
        let node = format!("/dev/nvidia{}", gpu.minor);
        if !is_there(&node) {
            let message = format!(
                "the host has no device node {node} below {}: on the node, run `nvidia-smi` or `nvidia-modprobe -u -c={}` to make it",
                root.on_host().display(),
                gpu.minor
            );
            withheld.push(WithheldGpu::whole(
                &gpu.uuid,
                reason::NO_DEVICE_NODE,
                message,
            ));
        }
    }
    withheld
}

/// The driver's files, if it has all that a CUDA program needs.
fn container_files(
    root: &DriverRoot,
    nodes: &DeviceNodes,
    description: &Description,
) -> Result<Found, DriverError> {
    nodes.require()?;
    Ok(discover(root, &description.driver_version)?)
}

fn publish(state: &watch::Sender<DriverState>, ready: Ready) {
    state.send_if_modified(|state| {
        if matches!(state, DriverState::Ready(old) if **old == ready) {
            return false;
        }
        info!(
            driver = ready.inventory.driver_version,
            cuda = ready.inventory.cuda_driver_version,
            gpus = ready.inventory.gpus.len(),
            "driver ready"
        );
        if !ready.inventory.unknown_functions.is_empty() {
            warn!(
                functions = ready.inventory.unknown_functions.join(" "),
                "the driver has functions that this release does not know: memory that they allocate in a capped share is not \
                 counted; use a release that knows the driver"
            );
        }
        for gpu in &ready.withheld {
            warn!(gpu = gpu.gpu, reason = gpu.reason, message = gpu.message, "a GPU is withheld");
        }
        *state = DriverState::Ready(Arc::new(ready));
        true
    });
}
