//! Decides whether a share is granted, from the request, the GPUs, and the user's other shares.
//!
//! The decision about sizes is the node plugin's own, `driver::preparation::plan`: the shares of a
//! GPU add up to no more than the GPU.

use tranche_api::gpu_node::Inventory;
use tranche_api::{Quantity, ShareConfig, Tier};
use tranche_driver::claim::{AllocatedDevice, Allocation, DeviceName, Grant, WholeGpuTier};
use tranche_driver::gpu::GpuUuid;
use tranche_driver::journal::ClaimRecord;
use tranche_driver::policy::context_memory;
use tranche_driver::preparation::{Cap, Conflict, PreparationProblem, PreparedDevice, plan};

use crate::wire::Request;

/// The namespace in a share's record.
const NAMESPACE: &str = "run";

/// Why a share is refused, with the option to change.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("the driver sees no GPU: run nvidia-smi on this machine to see why")]
    NoGpu,
    #[error("--gpu {wanted}: there is no such GPU; there is {present}")]
    UnknownGpu { wanted: String, present: String },
    #[error("there are several GPUs: choose one by --gpu: {present}")]
    SeveralGpus { present: String },
    #[error("--memory is missing: give the memory of the command, for example --memory 20Gi")]
    NoMemory,
    #[error(
        "--{option} {wanted}: the share {share} has {has}: leave the option out to join it, or use another --share"
    )]
    Different {
        option: &'static str,
        wanted: String,
        share: String,
        has: String,
    },
    #[error("--memory {}: {problem}", Quantity::from_bytes(*memory))]
    Memory {
        memory: u64,
        problem: PreparationProblem,
    },
    #[error(
        "--cores {cores}: {problem}: give less, wait for one of them to end, or join it by --share"
    )]
    Cores {
        cores: u8,
        problem: PreparationProblem,
    },
    #[error("{0}")]
    Other(PreparationProblem),
}

impl Refusal {
    /// Whether the share may be granted when other shares have ended.
    pub fn may_pass(&self) -> bool {
        let (Self::Memory { problem, .. } | Self::Cores { problem, .. }) = self else {
            return matches!(self, Self::Different { .. });
        };
        matches!(problem, PreparationProblem::Conflict(_))
    }
}

/// The record of the share for `request`.
///
/// `gpus` are the UUIDs in the driver's order. `existing` is the share with the requested name. `others` are the user's other
/// shares in use.
pub fn admit(
    request: &Request,
    gpus: &[String],
    inventory: &Inventory,
    existing: Option<&ClaimRecord>,
    others: &[ClaimRecord],
) -> Result<ClaimRecord, Refusal> {
    if let Some((record, device)) = existing.and_then(|r| Some((r, r.plan.devices.first()?))) {
        same(request, gpus, device)?;
        return Ok(record.clone());
    }
    let gpu = choose(request.gpu.as_deref(), gpus)?;
    let gpu = inventory
        .gpus
        .iter()
        .find(|known| known.uuid == gpu)
        .ok_or(Refusal::NoGpu)?;
    let uuid: GpuUuid = gpu.uuid.parse().map_err(|_| Refusal::NoGpu)?;
    let device = DeviceName::Gpu {
        gpu: uuid.all_digits(),
        tier: WholeGpuTier::new(Tier::Capped).ok_or(Refusal::NoGpu)?,
    };
    let memory = request.memory.ok_or(Refusal::NoMemory)?;
    let cores = request.cores.unwrap_or(100);
    let mut config = ShareConfig::default();
    config.compute.mode = request.mode.unwrap_or_default();
    let allocation = Allocation {
        uid: request.share.clone(),
        namespace: NAMESPACE.to_owned(),
        name: request.share.clone(),
        pod_claim_name: None,
        devices: vec![AllocatedDevice {
            request: "gpu".to_owned(),
            pool: NAMESPACE.to_owned(),
            device,
            grant: Grant::Capped {
                share_id: request.share.clone(),
                memory,
                cores,
                context_memory: request
                    .context_memory
                    .unwrap_or_else(|| context_memory(gpu)),
            },
            config,
        }],
    };
    plan(&allocation, inventory, others.iter().map(|r| &r.plan))
        .map(|plan| ClaimRecord::new(plan, None))
        .map_err(|error| match error.problem {
            problem @ (PreparationProblem::TooMuchMemory { .. }
            | PreparationProblem::Conflict(Conflict::Memory { .. })) => {
                Refusal::Memory { memory, problem }
            }
            problem @ PreparationProblem::Conflict(Conflict::Cores { .. }) => {
                Refusal::Cores { cores, problem }
            }
            problem => Refusal::Other(problem),
        })
}

