//! The lists of docs/troubleshooting.md have exactly the messages of the product.
use tranche_docs::{repository, sources, troubleshooting};

#[test]
fn every_message_is_on_the_page() {
    let page = std::fs::read_to_string(repository().join("docs/troubleshooting.md")).unwrap();
    let messages = sources::messages(&repository()).unwrap();
    assert!(messages.len() > 300, "{} messages", messages.len());
    let updated = troubleshooting::updated(&page, &messages).unwrap();
    for (is, expected) in page.lines().zip(updated.lines()) {
        assert_eq!(
            is, expected,
            "docs/troubleshooting.md: run `cargo run -p tranche-docs`, and see whether the section's advice fits"
        );
    }
    assert_eq!(page.lines().count(), updated.lines().count());
}

/// A section needs advice: the reader already has the texts of its list.
#[test]
fn every_section_says_what_to_do() {
    let page = std::fs::read_to_string(repository().join("docs/troubleshooting.md")).unwrap();
    for section in page.split("\n## ").skip(1) {
        let (heading, rest) = section.split_once('\n').unwrap();
        let advice = rest.split("<!--").next().unwrap();
        assert!(advice.split_whitespace().count() >= 15, "{heading}");
    }
}

#[test]
fn every_exception_is_used_and_has_a_reason() {
    let messages = sources::messages(&repository()).unwrap();
    for (what, reason) in troubleshooting::UNSEEN {
        let used = messages
            .iter()
            .any(|(message, file)| message == what || file.starts_with(what));
        assert!(used, "UNSEEN has {what:?}, which is nowhere");
        assert!(reason.split(' ').count() >= 3, "{what:?}");
    }
}

/// Names in the same files that are no reasons.
const NO_REASONS: [&str; 6] = [
    "FindDriver",
    "GpuNode",
    "GpuNodeWriter",
    "ProviderSearch",
    "ResourceClaim",
    "StatusWriter",
];

#[test]
fn every_reason_of_an_event_or_a_condition_is_on_the_page() {
    let page = std::fs::read_to_string(repository().join("docs/troubleshooting.md")).unwrap();
    let reasons = sources::reasons(&repository()).unwrap();
    assert!(reasons.len() > 25, "{reasons:?}");
    let missing: Vec<_> = reasons
        .iter()
        .filter(|it| !NO_REASONS.contains(&it.as_str()) && !page.contains(&format!("`{it}`")))
        .collect();
    assert!(
        missing.is_empty(),
        "docs/troubleshooting.md lacks {missing:?}"
    );
}

/// Crates whose messages only developers see.
const NO_PRODUCT: [&str; 12] = [
    "bench",
    "docs/check",
    "driver/allocator-oracle",
    "e2e",
    "e2e/api",
    "e2e/workload",
    "shim/tests",
    "simulator/cuda",
    "simulator/machine",
    "simulator/nvml",
    "simulator/pci",
    "simulator/persistenced",
];

#[test]
fn every_crate_of_the_product_is_searched() {
    let manifest = std::fs::read_to_string(repository().join("Cargo.toml")).unwrap();
    let members = manifest
        .split_once("members = [")
        .unwrap()
        .1
        .split_once(']')
        .unwrap()
        .0;
    for member in members.split('"').skip(1).step_by(2) {
        let source = format!("{member}/src");
        let is_product = sources::FOLDERS.contains(&source.as_str());
        assert!(
            is_product != NO_PRODUCT.contains(&member),
            "{member} belongs either to FOLDERS of docs/check/src/sources.rs or to NO_PRODUCT"
        );
    }
}
