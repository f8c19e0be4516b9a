//! The steps on the node that give a claim's containers what was claimed.
//!
//! A plan is a list of steps, each idempotent and each with an inverse. The kubelet-plugin journals
//! the plan before the first step and then executes it; undoing runs the inverses backwards, and
//! an inverse succeeds where its step never ran.
//!
//! The scheduler decides from slices that may be stale, so every plan is checked against the GPUs
//! that NVML reports now and against everything that other claims hold on this node.
//!
//! A plan names its GPUs by UUID. Minor number and PCI address are looked up whenever a claim is prepared
//! ([`PreparationPlan::located`]), because a boot may change both. The MIG device of a partition is looked up, too
//! ([`PreparationPlan::on_gpu`]).
//!
//! The state of a GPU as a whole is not a step of a claim's plan: [`held_of`] says what all plans together hold of a
//! GPU, and [`gpu_state`](crate::gpu_state) reconciles the GPU with that before the first step.

mod conflict;
mod priority;

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use tranche_api::gpu_node::{Gpu, Inventory};
use tranche_api::quantity::CountError;
use tranche_api::share_config::ComputeMode;
use tranche_api::sharing_policy::Interval;
use tranche_api::{Quantity, Tier, WithheldGpu};

use crate::cdi;
use crate::claim::{AllocatedDevice, Allocation, DeviceName, Grant};
use crate::mig::{Geometry, GeometryError, Placement};
use crate::oversubscription::Oversubscription;

pub use conflict::Conflict;
pub use priority::Priority;

/// The version of the pages that a plan of this release makes, and of the shim that reads them. A release
/// that changes the layout of the cap page or of the account page raises it.
pub const PAGES: u32 = 1;

/// What to do for one claim.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PreparationPlan {
    /// The claim as it was allocated.
    pub allocation: Allocation,
    /// The version of the claim's pages. Its containers have the shim of that version, even if the node runs a later
    /// release.
    pub pages: u32,
    /// One entry per allocated device, in the claim's order.
    pub devices: Vec<PreparedDevice>,
    /// The steps, in the order of execution.
    pub steps: Vec<Step>,
}

/// One device as its containers will see it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PreparedDevice {
    /// `<claim UID>-<request>-<n>`: names the page folder and the CDI device. It carries the UID
    /// because one container may hold several claims.
    pub key: String,
    /// The request with its subrequest stripped, as the kubelet asks for it.
    pub request: String,
    /// Pool, as in the slice.
    pub pool: String,
    /// Device, as in the slice.
    pub device: String,
    /// As in the allocation.
    pub share_id: Option<String>,
    /// The tier it is prepared for.
    pub tier: Tier,
    /// Admin access: observes a device that other claims may hold.
    pub admin_access: bool,
    /// The physical GPU.
    pub gpu_uuid: String,
    /// The N of `/dev/nvidiaN` when the claim was last prepared.
    pub minor: u32,
    /// `dddd:bb:dd.f` when the claim was last prepared.
    pub pci_bus_id: String,
    /// For a claim that holds a partition of the GPU, or a share of one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub partition: Option<HeldPartition>,
    /// For a claim that holds the GPU at VFIO.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub vfio: Option<HeldVfio>,
    /// For a timeshared share whose policy set the length of time slices when the claim was planned.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub time_slice: Option<Interval>,
    /// The enforced limits.
    pub cap: Cap,
    /// Qualified CDI ids, the claim's own first.
    pub cdi_ids: Vec<String>,
}

/// A partition that a claim holds, exclusively or in shares.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HeldPartition {
    /// Its placement.
    #[serde(rename = "place")]
    pub placement: Placement,
    /// The MIG device when the claim was last prepared; absent until then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mig: Option<MigDevice>,
}

/// A MIG device: a compute instance that has all of a GPU instance.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct MigDevice {
    /// `MIG-…`.
    pub uuid: String,
    /// The GPU instance's id (`nvmlGpuInstanceInfo_t.id`).
    pub gpu_instance: u32,
    /// The id of the compute instance in it (`nvmlComputeInstanceInfo_t.id`).
    pub compute_instance: u32,
    /// The minor numbers N of `/dev/nvidia-caps/nvidia-capN`, which give access to the GPU instance and to the compute
    /// instance.
    pub capabilities: [u32; 2],
}

