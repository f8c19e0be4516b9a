//! Becomes the MPS control daemon, in a mount namespace of its own.
//!
//! The daemon, its servers and their clients must see the same files at the same paths, which the driver has compiled in. So each
//! daemon has its device's folders at [`PIPES_IN_CONTAINER`] and [`SHM_IN_CONTAINER`], as the containers have.

use std::ffi::OsString;
use std::io;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use rustix::mount::{MountPropagationFlags, mount_bind, mount_change};
use rustix::thread::UnshareFlags;

use crate::layout::{PIPES_IN_CONTAINER, SHM_IN_CONTAINER};

/// Why the program was not executed.
#[derive(Debug, thiserror::Error)]
pub enum EnterError {
    /// There is no mount namespace.
    #[error("cannot make a mount namespace: {0}: run the supervisor privileged")]
    Namespace(rustix::io::Errno),
    /// A folder cannot be mounted.
    #[error("cannot mount {from} at {to}: {source}")]
    Mount {
        from: PathBuf,
        /// Where clients have it.
        to: &'static str,
        source: io::Error,
    },
    /// The program cannot be executed.
    #[error("cannot execute {program}: {source}")]
    Execute { program: PathBuf, source: io::Error },
}

/// Replaces this process, which has one thread, by the program.
#[must_use]
pub fn enter(pipes: &Path, shm: &Path, program: &Path, arguments: &[OsString]) -> EnterError {
    match prepare(pipes, shm) {
        Err(error) => error,
        Ok(()) => EnterError::Execute {
            program: program.to_owned(),
            source: Command::new(program).args(arguments).exec(),
        },
    }
}

fn prepare(pipes: &Path, shm: &Path) -> Result<(), EnterError> {
    #[expect(deprecated, reason = "it is unsafe only with UnshareFlags::FILES")]
    rustix::thread::unshare(UnshareFlags::NEWNS).map_err(EnterError::Namespace)?;
    // A mount that goes away on the host, as a driver container's root, goes away here too.
    mount_change(
        "/",
        MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC,
    )
    .map_err(EnterError::Namespace)?;
    for (from, to) in [(pipes, PIPES_IN_CONTAINER), (shm, SHM_IN_CONTAINER)] {
        let refuse = |source| EnterError::Mount {
            from: from.to_owned(),
            to,
            source,
        };
        // The image has the folder, and its file system is read-only.
        if !Path::new(to).is_dir() {
            std::fs::create_dir_all(to).map_err(refuse)?;
        }
        mount_bind(from, to).map_err(|errno| refuse(errno.into()))?;
    }
    Ok(())
}
