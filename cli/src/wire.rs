//! What `tranche run` and its supervisor tell each other, one line of JSON each way.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use tranche_api::share_config::ComputeMode;
use tranche_driver::cdi::Spec;

/// What is wanted. What is left out is the share's, if it exists.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Request {
    /// The share's name.
    pub share: String,
    /// Whether others may be in it already.
    pub joinable: bool,
    /// Bytes.
    pub memory: Option<u64>,
    /// Percent.
    pub cores: Option<u8>,
    /// How the cores are meant.
    pub mode: Option<ComputeMode>,
    /// Bytes.
    pub context_memory: Option<u64>,
    /// UUID or index.
    pub gpu: Option<String>,
    /// Absolute.
    pub driver_root: PathBuf,
    /// The folder of our libraries.
    pub shim: PathBuf,
    /// Who will be the command.
    pub pid: i32,
}

/// A link that the command needs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Link {
    /// Where.
    pub path: PathBuf,
    /// What it says.
    pub target: PathBuf,
}

/// What the command gets.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Grant {
    /// The GPU.
    pub gpu_uuid: String,
    /// An empty folder to build mounts in.
    pub stage: PathBuf,
    /// The driver's CDI spec.
    pub driver: Spec,
    /// The share's CDI spec.
    pub share: Spec,
    /// The driver's links, where the host has none.
    pub links: Vec<Link>,
    /// Device nodes of GPUs that are not the command's.
    pub hidden: Vec<PathBuf>,
}

/// The supervisor's answer: a grant, or the reason why not.
pub type Answer = Result<Grant, String>;
