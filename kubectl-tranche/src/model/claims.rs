//! The devices of ours that claims request, and those that they have.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::resource::v1::{
    AllocatedDeviceStatus, CapacityRequirements, DeviceClass, DeviceRequest,
    DeviceRequestAllocationResult, ResourceClaim,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as Wire;
use serde::Serialize;
use serde_json::Value;
use tranche_api::Tier;
use tranche_api::names::{self, DRIVER, attribute, capacity};
use tranche_driver::claim::DeviceName;
use tranche_driver::class::is_ours;

use super::devices::{Devices, amount, count, gpu_of, string};
use crate::snapshot::Snapshot;

/// The progress of a claim.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum State {
    /// The scheduler has not allocated anything for it.
    Waiting,
    /// The scheduler allocated devices, but its node has not prepared all of them.
    Allocated,
    /// Its node has prepared all of its devices.
    Ready,
}

impl State {
    /// For people.
    #[must_use]
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Allocated => "allocated",
            Self::Ready => "ready",
        }
    }
}

/// A claim that requests or has devices of ours.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Claim {
    pub namespace: String,
    pub name: String,
    pub uid: String,
    pub state: State,
    /// The pods for which it is reserved.
    pub pods: Vec<String>,
    pub wants: Vec<Want>,
    /// Its devices of ours.
    pub devices: Vec<ClaimDevice>,
}

/// A request of a claim, or one of its alternatives.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Want {
    /// `main`, or `main/sub` for an alternative.
    pub request: String,
    pub class: String,
    /// How many devices; `None` for all that there are.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub count: Option<u64>,
    /// Bytes, where it requests an amount.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<u64>,
    /// Percent, where it requests an amount.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cores: Option<u64>,
}

/// A device, or a share of one, that a claim has.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ClaimDevice {
    /// The request that it satisfies.
    pub request: String,
    pub node: String,
    /// The device's name in the slice.
    pub device: String,
    pub tier: Tier,
    /// The GPU's UUID; `None` where neither slice nor node gives it.
    #[serde(rename = "gpuUUID", skip_serializing_if = "Option::is_none")]
    pub gpu_uuid: Option<String>,
    /// The MIG device's UUID, where there is one and the node wrote it.
    #[serde(rename = "migUUID", skip_serializing_if = "Option::is_none")]
    pub mig_uuid: Option<String>,
    /// The GPU's PCI address, where it is known.
    #[serde(rename = "pciBusID", skip_serializing_if = "Option::is_none")]
    pub pci_bus_id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub profile: Option<String>,
    #[serde(rename = "shareID", skip_serializing_if = "Option::is_none")]
    pub share_id: Option<String>,
    /// Bytes: the limit of a share, or the memory of a device that is allocated as a whole.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory: Option<u64>,
    /// Percent: the limit of a share, or 100 for a device that is allocated as a whole.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cores: Option<u64>,
    /// Bytes that the share has beside `memory` for its CUDA contexts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub context_memory: Option<u64>,
    /// `high` or `low`, for a share whose claim asks for it, once its node prepared it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub priority: Option<String>,
    /// Whether its node prepared it.
    pub is_ready: bool,
    /// Whether it only observes (admin access).
    pub is_admin: bool,
}

/// The claims of ours, by namespace and name.
pub(super) fn read(snapshot: &Snapshot, devices: &Devices<'_>) -> Vec<Claim> {
    let classes = our_classes(&snapshot.classes);
    let mut claims: Vec<Claim> = snapshot
        .claims
        .iter()
        .filter_map(|claim| Claim::read(claim, &classes, devices))
        .collect();
    claims.sort_by(|a, b| (&a.namespace, &a.name).cmp(&(&b.namespace, &b.name)));
    claims
}

/// The names of our classes. Classes of the chart are known by name where classes cannot be read.
fn our_classes(classes: &[DeviceClass]) -> BTreeSet<&str> {
    let ours = classes.iter().filter(|class| is_ours(class));
    ours.filter_map(|class| class.metadata.name.as_deref())
        .collect()
}

fn are_ours(wants: &[Want], ours: &BTreeSet<&str>) -> bool {
    let is_ours = |class: &str| ours.contains(class) || names::is_class(class);
    wants.iter().any(|want| is_ours(&want.class))
}

impl Claim {
    fn read(claim: &ResourceClaim, ours: &BTreeSet<&str>, devices: &Devices<'_>) -> Option<Self> {
        let status = claim.status.as_ref();
        let allocation = status.and_then(|it| it.allocation.as_ref());
        let results = allocation.and_then(|it| it.devices.as_ref()?.results.as_deref());
        let described = status.and_then(|it| it.devices.as_deref());
        let held: Vec<ClaimDevice> = results
            .unwrap_or_default()
            .iter()
            .filter(|result| result.driver == DRIVER)
            .filter_map(|result| ClaimDevice::read(result, described.unwrap_or_default(), devices))
            .collect();
        let wants = wants_of(claim)?;
        let is_ours = match allocation {
            Some(_) => !held.is_empty(),
            None => are_ours(&wants, ours),
        };
        if !is_ours {
            return None;
        }
        let state = match allocation {
            None => State::Waiting,
            Some(_) if held.iter().all(|device| device.is_ready) => State::Ready,
            Some(_) => State::Allocated,
        };
        let reserved = status.and_then(|it| it.reserved_for.as_deref());
        let pods = reserved
            .unwrap_or_default()
            .iter()
            .filter(|consumer| consumer.resource == "pods");
        Some(Self {
            namespace: claim.metadata.namespace.clone().unwrap_or_default(),
            name: claim.metadata.name.clone().unwrap_or_default(),
            uid: claim.metadata.uid.clone().unwrap_or_default(),
            state,
            pods: pods.map(|consumer| consumer.name.clone()).collect(),
            wants,
            devices: held,
        })
    }
}

