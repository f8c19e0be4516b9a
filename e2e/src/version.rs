//! Versions of Tranche on the cluster: what this tree is, and the release that users upgrade from (`e2e/upgrade`).

use std::path::PathBuf;

use anyhow::{Context, ensure};

use crate::SYSTEM;
use crate::tool::run;

/// A version whose images are on the nodes.
#[derive(Clone, Debug)]
pub struct Version {
    /// The tag of its image.
    pub tag: String,
    chart: PathBuf,
    values: PathBuf,
}

impl Version {
    /// What this tree is.
    #[must_use]
    pub fn this() -> Self {
        Self {
            tag: "dev".to_owned(),
            chart: repository().join("deploy/helm/tranche"),
            values: repository().join("e2e/kind/values.yaml"),
        }
    }

    /// The release before, which `e2e/upgrade/build` has built. Loads its image.
    pub async fn before() -> anyhow::Result<Self> {
        let file = repository().join("e2e/upgrade/version");
        let text = std::fs::read_to_string(&file).with_context(|| file.display().to_string())?;
        let tag = text.split_whitespace().next();
        let folder = repository().join("target/cluster/before");
        ensure!(
            folder.join("chart").is_dir(),
            "{} is missing: run e2e/upgrade/build",
            folder.display()
        );
        let tag = tag.context("e2e/upgrade/version is empty")?.to_owned();
        let image = format!("tranche/tranche:{tag}");
        let load = repository().join("e2e/kind/load");
        let load = load
            .to_str()
            .context("the repository's path is not UTF-8")?;
        run(load, &[&image], &[&folder.join("image")]).await?;
        Ok(Self {
            tag,
            chart: folder.join("chart"),
            values: folder.join("values.yaml"),
        })
    }

    /// Installs it in place of whatever version is there, as deploy/README.md says, and waits until it runs.
    pub async fn install(&self) -> anyhow::Result<()> {
        let crds = self.chart.join("crds");
        let apply = ["apply", "--server-side", "--force-conflicts", "--filename"];
        run("kubectl", &apply, &[&crds]).await?;
        let tag = format!("image.tag={}", self.tag);
        let upgrade = [
            "upgrade",
            "tranche",
            "--namespace",
            SYSTEM,
            "--wait",
            "--timeout",
            "180s",
            "--set-string",
            &tag,
            "--values",
        ];
        run("helm", &upgrade, &[&self.values, &self.chart]).await
    }
}

fn repository() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..")
}
