//! Container runtimes: containerd on the first node, and CRI-O on the second, where it is installed. Both give a container all edits
//! of the CDI specs, and run the hooks.

use std::collections::BTreeSet;

use anyhow::{Context as _, ensure};
use kube::ResourceExt;
use serde_json::Value;
use tranche_api::gpu_node::Gpu;
use tranche_e2e::namespace::{IDLE, Source, manifest};
use tranche_e2e::node::Node;
use tranche_e2e::{Case, PodHandle, Request, run};

const GI: u64 = 1 << 30;
const LIMIT: u64 = 3 * GI;

/// Both nodes with their GPUs and runtimes.
async fn nodes(case: &Case) -> anyhow::Result<Vec<(Node, Vec<Gpu>, String)>> {
    let second = case.second_node().await?;
    let mut nodes = Vec::new();
    for (node, gpus) in [(case.node.clone(), case.gpus.clone()), second] {
        let runtime = node.runtime(&case.client).await?;
        println!("{} runs {runtime}", node.name());
        nodes.push((node, gpus, runtime));
    }
    Ok(nodes)
}

#[test]
fn the_second_node_runs_cri_o_where_it_is_installed() -> anyhow::Result<()> {
    run(async |case: &Case| {
        for (index, (node, _, runtime)) in nodes(case).await?.iter().enumerate() {
            let installed = node.shell("command -v crio || true").await?;
            let expected = if index > 0 && !installed.is_empty() {
                "cri-o://"
            } else {
                "containerd://"
            };
            ensure!(
                runtime.starts_with(expected),
                "{} runs {runtime}, not {expected}",
                node.name()
            );
        }
        Ok(())
    })
}

/// The container edits of the CDI devices that the kubelet has passed to the runtime for a claim.
async fn edits(node: &Node, claim: &str) -> anyhow::Result<Vec<Value>> {
    let script = format!(
        r#"ids=$(jq '[.Data | fromjson | .. | objects | select(.ClaimUID? == "{claim}") | .. | .CDIDeviceIDs? // empty | .[]]' \
            /var/lib/kubelet/dra_manager_state)
        jq --slurp --argjson ids "$ids" '[.[] | .kind as $kind | .containerEdits as $all
            | .devices[] | select("\($kind)=\(.name)" | IN($ids[])) | .containerEdits, $all | values]' \
            /var/run/cdi/gpu.tranche.dev-*.json"#
    );
    let found: Vec<Value> = serde_json::from_str(&node.shell(&script).await?)?;
    ensure!(!found.is_empty(), "no CDI device of the claim {claim}");
    Ok(found)
}

/// The texts of a list in the edits.
fn texts(edits: &[Value], list: &str) -> Vec<String> {
    let values = edits
        .iter()
        .flat_map(|edits| edits[list].as_array().into_iter().flatten());
    values
        .filter_map(|value| value.as_str().map(str::to_owned))
        .collect()
}

