//! The driver's device nodes, and those of them that this process itself needs.
//!
//! They are in the host's `/dev`, or below the driver root if that has its own (a driver container).
//! Containers get them by their paths on the host.
//!
//! NVML opens `/dev/nvidiactl` and `/dev/nvidia<N>` of the process that loads it, wherever its library is. A
//! container's `/dev` is a file system of its own. It is filled when the container starts, so it lacks the nodes of a
//! driver that is loaded later. [`DeviceNodes::provide`] creates them there.

use std::io;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FileType, Mode, mknodat};

use crate::root::{DriverRoot, Kind, RootError};

/// Without these no CUDA program starts.
pub const REQUIRED: [&str; 2] = ["/dev/nvidia-uvm", "/dev/nvidiactl"];
/// For display servers, and for debuggers and profilers.
pub const OPTIONAL: [&str; 2] = ["/dev/nvidia-modeset", "/dev/nvidia-uvm-tools"];
/// The driver or its loader makes this node whenever the driver is loaded.
const SIGN: &str = "/dev/nvidiactl";
/// Folders with nodes of the driver.
const FOLDERS: [&str; 2] = ["/dev", "/dev/nvidia-caps"];

/// What is wrong with the device nodes.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The root that contains them.
    #[error(transparent)]
    Root(#[from] RootError),
    /// Some are missing.
    #[error(
        "{missing} missing below {root} on the host: without it no CUDA program starts; load the kernel modules and \
         make the device nodes by `nvidia-modprobe -c 0 -u` on the node"
    )]
    Missing {
        /// The nodes, joined.
        missing: String,
        /// The root that was searched, as the host sees it.
        root: PathBuf,
    },
    /// A node cannot be created for this process.
    #[error(
        "cannot make the device node {path}, by which NVML reaches the driver: {source}: run the node plugin \
         privileged, with a writable /dev"
    )]
    Make {
        /// In this process's `/dev`.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
}

/// The root that has the device nodes, and those in it that belong to no GPU.
#[derive(Clone, Debug)]
pub struct DeviceNodes {
    root: DriverRoot,
    control: Vec<String>,
}

impl DeviceNodes {
    /// Searches below the driver root and, if that has no nodes, below the host's root.
    pub fn find(driver: &DriverRoot, host: &DriverRoot) -> Result<Self, RootError> {
        let own = is_device(driver, SIGN)?;
        let root = if own { driver } else { host }.clone();
        let mut control = Vec::new();
        for node in OPTIONAL.into_iter().chain(REQUIRED) {
            if is_device(&root, node)? {
                control.push(node.to_owned());
            }
        }
        control.sort_unstable();
        Ok(Self { root, control })
    }

    /// The nodes that belong to no GPU, as a container gets them.
    #[must_use]
    pub fn control(&self) -> &[String] {
        &self.control
    }

    /// The root that contains them.
    #[must_use]
    pub fn root(&self) -> &DriverRoot {
        &self.root
    }

    /// An error unless all nodes exist that every CUDA program needs.
    pub fn require(&self) -> Result<(), DeviceError> {
        let missing: Vec<_> = REQUIRED
            .into_iter()
            .filter(|node| !self.control.iter().any(|there| there == node))
            .collect();
        if missing.is_empty() {
            return Ok(());
        }
        Err(DeviceError::Missing {
            missing: missing.join(" and "),
            root: self.root.on_host().to_owned(),
        })
    }

    /// Every node of the driver with its number.
    pub fn all(&self) -> Result<Vec<(PathBuf, u64)>, RootError> {
        let mut nodes = Vec::new();
        for folder in FOLDERS.map(Path::new) {
            for name in self.root.list(folder)? {
                let path = folder.join(&name);
                if !name.starts_with("nvidia") {
                    continue;
                }
                if let Some((real, Kind::CharDevice)) = self.root.resolve(&path)?
                    && let Ok(metadata) = self.root.here(&real).symlink_metadata()
                {
                    nodes.push((path, metadata.rdev()));
                }
            }
        }
        Ok(nodes)
    }

    /// Creates every node that is missing in `dev`, this process's own `/dev`, or has another number there (that of
    /// nvidia-uvm changes each time it is loaded).
    pub fn provide(&self, dev: &Path) -> Result<(), DeviceError> {
        for (path, number) in self.all()? {
            let Ok(inside) = path.strip_prefix("/dev") else {
                continue;
            };
            let own = dev.join(inside);
            make(&own, number, 0o666).map_err(|source| DeviceError::Make { path: own, source })?;
        }
        Ok(())
    }
}

