//! An allocated ResourceClaim, as far as it is about this node and this driver.
//!
//! Scheduler and users wrote the claim, so everything in it is checked. Every claim gives either an
//! [`Allocation`] or a [`ClaimError`] that names the claim, the request, the device and the field.

mod device_name;
mod error;
mod request;

use k8s_openapi::api::resource::v1::{
    DeviceAllocationConfiguration, DeviceRequestAllocationResult, ResourceClaim,
};
use serde::{Deserialize, Serialize};
use tranche_api::names::{DRIVER, capacity};
use tranche_api::share_config::{self, Parameters};
use tranche_api::{Quantity, ShareConfig, Tier};

pub use device_name::{DeviceName, DeviceNameError, PartitionTier, WholeGpuTier};
pub use error::{ClaimError, ClaimProblem, ConfigProblem, DeviceProblem};

/// The longest accepted UID; the API server's are UUIDs of 36 characters.
const LONGEST_UID: usize = 64;

/// What one claim was allocated on this node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Allocation {
    /// `metadata.uid`: letters, digits and inner dashes, so that it can name files.
    pub uid: String,
    /// `metadata.namespace`.
    pub namespace: String,
    /// `metadata.name`.
    pub name: String,
    /// If the claim is from a template: the name that its pod has for it (the annotation
    /// `resource.kubernetes.io/pod-claim-name`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_claim_name: Option<String>,
    /// The results for our driver and this node's pool, in the claim's order; at least one.
    pub devices: Vec<AllocatedDevice>,
}

/// One allocation result.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct AllocatedDevice {
    /// The request that it satisfies: `main` or `main/sub`.
    pub request: String,
    /// Pool, as in the slice.
    pub pool: String,
    /// Device, as in the slice.
    pub device: DeviceName,
    /// What was allocated of the device.
    pub grant: Grant,
    /// The effective parameters: first those of the class, then those of the claim. A later field overrides an earlier
    /// one.
    pub config: ShareConfig,
}

/// What a claim was allocated from a device.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", tag = "kind")]
pub enum Grant {
    /// All of it, for this claim alone.
    Whole {},
    /// A share with limits.
    #[serde(rename_all = "camelCase")]
    Capped {
        /// The share's UUID.
        share_id: String,
        /// Bytes, at least 1.
        memory: u64,
        /// Percent of SM time, 1-100.
        cores: u8,
        /// Bytes of one CUDA context, for which the share has room beside its memory. 0 for none.
        context_memory: u64,
    },
    /// A share of a GPU that an MPS daemon serves.
    #[serde(rename_all = "camelCase")]
    Concurrent {
        /// The share's UUID.
        share_id: String,
        /// Bytes, at least 1.
        memory: u64,
        /// Percent of the GPU's threads, 1-100.
        cores: u8,
        /// Bytes of one CUDA context, for which the share has room beside its memory. 0 for none.
        context_memory: u64,
    },
    /// A share without limits.
    #[serde(rename_all = "camelCase")]
    Timeshared {
        /// The share's UUID.
        share_id: String,
    },
    /// Admin access: observes a device that other claims may hold.
    #[serde(rename_all = "camelCase")]
    Admin {
        /// The share's UUID, if several claims share the device.
        share_id: Option<String>,
    },
}

impl Grant {
    /// The share's UUID, for a device that several claims share.
    #[must_use]
    pub fn share_id(&self) -> Option<&str> {
        match self {
            Self::Whole {} => None,
            Self::Capped { share_id, .. }
            | Self::Concurrent { share_id, .. }
            | Self::Timeshared { share_id } => Some(share_id),
            Self::Admin { share_id } => share_id.as_deref(),
        }
    }
}

impl Allocation {
    /// Whether both are the same scheduling decision for the same claim.
    ///
    /// It compares only the decision's identity and sizes, because another release may read more of the same claim.
    #[must_use]
    pub fn is_same_as(&self, other: &Self) -> bool {
        let decision = |allocation: &Self| {
            let devices = allocation.devices.iter().map(AllocatedDevice::decision);
            (allocation.uid.clone(), devices.collect::<Vec<_>>())
        };
        decision(self) == decision(other)
    }
}

/// The scheduler's decision about one device.
#[derive(PartialEq)]
struct Decision {
    request: String,
    pool: String,
    device: DeviceName,
    share_id: Option<String>,
    admin_access: bool,
    /// Bytes and percent, if the claim requested them.
    sizes: Option<(u64, u8)>,
}

