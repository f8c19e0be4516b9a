//! Shares of different sizes, on one GPU and on two.

use anyhow::{Context, ensure};
use k8s_openapi::api::resource::v1::AllocatedDeviceStatus;
use tranche_e2e::namespace::{IDLE, Source, manifest};
use tranche_e2e::request::{apart, spec};
use tranche_e2e::{Case, PodHandle, Request, run_on_a_node, wait, workload};

const GI: u64 = 1 << 30;
const MI: u64 = 1 << 20;

/// Checks that CUDA and the real nvidia-smi agree on exactly these totals, by GPU.
async fn sees_exactly(pod: &PodHandle, expected: &[(&str, u64)]) -> anyhow::Result<()> {
    let mut expected: Vec<_> = expected
        .iter()
        .map(|(uuid, bytes)| ((*uuid).to_owned(), *bytes))
        .collect();
    expected.sort();
    let mut cuda: Vec<_> = pod
        .seen()
        .await?
        .into_iter()
        .map(|seen| (seen.uuid, seen.total))
        .collect();
    cuda.sort();
    ensure!(
        cuda == expected,
        "CUDA in {} sees {cuda:?}, not {expected:?}",
        pod.name()
    );
    let mut nvml = pod.nvidia_smi().await?;
    nvml.sort();
    let expected: Vec<_> = expected
        .into_iter()
        .map(|(uuid, bytes)| (uuid, bytes / MI))
        .collect();
    ensure!(
        nvml == expected,
        "nvidia-smi in {} shows {nvml:?} MiB, not {expected:?}",
        pod.name()
    );
    Ok(())
}

#[test]
fn two_namespaces_share_one_gpu() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let (a, b) = tokio::try_join!(case.namespace("a"), case.namespace("b"))?;
        let first = case.gpus[0].uuid.as_str();
        let request = Request::capped("20Gi", "25").on(first);
        let small = a.started("small", &request).await?;
        let larger = Request::capped("40Gi", "50").on(first);
        let hold = workload::hold("32Gi");
        let large = b.running("large", &larger, &hold).await?;
        large.started().await?;
        sees_exactly(&small, &[(first, 20 * GI)]).await?;
        sees_exactly(&large, &[(first, 40 * GI)]).await?;

        // The neighbour works before, during and after the other reaches its cap. Its free memory is compared from here on, because
        // `sees_exactly` took 512 MiB for a context in its share before.
        let before = large.next_beat().await?;
        let filled = small.fill(&[]).await?;
        ensure!(
            filled.len() == 1 && filled[0].filled == 20 * GI,
            "not 20 GiB exactly: {filled:?}"
        );
        ensure!(filled[0].refused > 0 && filled[0].errors == 0, "{filled:?}");
        ensure!(
            filled[0].free_after == 20 * GI,
            "not all given back: {filled:?}"
        );
        let after = large.next_beat().await?;
        ensure!(after.beat > before.beat, "{before:?} {after:?}");
        ensure!(
            after.errors == 0 && after.moved == before.moved,
            "the neighbour noticed: {before:?} {after:?}"
        );
        ensure!(after.held == 32 * GI && after.total == 40 * GI, "{after:?}");
        Ok(())
    })
}

#[test]
fn two_shares_on_two_gpus_keep_their_own_caps_in_any_order() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let namespace = case.namespace("two").await?;
        let [one, two] = [&case.gpus[0].uuid, &case.gpus[1].uuid];
        let (small, large) = (Request::capped("5Gi", "10"), Request::capped("9Gi", "20"));
        // In both orders: the result must depend neither on the order of requests nor on that of GPUs.
        for (name, first, second) in [("straight", one, two), ("crossed", two, one)] {
            let requests = [
                small.clone().named("small").on(first),
                large.clone().named("large").on(second),
            ];
            namespace.template(name, &spec(&requests)).await?;
            let pod = namespace
                .pod(name, &[Source::Template(name)], &IDLE)
                .await?;
            pod.started().await?;
            sees_exactly(&pod, &[(first, 5 * GI), (second, 9 * GI)]).await?;
            for filled in pod.fill(&[]).await? {
                let expected = if filled.uuid == *first {
                    5 * GI
                } else {
                    9 * GI
                };
                ensure!(filled.filled == expected, "{filled:?}");
            }
            pod.delete().await?;
        }
        // The scheduler chooses different GPUs because of the claim's constraint.
        let requests = [small.named("small"), large.named("large")];
        namespace.template("apart", &apart(spec(&requests))).await?;
        let pod = namespace
            .pod("apart", &[Source::Template("apart")], &IDLE)
            .await?;
        pod.started().await?;
        let seen = pod.seen().await?;
        ensure!(seen.len() == 2 && seen[0].uuid != seen[1].uuid, "{seen:?}");
        Ok(())
    })
}

