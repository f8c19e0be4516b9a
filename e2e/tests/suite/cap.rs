//! The cap holds for every way to allocate with the driver API.

use anyhow::ensure;
use tranche_e2e::{Case, Request, run_on_a_node, workload};

const GI: u64 = 1 << 30;
const LIMIT: u64 = 3 * GI;
/// The `contextMemory` of the chart's own policy. The share pays for the context of every process except the first.
const CONTEXT: u64 = GI / 2;

fn share() -> Request {
    Request::capped("3Gi", "10")
}

#[test]
fn plain_async_and_managed_memory_are_refused_at_the_cap() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let pod = case.namespace("ways").await?.idle("pod", &share()).await?;
        pod.started().await?;
        for way in ["device", "async", "managed"] {
            let filled = pod.fill(&["--way", way, "--chunk", "100Mi"]).await?;
            ensure!(
                filled.len() == 1 && filled[0].filled == LIMIT,
                "{way}: {filled:?}"
            );
            ensure!(
                filled[0].refused > 0 && filled[0].errors == 0,
                "{way}: {filled:?}"
            );
        }
        let copied = pod
            .stdout(&["tranche-workload", "copy", "--bytes", "32Mi"])
            .await?;
        ensure!(copied.contains(" 0 wrong bytes"), "{copied}");
        Ok(())
    })
}

#[test]
fn no_environment_changes_the_cap() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let pod = case.namespace("env").await?.idle("pod", &share()).await?;
        pod.started().await?;
        let environment = pod.stdout(&["env"]).await?;
        ensure!(
            environment.contains("CUDA_DEVICE_MEMORY_LIMIT_0=3072m"),
            "{environment}"
        );
        // Changes the value of every variable of the container.
        let changed: Vec<_> = environment
            .lines()
            .filter_map(|line| line.split_once('='))
            .filter(|(name, _)| {
                ["TRANCHE_", "CUDA_", "NVIDIA_"]
                    .iter()
                    .any(|prefix| name.starts_with(prefix))
            })
            .map(|(name, _)| format!("{name}=70Gi"))
            .collect();
        for way in [
            "env -i /usr/bin/tranche-workload --json fill".to_owned(),
            format!("env {} tranche-workload --json fill", changed.join(" ")),
            "env LD_PRELOAD= LD_LIBRARY_PATH=/usr/lib/tranche/driver tranche-workload --json fill"
                .to_owned(),
            "env LD_PRELOAD=/usr/lib/tranche/driver/libcuda.so.1 tranche-workload --json fill"
                .to_owned(),
        ] {
            let output = pod.stdout(&["sh", "-c", &way]).await?;
            let filled: Vec<workload::Filled> = workload::lines(&output)?;
            ensure!(
                filled.len() == 1 && filled[0].filled == LIMIT,
                "{way}: {filled:?}"
            );
        }
        Ok(())
    })
}

#[test]
fn the_pages_cannot_be_changed_from_inside() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let pod = case.namespace("pages").await?.idle("pod", &share()).await?;
        pod.started().await?;
        let attempt = "
            for file in /usr/lib/tranche/shares/*/cap /etc/ld.so.preload /usr/lib/tranche/libcuda.so.1; do
                test -e $file || exit 3
                if (echo x >$file) 2>/dev/null || rm -f $file 2>/dev/null || mv $file /tmp 2>/dev/null; then
                    echo changed $file
                fi
            done";
        let changed = pod.stdout(&["sh", "-c", attempt]).await?;
        ensure!(changed.is_empty(), "{changed}");
        let filled = pod.fill(&[]).await?;
        ensure!(filled[0].filled == LIMIT, "{filled:?}");
        Ok(())
    })
}

#[test]
fn processes_of_a_share_have_one_account_and_the_dead_give_back() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let pod = case
            .namespace("account")
            .await?
            .idle("pod", &share())
            .await?;
        pod.started().await?;
        let hold = "
            tranche-workload hold --bytes 1Gi --beat 100 >/tmp/beats & pid=$!
            until grep -q beat /tmp/beats; do usleep 20000; done
            tranche-workload --json fill
            kill -KILL $pid; wait $pid || true
            tranche-workload --json fill";
        let output = pod.stdout(&["sh", "-c", hold]).await?;
        let filled: Vec<workload::Filled> = workload::lines(&output)?;
        let got: Vec<_> = filled.iter().map(|filled| filled.filled).collect();
        ensure!(
            got == [LIMIT - GI - CONTEXT, LIMIT],
            "with and after a process that holds 1 GiB: {got:?}"
        );
        // Four processes together never have more than the share.
        let four = "
            for i in 1 2 3 4; do tranche-workload hold --bytes 1Gi --beat 100 >/tmp/$i 2>&1 & done
            until [ $(grep -l -e 'beat 1:' -e OUT_OF_MEMORY /tmp/[1234] | wc -l) = 4 ]; do usleep 20000; done
            grep -l 'beat 1:' /tmp/[1234] | wc -l
            kill $(jobs -p) || true";
        let holders: u64 = pod
            .stdout(&["timeout", "30", "sh", "-c", four])
            .await?
            .trim()
            .parse()?;
        ensure!(
            holders >= 1 && holders * GI + (holders - 1) * CONTEXT <= LIMIT,
            "{holders} processes hold 1 GiB each"
        );
        Ok(())
    })
}
