//! Sizes of the parts, on disk and in memory.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context;

use crate::process::{self, Process, mib};
use crate::row::Row;

/// The folders of the built parts.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Cargo's target folder, after `make image`
    #[arg(long, default_value = "target")]
    target: PathBuf,
}

const KIB: f64 = 1024.0;
const MB: f64 = 1e6;

/// Sizes of the built files.
pub fn on_disk(args: &Args) -> anyhow::Result<Vec<Row>> {
    let image = args.target.join("image/tranche");
    let of = |id: &str, path: &str, unit: f64| {
        let bytes = size_of(&image.join(path))?;
        anyhow::Ok(Row::new(id, bytes / unit))
    };
    Ok(vec![
        of("plugin-size", "usr/bin/tranche-kubelet-plugin", MB)?,
        of("controller-size", "usr/bin/tranche-controller", MB)?,
        of("image-size", "", MB)?,
        of("hook-size", "usr/lib/tranche/tranche-cdi-hook", KIB)?,
        of("shim-cuda-size", "usr/lib/tranche/libcuda.so.1", KIB)?,
        of("shim-nvml-size", "usr/lib/tranche/libnvidia-ml.so.1", KIB)?,
    ])
}

/// Bytes of a file, or of all files of a tree.
#[allow(clippy::cast_precision_loss)] // far below 2^52
fn size_of(path: &Path) -> anyhow::Result<f64> {
    fn sum(path: &Path) -> std::io::Result<u64> {
        let there = fs::symlink_metadata(path)?;
        if !there.is_dir() {
            return Ok(there.len());
        }
        fs::read_dir(path)?.map(|entry| sum(&entry?.path())).sum()
    }
    let bytes = sum(path).with_context(|| format!("{}: run make image", path.display()))?;
    Ok(bytes as f64)
}

/// Memory of the processes on this node: now, and the peak since their start.
pub fn in_memory() -> anyhow::Result<Vec<Row>> {
    let plugin = largest("tranche-kubelet-plugin")?.context("no plugin runs on this node")?;
    let mut rows = vec![
        Row::new("plugin-memory", plugin.now),
        Row::new("plugin-memory-peak", plugin.peak),
    ];
    if let Some(controller) = largest("tranche-controller")? {
        rows.push(
            Row::new("controller-memory", controller.now).beside("its peak", controller.peak),
        );
    }
    Ok(rows)
}

/// MiB.
struct Resident {
    now: f64,
    peak: f64,
}

/// The memory of the process with this name that has the most.
fn largest(program: &str) -> anyhow::Result<Option<Resident>> {
    let memories = process::running(program)?
        .into_iter()
        .map(Process::memory)
        .collect::<Result<Vec<_>, _>>()?;
    Ok(memories
        .into_iter()
        .max_by_key(|memory| memory.resident)
        .map(|memory| Resident {
            now: mib(memory.resident),
            peak: mib(memory.peak),
        }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tree_is_the_sum_of_its_files_or_says_how_to_get_it() {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("a")).unwrap();
        fs::write(dir.path().join("a/b"), [0; 700]).unwrap();
        fs::write(dir.path().join("c"), [0; 300]).unwrap();
        assert!((size_of(dir.path()).unwrap() - 1000.0).abs() < 0.5);
        let error = size_of(&dir.path().join("d")).unwrap_err();
        assert!(error.to_string().contains("make image"), "{error}");
    }
}
