//! Checks the statements of the examples' READMEs.

use std::io::Write as _;
use std::path::PathBuf;

use anyhow::{Context, ensure};
use k8s_openapi::api::resource::v1::DeviceClass;
use kube::api::{Api, DeleteParams, ListParams};
use serde_json::{Value, json};
use tempfile::NamedTempFile;
use tranche_api::SharingPolicy;
use tranche_e2e::{Case, Namespace, PodHandle, Request, run_on_a_node, tool, wait};

const GI: u64 = 1 << 30;

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../examples")
}

/// Applies an example as its README says, with its pods on the test's node.
async fn apply(case: &Case, name: &str) -> anyhow::Result<()> {
    let read = [
        "create",
        "--dry-run=client",
        "--output",
        "json",
        "--filename",
    ];
    let made = tool::output("kubectl", &read, &[&folder().join(name)]).await?;
    let mut placed = NamedTempFile::with_suffix(".json")?;
    for object in serde_json::Deserializer::from_str(&made).into_iter::<Value>() {
        let mut object = object?;
        for pod in ["/spec", "/spec/template/spec"] {
            let pod = object.pointer_mut(pod);
            if let Some(pod) = pod.filter(|it| it.get("containers").is_some()) {
                pod["nodeSelector"]["kubernetes.io/hostname"] = json!(case.node.name());
            }
        }
        writeln!(placed, "{object}")?;
    }
    let apply = ["apply", "--filename"];
    tool::run("kubectl", &apply, &[placed.path()]).await
}

/// The `data` of all devices of the namespace's claims, which their nodes wrote.
async fn given(namespace: &Namespace) -> anyhow::Result<Vec<Value>> {
    wait::for_answer("status.devices", wait::USUAL, async || {
        let claims = namespace.claims().list(&ListParams::default()).await?;
        let mut given = Vec::new();
        for claim in &claims.items {
            let devices = claim.status.as_ref().and_then(|it| it.devices.as_ref());
            let Some(devices) = devices else {
                return Ok(None);
            };
            given.extend(devices.iter().filter_map(|device| device.data.clone()));
        }
        Ok((!given.is_empty()).then(|| given.into_iter().map(|data| data.0).collect()))
    })
    .await
}

/// Checks that the only device of the namespace's claims is in this tier.
async fn is_in_tier(namespace: &Namespace, tier: &str) -> anyhow::Result<()> {
    let given = given(namespace).await?;
    ensure!(given.len() == 1 && given[0]["tier"] == tier, "{given:?}");
    Ok(())
}

/// The profiles of the partitions that `nvidia-smi -L` lists in the pod.
async fn partitions(pod: &PodHandle) -> anyhow::Result<Vec<String>> {
    let listed = pod.stdout(&["nvidia-smi", "-L"]).await?;
    let lines = listed.lines().map(str::trim_start);
    let profiles = lines.filter_map(|line| line.strip_prefix("MIG ")?.split_whitespace().next());
    Ok(profiles.map(str::to_owned).collect())
}

/// Labels the test's node for an example's policy. Label and policy are removed when the test ends.
async fn label(case: &Case, name: &str, policy: &'static str) -> anyhow::Result<()> {
    let label = format!("example.tranche.dev/{name}");
    let node = case.node.name().to_owned();
    let value = format!("{label}=true");
    let policies: Api<SharingPolicy> = Api::all(case.client.clone());
    let labelled = node.clone();
    case.afterwards("the example's policy and label", async move {
        policies.delete(policy, &DeleteParams::default()).await?;
        let gone = format!("{label}-");
        tool::run("kubectl", &["label", "node", &labelled, &gone], &[]).await
    });
    let command = ["label", "node", &node, &value, "--overwrite"];
    tool::run("kubectl", &command, &[]).await
}

