//! Which entry of a fat binary is charged: the one that the driver loads. The simulated driver chooses by its own rules
//! (`simulator/cuda/src/image.rs`).

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use tranche_shim_tests::{Machine, Probe, cache, probe_path, text};

use crate::cap::BLOCK;
use crate::families::{Case, write};

const DONE: i64 = 0;
const NO_BINARY_FOR_GPU: i64 = 209;
const MIB: u64 = 1 << 20;

const PTX: u16 = 1;
const CUBIN: u16 = 2;
/// Flags of entries: compressed by zstd; `sm_90a`; one that no compiler sets.
const ZSTD: u64 = 0x8000;
const SPECIFIC: u64 = 0x10_0000;
const UNKNOWN: u64 = 0x4000_0000;

/// A fat binary of compressed entries: kind, architecture, flags, and bytes before compression.
fn fat(entries: &[(u16, u32, u64, u64)]) -> Vec<u8> {
    let mut words = Vec::new();
    for &(kind, architecture, flags, bytes) in entries {
        words.extend([
            u64::from(kind) | 0x101 << 16 | 64 << 32,
            8,
            8,
            u64::from(architecture) << 32,
            0,
            flags | ZSTD | 0x11,
            0,
            bytes,
            0,
        ]);
    }
    let header = [0x10_0001_ba55_ed50, words.len() as u64 * 8];
    let all = header.into_iter().chain(words);
    all.flat_map(u64::to_le_bytes).collect()
}

/// 6 MiB for the machine's H100, and more for other GPUs.
fn six() -> [(u16, u32, u64, u64); 5] {
    [
        (CUBIN, 75, 0, 512 * MIB),
        (CUBIN, 80, 0, 256 * MIB),
        (CUBIN, 90, SPECIFIC, 6 * MIB),
        (PTX, 90, 0, 384 * MIB),
        (PTX, 120, 0, 128 * MIB),
    ]
}

/// Writes an image to a file, and its path to the words from 100 on.
fn give(case: &mut Case, image: &[u8]) {
    let file = case.world.folder().join("image.fatbin");
    fs::write(&file, image).unwrap();
    write(&mut case.probe, &file.display().to_string());
}

/// Starts the case's probe again, with an environment.
fn restart(case: &mut Case, variable: (&str, &str)) {
    case.probe.kill();
    let mut command = case.world.command(probe_path());
    let mut probe = Probe::by(command.arg("name").env(variable.0, variable.1));
    probe.must("init");
    probe.must("primary 0");
    // Returns what the former process was charged.
    probe.must("info");
    case.probe = probe;
}

const EAGER: (&str, &str) = ("CUDA_MODULE_LOADING", "EAGER");

#[test]
fn a_fat_binary_is_charged_by_the_entry_for_the_gpu() {
    let mut case = Case::on(Machine::Realistic);
    restart(&mut case, EAGER);
    give(&mut case, &fat(&six()));
    let module = case.probe.get("cuModuleLoad &0 &100");
    case.holds(6 * MIB);
    let library = case.probe.get("cuLibraryLoadFromFile &0 &100 0 0 0 0 0 0");
    assert_eq!(case.share.used() - case.context, 12 * MIB);
    for call in [
        format!("cuLibraryUnload {library}"),
        format!("cuModuleUnload {module}"),
    ] {
        assert_eq!(case.probe.call(&call), DONE, "{call}");
    }
    case.holds(0);
    // What is for other GPUs only is not loaded, and not charged afterwards.
    give(&mut case, &fat(&[(CUBIN, 80, 0, MIB), (PTX, 120, 0, MIB)]));
    for load in [
        "cuModuleLoad &0 &100",
        "cuLibraryLoadFromFile &0 &100 0 0 0 0 0 0",
    ] {
        assert_eq!(case.probe.call(load), NO_BINARY_FOR_GPU, "{load}");
    }
    case.holds(0);
}

/// By the largest entry where the shim cannot know which one the driver loads.
#[test]
fn where_the_choice_is_unknown_the_largest_entry_is_charged() {
    let mut case = Case::on(Machine::Realistic);
    let mut entries = six();
    entries[4].2 = UNKNOWN;
    give(&mut case, &fat(&entries));
    case.probe.get("cuModuleLoad &0 &100");
    assert_eq!(case.share.used() - case.context, 512 * MIB);
    // The driver ignores machine code, or is told how to choose.
    for variable in ["CUDA_FORCE_PTX_JIT", "CUDA_FORCE_JIT"] {
        restart(&mut case, (variable, "1"));
        give(&mut case, &fat(&six()));
        case.probe.get("cuModuleLoad &0 &100");
        assert_eq!(case.share.used() - case.context, 512 * MIB, "{variable}");
    }
    restart(&mut case, ("A", "B"));
    let image = fat(&six());
    let words: Vec<String> = image
        .chunks_exact(8)
        .map(|word| u64::from_le_bytes(word.try_into().unwrap()).to_string())
        .collect();
    case.probe.must(&format!("set 100 {}", words.join(" ")));
    for (option, bytes) in [(7, 6), (9, 6 + 512), (10, 6 + 2 * 512)] {
        case.probe.must(&format!("set 90 {option}"));
        case.probe.get("cuModuleLoadDataEx &0 &100 1 &90 &92");
        assert_eq!(case.share.used() - case.context, bytes * MIB, "{option}");
    }
    case.probe.get("cuLibraryLoadData &0 &100 &90 &92 1 0 0 0");
    assert_eq!(case.share.used() - case.context, (6 + 3 * 512) * MIB);
}

