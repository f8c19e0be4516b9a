//! The paths of the driver's files for a command on this host.
//!
//! Programs find the host's own driver where it is. Another driver (of a driver container, a simulator) is mounted where a driver
//! of the host would be: its libraries in the folder of the C library, its programs in `/usr/local/bin`.

use std::path::{Path, PathBuf};

use tranche_driver::cdi::DriverFiles;
use tranche_node::discover::discover;
use tranche_node::layouts::LIBRARY_FOLDERS;
use tranche_node::nvml::Driver as _;
use tranche_node::nvml::search::InstalledDriver;

use crate::wire::Link;

const PROGRAMS: &str = "/usr/local/bin";
const CUDA: &str = "libcuda.so.1";

/// The driver below `root`, or in one of the usual roots: its root, and the folder of its libcuda.
pub fn find(root: Option<&Path>) -> Result<(PathBuf, PathBuf), String> {
    let text = |e: &dyn std::error::Error| e.to_string();
    let opened = InstalledDriver::new(Path::new("/"), root)
        .open()
        .map_err(|e| text(&e))?;
    let description = opened.nvml.describe().map_err(|e| text(&e))?;
    let found = discover(&opened.root, &description.driver_version).map_err(|e| text(&e))?;
    let root = opened.root.on_host();
    let libraries = found.driver_files(root, &[]).libraries;
    let folder = libraries
        .iter()
        .find(|library| library.soname == CUDA)
        .and_then(|library| Path::new(&library.file.host_path).parent());
    // There is one, because `discover` refuses a root without.
    Ok((root.to_owned(), folder.unwrap_or(root).to_owned()))
}

/// The files of a driver below `root`, with their paths for a command, and the links to make.
pub fn placed(mut files: DriverFiles, root: &Path) -> (DriverFiles, Vec<Link>) {
    // The kernel loads the firmware; the command does not need it.
    files.firmware.clear();
    if root == Path::new("/") {
        return (files, Vec::new());
    }
    if let Some(folder) = host_libraries() {
        for library in &mut files.libraries {
            move_to(&folder, &mut library.file.container_path);
            for link in &mut library.links {
                move_to(&folder, &mut link.path);
            }
        }
    }
    for program in &mut files.binaries {
        move_to(Path::new(PROGRAMS), &mut program.container_path);
    }
    let links = files
        .libraries
        .iter()
        .flat_map(|library| &library.links)
        .map(|link| Link {
            path: (&link.path).into(),
            target: (&link.target).into(),
        })
        .collect();
    (files, links)
}

/// The folder of this host's C library, where the loader searches for libraries.
fn host_libraries() -> Option<PathBuf> {
    LIBRARY_FOLDERS
        .iter()
        .map(Path::new)
        .find(|folder| folder.join("libc.so.6").exists())
        .and_then(|folder| folder.canonicalize().ok())
}

fn move_to(folder: &Path, path: &mut String) {
    if let Some(name) = Path::new(path.as_str()).file_name() {
        *path = folder.join(name).to_string_lossy().into_owned();
    }
}

#[cfg(test)]
mod tests {
    use tranche_node::root::DriverRoot;
    use tranche_node::testing;

    use super::*;

    fn files(root: &Path) -> DriverFiles {
        testing::lay_out(root, testing::DEBIAN_535);
        let found = discover(&DriverRoot::open(root).unwrap(), "535.261.03").unwrap();
        found.driver_files(root, &[])
    }

    #[test]
    fn the_hosts_own_driver_stays_where_it_is() {
        let dir = tempfile::tempdir().unwrap();
        let files = files(dir.path());
        let (placed, links) = placed(files.clone(), Path::new("/"));
        assert_eq!(placed.libraries, files.libraries);
        assert!(placed.firmware.is_empty() && links.is_empty());
    }

    #[test]
    fn another_driver_is_mounted_where_programs_search() {
        let dir = tempfile::tempdir().unwrap();
        let (placed, links) = placed(files(dir.path()), dir.path());
        let folder = host_libraries().unwrap();
        let cuda = placed
            .libraries
            .iter()
            .find(|l| l.soname == "libcuda.so.1")
            .unwrap();
        assert_eq!(
            Path::new(&cuda.file.container_path),
            folder.join("libcuda.so.535.261.03")
        );
        assert!(
            cuda.file
                .host_path
                .starts_with(dir.path().to_str().unwrap())
        );
        assert!(links.contains(&Link {
            path: folder.join("libcuda.so"),
            target: "libcuda.so.1".into()
        }));
        let smi = placed.binaries.iter().map(|b| &*b.container_path);
        assert!(smi.clone().any(|path| path == "/usr/local/bin/nvidia-smi"));
    }
}
