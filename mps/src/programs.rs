//! Where the driver has the programs of MPS.

use std::path::{Path, PathBuf};

use tranche_node::layouts::{LIBRARY_FOLDERS, PROGRAM_FOLDERS, ROOTS};
use tranche_node::root::{DriverRoot, Kind, RootError};

/// The daemon, and the program that gives it commands.
pub const CONTROL: &str = "nvidia-cuda-mps-control";
/// The program that the daemon starts for its first client; it finds it in `PATH`.
pub const SERVER: &str = "nvidia-cuda-mps-server";
/// The library that the server needs.
pub const LIBCUDA: &str = "libcuda.so.1";

/// The driver's files, at the paths where this process finds them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Programs {
    /// [`CONTROL`].
    pub control: PathBuf,
    /// [`SERVER`].
    pub server: PathBuf,
    /// [`LIBCUDA`].
    pub libcuda: PathBuf,
}

/// Why the programs were not found.
#[derive(Debug, thiserror::Error)]
pub enum ProgramsError {
    /// The root or something in it.
    #[error(transparent)]
    Root(#[from] RootError),
    /// A file is missing in every root.
    #[error(
        "the driver has no {missing} below {searched}: install it (Debian: nvidia-cuda-mps, Ubuntu: nvidia-compute-utils, \
         RHEL: nvidia-driver-cuda), or take the tier `concurrent` out of the SharingPolicy"
    )]
    Missing { missing: String, searched: String },
}

/// Searches the given root of the host, or else the usual ones.
pub fn find(host: &DriverRoot, given: Option<&Path>) -> Result<Programs, ProgramsError> {
    let roots = given.map_or_else(|| ROOTS.map(Path::new).to_vec(), |root| vec![root]);
    // What is missing in the root that has most of the files.
    let mut fewest: Option<Vec<&str>> = None;
    for root in &roots {
        let Some(root) = DriverRoot::of_host(host, root)? else {
            continue;
        };
        let control = program(&root, CONTROL)?;
        let server = program(&root, SERVER)?;
        let libcuda = search(&root, &LIBRARY_FOLDERS, LIBCUDA, |kind| {
            matches!(kind, Kind::File { .. })
        })?;
        match (control, server, libcuda) {
            (Some(control), Some(server), Some(libcuda)) => {
                return Ok(Programs {
                    control,
                    server,
                    libcuda,
                });
            }
            (control, server, libcuda) => {
                let missing: Vec<_> = [
                    (CONTROL, control.is_none()),
                    (SERVER, server.is_none()),
                    (LIBCUDA, libcuda.is_none()),
                ]
                .into_iter()
                .filter_map(|(name, is_missing)| is_missing.then_some(name))
                .collect();
                if fewest
                    .as_ref()
                    .is_none_or(|least| missing.len() < least.len())
                {
                    fewest = Some(missing);
                }
            }
        }
    }
    let searched: Vec<_> = roots
        .iter()
        .map(|root| root.display().to_string())
        .collect();
    Err(ProgramsError::Missing {
        missing: fewest
            .unwrap_or_else(|| vec![CONTROL, SERVER, LIBCUDA])
            .join(", "),
        searched: searched.join(", "),
    })
}

fn program(root: &DriverRoot, name: &str) -> Result<Option<PathBuf>, RootError> {
    search(root, &PROGRAM_FOLDERS, name, |kind| {
        kind == Kind::File { executable: true }
    })
}

fn search(
    root: &DriverRoot,
    folders: &[&str],
    name: &str,
    is_right: impl Fn(Kind) -> bool,
) -> Result<Option<PathBuf>, RootError> {
    for folder in folders {
        if let Some((real, kind)) = root.resolve(&Path::new(folder).join(name))?
            && is_right(kind)
        {
            return Ok(Some(root.here(&real)));
        }
    }
    Ok(None)
}
