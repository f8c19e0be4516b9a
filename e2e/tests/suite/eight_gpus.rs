//! A node with eight GPUs: all tiers at once, GPU by GPU.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::ensure;
use futures::future::try_join_all;
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::api::{Api, DeleteParams};
use kube::{Client, ResourceExt as _};
use serde_json::Value;
use tranche_api::names::attribute;
use tranche_api::tier::Tier;
use tranche_e2e::system::NodePlugin;
use tranche_e2e::{Case, PodHandle, Request, SYSTEM, policy, run, system, wait};

const GPUS: usize = 8;

/// The GPUs that the slices have devices of.
fn gpus(slices: &BTreeMap<String, ResourceSlice>) -> BTreeSet<String> {
    let devices = slices
        .values()
        .flat_map(|slice| slice.spec.devices.iter().flatten());
    devices
        .filter(|device| system::text(device, attribute::ISOLATION) == Some("exclusive"))
        .filter_map(|device| system::text(device, attribute::UUID).map(str::to_owned))
        .collect()
}

/// Starts the plugin as a boot does, with which a node gets other GPUs: it keeps NVML open for some time after the last claim, and
/// an open NVML knows the GPUs of its start.
async fn start_again(client: &Client, plugin: &NodePlugin) -> anyhow::Result<()> {
    let pods: Api<Pod> = Api::namespaced(client.clone(), SYSTEM);
    let pod = plugin.ready(None).await?;
    pods.delete(&pod.name_any(), &DeleteParams::default())
        .await?;
    Ok(())
}

/// Gives the test's node eight GPUs until the test ends.
async fn eight_gpus(case: &Case) -> anyhow::Result<()> {
    let plugin = case.plugin();
    let before = gpus(&plugin.published().await?).len();
    let edit = format!("s/^count = .*/count = {GPUS}/");
    let back = case.node.change_machine(&edit).await?;
    let (node, restored, client) = (case.node.clone(), case.plugin(), case.client.clone());
    case.afterwards("the node's own GPUs", async move {
        node.shell(&back).await?;
        start_again(&client, &restored).await?;
        let has = |slices: &BTreeMap<String, ResourceSlice>| {
            (gpus(&system::complete(slices)?).len() == before).then_some(())
        };
        restored.slices("its own GPUs", wait::USUAL, has).await
    });
    start_again(&case.client, &plugin).await?;
    plugin
        .slices("eight GPUs", wait::USUAL, |slices| {
            (gpus(&system::complete(slices)?).len() == GPUS).then_some(())
        })
        .await
}

/// The claims of a round: more of the tiers that share.
fn requests() -> Vec<(Tier, Request)> {
    let of = |tier: Tier| -> Vec<Request> {
        match tier {
            Tier::Timeshared => vec![Request::of(tier); 2],
            Tier::Concurrent => ["40", "60"]
                .map(|threads| Request::concurrent("15Gi", threads))
                .to_vec(),
            Tier::Capped => ["20", "30", "40", "60"]
                .map(|cores| Request::capped("15Gi", cores))
                .to_vec(),
            Tier::Partition => vec![
                Request::profile("1g.10gb"),
                Request::profile("3g.40gb"),
                Request::partition("18Gi"),
                Request::profile("7g.80gb"),
            ],
            Tier::Exclusive | Tier::Passthrough => vec![Request::of(tier)],
        }
    };
    let served = Tier::ALL.into_iter();
    served
        .flat_map(|tier| of(tier).into_iter().map(move |request| (tier, request)))
        .collect()
}

/// The pod has a device of this tier; returns the UUID of its GPU.
async fn has(pod: &PodHandle, tier: Tier) -> anyhow::Result<String> {
    pod.started().await?;
    let data: Value = pod.device_data().await?;
    ensure!(data["tier"] == tier.as_str(), "{}: {data}", pod.name());
    if tier != Tier::Passthrough {
        let seen = pod.seen().await?;
        ensure!(
            seen.len() == 1 && data["gpuUUID"] == seen[0].uuid,
            "{}: {seen:?}, and its claim has {data}",
            pod.name()
        );
    }
    Ok(data["gpuUUID"].as_str().unwrap_or_default().to_owned())
}

#[test]
fn every_tier_is_served_at_once_and_gpus_change_tiers_without_a_drain() -> anyhow::Result<()> {
    run(async |case: &Case| {
        policy::tiers(case, &Tier::ALL).await?;
        eight_gpus(case).await?;
        // A GPU that nvidia-persistenced has open does not go to a virtual machine.
        case.node.shell("nvidia-smi -pm 0").await?;
        let namespace = case.namespace("tiers").await?;
        let mut requests = requests();
        for round in 0..2 {
            let pods = try_join_all(requests.iter().enumerate().map(
                async |(nth, (tier, request))| {
                    let pod = namespace
                        .idle(&format!("{tier}-{round}-{nth}"), request)
                        .await?;
                    Ok::<_, anyhow::Error>((*tier, pod))
                },
            ))
            .await?;
            let mut tiers: BTreeMap<String, Tier> = BTreeMap::new();
            for (tier, pod) in &pods {
                let gpu = has(pod, *tier).await?;
                let before = tiers.insert(gpu.clone(), *tier);
                ensure!(
                    before.is_none_or(|before| before == *tier),
                    "{gpu} serves {before:?} and {tier}"
                );
            }
            println!("round {round}: {tiers:?}");
            try_join_all(pods.iter().map(|(_, pod)| pod.delete())).await?;
            // The other way round next time, so that GPUs serve other tiers.
            requests.reverse();
        }
        case.node.no_claim_files(wait::USUAL).await?;
        case.node.undivided().await
    })
}
