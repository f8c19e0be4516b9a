//! Unix sockets that this process owns: a stale socket is replaced, and only its own is removed.

use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use hyper_util::rt::TokioIo;
use tokio::net::{UnixListener, UnixStream};
use tokio_stream::wrappers::UnixListenerStream;
use tonic::transport::{Channel, Endpoint, Uri};

/// Why a socket cannot be listened on.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// There is another kind of file.
    #[error("{path} is not a socket: remove it")]
    NotASocket { path: PathBuf },
    /// The system call failed.
    #[error("cannot listen on {path}: {source}")]
    Io { path: PathBuf, source: io::Error },
}

/// A socket file of this process. Dropping removes the file, unless another process replaced it.
#[derive(Debug)]
pub struct Socket {
    path: PathBuf,
    identity: (u64, u64),
}

impl Socket {
    /// Listens at `path`, removing a socket that a dead process left there.
    pub fn listen(path: &Path) -> Result<(Self, UnixListenerStream), SocketError> {
        let failed = |source| SocketError::Io {
            path: path.to_owned(),
            source,
        };
        match std::fs::symlink_metadata(path) {
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(failed(e)),
            Ok(meta) if meta.file_type().is_socket() => {
                std::fs::remove_file(path).map_err(failed)?;
            }
            Ok(_) => {
                return Err(SocketError::NotASocket {
                    path: path.to_owned(),
                });
            }
        }
        let listener = UnixListener::bind(path).map_err(failed)?;
        let socket = Self {
            identity: identity(path).map_err(failed)?,
            path: path.to_owned(),
        };
        Ok((socket, UnixListenerStream::new(listener)))
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        if identity(&self.path).is_ok_and(|now| now == self.identity) {
            // The process is ending; the next one removes a stale socket.
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    let meta = std::fs::symlink_metadata(path)?;
    Ok((meta.dev(), meta.ino()))
}

/// A client on a unix socket that sends `authority` as the kubelet's client does.
pub async fn connect(path: &Path, authority: &str) -> Result<Channel, tonic::transport::Error> {
    let path = path.to_owned();
    // The address is only a name: the connector knows the socket.
    Endpoint::try_from(format!("http://{authority}"))?
        .connect_with_connector(tower::service_fn(move |_: Uri| {
            let path = path.clone();
            async move { UnixStream::connect(path).await.map(TokioIo::new) }
        }))
        .await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_stale_socket_is_replaced_and_a_file_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x@y.sock");
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        let (socket, _stream) = Socket::listen(&path).unwrap();
        drop(socket);
        assert!(!path.exists());
        std::fs::write(&path, "").unwrap();
        let error = Socket::listen(&path).unwrap_err().to_string();
        assert!(error.contains("not a socket"), "{error}");
        assert!(path.exists());
    }

    #[tokio::test]
    async fn the_successors_socket_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("x.sock");
        let (old, _old_stream) = Socket::listen(&path).unwrap();
        let (_new, _new_stream) = Socket::listen(&path).unwrap();
        drop(old);
        assert!(path.exists());
    }
}
