//! Lays out a driver root, as a host's package manager does.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use tranche_simulator_machine::Description;
use tranche_simulator_machine::root::{HOST_MARK, LIBRARY_DIR};

use crate::{library_file, nodes};

/// The machine file below a root.
pub const MACHINE_FILE: &str = "etc/nvidia-sim/machine.toml";
const UNITS: [&str; 3] = [
    "nvidia-sim-persistenced.service",
    "nvidia-sim-persistenced.socket",
    "nvidia-sim-pci.service",
];

/// The simulator's machine file for `model`.
pub fn shipped_machine(parts: &Path, model: &str) -> anyhow::Result<PathBuf> {
    let folder = parts.join("machines");
    let file = folder.join(format!("{model}.toml"));
    if file.is_file() && !model.contains('/') {
        return Ok(file);
    }
    let mut known: Vec<String> = fs::read_dir(&folder)
        .with_context(|| format!("{}", folder.display()))?
        .filter_map(|entry| Some(entry.ok()?.path().file_stem()?.to_str()?.to_owned()))
        .collect();
    known.sort();
    bail!(
        "--gpu-model {model}: no such machine file; choose one of {}",
        known.join(", ")
    )
}

/// The driver's own programs, and the daemons.
const PROGRAMS: [&str; 5] = [
    "nvidia-smi",
    "nvidia-cuda-mps-control",
    "nvidia-cuda-mps-server",
    "nvidia-sim-persistenced",
    "nvidia-sim-pci",
];

/// Installs the simulator of the folder `parts` below `root`, with the machine file `machine` and, if `gpus` is given,
/// another number of its GPUs.
pub fn install(parts: &Path, root: &Path, machine: &Path, gpus: Option<u32>) -> anyhow::Result<()> {
    let text = fs::read_to_string(machine).with_context(|| format!("{}", machine.display()))?;
    let text = with_count(&text, gpus).with_context(|| format!("{}", machine.display()))?;
    let description = Description::parse(&text, &machine.display().to_string())?;

    let target = root.join(MACHINE_FILE);
    write(&target, text.as_bytes(), 0o644)?;
    let libraries = root.join(LIBRARY_DIR);
    for name in ["libcuda.so", "libnvidia-ml.so"] {
        let soname = format!("{name}.1");
        let versioned = format!("{name}.{}", description.driver_version);
        let built = parts.join(&soname);
        let mut image = fs::read(&built).with_context(|| format!("{}", built.display()))?;
        adapt(&mut image, name, &description).with_context(|| format!("{}", built.display()))?;
        write(&libraries.join(&versioned), &image, 0o644)?;
        link(&versioned, &libraries.join(&soname))?;
        link(&soname, &libraries.join(name))?;
    }
    for program in PROGRAMS {
        copy(
            &parts.join(program),
            &root.join("usr/bin").join(program),
            0o755,
        )?;
    }
    let units = root.join("usr/lib/systemd/system");
    for unit in UNITS {
        copy(&parts.join("systemd").join(unit), &units.join(unit), 0o644)?;
    }
    // Like `systemctl enable`, but works without a running systemd.
    let wants = root.join("etc/systemd/system/multi-user.target.wants");
    for unit in UNITS {
        link(
            &format!("/usr/lib/systemd/system/{unit}"),
            &wants.join(unit),
        )?;
    }
    fs::create_dir_all(root.join("run/nvidia-persistenced"))?;
    if fs::canonicalize(root)? == Path::new("/") {
        write(&root.join(HOST_MARK), b"", 0o644)?;
    }
    let count = u32::try_from(description.gpu_count()).unwrap_or(u32::MAX);
    nodes::make(root, count)
}

/// Adapts a built library to the machine file's driver.
fn adapt(image: &mut [u8], name: &str, description: &Description) -> anyhow::Result<()> {
    library_file::set_driver_version(image, &description.driver_version)?;
    if name == "libcuda.so" {
        library_file::set_api_level(image, description.cuda_version)?;
    }
    Ok(())
}

