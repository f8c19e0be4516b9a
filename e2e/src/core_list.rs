//! Checks the list of the suite's core, `core.txt`, and that each example has its tests.

use std::collections::BTreeSet;
use std::fs;

use tranche_api::tier::Tier;

const CORE: &str = include_str!("../core.txt");
const SPECIFICATION: &str = include_str!("../../SPECIFICATION.md");

/// The core's tests, as `file::name`.
fn core() -> Vec<&'static str> {
    let lines = CORE.lines().filter(|line| !line.starts_with('#'));
    lines.filter(|line| !line.is_empty()).collect()
}

/// All tests of the suite, as `file::name`.
fn suite() -> anyhow::Result<BTreeSet<String>> {
    let mut tests = BTreeSet::new();
    for file in fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/suite"))? {
        let path = file?.path();
        let stem = path.file_stem().unwrap_or_default().to_string_lossy();
        let text = fs::read_to_string(&path)?;
        let functions = text.split("#[test]\nfn ").skip(1);
        let names = functions.filter_map(|rest| rest.split_once('('));
        tests.extend(names.map(|(name, _)| format!("{stem}::{name}")));
    }
    Ok(tests)
}

#[test]
fn every_test_of_the_core_is_in_the_suite_once() -> anyhow::Result<()> {
    let suite = suite()?;
    assert!(suite.len() > 100, "{suite:?}");
    let mut seen = BTreeSet::new();
    for test in core() {
        assert!(suite.contains(test), "core.txt: there is no {test}");
        assert!(seen.insert(test), "core.txt: {test} is there twice");
    }
    Ok(())
}

/// Of the suite, and of the tests without a node.
#[test]
fn every_example_has_its_tests() -> anyhow::Result<()> {
    const OF_THE_API: &str = include_str!("../api/tests/suite/examples.rs");
    let suite = suite()?;
    for entry in fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/../examples"))? {
        let example = entry?.file_name().to_string_lossy().into_owned();
        if !example.starts_with(|first: char| first.is_ascii_digit()) {
            continue;
        }
        let test = format!("examples::example_{}", example.replace('-', "_"));
        assert!(suite.contains(&test), "{example}: there is no {test}");
        let name = format!("\"{example}\"");
        assert!(OF_THE_API.contains(&name), "e2e/api: no {example}");
    }
    Ok(())
}

#[test]
fn every_tier_is_in_the_core() {
    for tier in Tier::ALL {
        let heading = format!("\n# {tier}\n");
        let tests = CORE
            .split_once(&heading)
            .map(|(_, tests)| tests.trim_start());
        let has_one = tests.is_some_and(|tests| !tests.starts_with('#'));
        assert!(has_one, "core.txt: no test of the tier {tier}");
    }
}

/// For each section of SPECIFICATION.md, the core has at least one of the tests that the section names.
#[test]
fn every_section_of_promises_is_in_the_core() {
    let core = core();
    for section in SPECIFICATION.split("\n## ").skip(1) {
        let heading = section.lines().next().unwrap_or_default();
        let cells = section.split("e2e `").skip(1);
        let named: Vec<_> = cells
            .flat_map(|cell| cell.split(['`', ',', ' ', ';', '|']))
            .filter_map(|name| name.split_once(".rs"))
            .map(|(file, test)| format!("{}{test}", file.rsplit('/').next().unwrap_or(file)))
            .collect();
        let is_in_the_core = named.iter().any(|name| {
            core.iter()
                .any(|test| *test == name || test.starts_with(&format!("{name}::")))
        });
        assert!(
            named.is_empty() || is_in_the_core,
            "core.txt has no test of the section {heading:?}: {named:?}"
        );
    }
}
