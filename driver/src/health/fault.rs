//! The faults of a GPU.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use tranche_api::sharing_policy::FAULTS;

use super::xid;

/// What a fault means for its GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// The GPU does not work, or its results cannot be trusted.
    Broken,
    /// The GPU works; it needs a reset, or something that not every program uses is broken.
    Degraded,
    /// Nothing: a program's error, or information.
    None,
}

/// A fault of a GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum Fault {
    /// NVML does not reach the GPU.
    GpuLost,
    /// The driver asks for a reboot of the node.
    RebootRequired,
    /// The driver asks for a reset of the GPU.
    ResetRequired,
    /// The driver asks that the GPU be drained.
    DrainRequired,
    /// A row of the memory could not be remapped.
    RowRemapFailure,
    /// A row of the memory is remapped by the next reset.
    RowRemapPending,
    /// An Xid.
    Xid(u32),
}

/// Text that names no fault.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} names no fault: use {names}, or an Xid's number, as in Xid79", names = FAULTS.join(", "))]
pub struct FaultError(String);

impl Fault {
    /// What it means for the GPU.
    #[must_use]
    pub fn severity(self) -> Severity {
        match self {
            Self::GpuLost | Self::RebootRequired | Self::ResetRequired => Severity::Broken,
            Self::DrainRequired | Self::RowRemapFailure | Self::RowRemapPending => {
                Severity::Degraded
            }
            Self::Xid(number) => xid::find(number).map_or(Severity::None, |xid| xid.severity),
        }
    }

    /// What happened, for a message.
    #[must_use]
    pub fn describe(self) -> String {
        match self {
            Self::GpuLost => "NVML does not reach the GPU".to_owned(),
            Self::RebootRequired => "the driver asks for a reboot of the node".to_owned(),
            Self::ResetRequired => "the driver asks for a reset of the GPU".to_owned(),
            Self::DrainRequired => {
                "the driver asks that the GPU be drained, and then reset".to_owned()
            }
            Self::RowRemapFailure => "a row of the GPU's memory could not be remapped".to_owned(),
            Self::RowRemapPending => {
                "a row of the GPU's memory is remapped by the next reset".to_owned()
            }
            Self::Xid(number) => {
                let meaning = xid::find(number).map(|xid| xid.meaning);
                format!(
                    "Xid {number}: {}",
                    meaning.unwrap_or("see NVIDIA's Xid catalog")
                )
            }
        }
    }

    /// What an administrator does about it.
    pub(super) const fn way_out(self) -> &'static str {
        match self {
            Self::RebootRequired => "drain and reboot the node",
            Self::RowRemapFailure => "replace the GPU",
            Self::GpuLost
            | Self::ResetRequired
            | Self::DrainRequired
            | Self::RowRemapPending
            | Self::Xid(_) => {
                "cordon the node, reset the GPU when no claim is left on the node (nvidia-smi --gpu-reset), and uncordon it"
            }
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = match self {
            Self::GpuLost => "GpuLost",
            Self::RebootRequired => "RebootRequired",
            Self::ResetRequired => "ResetRequired",
            Self::DrainRequired => "DrainRequired",
            Self::RowRemapFailure => "RowRemapFailure",
            Self::RowRemapPending => "RowRemapPending",
            Self::Xid(number) => return write!(f, "Xid{number}"),
        };
        f.write_str(name)
    }
}

impl FromStr for Fault {
    type Err = FaultError;

    fn from_str(text: &str) -> Result<Self, FaultError> {
        Ok(match text {
            "GpuLost" => Self::GpuLost,
            "RebootRequired" => Self::RebootRequired,
            "ResetRequired" => Self::ResetRequired,
            "DrainRequired" => Self::DrainRequired,
            "RowRemapFailure" => Self::RowRemapFailure,
            "RowRemapPending" => Self::RowRemapPending,
            _ => {
                let number = text.strip_prefix("Xid").and_then(|it| it.parse().ok());
                let fault = number.map(Self::Xid);
                // `Xid+7` and `Xid07` are other spellings.
                let exact = fault.filter(|fault| fault.to_string() == text);
                return exact.ok_or_else(|| FaultError(text.to_owned()));
            }
        })
    }
}

impl TryFrom<String> for Fault {
    type Error = FaultError;

    fn try_from(text: String) -> Result<Self, FaultError> {
        text.parse()
    }
}

impl From<Fault> for String {
    fn from(fault: Fault) -> Self {
        fault.to_string()
    }
}