/// A GPU that a claim holds at VFIO.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct HeldVfio {
    /// What a program opens to use it, when the claim was last prepared; absent until then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<VfioGroup>,
}

/// An IOMMU group whose functions are bound to VFIO.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct VfioGroup {
    /// The addresses of the functions that are bound: the GPU's own.
    pub functions: Vec<String>,
    /// The host's device nodes.
    pub nodes: Vec<String>,
}

/// The enforced upper limit of a share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "kind")]
pub enum Cap {
    /// No limits: the whole GPU, or a tier without caps.
    None {},
    /// The shim enforces these.
    #[serde(rename_all = "camelCase")]
    Share {
        /// Bytes.
        memory: u64,
        /// On a GPU with oversubscribed memory: the most bytes of the share's memory that cannot move to the host.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        resident: Option<u64>,
        /// Percent of SM time, 1-100; with MPS, of the GPU's threads.
        cores: u8,
        /// Whether the time of idle neighbours may be used; not with MPS.
        mode: ComputeMode,
        /// Whose launches come first; not with MPS.
        #[serde(default, skip_serializing_if = "Priority::is_normal")]
        priority: Priority,
        /// Bytes that one CUDA context takes; 0 if that is not known.
        context_memory: u64,
        /// Whether its processes are clients of the GPU's MPS daemon, which limits each of them, too.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        mps: bool,
    },
}

impl PreparedDevice {
    /// The UUID that programs see: the MIG device's for a partition.
    #[must_use]
    pub fn uuid(&self) -> &str {
        let mig = self.partition.as_ref().and_then(|it| it.mig.as_ref());
        mig.map_or(&self.gpu_uuid, |mig| &mig.uuid)
    }

    /// How much more memory the shares of its GPU have together than the GPU; `None` without oversubscription.
    #[must_use]
    pub fn oversubscription(&self) -> Option<Oversubscription> {
        self.device
            .parse()
            .ok()
            .and_then(DeviceName::oversubscription)
    }

    /// The tier that the GPU itself serves for the claim: [`Tier::Partition`] also for a share of a partition.
    #[must_use]
    pub const fn gpu_tier(&self) -> Tier {
        match self.partition {
            Some(_) => Tier::Partition,
            None => self.tier,
        }
    }
}

impl Cap {
    /// Whether there are limits to enforce, and so an account.
    #[must_use]
    pub const fn is_share(self) -> bool {
        matches!(self, Self::Share { .. })
    }

    /// Bytes of a share that must lie on the GPU.
    #[must_use]
    pub const fn on_gpu(self) -> u64 {
        match self {
            Self::None {} => 0,
            Self::Share {
                resident: Some(bytes),
                ..
            } => bytes,
            Self::Share { memory, .. } => memory,
        }
    }

    /// The accounts that count its processes.
    #[must_use]
    pub const fn accounts(self) -> &'static [Account] {
        match self {
            Self::None {} => &[],
            Self::Share { resident: None, .. } => &[Account::Memory],
            Self::Share { .. } => &[Account::Memory, Account::Resident],
        }
    }

    /// Whether its processes are clients of the GPU's MPS daemon.
    #[must_use]
    pub const fn is_mps(self) -> bool {
        matches!(self, Self::Share { mps: true, .. })
    }
}

/// What an account page counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Account {
    /// All memory of the share.
    #[default]
    Memory,
    /// Of an oversubscribed share: the memory that cannot move to the host.
    Resident,
}

impl Account {
    #[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes it so")]
    const fn is_of_memory(&self) -> bool {
        matches!(self, Self::Memory)
    }

    /// The page's file name.
    #[must_use]
    pub const fn file(self) -> &'static str {
        match self {
            Self::Memory => "account",
            Self::Resident => "resident",
        }
    }
}

