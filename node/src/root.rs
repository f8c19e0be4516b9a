//! The driver root: a tree of the driver's files, on the host or from a driver container.
//!
//! Links in it are resolved as if the root were `/`: `libcuda.so.1` may be a link to
//! `/etc/alternatives/…` of the host. The kernel resolves them (`openat2` with `RESOLVE_IN_ROOT`),
//! so no path leaves the root.

use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use rustix::fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags};

/// Why the driver root cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum RootError {
    /// The folder itself.
    #[error(
        "driver root {path}: {source}: name the folder of the host that has the NVIDIA driver (chart value \
         `nodePlugin.driverRoot`), readable for this process"
    )]
    Unreadable {
        /// The root as this process sees it.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// Something in it.
    #[error("driver root {root}: cannot read {path} in it: {source}")]
    Inside {
        /// The root as this process sees it.
        root: PathBuf,
        /// The path from the root.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
}

/// An open driver root.
#[derive(Clone, Debug)]
pub struct DriverRoot {
    path: PathBuf,
    on_host: PathBuf,
    dir: Arc<OwnedFd>,
}

/// The kind of file that a path in the root resolves to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A regular file.
    File {
        /// One of the execute bits is set.
        executable: bool,
    },
    /// A character device.
    CharDevice,
    /// A unix socket.
    Socket,
    /// A folder.
    Folder,
    /// Anything else.
    Other,
}

impl DriverRoot {
    /// Opens a root that this process sees at the host's own path.
    pub fn open(path: &Path) -> Result<Self, RootError> {
        let real = std::fs::canonicalize(path).map_err(|source| RootError::Unreadable {
            path: path.to_owned(),
            source,
        })?;
        Self::at(real.clone(), real)
    }

    /// Opens the root that the host has at `on_host`; the host's own root is mounted at `host`. `None`
    /// if the host has no such folder.
    pub fn of_host(host: &Self, on_host: &Path) -> Result<Option<Self>, RootError> {
        match host.resolve(on_host)? {
            Some((real, Kind::Folder)) => Self::at(host.here(&real), real).map(Some),
            _ => Ok(None),
        }
    }

    fn at(path: PathBuf, on_host: PathBuf) -> Result<Self, RootError> {
        let dir = rustix::fs::open(
            &path,
            OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC,
            Mode::empty(),
        );
        match dir {
            Ok(dir) => Ok(Self {
                path,
                on_host,
                dir: Arc::new(dir),
            }),
            Err(e) => Err(RootError::Unreadable {
                path,
                source: e.into(),
            }),
        }
    }

    /// The root as this process sees it.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The root as the host sees it.
    #[must_use]
    pub fn on_host(&self) -> &Path {
        &self.on_host
    }

    /// The path at which this process finds a resolved path of the root.
    #[must_use]
    pub fn here(&self, path: &Path) -> PathBuf {
        self.path.join(relative(path))
    }

    /// Follows all links. `None` if there is no such file, also if the root was unmounted.
    pub fn resolve(&self, path: &Path) -> Result<Option<(PathBuf, Kind)>, RootError> {
        let found = self.open_in(path, OFlags::PATH | OFlags::CLOEXEC);
        let Some(fd) = self.if_there(path, found)? else {
            return Ok(None);
        };
        let inside = |e: rustix::io::Errno| self.inside(path, e);
        let stat = rustix::fs::statat(&fd, "", AtFlags::EMPTY_PATH).map_err(inside)?;
        let link = format!("/proc/self/fd/{}", fd.as_raw_fd());
        let real = std::fs::read_link(link).map_err(|source| RootError::Inside {
            root: self.path.clone(),
            path: path.to_owned(),
            source,
        })?;
        let kind = match FileType::from_raw_mode(stat.st_mode) {
            FileType::RegularFile => Kind::File {
                executable: stat.st_mode & 0o111 != 0,
            },
            FileType::CharacterDevice => Kind::CharDevice,
            FileType::Socket => Kind::Socket,
            FileType::Directory => Kind::Folder,
            _ => Kind::Other,
        };
        Ok(real
            .strip_prefix(&self.path)
            .ok()
            .map(|inside| (Path::new("/").join(inside), kind)))
    }

    /// The unresolved target of a link, `None` if there is no link of that name.
    pub fn read_link(&self, path: &Path) -> Result<Option<PathBuf>, RootError> {
        let found = self.open_in(path, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC);
        let Some(fd) = self.if_there(path, found)? else {
            return Ok(None);
        };
        match rustix::fs::readlinkat(&fd, "", Vec::new()) {
            Ok(target) => Ok(Some(PathBuf::from(std::ffi::OsStr::new(
                &*target.to_string_lossy(),
            )))),
            // The descriptor does not refer to a link.
            Err(rustix::io::Errno::NOENT | rustix::io::Errno::INVAL) => Ok(None),
            Err(e) => Err(self.inside(path, e)),
        }
    }

