//! Device nodes, as `nvidia-modprobe` makes them.

use std::fs;
use std::path::Path;

use anyhow::Context as _;
use rustix::fs::{CWD, FileType, Mode, makedev, mknodat};
use rustix::io::Errno;

/// The character device major that the kernel reserves for NVIDIA.
const MAJOR: u32 = 195;
/// A usual major of nvidia-uvm, which the kernel chooses at load time.
const UVM_MAJOR: u32 = 510;

/// Makes `dev/nvidia0` to `dev/nvidia<count-1>` and the control nodes below `root`, unless they exist. Without the
/// right to make devices, as in a container, it makes regular files: the simulator only tests whether they can be opened.
pub fn make(root: &Path, count: u32) -> anyhow::Result<()> {
    let folder = root.join("dev");
    fs::create_dir_all(&folder).with_context(|| format!("{}", folder.display()))?;
    let gpus = (0..count).map(|minor| (format!("nvidia{minor}"), MAJOR, minor));
    let control = [
        ("nvidiactl", MAJOR, 255),
        ("nvidia-modeset", MAJOR, 254),
        ("nvidia-uvm", UVM_MAJOR, 0),
        ("nvidia-uvm-tools", UVM_MAJOR, 1),
    ]
    .map(|(name, major, minor)| (name.to_owned(), major, minor));
    for (name, major, minor) in gpus.chain(control) {
        let path = folder.join(&name);
        make_one(&path, major, minor).with_context(|| format!("{}", path.display()))?;
    }
    Ok(())
}

/// Makes the node of one GPU, unless it exists.
pub fn make_gpu(root: &Path, minor: u32) -> anyhow::Result<()> {
    let path = root.join(format!("dev/nvidia{minor}"));
    make_one(&path, MAJOR, minor).with_context(|| format!("{}", path.display()))
}

/// Removes the node of one GPU, if it exists.
pub fn remove(root: &Path, minor: u32) -> anyhow::Result<()> {
    let path = root.join(format!("dev/nvidia{minor}"));
    match fs::remove_file(&path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("{}", path.display()))
        }
        _ => Ok(()),
    }
}

fn make_one(path: &Path, major: u32, minor: u32) -> std::io::Result<()> {
    make_with_mode(path, major, minor, 0o666)
}

/// Makes a node, unless it exists.
pub fn make_with_mode(path: &Path, major: u32, minor: u32, mode: u32) -> std::io::Result<()> {
    let mode = Mode::from_raw_mode(mode);
    match mknodat(
        CWD,
        path,
        FileType::CharacterDevice,
        mode,
        makedev(major, minor),
    ) {
        Ok(()) => {}
        Err(Errno::EXIST) => return Ok(()),
        Err(Errno::PERM | Errno::ACCESS) => {
            fs::write(path, "a node of a simulated GPU\n")?;
        }
        Err(error) => return Err(error.into()),
    }
    // The umask may have removed the write bits.
    rustix::fs::chmod(path, mode)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use tranche_simulator_machine::DriverRoot;

    #[test]
    fn nodes_can_be_opened_and_made_twice() {
        let folder = tempfile::tempdir().unwrap();
        let root = DriverRoot::new(folder.path());
        for _ in 0..2 {
            make(folder.path(), 2).unwrap();
        }
        for name in [
            "nvidia0",
            "nvidia1",
            "nvidiactl",
            "nvidia-uvm",
            "nvidia-uvm-tools",
        ] {
            assert!(root.has_node(name), "{name}");
        }
        assert!(!root.has_node("nvidia2"));
    }
}
