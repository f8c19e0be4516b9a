//! The chart's values have every field of the default SharingPolicy.

use std::fs;
use std::path::Path;

use kube::CustomResourceExt as _;
use serde_json::Value;
use tranche_api::{SharingPolicy, Tier};

fn fields<'a>(schema: &'a Value, tier: &str) -> &'a serde_json::Map<String, Value> {
    let fields = &schema["properties"][tier]["properties"];
    fields.as_object().expect("a tier has fields")
}

#[test]
fn the_values_schema_knows_every_field_of_a_tier_as_the_resource_does() {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/helm/tranche/values.schema.json");
    let values: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    let values = &values["properties"]["defaultPolicy"];
    let crd = serde_json::to_value(SharingPolicy::crd()).unwrap();
    let spec = &crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"];

    for tier in ["capped", "timeshared"] {
        let (known, defined) = (fields(values, tier), fields(spec, tier));
        let names = |fields: &serde_json::Map<_, _>| fields.keys().cloned().collect::<Vec<_>>();
        assert_eq!(names(known), names(defined), "{tier}");
        for (name, field) in defined {
            let known = &known[name];
            assert_eq!(known["enum"], field["enum"], "{tier}.{name}");
            if field["type"] == "integer" {
                for limit in ["minimum", "maximum"] {
                    let of = |schema: &Value| schema[limit].as_f64();
                    assert_eq!(of(known), of(field), "{tier}.{name}: {limit}");
                }
            }
        }
    }
}

/// The list is `Tier::SERVED`; the chart's static files repeat it for people who write values.
#[test]
fn the_values_offer_the_served_tiers_and_no_others() {
    let chart = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/helm/tranche");
    let schema: Value =
        serde_json::from_slice(&fs::read(chart.join("values.schema.json")).unwrap()).unwrap();
    let listed = &schema["properties"]["defaultPolicy"]["properties"]["tiers"]["items"]["enum"];
    let served: Vec<_> = Tier::SERVED.into_iter().rev().map(Tier::as_str).collect();
    assert_eq!(*listed, serde_json::json!(served), "values.schema.json");
    let values = fs::read_to_string(chart.join("values.yaml")).unwrap();
    let line = format!("  tiers: [{}]", served.join(", "));
    assert!(
        values.lines().any(|l| l == line),
        "values.yaml has no line {line:?}"
    );
}
