//! NVIDIA's unmodified CUDA clients in capped pods: each of their ways to allocate ends at the cap.

use serde_json::json;
use tranche_e2e::namespace::{IDLE, Source, manifest};
use tranche_e2e::{Case, Request, run_on_a_node};

const LIMIT: u64 = 3 << 30;

/// Each way to allocate of one generation of the clients fills the share; `fill.py` lists them.
fn fills(generation: &'static str) -> anyhow::Result<()> {
    run_on_a_node(async |case: &Case| {
        let namespace = case.namespace(generation).await?;
        namespace
            .template("share", &Request::capped("3Gi", "50").spec())
            .await?;
        let mut object = manifest("clients", &[Source::Template("share")], &IDLE);
        let container = &mut object["spec"]["containers"][0];
        container["image"] = json!("tranche/clients:dev");
        container["env"] = json!([{"name": "PYTHONPATH", "value": format!("/opt/{generation}")}]);
        let pod = namespace.pod_from(object).await?;
        pod.started().await?;
        let limit = LIMIT.to_string();
        pod.stdout(&["python3", "-B", "/opt/fill.py", generation, &limit])
            .await?;
        Ok(())
    })
}

#[test]
fn cuda_12_bindings_and_numba() -> anyhow::Result<()> {
    fills("cuda12")
}

#[test]
fn cuda_13_bindings_and_core() -> anyhow::Result<()> {
    fills("cuda13")
}
