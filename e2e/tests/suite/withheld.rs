//! Devices that the node must withhold or refuse: GPUs of a competing driver, GPUs that are lost, that hang, that have no device node or
//! are in MIG mode, and devices that an allocator allocated twice.

use std::path::Path;

use anyhow::{Context, ensure};
use k8s_openapi::api::core::v1::{Event, Node as CoreNode};
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::api::{Api, DeleteParams, Patch, PatchParams, PostParams};
use kube::runtime::watcher;
use serde_json::json;
use tranche_api::conditions::SOLE_PROVIDER;
use tranche_api::gpu_node::GpuNode;
use tranche_api::names::{DRIVER, pool};
use tranche_e2e::namespace::{IDLE, Source, manifest};
use tranche_e2e::node::Node;
use tranche_e2e::{Case, Request, run_on_a_node, wait};

use crate::metrics::{read, token, xids_are_counted};

/// A scheduler that ignores shared counters allocates a share and the whole of one GPU to two pods.
#[test]
fn a_gpu_that_an_allocator_gave_away_twice_is_prepared_once() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let namespace = case.namespace("twice").await?;
        let uuid = &case.gpus[0].uuid;
        let share = namespace
            .started("share", &Request::capped("1Gi", "10").on(uuid))
            .await?;

        let device = case.device(&case.gpus[0], "exclusive").await?;
        namespace
            .claim("whole", &Request::exclusive().spec())
            .await?;
        let allocation = json!({"status": {"allocation": {"devices": {"results": [{
            "request": "gpu", "driver": DRIVER, "pool": pool(case.node.name()), "device": device,
        }]}}}});
        namespace
            .claims()
            .patch_status("whole", &PatchParams::default(), &Patch::Merge(&allocation))
            .await
            .context("allocating the claim as such a scheduler would")?;
        // The test binds the pod, because kube-scheduler would not place it.
        let mut bound = manifest("whole", &[Source::Claim("whole")], &IDLE);
        bound["spec"]["nodeName"] = case.node.name().into();
        let whole = namespace.pod_from(bound).await?;

        let event = whole.event("PrepareFailed").await?;
        for part in [uuid.as_str(), "held by claim", "exclusive"] {
            ensure!(event.contains(part), "{event}");
        }
        ensure!(share.seen().await?.len() == 1, "the first pod's GPU");

        // The refused claim is prepared when the first one is released.
        share.delete().await?;
        whole.sync().await?;
        whole.started().await?;
        Ok(())
    })
}

/// The node sees of NVIDIA's DRA driver a registration socket that accepts connections, and slices that name the node's first GPU.
#[test]
fn a_gpu_of_nvidias_dra_driver_is_withheld_until_it_ends() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let node = case.node.name().to_owned();
        let uuid = case.gpus[0].uuid.clone();
        let api: Api<ResourceSlice> = Api::all(case.client.clone());
        let name = case.unique("nvidia");
        let slice = serde_json::from_value(json!({
            "metadata": {"name": name},
            "spec": {
                "driver": "gpu.nvidia.com", "nodeName": node,
                "pool": {"name": node, "generation": 1, "resourceSliceCount": 1},
                "devices": [{"name": "gpu-0", "attributes": {"uuid": {"string": uuid}}}],
            },
        }))?;
        api.create(&PostParams::default(), &slice).await?;
        let slices = api.clone();
        case.afterwards("the other driver's slice", async move {
            let deleted = slices.delete(&name, &DeleteParams::default()).await;
            deleted.map(drop).or_else(|error| match error {
                // The kubelet may have deleted it already.
                kube::Error::Api(status) if status.is_not_found() => Ok(()),
                error => Err(error.into()),
            })
        });

        let stop = "if [ -e /run/other-driver.pid ]; then kill $(cat /run/other-driver.pid) || true; \
                    rm -f /run/other-driver.pid /var/lib/kubelet/plugins_registry/gpu.nvidia.com-reg.sock; fi";
        let undo = case.node.clone();
        case.afterwards("the other driver", async move {
            undo.shell(stop).await.map(drop)
        });
        case.node
            .shell(
                "perl -MIO::Socket::UNIX -e 'my $s = IO::Socket::UNIX->new(Listen => 9, \
                 Local => \"/var/lib/kubelet/plugins_registry/gpu.nvidia.com-reg.sock\") or die $!; \
                 while (my $c = $s->accept) { close $c }' >/dev/null 2>&1 & echo $! >/run/other-driver.pid",
            )
            .await?;

        withheld(case, "the GPU withheld", &[&uuid]).await?;
        let namespace = case.namespace("provider").await?;
        let pod = namespace
            .idle("pod", &Request::exclusive().on(&uuid))
            .await?;
        pod.unschedulable().await?;

        // The file of its socket still exists.
        case.node.shell("kill $(cat /run/other-driver.pid)").await?;
        withheld(case, "the GPU offered again", &[]).await?;
        pod.started().await?;
        Ok(())
    })
}

