//! Images with their own libcuda. In these tests it is on a volume that an init container filled, which is no difference to the
//! container's hook.

use anyhow::ensure;
use serde_json::json;
use tranche_e2e::namespace::{IDLE, Source, manifest};
use tranche_e2e::{Case, PodHandle, Request, run, run_on_a_node, workload};

const LIMIT: u64 = 3 << 30;

/// A pod with a volume at `folder`, in which an init container has run `fill`.
async fn with_own_driver(
    case: &Case,
    request: &Request,
    name: &str,
    folder: &str,
    fill: &str,
) -> anyhow::Result<PodHandle> {
    let namespace = case.namespace(name).await?;
    namespace.template("gpu", &request.spec()).await?;
    let mut object = manifest("pod", &[Source::Template("gpu")], &IDLE);
    let spec = &mut object["spec"];
    spec["volumes"] = json!([{"name": "own", "emptyDir": {}}]);
    let container = &mut spec["containers"][0];
    container["env"] = json!([{"name": "LD_LIBRARY_PATH", "value": folder}]);
    container["volumeMounts"] = json!([{"name": "own", "mountPath": folder}]);
    let mut filler = container.clone();
    filler["name"] = json!("filler");
    filler["volumeMounts"][0]["mountPath"] = json!("/own");
    filler["command"] = json!(["sh", "-euc", fill]);
    spec["initContainers"] = json!([filler]);
    let pod = namespace.pod_from(object).await?;
    pod.started().await?;
    Ok(pod)
}

#[test]
fn a_libcuda_of_the_image_has_the_cap_by_name_and_by_path() -> anyhow::Result<()> {
    run(async |case: &Case| {
        let fill = "cp /usr/lib/tranche/driver/libcuda.so.1 /own/libcuda.so.1; ln -s libcuda.so.1 /own/libcuda.so";
        // On both nodes, because the hook reads what the node's runtime passes to it.
        let (_, second) = case.second_node().await?;
        for (name, gpu) in [("own", &case.gpus[0]), ("own-2", &second[0])] {
            let share = Request::capped("3Gi", "10").on(&gpu.uuid);
            let pod = with_own_driver(case, &share, name, "/opt/own", fill).await?;
            for preload in ["", "LD_PRELOAD=/opt/own/libcuda.so.1 "] {
                let way = format!("{preload}tranche-workload --json fill");
                let output = pod.stdout(&["sh", "-c", &way]).await?;
                let filled: Vec<workload::Filled> = workload::lines(&output)?;
                ensure!(
                    filled.len() == 1 && filled[0].filled == LIMIT,
                    "{name}: {way}: {filled:?}"
                );
            }
            let same = "cmp /opt/own/libcuda.so.1 /usr/lib/tranche/libcuda.so.1 && ! (echo x >/opt/own/libcuda.so.1)";
            pod.stdout(&["sh", "-c", same]).await?;
        }
        Ok(())
    })
}

/// The library of a newer release is the node's library with one more byte: it works and can be distinguished.
const NEWER: &str = "
    from=$(ls -d /usr/lib/tranche/driver/libcuda.so.1 /usr/lib/x86_64-linux-gnu/libcuda.so.1 2>/dev/null | head -n 1)
    cp $from /own/libcuda.so.999.1; echo newer >>/own/libcuda.so.999.1; ln -s libcuda.so.999.1 /own/libcuda.so.1
    ln -s libcuda.so.1 /own/libcuda.so";
const COMPAT: &str = "/usr/local/cuda/compat";

#[test]
fn a_newer_libcuda_of_the_image_is_used_behind_the_shim() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let share = Request::capped("3Gi", "10");
        let pod = with_own_driver(case, &share, "compat", COMPAT, NEWER).await?;
        let filled = pod.fill(&[]).await?;
        ensure!(filled.len() == 1 && filled[0].filled == LIMIT, "{filled:?}");
        let check = format!(
            "tail -c 6 /usr/lib/tranche/driver/libcuda.so.1 | grep -q newer && \
             cmp {COMPAT}/libcuda.so.1 /usr/lib/tranche/libcuda.so.1"
        );
        pod.stdout(&["sh", "-c", &check]).await?;
        Ok(())
    })
}

#[test]
fn an_exclusive_pod_finds_its_images_newer_libcuda_first() -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let pod = with_own_driver(case, &Request::exclusive(), "whole", COMPAT, NEWER).await?;
        // Without LD_LIBRARY_PATH it is found in the loader's cache.
        let script = "
            unset LD_LIBRARY_PATH
            tranche-workload hold --bytes 1Mi --beat 100 >/tmp/beats & pid=$!
            until grep -q beat /tmp/beats; do usleep 20000; done
            grep -o '/[^ ]*libcuda[^ ]*' /proc/$pid/maps | sort -u; kill $pid";
        let maps = pod.stdout(&["sh", "-c", script]).await?;
        ensure!(
            maps.contains(&format!("{COMPAT}/libcuda.so.999.1")),
            "{maps}"
        );
        Ok(())
    })
}
