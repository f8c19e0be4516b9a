//! The archive has what support needs and no planted secret.

use std::io::Read;

use flate2::read::GzDecoder;
use serde_json::json;

use crate::evidence::Log;
use crate::facts::Facts;
use crate::testing::{busy, object};

use super::*;

const SECRET: &str = "planted-hunter2-secret";
const TOKEN: &str = "eyJhbGciOiJSUzI1NiIsImtpZCI6IngifQ.cGxhbnRlZA.c2lnbmF0dXJl";

fn evidence() -> Evidence {
    let pod = json!({
        "metadata": {
            "name": "tranche-node-plugin-x",
            "namespace": "tranche-system",
            "annotations": {"kubectl.kubernetes.io/last-applied-configuration": format!("{{\"env\": \"{SECRET}\"}}")},
            "managedFields": [{"manager": SECRET}],
        },
        "spec": {"containers": [{
            "name": "plugin",
            "image": "tranche/tranche:0.1.0",
            "args": ["--password", SECRET],
            "env": [{"name": "PROXY", "value": format!("http://user:{SECRET}@proxy")}],
        }]},
    });
    let event = json!({
        "metadata": {"name": "e", "namespace": "tranche-system"},
        "eventTime": null,
        "note": format!("request refused, token: {SECRET}"),
    });
    Evidence {
        facts: Facts {
            snapshot: busy().snapshot(),
            ..Facts::default()
        },
        pods: vec![object(pod)],
        logs: vec![Log {
            pod: "tranche-node-plugin-x".into(),
            container: "plugin".into(),
            text: format!(
                "prepared the claim team-a/notebook\nAuthorization: Bearer {TOKEN}\npassword={SECRET}\n"
            ),
        }],
        events: vec![object(event)],
        missing: Vec::new(),
    }
}

fn unpacked(archive: &[u8]) -> Vec<File> {
    let mut archive = tar::Archive::new(GzDecoder::new(archive));
    let entries = archive.entries().unwrap();
    entries
        .map(|entry| {
            let mut entry = entry.unwrap();
            let path = entry.path().unwrap().display().to_string();
            let mut text = String::new();
            entry.read_to_string(&mut text).unwrap();
            File { path, text }
        })
        .collect()
}

#[test]
fn a_planted_secret_is_not_in_the_archive() {
    let packed = archive(&files(&evidence()), "tranche", 0).unwrap();
    let files = unpacked(&packed);
    for file in &files {
        for secret in [SECRET, "hunter2", TOKEN, "cGxhbnRlZA"] {
            assert!(!file.text.contains(secret), "{}: {}", file.path, file.text);
        }
    }
    let text = |path: &str| {
        let path = format!("tranche/{path}");
        let mut files = files.iter();
        files.find(|it| it.path == path).unwrap().text.clone()
    };
    assert!(text("gpunodes.json").contains("NVIDIA H100 80GB HBM3"));
    assert!(text("resourceclaims.json").contains("notebook"));
    assert!(text("sharingpolicies.json").contains("timeshared"));
    assert!(text("pods.json").contains("tranche/tranche:0.1.0"));
    assert!(text("pods.json").contains("PROXY"));
    assert!(
        text("logs/tranche-node-plugin-x/plugin.log")
            .contains("prepared the claim team-a/notebook")
    );
    assert!(text("events.json").contains("request refused"));
    assert!(text("doctor.json").contains("findings"));
}
