//! Versions of Tranche on the cluster: this tree's, and one to update from.

use std::path::PathBuf;

use anyhow::Context;

use crate::SYSTEM;
use crate::tool::run;

/// The image's tag and the chart's version to update from.
const BEFORE: &str = "0.0.1";

/// A version whose images are on the nodes.
#[derive(Clone, Debug)]
pub struct Version {
    /// The tag of its image.
    pub tag: String,
    /// A folder or a package.
    chart: PathBuf,
}

impl Version {
    #[must_use]
    pub fn this() -> Self {
        Self {
            tag: "dev".to_owned(),
            chart: repository().join("deploy/helm/tranche"),
        }
    }

    /// The chart and the image of this tree under another version, because there is no release yet: the update replaces every process
    /// and every label. Loads its image.
    pub async fn before() -> anyhow::Result<Self> {
        let image = format!("tranche/tranche:{BEFORE}");
        let script = repository().join("e2e/kind/load");
        let load = script
            .to_str()
            .context("the repository's path is not UTF-8")?;
        run(
            load,
            &[&image],
            &[&repository().join("target/image/tranche")],
        )
        .await?;
        let packages = repository().join("target/cluster/before");
        let package = [
            "package",
            "--version",
            BEFORE,
            "--app-version",
            BEFORE,
            "--destination",
        ];
        run("helm", &package, &[&packages, &Self::this().chart]).await?;
        Ok(Self {
            tag: BEFORE.to_owned(),
            chart: packages.join(format!("tranche-{BEFORE}.tgz")),
        })
    }

    /// Installs it over the installed version, as deploy/README.md says, and waits until it runs.
    pub async fn install(&self) -> anyhow::Result<()> {
        let crds = repository().join("deploy/helm/tranche/crds");
        let apply = ["apply", "--server-side", "--force-conflicts", "--filename"];
        run("kubectl", &apply, &[&crds]).await?;
        let tag = format!("image.tag={}", self.tag);
        let upgrade = [
            "upgrade",
            "tranche",
            "--namespace",
            SYSTEM,
            "--set-string",
            &tag,
            "--values",
        ];
        let values = repository().join("e2e/kind/values.yaml");
        run("helm", &upgrade, &[&values, &self.chart]).await?;
        for replaced in [
            "deployment/tranche-controller",
            "deployment/tranche-usage-api",
            "daemonset/tranche-node-plugin",
        ] {
            let status = [
                "--namespace",
                SYSTEM,
                "rollout",
                "status",
                "--timeout",
                "180s",
                replaced,
            ];
            run("kubectl", &status, &[]).await?;
        }
        Ok(())
    }
}

fn repository() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..")
}
