//! `/metrics` and `/usage` report who uses which part of a GPU.

use anyhow::{Context as _, ensure};
use futures::future::try_join_all;
use kube::api::DeleteParams;
use tranche_api::tier::Tier;
use tranche_api::usage::{GpuUsage, Measure, NodeUsage, PATH, Zombie};
use tranche_e2e::{Case, PodHandle, Request, policy, run, run_on_a_node, wait};

use crate::compute;
use crate::metrics::{read, token};
use crate::watchdog::BYPASS;

const GIB: u64 = 1 << 30;
/// MiB by which memory may differ, because of code and the driver's granularity.
const MIB: f64 = 64.0;
/// How far a series may differ from the program's own measurement, in percent of the GPU's time.
const POINTS: f64 = 5.0;
/// The ten seconds of an average, and more than as long again to compare.
const SPUN: &str = "24s";

/// The values of a metric with the pod of each, if any.
type Series = Vec<(Option<String>, f64)>;

/// Reads the metrics of the case's node.
struct Reader<'a> {
    case: &'a Case,
    token: String,
}

impl Reader<'_> {
    async fn new<'a>(case: &'a Case, namespace: &str) -> anyhow::Result<Reader<'a>> {
        let token = token(case, namespace, true).await?;
        Ok(Reader { case, token })
    }

    async fn text(&self, path: &str) -> anyhow::Result<String> {
        read(self.case, path, &self.token).await
    }

    async fn gpu(&self, uuid: &str) -> anyhow::Result<GpuUsage> {
        let usage: NodeUsage = serde_json::from_str(&self.text(PATH).await?)?;
        let mut gpus = usage.gpus.into_iter();
        gpus.find(|gpu| gpu.uuid == uuid).context("the GPU")
    }

    /// The series of a metric for a GPU, scraped repeatedly while `work` runs.
    async fn beside<T>(
        &self,
        work: impl Future<Output = anyhow::Result<T>>,
        name: &str,
        uuid: &str,
    ) -> anyhow::Result<(T, Vec<Series>)> {
        tokio::pin!(work);
        let mut scrapes = Vec::new();
        loop {
            tokio::select! {
                done = &mut work => return Ok((done?, scrapes)),
                series = self.series(name, uuid) => scrapes.push(series?),
            }
        }
    }

    /// The series of a metric for a GPU.
    async fn series(&self, name: &str, uuid: &str) -> anyhow::Result<Series> {
        let text = self.text("/metrics").await?;
        let of_gpu = format!("UUID=\"{uuid}\"");
        let lines = text
            .lines()
            .filter(|line| line.contains(&of_gpu))
            .filter(|line| line.starts_with(&format!("{name}{{")));
        let series = lines.map(|line| {
            let (labels, value) = line.rsplit_once(' ').context("a value")?;
            let pod = labels
                .split_once(",pod=\"")
                .and_then(|(_, rest)| rest.split_once('"'));
            Ok((pod.map(|(pod, _)| pod.to_owned()), value.parse()?))
        });
        series.collect()
    }
}

fn of(series: &[(Option<String>, f64)], pod: &str) -> Option<f64> {
    let mut found = series.iter().filter(|(of, _)| of.as_deref() == Some(pod));
    found.next().map(|(_, value)| *value)
}

/// The median of the program's measurements of each second.
async fn spin(pod: &PodHandle) -> anyhow::Result<f64> {
    compute::spin(pod, SPUN).await
}

/// The median values of `DCGM_FI_DEV_GPU_UTIL` of pods that spin, and their own measurements. The values never add up to more than
/// the GPU.
async fn spun(
    reader: &Reader<'_>,
    uuid: &str,
    pods: &[PodHandle],
) -> anyhow::Result<(Vec<f64>, Vec<f64>)> {
    let spins = try_join_all(pods.iter().map(spin));
    let (measured, scrapes) = reader.beside(spins, "DCGM_FI_DEV_GPU_UTIL", uuid).await?;
    for series in &scrapes {
        let sum: f64 = series.iter().map(|(_, value)| value).sum();
        ensure!(sum <= 100.01, "{series:?}");
    }
    // At first the average includes the time before; at the end programs have ended.
    let steady = &scrapes[scrapes.len() / 2..scrapes.len() * 7 / 8];
    ensure!(!steady.is_empty(), "too few scrapes while they spun");
    // The median, because single values may be off on a busy machine.
    let median = |pod: &PodHandle| {
        let mut values = steady
            .iter()
            .map(|it| of(it, pod.name()))
            .collect::<Option<Vec<f64>>>()
            .with_context(|| format!("{steady:?}"))?;
        values.sort_by(f64::total_cmp);
        anyhow::Ok(values[values.len() / 2])
    };
    let values = pods.iter().map(median).collect::<anyhow::Result<_>>()?;
    Ok((values, measured))
}

fn about(values: &[f64], wanted: &[f64]) -> anyhow::Result<()> {
    for (value, expected) in values.iter().zip(wanted) {
        ensure!(
            (value - expected).abs() <= POINTS,
            "{values:?} instead of {wanted:?}"
        );
    }
    Ok(())
}

