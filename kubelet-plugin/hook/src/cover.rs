//! `cover-libraries`: covers every libcuda and libnvidia-ml of an image with the shim.
//!
//! A program that opens `libcuda.so` through `LD_LIBRARY_PATH`, or `/usr/local/cuda/compat/libcuda.so.1`
//! by its path, would use a driver without a limit. Each such file is covered by a bind mount of the
//! shim, in the container's mount namespace only. If one of them is for forward compatibility and the
//! node's kernel-mode driver supports it, it becomes the driver behind the shim.
//!
//! The sources of the mounts are the files that the runtime mounted read-only for the container, so
//! the new mounts are read-only too, in a user namespace as well.

use std::collections::BTreeSet;
use std::fs;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::StatVfsMountFlags;

use crate::compat::{self, DriverVersion};
use crate::libraries::{self, Process, SearchError};
use crate::rootfs::{FoundFile, Rootfs, RootfsError, by_descriptor};

/// A library in the container, and the names that it covers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StandIn {
    /// The prefix of the names that it covers: `libcuda.so`.
    pub stem: String,
    /// The path at which the runtime has mounted it, from the container's root.
    pub path: PathBuf,
}

/// What to cover with what.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Cover {
    pub shims: Vec<StandIn>,
    /// The node's libraries that its libcuda loads. If the node's libcuda is used, an image's own
    /// libraries of the same names are covered too, because they belong to another version.
    pub companions: Vec<StandIn>,
    /// Where the shim opens the driver's libcuda, from the container's root.
    pub real_cuda: PathBuf,
    /// The version of the node's driver; without it, an image's libcuda is never used.
    pub node: Option<DriverVersion>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Covered {
    /// The files that are covered now, from the root.
    pub files: BTreeSet<PathBuf>,
    /// The image's libcuda that the shim uses instead of the node's.
    pub compat: Option<PathBuf>,
}

/// Why the container must not start.
#[derive(Debug, thiserror::Error)]
pub enum CoverError {
    #[error(transparent)]
    Search(#[from] SearchError),
    /// A step in the root.
    #[error(transparent)]
    Rootfs(#[from] RootfsError),
    /// The runtime has not made the mounts of the CDI spec.
    #[error(
        "{path} is not mounted read-only in the container: its runtime must make the mounts of the CDI \
         spec before it runs createContainer hooks, in the container's mount namespace (runc and crun do)"
    )]
    NotMounted { path: PathBuf },
    /// A mount on it would be visible outside of the container.
    #[error(
        "{path} is the image's own copy of a library of NVIDIA's driver and must be covered, but it is on a \
         volume whose mounts the host shares (mountPropagation: Bidirectional): remove that, or the folder from \
         LD_LIBRARY_PATH"
    )]
    Shared { path: PathBuf },
    #[error(
        "{path} is the image's own copy of a library of NVIDIA's driver, with which the container's share \
         would have no limit, and it cannot be covered: {source}"
    )]
    Mount {
        path: PathBuf,
        source: rustix::io::Errno,
    },
    /// The path does not show the mounted file.
    #[error(
        "{path} was covered and shows another file: something changes it while the container starts"
    )]
    Changed { path: PathBuf },
    /// The mounts of this process cannot be read.
    #[error("cannot read {path}: {source}")]
    Proc {
        path: String,
        source: std::io::Error,
    },
}

