//! ShareConfigs, valid at first, changed anywhere.

use proptest::prelude::*;
use serde_json::{Value, json};
use tranche_api::names::pool;
use tranche_api::share_config::{COMPUTE_FIELDS, FIELDS};

use super::super::Allocation;
use crate::testing::mutation::{any_mutations, mutated};
use crate::testing::{NODE, capped, claim, config};

const WORDS: &[&str] = &[
    "apiVersion",
    "kind",
    "compute",
    "mode",
    "priority",
    "strict",
    "workConserving",
    "ShareConfig",
    "gpu.tranche.dev/v1alpha1",
    "gpu.tranche.dev/v1",
    "compute.mode",
    "compute.priority",
    "Strict",
    "memory",
    "parameters",
];

/// Whether the path names a field of the parameters, or one that they could have.
fn names_a_field(parameters: &Value, path: &str) -> bool {
    let could_be = FIELDS.contains(&path)
        || path
            .strip_prefix("compute.")
            .is_some_and(|it| COMPUTE_FIELDS.contains(&it));
    // A name of a field may have dots of its own.
    let is_there = |object: &Value, path: &str| object.get(path).is_some();
    let is_in_compute = path
        .strip_prefix("compute.")
        .is_some_and(|it| is_there(&parameters["compute"], it));
    could_be
        || is_there(parameters, path)
        || is_in_compute
        || !parameters.is_object() && path == "parameters"
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4_000))]

    #[test]
    fn a_mutated_share_config_is_read_or_refused_by_a_known_field(
        mutations in any_mutations(WORDS),
        mode in prop::sample::select(vec!["strict", "workConserving"]),
        source in prop::sample::select(vec!["FromClass", "FromClaim"]),
    ) {
        let mut entry = config(source, &[], &json!({"mode": mode}));
        let parameters = mutated(entry["opaque"]["parameters"].take(), &mutations);
        entry["opaque"]["parameters"] = parameters.clone();
        let claim = claim(&[capped("20Gi", "25")], &[entry]);
        let Err(error) = Allocation::from_claim(&claim, &pool(NODE)) else {
            return Ok(());
        };
        let text = error.to_string();
        let start = format!("claim team-a/train: status.allocation.devices.config[0] ({source}): opaque.parameters: ");
        let problem = text.strip_prefix(&start);
        prop_assert!(problem.is_some(), "{}", text);
        let problem = problem.unwrap();
        let ends = [" is ", " are "].into_iter().flat_map(|it| problem.match_indices(it));
        let mut paths = ends.map(|(at, _)| &problem[..at]);
        prop_assert!(paths.any(|path| names_a_field(&parameters, path)), "{} of {}", text, parameters);
    }
}
