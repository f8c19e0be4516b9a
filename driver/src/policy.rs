//! What an admin's policies mean for one GPU.
//!
//! ```text
//!  policies ─► those whose selector matches the node's labels and that name the GPU
//!           ─► the highest priority, among equals the first by name ─► numbers checked ─► Terms
//! ```
//!
//! The admission of a [`SharingPolicy`] checks the same, but a policy may have been stored before a rule existed, or by
//! a server that does not check it. An invalid policy offers nothing, and no policy of lower priority replaces it.

mod health;
mod idle;
mod selector;

use std::collections::{BTreeMap, BTreeSet};

use tranche_api::gpu_node::{
    Gpu, PublishedCapped, PublishedGpu, PublishedHealth, PublishedTimeshared,
};
use tranche_api::quantity::{CountError, Quantity};
use tranche_api::sharing_policy::{
    CAPPED_CAPABILITIES, DRIVER_CAPABILITIES, Interval, LOW_PRIORITY_FLOOR, OnBypass,
    SharingPolicy, SharingPolicySpec, UNACCOUNTED, UntestedDriver,
};
use tranche_api::tier::Tier;

use crate::cdi::Capability;
use crate::gpu::{GpuUuid, GpuUuidError};
use crate::health::FaultError;
use crate::mig::{Profile, ProfileError};
use crate::oversubscription::Oversubscription;

pub use idle::{Action, IdleRule, IdleTerms, idle};
pub use selector::SelectorError;

/// All of a GPU's time, percent.
pub const ALL_CORES: u8 = 100;

/// The most shares that one GPU may have.
const MOST_SHARERS: u32 = 128;

/// The most shares that one GPU may have in the tier `concurrent`: an MPS server has at most 48 clients.
const MOST_CLIENTS: u32 = 48;

/// Bytes of a CUDA context that nobody measured: drivers since 535 take 250 to 550 MiB on data centre GPUs.
pub const UNMEASURED_CONTEXT: u64 = 512 << 20;

/// The least that a policy may set: the driver's rounding and its own code take as much in honest programs.
pub const LEAST_UNACCOUNTED: u64 = 64 << 20;

/// What is offered of one GPU, in exact numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Terms {
    /// The tiers offered; at least one, all of them served by this version.
    pub tiers: BTreeSet<Tier>,
    /// How the GPU is shared in the tier `capped`.
    pub capped: CappedTerms,
    /// The most shares in the tier `concurrent`, 1-48; its other settings are those of `capped`.
    pub concurrent_sharers: u32,
    /// The profiles that are shared as partitions in the tier `concurrent`; empty for none.
    pub concurrent_on_partitions: BTreeSet<Profile>,
    /// The profiles that are offered in the tier `partition`; empty for all.
    pub profiles: BTreeSet<Profile>,
    /// How the GPU is shared in the tier `timeshared`.
    pub timeshared: TimesharedTerms,
}

/// How a GPU is shared in the tier `capped`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CappedTerms {
    /// The most shares, 1-128.
    pub max_sharers: u32,
    /// The number of sharers that memory is kept free for, for their CUDA contexts: 0 to `max_sharers`.
    pub expected_sharers: u32,
    /// Bytes kept free for one sharer's CUDA context.
    pub context_memory: u64,
    /// How much more memory the shares of a GPU have together than it has for them; `None` without oversubscription.
    pub memory_oversubscription: Option<Oversubscription>,
    /// Bytes: the step and the minimum of a share's memory; at least 1.
    pub memory_step: u64,
    /// Bytes of a share that requests none: a multiple of the step and at least one.
    pub default_memory: Option<u64>,
    /// Percent: the step and the minimum of a share's cores; a divisor of 100, at most 50.
    pub cores_step: u8,
    /// Percent of a share that requests none, 1-100: a multiple of the step.
    pub default_cores: Option<u8>,
    /// Percent of its cores that a share with low priority keeps while shares with high priority have work, 0-100.
    pub low_priority_floor: u32,
    /// What happens to the tier under a driver with unknown functions.
    pub untested_driver: UntestedDriver,
    /// What the node does with a process that goes around its share's cap.
    pub on_bypass: OnBypass,
    /// Bytes that a process may hold beyond its share's account; at least [`LEAST_UNACCOUNTED`].
    pub unaccounted_memory: u64,
    /// Libraries of the driver that containers get in addition to those of compute and utility.
    pub extra_capabilities: BTreeSet<Capability>,
    /// The profiles that are shared as partitions in the tier `capped`; empty for none.
    pub on_partitions: BTreeSet<Profile>,
}

