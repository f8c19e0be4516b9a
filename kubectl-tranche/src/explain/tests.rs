//! Explanations of pods and claims.

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};

use super::*;
use crate::output::{Format, text};
use crate::testing::{World, busy, object, share, uuid, whole};

/// Adds a pod that uses claims by name.
fn pod(world: &mut World, name: &str, claims: &[&str], spec: &Value) {
    let (namespace, name) = name.split_once('/').unwrap();
    let claims = claims.iter().enumerate().map(
        |(number, claim)| json!({"name": format!("gpu-{number}"), "resourceClaimName": claim}),
    );
    let mut pod = json!({
        "metadata": {"namespace": namespace, "name": name, "uid": format!("uid-{namespace}-{name}")},
        "spec": {"containers": [], "resourceClaims": claims.collect::<Vec<_>>()},
    });
    pod["spec"]
        .as_object_mut()
        .unwrap()
        .extend(spec.as_object().unwrap().clone());
    world.pods.push(object::<Pod>(pod));
}

/// The nodes of a world; `taints` by node.
fn nodes(world: &mut World, taints: &BTreeMap<&str, Value>) {
    let names = ["node-a", "node-b"];
    let nodes = names.map(|name| {
        json!({
            "metadata": {"name": name, "labels": {"zone": name}},
            "spec": {"taints": taints.get(name).cloned().unwrap_or(json!([]))},
        })
    });
    let list = json!({"metadata": {}, "items": nodes});
    world.others.insert("/api/v1/nodes".to_owned(), list);
}

fn empty_lists(world: &mut World, namespace: &str) {
    let none = json!({"metadata": {}, "items": []});
    for path in [
        "/apis/resource.k8s.io/v1/devicetaintrules".to_owned(),
        format!("/apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaimtemplates"),
        format!("/api/v1/namespaces/{namespace}/resourcequotas"),
    ] {
        world.others.entry(path).or_insert_with(|| none.clone());
    }
}

async fn explained(world: &mut World, name: &str) -> Result<Explanation, String> {
    empty_lists(world, "team-a");
    if !world.others.contains_key("/api/v1/nodes") {
        nodes(world, &BTreeMap::new());
    }
    let (kind, name) = match name.split_once('/') {
        Some(("claim", name)) => (Some("claim"), name),
        Some((_, name)) => (Some("pod"), name),
        None => (None, name),
    };
    let read = read(&world.cluster(), kind, name).await;
    let (facts, snapshot) = read.map_err(|error| error.to_string())?;
    let model = Model::new(&snapshot, &Err(String::new()));
    Ok(explain(&facts, &model))
}

fn shown(explanation: &Explanation) -> String {
    let text = text(explanation, Format::Table).unwrap();
    anstream::adapter::strip_str(&text).to_string()
}

/// A claim for a share of 40Gi, and a pod that waits for it.
fn waiting(world: &mut World) {
    let mut classes = world.classes.clone();
    classes.clear();
    for (name, isolation) in [("capped", "capped"), ("exclusive", "exclusive")] {
        let expression =
            format!("device.attributes[\"gpu.tranche.dev\"].isolation == \"{isolation}\"");
        classes.push(object(json!({
            "metadata": {"name": format!("{name}.gpu.tranche.dev")},
            "spec": {"selectors": [{"cel": {"expression": expression}}]},
        })));
    }
    world.classes = classes;
    world.claims.push(object(json!({
        "metadata": {"namespace": "team-a", "name": "large", "uid": "uid-large"},
        "spec": {"devices": {"requests": [{"name": "gpu", "exactly": {
            "deviceClassName": "capped.gpu.tranche.dev",
            "capacity": {"requests": {"memory": "40Gi"}},
        }}]}},
    })));
    pod(world, "team-a/large", &["large"], &json!({}));
}

