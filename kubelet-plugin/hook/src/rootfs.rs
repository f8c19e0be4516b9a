//! A container's root, inside which the kernel resolves every path.

use std::ffi::{OsStr, OsString};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, RawDir, ResolveFlags};
use rustix::io::Errno;

/// A step in the root that failed.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} {path} in the container's root: {source}")]
pub struct RootfsError {
    pub action: &'static str,
    pub path: PathBuf,
    #[source]
    pub source: Errno,
}

impl RootfsError {
    /// Whether the root cannot be written: an image on a read-only file system.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        self.source == Errno::ROFS
    }
}

/// A regular file in the root, with all links followed.
#[derive(Debug)]
pub struct FoundFile {
    /// Its path from the root, without links.
    pub path: PathBuf,
    /// The open file (`O_PATH`).
    pub fd: OwnedFd,
    /// Its device and inode.
    pub identity: (u64, u64),
}

#[derive(Debug)]
pub struct Rootfs {
    path: PathBuf,
    fd: OwnedFd,
}

/// The longest file that is read, in bytes.
pub const LONGEST_FILE: u64 = 16 << 20;

/// The buffer for the names that one system call returns, in bytes.
const NAMES_AT_ONCE: usize = 32 << 10;

const FOLDER: OFlags = OFlags::PATH.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

impl Rootfs {
    /// Opens the root, which is a path on the host.
    pub fn open(path: &Path) -> Result<Self, RootfsError> {
        let fd = rustix::fs::open(path, FOLDER, Mode::empty()).map_err(|source| RootfsError {
            action: "open",
            path: path.to_owned(),
            source,
        })?;
        Ok(Self {
            path: path.to_owned(),
            fd,
        })
    }

    /// The root on the host.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Opens a folder of the root; missing folders are made.
    pub fn folder(&self, path: &Path) -> Result<OwnedFd, RootfsError> {
        let failed = |action| {
            move |source| RootfsError {
                action,
                path: path.to_owned(),
                source,
            }
        };
        // It nearly always exists.
        match self.open_in(path, FOLDER) {
            Err(Errno::NOENT) => {}
            other => return other.map_err(failed("open folder")),
        }
        let mut so_far = PathBuf::new();
        let mut folder = self
            .open_in(Path::new("."), FOLDER)
            .map_err(failed("open"))?;
        for component in path.iter().filter(|c| *c != OsStr::new("/")) {
            so_far.push(component);
            folder = match self.open_in(&so_far, FOLDER) {
                Err(Errno::NOENT) => {
                    let mode = Mode::from_raw_mode(0o755);
                    match rustix::fs::mkdirat(&folder, component, mode) {
                        // Another process was faster, or it is a dangling link, which fails below.
                        Ok(()) | Err(Errno::EXIST) => {}
                        Err(e) => return Err(failed("make folder")(e)),
                    }
                    self.open_in(&so_far, FOLDER)
                        .map_err(failed("open folder"))?
                }
                other => other.map_err(failed("open folder"))?,
            };
        }
        Ok(folder)
    }

    /// Makes a link, which replaces a file or another link. A mount at that path stays, because it
    /// is the intended file.
    pub fn link(&self, target: &str, path: &Path) -> Result<(), RootfsError> {
        let failed = |source| RootfsError {
            action: "make link",
            path: path.to_owned(),
            source,
        };
        let (folder, name) = self.place(path)?;
        match rustix::fs::readlinkat(&folder, name, Vec::new()) {
            Ok(there) if there.as_bytes() == target.as_bytes() => return Ok(()),
            _ => {}
        }
        match rustix::fs::unlinkat(&folder, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(Errno::BUSY) => return Ok(()),
            Err(e) => return Err(failed(e)),
        }
        rustix::fs::symlinkat(target, &folder, name).map_err(failed)
    }

