//! Pods of every kind that users write have their cap: without root, with a read-only root file system, in
//! a user namespace, with init and sidecar containers, without a shell.

use anyhow::ensure;
use serde_json::{Value, json};
use tranche_e2e::namespace::{IDLE, Source, manifest};
use tranche_e2e::{Case, PodHandle, Request, run, workload};

const GI: u64 = 1 << 30;
const LIMIT: u64 = 3 * GI;
/// The `contextMemory` of the chart's own policy.
const CONTEXT: u64 = GI / 2;

/// A running pod with a capped share and a changed manifest.
async fn changed(
    case: &Case,
    name: &str,
    change: impl FnOnce(&mut Value),
) -> anyhow::Result<PodHandle> {
    let share = Request::capped("3Gi", "10");
    with_share(case, name, &share, change).await
}

async fn with_share(
    case: &Case,
    name: &str,
    share: &Request,
    change: impl FnOnce(&mut Value),
) -> anyhow::Result<PodHandle> {
    let namespace = case.namespace(name).await?;
    namespace.template("share", &share.spec()).await?;
    let mut pod = manifest("pod", &[Source::Template("share")], &IDLE);
    change(&mut pod["spec"]);
    let pod = namespace.pod_from(pod).await?;
    pod.started().await?;
    Ok(pod)
}

async fn is_capped(pod: &PodHandle) -> anyhow::Result<()> {
    let filled = pod.fill(&[]).await?;
    ensure!(filled.len() == 1 && filled[0].filled == LIMIT, "{filled:?}");
    let shown = pod.nvidia_smi().await?;
    ensure!(shown.len() == 1 && shown[0].1 << 20 == LIMIT, "{shown:?}");
    Ok(())
}

/// The securityContext that the Pod Security Standard `restricted` requires.
fn restricted() -> Value {
    json!({
        "runAsUser": 1000,
        "runAsGroup": 1000,
        "runAsNonRoot": true,
        "allowPrivilegeEscalation": false,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    })
}

#[test]
fn without_root_and_without_capabilities() -> anyhow::Result<()> {
    run(async |case: &Case| {
        let pod = changed(case, "user", |spec| {
            spec["containers"][0]["securityContext"] = restricted();
        })
        .await?;
        ensure!(pod.stdout(&["id", "-u"]).await?.trim() == "1000");
        is_capped(&pod).await
    })
}

#[test]
fn with_a_read_only_root_file_system() -> anyhow::Result<()> {
    run(async |case: &Case| {
        let pod = changed(case, "read-only", |spec| {
            let mut context = restricted();
            context["readOnlyRootFilesystem"] = json!(true);
            spec["containers"][0]["securityContext"] = context;
        })
        .await?;
        let refused = pod.exec(&["touch", "/tmp/x"]).await?;
        ensure!(refused.code != 0, "the root can be written");
        // The image has no cache: the hook made it.
        pod.stdout(&["grep", "-q", "libcuda.so.1", "/etc/ld.so.cache"])
            .await?;
        is_capped(&pod).await
    })
}

/// A share on the node whose driver lies on the file system of a disk: the files of an overlay cannot be mounted with
/// mapped IDs, as container runtimes mount what CDI names (`e2e/kind/cluster/gpus.sh`).
async fn on_a_disk(case: &Case) -> anyhow::Result<Request> {
    let (_, gpus) = case.second_node().await?;
    Ok(Request::capped("3Gi", "10").on(&gpus[0].uuid))
}

#[test]
fn in_a_user_namespace() -> anyhow::Result<()> {
    run(async |case: &Case| {
        let share = on_a_disk(case).await?;
        let own_users = |spec: &mut Value| spec["hostUsers"] = json!(false);
        let pod = with_share(case, "users", &share, own_users).await?;
        let map = pod.stdout(&["cat", "/proc/self/uid_map"]).await?;
        ensure!(
            !map.split_whitespace().eq(["0", "0", "4294967295"]),
            "no user namespace: {map}"
        );
        is_capped(&pod).await
    })
}

#[test]
fn in_a_user_namespace_without_root_and_with_a_read_only_root() -> anyhow::Result<()> {
    run(async |case: &Case| {
        let share = on_a_disk(case).await?;
        let pod = with_share(case, "both", &share, |spec| {
            spec["hostUsers"] = json!(false);
            let mut context = restricted();
            context["readOnlyRootFilesystem"] = json!(true);
            spec["containers"][0]["securityContext"] = context;
        })
        .await?;
        is_capped(&pod).await
    })
}

#[test]
fn init_and_sidecar_containers_have_the_pods_share() -> anyhow::Result<()> {
    run(async |case: &Case| {
        let pod = changed(case, "containers", |spec| {
            let container = |name: &str, script: &str| {
                let mut container = spec["containers"][0].clone();
                container["name"] = json!(name);
                container["command"] = json!(["sh", "-euc", script]);
                container
            };
            let init = container(
                "init",
                &format!("tranche-workload --json fill | grep -q '\"filled\":{LIMIT}'"),
            );
            let mut sidecar = container(
                "sidecar",
                "trap exit TERM; tranche-workload hold --bytes 1Gi --beat 100 >/tmp/beats & wait",
            );
            sidecar["restartPolicy"] = json!("Always");
            spec["initContainers"] = json!([init, sidecar]);
        })
        .await?;
        let held = "until grep -q beat /tmp/beats; do usleep 20000; done";
        pod.container("sidecar")
            .stdout(&["timeout", "30", "sh", "-c", held])
            .await?;
        let output = pod
            .container("cuda")
            .stdout(&["tranche-workload", "--json", "fill"])
            .await?;
        let filled: Vec<workload::Filled> = workload::lines(&output)?;
        ensure!(
            filled.len() == 1 && filled[0].filled == LIMIT - GI - CONTEXT,
            "beside a sidecar that holds 1 GiB: {filled:?}"
        );
        Ok(())
    })
}

/// As in a distroless image: the program is the container's only process, and there is no loader's
/// cache or configuration for it.
#[test]
fn without_a_shell_and_without_a_loaders_cache() -> anyhow::Result<()> {
    run(async |case: &Case| {
        let pod = changed(case, "program", |spec| {
            let container = &mut spec["containers"][0];
            container["command"] = json!(workload::hold("1Gi"));
        })
        .await?;
        let beats = pod.beats().await?;
        ensure!(beats[0].total == LIMIT && beats[0].held == GI, "{beats:?}");
        Ok(())
    })
}
