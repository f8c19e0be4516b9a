//! Gives the library the driver's SONAME and binds its own symbols to itself, as the real driver does. If another library with
//! the same symbols, such as a shim, is loaded before it, its calls and `cuGetProcAddress` must not lead to that one.
//!
//! It also makes two lists from `shim/cuda/symbols.txt`, which has every function of NVIDIA's drivers and headers with the CUDA
//! version that added it: `table.rs`, the functions for each name of `cuGetProcAddress`, and `absent.rs`, the functions that
//! are not simulated. `simulator/oracle` compares the built library with NVIDIA's.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::{env, fs};

const SYMBOLS: &str = "../../shim/cuda/symbols.txt";
/// Functions that NVIDIA's headers declare and only Tegra's driver exports.
const TEGRA: &str = "cuEventCreateFromEGLSync";

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libcuda.so.1");
    println!("cargo::rustc-cdylib-link-arg=-Wl,-Bsymbolic");
    println!("cargo::rerun-if-changed={SYMBOLS}");
    println!("cargo::rerun-if-changed=src");
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("set by cargo"));
    let symbols = fs::read_to_string(SYMBOLS).expect("the list of functions");
    let functions: Vec<(&str, Option<u32>)> = symbols
        .lines()
        .filter_map(|line| match *line.split(' ').collect::<Vec<_>>() {
            // NVIDIA's debugger interface is not part of CUDA.
            [name, ..] if name == TEGRA || name.starts_with("cudbg") => None,
            [name, _, since, _] => Some((name, number(since))),
            _ => None,
        })
        .collect();
    fs::write(out.join("table.rs"), table(&functions)).expect("OUT_DIR is writable");
    let mut simulated = BTreeSet::new();
    collect_functions(Path::new("src"), &mut simulated);
    let absent: Vec<&str> = functions
        .iter()
        .map(|(name, _)| *name)
        .filter(|name| !simulated.contains(*name))
        .collect();
    let absent = format!(
        "absent! {{ Code::NOT_SUPPORTED.0 => {} }}",
        absent.join(" ")
    );
    fs::write(out.join("absent.rs"), absent).expect("OUT_DIR is writable");
}

/// 12040 for `12.4`; `None` for a function that `cuGetProcAddress` does not know.
fn number(since: &str) -> Option<u32> {
    let (major, minor) = since.split_once('.')?;
    Some(1000 * major.parse::<u32>().ok()? + 10 * minor.parse::<u32>().ok()?)
}

/// The name by which `cuGetProcAddress` knows a function, and whether it is the form for per-thread default streams.
fn base(function: &str) -> (&str, bool) {
    let legacy = function
        .strip_suffix("_ptsz")
        .or(function.strip_suffix("_ptds"));
    let form = legacy.unwrap_or(function);
    let name = match form.rsplit_once("_v") {
        Some((name, version)) if version.bytes().all(|byte| byte.is_ascii_digit()) => name,
        _ => form,
    };
    (name, legacy.is_some())
}

/// The forms of one name by the version that added each.
#[derive(Default)]
struct Forms<'a> {
    legacy: BTreeMap<u32, &'a str>,
    per_thread: BTreeMap<u32, &'a str>,
}

fn table(functions: &[(&str, Option<u32>)]) -> String {
    let mut names: BTreeMap<&str, Forms> = BTreeMap::new();
    let (mut declarations, mut rows) = (String::new(), String::new());
    for (function, since) in functions {
        let Some(since) = since else {
            continue;
        };
        let (name, is_per_thread) = base(function);
        let forms = names.entry(name).or_default();
        let versions = if is_per_thread {
            &mut forms.per_thread
        } else {
            &mut forms.legacy
        };
        let other = versions.insert(*since, function);
        assert!(
            other.is_none(),
            "{function} and {other:?} came in one version"
        );
        write!(declarations, "pub fn {function}();").expect("to memory");
    }
    for (name, Forms { legacy, per_thread }) in &names {
        // A version without a separate form for per-thread streams has one form for both.
        let mut both = per_thread.clone();
        if let Some((first, _)) = per_thread.first_key_value() {
            for (since, function) in legacy.range(first..) {
                both.entry(*since).or_insert(function);
            }
        }
        let (legacy, per_thread) = (versions(legacy), versions(&both));
        let row = format!(
            r#"Entry {{ name: "{name}", legacy: &[{legacy}], per_thread: &[{per_thread}] }},"#
        );
        rows.push_str(&row);
    }
    format!(
        "mod symbols {{ unsafe extern \"C\" {{ {declarations} }} }}\n\
         /// By name.\npub static TABLE: &[Entry] = &[{rows}];\n"
    )
}

fn versions(forms: &BTreeMap<u32, &str>) -> String {
    let mut code = String::new();
    for (since, function) in forms {
        let address = format!("Address(symbols::{function} as *const c_void)");
        write!(code, "Version {{ since: {since}, function: {address} }},").expect("to memory");
    }
    code
}

/// The functions that the sources define: what follows `fn`, and the second name of `fn ONE, OTHER [`.
fn collect_functions(folder: &Path, to: &mut BTreeSet<String>) {
    for entry in fs::read_dir(folder).expect("a folder of sources") {
        let path = entry.expect("a folder of sources").path();
        if path.is_dir() {
            collect_functions(&path, to);
            continue;
        }
        let source = fs::read_to_string(&path).expect("a source file");
        for after in source.split("fn cu").skip(1) {
            let names = after.split(['(', '[']).next().unwrap_or_default();
            let is_identifier = |name: &&str| {
                name.starts_with(|first: char| first.is_ascii_uppercase())
                    && name
                        .bytes()
                        .all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
            };
            to.extend(
                format!("cu{names}")
                    .split(',')
                    .map(str::trim)
                    .filter(|name| {
                        name.strip_prefix("cu")
                            .is_some_and(|rest| is_identifier(&rest))
                    })
                    .map(str::to_owned),
            );
        }
    }
}
