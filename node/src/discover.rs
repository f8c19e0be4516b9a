//! What of the driver a container needs, found under the driver root.
//!
//! The search is that of NVIDIA's `pkg/nvcdi` (nvidia-container-toolkit): libraries by the driver's
//! version as their suffix, the links beside them, a fixed list of programs, the GSP firmware and
//! the daemons' sockets. What is not there is left out; without `libcuda` and `libnvidia-ml` no
//! container could use a GPU, so that is an error.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use tranche_driver::cdi::{DriverFile, DriverFiles, Library, Link};

use crate::root::{DriverRoot, Kind, RootError};

/// Where libraries are searched, in this order.
pub const LIBRARY_FOLDERS: [&str; 8] = [
    "/usr/lib64",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu/nvidia/current",
    "/usr/lib/aarch64-linux-gnu/nvidia/current",
    "/lib64",
    "/lib/x86_64-linux-gnu",
    "/lib/aarch64-linux-gnu",
];

/// Where programs are searched, in this order.
const PROGRAM_FOLDERS: [&str; 6] = [
    "/usr/local/sbin",
    "/usr/local/bin",
    "/usr/sbin",
    "/usr/bin",
    "/sbin",
    "/bin",
];

const PROGRAMS: [&str; 5] = [
    "nvidia-smi",
    "nvidia-debugdump",
    "nvidia-persistenced",
    "nvidia-cuda-mps-control",
    "nvidia-cuda-mps-server",
];

/// Libraries of the driver that carry a version of their own.
const OWN_VERSION: [&str; 6] = [
    "libnvidia-nvvm70.so.",
    "libnvidia-egl-gbm.so.",
    "libnvidia-egl-wayland.so.",
    "libnvidia-egl-wayland2.so.",
    "libnvidia-egl-xcb.so.",
    "libnvidia-egl-xlib.so.",
];

/// Links that programs expect and that not every package makes: in the folder of the library.
const EXPECTED_LINKS: [(&str, &str, &str); 3] = [
    ("libcuda.so", "libcuda.so", "libcuda.so.1"),
    (
        "libGLX_nvidia.so",
        "libGLX_indirect.so.0",
        "libGLX_nvidia.so.0",
    ),
    (
        "libnvidia-opticalflow.so",
        "libnvidia-opticalflow.so",
        "libnvidia-opticalflow.so.1",
    ),
];

/// Sockets of the driver's daemons.
const SOCKETS: [&str; 2] = ["nvidia-persistenced/socket", "nvidia-fabricmanager/socket"];

/// Device nodes that belong to no GPU.
const CONTROL_NODES: [&str; 4] = [
    "/dev/nvidia-modeset",
    "/dev/nvidia-uvm",
    "/dev/nvidia-uvm-tools",
    "/dev/nvidiactl",
];

/// Why a container could not be given the driver.
#[derive(Debug, thiserror::Error)]
pub enum DiscoverError {
    /// The root or something in it.
    #[error(transparent)]
    Root(#[from] RootError),
    /// A library without which nothing works.
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

/// The driver's files, as paths from the driver root.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// Libraries, without links in the path.
    pub libraries: BTreeSet<PathBuf>,
    /// Links beside the libraries: name to target, the target as a bare file name.
    pub links: BTreeMap<PathBuf, String>,
    /// Programs: where a container expects each, and the file itself.
    pub programs: BTreeMap<PathBuf, PathBuf>,
    /// GSP firmware.
    pub firmware: BTreeSet<PathBuf>,
    /// Sockets of the driver's daemons.
    pub sockets: BTreeSet<PathBuf>,
    /// Device nodes that belong to no GPU.
    pub control_nodes: BTreeSet<PathBuf>,
}

/// The SONAMEs that containers cannot do without, should a driver come without links.
const SONAMES: [(&str, &str); 2] = [
    ("libcuda.so.", "libcuda.so.1"),
    ("libnvidia-ml.so.", "libnvidia-ml.so.1"),
];

impl Found {
    /// As a CDI spec needs it: every file with its path on the host, whose driver root is
    /// `on_host`, and its path in a container.
    #[must_use]
    pub fn driver_files(&self, on_host: &Path) -> DriverFiles {
        let text = |path: &Path| path.to_string_lossy().into_owned();
        let host = |path: &Path| {
            let inside = path.strip_prefix("/").unwrap_or(path);
            text(&on_host.join(inside))
        };
        let same = |path: &PathBuf| DriverFile {
            host_path: host(path),
            container_path: text(path),
        };
        DriverFiles {
            libraries: self
                .libraries
                .iter()
                .map(|path| Library {
                    file: same(path),
                    soname: self.soname(path),
                    links: self.links_to(path),
                })
                .collect(),
            binaries: self
                .programs
                .iter()
                .map(|(name, real)| DriverFile {
                    host_path: host(real),
                    container_path: text(name),
                })
                .collect(),
            firmware: self.firmware.iter().map(same).collect(),
            sockets: self.sockets.iter().map(same).collect(),
            config_files: Vec::new(),
            control_nodes: self.control_nodes.iter().map(|path| text(path)).collect(),
        }
    }

