//! A Prepare in each tier.
//!
//! Meanwhile a second claim of the tier, where one is possible, keeps the GPU in MIG mode and its MPS daemon running. So the times are
//! the cost of each claim. The simulated driver answers at once.

use std::sync::Arc;

use super::probe::Probe;
use super::{Load, Times, spread, timed};
use crate::claims::{self, Share};
use crate::row::Row;

impl Load<'_> {
    pub(super) async fn tiers(&mut self, probe: &Probe, rows: &mut Vec<Row>) -> anyhow::Result<()> {
        let gpu = &self.spare;
        let [one, other] = self.cluster.two_partitions(gpu).await?;
        let of = |share: fn(Arc<str>) -> Share| vec![share(Arc::clone(gpu)); 2];
        let tiers = [
            of(Share::Timeshared),
            of(Share::Concurrent),
            vec![Share::Partition(one), Share::Partition(other)],
            vec![Share::Exclusive(Arc::clone(gpu))],
        ];
        for shares in tiers {
            let tier = shares[0].tier();
            eprintln!("{} Prepares of the tier {tier}", self.args.of_tier);
            let claims = claims::make(self.cluster, tier.as_str(), &shares).await?;
            self.of_tiers.extend(claims.clone());
            let (claim, held) = claims.split_first().expect("each tier has a claim");
            for held in held {
                self.plugin.prepare(held).await?;
            }
            let mut times = Times::default();
            for _ in 0..self.args.of_tier {
                times.get.push(probe.get(claim).await?);
                times.prepare.push(timed(self.plugin.prepare(claim)).await?);
                self.plugin.unprepare(claim).await?;
            }
            for held in held {
                self.plugin.unprepare(held).await?;
            }
            let (prepare, get) = (spread(&times.prepare)?, spread(&times.get)?);
            let id = |what| format!("prepare-{tier}-{what}");
            rows.push(Row::new(&id("above-get"), prepare.p50 - get.p50).from(prepare));
            rows.push(
                Row::new(&id("p99"), prepare.p99)
                    .from(prepare)
                    .beside("one GET of the claim", get.p99),
            );
        }
        Ok(())
    }
}