fn is_device(root: &DriverRoot, path: &str) -> Result<bool, RootError> {
    let found = root.resolve(Path::new(path))?;
    Ok(matches!(found, Some((_, Kind::CharDevice))))
}

/// Creates a character device, and replaces anything else at its path.
pub(crate) fn make(path: &Path, number: u64, mode: u32) -> io::Result<()> {
    match path.symlink_metadata() {
        Ok(there) if there.file_type().is_char_device() && there.rdev() == number => return Ok(()),
        Ok(_) => std::fs::remove_file(path)?,
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(e),
    }
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    let mode = Mode::from_raw_mode(mode);
    mknodat(CWD, path, FileType::CharacterDevice, mode, number)?;
    // The umask has removed the write bits.
    Ok(rustix::fs::chmod(path, mode)?)
}

#[cfg(test)]
mod tests {
    use rustix::fs::makedev;

    use super::*;

    fn node(root: &Path, name: &str, number: u64) {
        make(&root.join("dev").join(name), number, 0o666)
            .expect("tests make device nodes: run them with CAP_MKNOD");
    }

    fn open(path: &Path) -> DriverRoot {
        DriverRoot::open(path).unwrap()
    }

    const NULL: fn() -> u64 = || makedev(1, 3);

    #[test]
    fn nodes_of_the_driver_root_come_before_the_hosts() {
        let (host, driver) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        for name in ["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"] {
            node(host.path(), name, NULL());
        }
        // A driver without its own /dev, as GKE's, and one with an empty /dev, as some driver containers'.
        for _ in 0..2 {
            let found = DeviceNodes::find(&open(driver.path()), &open(host.path())).unwrap();
            assert_eq!(found.root().path(), host.path());
            assert_eq!(
                found.control(),
                ["/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidiactl"]
            );
            found.require().unwrap();
            std::fs::create_dir_all(driver.path().join("dev")).unwrap();
        }
        node(driver.path(), "nvidiactl", NULL());
        let found = DeviceNodes::find(&open(driver.path()), &open(host.path())).unwrap();
        assert_eq!(found.root().path(), driver.path());
        assert_eq!(found.control(), ["/dev/nvidiactl"]);
    }

    #[test]
    fn a_missing_node_is_named_with_the_way_out() {
        for (there, missing) in [
            (&["nvidiactl"][..], "/dev/nvidia-uvm missing"),
            (&["nvidia-uvm"], "/dev/nvidiactl missing"),
            (&[], "/dev/nvidia-uvm and /dev/nvidiactl missing"),
        ] {
            let root = tempfile::tempdir().unwrap();
            for name in there {
                node(root.path(), name, NULL());
            }
            let root = open(root.path());
            let found = DeviceNodes::find(&root, &root).unwrap();
            let error = found.require().unwrap_err().to_string();
            assert!(
                error.starts_with(missing) && error.contains("nvidia-modprobe"),
                "{error}"
            );
        }
    }

    #[test]
    fn nodes_that_come_or_change_later_are_made_for_this_process() {
        let (host, own) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let root = open(host.path());
        let nodes = || DeviceNodes::find(&root, &root).unwrap();
        nodes().provide(own.path()).unwrap();
        assert_eq!(own.path().read_dir().unwrap().count(), 0);

        node(host.path(), "nvidiactl", NULL());
        node(host.path(), "nvidia-uvm", NULL());
        node(host.path(), "nvidia-caps/nvidia-cap1", NULL());
        node(host.path(), "sda", NULL());
        let number = |name: &str| {
            let metadata = own.path().join(name).symlink_metadata();
            metadata.map(|m| (m.rdev(), m.mode() & 0o777)).ok()
        };
        for _ in 0..2 {
            nodes().provide(own.path()).unwrap();
            assert_eq!(number("nvidiactl"), Some((NULL(), 0o666)));
            assert_eq!(number("nvidia-uvm"), Some((NULL(), 0o666)));
            assert_eq!(number("nvidia-caps/nvidia-cap1"), Some((NULL(), 0o666)));
            assert_eq!(number("sda"), None);
        }
        // The module was loaded again and has another number.
        node(host.path(), "nvidia-uvm", makedev(1, 5));
        nodes().provide(own.path()).unwrap();
        assert_eq!(number("nvidia-uvm"), Some((makedev(1, 5), 0o666)));
    }
}