impl AllocatedDevice {
    fn decision(&self) -> Decision {
        Decision {
            request: self.request.clone(),
            pool: self.pool.clone(),
            device: self.device,
            share_id: self.grant.share_id().map(str::to_owned),
            admin_access: matches!(self.grant, Grant::Admin { .. }),
            sizes: match self.grant {
                Grant::Capped { memory, cores, .. } | Grant::Concurrent { memory, cores, .. } => {
                    Some((memory, cores))
                }
                Grant::Whole {} | Grant::Timeshared { .. } | Grant::Admin { .. } => None,
            },
        }
    }

    /// The request as the kubelet knows it: without its subrequest.
    #[must_use]
    pub fn main_request(&self) -> &str {
        self.request
            .split_once('/')
            .map_or(self.request.as_str(), |(main, _)| main)
    }
}

/// Refuses a claim with another UID than the requested one.
pub fn check_uid(claim: &ResourceClaim, expected: &str) -> Result<(), ClaimError> {
    let found = claim.metadata.uid.as_deref().unwrap_or_default();
    if found == expected {
        return Ok(());
    }
    Err(error(
        claim,
        ClaimProblem::Replaced {
            expected: expected.to_owned(),
            found: found.to_owned(),
        },
    ))
}

fn error(claim: &ResourceClaim, problem: ClaimProblem) -> ClaimError {
    ClaimError {
        namespace: claim.metadata.namespace.clone().unwrap_or_default(),
        name: claim.metadata.name.clone().unwrap_or_default(),
        problem,
    }
}

impl Allocation {
    /// Reads what `claim` was allocated of our driver in `pool`, this node's pool.
    pub fn from_claim(claim: &ResourceClaim, pool: &str) -> Result<Self, ClaimError> {
        Self::read(claim, pool).map_err(|problem| error(claim, problem))
    }

    fn read(claim: &ResourceClaim, pool: &str) -> Result<Self, ClaimProblem> {
        let uid = claim.metadata.uid.clone().unwrap_or_default();
        if !is_uid(&uid) {
            return Err(ClaimProblem::Uid { uid });
        }
        let allocation = claim
            .status
            .as_ref()
            .and_then(|status| status.allocation.as_ref())
            .ok_or(ClaimProblem::NotAllocated)?;
        let allocated = allocation.devices.as_ref();
        let results = allocated.and_then(|devices| devices.results.as_deref());
        let configs = allocated.and_then(|devices| devices.config.as_deref());
        let configs = read_configs(configs.unwrap_or_default())?;
        let devices = results
            .unwrap_or_default()
            .iter()
            .filter(|result| result.driver == DRIVER && result.pool == pool)
            .map(|result| {
                let read = AllocatedDevice::read(result, &configs);
                let checked = read.and_then(|device| {
                    // What a claim with admin access asks for limits nothing.
                    if !matches!(device.grant, Grant::Admin { .. }) {
                        request::check(claim, &result.request)?;
                    }
                    Ok(device)
                });
                checked.map_err(|problem| ClaimProblem::Device {
                    request: result.request.clone(),
                    device: result.device.clone(),
                    problem,
                })
            })
            .collect::<Result<Vec<_>, _>>()?;
        if devices.is_empty() {
            return Err(ClaimProblem::NothingHere {
                pool: pool.to_owned(),
            });
        }
        Ok(Self {
            uid,
            namespace: claim.metadata.namespace.clone().unwrap_or_default(),
            name: claim.metadata.name.clone().unwrap_or_default(),
            pod_claim_name: pod_claim_name(claim),
            devices,
        })
    }
}

/// `None` also for text that is not a valid name of a pod's claim, because it becomes part of a path.
fn pod_claim_name(claim: &ResourceClaim) -> Option<String> {
    let annotations = claim.metadata.annotations.as_ref()?;
    let name = annotations.get("resource.kubernetes.io/pod-claim-name")?;
    let is_label = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    let is_name = (1..=63).contains(&name.len()) && name.bytes().all(is_label);
    is_name.then(|| name.clone())
}

fn is_uid(uid: &str) -> bool {
    let bytes = uid.as_bytes();
    uid.len() <= LONGEST_UID
        && bytes
            .iter()
            .all(|byte| byte.is_ascii_alphanumeric() || *byte == b'-')
        && bytes.first().is_some_and(u8::is_ascii_alphanumeric)
        && bytes.last().is_some_and(u8::is_ascii_alphanumeric)
}

/// The parameters of one config entry and the requests that it names.
struct Config<'a> {
    requests: &'a [String],
    parameters: Parameters,
}