#[test]
fn example_01_exclusive() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let namespace = case.adopt("example-exclusive");
        apply(case, "01-exclusive").await?;
        let training = namespace.handle("training");
        training.started().await?;
        let memory = case.gpus[0].memory.to_count()?;
        ensure!(training.nvidia_smi().await?[0].1 << 20 == memory);
        let logs =
            tranche_e2e::wait::for_answer("a heartbeat", tranche_e2e::wait::USUAL, async || {
                let logs = training.logs().await?;
                Ok(logs.contains("beat 1: holding 60Gi").then_some(logs))
            })
            .await?;
        ensure!(logs.contains(", 0 errors"), "{logs}");
        Ok(())
    })
}

#[test]
fn example_02_capped_share() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let (a, b) = (case.adopt("team-a"), case.adopt("team-b"));
        apply(case, "02-capped-share").await?;
        let (notebook, training) = (a.handle("notebook"), b.handle("training"));
        notebook.started().await?;
        training.started().await?;
        let (small, large) = (notebook.nvidia_smi().await?, training.nvidia_smi().await?);
        ensure!(
            small[0].1 == 20480 && large[0].1 == 40960,
            "{small:?} {large:?}"
        );
        ensure!(
            small[0].0 == large[0].0,
            "on different GPUs: {small:?} {large:?}"
        );
        let filled = notebook.fill(&[]).await?;
        ensure!(
            filled[0].filled == 20 * GI && filled[0].refused > 0,
            "{filled:?}"
        );
        let logs = training.logs().await?;
        ensure!(
            logs.lines()
                .all(|line| line.contains(", 0 errors, moved 0 times")),
            "{logs}"
        );
        Ok(())
    })
}

#[test]
fn example_03_two_gpus() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let namespace = case.adopt("example-two-gpus");
        apply(case, "03-two-gpus").await?;
        let pipeline = namespace.handle("pipeline");
        pipeline.started().await?;
        let mut totals: Vec<_> = pipeline
            .nvidia_smi()
            .await?
            .into_iter()
            .map(|(_, total)| total)
            .collect();
        totals.sort_unstable();
        ensure!(totals == [6 * 1024, 12 * 1024], "{totals:?}");
        wait::for_answer("both GPUs in the log", wait::USUAL, async || {
            let logs = pipeline.logs().await?;
            let has = |line| logs.contains(line);
            Ok((has("6Gi of 6Gi free") && has("12Gi of 12Gi free")).then_some(()))
        })
        .await
    })
}

#[test]
fn example_04_partition() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let namespace = case.adopt("example-partition");
        apply(case, "04-partition").await?;
        let inference = namespace.handle("inference");
        inference.started().await?;
        let found = partitions(&inference).await?;
        ensure!(found == ["1g.10gb"], "{found:?}");
        is_in_tier(&namespace, "partition").await
    })
}

#[test]
fn example_05_partition_by_size() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let namespace = case.adopt("example-partition-by-size");
        apply(case, "05-partition-by-size").await?;
        let training = namespace.handle("training");
        training.started().await?;
        let found = partitions(&training).await?;
        ensure!(found == ["1g.20gb"], "{found:?}");
        is_in_tier(&namespace, "partition").await
    })
}

#[test]
fn example_06_hard() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        // With shares on all GPUs, no device is left that the hardware isolates.
        let others = case.namespace("shares").await?;
        let mut shares = Vec::new();
        for (number, gpu) in case.gpus.iter().enumerate() {
            let request = Request::capped("1Gi", "1").on(&gpu.uuid);
            let share = others.started(&format!("share-{number}"), &request).await?;
            shares.push(share);
        }
        let namespace = case.adopt("example-hard");
        apply(case, "06-hard").await?;
        let untrusted = namespace.handle("untrusted");
        untrusted.has_no_room().await?;
        shares.pop().context("a GPU")?.delete().await?;
        untrusted.started().await?;
        let found = partitions(&untrusted).await?;
        ensure!(found == ["1g.20gb"], "{found:?}");
        is_in_tier(&namespace, "partition").await
    })
}

#[test]
fn example_07_any() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let namespace = case.adopt("example-any");
        apply(case, "07-any").await?;
        let batch = namespace.handle("batch");
        batch.started().await?;
        let seen = batch.nvidia_smi().await?;
        ensure!(seen.len() == 1 && seen[0].1 == 10 * 1024, "{seen:?}");
        is_in_tier(&namespace, "capped").await
    })
}

