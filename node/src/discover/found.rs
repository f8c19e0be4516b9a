//! The files of a driver that were found, and their form for a CDI spec.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use tranche_driver::cdi::{DriverFile, DriverFiles, Library, Link};

use super::libraries::SONAMES;

/// The driver's files, as paths from the driver root.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Found {
    /// Libraries, without links in the path.
    pub libraries: BTreeSet<PathBuf>,
    /// Links beside the libraries: name to target, the target as a bare file name.
    pub links: BTreeMap<PathBuf, String>,
    /// Programs: the path in a container, and the file itself.
    pub programs: BTreeMap<PathBuf, PathBuf>,
    /// GSP firmware.
    pub firmware: BTreeSet<PathBuf>,
    /// Sockets of the driver's daemons.
    pub sockets: BTreeSet<PathBuf>,
}

impl Found {
    /// For a CDI spec: the device nodes that belong to no GPU, and every file with its path on the host, where the
    /// driver root is `on_host`, and its path in a container, which is its path in the root.
    #[must_use]
    pub fn driver_files(&self, on_host: &Path, control_nodes: &[String]) -> DriverFiles {
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
            control_nodes: control_nodes.to_vec(),
        }
    }

    /// The name of the link that points directly to the file and ends in one number, as SONAMEs of
    /// the driver do; without one, the file's own name.
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

    /// The links in the library's folder that resolve to it, the direct ones first.
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
