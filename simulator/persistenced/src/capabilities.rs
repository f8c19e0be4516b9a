//! The files and device nodes of MIG's capabilities: those of a real driver below `/proc/driver/nvidia/capabilities`, and
//! those that `nvidia-modprobe` makes in `/dev/nvidia-caps`. They follow the instances of the page.

use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::Context as _;
use tranche_simulator_machine::mig::capability::{self, Capability, MAJOR, NODES};
use tranche_simulator_machine::{DriverRoot, Shared};

use crate::nodes;

/// The capabilities that exist: those of MIG if a GPU has MIG modes, and those of each instance.
fn existing(shared: &Shared) -> Vec<Capability> {
    let mut all = Vec::new();
    if shared.gpus().iter().any(|gpu| gpu.model().is_some()) {
        all.extend([Capability::Config, Capability::Monitor]);
    }
    for gpu in shared.gpus() {
        for instance in gpu.gpu_instances() {
            all.push(Capability::GpuInstance(gpu.minor, instance.id));
            let compute = gpu.compute_instances(instance).into_iter();
            all.extend(
                compute.map(|it| Capability::ComputeInstance(gpu.minor, instance.id, it.id)),
            );
        }
    }
    all
}

/// Makes the files and nodes of all capabilities that exist, and removes all others.
pub fn update(root: &DriverRoot, shared: &Shared) -> anyhow::Result<()> {
    let capabilities = existing(shared);
    let devices = root.path().join("dev").join(NODES);
    let files = root.proc_driver().join("nvidia/capabilities");
    let mut kept = BTreeSet::new();
    for it in &capabilities {
        let file = files.join(it.file());
        write(&file, &it.content(), it.mode()).with_context(|| format!("{}", file.display()))?;
        let node = root.path().join("dev").join(it.node());
        fs::create_dir_all(&devices).with_context(|| format!("{}", devices.display()))?;
        nodes::make_with_mode(&node, MAJOR, it.minor(), it.mode())
            .with_context(|| format!("{}", node.display()))?;
        kept.extend([file, node]);
    }
    for folder in [&devices, &files] {
        remove_others(folder, &kept).with_context(|| format!("{}", folder.display()))?;
    }
    if !capabilities.is_empty() {
        let minors = root.proc_driver().join("nvidia-caps/mig-minors");
        write(&minors, &capability::minors(), 0o444)
            .with_context(|| format!("{}", minors.display()))?;
    }
    Ok(())
}

fn write(path: &Path, content: &str, mode: u32) -> std::io::Result<()> {
    use std::os::unix::fs::PermissionsExt as _;
    if fs::read_to_string(path).is_ok_and(|present| present == content) {
        return Ok(());
    }
    fs::create_dir_all(path.parent().unwrap_or(Path::new("/")))?;
    let fresh = path.with_extension("new");
    fs::write(&fresh, content)?;
    fs::set_permissions(&fresh, fs::Permissions::from_mode(mode))?;
    fs::rename(&fresh, path)
}

/// Removes the files below `folder` that are not `kept`, and the folders that become empty.
fn remove_others(folder: &Path, kept: &BTreeSet<PathBuf>) -> std::io::Result<()> {
    let entries = match fs::read_dir(folder) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        entries => entries?,
    };
    for entry in entries {
        let entry = entry?;
        let path = entry.path();
        if entry.file_type()?.is_dir() {
            remove_others(&path, kept)?;
            if fs::read_dir(&path)?.next().is_none() {
                fs::remove_dir(&path)?;
            }
        } else if !kept.contains(&path) {
            fs::remove_file(&path)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_longer_a_capability_is_removed_with_its_folder() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        for name in [
            "mig/config",
            "gpu0/mig/gi1/access",
            "gpu0/mig/gi1/ci0/access",
        ] {
            write(&at(name), "x", 0o444).unwrap();
        }
        remove_others(folder.path(), &BTreeSet::from([at("mig/config")])).unwrap();
        assert!(at("mig/config").exists() && !at("gpu0").exists());
    }
}
