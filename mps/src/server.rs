//! Answers the node plugin.

use std::fs::{self, Permissions};
use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::time::Duration;

use serde::Deserialize;
use tokio::io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use tracing::warn;

use crate::layout::SOCKET;
use crate::protocol::{Answer, Command, LONGEST, Request, VERSION};
use crate::supervisor::Supervisor;

/// How long a client may take for its request, and for taking the answer.
const PATIENCE: Duration = Duration::from_secs(5);
/// The pause after a failed accept: the process may lack descriptors.
const PAUSE: Duration = Duration::from_millis(200);

/// Answers until it is stopped. Only root may ask.
pub async fn serve(
    folder: &Path,
    supervisor: Supervisor,
    stop: CancellationToken,
) -> io::Result<()> {
    let path = folder.join(SOCKET);
    match fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => {}
    }
    let listener = UnixListener::bind(&path)?;
    fs::set_permissions(&path, Permissions::from_mode(0o600))?;
    loop {
        let stream = tokio::select! {
            () = stop.cancelled() => return Ok(()),
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => stream,
                Err(error) => {
                    warn!(%error, "a connection was not accepted");
                    sleep(PAUSE).await;
                    continue;
                }
            },
        };
        let supervisor = supervisor.clone();
        tokio::spawn(async move {
            if let Err(error) = converse(stream, &supervisor).await {
                warn!(%error, "a request was not answered");
            }
        });
    }
}

async fn converse(mut stream: UnixStream, supervisor: &Supervisor) -> io::Result<()> {
    let line = within(PATIENCE, request(&mut stream)).await?;
    let answer = match read(&line) {
        Ok(command) => carry_out(command, supervisor).await,
        Err(reason) => Answer::Refused(reason),
    };
    let mut text = serde_json::to_vec(&answer)?;
    text.push(b'\n');
    within(PATIENCE, stream.write_all(&text)).await
}

async fn request(stream: &mut UnixStream) -> io::Result<Vec<u8>> {
    let mut line = Vec::new();
    let mut reader = BufReader::new(stream.take(LONGEST));
    reader.read_until(b'\n', &mut line).await?;
    Ok(line)
}

/// What a client does, if it is done in time.
async fn within<T>(limit: Duration, work: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    let done = timeout(limit, work).await;
    done.unwrap_or_else(|_| {
        let text = format!("the client took more than {limit:?}");
        Err(io::Error::new(io::ErrorKind::TimedOut, text))
    })
}

/// The command of a request, or why it is refused.
fn read(line: &[u8]) -> Result<Command, String> {
    #[derive(Deserialize)]
    struct Version {
        version: u32,
    }
    let invalid = |error: serde_json::Error| format!("the request is invalid: {error}");
    let Version { version } = serde_json::from_slice(line).map_err(invalid)?;
    if version > VERSION {
        return Err(format!(
            "the request has version {version} and this MPS supervisor knows {VERSION}: it is of an earlier release; delete \
             its pod (DaemonSet `tranche-mps`) on this node when no concurrent share is in use there"
        ));
    }
    let request: Request = serde_json::from_slice(line).map_err(invalid)?;
    Ok(request.command)
}

async fn carry_out(command: Command, supervisor: &Supervisor) -> Answer {
    let result = match command {
        Command::Ensure { device, limits } => {
            supervisor.ensure(&device, limits).await.map(|it| vec![it])
        }
        Command::End { device } => supervisor.end(&device).await.map(|()| Vec::new()),
        Command::List => Ok(supervisor.list()),
    };
    result.map_or_else(|error| Answer::Refused(error.to_string()), Answer::Done)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_client_that_says_nothing_is_given_up() {
        let (mut silent, mut waiting) = UnixStream::pair().unwrap();
        let limit = Duration::from_millis(10);
        let error = within(limit, request(&mut waiting)).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        silent.write_all(b"{}\n").await.unwrap();
        let line = within(Duration::from_mins(1), request(&mut waiting)).await;
        assert_eq!(line.unwrap(), b"{}\n");
    }

    #[test]
    fn a_request_of_a_later_release_is_refused_by_its_version() {
        let error = read(br#"{"version":2,"command":"juggle"}"#).unwrap_err();
        assert!(error.contains("version 2"), "{error}");
    }

    #[test]
    fn an_invalid_request_is_refused_with_what_is_wrong() {
        for (line, named) in [
            (&b""[..], "EOF"),
            (b"{}", "version"),
            (br#"{"version":1}"#, "command"),
            (
                br#"{"version":1,"command":"end","device":"../x"}"#,
                "not a UUID",
            ),
        ] {
            let error = read(line).unwrap_err();
            assert!(error.contains(named), "{error}");
        }
    }
}