    /// The names in a folder, sorted; none where there is no such folder.
    pub fn list(&self, path: &Path) -> Result<Vec<String>, RootError> {
        let found = self.open_in(path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC);
        let Some(fd) = self.if_there(path, found)? else {
            return Ok(Vec::new());
        };
        let mut names = Vec::new();
        for entry in rustix::fs::Dir::new(fd).map_err(|e| self.inside(path, e))? {
            let entry = entry.map_err(|e| self.inside(path, e))?;
            match entry.file_name().to_str() {
                Ok("." | "..") | Err(_) => {}
                Ok(name) => names.push(name.to_owned()),
            }
        }
        names.sort_unstable();
        Ok(names)
    }

    fn open_in(&self, path: &Path, flags: OFlags) -> rustix::io::Result<OwnedFd> {
        let how = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        rustix::fs::openat2(
            (*self.dir).as_fd(),
            relative(path),
            flags,
            Mode::empty(),
            how,
        )
    }

    fn if_there(
        &self,
        path: &Path,
        found: rustix::io::Result<OwnedFd>,
    ) -> Result<Option<OwnedFd>, RootError> {
        use rustix::io::Errno;
        match found {
            Ok(fd) => Ok(Some(fd)),
            // A loop of links, or a magic link.
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => Ok(None),
            Err(e) => Err(self.inside(path, e)),
        }
    }

    fn inside(&self, path: &Path, e: rustix::io::Errno) -> RootError {
        RootError::Inside {
            root: self.path.clone(),
            path: path.to_owned(),
            source: e.into(),
        }
    }
}

/// The path without its leading slash; `.` if that is empty.
fn relative(path: &Path) -> PathBuf {
    let inside: PathBuf = path
        .components()
        .filter(|c| !matches!(c, Component::RootDir | Component::Prefix(_)))
        .collect();
    if inside.as_os_str().is_empty() {
        ".".into()
    } else {
        inside
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn links_are_read_inside_the_root() {
        let dir = tempfile::tempdir().unwrap();
        let at = |p: &str| dir.path().join(p);
        std::fs::create_dir_all(at("usr/lib/current")).unwrap();
        std::fs::create_dir_all(at("etc/alternatives")).unwrap();
        std::fs::write(at("usr/lib/current/libx.so.5"), "").unwrap();
        symlink("/usr/lib/current/libx.so.5", at("etc/alternatives/x")).unwrap();
        symlink("/etc/alternatives/x", at("usr/lib/libx.so.1")).unwrap();
        symlink("../../../../../../etc/passwd", at("usr/lib/out")).unwrap();
        symlink("loop", at("usr/lib/loop")).unwrap();

        let root = DriverRoot::open(dir.path()).unwrap();
        let (real, kind) = root
            .resolve(Path::new("/usr/lib/libx.so.1"))
            .unwrap()
            .unwrap();
        assert_eq!(real, Path::new("/usr/lib/current/libx.so.5"));
        assert_eq!(kind, Kind::File { executable: false });
        assert_eq!(
            root.read_link(Path::new("/usr/lib/libx.so.1")).unwrap(),
            Some("/etc/alternatives/x".into())
        );
        assert_eq!(root.read_link(&real).unwrap(), None);
        assert_eq!(root.resolve(Path::new("/usr/lib/out")).unwrap(), None);
        assert_eq!(root.resolve(Path::new("/usr/lib/loop")).unwrap(), None);
        assert_eq!(
            root.list(Path::new("/usr/lib")).unwrap(),
            ["current", "libx.so.1", "loop", "out"]
        );
        assert_eq!(
            root.list(Path::new("/nowhere")).unwrap(),
            Vec::<String>::new()
        );
    }

    #[test]
    fn a_root_of_the_host_is_found_by_the_hosts_own_path() {
        let dir = tempfile::tempdir().unwrap();
        let at = |p: &str| dir.path().join(p);
        std::fs::create_dir_all(at("run/nvidia/driver/usr/lib64")).unwrap();
        std::fs::create_dir(at("var")).unwrap();
        symlink("/run", at("var/run")).unwrap();
        std::fs::write(at("run/nvidia/driver/usr/lib64/libx.so.5"), "").unwrap();
        symlink(
            "/usr/lib64/libx.so.5",
            at("run/nvidia/driver/usr/lib64/libx.so"),
        )
        .unwrap();

        let host = DriverRoot::open(dir.path()).unwrap();
        let of_host = |path: &str| DriverRoot::of_host(&host, Path::new(path)).unwrap();
        assert!(of_host("/home/kubernetes/bin/nvidia").is_none());
        let root = of_host("/var/run/nvidia/driver").unwrap();
        assert_eq!(root.on_host(), Path::new("/run/nvidia/driver"));
        assert_eq!(root.path(), host.path().join("run/nvidia/driver"));
        let (real, _) = root
            .resolve(Path::new("/usr/lib64/libx.so"))
            .unwrap()
            .unwrap();
        assert_eq!(real, Path::new("/usr/lib64/libx.so.5"));
        assert_eq!(of_host("/").unwrap().path(), host.path());
        assert_eq!(of_host("/").unwrap().on_host(), Path::new("/"));
    }

    #[test]
    fn a_root_that_is_not_there_is_named_with_the_way_out() {
        let error = DriverRoot::open(Path::new("/nowhere/driver"))
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("/nowhere/driver") && error.contains("driverRoot"),
            "{error}"
        );
    }
}
