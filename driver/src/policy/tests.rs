use serde_json::{Value, json};

use super::*;
use crate::testing::{self, gpu};

/// A policy with this spec, that offers whole GPUs unless the spec says otherwise.
fn policy(name: &str, spec: &Value) -> SharingPolicy {
    let mut spec = spec.clone();
    if spec.get("tiers").is_none() {
        spec["tiers"] = json!(["exclusive"]);
    }
    testing::policy(name, &spec)
}

fn labels(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs
        .iter()
        .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
        .collect()
}

fn chosen<'a>(policies: &'a [SharingPolicy], pairs: &[(&str, &str)]) -> Option<&'a str> {
    matching(policies, &labels(pairs), &gpu(0))
        .unwrap()
        .and_then(|policy| policy.metadata.name.as_deref())
}

fn refusal(spec: &Value) -> String {
    terms(&[policy("p", spec)], &labels(&[]), &gpu(0))
        .expect_err("refused")
        .to_string()
}

#[test]
fn without_a_policy_nothing_is_shared() {
    let terms = terms(&[], &labels(&[]), &gpu(0)).unwrap();
    assert_eq!(terms.tiers, BTreeSet::from([Tier::Exclusive]));
}

#[test]
fn the_highest_priority_holds_and_among_equals_the_first_name() {
    let mut policies = vec![
        policy("low", &json!({"priority": -1})),
        policy("b", &json!({"priority": 5})),
        policy("a", &json!({"priority": 5})),
        policy("none", &json!({})),
    ];
    for _ in 0..policies.len() {
        policies.rotate_left(1);
        assert_eq!(chosen(&policies, &[]), Some("a"));
    }
    let extremes = [
        policy("least", &json!({"priority": i32::MIN})),
        policy("most", &json!({"priority": i32::MAX})),
    ];
    assert_eq!(chosen(&extremes, &[]), Some("most"));
}

#[test]
fn products_are_named_exactly() {
    let policies = [
        policy(
            "other",
            &json!({"priority": 9, "products": ["NVIDIA H100"]}),
        ),
        policy(
            "named",
            &json!({"products": ["NVIDIA L4", "NVIDIA H100 80GB HBM3"]}),
        ),
    ];
    assert_eq!(chosen(&policies, &[]), Some("named"));
    assert_eq!(chosen(&policies[..1], &[]), None);
}

#[test]
fn selectors_select_as_the_api_server_does() {
    let selects = |selector: Value, pairs: &[(&str, &str)]| {
        chosen(&[policy("p", &json!({"nodeSelector": selector}))], pairs).is_some()
    };
    let expression = |operator: &str, values: &[&str]| json!({"matchExpressions": [{"key": "zone", "operator": operator, "values": values}]});
    let (a, b, none) = (&[("zone", "a")][..], &[("zone", "b")][..], &[][..]);
    for (selector, at_a, at_b, at_none) in [
        (json!({}), true, true, true),
        (json!({"matchLabels": {"zone": "a"}}), true, false, false),
        (expression("In", &["a", "c"]), true, false, false),
        (expression("NotIn", &["a", "c"]), false, true, true),
        (expression("Exists", &[]), true, true, false),
        (expression("DoesNotExist", &[]), false, false, true),
        (
            json!({
                "matchLabels": {"zone": "a"},
                "matchExpressions": [{"key": "pool", "operator": "Exists"}],
            }),
            false,
            false,
            false,
        ),
    ] {
        assert_eq!(
            (
                selects(selector.clone(), a),
                selects(selector.clone(), b),
                selects(selector.clone(), none)
            ),
            (at_a, at_b, at_none),
            "{selector}"
        );
    }
}

#[test]
fn bad_selectors_are_refused_whatever_the_labels() {
    for (operator, values, expected) in [
        (
            "Inn",
            json!(["a"]),
            r#"operator is "Inn", must be In, NotIn, Exists or DoesNotExist"#,
        ),
        (
            "In",
            json!([]),
            "values is empty, though In compares with values",
        ),
        (
            "NotIn",
            json!(null),
            "values is empty, though NotIn compares with values",
        ),
        (
            "Exists",
            json!(["a"]),
            "values is not empty, though Exists takes none",
        ),
    ] {
        let selector = json!({
            "matchLabels": {"never": "there"},
            "matchExpressions": [
                {"key": "zone", "operator": "Exists"},
                {"key": "zone", "operator": operator, "values": values},
            ],
        });
        assert_eq!(
            refusal(&json!({"nodeSelector": selector})),
            format!("SharingPolicy p: spec.nodeSelector.matchExpressions[1].{expected}")
        );
    }
}