/// One side effect, idempotent, with an inverse.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "step")]
pub enum Step {
    /// Write the read-only page that tells a container its limits.
    #[serde(rename_all = "camelCase")]
    WriteCapPage {
        /// The device's key.
        key: String,
        /// The physical GPU.
        gpu_uuid: String,
        /// The limits.
        cap: Cap,
    },
    /// Create the account page, unless it is there already: running containers count in it.
    #[serde(rename_all = "camelCase")]
    CreateAccountPage {
        /// The device's key.
        key: String,
        /// Its kind.
        #[serde(default, skip_serializing_if = "Account::is_of_memory")]
        account: Account,
    },
    /// Write the claim's CDI spec.
    WriteCdiSpec {},
}

/// The inverse of a step. Succeeds where there is nothing to remove.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Undo {
    /// Of [`Step::WriteCapPage`].
    RemoveCapPage {
        /// The device's key.
        key: String,
    },
    /// Of [`Step::CreateAccountPage`].
    RemoveAccountPage {
        /// The device's key.
        key: String,
        /// Its kind.
        account: Account,
    },
    /// Of [`Step::WriteCdiSpec`].
    RemoveCdiSpec,
}

impl Step {
    /// The inverse of the step.
    #[must_use]
    pub fn inverse(&self) -> Undo {
        match self {
            Self::WriteCapPage { key, .. } => Undo::RemoveCapPage { key: key.clone() },
            Self::CreateAccountPage { key, account } => Undo::RemoveAccountPage {
                key: key.clone(),
                account: *account,
            },
            Self::WriteCdiSpec {} => Undo::RemoveCdiSpec,
        }
    }
}

impl PreparationPlan {
    /// The plan with more of the driver's libraries in the containers of capped devices, by GPU. They come before
    /// the shim's device, whose hook makes the loader's cache.
    #[must_use]
    pub fn with_capabilities(mut self, of_gpu: impl Fn(&str) -> BTreeSet<cdi::Capability>) -> Self {
        for device in self.devices.iter_mut().filter(|it| it.cap.is_share()) {
            let extra = of_gpu(&device.gpu_uuid).into_iter();
            let ids = extra.map(|capability| cdi::DriverDevice::Extra(capability).id());
            let last = device.cdi_ids.len().saturating_sub(1);
            device.cdi_ids.splice(last..last, ids);
        }
        self
    }

    /// The plan with the length of time slices that the policies ask for its timeshared shares, by GPU.
    #[must_use]
    pub fn with_time_slices(mut self, of_gpu: impl Fn(&str) -> Interval) -> Self {
        let is_share = |it: &&mut PreparedDevice| it.tier == Tier::Timeshared && !it.admin_access;
        for device in self.devices.iter_mut().filter(is_share) {
            let asked = of_gpu(&device.gpu_uuid);
            device.time_slice = Some(asked).filter(|it| *it != Interval::Default);
        }
        self
    }

    /// The inverses of all steps, in the order of execution.
    #[must_use]
    pub fn undo(&self) -> Vec<Undo> {
        self.steps.iter().rev().map(Step::inverse).collect()
    }

    /// The plan with the current location of its GPUs. A missing GPU is an error; no other GPU replaces it.
    pub fn located(&self, inventory: &Inventory) -> Result<Self, PreparationError> {
        let mut plan = self.clone();
        for device in &mut plan.devices {
            let present = inventory
                .gpus
                .iter()
                .find(|gpu| gpu.uuid == device.gpu_uuid);
            let gpu = present.ok_or_else(|| PreparationError {
                namespace: self.allocation.namespace.clone(),
                name: self.allocation.name.clone(),
                request: device.request.clone(),
                device: device.device.clone(),
                problem: PreparationProblem::GpuGone {
                    gpu: device.gpu_uuid.clone(),
                    present: uuids(&inventory.gpus),
                },
            })?;
            device.minor = gpu.minor;
            device.pci_bus_id.clone_from(&gpu.pci_bus_id);
        }
        Ok(plan)
    }

    /// The UUID that programs see of a device: the MIG device's for a partition.
    #[must_use]
    pub fn device_uuid(&self, key: &str) -> Option<&str> {
        let device = self.devices.iter().find(|device| device.key == key)?;
        Some(device.uuid())
    }

