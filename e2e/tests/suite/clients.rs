//! NVIDIA's clients of CUDA, unmodified, in capped pods: each way of theirs to take memory ends at the cap.

use anyhow::{Context, ensure};
use serde::Deserialize;
use serde_json::json;
use tranche_e2e::namespace::{IDLE, Source, manifest};
use tranche_e2e::{Case, Request, run};

const LIMIT: u64 = 3 << 30;
/// The smallest piece that `fill.py` asks for. What it could not get is less than two of them.
const PIECE: u64 = 2 << 20;

/// What `fill.py` says of one family of calls.
#[derive(Debug, Deserialize)]
struct Filled {
    family: String,
    held: u64,
    refusal: String,
    total: u64,
    nvml: u64,
    free: u64,
}

/// Every family, in a pod of its own with one generation of the clients.
fn fills(generation: &'static str, families: &'static [&'static str]) -> anyhow::Result<()> {
    run(async |case: &Case| {
        let namespace = case.namespace(generation).await?;
        namespace
            .template("share", &Request::capped("3Gi", "50").spec())
            .await?;
        let mut pod = manifest("clients", &[Source::Template("share")], &IDLE);
        let container = &mut pod["spec"]["containers"][0];
        container["image"] = json!("tranche/clients:dev");
        container["env"] = json!([{"name": "PYTHONPATH", "value": format!("/opt/{generation}")}]);
        let pod = namespace.pod_from(pod).await?;
        pod.started().await?;
        for family in families {
            let said = pod.say(&["python3", "-B", "/opt/fill.py", family]).await?;
            let filled: Filled = serde_json::from_str(&said).with_context(|| said.clone())?;
            ensure!(
                (filled.total, filled.nvml) == (LIMIT, LIMIT) && filled.family == *family,
                "{filled:?}"
            );
            ensure!(
                filled.held <= LIMIT && filled.held + 2 * PIECE > LIMIT,
                "{filled:?}"
            );
            ensure!(filled.refusal.contains("OUT_OF_MEMORY"), "{filled:?}");
            ensure!(filled.free <= LIMIT, "{filled:?}");
        }
        Ok(())
    })
}

#[test]
fn cuda_12_bindings_and_numba() -> anyhow::Result<()> {
    fills(
        "cuda12",
        &[
            "alloc",
            "managed",
            "pitch",
            "stream_ordered",
            "pool",
            "vmm",
            "array",
            "graph",
            "numba",
        ],
    )
}

#[test]
fn cuda_13_bindings_and_core() -> anyhow::Result<()> {
    fills(
        "cuda13",
        &[
            "alloc",
            "managed",
            "pitch",
            "stream_ordered",
            "pool",
            "vmm",
            "array",
            "graph",
            "core",
        ],
    )
}
