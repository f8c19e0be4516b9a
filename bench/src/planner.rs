//! What the controller publishes for a node of H100 with all tiers: ResourceSlices, their bytes, and the time to plan them.

use std::collections::BTreeMap;
use std::time::Instant;

use anyhow::Context;
use serde_json::json;
use tranche_api::gpu_node::Inventory;
use tranche_api::sharing_policy::SharingPolicy;
use tranche_api::tier::Tier;
use tranche_driver::slices::{self, NodeInput, SlicePlan};

use crate::packing::h100s;
use crate::row::Row;
use crate::stats::Spread;

/// Numbers of GPUs of the planned nodes.
const NODES: [u32; 3] = [1, 8, 16];
/// The number of GPUs of the node whose planning is timed.
const TIMED: u32 = 8;
const KIB: f64 = 1024.0;

/// How much to measure.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct Args {
    /// Plans that are timed
    #[arg(long, default_value_t = 300)]
    plans: usize,
}

/// Measures.
pub fn run(args: Args) -> anyhow::Result<Vec<Row>> {
    let policy = all_tiers()?;
    let mut rows = Vec::new();
    for gpus in NODES {
        let size = Size::of(&plan(&h100s(gpus), &policy)?)?;
        rows.push(Row::new(&format!("slices-{gpus}"), size.slices));
        rows.push(
            Row::new(&format!("slices-bytes-{gpus}"), size.bytes / KIB)
                .beside("the largest slice", size.largest / KIB)
                .beside("devices", size.devices),
        );
    }
    let inventory = h100s(TIMED);
    let mut times = Vec::with_capacity(args.plans);
    for _ in 0..args.plans {
        let start = Instant::now();
        std::hint::black_box(plan(&inventory, &policy)?);
        times.push(start.elapsed());
    }
    let spread = Spread::of_times(&times).context("nothing was timed")?;
    rows.push(Row::new("plan-8", spread.p50).from(spread));
    Ok(rows)
}

fn all_tiers() -> anyhow::Result<SharingPolicy> {
    Ok(serde_json::from_value(json!({
        "apiVersion": "gpu.tranche.dev/v1alpha1",
        "kind": "SharingPolicy",
        "metadata": {"name": "default"},
        "spec": {"tiers": Tier::ALL},
    }))?)
}

fn plan(inventory: &Inventory, policy: &SharingPolicy) -> anyhow::Result<SlicePlan> {
    let labels = BTreeMap::new();
    Ok(slices::plan(&NodeInput {
        name: "node-a",
        uid: "7c1b2f6e-0d5e-4a43-8a07-5c9f1a2b3c4d",
        labels: &labels,
        inventory,
        withheld: &[],
        health: &[],
        policies: std::slice::from_ref(policy),
        retained: &[],
    })?)
}

/// The sizes of a node's slices.
#[derive(Clone, Copy, Debug, Default)]
struct Size {
    slices: f64,
    devices: f64,
    /// Of all slices as JSON.
    bytes: f64,
    /// Of the largest slice.
    largest: f64,
}

impl Size {
    #[allow(clippy::cast_precision_loss)] // far below 2^52
    fn of(plan: &SlicePlan) -> anyhow::Result<Self> {
        let mut size = Self::default();
        for slice in &plan.slices {
            let object = plan.object(slice, 1);
            let bytes = serde_json::to_vec(&object)?.len() as f64;
            size.slices += 1.0;
            size.devices += object.spec.devices.iter().flatten().count() as f64;
            size.bytes += bytes;
            size.largest = size.largest.max(bytes);
        }
        Ok(size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// These values are the same on all machines: only the time depends on the machine.
    #[test]
    fn the_slices_of_a_node_are_as_few_and_small_as_promised() {
        for row in run(Args { plans: 1 }).unwrap() {
            eprintln!("{} {row}", row.line().unwrap());
            assert!(row.id == "plan-8" || row.is_kept().unwrap(), "{row:?}");
        }
    }
}
