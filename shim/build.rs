//! The build script of both libraries: makes the symbol tables from `symbols.txt`, and links against
//! an old C library.
//!
//! A library that is loaded into every process of a container must load under any version of the C
//! library. So it is not linked against this machine's, but against stand-ins that have
//! exactly the symbols of `glibc.txt`, in the versions named there.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::{env, fs};

use tranche_shim_coverage::{Class, Coverage};

fn main() {
    let package = PathBuf::from(env::var_os("CARGO_MANIFEST_DIR").expect("set by cargo"));
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("set by cargo"));
    let arch = env::var("CARGO_CFG_TARGET_ARCH").expect("set by cargo");
    let soname = match env::var("CARGO_PKG_NAME").as_deref() {
        Ok("tranche-shim-cuda") => "libcuda.so.1",
        Ok("tranche-shim-nvml") => "libnvidia-ml.so.1",
        other => panic!("{other:?} is no library of the shim"),
    };

    println!("cargo::rerun-if-changed=../build.rs");
    println!("cargo::rerun-if-changed=../glibc.txt");
    let coverage = match soname {
        "libcuda.so.1" => Coverage::cuda(),
        _ => Coverage::nvml(),
    }
    .unwrap_or_else(|problem| panic!("{problem}"));
    generate_tables(&coverage, &out.join("symbols.rs"));
    generate_addresses(&coverage, &out.join("handled.s"));
    if arch != "x86_64" {
        // The libraries' `compile_error!` reports it.
        return;
    }
    // Binds our references to our own symbols inside the library.
    println!("cargo::rustc-cdylib-link-arg=-Wl,-Bsymbolic");
    if env::var("PROFILE").as_deref() == Ok("debug") {
        // A debug build unwinds and contains std: it is only compiled, never loaded.
        return;
    }
    stand_ins(&package.join("../glibc.txt"), &out);

    println!("cargo::rustc-link-search=native={}", out.display());
    for argument in [
        "-nostdlib",
        "-nostartfiles",
        &format!("-Wl,-soname,{soname}"),
        "-Wl,-z,now",
        // Few segments, because every process of a container maps them. Almost nothing could be made read-only after
        // loading: the table of the driver's functions is filled as they are called.
        "-Wl,-z,norelro",
        "-Wl,--no-rosegment",
        "-Wl,-z,noseparate-code",
        "-Wl,--hash-style=gnu",
        "-Wl,--build-id=none",
        "-Wl,--no-undefined",
        // Nothing unwinds, but unoptimized code of core refers to this symbol.
        "-Wl,--defsym=rust_eh_personality=0",
        "-Wl,--gc-sections",
        "-Wl,--as-needed",
    ] {
        println!("cargo::rustc-cdylib-link-arg={argument}");
    }
}

/// Writes one invocation of `forward!` for the symbols that only forward, the indices of all symbols, and the hashes
/// of the names under which `cuGetProcAddress` knows these.
fn generate_tables(coverage: &Coverage<'_>, to: &Path) {
    let (mut passing, mut handled) = (Vec::new(), Vec::new());
    for row in coverage.rows() {
        match row.class {
            Class::Passes => passing.push(row.symbol),
            _ => handled.push(row.symbol),
        }
    }
    let mut code = String::new();
    writeln!(code, "/// Symbols that only pass through; their indices come first.\npub const PASSING: usize = {};", passing.len()).expect("to memory");
    writeln!(
        code,
        "/// All symbols.\npub const SYMBOLS: usize = {};",
        passing.len() + handled.len()
    )
    .expect("to memory");
    writeln!(code, "/// Each symbol's place in the table.\n#[allow(dead_code, non_upper_case_globals)]\npub mod index {{").expect("to memory");
    for (index, name) in passing.iter().chain(&handled).enumerate() {
        writeln!(code, "    pub const {name}: usize = {index};").expect("to memory");
    }
    writeln!(code, "}}\nforward! {{").expect("to memory");
    for (index, name) in passing.iter().enumerate() {
        writeln!(code, "    {index} {name}").expect("to memory");
    }
    writeln!(code, "}}").expect("to memory");

    // A name with a variant that does more than pass is no such name: a variant of it that nobody knows does not pass.
    let bases = |symbols: &[&str]| {
        symbols
            .iter()
            .map(|name| base(name).to_owned())
            .collect::<BTreeSet<_>>()
    };
    let names = &bases(&passing) - &bases(&handled);
    let hashes: BTreeSet<u32> = names.iter().map(|name| hash(name)).collect();
    assert_eq!(hashes.len(), names.len(), "two names share a hash");
    for name in bases(&handled) {
        assert!(
            !hashes.contains(&hash(&name)),
            "{name} shares a hash with a name that passes"
        );
    }
    writeln!(code, "/// FNV-1a of the names, without version and stream suffix, of which all variants pass, sorted.\npub static PASSING_NAMES: [u32; {}] = {:?};", hashes.len(), hashes.iter().collect::<Vec<_>>()).expect("to memory");
    fs::write(to, code).expect("OUT_DIR is writable");
}

