//! The published devices.

use anyhow::{Context, ensure};
use k8s_openapi::api::resource::v1::{Device, ResourceSlice};
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, ListParams};
use tranche_api::names::{DRIVER, attribute, pool};
use tranche_api::tier::Tier;
use tranche_e2e::{Case, run_on_a_hollow_node, system, wait};

use crate::support::LEADER;

#[test]
fn every_gpu_is_published_in_every_tier() -> anyhow::Result<()> {
    run_on_a_hollow_node(async |case: &Case| {
        let slices = case.plugin().settled().await?;
        let mut devices = Vec::new();
        for slice in slices.values() {
            ensure!(
                slice.spec.pool.name == pool(case.node.name()),
                "{:?}",
                slice.spec.pool
            );
            ensure!(
                slice.spec.node_name.as_deref() == Some(case.node.name()),
                "{:?}",
                slice.spec.node_name
            );
            let owners = slice.owner_references();
            ensure!(
                owners
                    .iter()
                    .any(|owner| owner.kind == "Node" && owner.name == case.node.name()),
                "{owners:?}"
            );
            devices.extend(slice.spec.devices.clone().unwrap_or_default());
        }
        // An H100 has 25 partitions; those of one profile differ in their memory slice.
        let is_partition = |device: &Device| {
            system::text(device, attribute::ISOLATION) == Some(Tier::Partition.as_str())
        };
        let (partitions, devices): (Vec<_>, Vec<_>) = devices.into_iter().partition(is_partition);
        ensure!(
            partitions.len() == 25 * case.gpus.len(),
            "{} partitions",
            partitions.len()
        );
        let names: Vec<_> = devices.iter().map(|device| device.name.clone()).collect();
        let expected: Vec<_> = case
            .gpus
            .iter()
            .flat_map(|gpu| ["-capped", "-concurrent", "-timeshared", ""].map(|tier| (gpu, tier)))
            // `GPU-` and the first eight digits.
            .map(|(gpu, tier)| format!("gpu-{}{tier}", &gpu.uuid[4..12]))
            .collect();
        ensure!(names == expected, "{names:?}, not {expected:?}");
        for (device, gpu) in devices
            .iter()
            .zip(case.gpus.iter().flat_map(|gpu| [gpu; 4]))
        {
            ensure!(
                system::text(device, "uuid") == Some(&gpu.uuid),
                "{device:?}"
            );
            ensure!(
                system::text(device, "productName") == Some(&gpu.product_name),
                "{device:?}"
            );
            ensure!(
                system::text(device, "resource.kubernetes.io/pciBusID") == Some(&gpu.pci_bus_id),
                "{device:?}"
            );
            let attributes = device.attributes.as_ref().context("attributes")?;
            let int = |name: &str| attributes.get(name).and_then(|value| value.int);
            ensure!(
                int(attribute::MINOR) == Some(gpu.minor.into())
                    && int(attribute::INDEX) == gpu.index.map(Into::into),
                "{device:?}"
            );
            let isolation = system::text(device, "isolation").context("isolation")?;
            ensure!(
                device.allow_multiple_allocations == (isolation != "exclusive").then_some(true),
                "{device:?}"
            );
            ensure!(
                device
                    .consumes_counters
                    .as_ref()
                    .is_some_and(|sets| sets.len() == 1),
                "{device:?}"
            );
        }
        Ok(())
    })
}

#[test]
fn a_deleted_slice_comes_back() -> anyhow::Result<()> {
    run_on_a_hollow_node(async |case: &Case| {
        let _held = LEADER.lock().await;
        let api: Api<ResourceSlice> = Api::all(case.client.clone());
        let before = case.plugin().published().await?;
        for name in before.keys() {
            let uid = before[name].uid();
            api.delete(name, &DeleteParams::default()).await?;
            let what = format!("slice {name} back");
            case.plugin()
                .slices(&what, wait::HEALED, |slices| {
                    let slices = system::complete(slices)?;
                    (slices.len() == before.len() && slices.get(name)?.uid() != uid).then_some(())
                })
                .await?;
        }
        // And all of them at once.
        let old = case.plugin().published().await?;
        let fields = format!("spec.driver={DRIVER},spec.nodeName={}", case.node.name());
        let ours = ListParams::default().fields(&fields);
        api.delete_collection(&DeleteParams::default(), &ours)
            .await?;
        case.plugin()
            .slices("all slices back", wait::HEALED, |slices| {
                let slices = system::complete(slices)?;
                let fresh = slices
                    .iter()
                    .all(|(name, slice)| old.get(name).is_none_or(|old| old.uid() != slice.uid()));
                (fresh && slices.len() == before.len()).then_some(())
            })
            .await
    })
}
