//! The chart's values have every field of the default SharingPolicy.

use std::fs;
use std::path::Path;

use kube::CustomResourceExt as _;
use serde_json::Value;
use tranche_api::names::API_VERSION;
use tranche_api::share_config::{COMPUTE_FIELDS, ComputeMode, ComputePriority, FIELDS, KIND};
use tranche_api::{SharingPolicy, Tier};

fn fields<'a>(schema: &'a Value, tier: &str) -> &'a serde_json::Map<String, Value> {
    let fields = &schema["properties"][tier]["properties"];
    fields.as_object().expect("a tier has fields")
}

#[test]
fn the_values_schema_has_every_tier_field_of_the_resource() {
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/helm/tranche/values.schema.json");
    let values: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    let values = &values["properties"]["defaultPolicy"];
    let crd = serde_json::to_value(SharingPolicy::crd()).unwrap();
    let spec = &crd["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"];

    for tier in ["capped", "concurrent", "partition", "timeshared"] {
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

/// The chart's admission policy refuses a mistyped ShareConfig before the plugin does: it repeats the fields and names in CEL.
#[test]
fn the_admission_of_a_share_config_knows_what_the_plugin_knows() {
    let template = "../deploy/helm/tranche/templates/admission-shareconfig.yaml";
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(template);
    let template = fs::read_to_string(path).unwrap();
    let list = |names: &[&str]| serde_json::to_string(names).unwrap().replace(',', ", ");
    let modes = ComputeMode::WORDS.map(|(name, _)| name);
    let priorities = ComputePriority::WORDS.map(|(name, _)| name);
    let [mode, priority] = COMPUTE_FIELDS;
    for expression in [
        format!("p.?apiVersion.orValue(\"\") == \"{API_VERSION}\""),
        format!("p.?kind.orValue(\"\") == \"{KIND}\""),
        format!("p.all(k, k in {})", list(&FIELDS)),
        format!("c.all(k, k in {})", list(&COMPUTE_FIELDS)),
        format!("c.?{mode}.orValue(\"{}\") in {}", modes[0], list(&modes)),
        format!("c.?{priority}.orValue(\"normal\") in {}", list(&priorities)),
    ] {
        assert!(template.contains(&expression), "there is no {expression}");
    }
}

/// The list is `Tier::ALL`; the chart's static files repeat it for people who write values. A GPU for virtual machines is the
/// administrator's decision.
#[test]
fn the_values_know_all_tiers_and_offer_those_for_containers() {
    let chart = Path::new(env!("CARGO_MANIFEST_DIR")).join("../deploy/helm/tranche");
    let schema: Value =
        serde_json::from_slice(&fs::read(chart.join("values.schema.json")).unwrap()).unwrap();
    let listed = &schema["properties"]["defaultPolicy"]["properties"]["tiers"]["items"]["enum"];
    let mut tiers: Vec<_> = Tier::ALL.into_iter().rev().map(Tier::as_str).collect();
    assert_eq!(*listed, serde_json::json!(tiers), "values.schema.json");
    tiers.retain(|tier| *tier != Tier::Passthrough.as_str());
    let values = fs::read_to_string(chart.join("values.yaml")).unwrap();
    let line = format!("  tiers: [{}]", tiers.join(", "));
    assert!(
        values.lines().any(|l| l == line),
        "values.yaml has no line {line:?}"
    );
}
