//! Plans the command's view of the file system from the CDI specs of its share.
//!
//! A container runtime makes missing mount points in an image; the host's file system must not change.
//! So a folder in which a mount point is missing is *mirrored*: it is covered by a tmpfs with a bind
//! mount of every entry of the folder, in which the mount point can be made. At the end the mirrors are
//! made read-only; the entries stay as writable as they were.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use tranche_driver::cdi::{DriverDevice, container_path};
use tranche_driver::preparation::PAGES;

use crate::wire::{Grant, Link};

/// A file that is mounted at another path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bind {
    /// The path on the host.
    pub from: PathBuf,
    /// The path that the command sees.
    pub to: PathBuf,
    /// Whether the command cannot write to it.
    pub read_only: bool,
}

/// What to mount, in this order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Layout {
    /// Folders to mirror, outer ones first.
    pub mirrors: BTreeSet<PathBuf>,
    /// Our own folder, empty at first.
    pub own: PathBuf,
    /// Links to make in mirrors.
    pub links: Vec<Link>,
    /// Files to mount.
    pub binds: Vec<Bind>,
    /// Device nodes that cannot be opened.
    pub hidden: Vec<PathBuf>,
    /// `NAME=value`, for people.
    pub env: Vec<(String, String)>,
}

/// The host's file system.
pub trait Host {
    /// The path with all links resolved; `None` if there is no such file.
    fn canonical(&self, path: &Path) -> Option<PathBuf>;
}

/// The machine that this runs on.
#[derive(Clone, Copy, Debug)]
pub struct ThisHost;

impl Host for ThisHost {
    fn canonical(&self, path: &Path) -> Option<PathBuf> {
        path.canonicalize().ok()
    }
}

/// Plans the mounts for `grant` on `host`.
pub fn plan(grant: &Grant, host: &impl Host) -> Layout {
    let own = PathBuf::from(container_path::ROOT);
    let mut layout = Layout {
        own: own.clone(),
        ..Layout::default()
    };
    if host.canonical(&own).as_deref() != Some(&*own) {
        layout.mount_point(&own, host);
    }
    let capped = DriverDevice::Capped { pages: PAGES }.name();
    let capped = grant
        .driver
        .devices()
        .iter()
        .filter(|device| device.name == capped);
    let edits = capped
        .chain(grant.share.devices())
        .map(|device| &device.container_edits)
        .chain([
            grant.driver.container_edits(),
            grant.share.container_edits(),
        ]);
    for edits in edits {
        for mount in &edits.mounts {
            let read_only = mount.options.iter().any(|option| option == "ro");
            layout.show(&mount.host_path, &mount.container_path, read_only, host);
        }
        for node in &edits.device_nodes {
            let from = node.host_path.as_ref().unwrap_or(&node.path);
            layout.show(from, &node.path, false, host);
        }
        let pairs = edits.env.iter().filter_map(|pair| pair.split_once('='));
        layout
            .env
            .extend(pairs.map(|(name, value)| (name.to_owned(), value.to_owned())));
    }
    for link in &grant.links {
        // A path on which a file is mounted is not made a link.
        if layout.binds.iter().all(|bind| bind.to != link.path) {
            layout.mount_point(&link.path, host);
            layout.links.push(link.clone());
        }
    }
    layout.hidden = grant
        .hidden
        .iter()
        .filter(|node| host.canonical(node).is_some())
        .cloned()
        .collect();
    layout
}

impl Layout {
    /// Also mounts the shim's library `soname` over each of these files.
    pub fn cover(&mut self, soname: &str, copies: &[PathBuf], host: &impl Host) {
        let at = self.own.join(soname);
        let Some(shim) = self.binds.iter().find(|bind| bind.to == at) else {
            return;
        };
        let from = shim.from.clone();
        for copy in copies {
            let covered =
                |bind: &Bind| bind.from == from && host.canonical(&bind.to).as_ref() == Some(copy);
            if *copy == from || copy.starts_with(&self.own) || self.binds.iter().any(covered) {
                continue;
            }
            self.binds.push(Bind {
                from: from.clone(),
                to: copy.clone(),
                read_only: true,
            });
        }
    }

    fn show(&mut self, from: &str, to: &str, read_only: bool, host: &impl Host) {
        let (from, to) = (PathBuf::from(from), PathBuf::from(to));
        let there = host.canonical(&to);
        if there.is_some() && there == host.canonical(&from) {
            return;
        }
        if there.is_none() && !to.starts_with(&self.own) {
            self.mount_point(&to, host);
        }
        self.binds.push(Bind {
            from,
            to,
            read_only,
        });
    }