#[test]
fn a_fat_binary_in_nvccs_wrapper_is_loaded_and_charged() {
    let mut case = Case::on(Machine::Realistic);
    restart(&mut case, EAGER);
    let words: Vec<String> = fat(&six())
        .chunks_exact(8)
        .map(|word| u64::from_le_bytes(word.try_into().unwrap()).to_string())
        .collect();
    case.probe.must(&format!("set 100 {}", words.join(" ")));
    // Magic and version, the address, no file name.
    case.probe.must(&format!("set 90 {} 0 0", 0x1_4662_43b1u64));
    case.probe.must("address-of 91 100");
    for (nth, load) in [(1, "cuModuleLoadData"), (2, "cuModuleLoadFatBinary")] {
        case.probe.get(&format!("{load} &0 &90"));
        case.holds(nth * 6 * MIB);
    }
}

/// The folders of packages of NVIDIA's libraries, from PyPI at the first call.
fn packages(names: &[&str]) -> Vec<PathBuf> {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("fetch-libraries");
    let mut command = Command::new(script);
    let done = command
        .arg(cache().join("cuda-libraries"))
        .args(names)
        .output()
        .unwrap();
    assert!(done.status.success(), "{}", text(&done.stderr));
    text(&done.stdout).lines().map(PathBuf::from).collect()
}

fn number(bytes: &[u8], at: usize, length: usize) -> usize {
    let found = bytes[at..at + length].iter().rev();
    found.fold(0, |sum, &byte| sum << 8 | usize::from(byte))
}

/// The fat binaries of a library: its section `.nv_fatbin`.
fn fat_binaries(library: &[u8]) -> Vec<&[u8]> {
    let (table, count, names) = (
        number(library, 0x28, 8),
        number(library, 0x3c, 2),
        number(library, 0x3e, 2),
    );
    let section = |nth: usize| &library[table + 64 * nth..][..64];
    let names = &library[number(section(names), 0x18, 8)..];
    let is_code = |nth: &usize| names[number(section(*nth), 0, 4)..].starts_with(b".nv_fatbin\0");
    let Some(nth) = (0..count).find(is_code) else {
        return Vec::new();
    };
    let (at, length) = (number(section(nth), 0x18, 8), number(section(nth), 0x20, 8));
    let mut rest = &library[at..at + length];
    let mut found = Vec::new();
    while rest.len() >= 16 {
        let length = number(rest, 6, 2) + number(rest, 8, 8);
        if length == 0 {
            // Padding.
            rest = &rest[8..];
            continue;
        }
        assert!(rest.starts_with(&0xba55_ed50u32.to_le_bytes()));
        found.push(&rest[..length]);
        rest = &rest[length.next_multiple_of(8).min(rest.len())..];
    }
    found
}

/// Loads every fat binary of every library of some packages, each library in a process of its own. None is refused for
/// its size, and the share is charged at least what the GPU holds, and not much more.
fn are_charged_as_they_are_loaded(names: &[&str]) {
    let mut case = Case::on(Machine::Realistic);
    let mut loaded = 0;
    for package in packages(names) {
        let libraries = fs::read_dir(&package).unwrap();
        let mut libraries: Vec<PathBuf> = libraries.map(|file| file.unwrap().path()).collect();
        libraries.sort();
        for library in libraries {
            restart(&mut case, EAGER);
            let bytes = fs::read(&library).unwrap();
            let mut count = 0;
            for image in fat_binaries(&bytes) {
                give(&mut case, image);
                match case.probe.call("cuModuleLoad &0 &100") {
                    DONE => count += 1,
                    code => assert_eq!(code, NO_BINARY_FOR_GPU, "{}", library.display()),
                }
            }
            let held = case.world.node().gpus()[0].used - case.context;
            let charged = case.share.used() - case.context;
            println!(
                "{}: {count} loaded, {} MiB charged, {} MiB held",
                library.display(),
                charged / MIB,
                held / MIB
            );
            // Variables and code have blocks of their own.
            let most = held + held / 10 + 2 * BLOCK;
            assert!(
                (held..=most).contains(&charged),
                "{}: {charged} {held}",
                library.display()
            );
            assert!(charged < 512 * MIB, "{}: {charged}", library.display());
            loaded += count;
        }
    }
    assert!(loaded > 0);
}

#[test]
fn nvidias_curand_is_charged_as_it_is_loaded() {
    are_charged_as_they_are_loaded(&["nvidia-curand-cu12", "nvidia-curand"]);
}

#[test]
#[ignore = "downloads 2.9 GB: make nightly"]
fn nvidias_large_libraries_are_charged_as_they_are_loaded() {
    are_charged_as_they_are_loaded(&[
        "nvidia-cusparse-cu12",
        "nvidia-cusparse",
        "nvidia-cublas-cu12",
        "nvidia-cublas",
        "nvidia-cudnn-cu12",
        "nvidia-cudnn-cu13",
    ]);
}