/// The machine file's text with another count of its only GPU model.
fn with_count(text: &str, gpus: Option<u32>) -> anyhow::Result<String> {
    let Some(gpus) = gpus else {
        return Ok(text.to_owned());
    };
    let counts: Vec<usize> = text
        .lines()
        .enumerate()
        .filter(|(_, line)| line.trim_start().starts_with("count"))
        .map(|(index, _)| index)
        .collect();
    let [line] = counts[..] else {
        bail!(
            "--gpus needs a machine file with one [[gpu]] that has a count; this one has {}",
            counts.len()
        );
    };
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    lines[line] = format!("count = {gpus}");
    Ok(lines.join("\n") + "\n")
}

fn copy(from: &Path, to: &Path, mode: u32) -> anyhow::Result<()> {
    let content = fs::read(from).with_context(|| format!("{}", from.display()))?;
    write(to, &content, mode)
}

/// Replaces a file by renaming a new one. Processes that have the old file open or mapped keep it.
fn write(path: &Path, content: &[u8], mode: u32) -> anyhow::Result<()> {
    let put = || -> std::io::Result<()> {
        fs::create_dir_all(path.parent().unwrap_or(Path::new("/")))?;
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let fresh = path.with_file_name(format!(".{name}.new"));
        fs::write(&fresh, content)?;
        fs::set_permissions(&fresh, fs::Permissions::from_mode(mode))?;
        fs::rename(&fresh, path)
    };
    put().with_context(|| format!("{}", path.display()))
}

fn link(target: &str, path: &Path) -> anyhow::Result<()> {
    let put = || -> std::io::Result<()> {
        fs::create_dir_all(path.parent().unwrap_or(Path::new("/")))?;
        match fs::remove_file(path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
        symlink(target, path)
    };
    put().with_context(|| format!("{}", path.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn library() -> Vec<u8> {
        library_file::tests::library(&["SIM_CUDA_VERSION", "SIM_DRIVER_VERSION"])
    }

    fn parts() -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        fs::write(at("libcuda.so.1"), library()).unwrap();
        fs::write(at("libnvidia-ml.so.1"), library()).unwrap();
        for name in PROGRAMS {
            fs::write(at(name), name).unwrap();
        }
        for name in ["machines", "systemd"] {
            fs::create_dir(at(name)).unwrap();
        }
        for unit in UNITS {
            fs::write(at("systemd").join(unit), "").unwrap();
        }
        fs::write(
            at("machines").join("T4.toml"),
            include_str!("../../machines/T4.toml"),
        )
        .unwrap();
        folder
    }

    #[test]
    fn a_root_has_versioned_files_links_and_nodes() {
        let parts = parts();
        let root = tempfile::tempdir().unwrap();
        let machine = shipped_machine(parts.path(), "T4").unwrap();
        for _ in 0..2 {
            install(parts.path(), root.path(), &machine, Some(3)).unwrap();
        }
        let at = |name: &str| root.path().join(name);
        let installed = at("usr/lib/x86_64-linux-gnu/libcuda.so");
        assert_eq!(
            fs::read_link(&installed).unwrap(),
            Path::new("libcuda.so.1")
        );
        let libcuda = fs::read(&installed).unwrap();
        let data = |image, name| library_file::tests::data(image, name).to_owned();
        assert!(data(&libcuda, "SIM_CUDA_VERSION").starts_with(&12_020u32.to_le_bytes()));
        let nvml = fs::read(at("usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1")).unwrap();
        for library in [&libcuda, &nvml] {
            assert!(data(library, "SIM_DRIVER_VERSION").starts_with(b"535.261.03\0"));
        }
        assert_eq!(
            fs::read_link(at("usr/lib/x86_64-linux-gnu/libcuda.so.1")).unwrap(),
            Path::new("libcuda.so.535.261.03")
        );
        assert!(at("dev/nvidia2").exists() && !at("dev/nvidia3").exists());
        assert_eq!(Description::read(&at(MACHINE_FILE)).unwrap().gpu_count(), 3);
    }

    #[test]
    fn an_unknown_model_names_the_known_ones() {
        let parts = parts();
        let refusal = shipped_machine(parts.path(), "T5").unwrap_err().to_string();
        assert!(refusal.contains("choose one of T4"), "{refusal}");
    }

    #[test]
    fn another_count_needs_one_model() {
        let two = "[[gpu]]\ncount = 1\n[[gpu]]\ncount = 2\n";
        assert!(with_count(two, Some(3)).is_err());
        assert_eq!(with_count(two, None).unwrap(), two);
    }
}
