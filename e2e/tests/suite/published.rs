//! The published devices, and that they stay published.

use std::pin::pin;

use anyhow::ensure;
use futures::TryStreamExt;
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::ResourceExt;
use kube::api::{Api, Patch, PatchParams};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{Event, watcher};
use serde_json::json;
use tranche_api::gpu_node::GpuNode;
use tranche_api::names::{attribute, taint};
use tranche_api::sharing_policy::SharingPolicy;
use tranche_e2e::{Case, Request, policy, pulse, run, run_on_a_node, system, wait};

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
    let library = shell("readlink -f /usr/lib/x86_64-linux-gnu/libcuda.so.1".into())
        .await?
        .trim()
        .to_owned();
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

/// Waits until every capped device has the expected `untestedDriver` and taint.
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

/// The objects that are written although nothing changed.
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
