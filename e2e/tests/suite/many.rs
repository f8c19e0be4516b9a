//! Many shares at once.

use std::collections::BTreeMap;

use anyhow::ensure;
use futures::{StreamExt, TryStreamExt, stream};
use tranche_e2e::{Case, Request, policy, run_on_a_node};

const PODS: usize = 40;
const MI: u64 = 1 << 20;
/// The number of pods that are created, and queried, concurrently.
const AT_ONCE: usize = 8;
/// The number of last pods, which are created one after another: while the scheduler binds a pod, it could refuse another that just
/// fits (docs/architecture.md, what the scheduler counts twice).
const LAST: usize = AT_ONCE;

#[test]
fn forty_pods_of_random_sizes_each_see_their_own() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        policy::offer(case, 20, 20).await?;
        let namespaces = [case.namespace("even").await?, case.namespace("odd").await?];
        let seed = uuid::Uuid::new_v4().as_u128();
        println!("sizes by seed {seed:#x}");
        // With 5 percent each, the 40 shares fill the cores of both GPUs; 20 of the largest fit into the memory of one.
        let sizes = sizes(seed, 1..=3400);
        let pod = async |(index, mebibytes): (usize, &u64)| {
            let share = Request::capped(&format!("{mebibytes}Mi"), "5");
            let namespace = &namespaces[index % 2];
            namespace.idle(&format!("pod-{index}"), &share).await
        };
        let (crowd, last) = (0..)
            .zip(&sizes)
            .partition::<Vec<_>, _>(|(index, _)| index + LAST < PODS);
        let mut pods: Vec<_> = stream::iter(crowd)
            .map(pod)
            .buffered(AT_ONCE)
            .try_collect()
            .await?;
        for pod in &pods {
            pod.started().await?;
        }
        for numbered in last {
            let pod = pod(numbered).await?;
            pod.started().await?;
            pods.push(pod);
        }
        let gpus: Vec<_> = stream::iter(pods.iter().zip(&sizes))
            .map(|(pod, mebibytes)| async move {
                let (cuda, nvml) = (pod.seen().await?, pod.nvidia_smi().await?);
                ensure!(
                    cuda.len() == 1
                        && cuda[0].total == mebibytes * MI
                        && cuda[0].free == mebibytes * MI,
                    "{} of {mebibytes} MiB sees {cuda:?}",
                    pod.name()
                );
                ensure!(
                    nvml == [(cuda[0].uuid.clone(), *mebibytes)],
                    "nvidia-smi in {} of {mebibytes} MiB shows {nvml:?}",
                    pod.name()
                );
                Ok(cuda[0].uuid.clone())
            })
            .buffer_unordered(AT_ONCE)
            .try_collect()
            .await?;
        let mut by_gpu = BTreeMap::<_, usize>::new();
        for uuid in gpus {
            *by_gpu.entry(uuid).or_default() += 1;
        }
        ensure!(
            by_gpu.values().copied().collect::<Vec<_>>() == [PODS / 2; 2],
            "by GPU: {by_gpu:?}"
        );
        Ok(())
    })
}

/// `SplitMix64` over a range.
fn sizes(seed: u128, range: std::ops::RangeInclusive<u64>) -> Vec<u64> {
    let mut state = u64::try_from(seed >> 64).unwrap_or_default();
    (0..PODS)
        .map(|_| {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mut word = state;
            word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            range.start() + (word ^ (word >> 31)) % (range.end() - range.start() + 1)
        })
        .collect()
}