    /// Mirrors the folder that lacks the first missing part of the path.
    fn mount_point(&mut self, path: &Path, host: &impl Host) {
        let folder = path.ancestors().skip(1).find_map(|f| host.canonical(f));
        self.mirrors.extend(folder);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    /// The paths of a host and what they resolve to.
    struct Paths(BTreeMap<&'static str, &'static str>);

    impl Host for Paths {
        fn canonical(&self, path: &Path) -> Option<PathBuf> {
            self.0.get(path.to_str()?).map(Into::into)
        }
    }

    const LIB: &str = "/usr/lib/x86_64-linux-gnu";

    fn host(more: &[(&'static str, &'static str)]) -> Paths {
        let base = [
            "/",
            "/usr",
            "/usr/lib",
            LIB,
            "/etc",
            "/dev",
            "/usr/local/bin",
        ];
        Paths(
            base.map(|p| (p, p))
                .into_iter()
                .chain(more.iter().copied())
                .collect(),
        )
    }

    fn grant(mounts: &[(&str, &str, bool)], links: &[(&str, &str)], hidden: &[&str]) -> Grant {
        let mounts: Vec<_> = mounts
            .iter()
            .map(|(from, to, ro)| {
                let option = if *ro { "ro" } else { "rw" };
                serde_json::json!({"hostPath": from, "containerPath": to, "options": [option, "rbind"]})
            })
            .collect();
        let spec = |name: &str, mounts| {
            let spec = serde_json::json!({
                "cdiVersion": "0.5.0", "kind": "gpu.tranche.dev/x",
                "devices": [{"name": name, "containerEdits": {"mounts": mounts, "env": ["A=b=c"]}}],
            });
            serde_json::from_value(spec).unwrap()
        };
        Grant {
            gpu_uuid: "GPU-0".into(),
            stage: "/run/stage".into(),
            driver: spec(
                "full",
                vec![serde_json::json!({"hostPath": "/a", "containerPath": "/b"})],
            ),
            share: spec("share", mounts),
            links: links
                .iter()
                .map(|(path, target)| Link {
                    path: path.into(),
                    target: target.into(),
                })
                .collect(),
            hidden: hidden.iter().map(Into::into).collect(),
        }
    }

    #[test]
    fn only_folders_that_lack_a_mount_point_are_mirrored() {
        let host = host(&[(
            "/usr/lib/x86_64-linux-gnu/libcuda.so.1",
            "/usr/lib/x86_64-linux-gnu/libcuda.so.535",
        )]);
        let grant = grant(
            &[
                (
                    "/s/libcuda.so.1",
                    "/usr/lib/x86_64-linux-gnu/libcuda.so.1",
                    true,
                ),
                ("/s/ld.so.preload", "/etc/ld.so.preload", true),
                ("/s/account", "/usr/lib/tranche/shares/k/account", false),
            ],
            &[],
            &[],
        );
        let layout = plan(&grant, &host);
        let mirrors: Vec<_> = layout.mirrors.iter().map(|p| p.to_str().unwrap()).collect();
        assert_eq!(mirrors, ["/etc", "/usr/lib"]);
        assert_eq!(
            layout.binds.len(),
            3,
            "nothing of the full driver: {layout:?}"
        );
        let read_only: Vec<_> = layout.binds.iter().map(|bind| bind.read_only).collect();
        assert_eq!(read_only, [true, true, false]);
        assert_eq!(layout.env, [("A".to_owned(), "b=c".to_owned())]);
    }

    #[test]
    fn files_at_their_place_are_not_mounted_again() {
        let lib = "/usr/lib/x86_64-linux-gnu/libnvidia-nvvm.so.535";
        let host = host(&[(lib, lib), ("/usr/lib/tranche", "/usr/lib/tranche")]);
        let layout = plan(&grant(&[(lib, lib, true)], &[], &[]), &host);
        assert!(
            layout.binds.is_empty() && layout.mirrors.is_empty(),
            "{layout:?}"
        );
    }

    #[test]
    fn links_replace_links_of_the_host_and_never_mounted_files() {
        let host = host(&[(
            "/usr/lib/x86_64-linux-gnu/libx.so",
            "/usr/lib/x86_64-linux-gnu/libx.so.1",
        )]);
        let cuda = "/usr/lib/x86_64-linux-gnu/libcuda.so.1";
        let links = [
            (cuda, "libcuda.so.535"),
            ("/usr/lib/x86_64-linux-gnu/libx.so", "libx.so.2"),
        ];
        let layout = plan(&grant(&[("/s/cuda", cuda, true)], &links, &[]), &host);
        assert_eq!(layout.links.len(), 1);
        assert!(layout.mirrors.contains(Path::new(LIB)));
    }

    #[test]
    fn copies_of_a_library_are_covered_once_each_and_the_shim_never() {
        let own = "/usr/lib/tranche/libcuda.so.1";
        let (name, file) = (
            "/usr/lib/x86_64-linux-gnu/libcuda.so.1",
            "/usr/lib/x86_64-linux-gnu/libcuda.so.535",
        );
        let host = host(&[
            (name, file),
            (file, file),
            ("/c/libcuda.so", "/c/libcuda.so"),
        ]);
        let shown = [("/s/cuda", own, true), ("/s/cuda", name, true)];
        let mut layout = plan(&grant(&shown, &[], &[]), &host);
        let copies = [file, "/s/cuda", "/c/libcuda.so", "/usr/lib/tranche/x"].map(PathBuf::from);
        layout.cover("libcuda.so.1", &copies, &host);
        layout.cover("libcuda.so.1", &copies, &host);
        layout.cover("libother.so.1", &copies, &host);
        let places: Vec<_> = layout
            .binds
            .iter()
            .map(|bind| bind.to.to_str().unwrap())
            .collect();
        assert_eq!(places, [own, name, "/c/libcuda.so"]);
        assert!(layout.binds[2].read_only && layout.binds[2].from == Path::new("/s/cuda"));
    }

    #[test]
    fn a_missing_nested_folder_is_made_in_the_outermost_mirror() {
        let layout = plan(
            &grant(&[("/a", "/dev/x/y/z", false)], &[], &["/dev/nvidia7"]),
            &host(&[]),
        );
        assert!(layout.mirrors.contains(Path::new("/dev")));
        assert!(
            layout.hidden.is_empty(),
            "a node that is not there need not be hidden"
        );
    }
}
