//! CUDA forward compatibility: whether an image's libcuda is to be used in the place of the node's.
//!
//! The package `cuda-compat` puts the user-mode driver of a newer release into an image, which the
//! kernel-mode drivers of some older branches support. The rules are those of NVIDIA's container
//! toolkit (`nvidia-cdi-hook enable-cuda-compat`): an ELF note of the library lists the branches
//! that it supports, and it must be newer than the node's; a library without the note must be of a
//! newer branch.

use std::fs::File;
use std::path::Path;

use object::read::elf::{ElfFile64, SectionHeader as _};
use object::{Endianness, Object as _, ObjectSection as _, ReadCache};
use serde::Deserialize;

use crate::rootfs::{FoundFile, Rootfs, RootfsError, by_descriptor};

/// The folders with an image's libcuda for forward compatibility: that of NVIDIA's packages, and
/// that of the NGC images, whose start-up script makes a link to it.
pub const FOLDERS: [&str; 2] = ["/usr/local/cuda/compat", "/usr/local/cuda/compat/lib.real"];

const NOTE_SECTION: &str = ".note.cuda.fwd_compatibility";
/// In bytes; NVIDIA's have about a hundred.
const LONGEST_NOTE: u64 = 64 << 10;
const NOTE_OWNER: &[u8] = b"NVIDIA Corporation";

/// A driver's version, such as 535.261.03. Its first number is the branch.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct DriverVersion(Vec<u32>);

impl DriverVersion {
    /// Reads two or more numbers, separated by dots.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let numbers = text
            .split('.')
            .map(|number| number.parse().ok())
            .collect::<Option<Vec<u32>>>()?;
        (numbers.len() >= 2).then_some(Self(numbers))
    }

    fn branch(&self) -> u32 {
        self.0[0]
    }
}

/// The note of a library for forward compatibility.
#[derive(Debug, Deserialize, PartialEq, Eq)]
struct Note {
    /// The branches of the kernel-mode driver that support it.
    #[serde(default, rename = "driver")]
    branches: Vec<u32>,
}

/// The image's libcuda that is to be used with the node's driver; `None` if the node's own is to be
/// used.
pub fn usable(root: &Rootfs, node: &DriverVersion) -> Result<Option<FoundFile>, RootfsError> {
    for folder in FOLDERS.map(Path::new) {
        let mut candidates = Vec::new();
        for name in root.list(folder)? {
            let version = name.to_str().and_then(version_of);
            if let (Some(version), Some(file)) = (version, root.find(&folder.join(&name))?)
                && file.path.file_name() == Some(&name)
            {
                candidates.push((version, file));
            }
        }
        // With two it is not clear which one is meant.
        if candidates.len() == 1
            && let Some((version, file)) = candidates.pop()
            && supports(note(&file).as_ref(), &version, node)
        {
            return Ok(Some(file));
        }
    }
    Ok(None)
}

fn version_of(name: &str) -> Option<DriverVersion> {
    DriverVersion::parse(name.strip_prefix("libcuda.so.")?)
}

fn supports(note: Option<&Note>, compat: &DriverVersion, installed: &DriverVersion) -> bool {
    match note {
        Some(note) => note.branches.contains(&installed.branch()) && compat > installed,
        None => compat.branch() > installed.branch(),
    }
}

/// The library's note; `None` also if it cannot be read, as in the toolkit.
fn note(library: &FoundFile) -> Option<Note> {
    let file = File::open(by_descriptor(&library.fd)).ok()?;
    let cache = ReadCache::new(file);
    let elf = ElfFile64::<Endianness, _>::parse(&cache).ok()?;
    let endian = elf.endian();
    let section = elf.section_by_name(NOTE_SECTION)?;
    if section.size() > LONGEST_NOTE {
        return None;
    }
    let mut notes = section.elf_section_header().notes(endian, &cache).ok()??;
    let note = notes.next().ok()??;
    if note.name() != NOTE_OWNER {
        return None;
    }
    let text = note.desc().split(|byte| *byte == 0).next()?;
    serde_json::from_slice(text).ok()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::path::PathBuf;

    use super::*;

    /// The ELF header and the note of a real library, from NVIDIA's container toolkit (testdata/compat,
    /// Apache-2.0).
    const WITH_NOTE: &[u8] = include_bytes!("../testdata/libcuda.so.575.57.08");

    fn version(text: &str) -> DriverVersion {
        DriverVersion::parse(text).unwrap()
    }

    fn image(folder: &str, libraries: &[(&str, &[u8])]) -> (tempfile::TempDir, Rootfs) {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(folder);
        std::fs::create_dir_all(&path).unwrap();
        for (name, content) in libraries {
            std::fs::write(path.join(name), content).unwrap();
            symlink(name, path.join("libcuda.so.1")).ok();
        }
        if folder.starts_with("usr/local/cuda-12") {
            symlink("cuda-12.9", dir.path().join("usr/local/cuda")).unwrap();
        }
        let root = Rootfs::open(dir.path()).unwrap();
        (dir, root)
    }

    fn used(folder: &str, libraries: &[(&str, &[u8])], node: &str) -> Option<PathBuf> {
        let (_dir, root) = image(folder, libraries);
        usable(&root, &version(node)).unwrap().map(|file| file.path)
    }

    #[test]
    fn a_note_names_the_branches_that_support_the_library() {
        let library: &[(&str, &[u8])] = &[("libcuda.so.575.57.08", WITH_NOTE)];
        let folder = "usr/local/cuda-12.9/compat";
        let path = Some("/usr/local/cuda-12.9/compat/libcuda.so.575.57.08".into());
        assert_eq!(used(folder, library, "535.261.03"), path);
        assert_eq!(used(folder, library, "575.57.07"), path);
        // The same version, a newer one, and a branch that the note does not name.
        for node in ["575.57.08", "580.65.06", "555.42.02", "525.60.13"] {
            assert_eq!(used(folder, library, node), None, "{node}");
        }
    }

    #[test]
    fn without_a_note_it_must_be_of_a_newer_branch() {
        for content in [&b""[..], b"no library", &WITH_NOTE[..300]] {
            let library: &[(&str, &[u8])] = &[("libcuda.so.575.57.08", content)];
            let folder = "usr/local/cuda/compat/lib.real";
            assert!(used(folder, library, "570.1.1").is_some());
            assert!(used(folder, library, "575.1.1").is_none());
        }
    }

    #[test]
    fn what_is_no_single_library_in_the_right_folder_is_not_used() {
        let one: &[(&str, &[u8])] = &[("libcuda.so.575.57.08", b"")];
        let two: &[(&str, &[u8])] = &[("libcuda.so.575.57.08", b""), ("libcuda.so.590.1.1", b"")];
        let folder = "usr/local/cuda/compat";
        assert!(used(folder, one, "535.1.1").is_some());
        assert!(used(folder, two, "535.1.1").is_none());
        assert!(used("usr/local/lib", one, "535.1.1").is_none());
        assert!(used(folder, &[("libcuda.so.575", b"")], "535.1.1").is_none());
        assert!(used(folder, &[("libcudart.so.575.1", b"")], "535.1.1").is_none());
    }

    #[test]
    fn versions_are_compared_number_by_number() {
        assert!(version("535.261.03") > version("535.54.03"));
        assert!(version("535.261.3") == version("535.261.03"));
        assert!(version("1000.1") > version("575.57.08"));
        for text in ["", "575", "575.x", "575.57-grid", "575..1", "99999999999.1"] {
            assert_eq!(DriverVersion::parse(text), None, "{text}");
        }
    }
}