/// The UUID of the requested GPU.
fn choose<'a>(wanted: Option<&str>, gpus: &'a [String]) -> Result<&'a str, Refusal> {
    let present = || {
        let listed: Vec<_> = gpus
            .iter()
            .enumerate()
            .map(|(i, uuid)| format!("{i} = {uuid}"))
            .collect();
        listed.join(", ")
    };
    match (wanted, gpus) {
        (_, []) => Err(Refusal::NoGpu),
        (None, [only]) => Ok(only),
        (None, _) => Err(Refusal::SeveralGpus { present: present() }),
        (Some(wanted), _) => {
            let by_index = wanted.parse().ok().and_then(|index: usize| gpus.get(index));
            let by_uuid = || gpus.iter().find(|uuid| uuid.eq_ignore_ascii_case(wanted));
            by_index
                .or_else(by_uuid)
                .map(String::as_str)
                .ok_or_else(|| Refusal::UnknownGpu {
                    wanted: wanted.to_owned(),
                    present: present(),
                })
        }
    }
}

/// An error if the request names other sizes than the share has.
fn same(request: &Request, gpus: &[String], has: &PreparedDevice) -> Result<(), Refusal> {
    let different = |option, wanted: String, has: String| {
        Err(Refusal::Different {
            option,
            wanted,
            share: request.share.clone(),
            has,
        })
    };
    let bytes = |amount| Quantity::from_bytes(amount).to_string();
    if let Some(wanted) = &request.gpu
        && choose(Some(wanted), gpus)? != has.gpu_uuid
    {
        return different("gpu", wanted.clone(), has.gpu_uuid.clone());
    }
    let Cap::Share {
        memory,
        cores,
        mode,
        context_memory,
        ..
    } = has.cap
    else {
        return Ok(());
    };
    match request {
        Request {
            memory: Some(wanted),
            ..
        } if *wanted != memory => different("memory", bytes(*wanted), bytes(memory)),
        Request {
            cores: Some(wanted),
            ..
        } if *wanted != cores => different("cores", wanted.to_string(), cores.to_string()),
        Request {
            mode: Some(wanted), ..
        } if *wanted != mode => different("mode", format!("{wanted:?}"), format!("{mode:?}")),
        Request {
            context_memory: Some(wanted),
            ..
        } if *wanted != context_memory => {
            different("context-memory", bytes(*wanted), bytes(context_memory))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use tranche_api::share_config::ComputeMode;
    use tranche_node::inventory::{inventory, testing::two_h100};

    use super::*;

    const GIB: u64 = 1 << 30;

    fn request(share: &str, memory: u64, cores: u8) -> Request {
        Request {
            share: share.into(),
            joinable: true,
            memory: Some(memory * GIB),
            cores: Some(cores),
            mode: None,
            context_memory: None,
            gpu: Some("0".into()),
            driver_root: "/".into(),
            shim: "/shim".into(),
            pid: 1,
        }
    }

    fn ask(
        request: &Request,
        existing: Option<&ClaimRecord>,
        others: &[ClaimRecord],
    ) -> Result<ClaimRecord, String> {
        ask_where(None, request, existing, others)
    }

    /// Asks on a machine where a context takes `context` bytes, if that was measured.
    fn ask_where(
        context: Option<u64>,
        request: &Request,
        existing: Option<&ClaimRecord>,
        others: &[ClaimRecord],
    ) -> Result<ClaimRecord, String> {
        let description = two_h100();
        let gpus: Vec<_> = description
            .gpus
            .iter()
            .map(|gpu| gpu.uuid.clone())
            .collect();
        let mut inventory = inventory(&description, Path::new("/nowhere"));
        for gpu in &mut inventory.gpus {
            gpu.context_memory = context.map(Quantity::from_bytes);
        }
        admit(request, &gpus, &inventory, existing, others).map_err(|e| e.to_string())
    }

    #[test]
    fn a_share_gets_the_context_size_that_the_controller_would_give() {
        let context_of = |measured| {
            let record = ask_where(measured, &request("a", 20, 25), None, &[]).unwrap();
            match record.plan.devices[0].cap {
                Cap::Share { context_memory, .. } => context_memory >> 20,
                Cap::None {} => panic!("a share"),
            }
        };
        assert_eq!(context_of(None), 512);
        assert_eq!(context_of(Some(464 << 20)), 464);
        // A tenant can make a context look smaller than it is.
        assert_eq!(context_of(Some(32 << 20)), 256);
    }

    fn refused(result: Result<ClaimRecord, String>, words: &[&str]) {
        let error = result.unwrap_err();
        for word in words {
            assert!(error.contains(word), "{word}: {error}");
        }
    }

    #[test]
    fn a_gpu_is_chosen_by_index_or_uuid_in_the_drivers_order() {
        let mut wanted = request("a", 20, 25);
        // NVML's first GPU here has the minor number 1.
        assert_eq!(ask(&wanted, None, &[]).unwrap().plan.devices[0].minor, 1);
        wanted.gpu = Some("gpu-00000000-0000-0000-0000-000000000000".into());
        assert_eq!(ask(&wanted, None, &[]).unwrap().plan.devices[0].minor, 0);
        wanted.gpu = Some("2".into());
        refused(
            ask(&wanted, None, &[]),
            &["--gpu 2", "0 = GPU-", "1 = GPU-"],
        );
        wanted.gpu = None;
        refused(ask(&wanted, None, &[]), &["several", "--gpu", "1 = GPU-"]);
    }

    #[test]
    fn the_users_shares_of_a_gpu_add_up_to_no_more_than_it() {
        let first = ask(&request("first", 50, 60), None, &[]).unwrap();
        let others = [first];
        ask(&request("second", 20, 40), None, &others).unwrap();
        refused(
            ask(&request("second", 40, 40), None, &others),
            &["--memory 40Gi", "90Gi", "run/first"],
        );
        refused(
            ask(&request("second", 20, 41), None, &others),
            &["--cores 41", "101", "run/first", "--share"],
        );
        refused(
            ask(&request("large", 90, 1), None, &[]),
            &["--memory 90Gi", "has only"],
        );
        let mut elsewhere = request("second", 40, 100);
        elsewhere.gpu = Some("1".into());
        ask(&elsewhere, None, &others).unwrap();
    }

    #[test]
    fn a_share_is_joined_with_its_own_sizes_only() {
        let share = ask(&request("team", 20, 25), None, &[]).unwrap();
        assert_eq!(
            ask(&request("team", 20, 25), Some(&share), &[]).unwrap(),
            share
        );
        let mut open = request("team", 0, 0);
        (open.memory, open.cores, open.gpu) = (None, None, None);
        assert_eq!(ask(&open, Some(&share), &[]).unwrap(), share);
        refused(ask(&open, None, &[]), &["several"]);
        let change = |change: fn(&mut Request)| {
            let mut request = request("team", 20, 25);
            change(&mut request);
            ask(&request, Some(&share), &[])
        };
        refused(
            change(|r| r.memory = Some(21 * GIB)),
            &["--memory 21Gi", "team", "20Gi"],
        );
        refused(
            change(|r| r.cores = Some(26)),
            &["--cores 26", "team", "25"],
        );
        refused(change(|r| r.gpu = Some("1".into())), &["--gpu 1", "team"]);
        refused(
            change(|r| r.context_memory = Some(1)),
            &["--context-memory 1", "512Mi"],
        );
        refused(
            change(|r| r.mode = Some(ComputeMode::WorkConserving)),
            &["--mode", "Strict"],
        );
    }
}
