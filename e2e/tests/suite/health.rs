//! GPUs with faults: what is tainted, who is told, and when they are used again.

use anyhow::ensure;
use k8s_openapi::api::core::v1::{Node as CoreNode, Pod};
use k8s_openapi::api::resource::v1::{Device, ResourceClaim};
use kube::api::{Api, Patch, PatchParams};
use serde_json::json;
use tranche_api::conditions::HEALTHY;
use tranche_api::gpu_node::{GpuNode, GpuStatus};
use tranche_api::names::taint;
use tranche_e2e::wait::Limit;
use tranche_e2e::{Case, Request, run_on_a_node, system, wait};

use crate::metrics::{token, xids_are_counted};

/// From a fault to the taint.
const TAINTED: Limit = wait::FAULT_TAINTED;
/// From a fault to the status of the pod that uses the GPU.
const TOLD: Limit = wait::FAULT_TOLD;

fn is_tainted(device: &Device) -> bool {
    let mut taints = device.taints.iter().flatten();
    taints.any(|it| it.key == taint::UNHEALTHY)
}

/// Waits until every published device of a GPU has the taint, or none has.
async fn devices(case: &Case, uuid: &str, tainted: bool, limit: Limit) -> anyhow::Result<()> {
    let what = format!("the devices of {uuid}: tainted is {tainted}");
    let plugin = case.plugin();
    let found = plugin.slices(&what, limit, |slices| {
        let slices = system::complete(slices)?;
        let all = slices
            .values()
            .flat_map(|slice| slice.spec.devices.iter().flatten());
        let mut of_gpu = all
            .filter(|device| system::text(device, "uuid") == Some(uuid))
            .peekable();
        of_gpu.peek()?;
        of_gpu.all(|it| is_tainted(it) == tainted).then_some(())
    });
    found.await
}

/// Waits for the status of a GPU's condition in the GpuNode; returns its reason.
async fn healthy(case: &Case, uuid: &str, status: &str) -> anyhow::Result<String> {
    let api: Api<GpuNode> = Api::all(case.client.clone());
    let what = format!("{uuid}: {HEALTHY} {status}");
    wait::for_one(api, case.node.name(), &what, wait::USUAL, |node| {
        let gpus = &node?.status.as_ref()?.gpus;
        let of_gpu = |gpu: &&GpuStatus| gpu.uuid == uuid;
        let conditions = &gpus.iter().find(of_gpu)?.conditions;
        let condition = conditions.iter().find(|it| it.type_ == HEALTHY)?;
        (condition.status == status).then(|| condition.reason.clone())
    })
    .await
}

/// Waits until the plugin hears of the GPU's Xids.
async fn watched(case: &Case, test: &str, uuid: &str) -> anyhow::Result<()> {
    let namespace = case.namespace(&format!("reads-{test}")).await?;
    let token = token(case, namespace.name(), true).await?;
    xids_are_counted(case, &token, uuid).await
}

/// The health of the first device of the pod, as the kubelet writes it.
fn health_of(pod: &Pod) -> Option<String> {
    let containers = pod.status.as_ref()?.container_statuses.as_ref()?;
    let resources = containers.first()?.allocated_resources_status.as_ref()?;
    let devices = resources.first()?.resources.as_ref()?;
    devices.first()?.health.clone()
}

/// Restores a GPU at the end of the test, whatever happened.
fn restore_afterwards(case: &Case, script: String) {
    let (node, plugin) = (case.node.clone(), case.plugin());
    case.afterwards("the GPU", async move {
        node.shell(&script).await?;
        plugin.published().await.map(drop)
    });
}

#[test]
fn an_idle_gpu_that_falls_off_the_bus_gets_no_claim_until_it_is_proved_to_work()
-> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let uuid = &case.gpus[0].uuid;
        healthy(case, uuid, "True").await?;
        let namespace = case.namespace("fault-idle").await?;
        watched(case, "idle", uuid).await?;
        let restore = case.node.lose_gpu(uuid).await?;
        restore_afterwards(case, restore.clone());
        devices(case, uuid, true, TAINTED).await?;
        let reason = healthy(case, uuid, "False").await?;
        ensure!(["GpuLost", "Xid79"].contains(&reason.as_str()), "{reason}");
        let waits = namespace
            .idle("waits", &Request::exclusive().on(uuid))
            .await?;
        waits.unschedulable().await?;
        case.node.shell(&restore).await?;
        healthy(case, uuid, "True").await?;
        devices(case, uuid, false, wait::USUAL).await?;
        waits.started().await.map(drop)
    })
}

