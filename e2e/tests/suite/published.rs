//! The published devices, and that they stay published.

use std::pin::pin;

use anyhow::{Context, ensure};
use futures::TryStreamExt;
use k8s_openapi::api::resource::v1::{Device, ResourceSlice};
use kube::ResourceExt;
use kube::api::{Api, DeleteParams, ListParams, Patch, PatchParams};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{Event, watcher};
use serde_json::json;
use tranche_api::gpu_node::GpuNode;
use tranche_api::names::{DRIVER, attribute, pool, taint};
use tranche_api::sharing_policy::SharingPolicy;
use tranche_api::tier::Tier;
use tranche_e2e::{Case, Request, policy, pulse, run, run_on_a_node, system, wait};

#[test]
fn every_gpu_is_published_in_every_tier() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
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
        // An H100 has 25 of them; those of one profile differ by their memory slice.
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
    run_on_a_node(async |case: &Case| {
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
        let of_the_node = format!("spec.driver={DRIVER},spec.nodeName={}", case.node.name());
        let ours = ListParams::default().fields(&of_the_node);
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

/// A driver with one unknown function, which might allocate memory that the cap does not count.
#[test]
fn an_untested_driver_closes_the_capped_tier() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let namespace = case.namespace("untested").await?;
        let put_back = newer_driver(case).await?;
        capped_devices(case, "closed as untested", (true, true)).await?;
        let capped = namespace
            .idle("capped", &Request::capped("1Gi", "10"))
            .await?;
        capped.event("FailedScheduling").await?;
        namespace
            .started("exclusive", &Request::exclusive())
            .await?;

        let allow = json!({"untestedDriver": "Allow"});
        let name = policy::apply(case, "untested", &allow).await?;
        capped_devices(case, "open though untested", (true, false)).await?;
        capped.started().await?;

        let policies: Api<SharingPolicy> = Api::all(case.client.clone());
        let usual = Patch::Merge(json!({"spec": {"capped": {"untestedDriver": null}}}));
        policies
            .patch(&name, &PatchParams::default(), &usual)
            .await?;
        capped_devices(case, "closed again", (true, true)).await?;
        case.node.shell(&put_back).await?;
        capped_devices(case, "as before", (false, false)).await
    })
}

/// Renames an export of the node's libcuda to an unknown name of the same length; the returned script
/// restores the old file.
async fn newer_driver(case: &Case) -> anyhow::Result<String> {
    let shell = async |script: String| case.node.shell(&script).await;
    let library = shell("readlink -f /usr/lib/x86_64-linux-gnu/libcuda.so.1".into()).await?;
    let library = library.trim().to_owned();
    let put_back = format!("if [ -e {library}.old ]; then mv -f {library}.old {library}; fi");
    let (node, script) = (case.node.clone(), put_back.clone());
    case.afterwards(
        "the driver",
        async move { node.shell(&script).await.map(drop) },
    );
    shell(format!(
        "cp -p {library} {library}.old; sed s/cuProfilerStop/cuProfilerWait/ {library}.old >{library}.new; \
         mv {library}.new {library}"
    ))
    .await?;
    Ok(put_back)
}

/// Waits until every capped device has this value of `untestedDriver`, and the taint or not.
async fn capped_devices(case: &Case, what: &str, expected: (bool, bool)) -> anyhow::Result<()> {
    case.plugin()
        .slices(what, wait::USUAL, |slices| {
            let mut capped = system::complete(slices)?
                .into_values()
                .flat_map(|slice| slice.spec.devices.unwrap_or_default())
                .filter(|device| system::text(device, "isolation") == Some("capped"));
            capped
                .all(|device| {
                    let attributes = device.attributes.as_ref();
                    let untested =
                        attributes.and_then(|all| all.get(attribute::UNTESTED_DRIVER)?.bool);
                    let mut taints = device.taints.iter().flatten();
                    let closed = taints.any(|taint| taint.key == taint::UNTESTED_DRIVER);
                    (untested, closed) == (Some(expected.0), expected.1)
                })
                .then_some(())
        })
        .await
}

#[test]
fn at_steady_state_nobody_writes() -> anyhow::Result<()> {
    run(async |case: &Case| {
        for plugin in case.plugins() {
            plugin.settled().await?;
        }
        let slices: Api<ResourceSlice> = Api::all(case.client.clone());
        let nodes: Api<GpuNode> = Api::all(case.client.clone());
        let (slices, nodes) = tokio::try_join!(
            written(slices, system::slices_config()),
            written(nodes, kube::runtime::watcher::Config::default())
        )?;
        ensure!(
            slices.is_empty() && nodes.is_empty(),
            "written: {slices:?} {nodes:?}"
        );
        Ok(())
    })
}

/// The objects that are written without a reason.
async fn written<K: wait::Watched>(
    api: Api<K>,
    config: kube::runtime::watcher::Config,
) -> anyhow::Result<Vec<String>> {
    let mut written = Vec::new();
    let quiet = pulse::within(wait::QUIET, async {
        let mut events = pin!(watcher(api, config).default_backoff());
        while let Some(event) = events.try_next().await? {
            if let Event::Apply(object) | Event::Delete(object) = event {
                written.push(format!(
                    "{} {:?}",
                    object.name_any(),
                    object.resource_version()
                ));
            }
        }
        anyhow::Ok(())
    });
    if let Some(ended) = quiet.await {
        ended?;
        anyhow::bail!("the watch ended");
    }
    Ok(written)
}