    /// A file's content, `None` if there is no file.
    pub fn read(&self, path: &Path) -> Result<Option<Vec<u8>>, RootfsError> {
        let failed = |source| RootfsError {
            action: "read",
            path: path.to_owned(),
            source,
        };
        // A pipe must not block the container.
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let fd = match self.open_in(path, flags) {
            Ok(fd) => fd,
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::NXIO) => return Ok(None),
            Err(e) => return Err(failed(e)),
        };
        let file = std::fs::File::from(fd);
        let length = file
            .metadata()
            .map_or(0, |meta| meta.len().min(LONGEST_FILE));
        // One read, not one for each doubling of the buffer; the end is found in the last byte.
        let mut content = Vec::with_capacity(usize::try_from(length).unwrap_or(0) + 1);
        let mut limited = std::io::Read::take(file, LONGEST_FILE);
        match std::io::Read::read_to_end(&mut limited, &mut content) {
            Ok(_) => Ok(Some(content)),
            Err(e) => Err(failed(Errno::from_io_error(&e).unwrap_or(Errno::IO))),
        }
    }

    /// Writes a whole file, which replaces a file or a link; it never writes through a link.
    pub fn write(&self, path: &Path, content: &[u8]) -> Result<(), RootfsError> {
        let failed = |source| RootfsError {
            action: "write",
            path: path.to_owned(),
            source,
        };
        let (folder, name) = self.place(path)?;
        let mut temporary = name.to_owned();
        temporary.push(".tranche");
        let flags =
            OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let create = || rustix::fs::openat(&folder, &temporary, flags, Mode::from_raw_mode(0o644));
        let created = match create() {
            // An interrupted run left it, or the image has it.
            Err(Errno::EXIST) => {
                rustix::fs::unlinkat(&folder, &temporary, AtFlags::empty()).map_err(failed)?;
                create()
            }
            other => other,
        };
        let fd = created.map_err(failed)?;
        let mut file = std::fs::File::from(fd);
        std::io::Write::write_all(&mut file, content)
            .map_err(|e| failed(Errno::from_io_error(&e).unwrap_or(Errno::IO)))?;
        rustix::fs::renameat(&folder, &temporary, &folder, name).map_err(failed)
    }

    /// The path of a folder without links, from the root; `None` if there is no folder, or one that the container's
    /// root user may not reach.
    pub fn real_folder(&self, folder: &Path) -> Result<Option<PathBuf>, RootfsError> {
        let failed = |source| RootfsError {
            action: "look at",
            path: folder.to_owned(),
            source,
        };
        match self.open_in(folder, FOLDER) {
            Ok(fd) => self.real_path(&fd).map(Some).map_err(failed),
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::ACCESS) => Ok(None),
            Err(e) => Err(failed(e)),
        }
    }

    /// The path of an open file without links, from the root.
    fn real_path(&self, fd: &OwnedFd) -> rustix::io::Result<PathBuf> {
        let target = rustix::fs::readlink(by_descriptor(fd), Vec::new())?;
        let real = Path::new(OsStr::from_bytes(target.as_bytes()));
        let inside = real.strip_prefix(&self.path).unwrap_or(real);
        Ok(Path::new("/").join(inside))
    }

    /// The names in a folder, sorted; none if there is no folder, or one that the container's root user may
    /// not read.
    pub fn list(&self, folder: &Path) -> Result<Vec<OsString>, RootfsError> {
        let mut names = Vec::new();
        self.each_name(folder, |name| names.push(name.to_owned()))?;
        names.sort();
        Ok(names)
    }

    /// Calls `visit` with each name in a folder, in no order; with none if there is no folder, or one that the
    /// container's root user may not read.
    pub fn each_name(
        &self,
        folder: &Path,
        mut visit: impl FnMut(&OsStr),
    ) -> Result<(), RootfsError> {
        let failed = |source| RootfsError {
            action: "list",
            path: folder.to_owned(),
            source,
        };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = match self.open_in(folder, flags) {
            Ok(fd) => fd,
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::ACCESS) => {
                return Ok(());
            }
            Err(e) => return Err(failed(e)),
        };
        let mut buffer = Vec::with_capacity(NAMES_AT_ONCE);
        let mut entries = RawDir::new(fd, buffer.spare_capacity_mut());
        while let Some(entry) = entries.next() {
            let entry = entry.map_err(failed)?;
            let name = entry.file_name().to_bytes();
            if name != b"." && name != b".." {
                visit(OsStr::from_bytes(name));
            }
        }
        Ok(())
    }

    /// The regular file that a path resolves to, if any.
    pub fn find(&self, path: &Path) -> Result<Option<FoundFile>, RootfsError> {
        let failed = |source| RootfsError {
            action: "look at",
            path: path.to_owned(),
            source,
        };
        let fd = match self.open_in(path, OFlags::PATH | OFlags::CLOEXEC) {
            Ok(fd) => fd,
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP | Errno::ACCESS) => return Ok(None),
            Err(e) => return Err(failed(e)),
        };
        let stat = rustix::fs::fstat(&fd).map_err(failed)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Ok(None);
        }
        Ok(Some(FoundFile {
            path: self.real_path(&fd).map_err(failed)?,
            fd,
            identity: (stat.st_dev, stat.st_ino),
        }))
    }

    fn place<'a>(&self, path: &'a Path) -> Result<(OwnedFd, &'a OsStr), RootfsError> {
        match (path.parent(), path.file_name()) {
            (Some(folder), Some(name)) => Ok((self.folder(folder)?, name)),
            _ => Err(RootfsError {
                action: "write",
                path: path.to_owned(),
                source: Errno::ISDIR,
            }),
        }
    }

    fn open_in(&self, path: &Path, flags: OFlags) -> rustix::io::Result<OwnedFd> {
        let inside = match path.strip_prefix("/").unwrap_or(path) {
            root if root.as_os_str().is_empty() => Path::new("."),
            inside => inside,
        };
        let how = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        rustix::fs::openat2(self.fd.as_fd(), inside, flags, Mode::empty(), how)
    }
}

