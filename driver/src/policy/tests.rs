mod mutations;

use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::slices::{self, NodeInput};
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
fn gpus_are_named_by_product_index_and_uuid_together() {
    let (mine, other) = (gpu(0), gpu(1));
    let holds = |spec: &Value| chosen(&[policy("p", spec)], &[]).is_some();
    for (spec, expected) in [
        (json!({"uuids": [mine.uuid]}), true),
        (json!({"uuids": [other.uuid, mine.uuid]}), true),
        (json!({"uuids": [other.uuid]}), false),
        (json!({"indices": [0]}), true),
        (json!({"indices": [1, 2]}), false),
        (
            json!({"uuids": [mine.uuid], "indices": [0], "products": [mine.product_name]}),
            true,
        ),
        (json!({"uuids": [mine.uuid], "indices": [1]}), false),
        (
            json!({"uuids": [mine.uuid], "products": ["NVIDIA L4"]}),
            false,
        ),
    ] {
        assert_eq!(holds(&spec), expected, "{spec}");
    }
    let mut unnumbered = mine;
    unnumbered.index = None;
    let policies = [policy("p", &json!({"indices": [0]}))];
    assert_eq!(matching(&policies, &labels(&[]), &unnumbered), Ok(None));
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
            "tiers": Tier::ALL,
            "capped": {
                "maxSharers": 10, "expectedSharers": 0, "contextMemory": 0, "memoryOversubscription": 250,
                "memoryStep": "1.5Gi", "defaultMemory": "3Gi", "coresStep": 25, "defaultCores": 100,
                "lowPriorityFloor": 0, "untestedDriver": "Allow", "onBypass": "Kill", "unaccountedMemory": "64Mi",
            },
            "concurrent": {"maxSharers": 48},
            "partition": {"profiles": ["3g.40gb", "1g.10gb+me"]},
            "timeshared": {"maxSharers": 128, "interval": "Long"},
        }),
    )
    .spec;
    assert_eq!(
        Terms::try_from(&spec),
        Ok(Terms {
            tiers: BTreeSet::from(Tier::ALL),
            capped: CappedTerms {
                max_sharers: 10,
                expected_sharers: 0,
                context_memory: 0,
                memory_oversubscription: Oversubscription::new(250),
                memory_step: 3 << 29,
                default_memory: Some(3 << 30),
                cores_step: 25,
                default_cores: Some(100),
                low_priority_floor: 0,
                untested_driver: UntestedDriver::Allow,
                on_bypass: OnBypass::Kill,
                unaccounted_memory: 64 << 20,
                extra_capabilities: BTreeSet::new(),
                on_partitions: BTreeSet::new(),
            },
            concurrent_sharers: 48,
            concurrent_on_partitions: BTreeSet::new(),
            profiles: ["1g.10gb+me", "3g.40gb"]
                .map(|name| name.parse().unwrap())
                .into(),
            timeshared: TimesharedTerms {
                max_sharers: 128,
                interval: Interval::Long,
            },
        })
    );
    assert!(Terms::try_from(&policy("defaults", &json!({})).spec).is_ok());
}

#[test]
fn shared_partitions_read_profiles_as_partitions_do() {
    let of_tier: [(_, fn(Terms) -> _); 2] = [
        ("capped", |terms| terms.capped.on_partitions),
        ("concurrent", |terms| terms.concurrent_on_partitions),
    ];
    for (tier, shared) in of_tier {
        let terms = |profiles: Value| {
            let spec = policy("p", &json!({tier: {"onPartitions": profiles}})).spec;
            Terms::try_from(&spec).map(shared)
        };
        let both = ["1g.10gb+me", "3g.40gb"].map(|name| name.parse().unwrap());
        assert_eq!(terms(json!(["3g.40gb", "1g.10gb+me"])), Ok(both.into()));
        assert_eq!(terms(json!([])), Ok(BTreeSet::new()));
        for (profiles, expected) in [
            (
                json!(["3g.40gb", "40gb"]),
                r#"[1] "40gb" is not a MIG profile: it must look like 1g.10gb or 1g.10gb+me"#,
            ),
            (json!(["3g.40gb", "3g.40gb"]), " names 3g.40gb twice"),
        ] {
            assert_eq!(
                terms(profiles).unwrap_err().to_string(),
                format!("spec.{tier}.onPartitions{expected}")
            );
        }
    }
}

