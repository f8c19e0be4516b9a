//! Finds NVML: the driver roots are searched in order, and the first whose library starts is used.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use super::{Driver, NvmlError, Opened, Traces, library};
use crate::devices::DeviceNodes;
use crate::layouts::{LIBRARY_FOLDERS, PROGRAM_FOLDERS, ROOTS};
use crate::root::{DriverRoot, Kind, RootError};

const SONAME: &str = "libnvidia-ml.so.1";
const CUDA: &str = "libcuda.so.1";
const SMI: &str = "nvidia-smi";
/// Libraries that change with the driver.
const LIBRARIES: [&str; 2] = [SONAME, CUDA];
/// What a loaded kernel driver shows: its version, and a folder per GPU.
pub(super) const VERSION: &str = "/proc/driver/nvidia/version";
const GPUS: &str = "/proc/driver/nvidia/gpus";

/// The driver that is installed on the host.
#[derive(Clone, Debug)]
pub struct InstalledDriver {
    /// The host's root as this process sees it.
    host: PathBuf,
    /// The driver roots to search, as the host sees them.
    roots: Vec<PathBuf>,
    /// This process's own `/dev`, if it is not the host's.
    dev: Option<PathBuf>,
}

impl InstalledDriver {
    /// The driver in `root`, or in the first of the usual roots, on the host whose root is mounted at `host`. If `host`
    /// is not `/`, the process is in a container with its own `/dev`, and the device nodes that NVML opens are created
    /// there.
    #[must_use]
    pub fn new(host: &Path, root: Option<&Path>) -> Self {
        let roots = match root {
            Some(root) => vec![root.to_owned()],
            None => ROOTS.map(PathBuf::from).to_vec(),
        };
        Self {
            host: host.to_owned(),
            roots,
            dev: (host != Path::new("/")).then(|| "/dev".into()),
        }
    }

    /// With another place for the device nodes that NVML opens.
    #[cfg(any(test, feature = "testing"))]
    #[must_use]
    pub fn with_dev(self, dev: &Path) -> Self {
        Self {
            dev: Some(dev.to_owned()),
            ..self
        }
    }

    /// The path of libcuda as this process sees it, in the first driver root that has NVML too.
    pub fn cuda(&self) -> Result<PathBuf, NvmlError> {
        let host = DriverRoot::open(&self.host)?;
        for root in &self.roots {
            let Some(root) = DriverRoot::of_host(&host, root)? else {
                continue;
            };
            if find(&root, &LIBRARY_FOLDERS, SONAME)?.is_none() {
                continue;
            }
            if let Some(cuda) = find(&root, &LIBRARY_FOLDERS, CUDA)? {
                return Ok(root.here(&cuda));
            }
        }
        Err(NvmlError::Root(format!(
            "found no {CUDA} beside {SONAME} in {}",
            LIBRARY_FOLDERS.join(", ")
        )))
    }

    fn open_in(&self, host: &DriverRoot, root: DriverRoot) -> Result<Option<Opened>, NvmlError> {
        let Some(path) = find(&root, &LIBRARY_FOLDERS, SONAME)? else {
            return Ok(None);
        };
        let nodes = DeviceNodes::find(&root, host)?;
        if let Some(dev) = &self.dev {
            nodes
                .provide(dev)
                .map_err(|e| NvmlError::Devices(e.to_string()))?;
        }
        let smi = find(&root, &PROGRAM_FOLDERS, SMI)?.map(|smi| root.here(&smi));
        let nvml = library::open(&root.here(&path), smi)?;
        Ok(Some(Opened {
            nvml,
            root,
            nodes,
            pass: None,
        }))
    }

    fn trace(&self) -> Result<Vec<(PathBuf, String)>, RootError> {
        let host = DriverRoot::open(&self.host)?;
        let mut traces = Vec::new();
        for root in &self.roots {
            let Some(root) = DriverRoot::of_host(&host, root)? else {
                continue;
            };
            for name in LIBRARIES {
                if let Some(real) = find(&root, &LIBRARY_FOLDERS, name)?
                    && let Ok(metadata) = fs::metadata(root.here(&real))
                {
                    let identity = [
                        metadata.dev().to_string(),
                        metadata.ino().to_string(),
                        format!("{}.{:09}", metadata.mtime(), metadata.mtime_nsec()),
                    ];
                    traces.push((root.on_host().join(name), identity.join(" ")));
                }
            }
            let nodes = DeviceNodes::find(&root, &host)?;
            for (node, number) in nodes.all()? {
                traces.push((node, number.to_string()));
            }
        }
        let version = fs::read_to_string(host.here(Path::new(VERSION))).unwrap_or_default();
        traces.push((VERSION.into(), version));
        traces.push((GPUS.into(), host.list(Path::new(GPUS))?.join(" ")));
        Ok(traces)
    }
}

/// The file's path in the root, without links.
fn find(root: &DriverRoot, folders: &[&str], name: &str) -> Result<Option<PathBuf>, RootError> {
    for folder in folders {
        if let Some((real, Kind::File { .. })) = root.resolve(&Path::new(folder).join(name))? {
            return Ok(Some(real));
        }
    }
    Ok(None)
}

impl Driver for InstalledDriver {
    fn open(&self) -> Result<Opened, NvmlError> {
        let host = DriverRoot::open(&self.host)?;
        let mut first = None;
        for root in &self.roots {
            let Some(root) = DriverRoot::of_host(&host, root)? else {
                continue;
            };
            // A root with an older driver's files, for example, must not hide the driver that
            // works.
            match self.open_in(&host, root) {
                Ok(Some(opened)) => return Ok(opened),
                Ok(None) => {}
                Err(error) => {
                    first.get_or_insert(error);
                }
            }
        }
        let joined = |paths: &[PathBuf]| {
            let paths: Vec<_> = paths.iter().map(|path| path.to_string_lossy()).collect();
            paths.join(", ")
        };
        Err(first.unwrap_or_else(|| NvmlError::NotFound {
            roots: joined(&self.roots),
            searched: LIBRARY_FOLDERS.join(", "),
        }))
    }

    fn traces(&self) -> Traces {
        // Errors are reported when the driver is opened.
        Traces(self.trace().unwrap_or_default())
    }
}
