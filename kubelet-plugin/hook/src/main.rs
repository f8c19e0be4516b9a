//! The createContainer hook: prepares a container's root for the driver's libraries.
//!
//! ```text
//!  tranche-cdi-hook COMMAND…
//!    create-links         the driver's links
//!    cover-libraries      capped: the shim over an image's own libcuda
//!    enable-cuda-compat   not capped: an image's own libcuda for forward compatibility
//!    update-ldcache       the loader's cache
//! ```
//!
//! Each command has its options. One process runs them all, in the order in which they are given.
//!
//! The runtime runs it on the host's root with the container's state on stdin (OCI runtime spec,
//! "POSIX-platform Hooks"), after the container's mounts and before its first process. The image is
//! not trusted: the kernel resolves every path in it inside the root (`openat2`,
//! `RESOLVE_IN_ROOT`), and ldconfig runs in a chroot.
#![forbid(unsafe_code)]

mod args;
mod container;
mod ldcache;
mod links;
mod loader_cache;

use std::io::Read;
use std::process::ExitCode;

use args::Command;
use tranche_cdi_hook::libraries::Process;
use tranche_cdi_hook::rootfs::{LONGEST_FILE, Rootfs, RootfsError};
use tranche_cdi_hook::{compat, cover};

/// Any of the hook's errors. The runtime shows it in the pod's events.
#[derive(Debug, thiserror::Error)]
enum Error {
    #[error(transparent)]
    Args(#[from] args::ArgsError),
    #[error(transparent)]
    Container(#[from] container::ContainerError),
    #[error(transparent)]
    Rootfs(#[from] RootfsError),
    #[error(transparent)]
    Cover(#[from] cover::CoverError),
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
    let commands = Command::parse(std::env::args().skip(1))?;
    let mut state = Vec::new();
    std::io::stdin()
        .take(LONGEST_FILE)
        .read_to_end(&mut state)
        .map_err(container::ContainerError::Stdin)?;
    let container = container::read(&state)?;
    let root = Rootfs::open(&container.root)?;
    for command in commands {
        run_in(&root, &container.process, command)?;
    }
    Ok(())
}

fn run_in(root: &Rootfs, process: &Process, command: Command) -> Result<(), Error> {
    match command {
        Command::CreateLinks { links } => links::create(root, &links)?,
        Command::CoverLibraries { cover } => {
            let covered = cover::cover(root, process, &cover)?;
            if let Some(library) = covered.compat {
                ldcache::prefer_folder_of(root, &library)?;
            }
        }
        Command::EnableCudaCompat { node, unless } => {
            if let (Some(node), None) = (node, root.find(&unless)?)
                && let Some(library) = compat::usable(root, &node)?
            {
                ldcache::prefer_folder_of(root, &library.path)?;
            }
        }
        Command::UpdateLdcache {
            folders,
            libraries,
            ldconfig,
        } => ldcache::update(root, &folders, &libraries, &ldconfig)?,
    }
    Ok(())
}