/// How a GPU is shared in the tier `timeshared`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TimesharedTerms {
    /// The most shares, 1-128.
    pub max_sharers: u32,
    /// The driver's time slices.
    pub interval: Interval,
}

/// Why a policy is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("SharingPolicy {policy}: {problem}")]
pub struct PolicyError {
    /// The policy's name.
    pub policy: String,
    /// What is wrong with it.
    pub problem: PolicyProblem,
}

/// What is wrong with a policy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PolicyProblem {
    /// The selector of nodes is invalid.
    #[error("spec.nodeSelector.{0}")]
    Selector(#[from] SelectorError),
    /// The selector of namespaces with idle claims is invalid.
    #[error("spec.idle.namespaces.{0}")]
    IdleNamespaces(SelectorError),
    /// No tier at all.
    #[error("spec.tiers is empty: name at least one of {}", words(&Tier::ALL))]
    NoTiers,
    /// A list has the same value twice.
    #[error("{field} names {value} twice")]
    Twice {
        /// The list.
        field: &'static str,
        /// What is in it twice.
        value: String,
    },
    /// Text that is not the UUID of a GPU.
    #[error("spec.uuids[{index}] {problem}")]
    Uuid {
        /// Its place in the list.
        index: usize,
        /// Why.
        problem: GpuUuidError,
    },
    /// Text that is not a MIG profile.
    #[error("{field}[{index}] {problem}")]
    Profile {
        /// The list.
        field: &'static str,
        /// Its place in the list.
        index: usize,
        /// Why.
        problem: ProfileError,
    },
    /// Text that names no fault.
    #[error("spec.health.faults[{index}].fault {problem}")]
    Fault {
        /// Its place in the list.
        index: usize,
        /// Why.
        problem: FaultError,
    },
    /// A name that is no capability of the driver.
    #[error(
        "spec.capped.driverCapabilities names {name:?}: use {}",
        DRIVER_CAPABILITIES.join(", ")
    )]
    UnknownCapability {
        /// The name.
        name: String,
    },
    /// A capability that every capped share has is missing.
    #[error("spec.capped.driverCapabilities does not name {0}, which a capped share always has")]
    NoCapability(&'static str),
    /// Text that is not a count.
    #[error("{field} {problem}")]
    Count {
        /// The field.
        field: &'static str,
        /// Why.
        problem: CountError,
    },
    /// A number out of its range.
    #[error("{field} is {found}, must be {expected}")]
    OutOfRange {
        /// The field.
        field: &'static str,
        /// What is there.
        found: Quantity,
        /// What may be there.
        expected: String,
    },
}

fn words(tiers: &[Tier]) -> String {
    tiers
        .iter()
        .map(|tier| tier.as_str())
        .collect::<Vec<_>>()
        .join(", ")
}

/// The terms for `gpu` on a node with these labels; the default terms where no policy matches.
pub fn terms(
    policies: &[SharingPolicy],
    labels: &BTreeMap<String, String>,
    gpu: &Gpu,
) -> Result<Terms, PolicyError> {
    match matching(policies, labels, gpu)? {
        Some(policy) => {
            let mut terms = Terms::try_from(&policy.spec).map_err(|problem| of(policy, problem))?;
            if policy.spec.capped.context_memory.is_none() {
                terms.capped.context_memory = context_memory(gpu);
            }
            Ok(terms)
        }
        None => Ok(Terms::default()),
    }
}

/// The smallest size in bytes that a measurement can give a context. A tenant can make a process look as if its context
/// were smaller, and the watchdog tolerates 256 MiB more than that size; contexts take up to 550 MiB.
const LEAST_CONTEXT: u64 = 256 << 20;

/// Bytes of a context on `gpu` if no policy sets them: the node's measurement, or [`UNMEASURED_CONTEXT`] before there
/// is one. The inventory may have any text: one that is not a count is ignored.
#[must_use]
pub fn context_memory(gpu: &Gpu) -> u64 {
    let measured = gpu.context_memory.and_then(|bytes| bytes.to_count().ok());
    match measured {
        None | Some(0) => UNMEASURED_CONTEXT,
        Some(bytes) => bytes.max(LEAST_CONTEXT),
    }
}

