//! The driver root: where the driver is installed, found from the library's own path.

use std::ffi::{CStr, OsStr, c_void};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

/// The folder of libraries below a driver root, as on Debian.
pub const LIBRARY_DIR: &str = "usr/lib/x86_64-linux-gnu";
/// The socket below the root.
pub const SOCKET: &str = "run/nvidia-persistenced/socket";
/// A file that marks a root which is a host's `/`. Even if such a root is mounted elsewhere, a process opens the nodes of its
/// own `/dev`, as a real driver's libraries do. All other roots have device nodes below them.
pub const HOST_MARK: &str = "etc/nvidia-sim/host";
/// The page's file below the root, on tmpfs where `/run` is.
pub const PAGE_FILE: &str = "run/nvidia-persistenced/machine";

/// A directory with `dev/nvidia*` and the daemon's socket below it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DriverRoot(PathBuf);

impl DriverRoot {
    /// The root at `path`.
    #[must_use]
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self(path.into())
    }

    /// The root of a library file: `<ROOT>` for `<ROOT>/usr/lib/x86_64-linux-gnu/<name>`, and `/` for all other paths, for
    /// example if the library is mounted elsewhere.
    #[must_use]
    pub fn of_file(file: &Path) -> Self {
        let root = file
            .parent()
            .and_then(|dir| {
                dir.as_os_str()
                    .as_bytes()
                    .strip_suffix(LIBRARY_DIR.as_bytes())
            })
            .filter(|root| root.ends_with(b"/"))
            .map_or(Path::new("/"), |root| Path::new(OsStr::from_bytes(root)));
        Self(root.to_owned())
    }

    /// The root of the loaded library that contains the static `place`.
    #[must_use]
    pub fn of_library<T>(place: &'static T) -> Self {
        let address: *const c_void = std::ptr::from_ref(place).cast();
        let mut info = std::mem::MaybeUninit::<libc::Dl_info>::zeroed();
        // SAFETY: `info` is valid for writes; the address is only compared.
        let found = unsafe { libc::dladdr(address, info.as_mut_ptr()) };
        // SAFETY: zeroed above, and all zeros is a value of this struct of pointers.
        let info = unsafe { info.assume_init() };
        if found == 0 || info.dli_fname.is_null() {
            return Self::new("/");
        }
        // SAFETY: the loader's name of a loaded object is valid while it is loaded, and this code is in it.
        let name = unsafe { CStr::from_ptr(info.dli_fname) };
        let name = Path::new(OsStr::from_bytes(name.to_bytes()));
        match std::path::absolute(name) {
            Ok(name) => Self::of_file(&name),
            Err(_) => Self::new("/"),
        }
    }

    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }

    /// The folder in place of `/proc/driver`. A host's `/proc` is not writable, so for a root that is `/` the folder is below
    /// the daemon's; mount it over `/proc/driver` for programs that read that.
    #[must_use]
    pub fn proc_driver(&self) -> PathBuf {
        let is_host = self.0 == Path::new("/");
        self.0.join(if is_host {
            "run/nvidia-persistenced/proc/driver"
        } else {
            "proc/driver"
        })
    }

    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.0.join(SOCKET)
    }

    /// Opens the device node `dev/<name>`, as the driver's libraries do while they are initialised; `None` if it does not
    /// exist, or if its mode or the device cgroup does not allow this process to open it.
    #[must_use]
    pub fn open_node(&self, name: &str) -> Option<OwnedFd> {
        self.open(name, OFlags::RDWR)
    }

    fn open(&self, name: &str, access: OFlags) -> Option<OwnedFd> {
        let dev = if self.0.join(HOST_MARK).exists() {
            Path::new("/dev").to_owned()
        } else {
            self.0.join("dev")
        };
        let path = dev.join(name);
        let open = |flags| rustix::fs::open(&path, flags | OFlags::CLOEXEC, Mode::empty());
        match open(access) {
            Ok(file) => Some(file),
            // The node has no kernel driver, like all nodes of the simulator.
            Err(Errno::NXIO | Errno::NODEV) => open(OFlags::PATH).ok(),
            Err(_) => None,
        }
    }

    /// Whether this process can read the device node `dev/<name>`, as a capability requires.
    #[must_use]
    pub fn can_read_node(&self, name: &str) -> bool {
        self.open(name, OFlags::RDONLY).is_some()
    }

    /// Whether this process has the device node `dev/<name>`.
    #[must_use]
    pub fn has_node(&self, name: &str) -> bool {
        self.open_node(name).is_some()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_root_is_found_from_the_librarys_path() {
        for (file, root) in [
            ("/usr/lib/x86_64-linux-gnu/libcuda.so.1", "/"),
            (
                "/tmp/x/usr/lib/x86_64-linux-gnu/libcuda.so.535.261.03",
                "/tmp/x/",
            ),
            ("/lib/x86_64-linux-gnu/libcuda.so.1", "/"),
            ("/tmp/xusr/lib/x86_64-linux-gnu/libcuda.so.1", "/"),
            ("/usr/lib/tranche/driver/libcuda.so.1", "/"),
            ("/work/target/simulator/libcuda.so.1", "/"),
        ] {
            assert_eq!(
                DriverRoot::of_file(Path::new(file)).path(),
                Path::new(root),
                "{file}"
            );
        }
    }

    #[test]
    fn a_node_must_exist() {
        let folder = tempfile::tempdir().unwrap();
        let root = DriverRoot::new(folder.path());
        assert!(!root.has_node("nvidia0"));
        std::fs::create_dir(folder.path().join("dev")).unwrap();
        std::fs::write(folder.path().join("dev/nvidia0"), "").unwrap();
        assert!(root.has_node("nvidia0"));
        assert!(!root.has_node("nvidia1"));
    }

    #[test]
    fn the_nodes_of_a_hosts_root_are_those_of_the_process() {
        let folder = tempfile::tempdir().unwrap();
        let root = DriverRoot::new(folder.path());
        std::fs::create_dir(folder.path().join("dev")).unwrap();
        std::fs::write(folder.path().join("dev/nvidia0"), "").unwrap();
        let mark = folder.path().join(HOST_MARK);
        std::fs::create_dir_all(mark.parent().unwrap()).unwrap();
        std::fs::write(mark, "").unwrap();
        // Every process has a /dev/null.
        assert!(!root.has_node("nvidia0") && root.has_node("null"));
    }
}