#[tokio::test]
async fn a_waiting_pod_learns_what_gpus_lack_and_whose_release_helps() {
    let mut world = busy();
    waiting(&mut world);
    let taint = json!([{"key": "repair", "value": "now", "effect": "NoSchedule"}]);
    nodes(&mut world, &BTreeMap::from([("node-b", taint)]));
    let explanation = explained(&mut world, "large").await.unwrap();
    assert_eq!(explanation.verdict, Conclusion::Waits);
    let text = shown(&explanation);
    for part in [
        "pod team-a/large waits\n",
        "needs 40Gi of memory, class capped.gpu.tranche.dev (team-a/large, request gpu)",
        "node node-a: gpu-a0000000 has ",
        " of memory left, 40Gi needed; held by team-a/notebook (20Gi) and team-b/training (40Gi)",
        "node node-a: gpu-a0000001 serves partition 3g.40gb to team-a/left and team-a/right",
        "node node-b: the node's taint repair=now:NoSchedule",
        // The other share's 20Gi are not enough.
        "would fit on node node-a after the release of team-b/training\n",
    ] {
        assert!(text.contains(part), "{part:?} is not in\n{text}");
    }
}

#[tokio::test]
async fn a_pod_with_an_extended_resource_is_explained_by_its_class() {
    let mut world = busy();
    waiting(&mut world);
    let whole = world.classes[1].spec.as_mut().unwrap();
    whole.extended_resource_name = Some("nvidia.com/gpu".into());
    let asks = |count: &str| {
        let requests = json!({"requests": {"nvidia.com/gpu": count}});
        json!({"containers": [{"name": "main", "resources": requests}]})
    };
    pod(&mut world, "team-a/two", &[], &asks("2"));
    pod(&mut world, "team-a/none", &[], &asks("0"));
    let explanation = explained(&mut world, "two").await.unwrap();
    assert_eq!(explanation.verdict, Conclusion::Waits);
    let text = shown(&explanation);
    for part in [
        "pod team-a/two waits\n",
        "class exclusive.gpu.tranche.dev (team-a/<extended-resources>, request nvidia.com/gpu of container main)",
        "node node-a: gpu-a0000000 serves ",
    ] {
        assert!(text.contains(part), "{part:?} is not in\n{text}");
    }
    let explanation = explained(&mut world, "none").await.unwrap();
    assert_eq!(explanation.verdict, Conclusion::Fits);
}

#[tokio::test]
async fn a_whole_gpu_in_use_is_named_with_its_holder() {
    let mut world = World::new();
    let card = |name: &str, node: &str| whole(node, name);
    world.claim("team-b/one", &["one"], &[card("gpu-a0000000", "node-a")]);
    world.claim("team-b/two", &["two"], &[card("gpu-a0000001", "node-a")]);
    world.claim(
        "team-c/three",
        &["three"],
        &[share("node-b", "gpu-b0000000-capped", "1Gi", "1")],
    );
    waiting(&mut world);
    let explanation = explained(&mut world, "claim/large").await.unwrap();
    let text = shown(&explanation);
    for part in [
        "claim team-a/large waits\n",
        "node node-a: gpu-a0000000 serves exclusive to team-b/one",
        "would fit on node node-a after the release of team-b/one",
    ] {
        assert!(text.contains(part), "{part:?} is not in\n{text}");
    }
    // A T4 has less than 40Gi.
    let node = explanation
        .nodes
        .iter()
        .find(|it| it.node == "node-b")
        .unwrap();
    assert!(!node.has_devices, "{node:?}");
}

#[tokio::test]
async fn a_pod_that_fits_and_one_that_runs_are_told_what_they_get() {
    let mut world = busy();
    world
        .claims
        .retain(|claim| claim.metadata.name.as_deref() != Some("training"));
    waiting(&mut world);
    let explanation = explained(&mut world, "pod/large").await.unwrap();
    assert_eq!(explanation.verdict, Conclusion::Fits);
    let text = shown(&explanation);
    assert!(
        text.contains("node node-a: has room: 40Gi of gpu-a0000000-capped"),
        "{text}"
    );

    let mut world = busy();
    pod(
        &mut world,
        "team-a/notebook",
        &["notebook"],
        &json!({"nodeName": "node-a"}),
    );
    let explanation = explained(&mut world, "notebook").await.unwrap();
    assert_eq!(explanation.verdict, Conclusion::Allocated);
    let text = shown(&explanation);
    let gpu = uuid('a', 0);
    for part in [
        "pod team-a/notebook has its devices".to_owned(),
        format!("notebook: capped, 20Gi, 25 % of the cores of {gpu} on node node-a"),
        "beside team-b/training (40Gi, 50 %)".to_owned(),
    ] {
        assert!(text.contains(&part), "{part:?} is not in\n{text}");
    }
}

