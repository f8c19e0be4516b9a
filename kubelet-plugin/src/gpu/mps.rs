//! The MPS daemons of the node's GPUs and partitions, which the supervisor runs (ADR 0032). The supervisor is asked to start a daemon
//! when the first concurrent share is prepared, and to end it after the last one was released.

use std::fmt::Debug;

use tranche_mps::client::{Client, ClientError};
use tranche_mps::layout::{DeviceId, NotADevice};
use tranche_mps::limits::Limits;
use tranche_mps::protocol::Daemon;

/// The limits of a process that runs without the shim. A server keeps those of its start, so they cannot follow the shares
/// that come and go; each share's own are in its cap page.
const DEFAULTS: Limits = Limits {
    thread_percentage: 100,
    memory_mib: None,
};

/// Why a daemon is not as wanted.
#[derive(Debug, thiserror::Error)]
pub enum MpsError {
    /// Not the UUID of a GPU or MIG device.
    #[error(transparent)]
    Device(#[from] NotADevice),
    /// The supervisor does not answer, or refuses.
    #[error(transparent)]
    Supervisor(#[from] ClientError),
}

/// Runs the daemons. Each call can be repeated, and blocks its thread: do not call from async tasks.
pub trait Daemons: Send + Sync + Debug {
    /// Ensures that a daemon serves the GPU or MIG device and answers.
    fn ensure(&self, device_uuid: &str) -> Result<(), MpsError>;

    /// Ensures that no daemon of Tranche serves the GPU or MIG device.
    fn end(&self, device_uuid: &str) -> Result<(), MpsError>;

    /// The daemons and their state.
    fn list(&self) -> Result<Vec<Daemon>, MpsError>;
}

impl Daemons for Client {
    fn ensure(&self, device_uuid: &str) -> Result<(), MpsError> {
        let device = DeviceId::try_from(device_uuid.to_owned())?;
        Ok(Self::ensure(self, device, DEFAULTS).map(drop)?)
    }

    fn end(&self, device_uuid: &str) -> Result<(), MpsError> {
        let device = DeviceId::try_from(device_uuid.to_owned())?;
        Ok(Self::end(self, device)?)
    }

    fn list(&self) -> Result<Vec<Daemon>, MpsError> {
        Ok(Self::list(self)?)
    }
}