#[test]
fn terms_are_exact_numbers() {
    let spec = policy(
        "p",
        &json!({
            "tiers": ["timeshared", "capped", "exclusive"],
            "capped": {
                "maxSharers": 10, "expectedSharers": 0, "contextMemory": 0,
                "memoryStep": "1.5Gi", "defaultMemory": "3Gi", "defaultCores": 100,
                "untestedDriver": "Allow", "onBypass": "Kill",
            },
            "timeshared": {"maxSharers": 128},
        }),
    )
    .spec;
    assert_eq!(
        Terms::try_from(&spec),
        Ok(Terms {
            tiers: BTreeSet::from(Tier::SERVED),
            capped: CappedTerms {
                max_sharers: 10,
                expected_sharers: 0,
                context_memory: 0,
                memory_step: 3 << 29,
                default_memory: Some(3 << 30),
                default_cores: Some(100),
                untested_driver: UntestedDriver::Allow,
                on_bypass: OnBypass::Kill,
                extra_capabilities: BTreeSet::new(),
            },
            timeshared: TimesharedTerms { max_sharers: 128 },
        })
    );
    assert!(Terms::try_from(&policy("defaults", &json!({})).spec).is_ok());
}

#[test]
fn policies_that_do_not_add_up_are_refused_by_field() {
    for (spec, expected) in [
        (
            json!({"tiers": []}),
            "spec.tiers is empty: name at least one of timeshared, capped, exclusive",
        ),
        (
            json!({"tiers": ["capped", "capped"]}),
            "spec.tiers names capped twice",
        ),
        (
            json!({"tiers": ["exclusive", "partition"]}),
            "spec.tiers names partition, which this version does not serve: use timeshared, capped, exclusive",
        ),
        (
            json!({"capped": {"maxSharers": 0}}),
            "spec.capped.maxSharers is 0, must be 1 to 128",
        ),
        (
            json!({"capped": {"maxSharers": 129}}),
            "spec.capped.maxSharers is 129, must be 1 to 128",
        ),
        (
            json!({"capped": {"maxSharers": 2, "expectedSharers": 3}}),
            "spec.capped.expectedSharers is 3, must be at most maxSharers, 2",
        ),
        (
            json!({"capped": {"contextMemory": "-1"}}),
            "spec.capped.contextMemory -1 is negative",
        ),
        (
            json!({"capped": {"memoryStep": 0}}),
            "spec.capped.memoryStep is 0, must be at least 1",
        ),
        (
            json!({"capped": {"memoryStep": "500m"}}),
            "spec.capped.memoryStep 500m is not a whole number",
        ),
        (
            json!({"capped": {"defaultMemory": 0}}),
            "spec.capped.defaultMemory is 0, must be a multiple of memoryStep, 1Mi",
        ),
        (
            json!({"capped": {"defaultMemory": "1.5Mi"}}),
            "spec.capped.defaultMemory is 1536Ki, must be a multiple of memoryStep, 1Mi",
        ),
        (
            json!({"capped": {"defaultCores": 0}}),
            "spec.capped.defaultCores is 0, must be 1 to 100",
        ),
        (
            json!({"capped": {"defaultCores": 101}}),
            "spec.capped.defaultCores is 101, must be 1 to 100",
        ),
        (
            json!({"timeshared": {"maxSharers": 0}}),
            "spec.timeshared.maxSharers is 0, must be 1 to 128",
        ),
    ] {
        assert_eq!(refusal(&spec), format!("SharingPolicy p: {expected}"));
    }
}

#[test]
fn a_bad_policy_is_not_replaced_by_a_weaker_one_and_hurts_no_other_gpu() {
    let policies = [
        policy(
            "bad",
            &json!({"priority": 9, "tiers": [], "products": ["NVIDIA H100 80GB HBM3"]}),
        ),
        policy("good", &json!({})),
    ];
    assert!(terms(&policies, &labels(&[]), &gpu(0)).is_err());
    let mut other = gpu(1);
    other.product_name = "NVIDIA L4".to_owned();
    assert!(terms(&policies, &labels(&[]), &other).is_ok());
}

/// Policies, and the field by which each is refused. The suite on the cluster gives the same ones
/// to the API server: its rules and ours must agree.
const SHARED: &str = include_str!("../../../api/testdata/sharing-policies.json");