#[test]
fn policies_that_do_not_add_up_are_refused_by_field() {
    for (spec, expected) in [
        (
            json!({"tiers": []}),
            "spec.tiers is empty: name at least one of timeshared, concurrent, capped, partition, exclusive, passthrough",
        ),
        (
            json!({"tiers": ["capped", "capped"]}),
            "spec.tiers names capped twice",
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
            json!({"capped": {"memoryOversubscription": 401}}),
            "spec.capped.memoryOversubscription is 401, must be 100 to 400 percent",
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
            json!({"capped": {"coresStep": 0}}),
            "spec.capped.coresStep is 0, must be 1, 2, 4, 5, 10, 20, 25 or 50",
        ),
        (
            json!({"capped": {"coresStep": 30}}),
            "spec.capped.coresStep is 30, must be 1, 2, 4, 5, 10, 20, 25 or 50",
        ),
        (
            json!({"capped": {"coresStep": 100}}),
            "spec.capped.coresStep is 100, must be 1, 2, 4, 5, 10, 20, 25 or 50",
        ),
        (
            json!({"capped": {"coresStep": 20, "defaultCores": 50}}),
            "spec.capped.defaultCores is 50, must be a multiple of coresStep, 20, up to 100",
        ),
        (
            json!({"uuids": [gpu(0).uuid, "gpu-0"]}),
            r#"spec.uuids[1] "gpu-0" is not a GPU's UUID: it must look like GPU-4d8c1f9e-2b4a-4f0e-9c39-0f6c1a3c5b7d, in lower case"#,
        ),
        (
            json!({"uuids": [gpu(0).uuid, gpu(0).uuid]}),
            "spec.uuids names GPU-00000000-0000-0000-0000-000000000000 twice",
        ),
        (json!({"indices": [0, 3, 0]}), "spec.indices names 0 twice"),
        (
            json!({"partition": {"profiles": ["1g.10gb", "10gb"]}}),
            r#"spec.partition.profiles[1] "10gb" is not a MIG profile: it must look like 1g.10gb or 1g.10gb+me"#,
        ),
        (
            json!({"partition": {"profiles": ["1g.10gb", "1g.10gb"]}}),
            "spec.partition.profiles names 1g.10gb twice",
        ),
        (
            json!({"concurrent": {"maxSharers": 49}}),
            "spec.concurrent.maxSharers is 49, must be 1 to 48",
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
fn the_floor_of_low_priority_is_a_percentage() {
    assert_eq!(
        refusal(&json!({"capped": {"lowPriorityFloor": 101}})),
        "SharingPolicy p: spec.capped.lowPriorityFloor is 101, must be 0 to 100 percent"
    );
}

#[test]
fn a_bad_policy_refuses_its_gpus_and_leaves_the_others_alone() {
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

/// Policies, and the field for which each is refused. The suite on the cluster gives the same ones to the API server:
/// its rules and ours must agree.
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
            // The schema must refuse what the types cannot hold.
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
        assert_eq!(gpu.timeshared.interval, Interval::Default);
        (gpu.policy, gpu.capped.on_bypass)
    };
    let short = policy("short", &json!({"timeshared": {"interval": "Short"}}));
    let told = published(&[short], &labels(&[]), &gpu(0)).unwrap();
    assert_eq!(told.timeshared.interval, Interval::Short);
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
    let unreadable = |rest: &Value| {
        let mut spec = json!({"priority": 1, "uuids": ["GPU-0"]});
        spec.as_object_mut()
            .unwrap()
            .extend(rest.as_object().unwrap().clone());
        policy("invalid", &spec)
    };
    for (invalid, holds) in [
        (invalid(1, &[]), false),
        (invalid(1, &[&this]), false),
        (invalid(1, &["another product"]), true),
        (invalid(-1, &[]), true),
        (unreadable(&json!({})), false),
        (unreadable(&json!({"indices": [1]})), true),
        (
            unreadable(&json!({"nodeSelector": {"matchLabels": {"zone": "b"}}})),
            true,
        ),
    ] {
        let policies = [invalid, fine.clone()];
        let found = matching(&policies, &labels(&[]), &gpu(0));
        assert_eq!(found.is_ok(), holds, "{found:?}");
    }
}

#[test]
fn a_context_size_is_set_by_policy_else_measured_else_assumed() {
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
fn every_capability_has_its_libraries_and_others_are_refused() {
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

/// Fields of a policy with any content, some of it nearly valid.
fn any_spec() -> impl Strategy<Value = Value> {
    let word = prop_oneof![
        prop::sample::select(vec![
            "capped",
            "exclusive",
            "timeshared",
            "partition",
            "mig",
            "",
            "1Gi",
            "1.5Mi",
            "-1",
            "1e50",
            "Kill",
            "Long",
            "1g.10gb",
            "1g.10gb+me",
            "0g.1gb",
            "GPU-00000000-0000-0000-0000-000000000000",
            "GPU-0",
            "compute",
            "utility",
        ])
        .prop_map(|word| json!(word)),
        "\\PC{0,12}".prop_map(|word| json!(word)),
    ];
    let number = prop_oneof![
        (0..130_u32).prop_map(|number| json!(number)),
        any::<u32>().prop_map(|number| json!(number)),
        any::<i64>().prop_map(|number| json!(number)),
    ];
    let leaf = prop_oneof![4 => word.clone(), 4 => number, 1 => Just(json!(null)), 1 => any::<bool>().prop_map(|it| json!(it))];
    let list = prop::collection::vec(leaf.clone(), 0..4).prop_map(|list| json!(list));
    let value = prop_oneof![3 => leaf, 1 => list.clone()];
    let object = |fields: &'static [&'static str], value: BoxedStrategy<Value>| {
        prop::collection::btree_map(prop::sample::select(fields), value, 0..4)
            .prop_map(|fields| json!(fields))
    };
    let capped = object(
        &[
            "maxSharers",
            "expectedSharers",
            "contextMemory",
            "memoryStep",
            "defaultMemory",
            "coresStep",
            "defaultCores",
            "onBypass",
            "unaccountedMemory",
            "driverCapabilities",
        ],
        value.clone().boxed(),
    );
    let partition = object(&["profiles"], list.clone().boxed());
    let timeshared = object(&["maxSharers", "interval"], value.boxed());
    let tiers = prop_oneof![
        3 => prop::sample::subsequence(vec!["capped", "exclusive", "timeshared"], 1..=3).prop_map(|tiers| json!(tiers)),
        1 => prop::collection::vec(word, 0..3).prop_map(|tiers| json!(tiers)),
    ];
    (
        tiers,
        prop::option::of(capped),
        prop::option::of(partition),
        prop::option::of(timeshared),
        prop::option::of(list.clone()),
        prop::option::of(list),
    )
        .prop_map(|(tiers, capped, partition, timeshared, uuids, indices)| {
            let mut spec = json!({"tiers": tiers});
            for (name, field) in [
                ("capped", capped),
                ("partition", partition),
                ("timeshared", timeshared),
                ("uuids", uuids),
                ("indices", indices),
            ] {
                if let Some(field) = field {
                    spec[name] = field;
                }
            }
            spec
        })
}

proptest! {
    /// The schema refuses a policy that cannot be decoded, so it never gets here.
    #[test]
    fn any_policy_that_decodes_is_planned_or_refused_by_its_field(spec in any_spec()) {
        let Ok(decoded) = serde_json::from_value::<SharingPolicySpec>(spec.clone()) else {
            return Ok(());
        };
        let policies = [SharingPolicy::new("p", decoded.clone())];
        let (labels, inventory) = (labels(&[]), testing::inventory(vec![gpu(0)]));
        let plan = slices::plan(&NodeInput {
            name: testing::NODE,
            uid: "7c1b2f6e-0d5e-4a43-8a07-5c9f1a2b3c4d",
            labels: &labels,
            inventory: &inventory,
            withheld: &[],
            health: &[],
            policies: &policies,
            retained: &[],
        });
        prop_assert!(plan.is_ok());
        if let Err(problem) = Terms::try_from(&decoded) {
            let problem = problem.to_string();
            let field = problem.strip_prefix("spec.").and_then(|rest| rest.split([' ', '.', '[']).next());
            prop_assert!(field.is_some_and(|field| spec.get(field).is_some()), "{}: {}", spec, problem);
        }
    }
}
