//! Every test that `docs/threat-model.md` names is there.

#![allow(
    clippy::unwrap_used,
    reason = "a test that cannot go on should say where"
)]

use std::path::Path;

#[test]
fn every_test_that_the_threat_model_names_exists() {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let page = std::fs::read_to_string(repository.join("docs/threat-model.md")).unwrap();
    let (mut file, mut count) = (String::new(), 0);
    // `path::test`, and `::test` for another one of the same file.
    for name in page.split('`').skip(1).step_by(2) {
        let Some((path, test)) = name.split_once("::") else {
            continue;
        };
        if !path.is_empty() {
            path.clone_into(&mut file);
        }
        let source = std::fs::read_to_string(repository.join(&file)).unwrap_or_default();
        assert!(source.contains(&format!("fn {test}(")), "{file}::{test}");
        count += 1;
    }
    assert!(count > 40, "{count} tests are named");
}
