use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;

fn decode(value: &Value) -> Result<Parameters, String> {
    Parameters::decode(value).map_err(|error| error.to_string())
}

fn config(fields: &Value) -> Value {
    let mut value = json!({"apiVersion": "gpu.tranche.dev/v1alpha1", "kind": "ShareConfig"});
    for (name, field) in fields.as_object().expect("an object of fields") {
        value[name] = field.clone();
    }
    value
}

#[test]
fn fields_left_out_are_open_and_resolve_to_the_defaults() {
    for fields in [
        json!({}),
        json!({"compute": {}}),
        json!({"compute": null}),
        json!({"compute": {"mode": null, "priority": null}}),
    ] {
        let parameters = decode(&config(&fields)).unwrap();
        assert_eq!(parameters, Parameters::default());
        let Compute { mode, priority } = parameters.resolve().compute;
        assert_eq!(
            (mode, priority),
            (ComputeMode::Strict, ComputePriority::Normal)
        );
    }
}

#[test]
fn a_mode_is_read() {
    let parameters = decode(&config(&json!({"compute": {"mode": "workConserving"}}))).unwrap();
    assert_eq!(
        parameters.resolve().compute.mode,
        ComputeMode::WorkConserving
    );
}

#[test]
fn a_priority_is_read() {
    for (name, priority) in ComputePriority::WORDS {
        let parameters = decode(&config(&json!({"compute": {"priority": name}}))).unwrap();
        assert_eq!(parameters.resolve().compute.priority, priority);
    }
}

/// A journal of a release without priorities is read, and one without a priority is read by such a release.
#[test]
fn a_normal_priority_is_not_written() {
    let written = serde_json::to_value(Compute::default()).unwrap();
    assert_eq!(written, json!({"mode": "strict"}));
    let read: Compute = serde_json::from_value(written).unwrap();
    assert_eq!(read, Compute::default());
}

#[test]
fn a_word_has_one_name_in_parameters_and_journals() {
    for (name, mode) in ComputeMode::WORDS {
        assert_eq!(serde_json::to_value(mode).unwrap(), json!(name));
    }
    for (name, priority) in ComputePriority::WORDS {
        assert_eq!(serde_json::to_value(priority).unwrap(), json!(name));
    }
}

#[test]
fn what_is_wrong_is_refused_with_its_path_and_the_way_out() {
    for (parameters, expected) in [
        (json!(null), "parameters is null, must be an object"),
        (json!([]), "parameters is a list, must be an object"),
        (json!({}), r#"kind is missing, must be "ShareConfig""#),
        (
            json!({"apiVersion": "gpu.tranche.dev/v1alpha1", "kind": "GpuConfig", "sharing": {}}),
            r#"kind is "GpuConfig", must be "ShareConfig""#,
        ),
        (
            json!({"apiVersion": "gpu.nvidia.com/v1beta1", "kind": "ShareConfig"}),
            r#"apiVersion is "gpu.nvidia.com/v1beta1", must be "gpu.tranche.dev/v1alpha1""#,
        ),
        (
            json!({"apiVersion": 1, "kind": "ShareConfig"}),
            "apiVersion is a number, must be a string",
        ),
        (
            config(&json!({"memory": "20Gi"})),
            "memory is unknown: the fields here are apiVersion, kind, compute",
        ),
        (
            config(&json!({"compute": {"mdoe": "strict"}})),
            "compute.mdoe is unknown: the fields here are mode, priority",
        ),
        (
            config(&json!({"compute": "strict"})),
            "compute is a string, must be an object",
        ),
        (
            config(&json!({"compute": {"mode": true}})),
            "compute.mode is a boolean, must be a string",
        ),
        (
            config(&json!({"compute": {"mode": "Strict"}})),
            r#"compute.mode is "Strict", must be one of strict, workConserving"#,
        ),
        (
            config(&json!({"compute": {"priority": 1}})),
            "compute.priority is a number, must be a string",
        ),
        (
            config(&json!({"compute": {"priority": "urgent"}})),
            r#"compute.priority is "urgent", must be one of high, normal, low"#,
        ),
    ] {
        assert_eq!(decode(&parameters), Err(expected.to_owned()));
    }
}

#[test]
fn the_later_parameters_win_field_by_field() {
    let of = |mode| Parameters {
        compute_mode: mode,
        ..Parameters::default()
    };
    let (strict, conserving) = (
        of(Some(ComputeMode::Strict)),
        of(Some(ComputeMode::WorkConserving)),
    );
    assert_eq!(conserving.overlaid_by(strict), strict);
    assert_eq!(conserving.overlaid_by(Parameters::default()), conserving);
    assert_eq!(of(None).overlaid_by(conserving), conserving);
    let low = Parameters {
        compute_priority: Some(ComputePriority::Low),
        ..Parameters::default()
    };
    let both = conserving.overlaid_by(low);
    assert_eq!(both.compute_mode, conserving.compute_mode);
    assert_eq!(both.compute_priority, low.compute_priority);
    assert_eq!(
        both.overlaid_by(strict).compute_priority,
        low.compute_priority
    );
}

#[test]
fn a_config_concerns_the_requests_it_names() {
    let named = |names: &[&str]| names.iter().map(ToString::to_string).collect::<Vec<_>>();
    assert!(applies_to(&[], "gpu"));
    assert!(applies_to(&named(&["other", "gpu"]), "gpu"));
    assert!(applies_to(&named(&["gpu"]), "gpu/small"));
    assert!(applies_to(&named(&["gpu/small"]), "gpu/small"));
    assert!(!applies_to(&named(&["gpu/small"]), "gpu/large"));
    assert!(!applies_to(&named(&["gpu/small"]), "gpu"));
    assert!(!applies_to(&named(&["gp"]), "gpu"));
    assert!(!applies_to(&named(&["gpu"]), "gpus"));
}

fn any_json() -> impl Strategy<Value = Value> {
    // Names that exist are frequent, so that the walk gets below the first level.
    let name = prop_oneof![
        3 => prop::sample::select(vec!["apiVersion", "kind", "compute", "mode", "priority"]).prop_map(str::to_owned),
        1 => ".*",
    ];
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        ".*".prop_map(Value::from),
        prop::sample::select(vec![
            "gpu.tranche.dev/v1alpha1",
            "ShareConfig",
            "strict",
            "workConserving",
            "high",
            "low"
        ])
        .prop_map(Value::from),
    ];
    leaf.prop_recursive(4, 32, 6, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::btree_map(name.clone(), inner, 0..5)
                .prop_map(|fields| Value::Object(fields.into_iter().collect())),
        ]
    })
}

proptest! {
    #[test]
    fn no_json_makes_it_panic(value in any_json()) {
        let _ = Parameters::decode(&value);
    }

    #[test]
    fn no_fields_make_it_panic_or_are_ignored(fields in any_json()) {
        prop_assume!(fields.is_object());
        let fields = fields.as_object().unwrap().clone();
        let strange = fields.keys().any(|name| !["apiVersion", "kind", "compute"].contains(&name.as_str()));
        let mut value = config(&json!({}));
        for (name, field) in fields {
            if name != "kind" && name != "apiVersion" {
                value[name] = field;
            }
        }
        prop_assert!(!strange || Parameters::decode(&value).is_err());
    }
}
