//! SharingPolicies of tests, beside the chart's own.

use std::collections::BTreeMap;

use anyhow::Context;
use k8s_openapi::api::resource::v1::{Device, ResourceSlice};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::Client;
use kube::api::{Api, DeleteParams, Patch, PatchParams};
use serde_json::{Value, json};
use tranche_api::SharingPolicy;
use tranche_api::gpu_node::{Gpu, GpuNode, PublishedGpu};
use tranche_api::names::{attribute, capacity};
use tranche_api::sharing_policy::Interval;
use tranche_api::tier::Tier;

use crate::system::{NodePlugin, complete, text};
use crate::{Case, wait};

/// Creates a policy with these fields of its spec and a higher priority than the chart's own. It applies to all GPUs, or to those
/// of the test's only node.
async fn create(case: &Case, name: &str, fields: &Value) -> anyhow::Result<Api<SharingPolicy>> {
    let policies: Api<SharingPolicy> = Api::all(case.client.clone());
    let mut manifest = json!({
        "apiVersion": "gpu.tranche.dev/v1alpha1", "kind": "SharingPolicy",
        "metadata": {"name": name},
        "spec": {"priority": 1000, "tiers": ["exclusive", "capped", "timeshared"]},
    });
    if let Some(uuids) = case.policy_gpus() {
        manifest["spec"]["uuids"] = json!(uuids);
    }
    for (field, value) in fields.as_object().into_iter().flatten() {
        manifest["spec"][field] = value.clone();
    }
    let apply = PatchParams::apply("e2e").force();
    policies
        .patch(name, &apply, &Patch::Apply(manifest))
        .await?;
    Ok(policies)
}

/// Applies a policy with these terms for capped shares until the test ends; returns its name.
pub async fn apply(case: &Case, name: &str, capped: &Value) -> anyhow::Result<String> {
    with_fields(case, name, &json!({"capped": capped})).await
}

/// Applies a policy with this rule for idle claims until the test ends; returns its name.
pub async fn idle(case: &Case, idle: &Value) -> anyhow::Result<String> {
    with_fields(case, "idle", &json!({"idle": idle})).await
}

/// Offers the GPUs in these tiers, until the test ends, and waits until the test's node offers them.
pub async fn tiers(case: &Case, tiers: &[Tier]) -> anyhow::Result<()> {
    with_fields(case, "tiers", &json!({"tiers": tiers})).await?;
    let offers = |slices: &BTreeMap<String, ResourceSlice>, tier: &Tier| {
        let devices = slices
            .values()
            .flat_map(|it| it.spec.devices.iter().flatten());
        let mut tiers = devices.filter_map(|it| text(it, attribute::ISOLATION));
        tiers.any(|offered| offered == tier.as_str())
    };
    let what = format!("devices of the tiers {tiers:?}");
    case.plugin()
        .slices(&what, wait::USUAL, |slices| {
            tiers.iter().all(|tier| offers(slices, tier)).then_some(())
        })
        .await
}

/// Offers the GPUs in all tiers until the test ends, with all options that can be combined on one GPU: capped shares of partitions
/// of the profile `capped`, concurrent shares of the profile `concurrent`. Waits until the test's node offers these.
pub async fn every_option(case: &Case, capped: &str, concurrent: &str) -> anyhow::Result<()> {
    let fields = json!({
        "tiers": Tier::ALL,
        "capped": {
            "maxSharers": 32, "expectedSharers": 2, "contextMemory": "512Mi", "memoryStep": "64Mi", "defaultMemory": "4Gi",
            "coresStep": 5, "defaultCores": 10, "untestedDriver": "Allow", "onBypass": "Kill", "unaccountedMemory": "512Mi",
            "driverCapabilities": ["compute", "utility", "video", "opencl"], "onPartitions": [capped],
        },
        "concurrent": {"maxSharers": 12, "onPartitions": [concurrent]},
        "timeshared": {"maxSharers": 4, "interval": "Short"},
    });
    with_fields(case, "every", &fields).await?;
    let is_shared = |device: &Device, tier: Tier, profile: &str| {
        let of = |name| text(device, name);
        of(attribute::ISOLATION) == Some(tier.as_str()) && of(attribute::PROFILE) == Some(profile)
    };
    case.plugin()
        .slices("every tier and shared partitions", wait::USUAL, |slices| {
            let devices = || {
                let slices = slices.values();
                slices.flat_map(|it| it.spec.devices.iter().flatten())
            };
            let offers = |tier: &Tier| {
                devices().any(|it| text(it, attribute::ISOLATION) == Some(tier.as_str()))
            };
            let shares = |tier, profile| devices().any(|it| is_shared(it, tier, profile));
            let all = Tier::ALL.iter().all(offers)
                && shares(Tier::Capped, capped)
                && shares(Tier::Concurrent, concurrent);
            all.then_some(())
        })
        .await
}

/// Gives the capped shares of each GPU together `percent` of its memory until the test ends. Waits until the test's node offers
/// that.
pub async fn oversubscribe(case: &Case, percent: u32) -> anyhow::Result<()> {
    oversubscribe_with(case, percent, json!({})).await
}

