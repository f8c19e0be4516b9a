//! Checks what the examples' READMEs say.

use std::path::PathBuf;

use anyhow::ensure;
use tranche_e2e::{Case, Namespace, PodHandle, run, tool};

const GI: u64 = 1 << 30;

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../examples")
}

/// Applies an example as its README says.
async fn apply(name: &str) -> anyhow::Result<()> {
    let options = ["apply", "--filename"];
    tool::run("kubectl", &options, &[&folder().join(name)]).await
}

fn pod(namespace: &Namespace, name: &str) -> PodHandle {
    PodHandle::new(namespace.clone(), name.to_owned())
}

#[test]
fn every_example_has_a_test() -> anyhow::Result<()> {
    let mut found: Vec<_> = std::fs::read_dir(folder())?
        .filter_map(|entry| Some(entry.ok()?.file_name().to_string_lossy().into_owned()))
        .filter(|name| name.starts_with(|first: char| first.is_ascii_digit()))
        .collect();
    found.sort();
    ensure!(
        found == ["01-exclusive", "02-capped-share", "03-two-gpus"],
        "{found:?}"
    );
    Ok(())
}

#[test]
fn example_01_exclusive() -> anyhow::Result<()> {
    run(async |case: &Case| {
        let namespace = case.adopt("example-exclusive");
        apply("01-exclusive").await?;
        let training = pod(&namespace, "training");
        training.started().await?;
        let memory = case.gpus[0].memory.to_count()?;
        ensure!(training.nvidia_smi().await?[0].1 << 20 == memory);
        let logs =
            tranche_e2e::wait::for_answer("a heartbeat", tranche_e2e::wait::USUAL, async || {
                let logs = training.logs().await?;
                Ok(logs.contains("beat 1: holding 60Gi").then_some(logs))
            })
            .await?;
        ensure!(logs.contains(", 0 errors"), "{logs}");
        Ok(())
    })
}

#[test]
fn example_02_capped_share() -> anyhow::Result<()> {
    run(async |case: &Case| {
        let (a, b) = (case.adopt("team-a"), case.adopt("team-b"));
        apply("02-capped-share").await?;
        let (notebook, training) = (pod(&a, "notebook"), pod(&b, "training"));
        notebook.started().await?;
        training.started().await?;
        let (small, large) = (notebook.nvidia_smi().await?, training.nvidia_smi().await?);
        ensure!(
            small[0].1 == 20480 && large[0].1 == 40960,
            "{small:?} {large:?}"
        );
        ensure!(
            small[0].0 == large[0].0,
            "on different GPUs: {small:?} {large:?}"
        );
        let filled = notebook.fill(&[]).await?;
        ensure!(
            filled[0].filled == 20 * GI && filled[0].refused > 0,
            "{filled:?}"
        );
        let logs = training.logs().await?;
        ensure!(
            logs.lines()
                .all(|line| line.contains(", 0 errors, moved 0 times")),
            "{logs}"
        );
        Ok(())
    })
}

#[test]
fn example_03_two_gpus() -> anyhow::Result<()> {
    run(async |case: &Case| {
        let namespace = case.adopt("example-two-gpus");
        apply("03-two-gpus").await?;
        let pipeline = pod(&namespace, "pipeline");
        pipeline.started().await?;
        let mut totals: Vec<_> = pipeline
            .nvidia_smi()
            .await?
            .into_iter()
            .map(|(_, total)| total)
            .collect();
        totals.sort_unstable();
        ensure!(totals == [6 * 1024, 12 * 1024], "{totals:?}");
        let logs = pipeline.logs().await?;
        ensure!(
            logs.contains("6Gi of 6Gi free") && logs.contains("12Gi of 12Gi free"),
            "{logs}"
        );
        Ok(())
    })
}
