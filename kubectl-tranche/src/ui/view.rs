//! Makes the records of the page: pure.
//!
//! ```text
//!  key          record
//!  node/NAME    NodeView: a node's GPUs, each with its bar and the same facts in words
//!  pod/NS/NAME  PodView: a pod that does not run, and why
//!  use/NAME     what a node's GPUs and their holders use now
//!  hour/NAME    what a node's GPUs used over the last hour; once a minute
//!  summary      Summary: the cluster in a few numbers
//!  notes        what is missing, a line for each
//! ```

mod cost;
mod gpu;
mod summary;
mod used;
mod waiting;

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use self::used::Holders;
use super::history::{History, Read};
use super::records::{RecordError, Records};
use super::store::{Dirty, Store};
use crate::cost::Prices;
use crate::model::Model;
use crate::snapshot::Snapshot;
use crate::usage::{self, UsageResult};

use gpu::{GpuSums, GpuView, NodeView};
use summary::{NodeSums, Summary};
use used::{NodeHour, NodeUse};
use waiting::PodView;

/// A line about what is missing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Note {
    pub text: String,
    /// Whether the page can show nothing true without it.
    pub is_obstacle: bool,
}

/// The records, and the state from which they are made.
#[derive(Debug, Default)]
pub struct Page {
    /// What the page shows.
    pub records: Records,
    nodes: BTreeMap<String, Shown>,
}

/// A node that is shown, for the records beside its own.
#[derive(Debug, Default)]
struct Shown {
    sums: NodeSums,
    holders: Holders,
}

impl Page {
    /// Updates the records. `dirty` is what [`Store::take_dirty`] returned since the last call.
    pub fn update(
        &mut self,
        store: &Store,
        dirty: &Dirty,
        usage: &UsageResult,
        history: &History,
    ) -> Result<(), RecordError> {
        let common = store.common();
        let prices = common.prices.clone().unwrap_or_default();
        let (prices, price_errors) = Prices::read(&prices);
        let price_errors = price_errors.iter().map(ToString::to_string);
        let missing = notes(&common, usage, price_errors);
        let nodes = if missing.iter().any(|note| note.is_obstacle) {
            BTreeSet::new()
        } else {
            store.nodes()
        };
        self.records.set("notes", &missing)?;
        let changed = if dirty.all { &nodes } else { &dirty.nodes };
        for name in changed.intersection(&nodes) {
            self.node(name, store, &prices)?;
        }
        self.nodes.retain(|name, _| nodes.contains(name));
        self.records.retain("node/", |name| nodes.contains(name));
        if dirty.all || dirty.waiting {
            self.waiting(&store.waiting())?;
        }
        let sums = self.nodes.values().map(|node| &node.sums);
        self.records.set("summary", &Summary::new(sums))?;
        self.used(dirty, usage, history)
    }

    /// The current use has a record of its own: it changes with each reading, and the last hour is much longer.
    fn used(
        &mut self,
        dirty: &Dirty,
        usage: &UsageResult,
        history: &History,
    ) -> Result<(), RecordError> {
        let nodes = &self.nodes;
        self.records
            .retain("use/", |name| usage.is_ok() && nodes.contains_key(name));
        self.records
            .retain("hour/", |name| nodes.contains_key(name));
        for (name, node) in nodes {
            let is_due = dirty.all || dirty.nodes.contains(name);
            if let Ok(usage) = usage
                && (is_due || dirty.read >= Read::Again)
            {
                let of_node = NodeUse::new(&node.holders, usage);
                self.records.set(&format!("use/{name}"), &of_node)?;
            }
            if is_due || dirty.read == Read::FirstOfMinute {
                let of_node = NodeHour::new(&node.holders, history);
                self.records.set(&format!("hour/{name}"), &of_node)?;
            }
        }
        Ok(())
    }

    fn node(&mut self, name: &str, store: &Store, prices: &Prices) -> Result<(), RecordError> {
        // The use changes often and has records of its own.
        let mut model = Model::new(&store.of_node(name), &Err(String::new()));
        // A claim with devices of several nodes names the others, too.
        model.nodes.retain(|node| node.name == name);
        let Some(node) = model.nodes.first() else {
            self.nodes.remove(name);
            self.records.remove(&format!("node/{name}"));
            return Ok(());
        };
        let sums: Vec<GpuSums> = node
            .gpus
            .iter()
            .map(|gpu| GpuSums::new(gpu, prices))
            .collect();
        let gpus = node.gpus.iter().zip(&sums);
        let view = NodeView {
            driver: node.driver_version.clone(),
            plugin: node.plugin_version.clone(),
            problems: node.problems.clone(),
            gpus: gpus.map(|(gpu, sums)| GpuView::new(gpu, sums)).collect(),
        };
        let shown = Shown {
            sums: NodeSums::new(node, &sums),
            holders: Holders::new(node),
        };
        self.nodes.insert(name.to_owned(), shown);
        self.records.set(&format!("node/{name}"), &view)
    }

    fn waiting(&mut self, snapshot: &Snapshot) -> Result<(), RecordError> {
        let model = Model::new(snapshot, &Err(String::new()));
        let pods = waiting::pods(snapshot, &model);
        let key = |pod: &PodView| format!("{}/{}", pod.namespace, pod.name);
        let keys: BTreeSet<String> = pods.iter().map(key).collect();
        self.records.retain("pod/", |rest| keys.contains(rest));
        for pod in &pods {
            self.records.set(&format!("pod/{}", key(pod)), pod)?;
        }
        Ok(())
    }
}

fn notes(
    common: &Snapshot,
    usage: &UsageResult,
    price_errors: impl Iterator<Item = String>,
) -> Vec<Note> {
    let obstacle = common.obstacle();
    let gaps = common.gaps.iter().map(|gap| Note {
        text: gap.message.clone(),
        is_obstacle: obstacle == Some(gap),
    });
    let others = price_errors
        .map(|error| format!("a price is not read: {error}"))
        .chain(usage::notes(usage))
        .map(|text| Note {
            text,
            is_obstacle: false,
        });
    gaps.chain(others).collect()
}

#[cfg(test)]
mod tests;