#[test]
fn those_who_use_a_gpu_are_told_of_its_fault() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let uuid = &case.gpus[0].uuid;
        healthy(case, uuid, "True").await?;
        let namespace = case.namespace("fault-held").await?;
        let share = Request::capped("1Gi", "10").on(uuid);
        let holder = namespace.started("holder", &share).await?;
        let told = |status: &'static str, limit| {
            let what = format!("the health of the pod's device: {status}");
            let (pods, name) = (namespace.pods(), holder.name().to_owned());
            async move {
                wait::for_one(pods, &name, &what, limit, |pod| {
                    (health_of(pod?)? == status).then_some(())
                })
                .await
            }
        };
        told("Healthy", wait::USUAL).await?;
        watched(case, "held", uuid).await?;
        let restore = case.node.lose_gpu(uuid).await?;
        restore_afterwards(case, restore.clone());
        told("Unhealthy", TOLD).await?;
        let event = holder.event("GpuUnhealthy").await?;
        ensure!(event.contains(uuid.as_str()), "{event}");
        let claim = holder.claim().await?.metadata.name.unwrap_or_default();
        let claims: Api<ResourceClaim> = namespace.claims();
        wait::for_one(
            claims,
            &claim,
            "the claim's condition",
            wait::USUAL,
            |claim| {
                let devices = claim?.status.as_ref()?.devices.as_ref()?;
                let conditions = devices.first()?.conditions.as_ref()?;
                let condition = conditions.iter().find(|it| it.type_ == HEALTHY)?;
                let others = conditions.iter().any(|it| it.type_ == "Ready");
                (condition.status == "False" && others).then_some(())
            },
        )
        .await?;
        // While the claim holds it, it is not checked.
        case.node.shell(&restore).await?;
        devices(case, uuid, true, wait::USUAL).await?;
        let neighbour = namespace.idle("neighbour", &share).await?;
        neighbour.unschedulable().await?;
        holder.delete().await?;
        healthy(case, uuid, "True").await?;
        neighbour.started().await.map(drop)
    })
}

#[test]
fn an_error_of_a_program_changes_nothing() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let uuid = &case.gpus[0].uuid;
        healthy(case, uuid, "True").await?;
        // That is Xid 13. The Xids are read in their order: when the second has an effect, the first has had its time.
        watched(case, "program", uuid).await?;
        case.node.inject_xid(&case.gpus[1].uuid, 63).await?;
        let second = case.gpus[1].uuid.clone();
        restore_afterwards(case, format!("nvidia-sim-persistenced reset-gpu {second}"));
        let reason = healthy(case, &second, "False").await?;
        ensure!(reason == "RowRemapPending", "{reason}");
        devices(case, &second, true, TAINTED).await?;
        let reason = healthy(case, uuid, "True").await?;
        ensure!(reason == "NoFault", "{reason}");
        devices(case, uuid, false, wait::USUAL).await?;
        // The remapping takes place, and the GPU is used again.
        case.node.reset_gpu(&second).await?;
        healthy(case, &second, "True").await?;
        devices(case, &second, false, wait::USUAL).await
    })
}

/// The simulated machine's driver reports no recovery action, so nothing but an administrator says that the GPU was reset.
#[test]
fn a_gpu_is_used_again_after_work_on_a_cordoned_node() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let uuid = &case.gpus[0].uuid;
        healthy(case, uuid, "True").await?;
        let nodes: Api<CoreNode> = Api::all(case.client.clone());
        let name = case.node.name().to_owned();
        let cordon = async |on: bool| {
            let patch = Patch::Merge(json!({"spec": {"unschedulable": on}}));
            nodes
                .patch(&name, &PatchParams::default(), &patch)
                .await
                .map(drop)
        };
        let (api, node) = (nodes.clone(), name.clone());
        case.afterwards("the cordon", async move {
            let patch = Patch::Merge(json!({"spec": {"unschedulable": false}}));
            api.patch(&node, &PatchParams::default(), &patch).await?;
            Ok(())
        });
        watched(case, "cordoned", uuid).await?;
        case.node.inject_xid(uuid, 48).await?;
        devices(case, uuid, true, TAINTED).await?;
        cordon(true).await?;
        // NVML is closed: the other GPU is not watched.
        healthy(case, &case.gpus[1].uuid, "Unknown").await?;
        case.node.reset_gpu(uuid).await?;
        cordon(false).await?;
        healthy(case, uuid, "True").await?;
        devices(case, uuid, false, wait::USUAL).await
    })
}
