//! The createContainer hook: makes the driver's links and the loader's cache in a container's root.
//!
//! ```text
//!  tranche-cdi-hook create-links --link TARGET::PATH…
//!  tranche-cdi-hook update-ldcache --folder FOLDER… --ldconfig PROGRAM
//! ```
//!
//! The runtime runs it on the host's root with the container's state on stdin (OCI runtime spec,
//! "POSIX-platform Hooks"), after the container's mounts and before its first process. The image
//! is somebody else's: every path in it is resolved by the kernel inside the root
//! (`openat2`, `RESOLVE_IN_ROOT`), and ldconfig runs in a chroot.
#![forbid(unsafe_code)]

mod args;
mod container;
mod ldcache;
mod links;
mod rootfs;

use std::io::Read;
use std::process::ExitCode;

use args::Command;
use rootfs::Rootfs;

/// Any of the hook's errors. The runtime shows it in the pod's events.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error(transparent)]
    Args(#[from] args::ArgsError),
    #[error(transparent)]
    Container(#[from] container::ContainerError),
    #[error(transparent)]
    Rootfs(#[from] rootfs::RootfsError),
    #[error(transparent)]
    Ldcache(#[from] ldcache::LdcacheError),
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("tranche-cdi-hook: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), Error> {
    let command = Command::parse(std::env::args().skip(1))?;
    let mut state = Vec::new();
    std::io::stdin()
        .take(container::LONGEST)
        .read_to_end(&mut state)
        .map_err(container::ContainerError::Stdin)?;
    let path = container::root(&state)?;
    let root = Rootfs::open(&path)?;
    match command {
        Command::CreateLinks { links } => links::create(&root, &links)?,
        Command::UpdateLdcache { folders, ldconfig } => {
            ldcache::update(&root, &folders, &ldconfig)?;
        }
    }
    Ok(())
}