/// Offers one GPU only in capped shares, which together have `percent` of its memory, until the test ends. Waits until the test's
/// node offers that.
pub async fn oversubscribe_one(case: &Case, uuid: &str, percent: u32) -> anyhow::Result<()> {
    // A higher priority than the policy for all GPUs.
    let fields = json!({"priority": 1001, "uuids": [uuid], "tiers": [Tier::Capped]});
    oversubscribe_with(case, percent, fields).await
}

async fn oversubscribe_with(case: &Case, percent: u32, mut fields: Value) -> anyhow::Result<()> {
    fields["capped"] = json!({"memoryOversubscription": percent});
    let name = format!("over-{percent}");
    with_fields(case, &name, &fields).await?;
    let ending = format!("-capped-{percent}");
    case.plugin()
        .slices("oversubscribed shares", wait::USUAL, |slices| {
            let mut devices = slices
                .values()
                .flat_map(|it| it.spec.devices.iter().flatten());
            devices.any(|it| it.name.ends_with(&ending)).then_some(())
        })
        .await
}

/// Offers the GPUs in these tiers, and partitions of these profiles in shares of the tier `shared`, until the test ends. Waits
/// until the test's node offers a shared partition.
pub async fn shared_partitions(
    case: &Case,
    tiers: &[Tier],
    shared: Tier,
    profiles: &[&str],
) -> anyhow::Result<()> {
    let fields = json!({"tiers": tiers, shared.as_str(): {"onPartitions": profiles}});
    with_fields(case, "shared", &fields).await?;
    let is_shared = |device: &Device| {
        let of = |name| text(device, name);
        of(attribute::ISOLATION) == Some(shared.as_str()) && of(attribute::TYPE) == Some("mig")
    };
    case.plugin()
        .slices("shared partitions", wait::USUAL, |slices| {
            let mut devices = slices
                .values()
                .flat_map(|it| it.spec.devices.iter().flatten());
            devices.any(is_shared).then_some(())
        })
        .await
}

/// Applies a policy with this length of time slices until the test ends, and waits until the test's node
/// knows it.
pub async fn interval(case: &Case, interval: Interval) -> anyhow::Result<()> {
    with_fields(
        case,
        "interval",
        &json!({"timeshared": {"interval": interval}}),
    )
    .await?;
    for gpu in &case.gpus {
        asked(case, gpu, |asked| asked.timeshared.interval == interval).await?;
    }
    Ok(())
}

async fn with_fields(case: &Case, name: &str, fields: &Value) -> anyhow::Result<String> {
    let name = case.unique(name);
    let policies = create(case, &name, fields).await?;
    let created = name.clone();
    case.afterwards("the sharing policy", async move {
        policies.delete(&created, &DeleteParams::default()).await?;
        Ok(())
    });
    Ok(name)
}

/// Waits until `is` accepts the settings of a GPU that the test's node is told to apply.
pub async fn asked(
    case: &Case,
    gpu: &Gpu,
    is: impl Fn(&PublishedGpu) -> bool,
) -> anyhow::Result<()> {
    let nodes: Api<GpuNode> = Api::all(case.client.clone());
    wait::for_answer("the policy at the node", wait::USUAL, async || {
        let node = nodes.get(case.node.name()).await?;
        let published = node.status.and_then(|status| status.published);
        let gpus = published.context("something is published")?.gpus;
        let asked = gpus.iter().find(|asked| asked.uuid == gpu.uuid);
        Ok(asked.is_some_and(&is).then_some(()))
    })
    .await
}

/// Offers up to `most` shares of each GPU until the test ends, more than the chart's own policy, with memory for the contexts of
/// `expected` shares.
pub async fn offer(case: &Case, most: u32, expected: u32) -> anyhow::Result<()> {
    let name = case.unique("offer");
    let capped = json!({"maxSharers": most, "expectedSharers": expected});
    let policies = create(case, &name, &json!({"capped": capped})).await?;
    let (plugin, default) = (case.plugin(), most_shares(&case.client).await?);
    case.afterwards("the sharing policy", async move {
        policies.delete(&name, &DeleteParams::default()).await?;
        offered(&plugin, &default).await
    });
    offered(&case.plugin(), &Quantity(most.to_string())).await
}

/// The number of shares of a GPU in the chart's own policy.
async fn most_shares(client: &Client) -> anyhow::Result<Quantity> {
    let policies: Api<SharingPolicy> = Api::all(client.clone());
    let default = policies.get("default").await?;
    Ok(Quantity(default.spec.capped.max_sharers.to_string()))
}

/// Waits until every capped device has room for `most` shares.
async fn offered(plugin: &NodePlugin, most: &Quantity) -> anyhow::Result<()> {
    let what = format!("{} shares of each GPU", most.0);
    plugin
        .slices(&what, wait::USUAL, |slices| {
            let mut capped = complete(slices)?
                .into_values()
                .flat_map(|slice| slice.spec.devices.unwrap_or_default())
                .filter(|device| device.name.ends_with("-capped"))
                .filter_map(|device| {
                    device
                        .capacity
                        .unwrap_or_default()
                        .remove(capacity::SHARERS)
                })
                .peekable();
            capped.peek()?;
            capped.all(|sharers| sharers.value == *most).then_some(())
        })
        .await
}