#[test]
fn example_08_first_available() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let namespace = case.adopt("example-first-available");
        apply(case, "08-first-available").await?;
        let notebook = namespace.handle("notebook");
        notebook.started().await?;
        ensure!(partitions(&notebook).await? == ["1g.20gb"]);
        is_in_tier(&namespace, "partition").await?;
        notebook.delete().await?;
        // With shares on all GPUs, no partition is left.
        let others = case.namespace("shares").await?;
        for (number, gpu) in case.gpus.iter().enumerate() {
            let request = Request::capped("1Gi", "1").on(&gpu.uuid);
            others.started(&format!("share-{number}"), &request).await?;
        }
        apply(case, "08-first-available").await?;
        notebook.started().await?;
        let seen = notebook.nvidia_smi().await?;
        ensure!(seen.len() == 1 && seen[0].1 == 20 * 1024, "{seen:?}");
        is_in_tier(&namespace, "capped").await
    })
}

#[test]
fn example_09_two_partitions() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let namespace = case.adopt("example-two-partitions");
        apply(case, "09-two-partitions").await?;
        let pod = namespace.handle("primary-and-standby");
        pod.started().await?;
        let found = partitions(&pod).await?;
        ensure!(found == ["1g.10gb", "1g.10gb"], "{found:?}");
        let given = given(&namespace).await?;
        ensure!(
            given.len() == 2 && given[0]["gpuUUID"] != given[1]["gpuUUID"],
            "{given:?}"
        );
        Ok(())
    })
}

#[test]
fn example_10_replicas() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let namespace = case.adopt("example-replicas");
        apply(case, "10-replicas").await?;
        let replicas = wait::for_answer("two replicas", wait::USUAL, async || {
            let pods = namespace.pods().list(&ListParams::default()).await?;
            let names: Vec<_> = pods
                .items
                .into_iter()
                .filter_map(|pod| pod.metadata.name)
                .collect();
            Ok((names.len() == 2).then_some(names))
        })
        .await?;
        let mut gpus = Vec::new();
        for name in &replicas {
            let replica = namespace.handle(name);
            replica.started().await?;
            gpus.extend(replica.nvidia_smi().await?);
        }
        ensure!(gpus.len() == 2 && gpus[0].0 != gpus[1].0, "{gpus:?}");
        // Other claims can have the rest of these GPUs.
        let other = case.namespace("other").await?;
        let request = Request::capped("60Gi", "80");
        other.started("pod", &request).await?;
        let scale = ["scale", "deployment", "server", "--replicas", "3"];
        let namespaced = [&["--namespace", "example-replicas"], &scale[..]].concat();
        tool::run("kubectl", &namespaced, &[]).await?;
        let third = wait::for_answer("a third replica", wait::USUAL, async || {
            let pods = namespace.pods().list(&ListParams::default()).await?;
            let mut names = pods.items.into_iter().filter_map(|pod| pod.metadata.name);
            Ok(names.find(|name| !replicas.contains(name)))
        })
        .await?;
        // The node has two GPUs.
        namespace.handle(&third).has_no_room().await
    })
}

#[test]
fn example_11_timeshared() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let namespace = case.adopt("example-timeshared");
        apply(case, "11-timeshared").await?;
        let mut seen = Vec::new();
        for name in ["first", "second"] {
            let pod = namespace.handle(name);
            pod.started().await?;
            seen.push(pod.nvidia_smi().await?);
        }
        let memory = case.gpus[0].memory.to_count()?;
        ensure!(seen[0] == seen[1] && seen[0].len() == 1, "{seen:?}");
        ensure!(seen[0][0].1 << 20 == memory, "{seen:?}");
        Ok(())
    })
}