    /// The GPUs whose state the claim changes, each once: it holds partitions of them, a share that needs their MPS
    /// daemon or its own length of time slices, or the GPU at VFIO.
    #[must_use]
    pub fn changed_gpus(&self) -> BTreeSet<&str> {
        let is_changed = |it: &&PreparedDevice| {
            let is_changed = it.partition.is_some() || it.cap.is_mps() || it.time_slice.is_some();
            is_changed || it.vfio.is_some()
        };
        let devices = self.devices.iter().filter(is_changed);
        devices.map(|device| &*device.gpu_uuid).collect()
    }

    /// The plan with the VFIO group that its GPU has now.
    #[must_use]
    pub fn at_vfio(mut self, gpu_uuid: &str, group: &VfioGroup) -> Self {
        for device in self.devices.iter_mut().filter(|it| it.gpu_uuid == gpu_uuid) {
            if let Some(held) = &mut device.vfio {
                held.group = Some(group.clone());
            }
        }
        self
    }

    /// The plan after a GPU was prepared: with the GPU's minor number, if it was looked up, and the MIG devices of its
    /// partitions.
    #[must_use]
    pub fn on_gpu(
        mut self,
        gpu_uuid: &str,
        minor: Option<u32>,
        of_placement: impl Fn(Placement) -> Option<MigDevice>,
    ) -> Self {
        for device in self.devices.iter_mut().filter(|it| it.gpu_uuid == gpu_uuid) {
            device.minor = minor.unwrap_or(device.minor);
            if let Some(partition) = &mut device.partition {
                partition.mig = of_placement(partition.placement);
            }
        }
        self
    }
}

/// What claims hold of a GPU that concerns the GPU as a whole.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HeldOfGpu {
    /// The partitions, exclusive or shared.
    pub partitions: BTreeSet<Placement>,
    /// Whether there are concurrent shares of the whole GPU, and so an MPS daemon.
    pub mps: bool,
    /// The partitions with concurrent shares; each has an MPS daemon.
    pub partition_daemons: BTreeSet<Placement>,
    /// Whether a claim holds it at VFIO.
    pub vfio: bool,
}

/// What claims with these plans hold of a GPU.
#[must_use]
pub fn held_of<'a>(
    gpu_uuid: &str,
    held: impl IntoIterator<Item = &'a PreparationPlan>,
) -> HeldOfGpu {
    let mut all = HeldOfGpu::default();
    let devices = held.into_iter().flat_map(|plan| &plan.devices);
    for device in devices.filter(|device| device.gpu_uuid == gpu_uuid) {
        match &device.partition {
            Some(partition) => {
                all.partitions.insert(partition.placement);
                if device.cap.is_mps() {
                    all.partition_daemons.insert(partition.placement);
                }
            }
            None => all.mps |= device.cap.is_mps(),
        }
        all.vfio |= device.vfio.is_some();
    }
    all
}

/// The lengths of time slices that claims with these plans want on a GPU.
#[must_use]
pub fn wanted_time_slices<'a>(
    gpu_uuid: &str,
    held: impl IntoIterator<Item = &'a PreparationPlan>,
) -> BTreeSet<Interval> {
    let devices = held.into_iter().flat_map(|plan| &plan.devices);
    let of_gpu = devices.filter(|device| device.gpu_uuid == gpu_uuid);
    of_gpu.filter_map(|device| device.time_slice).collect()
}

/// Why a claim cannot be prepared on this node.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("claim {namespace}/{name}, request {request}, device {device}: {problem}")]
pub struct PreparationError {
    /// The claim's namespace.
    pub namespace: String,
    /// The claim's name.
    pub name: String,
    /// The request that the device satisfies.
    pub request: String,
    /// The device's name.
    pub device: String,
    /// The reason.
    pub problem: PreparationProblem,
}

