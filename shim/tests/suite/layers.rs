//! The files of `shim/cuda` and of `simulator/cuda` use only those that their `lib.rs` lists before them. The files in a
//! folder have the folder's place in the list, and do not use each other.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

/// The files' names in the numbered list of `lib.rs`: the words in backticks, from "1." to the end of the list.
fn listed(lib: &str) -> Vec<String> {
    let list = lib
        .lines()
        .skip_while(|line| !line.starts_with("//! 1. "))
        .take_while(|line| *line != "//!");
    let text: String = list.collect::<Vec<_>>().join("\n");
    text.split('`')
        .skip(1)
        .step_by(2)
        .filter(|name| name.chars().all(|c| c.is_ascii_lowercase() || c == '_'))
        .map(str::to_owned)
        .collect()
}

/// The modules of the crate that a source names, by `use` or by path.
fn used(source: &str) -> BTreeSet<String> {
    let code: String = source
        .lines()
        .filter(|line| !line.trim_start().starts_with("//"))
        .collect::<Vec<_>>()
        .join("\n");
    let mut found = BTreeSet::new();
    for rest in code.split("crate::").skip(1) {
        let names = match rest.strip_prefix('{') {
            Some(list) => list.split('}').next().unwrap(),
            None => rest
                .split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
                .next()
                .unwrap(),
        };
        let names = names.split(',').map(str::trim);
        found.extend(names.filter(|name| !name.is_empty()).map(str::to_owned));
    }
    found
}

/// Every source below `folder` but `lib.rs`, with the name of its place in the list.
fn sources(folder: &Path) -> Vec<(String, PathBuf)> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
        if path.is_dir() {
            let nested = sources(&path).into_iter();
            found.extend(nested.map(|(_, file)| (name.clone(), file)));
        } else if name != "lib" {
            found.push((name, path));
        }
    }
    found
}

/// The wrong uses in a crate whose sources are in `folder`, and the number of uses.
fn check(folder: &Path) -> (Vec<String>, usize) {
    let order = listed(&fs::read_to_string(folder.join("lib.rs")).unwrap());
    let place = |name: &str| order.iter().position(|listed| listed == name);
    let (mut wrong, mut uses) = (Vec::new(), 0);
    for (name, path) in sources(folder) {
        let file = path.strip_prefix(folder).unwrap().display().to_string();
        let Some(own) = place(&name) else {
            wrong.push(format!("{name} is not listed in lib.rs"));
            continue;
        };
        let source = fs::read_to_string(&path).unwrap();
        let is_nested = path.parent() != Some(folder);
        if is_nested && source.contains("super::") {
            wrong.push(format!("{file} uses another file of its folder"));
        }
        for used in used(&source) {
            uses += 1;
            // A macro may refer to its own file by its path.
            let is_own = used == name && !is_nested;
            if !is_own && place(&used).is_none_or(|used| used >= own) {
                wrong.push(format!(
                    "{file} uses {used}, which does not stand before it"
                ));
            }
        }
    }
    (wrong, uses)
}

#[test]
fn no_file_uses_one_that_stands_above_it() {
    for folder in ["../cuda/src", "../../simulator/cuda/src"] {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder);
        let (wrong, uses) = check(&folder);
        assert!(uses > 50, "{}: {uses} uses were found", folder.display());
        assert!(
            wrong.is_empty(),
            "{}:\n{}",
            folder.display(),
            wrong.join("\n")
        );
    }
}
