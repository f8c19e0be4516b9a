//! The tier `partition`: MIG instances, made for a claim and removed after it.

use anyhow::{Context, ensure};
use serde_json::Value;
use tranche_api::tier::Tier;
use tranche_e2e::{Case, Request, policy, run_on_a_node, wait, workload};

use crate::plugin::renew_plugin;

const GIB: u64 = 1 << 30;

fn field<'a>(data: &'a Value, name: &str) -> anyhow::Result<&'a str> {
    data[name]
        .as_str()
        .with_context(|| format!("no {name} in {data}"))
}

#[test]
fn a_claim_gets_its_partition_and_leaves_the_gpu_as_it_was() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        policy::tiers(case, &[Tier::Partition, Tier::Exclusive, Tier::Capped]).await?;
        let namespace = case.namespace("partition").await?;
        let small = namespace
            .started("small", &Request::profile("1g.10gb"))
            .await?;
        let got = small.device_data().await?;
        ensure!(
            got["tier"] == "partition" && got["profile"] == "1g.10gb",
            "{got}"
        );
        let uuid = field(&got, "migUUID")?;
        // CUDA and nvidia-smi see only the MIG device. cuDeviceGetUuid returns the GPU's UUID.
        let seen = small.seen().await?;
        ensure!(
            seen.len() == 1 && got["gpuUUID"] == seen[0].uuid && seen[0].total < 10 * GIB,
            "{seen:?}, and the claim has {got}"
        );
        let listed = small.stdout(&["nvidia-smi", "-L"]).await?;
        ensure!(
            listed.matches("UUID: MIG-").count() == 1 && listed.contains(uuid),
            "{listed}"
        );
        // The file of KEP-5304 names it, too.
        let file = "cat /var/run/kubernetes.io/dra-device-attributes/resourceclaimtemplates/*/gpu/gpu.tranche.dev-metadata.json";
        let described: Vec<Value> = workload::lines(&small.stdout(&["sh", "-c", file]).await?)?;
        let device = &described[0]["requests"][0]["devices"][0];
        ensure!(
            device["attributes"]["uuid"]["string"] == uuid
                && device["attributes"]["profile"]["string"] == "1g.10gb",
            "{described:?}"
        );
        let filled = small.fill(&[]).await?;
        ensure!(
            filled.len() == 1 && filled[0].filled <= seen[0].total && filled[0].errors == 0,
            "{filled:?}"
        );

        // A claim with a size gets the smallest sufficient profile, beside the neighbour on the same GPU.
        let sized = namespace
            .started("sized", &Request::partition("18Gi"))
            .await?;
        let other = sized.device_data().await?;
        let profile = field(&other, "profile")?;
        ensure!(
            ["1g.20gb", "2g.20gb"].contains(&profile) && other["gpuUUID"] == got["gpuUUID"],
            "{other}"
        );

        // The GPU serves no other tier meanwhile.
        let gpu = field(&got, "gpuUUID")?;
        let whole = namespace
            .idle("whole", &Request::exclusive().on(gpu))
            .await?;
        whole.has_no_room().await?;
        small.delete().await?;
        sized.delete().await?;
        whole.started().await?;
        whole.delete().await?;
        case.node.undivided().await
    })
}

#[test]
fn a_partition_is_made_and_removed_beside_a_working_neighbour() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        policy::tiers(case, &[Tier::Partition]).await?;
        let namespace = case.namespace("beside").await?;
        let on = |profile: &str| {
            Request::of(Tier::Partition).that(&format!(
                "device.attributes['gpu.tranche.dev'].profile == '{profile}' && \
                 device.attributes['gpu.tranche.dev'].parentUUID == '{}'",
                case.gpus[0].uuid
            ))
        };
        let neighbour = namespace
            .running("neighbour", &on("3g.40gb"), &workload::hold("30Gi"))
            .await?;
        let before = neighbour.next_beat().await?;
        for round in 0..3 {
            let name = format!("guest-{round}");
            let guest = namespace.started(&name, &on("2g.20gb")).await?;
            ensure!(guest.seen().await?[0].total < 20 * GIB);
            guest.delete().await?;
        }
        let after = neighbour.next_beat().await?;
        ensure!(
            after.beat > before.beat
                && after.uuid == before.uuid
                && after.errors == 0
                && after.moved == 0,
            "{before:?}, then {after:?}"
        );
        ensure!(
            neighbour.restarts().await? == 0,
            "the neighbour was restarted"
        );
        Ok(())
    })
}

