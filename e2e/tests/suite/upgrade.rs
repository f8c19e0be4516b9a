//! An update of Tranche and its rollback, with shares in use.

use anyhow::ensure;
use tranche_e2e::namespace::{IDLE, Source, manifest};
use tranche_e2e::version::Version;
use tranche_e2e::{Case, PodHandle, Request, run, system, wait, workload};

const GI: u64 = 1 << 30;
/// The memory of a CUDA context in the chart's own policy.
const CONTEXT: u64 = GI / 2;

/// Checks how much one process can allocate of a share while another holds `held`.
async fn fills(pod: &PodHandle, share: u64, held: Option<u64>) -> anyhow::Result<()> {
    let filled = pod.fill(&[]).await?;
    let expected = held.map_or(share, |held| share - held - CONTEXT);
    ensure!(
        filled.len() == 1 && filled[0].filled == expected,
        "{}: {filled:?}, not {expected}",
        pod.name()
    );
    Ok(())
}

/// Caps, accounts and journals survive: a pod runs without interruption, a second pod joins its claim and gets what is left, a
/// restarted container has its cap, and the earlier version knows the claims that the later one prepared.
#[test]
fn shares_in_use_outlive_an_update_and_its_rollback() -> anyhow::Result<()> {
    run(async |case: &Case| {
        case.changes("plugin");
        let (this, before) = (Version::this(), Version::before().await?);
        let restore = this.clone();
        case.afterwards("this version", async move { restore.install().await });
        before.install().await?;

        let namespace = case.namespace("upgrade").await?;
        let shared = Request::capped("8Gi", "20");
        namespace.claim("shared", &shared.spec()).await?;
        let hold = workload::hold("3Gi");
        let holder = namespace
            .pod("holder", &[Source::Claim("shared")], &hold)
            .await?;
        let own = Request::capped("4Gi", "10").spec();
        namespace.template("own", &own).await?;
        let again = async |name: &str| {
            let mut pod = manifest(name, &[Source::Template("own")], &IDLE);
            pod["spec"]["restartPolicy"] = "Always".into();
            namespace.pod_from(pod).await
        };
        let mut restarting = vec![again("restarts").await?];
        holder.started().await?;
        restarting[0].started().await?;

        for version in [&this, &before] {
            let last = holder.next_beat().await?;
            version.install().await?;
            let beat = holder.next_beat().await?;
            ensure!(
                beat.beat > last.beat && beat.errors == 0 && beat.moved == last.moved,
                "{}: {last:?} {beat:?}",
                version.tag
            );
            ensure!(holder.restarts().await? == 0);

            let second = format!("second-{}", version.tag.replace('.', "-"));
            let second = namespace
                .pod(&second, &[Source::Claim("shared")], &IDLE)
                .await?;
            second.started().await?;
            fills(&second, 8 * GI, Some(3 * GI)).await?;
            second.delete().await?;

            for pod in &restarting {
                pod.restart_container(&case.node).await?;
                fills(pod, 4 * GI, None).await?;
            }
            restarting.push(again(&format!("new-{}", version.tag.replace('.', "-"))).await?);
            restarting[restarting.len() - 1].started().await?;
        }

        // The running version knows every share: the claims are released and leave no files.
        for pod in &restarting {
            pod.delete().await?;
        }
        holder.delete().await?;
        wait::for_answer("no file of a claim", wait::USUAL, async || {
            let left = case.node.claim_files().await?;
            ensure!(left.is_empty(), "left: {}", left.join(" "));
            Ok(Some(()))
        })
        .await?;
        let slices = case.plugin().published().await?;
        ensure!(system::complete(&slices).is_some(), "{slices:?}");
        Ok(())
    })
}