#[tokio::test]
async fn other_obstacles_have_a_line_each() {
    let mut world = busy();
    waiting(&mut world);
    let spec = json!({
        "schedulingGates": [{"name": "example.com/gate"}],
        "nodeSelector": {"zone": "node-b"},
    });
    pod(&mut world, "team-a/gated", &["lorge"], &spec);
    world.pods.push(object(json!({
        "metadata": {"namespace": "team-a", "name": "templated"},
        "spec": {"containers": [], "resourceClaims": [
            {"name": "gpu", "resourceClaimTemplateName": "quater-gpu"},
            {"name": "more", "resourceClaimTemplateName": "quarter-gpu"},
        ]},
    })));
    let template = json!({"metadata": {"name": "quarter-gpu"}, "spec": {"spec": {}}});
    world.others.insert(
        "/apis/resource.k8s.io/v1/namespaces/team-a/resourceclaimtemplates".to_owned(),
        json!({"metadata": {}, "items": [template]}),
    );
    let resource = "capped.gpu.tranche.dev.deviceclass.resource.k8s.io/devices";
    let quota = json!({
        "metadata": {"name": "gpus"},
        "status": {"hard": {resource: "2"}, "used": {resource: "2"}},
    });
    world.others.insert(
        "/api/v1/namespaces/team-a/resourcequotas".to_owned(),
        json!({"metadata": {}, "items": [quota]}),
    );
    let text = shown(&explained(&mut world, "gated").await.unwrap());
    for part in [
        "scheduling gate example.com/gate",
        "the ResourceClaim lorge does not exist in namespace team-a; there is large",
        "node node-a: the pod's nodeSelector zone=node-b",
    ] {
        assert!(text.contains(part), "{part:?} is not in\n{text}");
    }
    let text = shown(&explained(&mut world, "templated").await.unwrap());
    assert!(!text.contains("has room: "), "{text}");
    for part in [
        "the ResourceClaimTemplate quater-gpu does not exist in namespace team-a; there is quarter-gpu",
        "no claim was made from the template quarter-gpu for more: the quota gpus is used up",
    ] {
        assert!(text.contains(part), "{part:?} is not in\n{text}");
    }
    // A class that does not exist.
    world
        .classes
        .retain(|class| class.metadata.name.as_deref() != Some("capped.gpu.tranche.dev"));
    world.classes.push(object(
        json!({"metadata": {"name": "caped.gpu.tranche.dev"}, "spec": {}}),
    ));
    let text = shown(&explained(&mut world, "large").await.unwrap());
    let part = "the DeviceClass capped.gpu.tranche.dev of request gpu does not exist; there is caped.gpu.tranche.dev";
    assert!(text.contains(part), "{text}");
}

#[tokio::test]
async fn what_may_not_be_read_makes_the_verdict_partial() {
    let mut world = busy();
    waiting(&mut world);
    nodes(&mut world, &BTreeMap::new());
    world
        .refused
        .insert("/apis/resource.k8s.io/v1/resourceclaims".to_owned(), 403);
    world.refused.insert("/api/v1/nodes".to_owned(), 403);
    let explanation = explained(&mut world, "large").await.unwrap();
    assert!(explanation.is_partial);
    let text = shown(&explanation);
    assert!(
        text.contains("(partial: not everything could be read)"),
        "{text}"
    );
    // The slices name the nodes.
    assert_eq!(explanation.nodes.len(), 2);
    // Without the claims of others the GPU looks free enough.
    assert_eq!(explanation.verdict, Conclusion::Fits);
    let error = explained(&mut world, "lrge").await.unwrap_err();
    let expected = "there is no pod or claim lrge in namespace team-a; there is large: check the name and --namespace";
    assert_eq!(error, expected);
}

/// A pod on `node-a` with the claim of `busy`.
fn running(world: &mut World, spec: &Value, status: &Value) {
    let mut all = json!({"nodeName": "node-a"});
    all.as_object_mut()
        .unwrap()
        .extend(spec.as_object().unwrap().clone());
    pod(world, "team-a/notebook", &["notebook"], &all);
    let pod = world.pods.last_mut().unwrap();
    pod.status = Some(object(status.clone()));
}

fn naming(claims: &Value) -> Value {
    json!({"containers": [{"name": "main", "resources": {"claims": claims}}]})
}