/// Partitions that fit H100's geometry run; the others wait, with a reason.
#[test]
fn layouts_that_the_geometry_forbids_wait() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        policy::tiers(case, &[Tier::Partition]).await?;
        let namespace = case.namespace("layout").await?;
        let on_first = |profile: &str| {
            Request::of(Tier::Partition).that(&format!(
                "device.attributes['gpu.tranche.dev'].profile == '{profile}' && \
                 device.attributes['gpu.tranche.dev'].parentUUID == '{}'",
                case.gpus[0].uuid
            ))
        };
        let mut pods = Vec::new();
        for round in 0..3 {
            let pod = namespace
                .started(&format!("two-{round}"), &on_first("2g.20gb"))
                .await?;
            pods.push(pod);
        }
        // Of seven compute slices, three 2g leave room for a 1g, but not for a fourth 2g.
        let fourth = namespace.idle("two-3", &on_first("2g.20gb")).await?;
        fourth.has_no_room().await?;
        namespace.started("one", &on_first("1g.10gb")).await?;
        pods[0].delete().await?;
        fourth.started().await?;
        Ok(())
    })
}

/// An administrator's instance is used as it is, and stays.
#[test]
fn an_administrators_partition_is_given_out_and_never_removed() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let gpu = &case.gpus[0];
        let node = case.node.clone();
        node.shell(&format!(
            "nvidia-smi -i {uuid} -mig 1 && nvidia-smi mig -i {uuid} -cgi 2g.20gb -C",
            uuid = gpu.uuid
        ))
        .await?;
        let (undo, uuid) = (node.clone(), gpu.uuid.clone());
        case.afterwards("the administrator's partition", async move {
            undo.shell(&format!(
                "nvidia-smi mig -i {uuid} -dci && nvidia-smi mig -i {uuid} -dgi && nvidia-smi -i {uuid} -mig 0"
            ))
            .await?;
            Ok(())
        });
        policy::tiers(case, &[Tier::Partition]).await?;
        let listed = node.shell("nvidia-smi -L").await?;
        let mig = listed
            .split("UUID: ")
            .find_map(|part| part.strip_prefix("MIG-"))
            .and_then(|rest| rest.split(')').next())
            .map(|rest| format!("MIG-{rest}"))
            .with_context(|| listed.clone())?;

        // It is published with its UUID after the node's next look.
        case.plugin()
            .slices("the administrator's partition", wait::USUAL, |slices| {
                let mut devices = slices
                    .values()
                    .flat_map(|it| it.spec.devices.iter().flatten());
                devices
                    .any(|device| tranche_e2e::system::text(device, "uuid") == Some(&mig))
                    .then_some(())
            })
            .await?;
        let namespace = case.namespace("static").await?;
        let request = Request::of(Tier::Partition).on(&mig);
        let pod = namespace.started("pod", &request).await?;
        let shown = pod.stdout(&["nvidia-smi", "-L"]).await?;
        ensure!(
            shown.matches("UUID: MIG-").count() == 1 && shown.contains(&mig),
            "{shown}"
        );
        // A partition of ours beside it.
        let beside = Request::of(Tier::Partition).that(&format!(
            "device.attributes['gpu.tranche.dev'].profile == '3g.40gb' && \
             device.attributes['gpu.tranche.dev'].parentUUID == '{}'",
            gpu.uuid
        ));
        let other = namespace.started("other", &beside).await?;
        other.delete().await?;
        pod.delete().await?;
        node.no_claim_files(wait::USUAL).await?;
        let after = node.shell("nvidia-smi -L").await?;
        ensure!(
            after.matches("UUID: MIG-").count() == 1 && after.contains(&mig),
            "{after}"
        );
        Ok(())
    })
}

/// The plugin is killed while it makes a partition. The pod starts, and nothing is left after its end.
#[test]
fn a_killed_plugin_finishes_the_partition_or_removes_it() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        renew_plugin(case);
        policy::tiers(case, &[Tier::Partition]).await?;
        let namespace = case.namespace("killed").await?;
        let request = Request::profile("1g.10gb");
        let starting = namespace.idle("pod", &request);
        let pod = case
            .node
            .kill_plugin_in_a_prepare(starting, async |pod| pod.claim().await)
            .await?;
        pod.started_within(wait::TRIED_AGAIN).await?;
        pod.delete().await?;
        case.node.no_claim_files(wait::USUAL).await?;
        case.node.undivided().await
    })
}