/// What the policies ask of the node itself for `gpu`: the part of its terms that the node's plugin needs. The
/// controller publishes it in `GpuNode.status.published.gpus`.
pub fn published(
    policies: &[SharingPolicy],
    labels: &BTreeMap<String, String>,
    gpu: &Gpu,
) -> Result<PublishedGpu, PolicyError> {
    let terms = terms(policies, labels, gpu)?;
    let policy = matching(policies, labels, gpu)?;
    Ok(PublishedGpu {
        uuid: gpu.uuid.clone(),
        policy: policy.and_then(|policy| policy.metadata.name.clone()),
        capped: PublishedCapped {
            on_bypass: terms.capped.on_bypass,
            unaccounted_memory: Some(Quantity::from_bytes(terms.capped.unaccounted_memory)),
            low_priority_floor: Some(terms.capped.low_priority_floor),
            extra_driver_capabilities: terms
                .capped
                .extra_capabilities
                .iter()
                .map(ToString::to_string)
                .collect(),
        },
        timeshared: PublishedTimeshared {
            interval: terms.timeshared.interval,
        },
        health: policy.map_or_else(PublishedHealth::default, |policy| {
            health::published(&policy.spec.health)
        }),
    })
}

/// The policy that holds for `gpu` on a node with these labels.
pub fn matching<'a>(
    policies: &'a [SharingPolicy],
    labels: &BTreeMap<String, String>,
    gpu: &Gpu,
) -> Result<Option<&'a SharingPolicy>, PolicyError> {
    let mut by_rank: Vec<&SharingPolicy> = policies.iter().collect();
    by_rank.sort_by_key(|policy| {
        (
            -i64::from(policy.spec.priority),
            policy.metadata.name.clone(),
        )
    });
    for policy in by_rank {
        let spec = &policy.spec;
        let uuids = uuids(&spec.uuids);
        if !names(spec, uuids.as_ref().ok(), gpu) {
            continue;
        }
        // An invalid selector or UUID matters only if the policy could apply.
        let matches = spec.node_selector.as_ref().map_or(Ok(true), |selector| {
            selector::matches(selector, labels).map_err(|problem| of(policy, problem.into()))
        })?;
        if matches {
            uuids.map_err(|problem| of(policy, problem))?;
            return Ok(Some(policy));
        }
    }
    Ok(None)
}

/// Whether the policy names the GPU, by its product, its index and its UUID. A policy with an invalid UUID may name any
/// GPU.
fn names(spec: &SharingPolicySpec, uuids: Option<&BTreeSet<GpuUuid>>, gpu: &Gpu) -> bool {
    let by_product = spec.products.is_empty() || spec.products.contains(&gpu.product_name);
    let is_listed = |index| spec.indices.contains(&index);
    let by_index = spec.indices.is_empty() || gpu.index.is_some_and(is_listed);
    let is_named = |uuids: &BTreeSet<GpuUuid>| {
        let uuid = gpu.uuid.parse().ok();
        uuids.is_empty() || uuid.is_some_and(|uuid| uuids.contains(&uuid))
    };
    by_product && by_index && uuids.is_none_or(is_named)
}

fn of(policy: &SharingPolicy, problem: PolicyProblem) -> PolicyError {
    PolicyError {
        policy: policy.metadata.name.clone().unwrap_or_default(),
        problem,
    }
}

impl Default for Terms {
    /// Without a policy nothing is shared.
    fn default() -> Self {
        Self {
            tiers: BTreeSet::from([Tier::Exclusive]),
            capped: CappedTerms {
                max_sharers: 1,
                expected_sharers: 0,
                context_memory: 0,
                memory_oversubscription: None,
                memory_step: 1,
                default_memory: None,
                cores_step: 1,
                default_cores: None,
                low_priority_floor: LOW_PRIORITY_FLOOR,
                untested_driver: UntestedDriver::Taint,
                on_bypass: OnBypass::Report,
                unaccounted_memory: UNACCOUNTED,
                extra_capabilities: BTreeSet::new(),
                on_partitions: BTreeSet::new(),
            },
            concurrent_sharers: 1,
            concurrent_on_partitions: BTreeSet::new(),
            profiles: BTreeSet::new(),
            timeshared: TimesharedTerms {
                max_sharers: 1,
                interval: Interval::Default,
            },
        }
    }
}