#[test]
fn the_utilization_of_three_pods_is_their_own_and_adds_up() -> anyhow::Result<()> {
    run(async |case: &Case| {
        let namespace = case.namespace("usage").await?;
        let reader = Reader::new(case, namespace.name()).await?;
        let uuid = &case.gpus[0].uuid;
        let mut pods = Vec::new();
        for (name, cores) in [("ten", "10"), ("thirty", "30"), ("sixty", "60")] {
            let pod = namespace
                .started(name, &Request::capped("4Gi", cores).on(uuid))
                .await?;
            pods.push(pod);
        }
        let (values, measured) = spun(&reader, uuid, &pods).await?;
        about(&values, &measured)?;
        about(&values, &[10.0, 30.0, 60.0])
    })
}

/// A kernel on 30 percent of the multiprocessors takes longer in proportion. The GPU is busy all that time, but the program counts
/// the time that the kernel would take on the whole GPU.
#[test]
fn pods_of_concurrent_shares_have_their_own_utilization() -> anyhow::Result<()> {
    run(async |case: &Case| {
        policy::tiers(case, &[Tier::Concurrent, Tier::Exclusive]).await?;
        let namespace = case.namespace("usage-mps").await?;
        let reader = Reader::new(case, namespace.name()).await?;
        let uuid = &case.gpus[0].uuid;
        let mut pods = Vec::new();
        let shares = [("a", 30.0), ("b", 60.0)];
        for (name, threads) in shares {
            let request = Request::concurrent("4Gi", &threads.to_string()).on(uuid);
            let pod = namespace.started(name, &request).await?;
            pods.push(pod);
        }
        let (values, measured) = spun(&reader, uuid, &pods).await?;
        let busy: Vec<f64> = measured
            .iter()
            .zip(shares)
            .map(|(measured, (_, threads))| measured * 100.0 / threads)
            .collect();
        about(&values, &busy)
    })
}

/// In MIG mode, NVML has no utilization by process, and GPM has that of the instance.
#[test]
fn a_partitions_pod_has_its_memory_and_its_utilization() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        policy::tiers(case, &[Tier::Partition, Tier::Exclusive, Tier::Capped]).await?;
        let namespace = case.namespace("usage-mig").await?;
        let reader = Reader::new(case, namespace.name()).await?;
        let uuid = &case.gpus[0].uuid;
        let request = Request::of(Tier::Partition).that(&format!(
            "device.attributes['gpu.tranche.dev'].profile == '1g.10gb' && \
             device.attributes['gpu.tranche.dev'].parentUUID == '{uuid}'"
        ));
        let pod = namespace.started("pod", &request).await?;
        holds(&pod, "2Gi").await?;
        wait::for_answer("the partition's memory", wait::USUAL, async || {
            let gpu = reader.gpu(uuid).await?;
            let memory = gpu.memory.context("the GPU's memory")?;
            let in_partitions = gpu.partitions.iter().filter_map(|it| it.memory);
            let sum: u64 = in_partitions.map(|it| it.used).sum::<u64>() + gpu.remainder.used;
            ensure!(memory.used == sum, "{gpu:?}");
            let series = reader.series("DCGM_FI_DEV_FB_USED", uuid).await?;
            Ok(of(&series, pod.name()).filter(|mib| *mib >= 2_048.0))
        })
        .await?;
        let name = "DCGM_FI_PROF_GR_ENGINE_ACTIVE";
        let (_, scrapes) = reader.beside(spin(&pod), name, uuid).await?;
        let values = scrapes.iter().filter_map(|series| of(series, pod.name()));
        let most = values.fold(0.0, f64::max);
        ensure!((0.9..=1.0).contains(&most), "{most}");
        Ok(())
    })
}

/// Starts a program in the background that holds `bytes` of memory.
async fn holds(pod: &PodHandle, bytes: &str) -> anyhow::Result<()> {
    let hold = format!(
        "tranche-workload hold --bytes {bytes} --beat 100 >/tmp/beats 2>&1 &
        until grep -q beat /tmp/beats; do usleep 20000; done"
    );
    pod.stdout(&["sh", "-c", &hold]).await.map(drop)
}