/// What an unallocated claim requests; `None` where it requests nothing of our classes.
#[must_use]
pub fn wants_of_ours(claim: &ResourceClaim, classes: &[DeviceClass]) -> Vec<Want> {
    let wants = wants_of(claim).unwrap_or_default();
    if are_ours(&wants, &our_classes(classes)) {
        wants
    } else {
        Vec::new()
    }
}

fn wants_of(claim: &ResourceClaim) -> Option<Vec<Want>> {
    let devices = claim.spec.as_ref()?.devices.as_ref()?;
    let requests = devices.requests.iter().flatten();
    Some(requests.flat_map(wants).collect())
}

fn wants(request: &DeviceRequest) -> Vec<Want> {
    let name = &request.name;
    let exactly = request.exactly.iter().map(|it| {
        let count = (it.allocation_mode.as_deref() != Some("All")).then(|| it.count.unwrap_or(1));
        want(
            name.clone(),
            &it.device_class_name,
            count,
            it.capacity.as_ref(),
        )
    });
    let alternatives = request.first_available.iter().flatten().map(|it| {
        let count = (it.allocation_mode.as_deref() != Some("All")).then(|| it.count.unwrap_or(1));
        let name = format!("{name}/{}", it.name);
        want(name, &it.device_class_name, count, it.capacity.as_ref())
    });
    exactly.chain(alternatives).collect()
}

fn want(
    request: String,
    class: &str,
    number: Option<i64>,
    asked: Option<&CapacityRequirements>,
) -> Want {
    let asked = asked.and_then(|it| it.requests.as_ref());
    let of = |name| count(asked?.get(name)?);
    Want {
        request,
        class: class.to_owned(),
        count: number.map(|number| u64::try_from(number).unwrap_or_default()),
        memory: of(capacity::MEMORY),
        cores: of(capacity::CORES),
    }
}

impl ClaimDevice {
    /// `None` for a device whose name no release of ours has given.
    fn read(
        result: &DeviceRequestAllocationResult,
        described: &[AllocatedDeviceStatus],
        devices: &Devices<'_>,
    ) -> Option<Self> {
        let name: DeviceName = result.device.parse().ok()?;
        let device = devices.get(&result.pool, &result.device);
        let status = described.iter().find(|it| {
            it.driver == DRIVER
                && it.pool == result.pool
                && it.device == result.device
                && it.share_id == result.share_id
        });
        let data = status.and_then(|it| it.data.as_ref()).map(|data| &data.0);
        let told = |field: &str| data?.get(field)?.as_str().map(str::to_owned);
        let consumed = result.consumed_capacity.as_ref();
        let share = |name: &str| count(consumed?.get(name)?);
        // A claim that has a whole device has all of its capacities.
        let whole = |name: &str| {
            device
                .filter(|_| consumed.is_none())
                .and_then(|it| amount(it, name))
        };
        let is_sized = name.tier().has_shim();
        let data_memory = || count(&Wire(told("memory")?));
        let data_cores = || data?.get("cores").and_then(Value::as_u64);
        let pool = result.pool.as_str();
        // What a claim with admin access takes of a share's capacities limits nothing: its container has the whole device.
        let is_admin = result.admin_access == Some(true);
        let memory = share(capacity::MEMORY)
            .or_else(|| whole(capacity::MEMORY))
            .or_else(data_memory);
        let cores = share(capacity::CORES)
            .or_else(|| whole(capacity::CORES))
            .or_else(|| data_cores().filter(|_| is_sized));
        let of_share = |amount: Option<u64>| amount.filter(|_| !is_admin);
        Some(Self {
            request: result.request.clone(),
            node: names::node_of(pool).to_owned(),
            device: result.device.clone(),
            tier: name.tier(),
            gpu_uuid: device
                .and_then(gpu_of)
                .map(str::to_owned)
                .or_else(|| told("gpuUUID")),
            mig_uuid: told("migUUID"),
            pci_bus_id: device
                .and_then(|it| string(it, attribute::PCI_BUS_ID))
                .map(str::to_owned)
                .or_else(|| told("pciBusID")),
            profile: name
                .placement()
                .map(|placement| placement.profile.to_string()),
            share_id: result.share_id.clone(),
            memory: of_share(memory),
            cores: of_share(cores),
            context_memory: of_share(share(capacity::CONTEXT_MEMORY)),
            priority: told("priority"),
            is_ready: status.is_some_and(is_ready),
            is_admin,
        })
    }

    /// How it is allocated, for people: `capped`, `partition 3g.40gb`, `admin`.
    #[must_use]
    pub fn kind(&self) -> String {
        match (&self.profile, self.is_admin) {
            (Some(profile), true) => format!("admin {profile}"),
            (None, true) => "admin".to_owned(),
            (Some(profile), false) => format!("{} {profile}", self.tier),
            (None, false) => self.tier.to_string(),
        }
    }
}

fn is_ready(status: &AllocatedDeviceStatus) -> bool {
    let conditions: BTreeMap<&str, &str> = status
        .conditions
        .iter()
        .flatten()
        .map(|it| (it.type_.as_str(), it.status.as_str()))
        .collect();
    conditions.get("Ready") == Some(&"True")
}