impl TryFrom<&SharingPolicySpec> for Terms {
    type Error = PolicyProblem;

    fn try_from(spec: &SharingPolicySpec) -> Result<Self, PolicyProblem> {
        let mut tiers = BTreeSet::new();
        for tier in &spec.tiers {
            if !tiers.insert(*tier) {
                return Err(twice("spec.tiers", tier));
            }
        }
        if tiers.is_empty() {
            return Err(PolicyProblem::NoTiers);
        }
        uuids(&spec.uuids)?;
        each_once("spec.indices", &spec.indices)?;
        spec.idle.as_ref().map(idle::terms).transpose()?;
        health::check(&spec.health)?;
        let capped = &spec.capped;
        let max_sharers = sharers("spec.capped.maxSharers", capped.max_sharers, MOST_SHARERS)?;
        let memory_step = count("spec.capped.memoryStep", capped.memory_step)?;
        if memory_step == 0 {
            return Err(out_of_range(
                "spec.capped.memoryStep",
                capped.memory_step,
                "at least 1",
            ));
        }
        let cores_step = cores_step(capped.cores_step)?;
        if capped.expected_sharers > max_sharers {
            return Err(out_of_range(
                "spec.capped.expectedSharers",
                Quantity::from_count(capped.expected_sharers.into()),
                format!("at most maxSharers, {max_sharers}"),
            ));
        }
        Ok(Self {
            tiers,
            capped: CappedTerms {
                max_sharers,
                expected_sharers: capped.expected_sharers,
                context_memory: match capped.context_memory {
                    Some(bytes) => count("spec.capped.contextMemory", bytes)?,
                    None => UNMEASURED_CONTEXT,
                },
                memory_oversubscription: oversubscription(capped.memory_oversubscription)?,
                memory_step,
                default_memory: capped
                    .default_memory
                    .map(|amount| default_memory(amount, memory_step))
                    .transpose()?,
                cores_step,
                default_cores: capped
                    .default_cores
                    .map(|cores| default_cores(cores, cores_step))
                    .transpose()?,
                low_priority_floor: low_priority_floor(capped.low_priority_floor)?,
                untested_driver: capped.untested_driver,
                on_bypass: capped.on_bypass,
                unaccounted_memory: unaccounted_memory(capped.unaccounted_memory)?,
                extra_capabilities: extra_capabilities(&capped.driver_capabilities)?,
                on_partitions: profiles("spec.capped.onPartitions", &capped.on_partitions)?,
            },
            concurrent_sharers: sharers(
                "spec.concurrent.maxSharers",
                spec.concurrent.max_sharers,
                MOST_CLIENTS,
            )?,
            concurrent_on_partitions: profiles(
                "spec.concurrent.onPartitions",
                &spec.concurrent.on_partitions,
            )?,
            profiles: profiles("spec.partition.profiles", &spec.partition.profiles)?,
            timeshared: TimesharedTerms {
                max_sharers: sharers(
                    "spec.timeshared.maxSharers",
                    spec.timeshared.max_sharers,
                    MOST_SHARERS,
                )?,
                interval: spec.timeshared.interval,
            },
        })
    }
}

fn twice(field: &'static str, value: &impl ToString) -> PolicyProblem {
    let value = value.to_string();
    PolicyProblem::Twice { field, value }
}

fn each_once<T: Ord + ToString>(field: &'static str, list: &[T]) -> Result<(), PolicyProblem> {
    let mut seen = BTreeSet::new();
    let repeated = list.iter().find(|value| !seen.insert(*value));
    repeated.map_or(Ok(()), |value| Err(twice(field, value)))
}

fn uuids(texts: &[String]) -> Result<BTreeSet<GpuUuid>, PolicyProblem> {
    each_once("spec.uuids", texts)?;
    let read = |(index, text): (usize, &String)| {
        let problem = |problem| PolicyProblem::Uuid { index, problem };
        text.parse().map_err(problem)
    };
    texts.iter().enumerate().map(read).collect()
}

fn profiles(field: &'static str, names: &[String]) -> Result<BTreeSet<Profile>, PolicyProblem> {
    each_once(field, names)?;
    let read = |(index, name): (usize, &String)| {
        let problem = |problem| PolicyProblem::Profile {
            field,
            index,
            problem,
        };
        name.parse().map_err(problem)
    };
    names.iter().enumerate().map(read).collect()
}

