//! Why a claim cannot be prepared, as text for its pod's events.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use tranche_driver::claim::ClaimError;
use tranche_driver::preparation::PreparationError;

use crate::claim::executor::{ExecuteError, StepError, UndoError};
use crate::cluster::claims::ReadError;
use crate::gpu::driver_state::DriverError;
use crate::host::fs::FsError;
use crate::host::install::InstallError;
use crate::ledger::MayBeHeld;
use crate::ledger::claim_ref::ClaimRef;
use tranche_node::root::RootError;

/// A claim that was not prepared.
#[derive(Debug, thiserror::Error)]
#[error("{}", text(claim, problem))]
pub struct PrepareError {
    pub claim: ClaimRef,
    pub problem: Problem,
}

/// A claim that was not unprepared.
#[derive(Debug, thiserror::Error)]
#[error("{}", text(claim, problem))]
pub struct UnprepareError {
    pub claim: ClaimRef,
    pub problem: Problem,
}

fn text(claim: &ClaimRef, problem: &Problem) -> String {
    match problem {
        // These name the claim themselves.
        Problem::Claim(_) | Problem::Plan(_) => problem.to_string(),
        _ => format!("claim {claim}: {problem}"),
    }
}

#[derive(Debug, thiserror::Error)]
pub enum Problem {
    /// The API server does not have it.
    #[error("it is deleted: delete the pod that waits for it")]
    Gone,
    /// The API server gave no valid answer.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// Another claim has its name, it is not allocated, or the allocation is invalid.
    #[error(transparent)]
    Claim(#[from] ClaimError),
    /// This node cannot provide what was allocated.
    #[error(transparent)]
    Plan(#[from] PreparationError),
    /// Its journal cannot be read.
    #[error("{0}")]
    Journal(Arc<str>),
    /// It wants a GPU that a claim with an unreadable journal may hold.
    #[error(transparent)]
    MayBeHeld(#[from] MayBeHeld),
    /// The driver was not checked yet.
    #[error("the plugin is still starting: wait until it is ready")]
    DriverUnknown,
    /// There is no usable driver.
    #[error("the node has no usable driver: {0}")]
    Driver(Arc<DriverError>),
    /// The driver root cannot be read now.
    #[error(transparent)]
    Root(#[from] RootError),
    /// The GPU has no device node.
    #[error(
        "the host has no device node {node} below {root}: on the node, run `nvidia-smi` or \
         `nvidia-modprobe -u -c=0` to make it"
    )]
    NoDeviceNode {
        node: String,
        /// As the host sees it.
        root: PathBuf,
    },
    /// It is not known what the policies ask for shares of a GPU, for example which of the driver's libraries they get.
    #[error(
        "GPU {gpu}: the controller has not published yet what the SharingPolicy asks of the node (status.published.gpus of \
         the node's GpuNode): see that the controller runs and what status.published.problem says; the kubelet asks again"
    )]
    PolicyUnknown { gpu: String },
    /// Memory of a GPU is in use without an owner.
    #[error(
        "GPU {gpu}: memory that an ended process left is still in use: the GPU is given to new claims when the driver has \
         freed it; if it stays, reset the GPU (`nvidia-smi --gpu-reset`) or reboot the node"
    )]
    Unowned { gpu: String },
    /// Our files for containers were not installed at the start.
    #[error("{0}")]
    NotInstalled(String),
    /// Our files for containers have changed.
    #[error(transparent)]
    Install(#[from] InstallError),
    /// The driver's CDI spec.
    #[error(transparent)]
    Fs(#[from] FsError),
    #[error(transparent)]
    Execute(#[from] ExecuteError),
    /// A step of an earlier plan failed when it was repeated.
    #[error(transparent)]
    Rebuild(#[from] StepError),
    /// Its pods are gone, and its containers have not ended.
    #[error("it is kept until its containers have ended: {0}")]
    InUse(String),
    /// Its pods are gone, and it cannot be found out whether its containers have ended.
    #[error("it is kept because it is not known whether its containers have ended: {0}")]
    UsersUnknown(String),
    /// With a second account, programs of one claim could hold twice its memory.
    #[error(
        "the account page {path} was deleted while {count} processes of the claim's containers use it: delete the pods that use \
         the claim"
    )]
    AccountDeleted { path: PathBuf, count: usize },
    #[error("cannot release it: {0}")]
    Undo(#[from] UndoError),
    /// It took too long.
    #[error("not done within {} s (the kubelet allows 45 s); it continues, and the kubelet asks again", .0.as_secs())]
    Timeout(Duration),
    #[error("the plugin is stopping: the next plugin takes over")]
    Stopping,
}

impl Problem {
    /// The value of a metric's label.
    #[must_use]
    pub fn outcome(&self) -> &'static str {
        match self {
            Self::Gone => "claim_gone",
            Self::Read(_) => "api_error",
            Self::Claim(_) => "claim_refused",
            Self::Plan(_) => "plan_refused",
            Self::Journal(_) | Self::MayBeHeld(_) => "journal_unreadable",
            Self::DriverUnknown | Self::Driver(_) | Self::Root(_) | Self::NoDeviceNode { .. } => {
                "driver_not_ready"
            }
            Self::InUse(_) | Self::UsersUnknown(_) => "in_use",
            Self::PolicyUnknown { .. } => "policy_unknown",
            Self::Unowned { .. } => "gpu_not_free",
            Self::NotInstalled(_) | Self::Install(_) | Self::AccountDeleted { .. } => "not_intact",
            Self::Fs(_) | Self::Execute(_) | Self::Rebuild(_) | Self::Undo(_) => "step_failed",
            Self::Timeout(_) => "timeout",
            Self::Stopping => "stopping",
        }
    }
}
