//! Pods of every kind that users write have their cap: without root, with a read-only root file system, in
//! a user namespace, with init and sidecar containers, without a shell.

use anyhow::{Context as _, ensure};
use k8s_openapi::api::node::v1::RuntimeClass;
use kube::api::{Api, DeleteParams, PostParams};
use serde_json::{Value, json};
use tranche_e2e::namespace::{IDLE, Source, manifest};
use tranche_e2e::node::Node;
use tranche_e2e::{Case, PodHandle, Request, run, run_on_a_node, workload};

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
    let mut object = manifest("pod", &[Source::Template("share")], &IDLE);
    change(&mut object["spec"]);
    let pod = namespace.pod_from(object).await?;
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
    run_on_a_node(async |case: &Case| {
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
    run_on_a_node(async |case: &Case| {
        let pod = changed(case, "read-only", |spec| {
            let mut context = restricted();
            context["readOnlyRootFilesystem"] = json!(true);
            spec["containers"][0]["securityContext"] = context;
        })
        .await?;
        let refused = pod.exec(&["touch", "/tmp/x"]).await?;
        ensure!(refused.code != 0, "the root can be written");
        // The hook made the cache: the image has none.
        pod.stdout(&["grep", "-q", "libcuda.so.1", "/etc/ld.so.cache"])
            .await?;
        is_capped(&pod).await
    })
}

/// Mounts the driver's files from the node's disk, which may be memory, until the test ends. Runtimes mount CDI's files with mapped
/// IDs. That is impossible for files of an overlay, such as the root of a kind node; on a real machine they are on a disk.
async fn driver_on_a_disk(case: &Case, node: &Node) -> anyhow::Result<()> {
    let undo = node.clone();
    case.afterwards("the driver's files", async move {
        let script = "
            findmnt --raw --noheadings --output TARGET,SOURCE | sed -n 's|^\\([^ ]*\\) .*/nvidia-files/.*|\\1|p' |
                xargs --no-run-if-empty umount --lazy
            rm -rf /var/lib/nvidia-files";
        undo.shell(script).await.map(drop)
    });
    let script = "
        for file in $(jq -r '.. | (.hostPath? // empty)' /var/run/cdi/gpu.tranche.dev-driver.json | sort -u); do
            if [ -f $file ] && [ $(findmnt --noheadings --output FSTYPE --target $file) = overlay ]; then
                install -D --mode $(stat -c %a $file) $file /var/lib/nvidia-files$file
                mount --bind /var/lib/nvidia-files$file $file
                findmnt --types ext4,xfs,btrfs,tmpfs --target $file
            fi
        done";
    node.shell(script).await.map(drop)
}

/// A runtime class whose runc has user namespaces: that of kind's second handler (`e2e/kind/node-image/parts.sh`).
async fn new_runc(case: &Case) -> anyhow::Result<String> {
    let classes: Api<RuntimeClass> = Api::all(case.client.clone());
    let name = case.unique("new-runc");
    let class = json!({"metadata": {"name": name}, "handler": "test-handler"});
    classes
        .create(&PostParams::default(), &serde_json::from_value(class)?)
        .await?;
    let created = name.clone();
    case.afterwards("the runtime class", async move {
        classes.delete(&created, &DeleteParams::default()).await?;
        Ok(())
    });
    Ok(name)
}

/// Runs pods in user namespaces on both nodes, containerd's and CRI-O's, with a further `change`. Each has its cap.
async fn in_user_namespaces(
    case: &Case,
    name: &str,
    change: impl Fn(&mut Value),
) -> anyhow::Result<()> {
    let class = new_runc(case).await?;
    let second = case.second_node().await?;
    for (node, gpus) in [(case.node.clone(), case.gpus.clone()), second] {
        driver_on_a_disk(case, &node).await?;
        let share = Request::capped("3Gi", "10").on(&gpus[0].uuid);
        let is_containerd = node
            .runtime(&case.client)
            .await?
            .starts_with("containerd://");
        let name = format!("{name}-{}", node.name());
        let pod = with_share(case, &name, &share, |spec| {
            spec["hostUsers"] = json!(false);
            if is_containerd {
                spec["runtimeClassName"] = json!(class);
            }
            change(spec);
        })
        .await?;
        let map = pod.stdout(&["cat", "/proc/self/uid_map"]).await?;
        ensure!(
            !map.split_whitespace().eq(["0", "0", "4294967295"]),
            "no user namespace on {}: {map}",
            node.name()
        );
        is_capped(&pod)
            .await
            .with_context(|| format!("on {}", node.name()))?;
    }
    Ok(())
}

#[test]
fn in_a_user_namespace() -> anyhow::Result<()> {
    run(async |case: &Case| in_user_namespaces(case, "users", |_| ()).await)
}

#[test]
fn in_a_user_namespace_without_root_and_with_a_read_only_root() -> anyhow::Result<()> {
    run(async |case: &Case| {
        in_user_namespaces(case, "both", |spec| {
            let mut context = restricted();
            context["readOnlyRootFilesystem"] = json!(true);
            spec["containers"][0]["securityContext"] = context;
        })
        .await
    })
}

#[test]
fn init_and_sidecar_containers_have_the_pods_share() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
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

/// As in a distroless image, the program is the container's only process, and the loader has no cache and no configuration.
#[test]
fn without_a_shell_and_without_a_loaders_cache() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
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
