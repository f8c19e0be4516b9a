//! The count of pending pods, against an API server in the same process, in virtual time.

use crate::support;

use std::time::Duration;

use jiff::Timestamp;
use serde_json::{Value, json};
use support::Api;
use tokio::time::sleep;
use tokio_util::sync::CancellationToken;
use tranche_controller::metrics::Metrics;
use tranche_controller::pending;
use tranche_serving::Clock;

/// Counts are renewed once a second.
const SOON: Duration = Duration::from_secs(3);

/// The series of pending pods.
fn series(metrics: &Metrics) -> Vec<String> {
    let text = metrics.text().expect("text");
    let mut lines: Vec<_> = text
        .lines()
        .filter(|line| line.starts_with("tranche_pods_pending{"))
        .map(str::to_owned)
        .collect();
    lines.sort();
    lines
}

fn pod(name: &str, claims: &Value) -> Value {
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"namespace": "team", "name": name, "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {"containers": [], "resourceClaims": claims},
        "status": {"phase": "Pending", "conditions": [
            {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}]},
    })
}

fn template(class: &str) -> Value {
    json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaimTemplate",
        "metadata": {"namespace": "team", "name": class},
        "spec": {"spec": {"devices": {"requests": [{"name": "gpu", "exactly": {"deviceClassName": class}}]}}},
    })
}

#[tokio::test(start_paused = true)]
async fn pods_are_counted_by_reason_while_they_wait_for_ours() {
    let api = Api::new(Clock::new(|| Timestamp::UNIX_EPOCH));
    let (metrics, stop) = (Metrics::default(), CancellationToken::new());
    for class in ["capped.gpu.tranche.dev", "gpu.nvidia.com"] {
        api.put("resourceclaimtemplates", template(class));
    }
    let by = |class| json!([{"name": "gpu", "resourceClaimTemplateName": class}]);
    let ours = by("capped.gpu.tranche.dev");
    for number in 0..40 {
        api.put("pods", pod(&format!("ours-{number}"), &ours));
    }
    api.put("pods", pod("nvidias", &by("gpu.nvidia.com")));
    api.put("pods", pod("plain", &json!(null)));
    let watch = tokio::spawn(pending::watch(
        api.client(None),
        metrics.clone(),
        stop.clone(),
    ));
    sleep(SOON).await;
    let expected = r#"tranche_pods_pending{namespace="team",reason="unallocated"} 40"#;
    assert_eq!(series(&metrics), [expected]);
    assert_eq!(
        api.gets("resourceclaimtemplates"),
        2,
        "one read of each template"
    );
    let text = metrics.text().expect("text");
    let since = r#"tranche_pods_pending_oldest_timestamp_seconds{namespace="team",reason="unallocated"} 1767225600"#;
    assert!(text.contains(since), "{text}");

    // One more pod names a claim that is not there yet; then the claim is somebody else's.
    let own = json!([{"name": "gpu", "resourceClaimName": "own"}]);
    api.put("pods", pod("late", &own));
    sleep(SOON).await;
    let missing = r#"tranche_pods_pending{namespace="team",reason="claim_missing"} 1"#;
    assert_eq!(series(&metrics), [missing, expected]);
    let mut claim = template("gpu.nvidia.com")["spec"].clone();
    claim["apiVersion"] = json!("resource.k8s.io/v1");
    claim["kind"] = json!("ResourceClaim");
    claim["metadata"] = json!({"namespace": "team", "name": "own"});
    api.put("resourceclaims", claim);
    sleep(Duration::from_mins(1)).await;
    assert_eq!(series(&metrics), [expected]);

    // One pod asks for a resource that a class of ours stands for, another for one that a device plugin serves.
    api.put("deviceclasses", json!({
        "apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass",
        "metadata": {"name": "exclusive.gpu.tranche.dev"}, "spec": {"extendedResourceName": "nvidia.com/gpu"},
    }));
    for resource in ["nvidia.com/gpu", "amd.com/gpu"] {
        let mut asks = pod(&resource.replace('/', "-"), &json!(null));
        asks["spec"]["containers"] =
            json!([{"name": "c", "resources": {"requests": {resource: "1"}}}]);
        api.put("pods", asks);
    }
    sleep(SOON).await;
    assert_eq!(series(&metrics), [expected.replace("40", "41")]);
    for pod in ["nvidia.com-gpu", "amd.com-gpu"] {
        api.remove("pods", pod);
    }

    // A claim that several pods share has devices; the pod waits for something else.
    let mut shared = template("capped.gpu.tranche.dev")["spec"].clone();
    shared["apiVersion"] = json!("resource.k8s.io/v1");
    shared["kind"] = json!("ResourceClaim");
    shared["metadata"] = json!({"namespace": "team", "name": "shared"});
    api.put("resourceclaims", shared.clone());
    let by_name = json!([{"name": "gpu", "resourceClaimName": "shared"}]);
    api.put("pods", pod("shares", &by_name));
    sleep(SOON).await;
    assert_eq!(series(&metrics), [expected.replace("40", "41")]);
    shared["status"] = json!({"allocation": {"devices": {"results": []}}});
    api.put("resourceclaims", shared);
    sleep(Duration::from_mins(1)).await;
    let elsewhere = r#"tranche_pods_pending{namespace="team",reason="unschedulable"} 1"#;
    assert_eq!(series(&metrics), [expected, elsewhere]);
    api.remove("pods", "shares");

    // A pod that starts leaves the watch.
    for number in 0..40 {
        api.remove("pods", &format!("ours-{number}"));
    }
    sleep(SOON).await;
    assert_eq!(series(&metrics), [""; 0], "no series is left behind");
    stop.cancel();
    watch.await.expect("no panic");
}
