//! `kubectl tranche` with an API server.

use anyhow::{Context, ensure};
use tranche_e2e::kubectl::tranche;
use tranche_e2e::{Case, run_on_a_hollow_node, tool};

use crate::support::allocated;

#[test]
fn recommended_claims_are_accepted_by_the_api_server() -> anyhow::Result<()> {
    run_on_a_hollow_node(async |case: &Case| {
        let namespace = case.namespace("recommend").await?;
        let trusted = ["machine=container", "data=trusted"];
        let part = [&trusted[..], &["size=part"]].concat();
        let ways: [(&[&str], &str); 7] = [
            (&["machine=virtual"], "passthrough"),
            (&["machine=container", "data=regulated"], "hard"),
            (&[&trusted[..], &["size=whole"]].concat(), "exclusive"),
            (
                &[&part[..], &["latency=p99", "gpu=mig"]].concat(),
                "partition",
            ),
            (
                &[&part[..], &["latency=none", "sharing=amount"]].concat(),
                "capped",
            ),
            (
                &[
                    &part[..],
                    &["latency=none", "sharing=replicas", "faults=shared"],
                ]
                .concat(),
                "concurrent",
            ),
            (
                &[&part[..], &["latency=none", "sharing=bursts"]].concat(),
                "timeshared",
            ),
        ];
        for (answers, tier) in ways {
            let common = [
                "--memory",
                "2Gi",
                "--cores",
                "10",
                "--name",
                tier,
                "--namespace",
                namespace.name(),
            ];
            let arguments = [&["recommend"][..], answers, &common].concat();
            let yaml = tranche(&arguments).await?.output()?;
            ensure!(yaml.contains(&format!("{tier}.gpu.tranche.dev")), "{yaml}");
            let file = std::env::temp_dir().join(case.unique(&format!("{tier}.yaml")));
            std::fs::write(&file, &yaml)?;
            let applied = tool::run("kubectl", &["apply", "--filename"], &[&file]).await;
            std::fs::remove_file(&file)?;
            applied.with_context(|| yaml.clone())?;
        }
        // A pod gets the recommended device.
        let manifest = tranche_e2e::namespace::Source::Template("capped");
        let pod = namespace
            .pod("works", &[manifest], &tranche_e2e::namespace::IDLE)
            .await?;
        pod.started().await?;
        let has = allocated(case, &namespace, Some("works")).await?;
        ensure!(
            has.len() == 1 && has[0].to_string() == "capped 2Gi",
            "{has:?}"
        );
        Ok(())
    })
}