#[tokio::test]
async fn containers_that_do_not_start_come_before_devices() {
    let mut world = busy();
    let status = json!({"phase": "Pending", "containerStatuses": [{
        "name": "main", "image": "", "imageID": "", "ready": false, "restartCount": 2,
        "state": {"waiting": {
            "reason": "CreateContainerError",
            "message": "failed to inject:\nunresolvable CDI devices gpu.tranche.dev/claim=x",
        }},
    }]});
    running(&mut world, &naming(&json!([{"name": "gpu-0"}])), &status);
    let explanation = explained(&mut world, "notebook").await.unwrap();
    assert_eq!(explanation.verdict, Conclusion::Stopped);
    let text = shown(&explanation);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(
        lines[0],
        "pod team-a/notebook has its devices, and does not start"
    );
    assert!(
        lines[1].contains("container main cannot start: CreateContainerError: failed to inject: unresolvable CDI devices"),
        "{text}"
    );
    assert!(
        lines[2].contains("makes a deleted file again within seconds")
            && text.contains("notebook: capped, 20Gi"),
        "{text}"
    );
}

#[tokio::test]
async fn a_pod_that_cannot_end_is_told_what_its_node_lacks() {
    let mut world = busy();
    running(
        &mut world,
        &naming(&json!([{"name": "gpu-0"}])),
        &json!({"phase": "Running"}),
    );
    let pod = world.pods.last_mut().unwrap();
    pod.metadata.deletion_timestamp = Some(object(json!("2020-01-01T00:00:00Z")));
    world
        .pods
        .retain(|pod| pod.metadata.name.as_deref() != Some("plugin-node-a"));
    let explanation = explained(&mut world, "notebook").await.unwrap();
    assert_eq!(explanation.verdict, Conclusion::Late);
    let text = shown(&explanation);
    for part in [
        "pod team-a/notebook should have ended, and still has its devices\n",
        "node node-a: no pod of the node plugin is there, and 4 claims are held there",
    ] {
        assert!(text.contains(part), "{part:?} is not in\n{text}");
    }
}

#[tokio::test]
async fn a_container_that_names_no_claim_is_told_that_it_has_no_devices() {
    let mut world = busy();
    running(
        &mut world,
        &naming(&json!([])),
        &json!({"phase": "Running"}),
    );
    let text = shown(&explained(&mut world, "notebook").await.unwrap());
    assert!(
        text.contains("no container names the claim gpu-0 in its resources.claims"),
        "{text}"
    );

    let mut world = busy();
    let two = json!({"containers": [
        {"name": "main", "resources": {"claims": [{"name": "gpu-0"}]}}, {"name": "sidecar"},
    ]});
    running(&mut world, &two, &json!({"phase": "Running"}));
    let text = shown(&explained(&mut world, "notebook").await.unwrap());
    assert!(
        text.contains("container sidecar names no claim in its resources.claims"),
        "{text}"
    );
    assert!(!text.contains("container main"), "{text}");
}

#[tokio::test]
async fn claims_of_init_containers_are_held_together_and_lines_are_said_once() {
    let mut world = World::new();
    waiting(&mut world);
    world.pods.pop();
    let mut names = Vec::new();
    for name in ["first", "second", "third"] {
        let mut claim = world.claims[0].clone();
        claim.metadata.name = Some(name.to_owned());
        claim.metadata.uid = Some(format!("uid-{name}"));
        let requests = claim
            .spec
            .as_mut()
            .unwrap()
            .devices
            .as_mut()
            .unwrap()
            .requests
            .as_mut();
        let exactly = requests.unwrap()[0].exactly.as_mut().unwrap();
        exactly.capacity = Some(object(json!({"requests": {"memory": "70Gi"}})));
        world.claims.push(claim);
        names.push(name);
    }
    pod(&mut world, "team-a/steps", &names, &json!({}));
    let explanation = explained(&mut world, "steps").await.unwrap();
    assert_eq!(explanation.verdict, Conclusion::Waits);
    let text = shown(&explanation);
    assert!(
        text.contains("each of its claims fits alone; but a pod holds all of its claims"),
        "{text}"
    );
    let mut lines: Vec<&str> = text.lines().collect();
    let count = lines.len();
    lines.sort_unstable();
    lines.dedup();
    assert_eq!(lines.len(), count, "{text}");
}