#[test]
fn example_12_extended_resources() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let namespace = case.adopt("example-extended-resources");
        let classes: Api<DeviceClass> = Api::all(case.client.clone());
        case.afterwards("the example's classes", async move {
            for class in ["example-extended-gpu", "example-extended-partition"] {
                classes.delete(class, &DeleteParams::default()).await?;
            }
            Ok(())
        });
        apply(case, "12-extended-resources").await?;
        let (whole, partition) = (namespace.handle("whole"), namespace.handle("partition"));
        whole.started().await?;
        partition.started().await?;
        let memory = case.gpus[0].memory.to_count()?;
        let seen = whole.nvidia_smi().await?;
        ensure!(seen.len() == 1 && seen[0].1 << 20 == memory, "{seen:?}");
        ensure!(partitions(&partition).await? == ["1g.10gb"]);
        Ok(())
    })
}

#[test]
fn example_13_concurrent() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let mut seen = Vec::new();
        let namespaces = ["example-concurrent-a", "example-concurrent-b"].map(|it| case.adopt(it));
        apply(case, "13-concurrent").await?;
        for namespace in &namespaces {
            let server = namespace.handle("server");
            server.started().await?;
            is_in_tier(namespace, "concurrent").await?;
            seen.push(server.seen().await?.remove(0));
        }
        ensure!(seen[0].uuid == seen[1].uuid, "{seen:?}");
        for (seen, (gibs, multiprocessors)) in seen.iter().zip([(10, 40), (20, 80)]) {
            ensure!(
                seen.total == gibs * GI && seen.multiprocessors == multiprocessors,
                "{seen:?}"
            );
        }
        Ok(())
    })
}

#[test]
fn example_14_virtual_machine() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let namespace = case.adopt("example-virtual-machine");
        label(case, "virtual-machines", "example-virtual-machines").await?;
        let back = case
            .node
            .disable_persistence_mode(&case.gpus[0].uuid)
            .await?;
        let on = case.node.clone();
        case.afterwards("persistence mode", async move {
            on.shell(&back).await.map(drop)
        });
        apply(case, "14-virtual-machine").await?;
        let machine = namespace.handle("machine");
        machine.started().await?;
        is_in_tier(&namespace, "passthrough").await?;
        let address = &case.gpus[0].pci_bus_id;
        wait::for_answer("the pod's log", wait::USUAL, async || {
            let log = machine.logs().await?;
            ensure!(
                log.starts_with("1\nvfio\n") && log.contains(&**address),
                "{log}"
            );
            Ok(Some(()))
        })
        .await?;
        machine.delete().await?;
        case.node.has_gpu_again(&case.gpus[0].uuid).await
    })
}

#[test]
fn example_15_oversubscribed() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let namespace = case.adopt("example-oversubscribed");
        label(case, "oversubscribed", "example-oversubscribed").await?;
        apply(case, "15-oversubscribed").await?;
        let notebooks = ["first", "second"].map(|name| namespace.handle(name));
        let mut seen = Vec::new();
        for notebook in &notebooks {
            notebook.started().await?;
            seen.push(notebook.seen().await?.remove(0));
            let data = notebook.device_data().await?;
            ensure!(
                data["memoryOversubscription"] == 200 && data["residentMemory"] == "30Gi",
                "{data}"
            );
        }
        ensure!(
            seen[0].uuid == seen[1].uuid && seen.iter().all(|seen| seen.total == 60 * GI),
            "{seen:?}"
        );
        Ok(())
    })
}

#[test]
fn example_16_priority() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let namespace = case.adopt("example-priority");
        apply(case, "16-priority").await?;
        let mut gpus = Vec::new();
        for (name, priority, word) in [
            ("service", "high", "p99"),
            ("batch", "low", "of the GPU's time"),
        ] {
            let pod = namespace.handle(name);
            pod.started().await?;
            let data = pod.device_data().await?;
            ensure!(data["priority"] == priority, "{data}");
            gpus.push(data["gpuUUID"].clone());
            wait::for_answer("the pod's log", wait::USUAL, async || {
                let log = pod.logs().await?;
                ensure!(log.contains(word), "{log}");
                Ok(Some(()))
            })
            .await?;
        }
        ensure!(gpus[0] == gpus[1], "{gpus:?}");
        Ok(())
    })
}