#[test]
fn the_api_servers_rules_and_ours_agree() {
    let cases: Vec<Value> = serde_json::from_str(SHARED).unwrap();
    for case in cases {
        let spec = serde_json::from_value::<SharingPolicySpec>(case["spec"].clone());
        match (case["refused"].as_str(), spec) {
            (None, spec) => assert!(Terms::try_from(&spec.unwrap()).is_ok(), "{case}"),
            (Some(field), Ok(spec)) => {
                let problem = Terms::try_from(&spec).expect_err("refused").to_string();
                assert!(problem.starts_with(field), "{case}: {problem}");
            }
            // What the types cannot hold the schema must not let pass.
            (Some(_), Err(_)) => {}
        }
    }
}

#[test]
fn what_is_asked_of_the_node_is_of_the_policy_that_holds() {
    let kill = policy(
        "strict",
        &json!({"priority": 1, "capped": {"onBypass": "Kill"}}),
    );
    let default = policy("default", &json!({}));
    let asked = |policies: &[SharingPolicy]| {
        let gpu = published(policies, &labels(&[]), &gpu(0)).unwrap();
        assert_eq!(gpu.uuid, crate::testing::gpu(0).uuid);
        (gpu.policy, gpu.capped.on_bypass)
    };
    assert_eq!(
        asked(&[default.clone(), kill]),
        (Some("strict".to_owned()), OnBypass::Kill)
    );
    assert_eq!(
        asked(&[default]),
        (Some("default".to_owned()), OnBypass::Report)
    );
    assert_eq!(asked(&[]), (None, OnBypass::Report));
}

#[test]
fn an_invalid_selector_counts_only_where_the_policy_could_hold() {
    let invalid = |priority: i32, products: &[&str]| {
        policy(
            "invalid",
            &json!({
                "priority": priority,
                "products": products,
                "nodeSelector": {"matchExpressions": [{"key": "zone", "operator": "Near"}]},
            }),
        )
    };
    let fine = policy("fine", &json!({}));
    let this = gpu(0).product_name;
    for (invalid, holds) in [
        (invalid(1, &[]), false),
        (invalid(1, &[&this]), false),
        (invalid(1, &["another product"]), true),
        (invalid(-1, &[]), true),
    ] {
        let policies = [invalid, fine.clone()];
        let found = matching(&policies, &labels(&[]), &gpu(0));
        assert_eq!(found.is_ok(), holds, "{found:?}");
    }
}

#[test]
fn a_context_is_as_large_as_the_policy_says_else_as_measured_else_assumed() {
    let context = |capped: &Value, measured: Option<&str>| {
        let mut gpu = gpu(0);
        gpu.context_memory = measured.map(|text| text.parse().unwrap());
        let spec = json!({"tiers": ["capped"], "capped": capped});
        let terms = terms(&[policy("p", &spec)], &labels(&[]), &gpu).unwrap();
        terms.capped.context_memory
    };
    let explicit = json!({"contextMemory": "300Mi"});
    assert_eq!(context(&explicit, Some("464Mi")), 300 << 20);
    assert_eq!(context(&json!({"contextMemory": 0}), Some("464Mi")), 0);
    assert_eq!(context(&json!({}), Some("464Mi")), 464 << 20);
    assert_eq!(context(&json!({}), Some("32Mi")), 256 << 20);
    assert_eq!(context(&json!({}), None), 512 << 20);
    for nonsense in ["0", "-1", "500m"] {
        assert_eq!(context(&json!({}), Some(nonsense)), 512 << 20);
    }
}

#[test]
fn every_name_of_a_capability_has_its_libraries_and_others_are_refused() {
    let extra = |names: &[&str]| {
        let spec = json!({"tiers": ["capped"], "capped": {"driverCapabilities": names}});
        let published = published(&[policy("p", &spec)], &labels(&[]), &gpu(0));
        published.map(|gpu| gpu.capped.extra_driver_capabilities)
    };
    assert_eq!(extra(&["utility", "compute"]).unwrap(), [""; 0]);
    assert_eq!(
        extra(&DRIVER_CAPABILITIES).unwrap(),
        ["video", "graphics", "ngx", "opencl"]
    );
    let spec = |names: &[&str]| json!({"capped": {"driverCapabilities": names}});
    for unknown in ["all", "compat32", "other", "Video", ""] {
        assert_eq!(
            refusal(&spec(&["compute", "utility", unknown])),
            format!(
                "SharingPolicy p: spec.capped.driverCapabilities names {unknown:?}: use compute, utility, video, graphics, display, ngx, opencl"
            )
        );
    }
    assert_eq!(
        refusal(&spec(&["compute", "video"])),
        "SharingPolicy p: spec.capped.driverCapabilities does not name utility, which a capped share always has"
    );
}
