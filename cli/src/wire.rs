//! The messages between `tranche run` and its supervisor: one line of JSON in each direction.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use tranche_api::share_config::ComputeMode;
use tranche_driver::cdi::Spec;

/// The request. Missing values are taken from the share if it exists.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Request {
    pub share: String,
    /// Whether the share may exist already.
    pub joinable: bool,
    /// Bytes.
    pub memory: Option<u64>,
    /// Percent.
    pub cores: Option<u8>,
    /// How the limit on cores is applied.
    pub mode: Option<ComputeMode>,
    /// Bytes.
    pub context_memory: Option<u64>,
    /// UUID or index.
    pub gpu: Option<String>,
    /// Absolute.
    pub driver_root: PathBuf,
    /// The folder of our libraries.
    pub shim: PathBuf,
    /// The process that will become the command.
    pub pid: i32,
}

/// A link that the command needs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Link {
    /// Where.
    pub path: PathBuf,
    pub target: PathBuf,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Grant {
    pub gpu_uuid: String,
    /// An empty folder to build mounts in.
    pub stage: PathBuf,
    /// The driver's CDI spec.
    pub driver: Spec,
    /// The share's CDI spec.
    pub share: Spec,
    /// The driver's links that the host lacks.
    pub links: Vec<Link>,
    /// Device nodes of GPUs that are not the command's.
    pub hidden: Vec<PathBuf>,
}

/// The supervisor's answer: a grant or the reason of the refusal.
pub type Answer = Result<Grant, String>;
