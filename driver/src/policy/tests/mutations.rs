//! Whole SharingPolicies that are valid at first and then changed anywhere.

use std::sync::LazyLock;

use kube::CustomResourceExt as _;
use proptest::prelude::*;
use serde_json::{Value, json};
use tranche_api::quantity::Quantity;
use tranche_api::sharing_policy::SharingPolicy;

use super::{Terms, labels};
use crate::policy::{selector, uuids};
use crate::testing::mutation::{any_mutations, mutated};
use crate::testing::schema;

const WORDS: &[&str] = &[
    "spec",
    "tiers",
    "capped",
    "concurrent",
    "partition",
    "timeshared",
    "exclusive",
    "passthrough",
    "nodeSelector",
    "matchLabels",
    "matchExpressions",
    "key",
    "operator",
    "values",
    "In",
    "Exists",
    "DoesNotExist",
    "products",
    "uuids",
    "indices",
    "priority",
    "maxSharers",
    "expectedSharers",
    "contextMemory",
    "memoryOversubscription",
    "lowPriorityFloor",
    "memoryStep",
    "defaultMemory",
    "coresStep",
    "defaultCores",
    "untestedDriver",
    "onBypass",
    "unaccountedMemory",
    "driverCapabilities",
    "profiles",
    "interval",
    "health",
    "effect",
    "faults",
    "fault",
    "Xid74",
    "NoExecute",
    "Ignore",
    "idle",
    "namespaces",
    "afterSeconds",
    "graceSeconds",
    "action",
    "Evict",
    "Long",
    "Kill",
    "Allow",
    "1g.10gb",
    "1g.10gb+me",
    "7g.80gb",
    "0",
    "1Gi",
    "1.5Mi",
    "500m",
    "1e3",
    "1e99",
    "9999999999Ei",
    "-1",
    "+5",
    ".5",
    "5.",
    "0x10",
    "compute",
    "utility",
    "video",
    "GPU-00000000-0000-0000-0000-000000000000",
    "GPU-00000001-ABCD-0000-0000-000000000000",
];

/// Has every field.
fn valid() -> Value {
    json!({
        "apiVersion": "gpu.tranche.dev/v1alpha1",
        "kind": "SharingPolicy",
        "metadata": {"name": "p", "labels": {"team": "a"}},
        "spec": {
            "priority": 7,
            "nodeSelector": {
                "matchLabels": {"pool": "gpu"},
                "matchExpressions": [
                    {"key": "zone", "operator": "In", "values": ["a", "b"]},
                    {"key": "old", "operator": "DoesNotExist"},
                ],
            },
            "products": ["NVIDIA H100 80GB HBM3", "NVIDIA L4"],
            "uuids": ["GPU-00000000-0000-0000-0000-000000000000"],
            "indices": [0, 3],
            "tiers": ["capped", "concurrent", "partition", "timeshared", "exclusive"],
            "capped": {
                "maxSharers": 10, "expectedSharers": 4, "contextMemory": "512Mi", "memoryOversubscription": 150, "lowPriorityFloor": 25, "memoryStep": "256Mi",
                "defaultMemory": "8Gi", "coresStep": 5, "defaultCores": 10, "untestedDriver": "Allow", "onBypass": "Kill",
                "unaccountedMemory": "512Mi",
                "driverCapabilities": ["compute", "utility", "video"],
            },
            "concurrent": {"maxSharers": 12},
            "partition": {"profiles": ["1g.10gb", "3g.40gb", "1g.10gb+me"]},
            "timeshared": {"maxSharers": 6, "interval": "Long"},
            "idle": {
                "namespaces": {"matchLabels": {"team": "a"}, "matchExpressions": [{"key": "zone", "operator": "Exists"}]},
                "afterSeconds": 3600, "action": "Evict", "graceSeconds": 60,
            },
            "health": {
                "effect": "NoExecute", "graceSeconds": 600, "faults": [{"fault": "Xid74", "effect": "Ignore"}],
            },
        },
    })
}

static SCHEMA: LazyLock<Value> = LazyLock::new(schema_of_policies);

fn schema_of_policies() -> Value {
    let crd = serde_json::to_value(SharingPolicy::crd()).unwrap();
    let mut schema = crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"].clone();
    // These are the server's own.
    for (name, field) in [
        (
            "apiVersion",
            json!({"type": "string", "enum": ["gpu.tranche.dev/v1alpha1"]}),
        ),
        ("kind", json!({"type": "string", "enum": ["SharingPolicy"]})),
        (
            "metadata",
            json!({"type": "object", "properties": {"name": {"type": "string"}}}),
        ),
    ] {
        schema["properties"][name] = field;
    }
    schema["required"] = json!(["apiVersion", "kind", "metadata", "spec"]);
    schema
}