/// A path to the file of a descriptor, which does not depend on the file's name.
#[must_use]
pub fn by_descriptor(fd: &OwnedFd) -> String {
    format!("/proc/thread-self/fd/{}", fd.as_raw_fd())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// A host with a file to protect and a container's root beside it.
    fn host() -> (tempfile::TempDir, PathBuf, Rootfs) {
        let host = tempfile::tempdir().unwrap();
        let root = host.path().join("rootfs");
        std::fs::create_dir_all(root.join("usr/lib")).unwrap();
        std::fs::create_dir(host.path().join("precious")).unwrap();
        std::fs::write(host.path().join("precious/file"), "precious").unwrap();
        let rootfs = Rootfs::open(&root).unwrap();
        (host, root, rootfs)
    }

    fn untouched(host: &Path) {
        assert_eq!(
            std::fs::read(host.join("precious/file")).unwrap(),
            b"precious"
        );
        assert_eq!(std::fs::read_dir(host.join("precious")).unwrap().count(), 1);
    }

    #[test]
    fn links_are_made_twice_and_replace_what_an_image_brings() {
        let (_host, root, rootfs) = host();
        std::fs::write(root.join("usr/lib/libcuda.so"), "a stub").unwrap();
        symlink("elsewhere", root.join("usr/lib/libcuda.so.1")).unwrap();
        for _ in 0..2 {
            for (target, link) in [
                ("libcuda.so.5", "/usr/lib/libcuda.so.1"),
                ("libcuda.so.1", "/usr/lib/libcuda.so"),
                ("x", "/new/folder/y"),
            ] {
                rootfs.link(target, Path::new(link)).unwrap();
            }
        }
        let read = |path: &str| std::fs::read_link(root.join(path)).unwrap();
        assert_eq!(read("usr/lib/libcuda.so.1"), Path::new("libcuda.so.5"));
        assert_eq!(read("usr/lib/libcuda.so"), Path::new("libcuda.so.1"));
        assert_eq!(read("new/folder/y"), Path::new("x"));
    }

    #[test]
    fn a_hostile_link_to_the_host_is_followed_inside_the_root_only() {
        let (host, root, rootfs) = host();
        // Each would leave the root if it were followed on the host.
        symlink(host.path().join("precious"), root.join("absolute")).unwrap();
        symlink("../../precious", root.join("usr/lib/relative")).unwrap();
        symlink("/proc/self/root", root.join("magic")).unwrap();
        for folder in ["/absolute", "/usr/lib/relative"] {
            let path = Path::new(folder).join("file");
            // The target does not exist in the root.
            rootfs.link("evil", &path).unwrap_err();
            rootfs.write(&path, b"evil").unwrap_err();
            assert_eq!(rootfs.read(&path).unwrap(), None);
        }
        // Magic links are not followed at all.
        rootfs.write(Path::new("/magic/file"), b"evil").unwrap_err();
        untouched(host.path());
    }

    #[test]
    fn a_hostile_link_in_the_place_of_a_file_is_replaced() {
        let (host, root, rootfs) = host();
        symlink(host.path().join("precious/file"), root.join("usr/lib/conf")).unwrap();
        symlink(
            host.path().join("precious/file"),
            root.join("usr/lib/conf.tranche"),
        )
        .unwrap();
        rootfs.write(Path::new("/usr/lib/conf"), b"ours").unwrap();
        assert_eq!(std::fs::read(root.join("usr/lib/conf")).unwrap(), b"ours");
        assert!(
            root.join("usr/lib/conf")
                .symlink_metadata()
                .unwrap()
                .is_file()
        );
        untouched(host.path());
    }

    #[test]
    fn an_honest_link_inside_the_root_is_followed() {
        let (_host, root, rootfs) = host();
        symlink("/usr/lib", root.join("lib")).unwrap();
        rootfs.link("a", Path::new("/lib/b")).unwrap();
        assert!(root.join("usr/lib/b").symlink_metadata().is_ok());
    }

    #[test]
    fn a_folder_in_the_place_of_a_link_is_an_error_that_names_it() {
        let (_host, root, rootfs) = host();
        std::fs::create_dir(root.join("usr/lib/libcuda.so.1")).unwrap();
        let error = rootfs
            .link("x", Path::new("/usr/lib/libcuda.so.1"))
            .unwrap_err();
        assert!(
            error.to_string().contains("/usr/lib/libcuda.so.1"),
            "{error}"
        );
    }

    #[test]
    fn a_pipe_does_not_hold_the_container_up() {
        let (_host, root, rootfs) = host();
        let pipe = root.join("usr/lib/pipe");
        rustix::fs::mknodat(
            rustix::fs::CWD,
            &pipe,
            rustix::fs::FileType::Fifo,
            Mode::RUSR,
            0,
        )
        .unwrap();
        assert_eq!(
            rootfs.read(Path::new("/usr/lib/pipe")).unwrap(),
            Some(Vec::new())
        );
    }
}
