//! A node with eight GPUs: all tiers at once, GPU by GPU.

use std::collections::{BTreeMap, BTreeSet};

use anyhow::{Context as _, ensure};
use futures::future::try_join_all;
use k8s_openapi::api::resource::v1::ResourceSlice;
use serde_json::Value;
use tranche_api::names::attribute;
use tranche_api::tier::Tier;
use tranche_e2e::{Case, PodHandle, Request, policy, run, system, wait};

use crate::plugin::start_again;

const GPUS: usize = 8;

/// The GPUs whose devices are in the slices.
fn gpus(slices: &BTreeMap<String, ResourceSlice>) -> BTreeSet<String> {
    let devices = slices
        .values()
        .flat_map(|slice| slice.spec.devices.iter().flatten());
    devices
        .filter(|device| system::text(device, attribute::ISOLATION) == Some("exclusive"))
        .filter_map(|device| system::text(device, attribute::UUID).map(str::to_owned))
        .collect()
}

/// Gives the test's node eight GPUs until the test ends; returns their UUIDs. It restarts the plugin, as a boot does when a real node
/// gets other GPUs: the plugin keeps NVML open for some time after the last claim, and an open NVML knows only its first GPUs.
async fn eight_gpus(case: &Case) -> anyhow::Result<BTreeSet<String>> {
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
            let gpus = gpus(&system::complete(slices)?);
            (gpus.len() == GPUS).then_some(gpus)
        })
        .await
}

/// The profile of partitions that capped claims share.
const CAPPED_PROFILE: &str = "1g.20gb";

/// The profile of partitions that concurrent claims share.
const CONCURRENT_PROFILE: &str = "3g.40gb";

/// The claims of a round, with the tier that each pod must get. They need all eight GPUs.
fn requests() -> Vec<(Tier, Request)> {
    let on_partition = |request: Request, profile: &str| {
        request.that(&format!(
            "device.attributes['gpu.tranche.dev'].?profile.orValue('') == '{profile}'"
        ))
    };
    let whole =
        |request: Request| request.that("device.attributes['gpu.tranche.dev'].type == 'gpu'");
    vec![
        (Tier::Timeshared, Request::timeshared()),
        (Tier::Timeshared, Request::timeshared()),
        (Tier::Concurrent, whole(Request::concurrent("15Gi", "40"))),
        (Tier::Concurrent, whole(Request::concurrent("15Gi", "60"))),
        (
            Tier::Concurrent,
            on_partition(Request::concurrent("10Gi", "30"), CONCURRENT_PROFILE),
        ),
        (
            Tier::Concurrent,
            on_partition(Request::concurrent("10Gi", "70"), CONCURRENT_PROFILE),
        ),
        (Tier::Capped, whole(Request::capped("15Gi", "40"))),
        (Tier::Capped, whole(Request::capped("15Gi", "60"))),
        (
            Tier::Capped,
            on_partition(Request::capped("4Gi", "50"), CAPPED_PROFILE),
        ),
        (
            Tier::Capped,
            on_partition(Request::capped("8Gi", "50"), CAPPED_PROFILE),
        ),
        (Tier::Capped, Request::oversubscribed("60Gi", "50")),
        (Tier::Capped, Request::oversubscribed("60Gi", "50")),
        (Tier::Partition, Request::profile("1g.10gb")),
        (Tier::Partition, Request::profile("7g.80gb")),
        (Tier::Exclusive, Request::exclusive()),
        (Tier::Passthrough, Request::of(Tier::Passthrough)),
    ]
}

/// Checks that the pod has a device of this tier. Returns the UUID of its GPU, and the GPU's use: `partition` for shares of
/// partitions.
async fn has(pod: &PodHandle, tier: Tier) -> anyhow::Result<(String, String)> {
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
    let gpu = data["gpuUUID"].as_str().unwrap_or_default().to_owned();
    let percent = data["memoryOversubscription"].as_u64();
    let used = match (data["migUUID"].is_string(), percent) {
        (true, _) => Tier::Partition.to_string(),
        (false, Some(percent)) => format!("{tier} {percent} %"),
        (false, None) => tier.to_string(),
    };
    Ok((gpu, used))
}

#[test]
fn all_tiers_are_served_at_once_and_gpus_change_tiers_undrained() -> anyhow::Result<()> {
    run(async |case: &Case| {
        case.changes("plugin of");
        policy::every_option(case, CAPPED_PROFILE, CONCURRENT_PROFILE).await?;
        let gpus = eight_gpus(case).await?;
        let oversubscribed = gpus.last().context("a GPU")?;
        policy::oversubscribe_one(case, oversubscribed, 200).await?;
        // A virtual machine cannot get a GPU that nvidia-persistenced has open.
        case.node.shell("nvidia-smi -pm 0").await?;
        let namespace = case.namespace("tiers").await?;
        let mut requests = requests();
        for round in 0..2 {
            let mut pods = Vec::new();
            for (nth, (tier, request)) in requests.iter().enumerate() {
                let name = format!("{tier}-{round}-{nth}");
                let pod = namespace.idle(&name, request).await?;
                // While the scheduler binds a pod it counts its share twice (docs/architecture.md), and here all GPUs are full.
                pod.scheduled().await?;
                pods.push((*tier, pod));
            }
            let mut served: BTreeMap<String, String> = BTreeMap::new();
            for (tier, pod) in &pods {
                let (gpu, used) = has(pod, *tier).await?;
                let before = served.insert(gpu.clone(), used.clone());
                ensure!(
                    before.as_ref().is_none_or(|before| *before == used),
                    "{gpu} serves {before:?} and {used}"
                );
            }
            println!("round {round}: {served:?}");
            ensure!(served.len() == GPUS, "not on all GPUs: {served:?}");
            try_join_all(pods.iter().map(|(_, pod)| pod.delete())).await?;
            let any = kube::runtime::watcher::Config::default();
            wait::for_none(namespace.claims(), any, "no more claims", wait::USUAL).await?;
            // In the reverse order next time, so that GPUs serve other tiers.
            requests.reverse();
        }
        case.node.no_claim_files(wait::USUAL).await?;
        case.node.undivided().await
    })
}