#[tokio::test]
async fn a_taint_is_told_with_its_rule() {
    let mut world = World::new();
    waiting(&mut world);
    let rule = json!({
        "metadata": {"name": "tranche-cordon-7k2xq"},
        "spec": {
            "deviceSelector": {"driver": "gpu.tranche.dev", "pool": "node-a/gpu"},
            "taint": {"key": "gpu.tranche.dev/cordoned", "effect": "NoSchedule"},
        },
    });
    let rules = json!({"metadata": {}, "items": [rule]});
    world.others.insert(
        "/apis/resource.k8s.io/v1/devicetaintrules".to_owned(),
        rules,
    );
    let text = shown(&explained(&mut world, "large").await.unwrap());
    let part = "has the taint gpu.tranche.dev/cordoned:NoSchedule of the DeviceTaintRule tranche-cordon-7k2xq";
    assert!(text.contains(part), "{text}");
}

#[tokio::test]
async fn a_resource_that_nobody_serves_is_told_with_the_charts_value() {
    let mut world = busy();
    waiting(&mut world);
    let asks = |name: &str| json!({"containers": [{"name": "main", "resources": {"requests": {name: "1"}}}]});
    pod(&mut world, "team-a/whole", &[], &asks("nvidia.com/gpu"));
    pod(
        &mut world,
        "team-a/part",
        &[],
        &asks("nvidia.com/mig-1g.10gb"),
    );
    for (name, part) in [
        (
            "whole",
            "serves nvidia.com/gpu: deviceClasses.extendedResources.gpu of Tranche's chart",
        ),
        (
            "part",
            "deviceClasses.extendedResources.profiles of Tranche's chart makes one if it has 1g.10gb",
        ),
    ] {
        let explanation = explained(&mut world, name).await.unwrap();
        assert_eq!(explanation.verdict, Conclusion::Waits);
        let text = shown(&explanation);
        assert!(
            text.contains(part) && !text.contains("has room: "),
            "{text}"
        );
    }
    // A device plugin serves it.
    let node = json!({"metadata": {"name": "node-a"}, "spec": {}, "status": {"allocatable": {"nvidia.com/gpu": "2"}}});
    let nodes = json!({"metadata": {}, "items": [node]});
    world.others.insert("/api/v1/nodes".to_owned(), nodes);
    let explanation = explained(&mut world, "whole").await.unwrap();
    assert_eq!(explanation.verdict, Conclusion::Fits);
}

#[tokio::test]
async fn who_observes_is_a_neighbour() {
    let mut world = World::new();
    let mut result = whole("node-a", "gpu-a0000000");
    world.claim(
        "team-a/notebook",
        &["notebook"],
        std::slice::from_ref(&result),
    );
    result["adminAccess"] = true.into();
    world.claim("monitoring/exporter", &["exporter"], &[result]);
    running(
        &mut world,
        &naming(&json!([{"name": "gpu-0"}])),
        &json!({"phase": "Running"}),
    );
    let text = shown(&explained(&mut world, "notebook").await.unwrap());
    let part = "beside monitoring/exporter (admin access: nothing limits what it uses)";
    assert!(text.contains(part), "{text}");
}

#[tokio::test]
async fn a_node_that_nobody_serves_says_so_to_who_waits() {
    let mut world = World::new();
    waiting(&mut world);
    world.slices.clear();
    let text = shown(&explained(&mut world, "large").await.unwrap());
    let part = "node node-a: it has 2 GPUs and no ResourceSlice, so that none is offered";
    assert!(
        text.contains(part) && !text.contains("no devices"),
        "{text}"
    );
}

#[tokio::test]
async fn cores_have_no_unit() {
    let mut world = busy();
    waiting(&mut world);
    let spec = world.claims.last_mut().unwrap().spec.as_mut().unwrap();
    let requests = spec.devices.as_mut().unwrap().requests.as_mut().unwrap();
    let exactly = requests[0].exactly.as_mut().unwrap();
    exactly.capacity = Some(object(json!({"requests": {"cores": "1000"}})));
    let text = shown(&explained(&mut world, "large").await.unwrap());
    for part in [
        "needs 1000 of cores",
        "gives at most 100 of cores to one claim, 1000 needed",
    ] {
        assert!(text.contains(part), "{part:?} is not in\n{text}");
    }
}