#[test]
fn memory_adds_up_and_what_bypasses_is_its_pods() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let namespace = case.namespace("usage-memory").await?;
        let reader = Reader::new(case, namespace.name()).await?;
        let uuid = &case.gpus[0].uuid;
        let mut pods = Vec::new();
        for name in ["honest", "bypass"] {
            let pod = namespace
                .started(name, &Request::capped("4Gi", "25").on(uuid))
                .await?;
            pods.push(pod);
        }
        holds(&pods[0], "1Gi").await?;
        pods[1].stdout(&["sh", "-c", BYPASS]).await?;
        wait::for_answer("both pods' memory", wait::USUAL, async || {
            let gpu = reader.gpu(uuid).await?;
            let memory = gpu.memory.context("the GPU's memory")?;
            let of_shares: u64 = gpu.shares.iter().map(|it| it.memory.used).sum();
            ensure!(memory.used == of_shares + gpu.remainder.used, "{gpu:?}");
            let of_pod = |pod: &PodHandle| {
                let groups = || gpu.shares.iter().flat_map(|share| &share.groups);
                let is_it = |name: &Option<String>| name.as_deref() == Some(pod.name());
                groups().find(|group| is_it(&group.pod)).cloned()
            };
            let [Some(honest), Some(bypass)] = [of_pod(&pods[0]), of_pod(&pods[1])] else {
                return Ok(None);
            };
            if honest.used < GIB || bypass.used < 2 * GIB {
                return Ok(None);
            }
            // The pod and container come from the kubelet's mounts and pod resources.
            ensure!(
                honest.container.is_some() && bypass.container.is_some(),
                "{gpu:?}"
            );
            // Memory that no account has.
            let share = gpu
                .shares
                .iter()
                .find(|share| share.memory.used == bypass.used);
            let account = share
                .and_then(|share| share.memory.account)
                .context("an account")?;
            ensure!(bypass.used - account >= 2 * GIB, "{gpu:?}");
            let series = reader.series("DCGM_FI_DEV_FB_USED", uuid).await?;
            let sum: f64 = series.iter().map(|(_, value)| value).sum();
            #[expect(clippy::cast_precision_loss, reason = "some GiB")]
            let used = memory.used as f64 / 1_048_576.0;
            Ok(((sum - used).abs() <= MIB).then_some(()))
        })
        .await
    })
}

/// A script that finds the containerd shim that started a command. Only this shim can end the container.
fn shim_of(command: &str) -> String {
    format!(
        "pid=$(pgrep -o -f '^{command}')
        for _ in 1 2 3 4; do
            pid=$(sed 's/.*) . //' /proc/$pid/stat | cut -d ' ' -f 1)
            if grep -q containerd-shim /proc/$pid/comm; then echo $pid; exit 0; fi
        done
        exit 1"
    )
}

#[test]
fn memory_of_a_force_deleted_pod_is_a_zombie_and_blocks_its_gpu() -> anyhow::Result<()> {
    // On the first node, which runs containerd.
    run(async |case: &Case| {
        let namespace = case.namespace("usage-zombie").await?;
        let reader = Reader::new(case, namespace.name()).await?;
        let uuid = &case.gpus[0].uuid;
        let request = Request::exclusive().on(uuid);
        let hold = "tranche-workload hold --bytes 3333Mi";
        let command = ["sh", "-c", &format!("exec {hold}")];
        let pod = namespace.running("dead", &request, &command).await?;
        pod.started().await?;
        let claim = pod.claim().await?.metadata.name.context("a name")?;
        wait::for_answer("the pod's memory", wait::USUAL, async || {
            let gpu = reader.gpu(uuid).await?;
            Ok(gpu
                .shares
                .iter()
                .any(|share| share.memory.used > 3 * GIB)
                .then_some(()))
        })
        .await?;
        let shim = case.node.shell(&shim_of(hold)).await?;
        let go_on = format!("kill -CONT {}", shim.trim());
        let (node, again) = (case.node.clone(), go_on.clone());
        case.afterwards("the runtime's shim", async move {
            node.shell(&format!("{again} 2>/dev/null || true"))
                .await
                .map(drop)
        });
        // Its container does not end.
        case.node
            .shell(&format!("kill -STOP {}", shim.trim()))
            .await?;
        pod.delete_with(&DeleteParams::default().grace_period(0))
            .await?;
        let text = wait::for_answer("a zombie", wait::USUAL, async || {
            let gpu = reader.gpu(uuid).await?;
            let named = |it: &&Zombie| {
                it.claim.name == claim
                    && it.claim.namespace == namespace.name()
                    && it.pod.as_deref() == Some(pod.name())
                    && it.used > 3 * GIB
            };
            if gpu.remainder.zombies.iter().find(named).is_none() {
                return Ok(None);
            }
            ensure!(gpu.utilization.get(Measure::Gpu).is_some(), "{gpu:?}");
            Ok(Some(reader.text("/metrics").await?))
        })
        .await?;
        let zombie = text
            .lines()
            .find(|line| line.starts_with("tranche_zombie_memory_bytes{") && line.contains(&claim));
        ensure!(
            zombie.is_some_and(|line| line.contains(pod.name())),
            "{text}"
        );
        // No other claim gets the GPU.
        let next = namespace.idle("next", &request).await?;
        let event = next.event("PrepareFailed").await?;
        ensure!(event.contains(uuid.as_str()), "{event}");
        case.node.shell(&go_on).await?;
        next.sync().await?;
        next.started().await?;
        wait::for_answer("no zombie", wait::USUAL, async || {
            let gpu = reader.gpu(uuid).await?;
            Ok(gpu.remainder.zombies.is_empty().then_some(()))
        })
        .await
    })
}