/// Why the policy is refused for a GPU that it names.
fn refusal(policy: &SharingPolicy) -> Option<String> {
    let spec = &policy.spec;
    let of_terms = Terms::try_from(spec).err();
    let of_selector = || {
        let selector = spec.node_selector.as_ref()?;
        let problem =
            selector::matches(selector, &labels(&[("zone", "a"), ("pool", "gpu")])).err()?;
        Some(problem.into())
    };
    let of_uuids = || uuids(&spec.uuids).err();
    let problem = of_terms.or_else(of_selector).or_else(of_uuids)?;
    Some(problem.to_string())
}

/// What the schema refuses and the types accept: words and numbers that a later schema may allow, because they must not
/// blind a watch of this release; an expression without a key, which selects by the empty label; empty lists, which
/// serde reads as objects; and numbers above those of the API server.
fn is_wider_than_the_schema(path: &str, value: &Value) -> bool {
    let is_of_later = [
        "spec.priority",
        "spec.capped.onBypass",
        "spec.timeshared.interval",
        "spec.idle.action",
        "spec.health.effect",
        "spec.health.faults[0].effect",
    ];
    let selectors = [
        "spec.nodeSelector.matchExpressions[",
        "spec.idle.namespaces.matchExpressions[",
    ];
    let is_key = path.ends_with("].key") && selectors.iter().any(|it| path.starts_with(it));
    let is_large = value.as_u64().is_some() && !value.is_i64();
    is_of_later.contains(&path) || is_key || value.is_array() || is_large
}

/// An amount that the schema's rules in CEL refuse, because they accept only what fits into 64 bits.
fn refused_amount(policy: &Value) -> Option<String> {
    let amounts = [
        "contextMemory",
        "memoryStep",
        "defaultMemory",
        "unaccountedMemory",
    ];
    let paths = amounts.map(|it| format!("spec.capped.{it}"));
    paths.into_iter().find(|path| {
        let amount = value_at(policy, path).as_str();
        amount.is_some_and(|it| it.parse::<Quantity>().is_err())
    })
}

fn value_at<'a>(object: &'a Value, path: &str) -> &'a Value {
    let steps = path.split(['.', '[', ']']).filter(|it| !it.is_empty());
    steps.fold(object, |here, step| match step.parse::<usize>() {
        Ok(index) => &here[index],
        Err(_) => &here[step],
    })
}

#[test]
fn the_policy_that_is_mutated_is_valid_and_complete() {
    let (schema, valid) = (&*SCHEMA, valid());
    let stored = schema::stored(schema, &valid).unwrap();
    assert_eq!(stored["spec"], valid["spec"]);
    assert_eq!(refusal(&serde_json::from_value(stored).unwrap()), None);
    let fields = schema["properties"]["spec"]["properties"]
        .as_object()
        .unwrap();
    assert!(fields.keys().eq(valid["spec"].as_object().unwrap().keys()));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4_000))]

    #[test]
    fn a_mutated_policy_is_read_or_refused_by_a_known_field(mutations in any_mutations(WORDS)) {
        let policy = mutated(valid(), &mutations);
        let stored = schema::stored(&SCHEMA, &policy);
        let path = match &stored {
            // One policy that cannot be decoded would blind the watch to all policies.
            Ok(stored) => match serde_json::from_value::<SharingPolicy>(stored.clone()) {
                Ok(policy) => {
                    let Some(problem) = refusal(&policy) else {
                        return Ok(());
                    };
                    problem.split([' ', ',']).next().unwrap().to_owned()
                }
                Err(error) => {
                    let path = refused_amount(stored);
                    path.ok_or_else(|| TestCaseError::fail(format!("{stored}: {error}")))?
                }
            },
            Err(path) => path.clone(),
        };
        // A key of a map may be anything.
        let is_map = path.contains(".matchLabels.");
        prop_assert!(path.is_empty() || is_map || schema::at(&SCHEMA, &path).is_some(), "{} of {}", path, policy);

        // A policy that was stored under another schema can still be read, or is refused as a whole.
        let Ok(decoded) = serde_json::from_value::<SharingPolicy>(policy.clone()) else {
            return Ok(());
        };
        if let (Err(path), None) = (stored, refusal(&decoded)) {
            let is_known = !path.starts_with("spec") || is_wider_than_the_schema(&path, value_at(&policy, &path));
            prop_assert!(is_known, "only the schema refuses {} of {}", path, policy);
        }
    }
}
