//! The files of a driver, and GPUs in memory ([`MigGpus`]), for tests.
#![allow(
    clippy::unwrap_used,
    clippy::missing_panics_doc,
    reason = "a test that cannot be set up fails"
)]

mod mig_gpus;

use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;

pub use mig_gpus::MigGpus;

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