/// Why a device cannot be prepared.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PreparationProblem {
    /// The GPU is missing.
    #[error(
        "GPU {gpu} is gone, the driver sees {}: see the kernel log (`dmesg`) for its Xid, or delete the claim's pods to have another GPU allocated",
        list(present)
    )]
    GpuGone {
        /// Its UUID, or the part of it that is known.
        gpu: String,
        /// The UUIDs of the GPUs that are present.
        present: Vec<String>,
    },
    /// The name fits several GPUs.
    #[error(
        "the UUIDs of {} begin alike, so the name does not tell which of them was allocated: delete the claim's pods to have a device allocated by its longer name",
        list(fitting)
    )]
    Ambiguous {
        /// Their UUIDs.
        fitting: Vec<String>,
    },
    /// The driver's description of the GPU is invalid.
    #[error("GPU {uuid}: {field} {problem}")]
    Inventory {
        /// The GPU.
        uuid: String,
        /// The field of its description.
        field: &'static str,
        /// Why.
        problem: CountError,
    },
    /// The share is larger than the GPU, or than its partition.
    #[error(
        "the share's memory is {}, but {}GPU {uuid} has only {}",
        bytes(*asked), of.map(conflict::partition_of).unwrap_or_default(), bytes(*available)
    )]
    TooMuchMemory {
        /// The partition of which it is a share.
        of: Option<Placement>,
        /// The GPU.
        uuid: String,
        /// Bytes.
        asked: u64,
        /// Bytes: total less what the driver reserves.
        available: u64,
    },
    /// The model has no such partition.
    #[error(
        "GPU {uuid} has no {placement}: delete the claim's pods to have another device allocated"
    )]
    NoSuchPartition {
        /// The GPU.
        uuid: String,
        /// The partition.
        placement: Placement,
    },
    /// The driver does not report how MIG divides the GPU.
    #[error(
        "the driver does not report how MIG divides GPU {uuid}: see `nvidia-smi mig -lgip` on the node, or delete the claim's pods to have another device allocated"
    )]
    NotDivided {
        /// The GPU.
        uuid: String,
    },
    /// The driver's report of the GPU's division is invalid.
    #[error("GPU {uuid}: {problem}")]
    Geometry {
        /// The GPU.
        uuid: String,
        /// Why.
        problem: GeometryError,
    },
    /// Other claims hold too much of the GPU.
    #[error(transparent)]
    Conflict(#[from] Conflict),
    /// The node itself withholds the GPU.
    #[error(
        "GPU {uuid} is withheld ({reason}): {message}; delete the pod to have another device allocated"
    )]
    Withheld {
        /// The GPU.
        uuid: String,
        /// One word, as in the GpuNode's status.
        reason: String,
        /// Why.
        message: String,
    },
    /// Admin access to a GPU that its driver may not know.
    #[error(
        "admin access to a passthrough device shows nothing, because the GPU's driver does not know the GPU while a claim holds it: ask for the device of tier exclusive"
    )]
    NothingToObserve,
    /// The request's name cannot become part of a CDI device's name.
    #[error(transparent)]
    Name(#[from] cdi::NameError),
}

/// Refuses a plan for a GPU that the node withholds: the scheduler may have decided before the GPU was withheld. Claims
/// that are already prepared, and admin access, are not refused.
pub fn refuse_withheld<'a>(
    plan: &PreparationPlan,
    withheld: &(impl IntoIterator<Item = &'a WithheldGpu> + Clone),
) -> Result<(), PreparationError> {
    for device in plan.devices.iter().filter(|device| !device.admin_access) {
        let mut entries = withheld.clone().into_iter();
        let closes =
            |it: &&WithheldGpu| it.closes(&device.gpu_uuid, device.tier, device.gpu_tier());
        if let Some(entry) = entries.find(closes) {
            return Err(PreparationError {
                namespace: plan.allocation.namespace.clone(),
                name: plan.allocation.name.clone(),
                request: device.request.clone(),
                device: device.device.clone(),
                problem: PreparationProblem::Withheld {
                    uuid: entry.gpu.clone(),
                    reason: entry.reason.clone(),
                    message: entry.message.clone(),
                },
            });
        }
    }
    Ok(())
}

fn list(uuids: &[String]) -> String {
    if uuids.is_empty() {
        return "no GPU".to_owned();
    }
    uuids.join(", ")
}

fn uuids<'a>(gpus: impl IntoIterator<Item = &'a Gpu>) -> Vec<String> {
    gpus.into_iter().map(|gpu| gpu.uuid.clone()).collect()
}

