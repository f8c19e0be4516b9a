//! The files of `shim/cuda` use only those that its `lib.rs` lists before them.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;

/// The files' names in the numbered list of `lib.rs`: what stands in backticks, from "1." to the end of the list.
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
        found.extend(names.split(',').map(|name| name.trim().to_owned()));
    }
    found
}

#[test]
fn no_file_uses_one_that_stands_above_it() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../cuda/src");
    let order = listed(&fs::read_to_string(folder.join("lib.rs")).unwrap());
    let place = |name: &str| order.iter().position(|listed| listed == name);
    let (mut wrong, mut edges) = (Vec::new(), 0);
    for entry in fs::read_dir(&folder).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_stem().unwrap().to_str().unwrap();
        if name == "lib" {
            continue;
        }
        let Some(own) = place(name) else {
            wrong.push(format!("{name} is not listed in lib.rs"));
            continue;
        };
        for used in used(&fs::read_to_string(&path).unwrap()) {
            edges += 1;
            // Its own macros name a file by its path.
            if used != name && place(&used).is_none_or(|used| used >= own) {
                wrong.push(format!(
                    "{name} uses {used}, which does not stand before it"
                ));
            }
        }
    }
    assert!(edges > 50, "{edges} uses were found");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}