/// Writes the addresses of our symbols that do more than forward, as distances from the table itself, which need no
/// relocation. So `driver.rs`, which all other files use, need not refer to them.
fn generate_addresses(coverage: &Coverage<'_>, to: &Path) {
    let mut code = String::from(
        ".pushsection .rodata.handled,\"a\",@progbits\n.balign 4\n.globl tranche_handled\n.hidden tranche_handled\n\
         tranche_handled:\n",
    );
    let handled = |row: &&tranche_shim_coverage::Row<'_>| row.class != Class::Passes;
    for row in coverage.rows().iter().filter(handled) {
        writeln!(code, ".long {} - tranche_handled", row.symbol).expect("to memory");
    }
    code.push_str(".popsection\n");
    fs::write(to, code).expect("OUT_DIR is writable");
}

/// The name by which `cuGetProcAddress` knows a symbol.
fn base(symbol: &str) -> &str {
    let symbol = symbol
        .strip_suffix("_ptsz")
        .or(symbol.strip_suffix("_ptds"))
        .unwrap_or(symbol);
    match symbol.rsplit_once("_v") {
        Some((name, version)) if version.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => symbol,
    }
}

fn hash(name: &str) -> u32 {
    name.bytes().fold(0x811c_9dc5, |hash, byte| {
        (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193)
    })
}

/// Makes libraries for the linker with the symbols of `glibc.txt` and without code.
fn stand_ins(list: &Path, out: &Path) {
    let mut libraries: BTreeMap<&str, BTreeMap<&str, Vec<&str>>> = BTreeMap::new();
    let text = fs::read_to_string(list).expect("glibc.txt is readable");
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let mut fields = line.split(' ');
        let (Some(symbol), Some(version), Some(library), None) =
            (fields.next(), fields.next(), fields.next(), fields.next())
        else {
            panic!("glibc.txt: {line:?} is no symbol, version and library");
        };
        libraries
            .entry(library)
            .or_default()
            .entry(version)
            .or_default()
            .push(symbol);
    }
    for (soname, versions) in libraries {
        let (mut assembly, mut script) = (String::from(".text\n"), String::new());
        for (version, symbols) in &versions {
            writeln!(script, "{version} {{ {}; }};", symbols.join("; ")).expect("to memory");
            for symbol in symbols {
                writeln!(
                    assembly,
                    ".globl {symbol}\n.type {symbol}, @function\n{symbol}: ret"
                )
                .expect("to memory");
            }
        }
        assembly.push_str(".section .note.GNU-stack,\"\",@progbits\n");
        let name = soname.split('.').next().expect("a first part");
        let (source, map) = (
            out.join(format!("{name}.s")),
            out.join(format!("{name}.map")),
        );
        fs::write(&source, assembly).expect("OUT_DIR is writable");
        fs::write(&map, script).expect("OUT_DIR is writable");
        let done = Command::new(env::var_os("CC").unwrap_or_else(|| "cc".into()))
            .args(["-shared", "-nostdlib"])
            .arg(format!(
                "-Wl,-soname,{soname},--version-script={}",
                map.display()
            ))
            .arg("-o")
            .arg(out.join(format!("{name}.so")))
            .arg(&source)
            .status()
            .expect("a C compiler driver (cc) is installed: Rust links with it too");
        assert!(done.success(), "cc could not make a stand-in for {soname}");
    }
}
