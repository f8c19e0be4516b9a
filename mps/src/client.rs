//! The node plugin's client of the supervisor. Each call blocks its thread until the answer comes: do not call from async tasks.

use std::io::{self, Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::io::retry_on_intr;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};

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
    patience: Duration,
}

impl Client {
    /// The supervisor whose files are in `folder`.
    #[must_use]
    pub fn new(folder: &Path) -> Self {
        Self {
            socket: folder.join(SOCKET),
            patience: PATIENCE,
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
        let until = Instant::now() + self.patience;
        let late = || {
            let text = format!("no answer within {} s", self.patience.as_secs());
            io::Error::new(io::ErrorKind::TimedOut, text)
        };
        let left = || {
            let left = until.saturating_duration_since(Instant::now());
            (!left.is_zero()).then_some(left).ok_or_else(late)
        };
        let in_time = |error: io::Error| match error.kind() {
            io::ErrorKind::WouldBlock => late(),
            _ => error,
        };
        let socket = socket_with(
            AddressFamily::UNIX,
            SocketType::STREAM,
            SocketFlags::CLOEXEC,
            None,
        )?;
        let mut stream = UnixStream::from(socket);
        // It also limits connect(2), which waits while the supervisor accepts nobody.
        stream.set_write_timeout(Some(left()?))?;
        let address = SocketAddrUnix::new(&self.socket)?;
        // A signal interrupts calls with a time limit, also one whose handler asks for a restart.
        retry_on_intr(|| connect(&stream, &address)).map_err(|error| in_time(error.into()))?;
        let mut line = serde_json::to_vec(request)?;
        line.push(b'\n');
        stream.write_all(&line).map_err(in_time)?;
        let mut answer = Vec::new();
        let mut part = [0; 4096];
        loop {
            stream.set_read_timeout(Some(left()?))?;
            match stream.read(&mut part) {
                Ok(0) => return Ok(answer),
                Ok(read) => answer.extend_from_slice(&part[..read]),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(in_time(error)),
            }
            if answer.len() as u64 > LONGEST {
                let text = format!("its answer is longer than {LONGEST} bytes");
                return Err(io::Error::new(io::ErrorKind::InvalidData, text));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    fn client(folder: &Path) -> Client {
        Client {
            patience: Duration::from_millis(50),
            ..Client::new(folder)
        }
    }

    fn is_late(result: Result<Vec<Daemon>, ClientError>) -> bool {
        matches!(result, Err(ClientError::Unreachable { source, .. }) if source.kind() == io::ErrorKind::TimedOut)
    }

    #[test]
    fn a_supervisor_that_accepts_nobody_is_given_up() {
        let folder = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(folder.path().join(SOCKET)).unwrap();
        rustix::net::listen(&listener, 0).unwrap();
        // The only one who gets into the queue.
        let _first = UnixStream::connect(folder.path().join(SOCKET)).unwrap();
        assert!(is_late(client(folder.path()).list()));
    }

    #[test]
    fn a_supervisor_whose_answer_has_no_end_is_given_up() {
        let folder = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(folder.path().join(SOCKET)).unwrap();
        let answers = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            // Until the client has closed it.
            while stream.write_all(b" ").is_ok() {
                std::thread::sleep(Duration::from_millis(1));
            }
        });
        assert!(is_late(client(folder.path()).list()));
        answers.join().unwrap();
    }
}