#[test]
fn two_shares_of_one_gpu_in_one_container_add_up() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let namespace = case.namespace("sum").await?;
        let gpu = case.gpus[0].uuid.as_str();
        let requests = [
            Request::capped("2Gi", "10").named("one").on(gpu),
            Request::capped("3Gi", "10").named("other").on(gpu),
        ];
        namespace.template("sum", &spec(&requests)).await?;
        let pod = namespace
            .pod("sum", &[Source::Template("sum")], &IDLE)
            .await?;
        pod.started().await?;
        sees_exactly(&pod, &[(gpu, 5 * GI)]).await?;
        let filled = pod.fill(&[]).await?;
        ensure!(
            filled.len() == 1 && filled[0].filled == 5 * GI,
            "{filled:?}"
        );
        Ok(())
    })
}

#[test]
fn containers_of_a_pod_get_their_own_requests() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let namespace = case.namespace("containers").await?;
        let gpu = case.gpus[0].uuid.as_str();
        let requests = [
            Request::capped("2Gi", "10").named("small").on(gpu),
            Request::capped("5Gi", "10").named("large").on(gpu),
        ];
        namespace.template("both", &spec(&requests)).await?;
        let mut object = manifest("both", &[Source::Template("both")], &IDLE);
        let mut second = object["spec"]["containers"][0].clone();
        second["name"] = "second".into();
        second["resources"]["claims"][0]["request"] = "large".into();
        object["spec"]["containers"][0]["resources"]["claims"][0]["request"] = "small".into();
        object["spec"]["containers"]
            .as_array_mut()
            .context("a list")?
            .push(second);
        let pod = namespace.pod_from(object).await?;
        pod.started().await?;
        for (container, size) in [("cuda", 2 * GI), ("second", 5 * GI)] {
            let container = pod.container(container);
            sees_exactly(&container, &[(gpu, size)]).await?;
            let filled = container.fill(&[]).await?;
            ensure!(filled.len() == 1 && filled[0].filled == size, "{filled:?}");
        }
        Ok(())
    })
}

#[test]
fn in_a_container_with_two_tiers_each_device_has_its_own_limit() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let namespace = case.namespace("mixed").await?;
        let [one, two] = [case.gpus[0].uuid.as_str(), case.gpus[1].uuid.as_str()];
        let requests = [
            Request::exclusive().named("whole").on(one),
            Request::capped("4Gi", "10").named("share").on(two),
        ];
        namespace.template("mixed", &spec(&requests)).await?;
        let pod = namespace
            .pod("mixed", &[Source::Template("mixed")], &IDLE)
            .await?;
        pod.started().await?;
        let seen = pod.seen().await?;
        let of = |uuid| {
            seen.iter()
                .find(|seen| seen.uuid == uuid)
                .map(|seen| seen.total)
        };
        ensure!(
            of(two) == Some(4 * GI) && of(one) > Some(70 * GI),
            "{seen:?}"
        );
        let whole = case.gpus[0].memory.to_count()? / MI;
        let mut shown = pod.nvidia_smi().await?;
        shown.sort_by_key(|(_, total)| *total);
        ensure!(
            shown == [(two.to_owned(), 4096), (one.to_owned(), whole)],
            "{shown:?}"
        );
        Ok(())
    })
}

#[test]
fn the_claims_status_shows_what_it_got() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let namespace = case.namespace("status").await?;
        let pod = namespace
            .started("pod", &Request::capped("7Gi", "30"))
            .await?;
        let claim = pod.claim().await?.metadata.name.context("a name")?;
        let device: AllocatedDeviceStatus = wait::for_one(
            namespace.claims(),
            &claim,
            "status.devices",
            wait::USUAL,
            |claim| claim?.status.as_ref()?.devices.as_ref()?.first().cloned(),
        )
        .await?;
        let claim = namespace.claims().get(&claim).await?;
        let result = claim
            .status
            .and_then(|status| status.allocation?.devices?.results?.into_iter().next())
            .context("an allocation")?;
        ensure!(
            device.device == result.device && device.pool == result.pool,
            "{device:?} {result:?}"
        );
        ensure!(
            device.share_id == result.share_id && device.share_id.is_some(),
            "{device:?} {result:?}"
        );
        let conditions = device.conditions.unwrap_or_default();
        ensure!(
            conditions
                .iter()
                .any(|condition| condition.type_ == "Ready" && condition.status == "True"),
            "{conditions:?}"
        );
        let data = serde_json::to_string(&device.data)?;
        for told in [
            case.gpus[0].uuid.as_str(),
            case.gpus[0].pci_bus_id.as_str(),
            "capped",
            "7Gi",
        ] {
            ensure!(
                data.contains(told),
                "status.devices[0].data says nothing of {told}: {data}"
            );
        }
        Ok(())
    })
}
