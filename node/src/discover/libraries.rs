//! The driver's libraries, and the links beside them.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use crate::layouts::LIBRARY_FOLDERS;
use crate::root::{DriverRoot, Kind, RootError};

/// Libraries of the driver that have their own version.
const OWN_VERSION: [&str; 6] = [
    "libnvidia-nvvm70.so.",
    "libnvidia-egl-gbm.so.",
    "libnvidia-egl-wayland.so.",
    "libnvidia-egl-wayland2.so.",
    "libnvidia-egl-xcb.so.",
    "libnvidia-egl-xlib.so.",
];

/// Links that programs expect and that not every package makes, in the folder of the library.
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

/// The SONAMEs that containers need, for a driver without links.
pub(super) const SONAMES: [(&str, &str); 2] = [
    ("libcuda.so.", "libcuda.so.1"),
    ("libnvidia-ml.so.", "libnvidia-ml.so.1"),
];

/// The libraries of the driver of this version, without links in their paths.
pub(super) fn libraries(root: &DriverRoot, version: &str) -> Result<BTreeSet<PathBuf>, RootError> {
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
                // Two search folders may be the same (/lib64 is often a link), and Debian's
                // alternatives show a library in a second place: the real path identifies the
                // library.
                if let Some((real, Kind::File { .. })) = root.resolve(&folder.join(&name))?
                    && !is_32_bit(&root.here(&real))
                {
                    found.insert(real);
                }
            }
        }
    }
    Ok(found)
}

/// Whether the file is a 32-bit ELF file; false if it cannot be read.
fn is_32_bit(path: &Path) -> bool {
    let mut start = [0; 5];
    let read = File::open(path).and_then(|mut file| file.read_exact(&mut start));
    // The magic number, then EI_CLASS (elf(5)): ELFCLASS32 is 1.
    read.is_ok() && start == *b"\x7fELF\x01"
}

/// The links to the libraries in their folders, by name and target, and those that programs expect.
pub(super) fn links(
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