fn bytes(amount: u64) -> Quantity {
    Quantity::from_bytes(amount)
}

/// Plans the preparation of `allocation` on a node with the GPUs of `inventory` (as NVML reports them now). `held` are
/// the plans of all claims on the node; those of the same claim are ignored.
pub fn plan<'a>(
    allocation: &Allocation,
    inventory: &Inventory,
    held: impl IntoIterator<Item = &'a PreparationPlan>,
) -> Result<PreparationPlan, PreparationError> {
    let mut holdings = conflict::Holdings::of(
        held.into_iter()
            .filter(|plan| plan.allocation.uid != allocation.uid),
    );
    let mut devices = Vec::with_capacity(allocation.devices.len());
    for (index, allocated) in allocation.devices.iter().enumerate() {
        let device =
            prepare(allocation, index, allocated, inventory, &mut holdings).map_err(|problem| {
                PreparationError {
                    namespace: allocation.namespace.clone(),
                    name: allocation.name.clone(),
                    request: allocated.request.clone(),
                    device: allocated.device.to_string(),
                    problem,
                }
            })?;
        devices.push(device);
    }
    Ok(PreparationPlan {
        allocation: allocation.clone(),
        pages: PAGES,
        steps: steps(&devices),
        devices,
    })
}

fn prepare(
    allocation: &Allocation,
    index: usize,
    allocated: &AllocatedDevice,
    inventory: &Inventory,
    holdings: &mut conflict::Holdings,
) -> Result<PreparedDevice, PreparationProblem> {
    let gpu = find(allocated.device, inventory)?;
    let (partition, geometry, available) = match held_partition(allocated, gpu, inventory)? {
        Some((partition, geometry, available)) => (Some(partition), Some(geometry), available),
        None => (None, None, available_memory(gpu)?),
    };
    let vfio = match (allocated.device.tier(), &allocated.grant) {
        (Tier::Passthrough, Grant::Admin { .. }) => {
            return Err(PreparationProblem::NothingToObserve);
        }
        (Tier::Passthrough, _) => Some(HeldVfio::default()),
        _ => None,
    };
    let over = allocated.device.oversubscription();
    let (cap, edits) = match &allocated.grant {
        Grant::Capped {
            memory,
            cores,
            context_memory,
            ..
        } => (
            Cap::Share {
                memory: *memory,
                resident: over.map(|over| over.part_on_gpu(*memory)),
                cores: *cores,
                mode: allocated.config.compute.mode,
                priority: Priority::asked(allocated.config.compute.priority),
                context_memory: *context_memory,
                mps: false,
            },
            cdi::DriverDevice::Capped { pages: PAGES },
        ),
        Grant::Concurrent {
            memory,
            cores,
            context_memory,
            ..
        } => (
            Cap::Share {
                memory: *memory,
                resident: None,
                cores: *cores,
                mode: ComputeMode::Strict,
                priority: Priority::Normal,
                context_memory: *context_memory,
                mps: true,
            },
            cdi::DriverDevice::Capped { pages: PAGES },
        ),
        Grant::Whole {} | Grant::Timeshared { .. } | Grant::Admin { .. } => {
            (Cap::None {}, cdi::DriverDevice::Full)
        }
    };
    if cap.on_gpu() > available {
        return Err(PreparationProblem::TooMuchMemory {
            of: partition.as_ref().map(|it| it.placement),
            uuid: gpu.uuid.clone(),
            asked: cap.on_gpu(),
            available,
        });
    }
    let key = format!("{}-{}-{index}", allocation.uid, allocated.main_request());
    let mut cdi_ids = vec![cdi::claim_device_id(&key)?];
    if vfio.is_none() {
        cdi_ids.push(edits.id());
    }
    let device = PreparedDevice {
        request: allocated.main_request().to_owned(),
        pool: allocated.pool.clone(),
        device: allocated.device.to_string(),
        share_id: allocated.grant.share_id().map(str::to_owned),
        tier: allocated.device.tier(),
        admin_access: matches!(allocated.grant, Grant::Admin { .. }),
        gpu_uuid: gpu.uuid.clone(),
        minor: gpu.minor,
        pci_bus_id: gpu.pci_bus_id.clone(),
        partition,
        vfio,
        time_slice: None,
        cap,
        cdi_ids,
        key,
    };
    holdings.add(
        &device,
        &format!("{}/{}", allocation.namespace, allocation.name),
        &conflict::Total {
            memory: available,
            geometry: geometry.as_ref(),
        },
    )?;
    Ok(device)
}

