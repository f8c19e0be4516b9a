//! The node plugin's client of the supervisor. Each call blocks its thread until the answer comes: do not call from async tasks.

use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::layout::{DeviceId, SOCKET};
use crate::limits::Limits;
use crate::protocol::{Answer, Command, Daemon, LONGEST, Request, VERSION};

/// How long a call may take: longer than a daemon takes to start or to end.
const PATIENCE: Duration = Duration::from_secs(20);

/// Why the supervisor has not executed a command.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// Nobody answers.
    #[error(
        "the MPS supervisor does not answer at {path}: {source}: look at the pod of the DaemonSet `tranche-mps` on this node"
    )]
    Unreachable { path: PathBuf, source: io::Error },
    /// The answer is not one of this protocol.
    #[error("the MPS supervisor at {path} answers what this release does not understand: {source}")]
    Answer {
        path: PathBuf,
        source: serde_json::Error,
    },
    /// The supervisor refuses, for this reason.
    #[error("MPS: {0}")]
    Refused(String),
    /// The answer has no daemon.
    #[error("the MPS supervisor answers without the daemon of {0}")]
    Missing(DeviceId),
}

/// The supervisor of this node.
#[derive(Clone, Debug)]
pub struct Client {
    socket: PathBuf,
}

impl Client {
    /// The supervisor whose files are in `folder`.
    #[must_use]
    pub fn new(folder: &Path) -> Self {
        Self {
            socket: folder.join(SOCKET),
        }
    }

    /// Ensures that a daemon serves the device with these limits and answers.
    pub fn ensure(&self, device: DeviceId, limits: Limits) -> Result<Daemon, ClientError> {
        let missing = ClientError::Missing(device.clone());
        let daemons = self.ask(Command::Ensure { device, limits })?;
        daemons.into_iter().next().ok_or(missing)
    }

    /// Ensures that no daemon of Tranche serves the device.
    pub fn end(&self, device: DeviceId) -> Result<(), ClientError> {
        self.ask(Command::End { device }).map(drop)
    }

    /// The daemons and their state.
    pub fn list(&self) -> Result<Vec<Daemon>, ClientError> {
        self.ask(Command::List)
    }

    fn ask(&self, command: Command) -> Result<Vec<Daemon>, ClientError> {
        let request = Request {
            version: VERSION,
            command,
        };
        let answer = self
            .exchange(&request)
            .map_err(|source| ClientError::Unreachable {
                path: self.socket.clone(),
                source,
            })?;
        match serde_json::from_slice(&answer) {
            Ok(Answer::Done(daemons)) => Ok(daemons),
            Ok(Answer::Refused(reason)) => Err(ClientError::Refused(reason)),
            Err(source) => Err(ClientError::Answer {
                path: self.socket.clone(),
                source,
            }),
        }
    }

    fn exchange(&self, request: &Request) -> io::Result<Vec<u8>> {
        let mut stream = UnixStream::connect(&self.socket)?;
        stream.set_read_timeout(Some(PATIENCE))?;
        stream.set_write_timeout(Some(PATIENCE))?;
        let mut line = serde_json::to_vec(request)?;
        line.push(b'\n');
        stream.write_all(&line)?;
        let mut answer = Vec::new();
        stream.take(LONGEST).read_to_end(&mut answer)?;
        Ok(answer)
    }
}
