//! Times the necessary steps of a Prepare separately.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::Context;
use futures::future::{join_all, try_join_all};
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::Api;

use super::timed;
use crate::cluster::{Cluster, NAMESPACE};
use crate::dra::ClaimId;

/// About the size of a claim's journal.
const JOURNAL: [u8; 1500] = [b' '; 1500];

/// Reads claims and writes files. Its folder is removed when it is dropped.
#[derive(Debug)]
pub struct Probe {
    claims: Api<ResourceClaim>,
    folder: PathBuf,
}

impl Probe {
    /// Writes beside the plugin's folder, on the same file system.
    pub fn new(cluster: &Cluster, plugin_dir: &Path) -> anyhow::Result<Self> {
        let parent = plugin_dir
            .parent()
            .context("--plugin-dir has no parent folder")?;
        let folder = parent.join(".tranche-bench");
        std::fs::create_dir_all(&folder).with_context(|| format!("{}", folder.display()))?;
        Ok(Self {
            claims: Api::namespaced(cluster.client.clone(), NAMESPACE),
            folder,
        })
    }

    /// The time of one GET.
    pub async fn get(&self, claim: &ClaimId) -> anyhow::Result<Duration> {
        timed(async { Ok(self.claims.get(&claim.name).await?) }).await
    }

    /// The time of one GET for each claim at once, until the last answer, in each round.
    pub async fn gets_at_once(
        &self,
        claims: &[ClaimId],
        rounds: usize,
    ) -> anyhow::Result<Vec<Duration>> {
        let mut last = Vec::with_capacity(rounds);
        for _ in 0..rounds {
            last.push(timed(try_join_all(claims.iter().map(|claim| self.get(claim)))).await?);
        }
        Ok(last)
    }

    /// Repeated GETs by one caller per claim.
    pub async fn gets_per_second(
        &self,
        claims: &[ClaimId],
        duration: Duration,
    ) -> anyhow::Result<f64> {
        let start = Instant::now();
        let callers = claims.iter().map(|claim| {
            let (api, name) = (self.claims.clone(), claim.name.clone());
            tokio::spawn(async move {
                let mut answers = 0_u32;
                while start.elapsed() < duration {
                    api.get(&name).await?;
                    answers += 1;
                }
                anyhow::Ok(answers)
            })
        });
        let mut answers = 0;
        for caller in join_all(callers).await {
            answers += caller??;
        }
        Ok(f64::from(answers) / start.elapsed().as_secs_f64())
    }

    /// The time to write one file with fsync and rename, so that after a power failure it is complete or does not exist.
    pub fn write(&self) -> anyhow::Result<Duration> {
        let (temporary, path) = (self.folder.join("journal.tmp"), self.folder.join("journal"));
        let start = Instant::now();
        let mut file = File::create(&temporary)?;
        file.write_all(&JOURNAL)?;
        file.sync_all()?;
        std::fs::rename(&temporary, &path)?;
        Ok(start.elapsed())
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        if let Err(error) = std::fs::remove_dir_all(&self.folder) {
            eprintln!("  {}: {error}", self.folder.display());
        }
    }
}
