//! Finds the driver's files that a container needs, under the driver root.
//!
//! The search is that of NVIDIA's `pkg/nvcdi` (nvidia-container-toolkit): libraries by the driver's
//! version as their suffix, the links beside them, a fixed list of programs, the GSP firmware and
//! the daemons' sockets. Files that are missing are left out; a missing `libcuda` or `libnvidia-ml`
//! is an error, because no container could use a GPU without them.
//!
//! ```text
//!  layouts ──► libraries ──► found ──► the CDI spec
//! ```

mod found;
mod libraries;
#[cfg(test)]
mod tests;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

pub use found::Found;

use crate::layouts::{FIRMWARE_FOLDERS, LIBRARY_FOLDERS, PROGRAM_FOLDERS};
use crate::root::{DriverRoot, Kind, RootError};

const PROGRAMS: [&str; 5] = [
    "nvidia-smi",
    "nvidia-debugdump",
    "nvidia-persistenced",
    "nvidia-cuda-mps-control",
    "nvidia-cuda-mps-server",
];

/// Sockets of the driver's daemons.
const SOCKETS: [&str; 2] = ["nvidia-persistenced/socket", "nvidia-fabricmanager/socket"];

/// Why the driver's files could not be found.
#[derive(Debug, thiserror::Error)]
pub enum DiscoverError {
    /// The root or something in it.
    #[error(transparent)]
    Root(#[from] RootError),
    /// A required library is missing.
    #[error(
        "driver root {root}: found no {library}.so.{version} in {searched}: NVML reports driver \
         {version}, so install that version's libraries there completely"
    )]
    Library {
        /// The root as this process sees it.
        root: PathBuf,
        /// Without suffix.
        library: &'static str,
        /// As NVML reports it.
        version: String,
        /// The folders, joined.
        searched: String,
    },
}

/// Searches the root for the driver of this version.
pub fn discover(root: &DriverRoot, version: &str) -> Result<Found, DiscoverError> {
    let mut found = Found {
        libraries: libraries::libraries(root, version)?,
        ..Found::default()
    };
    for library in ["libcuda", "libnvidia-ml"] {
        let name = format!("{library}.so.{version}");
        if !found.libraries.iter().any(|path| path.ends_with(&name)) {
            return Err(DiscoverError::Library {
                root: root.path().to_owned(),
                library,
                version: version.to_owned(),
                searched: LIBRARY_FOLDERS.join(", "),
            });
        }
    }
    found.links = libraries::links(root, &found.libraries)?;
    for program in PROGRAMS {
        for folder in PROGRAM_FOLDERS {
            let name = Path::new(folder).join(program);
            if let Some((real, Kind::File { executable: true })) = root.resolve(&name)? {
                found
                    .programs
                    .insert(program_in_container(folder, program), real);
                break;
            }
        }
    }
    found.firmware = firmware(root, version)?;
    for socket in SOCKETS {
        for folder in ["/run", "/var/run"] {
            let name = Path::new(folder).join(socket);
            if let Some((real, Kind::Socket)) = root.resolve(&name)? {
                found.sockets.insert(real);
                break;
            }
        }
    }
    Ok(found)
}

/// A program's path in a container: the same path, or one in `/usr/bin` if the folder is not in the usual `PATH`.
fn program_in_container(folder: &str, program: &str) -> PathBuf {
    let in_path = matches!(
        folder,
        "/usr/local/sbin" | "/usr/local/bin" | "/usr/sbin" | "/usr/bin" | "/sbin" | "/bin"
    );
    Path::new(if in_path { folder } else { "/usr/bin" }).join(program)
}

/// The firmware of the GPU's system processor, from the first folder that has some.
fn firmware(root: &DriverRoot, version: &str) -> Result<BTreeSet<PathBuf>, RootError> {
    for folder in FIRMWARE_FOLDERS {
        let folder = Path::new(folder).join(version);
        let names = root.list(&folder)?;
        let firmware: BTreeSet<_> = names
            .iter()
            .filter(|name| name.starts_with("gsp") && has_extension(name, "bin"))
            .map(|name| folder.join(name))
            .collect();
        if !firmware.is_empty() {
            return Ok(firmware);
        }
    }
    Ok(BTreeSet::new())
}

fn has_extension(name: &str, extension: &str) -> bool {
    Path::new(name).extension().is_some_and(|e| e == extension)
}