/// Covers the libraries that are found.
pub fn cover(root: &Rootfs, process: &Process, cover: &Cover) -> Result<Covered, CoverError> {
    let folders = libraries::folders(root, process)?;
    let mut covered = Covered::default();
    // This comes before anything is covered, because the search reads the image's own files.
    let compat = match &cover.node {
        Some(node) => compat::usable(root, node)?,
        None => None,
    };
    let stems: Vec<&str> = cover.shims.iter().map(|shim| shim.stem.as_str()).collect();
    let found = libraries::find(root, &folders, &stems)?;
    if let Some(library) = compat {
        let place = mounted(root, &cover.real_cuda)?;
        bind(root, &library.fd, &place)?;
        covered.compat = Some(library.path);
    }
    let mut covered_folders = BTreeSet::new();
    for shim in &cover.shims {
        let source = mounted(root, &shim.path)?;
        let own = shim.path.parent();
        for library in found.iter().filter(|library| library.stem == shim.stem) {
            let place = &library.file;
            if place.identity == source.identity
                || own.is_some_and(|own| place.path.starts_with(own))
            {
                continue;
            }
            bind(root, &source.fd, place)?;
            covered_folders.extend(place.path.parent().map(Path::to_owned));
            covered.files.insert(place.path.clone());
        }
    }
    if covered.compat.is_none() {
        let folders: Vec<PathBuf> = covered_folders.into_iter().collect();
        let companions = cover_companions(root, &folders, &cover.companions)?;
        covered.files.extend(companions);
    }
    Ok(covered)
}

/// Covers the libraries that belong to the image's libcuda, in the folders where that was covered.
fn cover_companions(
    root: &Rootfs,
    folders: &[PathBuf],
    companions: &[StandIn],
) -> Result<Vec<PathBuf>, CoverError> {
    let stems: Vec<&str> = companions.iter().map(|one| one.stem.as_str()).collect();
    let mut covered = Vec::new();
    for library in libraries::find(root, folders, &stems)? {
        let companion = companions.iter().find(|one| one.stem == library.stem);
        let Some(source) = companion.map(|one| mounted(root, &one.path)).transpose()? else {
            continue;
        };
        if library.file.identity != source.identity {
            bind(root, &source.fd, &library.file)?;
            covered.push(library.file.path);
        }
    }
    Ok(covered)
}

/// A file that the runtime has mounted read-only in the root.
fn mounted(root: &Rootfs, path: &Path) -> Result<FoundFile, CoverError> {
    let not_mounted = || CoverError::NotMounted {
        path: path.to_owned(),
    };
    let file = root.find(path)?.ok_or_else(not_mounted)?;
    let read_only = rustix::fs::fstatvfs(&file.fd)
        .is_ok_and(|found| found.f_flag.contains(StatVfsMountFlags::RDONLY));
    if read_only {
        Ok(file)
    } else {
        Err(not_mounted())
    }
}

/// Mounts `source` over a file, in this mount namespace.
fn bind(root: &Rootfs, source: &OwnedFd, place: &FoundFile) -> Result<(), CoverError> {
    let path = || place.path.clone();
    if is_shared(&place.fd)? {
        return Err(CoverError::Shared { path: path() });
    }
    rustix::mount::mount_bind(by_descriptor(source), by_descriptor(&place.fd)).map_err(
        |source| CoverError::Mount {
            path: path(),
            source,
        },
    )?;
    let identity = |fd| {
        rustix::fs::fstat(fd)
            .map(|stat| (stat.st_dev, stat.st_ino))
            .ok()
    };
    let now = root.find(&place.path)?.map(|file| file.identity);
    if now.is_some() && now == identity(source) {
        Ok(())
    } else {
        Err(CoverError::Changed { path: path() })
    }
}

/// Whether a mount on this file would be visible in other mount namespaces.
fn is_shared(fd: &OwnedFd) -> Result<bool, CoverError> {
    let read = |path: String| match fs::read_to_string(&path) {
        Ok(text) => Ok(text),
        Err(source) => Err(CoverError::Proc { path, source }),
    };
    let info = read(by_descriptor(fd).replace("/fd/", "/fdinfo/"))?;
    let id = info
        .lines()
        .find_map(|line| line.strip_prefix("mnt_id:"))
        .unwrap_or_default()
        .trim();
    let mounts = read("/proc/thread-self/mountinfo".to_owned())?;
    // proc_pid_mountinfo(5): optional fields from the seventh up to a "-".
    let mount = mounts
        .lines()
        .map(|line| line.split(' ').collect::<Vec<_>>())
        .find(|fields| fields.first() == Some(&id));
    Ok(mount.is_none_or(|fields| {
        let optional = fields.iter().skip(6).take_while(|field| **field != "-");
        optional
            .into_iter()
            .any(|field| field.starts_with("shared:"))
    }))
}