/// The partition that a claim holds, exclusively or in shares, with the geometry of its GPU and the bytes that programs
/// can have in it. Admin access gets the GPU as it is: nothing is created for it.
fn held_partition(
    allocated: &AllocatedDevice,
    gpu: &Gpu,
    inventory: &Inventory,
) -> Result<Option<(HeldPartition, Geometry, u64)>, PreparationProblem> {
    let (Some(placement), false) = (
        allocated.device.placement(),
        matches!(allocated.grant, Grant::Admin { .. }),
    ) else {
        return Ok(None);
    };
    let geometry = geometry(gpu, inventory)?;
    let partition =
        geometry
            .partition(placement)
            .ok_or_else(|| PreparationProblem::NoSuchPartition {
                uuid: gpu.uuid.clone(),
                placement,
            })?;
    let available = partition.available_memory();
    Ok(Some((
        HeldPartition {
            placement,
            mig: None,
        },
        geometry,
        available,
    )))
}

/// The one GPU that the device's name means.
fn find(name: DeviceName, inventory: &Inventory) -> Result<&Gpu, PreparationProblem> {
    let prefix = match name {
        DeviceName::Gpu { gpu, .. }
        | DeviceName::Oversubscribed { gpu, .. }
        | DeviceName::Partition { gpu, .. }
        | DeviceName::SharedPartition { gpu, .. } => gpu,
    };
    let fits = |gpu: &&Gpu| gpu.uuid.parse().is_ok_and(|uuid| prefix.begins(uuid));
    let fitting: Vec<&Gpu> = inventory.gpus.iter().filter(fits).collect();
    match fitting[..] {
        [gpu] => Ok(gpu),
        [] => Err(PreparationProblem::GpuGone {
            gpu: format!("with a UUID that begins with {prefix}"),
            present: uuids(&inventory.gpus),
        }),
        _ => Err(PreparationProblem::Ambiguous {
            fitting: uuids(fitting),
        }),
    }
}

/// How MIG divides the GPU.
fn geometry(gpu: &Gpu, inventory: &Inventory) -> Result<Geometry, PreparationProblem> {
    let described = inventory
        .mig_geometry(gpu)
        .ok_or_else(|| PreparationProblem::NotDivided {
            uuid: gpu.uuid.clone(),
        })?;
    Geometry::read(described).map_err(|problem| PreparationProblem::Geometry {
        uuid: gpu.uuid.clone(),
        problem,
    })
}

/// Bytes that all shares of the GPU can have together.
fn available_memory(gpu: &Gpu) -> Result<u64, PreparationProblem> {
    let read = |field, amount: Quantity| {
        amount
            .to_count()
            .map_err(|problem| PreparationProblem::Inventory {
                uuid: gpu.uuid.clone(),
                field,
                problem,
            })
    };
    let total = read("memory", gpu.memory)?;
    let reserved = read("reservedMemory", gpu.reserved_memory)?;
    Ok(total.saturating_sub(reserved))
}

/// Pages first, the CDI spec last: when the spec exists, everything that it mounts exists.
fn steps(devices: &[PreparedDevice]) -> Vec<Step> {
    let mut steps = Vec::new();
    // The driver in a virtual machine does not read the page.
    for device in devices.iter().filter(|device| device.vfio.is_none()) {
        steps.push(Step::WriteCapPage {
            key: device.key.clone(),
            gpu_uuid: device.gpu_uuid.clone(),
            cap: device.cap,
        });
        let accounts = device.cap.accounts().iter();
        steps.extend(accounts.map(|account| Step::CreateAccountPage {
            key: device.key.clone(),
            account: *account,
        }));
    }
    steps.push(Step::WriteCdiSpec {});
    steps
}

#[cfg(test)]
mod tests;
