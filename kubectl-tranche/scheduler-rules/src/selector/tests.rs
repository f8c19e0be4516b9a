//! Selectors that the comparison with the scheduler does not reach: an unknown function ends without a verdict.

use k8s_openapi::api::resource::v1::Device;
use serde_json::json;

use super::{Fault, Selectors, Subject};

fn accept(expression: &str) -> Result<bool, Fault> {
    let device: Device = serde_json::from_value(json!({
        "name": "gpu-0",
        "attributes": {
            "productName": {"string": "NVIDIA H100 80GB HBM3"},
            "driverVersion": {"version": "535.261.3"},
            "isolationLevel": {"int": 3},
            "resource.kubernetes.io/numaNode": {"int": 1},
        },
        "capacity": {"memory": {"value": "78960Mi"}},
    }))
    .unwrap();
    let subject = Subject::new("gpu.tranche.dev", &device)?;
    Selectors::default().accept(expression, &subject)
}

#[test]
fn selectors_of_our_documents_are_evaluated() {
    for expression in [
        r#"device.driver == "gpu.tranche.dev""#,
        r#"device.attributes["gpu.tranche.dev"].isolationLevel >= 3"#,
        r#"device.attributes["gpu.tranche.dev"].productName.startsWith("NVIDIA H100")"#,
        r#"device.attributes["gpu.tranche.dev"].driverVersion.isGreaterThan(semver("535.0.0"))"#,
        r#"device.attributes["resource.kubernetes.io"].numaNode == 1"#,
        r#"device.capacity["gpu.tranche.dev"].memory.compareTo(quantity("40Gi")) >= 0"#,
        r#"device.attributes["gpu.tranche.dev"].?profile.orValue("") == """#,
    ] {
        assert_eq!(accept(expression), Ok(true), "{expression}");
    }
}

#[test]
fn a_missing_attribute_is_an_error_unless_it_cannot_matter() {
    let missing = r#"device.attributes["gpu.tranche.dev"].profile == "1g.10gb""#;
    let fault = accept(missing).unwrap_err();
    assert_eq!(fault, Fault::Runtime("No such key: profile".to_owned()));
    assert_eq!(accept(&format!("{missing} || true")), Ok(true));
    assert_eq!(accept(&format!("{missing} && false")), Ok(false));
    assert_eq!(accept(&format!("{missing} && true")), Err(fault));
}

#[test]
fn what_is_not_known_is_not_judged() {
    for expression in [
        r#"ip("10.0.0.1").family() == 4"#,
        r#"url("https://a").getHost() == "a""#,
        "device.attributes.transformMap(k, v, v).size() > 0",
        "timestamp('2026-01-01T00:00:00Z') == 1",
        "unknown == 1",
        "1 +",
    ] {
        let fault = accept(expression);
        assert!(
            matches!(fault, Err(Fault::Unjudged(_))),
            "{expression}: {fault:?}"
        );
    }
    // The unknown term might have decided the result.
    let both =
        r#"device.attributes["gpu.tranche.dev"].profile == "" || ip("10.0.0.1").family() == 4"#;
    assert!(matches!(accept(both), Err(Fault::Unjudged(_))));
    assert_eq!(accept(r#"ip("10.0.0.1").family() == 4 || true"#), Ok(true));
}