/// Waits until the GpuNode says that only this GPU is withheld, for this reason; for `None`, that no GPU is withheld.
async fn withheld_for(case: &Case, gpu: Option<(&str, &str)>) -> anyhow::Result<()> {
    let api: Api<GpuNode> = Api::all(case.client.clone());
    let what = gpu.map_or("no GPU withheld".to_owned(), |(uuid, reason)| {
        format!("{uuid} withheld: {reason}")
    });
    wait::for_one(api, case.node.name(), &what, wait::USUAL, |node| {
        let published = node?.status.as_ref()?.published.as_ref()?;
        let entries = published.withheld.iter();
        let found: Vec<_> = entries
            .map(|entry| (entry.gpu.as_str(), entry.reason.as_str()))
            .collect();
        (found == Vec::from_iter(gpu)).then_some(())
    })
    .await
}

/// Waits for an event about the GpuNode that says that this GPU is withheld.
async fn reported(case: &Case, uuid: &str, reason: &str) -> anyhow::Result<()> {
    let events: Api<Event> = Api::namespaced(case.client.clone(), "default");
    let about = watcher::Config::default().fields(&format!(
        "involvedObject.kind=GpuNode,involvedObject.name={},reason=GpuWithheld",
        case.node.name()
    ));
    let what = format!("an event about {uuid}: {reason}");
    wait::for_all(events, about, &what, wait::USUAL, |events| {
        let mut messages = events.values().filter_map(|event| event.message.as_deref());
        messages
            .any(|message| message.contains(uuid) && message.contains(reason))
            .then_some(())
    })
    .await
}

/// Makes a GPU unusable with `fault`, which returns the script that undoes it. Checks that until then only this GPU's devices are
/// withheld, for `reason`.
async fn costs_its_own_devices(
    case: &Case,
    namespace: &str,
    reason: &str,
    fault: impl AsyncFnOnce(&Node, &str) -> anyhow::Result<String>,
) -> anyhow::Result<()> {
    let [first, second] = &case.gpus[..] else {
        anyhow::bail!("two GPUs, not {:?}", case.gpus);
    };
    // A GPU that was in MIG mode in an earlier test may be withheld until the node describes it again.
    withheld_for(case, None).await?;
    let namespace = case.namespace(namespace).await?;
    let neighbour = namespace
        .started("neighbour", &Request::exclusive().on(&second.uuid))
        .await?;

    let undo = fault(&case.node, &first.uuid).await?;
    let (node, script, plugin) = (case.node.clone(), undo.clone(), case.plugin());
    case.afterwards("the GPU", async move {
        node.shell(&script).await?;
        plugin.published().await.map(drop)
    });
    withheld_for(case, Some((&first.uuid, reason))).await?;
    reported(case, &first.uuid, reason).await?;
    let refused = namespace
        .idle("refused", &Request::exclusive().on(&first.uuid))
        .await?;
    refused.unschedulable().await?;
    // The pod of the other GPU still runs, and that GPU's devices are still offered.
    ensure!(neighbour.seen().await?.len() == 1, "the neighbour's GPU");
    case.device(second, "exclusive").await?;

    case.node.shell(&undo).await?;
    withheld_for(case, None).await?;
    refused.started().await.map(drop)
}

#[test]
fn a_gpu_that_falls_off_the_bus_costs_its_own_devices() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let namespace = case.namespace("lost-xid").await?;
        let token = token(case, namespace.name(), true).await?;
        let uuid = &case.gpus[0].uuid;
        costs_its_own_devices(case, "lost", "GpuLost", async |node, uuid| {
            xids_are_counted(case, &token, uuid).await?;
            node.lose_gpu(uuid).await
        })
        .await?;
        // Its error is counted, although a claim had only the other GPU.
        let text = read(case, "/metrics", &token).await?;
        for name in [
            "tranche_gpu_xids_total",
            "tranche_gpu_last_xid_timestamp_seconds",
        ] {
            let series = format!("{name}{{gpu_uuid=\"{uuid}\",xid=\"79\"}}");
            ensure!(text.contains(&series), "{name}: {text}");
        }
        Ok(())
    })
}