fn extra_capabilities(names: &[String]) -> Result<BTreeSet<Capability>, PolicyProblem> {
    for always in CAPPED_CAPABILITIES {
        if !names.iter().any(|name| name == always) {
            return Err(PolicyProblem::NoCapability(always));
        }
    }
    each_once("spec.capped.driverCapabilities", names)?;
    let known = |name: &String| {
        Capability::named(name)
            .ok_or_else(|| PolicyProblem::UnknownCapability { name: name.clone() })
    };
    let mut all = names
        .iter()
        .map(known)
        .collect::<Result<BTreeSet<_>, _>>()?;
    all.retain(|capability| Capability::EXTRA.contains(capability));
    Ok(all)
}

fn count(field: &'static str, amount: Quantity) -> Result<u64, PolicyProblem> {
    amount
        .to_count()
        .map_err(|problem| PolicyProblem::Count { field, problem })
}

fn unaccounted_memory(amount: Quantity) -> Result<u64, PolicyProblem> {
    const FIELD: &str = "spec.capped.unaccountedMemory";
    let bytes = count(FIELD, amount)?;
    if bytes < LEAST_UNACCOUNTED {
        let least = Quantity::from_bytes(LEAST_UNACCOUNTED);
        return Err(out_of_range(FIELD, amount, format!("at least {least}")));
    }
    Ok(bytes)
}

fn oversubscription(percent: u32) -> Result<Option<Oversubscription>, PolicyProblem> {
    let over = Oversubscription::new(percent);
    if over.is_some() || percent == Oversubscription::NONE {
        return Ok(over);
    }
    Err(out_of_range(
        "spec.capped.memoryOversubscription",
        Quantity::from_count(percent.into()),
        format!(
            "{} to {} percent",
            Oversubscription::NONE,
            Oversubscription::MOST
        ),
    ))
}

fn low_priority_floor(percent: u32) -> Result<u32, PolicyProblem> {
    if percent <= 100 {
        return Ok(percent);
    }
    Err(out_of_range(
        "spec.capped.lowPriorityFloor",
        Quantity::from_count(percent.into()),
        "0 to 100 percent",
    ))
}

fn out_of_range(
    field: &'static str,
    found: Quantity,
    expected: impl Into<String>,
) -> PolicyProblem {
    PolicyProblem::OutOfRange {
        field,
        found,
        expected: expected.into(),
    }
}

fn sharers(field: &'static str, sharers: u32, most: u32) -> Result<u32, PolicyProblem> {
    if (1..=most).contains(&sharers) {
        return Ok(sharers);
    }
    Err(out_of_range(
        field,
        Quantity::from_count(sharers.into()),
        format!("1 to {most}"),
    ))
}

fn default_memory(amount: Quantity, step: u64) -> Result<u64, PolicyProblem> {
    const FIELD: &str = "spec.capped.defaultMemory";
    let bytes = count(FIELD, amount)?;
    if bytes == 0 || bytes % step != 0 {
        return Err(out_of_range(
            FIELD,
            amount,
            format!("a multiple of memoryStep, {}", Quantity::from_bytes(step)),
        ));
    }
    Ok(bytes)
}

fn cores_step(cores: u32) -> Result<u8, PolicyProblem> {
    u8::try_from(cores)
        .ok()
        // The API requires that minimum plus step, which is two steps, is within the capacity.
        .filter(|step| ALL_CORES.is_multiple_of(*step) && *step <= ALL_CORES / 2)
        .ok_or_else(|| {
            out_of_range(
                "spec.capped.coresStep",
                Quantity::from_count(cores.into()),
                "1, 2, 4, 5, 10, 20, 25 or 50",
            )
        })
}

fn default_cores(cores: u32, step: u8) -> Result<u8, PolicyProblem> {
    u8::try_from(cores)
        .ok()
        .filter(|cores| (1..=ALL_CORES).contains(cores) && cores.is_multiple_of(step))
        .ok_or_else(|| {
            let expected = match step {
                1 => "1 to 100".to_owned(),
                step => format!("a multiple of coresStep, {step}, up to 100"),
            };
            out_of_range(
                "spec.capped.defaultCores",
                Quantity::from_count(cores.into()),
                expected,
            )
        })
}

#[cfg(test)]
mod tests;
