//! Whole GPUs for virtual machines. The test's pods get VFIO's device nodes and the PCI address, as KubeVirt's pods do.

use std::collections::BTreeMap;

use anyhow::{Context, ensure};
use k8s_openapi::api::resource::v1::{Device, ResourceSlice};
use tranche_api::gpu_node::Gpu;
use tranche_api::names::attribute;
use tranche_api::tier::Tier;
use tranche_e2e::{Case, Request, policy, run_on_a_node, system, wait};

use crate::plugin::renew_plugin;

/// The node's PCI devices, as the node plugin sees them.
const PCI: &str = "/run/nvidia-sim-pci/sys/bus/pci/devices";
/// Where the container has the description of the request `gpu` (KEP-5304).
const METADATA: &str = "/var/run/kubernetes.io/dra-device-attributes/resourceclaimtemplates/gpu-0/gpu/gpu.tranche.dev-metadata.json";

/// The kernel driver of a GPU.
async fn driver(case: &Case, gpu: &Gpu) -> anyhow::Result<String> {
    let link = format!("{PCI}/{}/driver", gpu.pci_bus_id);
    let driver = case
        .node
        .shell(&format!("basename $(readlink {link} || echo none)"))
        .await?;
    Ok(driver.trim().to_owned())
}

/// The node's devices, once all are of these tiers: devices that a policy no longer offers stay for a while.
async fn devices_of(case: &Case, tiers: &[Tier]) -> anyhow::Result<BTreeMap<String, Device>> {
    let wanted = |slices: &BTreeMap<String, ResourceSlice>| {
        let slices = system::complete(slices)?.into_values();
        let devices: BTreeMap<_, _> = slices
            .flat_map(|slice| slice.spec.devices.into_iter().flatten())
            .map(|it| (it.name.clone(), it))
            .collect();
        let mut shown = devices
            .values()
            .map(|it| system::text(it, attribute::ISOLATION));
        shown
            .all(|shown| tiers.iter().any(|tier| shown == Some(tier.as_str())))
            .then_some(devices)
    };
    let what = format!("devices in the tiers {tiers:?} only");
    case.plugin().slices(&what, wait::USUAL, wanted).await
}

#[test]
fn a_gpu_goes_to_a_virtual_machine_and_comes_back() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        renew_plugin(case);
        let (gpu, other) = (&case.gpus[0], &case.gpus[1]);
        let tiers = [Tier::Exclusive, Tier::Passthrough];
        policy::tiers(case, &tiers).await?;
        let before = devices_of(case, &tiers).await?;
        let namespace = case.namespace("machine").await?;
        let request = Request::of(Tier::Passthrough).on(&gpu.uuid);

        // nvidia-persistenced has the GPU open, and the event says how to make it close the GPU.
        let persistence = format!("nvidia-smi -pm 1 -i {}", gpu.uuid);
        case.node.shell(&persistence).await?;
        let refused = namespace.idle("refused", &request).await?;
        let event = refused.event("PrepareFailed").await?;
        let way_out = format!("nvidia-smi -pm 0 -i {}", gpu.pci_bus_id);
        ensure!(event.contains(&way_out), "{event}");
        ensure!(driver(case, gpu).await? == "nvidia");
        refused.delete().await?;
        let back = case.node.disable_persistence_mode(&gpu.uuid).await?;
        let node = case.node.clone();
        case.afterwards("persistence mode", async move {
            node.shell(&back).await.map(drop)
        });
        let machine = namespace.started("machine", &request).await?;

        let group = iommu_group(&before, gpu)?;
        let listed = machine
            .stdout(&[
                "sh",
                "-c",
                "cd /dev; ls -d vfio/* nvidia* 2>/dev/null || true",
            ])
            .await?;
        let nodes: Vec<_> = listed.lines().collect();
        ensure!(
            nodes == [&*format!("vfio/{group}"), "vfio/vfio"],
            "{nodes:?}"
        );
        let libraries =
            "ls /usr/lib/tranche /usr/lib/x86_64-linux-gnu/libcuda.so.1 2>/dev/null || true";
        ensure!(machine.stdout(&["sh", "-c", libraries]).await?.is_empty());
        // KubeVirt takes the address from here.
        let metadata = machine.stdout(&["cat", METADATA]).await?;
        let address = format!(
            r#""resource.kubernetes.io/pciBusID":{{"string":"{}"}}"#,
            gpu.pci_bus_id
        );
        ensure!(metadata.contains(&address), "{metadata}");
        let data = machine.device_data().await?;
        ensure!(
            data["tier"] == "passthrough"
                && data["pciBusID"] == *gpu.pci_bus_id
                && data["gpuUUID"] == *gpu.uuid,
            "{data}"
        );

        ensure!(driver(case, gpu).await? == "vfio-pci");
        let listed = case.node.shell("nvidia-smi -L").await?;
        ensure!(
            !listed.contains(&gpu.uuid) && listed.contains(&other.uuid),
            "{listed}"
        );
        // A plugin that has not seen it there finds it, too.
        case.plugin().kill().await?;
        let whole = Request::exclusive();
        let beside = namespace
            .started("beside", &whole.clone().on(&other.uuid))
            .await?;
        ensure!(beside.seen().await?.len() == 1);
        let after = devices_of(case, &tiers).await?;
        let changed: Vec<_> = after
            .iter()
            .filter(|(name, it)| before.get(*name) != Some(it))
            .map(|(name, _)| name)
            .collect();
        ensure!(
            changed.is_empty() && after.len() == before.len(),
            "{changed:?}, {} devices of {}",
            after.len(),
            before.len()
        );
        let next = namespace.idle("next", &whole.on(&gpu.uuid)).await?;
        next.has_no_room().await?;

        machine.delete().await?;
        next.started().await?;
        ensure!(next.seen().await?[0].uuid == gpu.uuid);
        ensure!(driver(case, gpu).await? == "nvidia");
        Ok(())
    })
}

/// The IOMMU group of the GPU's device for virtual machines.
fn iommu_group(devices: &BTreeMap<String, Device>, gpu: &Gpu) -> anyhow::Result<i64> {
    let offered = devices.values().find(|it| {
        system::text(it, attribute::UUID) == Some(&gpu.uuid)
            && system::text(it, attribute::ISOLATION) == Some(Tier::Passthrough.as_str())
    });
    let attributes = offered.and_then(|it| it.attributes.as_ref());
    let group = attributes.and_then(|it| it.get(attribute::IOMMU_GROUP)?.int);
    group.with_context(|| format!("{offered:?} has no IOMMU group"))
}

#[test]
fn hard_and_any_take_no_gpu_of_a_virtual_machine() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        policy::tiers(case, &[Tier::Passthrough]).await?;
        devices_of(case, &[Tier::Passthrough]).await?;
        let namespace = case.namespace("classes").await?;
        for class in ["hard", "any"] {
            let request = Request::class(&format!("{class}.gpu.tranche.dev"));
            namespace.idle(class, &request).await?.has_no_room().await?;
        }
        Ok(())
    })
}