    /// The name that leads straight to the file and ends in one number, as SONAMEs of the driver
    /// do; the file's own name where there is none.
    fn soname(&self, library: &Path) -> String {
        let name = library.file_name().unwrap_or_default().to_string_lossy();
        if let Some((_, soname)) = SONAMES.iter().find(|(stem, _)| name.starts_with(stem)) {
            return (*soname).to_owned();
        }
        self.links
            .iter()
            .filter(|(link, target)| **target == name && link.parent() == library.parent())
            .filter_map(|(link, _)| link.file_name()?.to_str())
            .find(|link| {
                link.rsplit_once(".so.")
                    .is_some_and(|(_, number)| number.bytes().all(|b| b.is_ascii_digit()))
            })
            .map_or_else(|| name.clone().into_owned(), str::to_owned)
    }

    /// The links of the library's folder that lead to it, the straight ones first.
    fn links_to(&self, library: &Path) -> Vec<Link> {
        let mut names: Vec<String> = library
            .file_name()
            .map(|name| name.to_string_lossy().into_owned())
            .into_iter()
            .collect();
        let mut links = Vec::new();
        let mut next = 0;
        while let Some(name) = names.get(next).cloned() {
            for (link, target) in &self.links {
                if *target == name && link.parent() == library.parent() {
                    links.push(Link {
                        target: target.clone(),
                        path: link.to_string_lossy().into_owned(),
                    });
                    names.extend(link.file_name().map(|n| n.to_string_lossy().into_owned()));
                }
            }
            next += 1;
        }
        links
    }
}

/// Searches the root for the driver of this version.
pub fn discover(root: &DriverRoot, version: &str) -> Result<Found, DiscoverError> {
    let mut found = Found::default();
    for library in libraries(root, version)? {
        found.libraries.insert(library);
    }
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
    found.links = links(root, &found.libraries)?;
    for program in PROGRAMS {
        for folder in PROGRAM_FOLDERS {
            let name = Path::new(folder).join(program);
            if let Some((real, Kind::File { executable: true })) = root.resolve(&name)? {
                found.programs.insert(name, real);
                break;
            }
        }
    }
    let firmware = Path::new("/lib/firmware/nvidia").join(version);
    for name in root.list(&firmware)? {
        if name.starts_with("gsp") && has_extension(&name, "bin") {
            found.firmware.insert(firmware.join(name));
        }
    }
    for socket in SOCKETS {
        for folder in ["/run", "/var/run"] {
            let name = Path::new(folder).join(socket);
            if let Some((real, Kind::Socket)) = root.resolve(&name)? {
                found.sockets.insert(real);
                break;
            }
        }
    }
    for node in CONTROL_NODES {
        if let Some((real, Kind::CharDevice)) = root.resolve(Path::new(node))? {
            found.control_nodes.insert(real);
        }
    }
    Ok(found)
}

fn has_extension(name: &str, extension: &str) -> bool {
    Path::new(name).extension().is_some_and(|e| e == extension)
}

fn libraries(root: &DriverRoot, version: &str) -> Result<BTreeSet<PathBuf>, RootError> {
    let suffix = format!(".so.{version}");
    let mut found = BTreeSet::new();
    for folder in LIBRARY_FOLDERS {
        for folder in [PathBuf::from(folder), Path::new(folder).join("vdpau")] {
            for name in root.list(&folder)? {
                let own_version = || {
                    OWN_VERSION.iter().any(|prefix| {
                        name.strip_prefix(prefix)
                            .is_some_and(|rest| rest.contains('.') || prefix.contains("nvvm70"))
                    })
                };
                if !name.ends_with(&suffix) && !own_version() {
                    continue;
                }
                // Two search folders may be one (/lib64 is often a link), and Debian's
                // alternatives show a library in a second place: the real path is the library.
                if let Some((real, Kind::File { .. })) = root.resolve(&folder.join(&name))? {
                    found.insert(real);
                }
            }
        }
    }
    Ok(found)
}

fn links(
    root: &DriverRoot,
    libraries: &BTreeSet<PathBuf>,
) -> Result<BTreeMap<PathBuf, String>, RootError> {
    let mut links = BTreeMap::new();
    let folders: BTreeSet<&Path> = libraries.iter().filter_map(|path| path.parent()).collect();
    for folder in folders {
        for name in root.list(folder)? {
            let link = folder.join(&name);
            let Some(target) = root.read_link(&link)? else {
                continue;
            };
            // A target elsewhere (/etc/alternatives) does not exist in a container.
            let Some(target) = target.to_str().filter(|target| !target.contains('/')) else {
                continue;
            };
            if root
                .resolve(&link)?
                .is_some_and(|(real, _)| libraries.contains(&real))
            {
                links.insert(link, target.to_owned());
            }
        }
    }
    for library in libraries {
        let (Some(folder), Some(name)) = (library.parent(), library.file_name()) else {
            continue;
        };
        let name = name.to_string_lossy();
        for (stem, soname) in SONAMES {
            if name.starts_with(stem) {
                links
                    .entry(folder.join(soname))
                    .or_insert_with(|| name.clone().into_owned());
            }
        }
        for (stem, link, target) in EXPECTED_LINKS {
            if name
                .strip_prefix(stem)
                .is_some_and(|rest| rest.starts_with('.'))
            {
                links
                    .entry(folder.join(link))
                    .or_insert_with(|| target.to_owned());
            }
        }
    }
    Ok(links)
}

#[cfg(any(test, feature = "testing"))]
#[allow(
    clippy::unwrap_used,
    clippy::missing_panics_doc,
    reason = "a test that cannot be set up fails"
)]
pub mod testing {
    //! For tests.