/// Checks that the container has everything that the edits name.
async fn has(pod: &PodHandle, node: &Node, edits: &[Value]) -> anyhow::Result<()> {
    let printed = pod.stdout(&["env"]).await?;
    let environment: BTreeSet<_> = printed.lines().collect();
    let wanted = texts(edits, "env");
    ensure!(!wanted.is_empty(), "no variable in {edits:?}");
    for variable in wanted {
        ensure!(environment.contains(&*variable), "{variable} is missing");
    }

    let objects = |list: &str| -> Vec<Value> {
        let all = edits
            .iter()
            .flat_map(|edits| edits[list].as_array().into_iter().flatten());
        all.cloned().collect()
    };
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();

    // The fifth field is the mount point, the sixth its options.
    let mounts = pod.stdout(&["cat", "/proc/self/mountinfo"]).await?;
    let mounted: Vec<Vec<_>> = mounts
        .lines()
        .map(|line| line.split(' ').collect())
        .collect();
    for mount in objects("mounts") {
        let path = text(&mount["containerPath"]);
        // Many images have a link there.
        let behind_link = path.replacen("/var/run/", "/run/", 1);
        let is_it = |fields: &&Vec<&str>| fields[4] == path || fields[4] == behind_link;
        let found = mounted
            .iter()
            .rev()
            .find(is_it)
            .with_context(|| format!("{path} is not mounted: {mounts}"))?;
        let options: Vec<_> = found[5].split(',').collect();
        for option in ["ro", "rw", "nosuid", "nodev", "noexec"] {
            let wanted = mount["options"].as_array().into_iter().flatten();
            ensure!(
                !wanted.into_iter().any(|wanted| wanted == option) || options.contains(&option),
                "{path} is mounted with {options:?}, without {option}"
            );
        }
    }

    let mut devices = BTreeSet::new();
    for device in objects("deviceNodes") {
        let path = text(&device["path"]);
        let on_host = device["hostPath"].as_str().unwrap_or(&path);
        let number = format!("stat -c %t:%T {on_host}");
        let there = pod.stdout(&["stat", "-c", "%t:%T", &path]).await?;
        ensure!(
            there == node.shell(&number).await?,
            "{path} is the device {there}"
        );
        devices.insert(path);
    }
    let all: BTreeSet<_> = pod
        .stdout(&["sh", "-c", "ls -d /dev/nvidia*"])
        .await?
        .lines()
        .map(str::to_owned)
        .collect();
    ensure!(all == devices, "{all:?}, not {devices:?}");

    // The hooks made each link and the loader's cache.
    for hook in objects("hooks") {
        let arguments: Vec<_> = hook["args"].as_array().into_iter().flatten().collect();
        for argument in arguments.windows(2).filter(|pair| pair[0] == "--link") {
            let link = text(argument[1]);
            let (target, path) = link.split_once("::").context("TARGET::PATH")?;
            let points_to = pod.stdout(&["readlink", path]).await?;
            ensure!(points_to.trim() == target, "{path} points to {points_to}");
        }
    }
    pod.stdout(&["grep", "-q", "libcuda.so.1", "/etc/ld.so.cache"])
        .await?;
    Ok(())
}

#[test]
fn a_container_has_all_that_its_cdi_specs_name() -> anyhow::Result<()> {
    run(async |case: &Case| {
        for (node, gpus, _) in nodes(case).await? {
            let namespace = case.namespace(&format!("cdi-{}", node.name())).await?;
            let share = Request::capped("3Gi", "10").on(&gpus[0].uuid);
            let whole = Request::exclusive().on(&gpus[1].uuid);
            for (name, request, gpu) in [("share", share, &gpus[0]), ("whole", whole, &gpus[1])] {
                let pod = namespace.idle(name, &request).await?;
                let started = pod.started().await?;
                let placed = started.spec.and_then(|spec| spec.node_name);
                ensure!(placed.as_deref() == Some(node.name()), "on {placed:?}");
                let claim = pod.claim().await?.uid().context("a UID")?;
                has(&pod, &node, &edits(&node, &claim).await?)
                    .await
                    .with_context(|| format!("{name} on {}", node.name()))?;
                let shown = pod.nvidia_smi().await?;
                let bytes = match name {
                    "share" => LIMIT,
                    _ => gpu.memory.to_count()?,
                };
                ensure!(
                    shown.len() == 1 && shown[0].0 == gpu.uuid && shown[0].1 << 20 == bytes,
                    "{name} on {}: {shown:?}",
                    node.name()
                );
            }
        }
        Ok(())
    })
}

#[test]
fn a_container_that_starts_again_has_its_cap_on_every_runtime() -> anyhow::Result<()> {
    run(async |case: &Case| {
        let nodes = nodes(case).await?;
        let namespace = case.namespace("again").await?;
        for (node, gpus, _) in &nodes {
            let share = Request::capped("3Gi", "10").on(&gpus[0].uuid);
            namespace.template(node.name(), &share.spec()).await?;
            let mut object = manifest(node.name(), &[Source::Template(node.name())], &IDLE);
            object["spec"]["restartPolicy"] = "Always".into();
            let pod = namespace.pod_from(object).await?;
            pod.started().await?;
            for _ in 0..2 {
                let filled = pod.fill(&[]).await?;
                ensure!(
                    filled.len() == 1 && filled[0].filled == LIMIT && filled[0].refused > 0,
                    "on {}: {filled:?}",
                    node.name()
                );
                if pod.restarts().await? == 0 {
                    pod.restart_container(node).await?;
                }
            }
            pod.delete().await?;
            node.no_claim_files(tranche_e2e::wait::USUAL).await?;
        }
        Ok(())
    })
}