#[test]
fn a_gpu_that_is_switched_to_mig_mode_is_not_offered_whole() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        costs_its_own_devices(case, "mig", "MigMode", async |node, uuid| {
            node.enable_mig_mode(uuid).await
        })
        .await
    })
}

/// The calls of the samplers hang, too, because the neighbour keeps them at work.
#[test]
fn a_gpu_whose_calls_hang_costs_its_own_devices() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let namespace = case.namespace("hang-metrics").await?;
        let token = token(case, namespace.name(), true).await?;
        let minor = case.gpus[0].minor;
        costs_its_own_devices(case, "hang", "DriverHangs", async |node, uuid| {
            let undo = node.hang(&format!("gpu = {minor}")).await?;
            let series = format!("tranche_driver_call_hanging{{gpu=\"{uuid}\"}} 1");
            wait::for_answer("the metric of the call", wait::USUAL, async || {
                let text = read(case, "/metrics", &token).await?;
                Ok(text.contains(&series).then_some(()))
            })
            .await?;
            Ok(undo)
        })
        .await
    })
}

/// The plugin's container has its own `/dev`, in which the node stays.
#[test]
fn a_gpu_without_its_device_node_costs_its_own_devices() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let minor = case.gpus[0].minor;
        costs_its_own_devices(case, "node-file", "NoDeviceNode", async |node, _| {
            node.hide(Path::new(&format!("/dev/nvidia{minor}"))).await
        })
        .await
    })
}

/// NVIDIA's own unmodified device plugin registers with the kubelet and advertises all GPUs of the node.
#[test]
fn gpus_of_nvidias_device_plugin_are_withheld_until_it_ends() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let stop = "if [ -e /run/peer.pid ]; then kill $(cat /run/peer.pid) || true; rm -f /run/peer.pid; fi";
        let undo = case.node.clone();
        case.afterwards("NVIDIA's device plugin", async move {
            undo.shell(stop).await.map(drop)
        });
        case.node
            .shell(
                "DEVICE_DISCOVERY_STRATEGY=nvml MIG_STRATEGY=none \
                     setsid /opt/peers/nvidia-device-plugin >/var/log/peer.log 2>&1 </dev/null &
                 echo $! >/run/peer.pid",
            )
            .await?;
        let uuids: Vec<_> = case.gpus.iter().map(|gpu| gpu.uuid.as_str()).collect();
        withheld(case, "all GPUs withheld", &uuids).await?;
        let nodes: Api<CoreNode> = Api::all(case.client.clone());
        let (node, what) = (
            case.node.name(),
            "NVIDIA's plugin's GPUs in the node's status",
        );
        wait::for_one(nodes, node, what, wait::USUAL, |node| {
            let allocatable = node?.status.as_ref()?.allocatable.as_ref()?;
            let advertised = allocatable.get("nvidia.com/gpu")?;
            (advertised.0 == uuids.len().to_string()).then_some(())
        })
        .await?;
        let namespace = case.namespace("plugin").await?;
        let pod = namespace.idle("pod", &Request::exclusive()).await?;
        pod.unschedulable().await?;

        case.node.shell(stop).await?;
        withheld(case, "the GPUs offered again", &[]).await?;
        pod.started().await?;
        Ok(())
    })
}

/// Waits until the GpuNode has exactly these GPUs withheld because of a competing driver.
async fn withheld(case: &Case, what: &str, uuids: &[&str]) -> anyhow::Result<()> {
    let api: Api<GpuNode> = Api::all(case.client.clone());
    wait::for_one(api, case.node.name(), what, wait::USUAL, |node| {
        let status = node?.status.as_ref()?;
        let condition = status
            .conditions
            .iter()
            .find(|c| c.type_ == SOLE_PROVIDER)?;
        let published = status.published.as_ref()?;
        let found: Vec<_> = published
            .withheld
            .iter()
            .filter(|entry| entry.reason == "OtherProvider")
            .map(|entry| entry.gpu.as_str())
            .collect();
        (found == uuids && (condition.status == "True") == uuids.is_empty()).then_some(())
    })
    .await
}