/// Our configs, those of the class before those of the claim.
///
/// Configs for requests that are not allocated on this node are decoded, too, so that a claim is valid or invalid on
/// all nodes alike.
fn read_configs(
    entries: &[DeviceAllocationConfiguration],
) -> Result<Vec<Config<'_>>, ClaimProblem> {
    let mut of_class = Vec::new();
    let mut of_claim = Vec::new();
    for (index, entry) in entries.iter().enumerate() {
        let Some(opaque) = entry
            .opaque
            .as_ref()
            .filter(|opaque| opaque.driver == DRIVER)
        else {
            continue;
        };
        let refuse = |problem| ClaimProblem::Config {
            index,
            origin: entry.source.clone(),
            problem,
        };
        let parameters =
            Parameters::decode(&opaque.parameters.0).map_err(|problem| refuse(problem.into()))?;
        let config = Config {
            requests: entry.requests.as_deref().unwrap_or_default(),
            parameters,
        };
        match entry.source.as_str() {
            "FromClass" => of_class.push(config),
            "FromClaim" => of_claim.push(config),
            _ => return Err(refuse(ConfigProblem::Source)),
        }
    }
    of_class.append(&mut of_claim);
    Ok(of_class)
}

impl AllocatedDevice {
    fn read(
        result: &DeviceRequestAllocationResult,
        configs: &[Config<'_>],
    ) -> Result<Self, DeviceProblem> {
        let device: DeviceName = result.device.parse()?;
        let tier = device.tier();
        let grant = if result.admin_access == Some(true) {
            Grant::Admin {
                share_id: result.share_id.clone(),
            }
        } else {
            read_grant(result, tier)?
        };
        let config = configs
            .iter()
            .filter(|config| share_config::applies_to(config.requests, &result.request))
            .fold(Parameters::default(), |earlier, config| {
                earlier.overlaid_by(config.parameters)
            })
            .resolve();
        Ok(Self {
            request: result.request.clone(),
            pool: result.pool.clone(),
            device,
            grant,
            config,
        })
    }
}

fn read_grant(result: &DeviceRequestAllocationResult, tier: Tier) -> Result<Grant, DeviceProblem> {
    let share_id = match (&result.share_id, tier.is_shared()) {
        (Some(share_id), true) => share_id.clone(),
        (None, true) => return Err(DeviceProblem::NoShareId { tier }),
        (None, false) => return Ok(Grant::Whole {}),
        (Some(share_id), false) => {
            return Err(DeviceProblem::UnexpectedShare {
                tier,
                share_id: share_id.clone(),
            });
        }
    };
    if tier == Tier::Timeshared {
        return Ok(Grant::Timeshared { share_id });
    }
    let memory = consumed(result, capacity::MEMORY)?;
    if memory == 0 || memory == u64::MAX {
        return Err(DeviceProblem::OutOfRange {
            capacity: capacity::MEMORY,
            found: memory,
            expected: "at least 1 byte and less than 2^64-1",
        });
    }
    let cores = consumed(result, capacity::CORES)?;
    let cores = u8::try_from(cores)
        .ok()
        .filter(|cores| (1..=100).contains(cores))
        .ok_or(DeviceProblem::OutOfRange {
            capacity: capacity::CORES,
            found: cores,
            expected: "1 to 100 percent",
        })?;
    let context_memory = match consumed(result, capacity::CONTEXT_MEMORY) {
        // A policy with `contextMemory` 0 does not offer it.
        Err(DeviceProblem::NoCapacity { .. }) => 0,
        other => other?,
    };
    Ok(match tier {
        Tier::Concurrent => Grant::Concurrent {
            share_id,
            memory,
            cores,
            context_memory,
        },
        _ => Grant::Capped {
            share_id,
            memory,
            cores,
            context_memory,
        },
    })
}

/// A capacity that the scheduler charged; an integer of 0 or more.
fn consumed(
    result: &DeviceRequestAllocationResult,
    capacity: &'static str,
) -> Result<u64, DeviceProblem> {
    let wire = result
        .consumed_capacity
        .as_ref()
        .and_then(|consumed| consumed.get(capacity))
        .ok_or(DeviceProblem::NoCapacity { capacity })?;
    let quantity = Quantity::try_from(wire)
        .map_err(|problem| DeviceProblem::NoQuantity { capacity, problem })?;
    quantity
        .to_count()
        .map_err(|problem| DeviceProblem::NoCount { capacity, problem })
}

#[cfg(test)]
mod tests;