    use std::os::unix::fs::{PermissionsExt, symlink};

    use super::Path;

    /// What Debian's 535.261.03 packages install, as paths and links.
    pub const DEBIAN_535: &str = include_str!("../testdata/debian-535.list");

    /// Lays out a list of paths and links as files: a library of CUDA that has a function, the rest empty.
    pub fn lay_out(root: &Path, list: &str) {
        for line in list.lines().filter(|l| !l.starts_with('#')) {
            let (path, target) = match line.split_once(" -> ") {
                Some((path, target)) => (path, Some(target)),
                None => (line, None),
            };
            let path = root.join(path.trim_start_matches('/'));
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            if let Some(target) = target {
                symlink(target, path).unwrap();
                continue;
            }
            let name = path.file_name().unwrap().to_string_lossy();
            let content = if name.starts_with("libcuda.so") {
                crate::untested::testing::library(&["cuInit"])
            } else {
                Vec::new()
            };
            std::fs::write(&path, content).unwrap();
            let folder = path.parent().unwrap();
            let is_program =
                folder.ends_with("bin") || folder.ends_with("sbin") || path.ends_with("nvidia-smi");
            let mode = if is_program { 0o755 } else { 0o644 };
            std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::os::unix::net::UnixListener;

    use super::testing::{DEBIAN_535, lay_out};
    use super::*;

    fn found_in(list: &str) -> (tempfile::TempDir, Found) {
        let dir = tempfile::tempdir().unwrap();
        lay_out(dir.path(), list);
        let found = discover(&DriverRoot::open(dir.path()).unwrap(), "535.261.03").unwrap();
        (dir, found)
    }

    #[test]
    fn debian_535_is_found_completely() {
        let (_dir, found) = found_in(DEBIAN_535);
        // Every versioned library of the packages, each once, where it really lies.
        let listed: BTreeSet<PathBuf> = DEBIAN_535
            .lines()
            .filter(|l| {
                !l.contains(" -> ") && (l.ends_with(".so.535.261.03") || l.contains("egl-gbm.so"))
            })
            .map(PathBuf::from)
            .collect();
        assert_eq!(found.libraries, listed);
        assert_eq!(found.libraries.len(), 20);

        let folder = Path::new("/usr/lib/x86_64-linux-gnu/nvidia/current");
        let link = |name: &str| found.links.get(&folder.join(name)).map(String::as_str);
        assert_eq!(link("libcuda.so.1"), Some("libcuda.so.535.261.03"));
        assert_eq!(link("libcuda.so"), Some("libcuda.so.1"));
        assert_eq!(
            link("libnvidia-ml.so.1"),
            Some("libnvidia-ml.so.535.261.03")
        );
        assert_eq!(link("libGLX_indirect.so.0"), Some("libGLX_nvidia.so.0"));
        assert_eq!(
            link("nvidia-drm_gbm.so"),
            Some("libnvidia-allocator.so.535.261.03")
        );
        assert!(
            found.links.values().all(|target| !target.contains('/')),
            "no link leads to /etc/alternatives, which a container lacks: {:?}",
            found.links
        );

        assert_eq!(
            found.programs.get(Path::new("/usr/bin/nvidia-smi")),
            Some(&"/usr/lib/nvidia/current/nvidia-smi".into())
        );
        assert_eq!(
            found.programs.keys().collect::<Vec<_>>(),
            [
                Path::new("/usr/bin/nvidia-cuda-mps-control"),
                Path::new("/usr/bin/nvidia-persistenced"),
                Path::new("/usr/bin/nvidia-smi"),
                Path::new("/usr/sbin/nvidia-cuda-mps-server"),
            ]
        );
        assert_eq!(
            found.firmware.iter().collect::<Vec<_>>(),
            [
                Path::new("/lib/firmware/nvidia/535.261.03/gsp_ga10x.bin"),
                Path::new("/lib/firmware/nvidia/535.261.03/gsp_tu10x.bin"),
            ]
        );
        assert!(found.sockets.is_empty() && found.control_nodes.is_empty());
    }

    #[test]
    fn a_spec_of_debian_535_names_files_on_the_host_and_links_in_the_container() {
        let (_dir, found) = found_in(DEBIAN_535);
        let files = found.driver_files(Path::new("/run/nvidia/driver"));
        let cuda = files
            .libraries
            .iter()
            .find(|l| l.soname == "libcuda.so.1")
            .unwrap();
        let folder = "/usr/lib/x86_64-linux-gnu/nvidia/current";
        assert_eq!(
            cuda.file.host_path,
            format!("/run/nvidia/driver{folder}/libcuda.so.535.261.03")
        );
        assert_eq!(
            cuda.file.container_path,
            format!("{folder}/libcuda.so.535.261.03")
        );
        let links: Vec<_> = cuda.links.iter().map(|l| (&*l.target, &*l.path)).collect();
        assert_eq!(
            links,
            [
                ("libcuda.so.535.261.03", &*format!("{folder}/libcuda.so.1")),
                ("libcuda.so.1", &*format!("{folder}/libcuda.so")),
            ]
        );
        let sonames: Vec<_> = files.libraries.iter().map(|l| &*l.soname).collect();
        assert!(sonames.contains(&"libnvidia-nvvm.so.4"), "{sonames:?}");
        assert!(
            sonames.contains(&"libnvidia-eglcore.so.535.261.03"),
            "{sonames:?}"
        );
        assert!(sonames.contains(&"libnvidia-allocator.so.1"), "{sonames:?}");
        let smi = files
            .binaries
            .iter()
            .find(|b| b.container_path == "/usr/bin/nvidia-smi")
            .unwrap();
        assert_eq!(
            smi.host_path,
            "/run/nvidia/driver/usr/lib/nvidia/current/nvidia-smi"
        );
    }

    #[test]
    fn sockets_are_found_and_files_of_their_name_are_not() {
        let dir = tempfile::tempdir().unwrap();
        lay_out(dir.path(), DEBIAN_535);
        for folder in ["run/nvidia-persistenced", "run/nvidia-fabricmanager"] {
            std::fs::create_dir_all(dir.path().join(folder)).unwrap();
        }
        std::fs::create_dir_all(dir.path().join("var")).unwrap();
        symlink("/run", dir.path().join("var/run")).unwrap();
        let _socket =
            UnixListener::bind(dir.path().join("run/nvidia-persistenced/socket")).unwrap();
        std::fs::write(dir.path().join("run/nvidia-fabricmanager/socket"), "").unwrap();
        let found = discover(&DriverRoot::open(dir.path()).unwrap(), "535.261.03").unwrap();
        assert_eq!(
            found.sockets.iter().collect::<Vec<_>>(),
            [Path::new("/run/nvidia-persistenced/socket")]
        );
    }

    #[test]
    fn a_driver_whose_cuda_library_is_of_another_version_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        lay_out(dir.path(), DEBIAN_535);
        let error = discover(&DriverRoot::open(dir.path()).unwrap(), "550.54.15")
            .unwrap_err()
            .to_string();
        assert!(error.contains("libcuda.so.550.54.15"), "{error}");
    }

    #[test]
    fn libraries_beside_each_other_without_links_still_get_the_expected_ones() {
        let (_dir, found) = found_in(
            "/usr/lib64/libcuda.so.535.261.03\n/usr/lib64/libnvidia-ml.so.535.261.03\n\
             /usr/lib64/libnvidia-nvvm70.so.4\n/usr/lib64/libother.so.1.2\n/lib64 -> usr/lib64",
        );
        assert_eq!(found.libraries.len(), 3);
        assert_eq!(
            found
                .links
                .get(Path::new("/usr/lib64/libcuda.so"))
                .map(String::as_str),
            Some("libcuda.so.1")
        );
    }
}
