//! What the policies ask of idle claims, by node and GPU, as of the node's last reconcile.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, Once, PoisonError};
use std::time::Duration;

use kube::ResourceExt as _;
use tranche_driver::policy::{self, IdleTerms};

use crate::index::NodeView;

/// What is asked of idle claims of a node's GPUs, by UUID.
pub type NodeTerms = BTreeMap<String, IdleTerms>;

/// The least number of looks at a node between a claim's last kernel and the moment at which the claim counts as idle.
const LOOKS: u32 = 10;
/// The pauses between two looks at a node.
const SHORTEST: Duration = Duration::from_secs(2);
const LONGEST: Duration = Duration::from_mins(5);

/// What the controller may do about idle claims, whatever the policies ask.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Allowed {
    /// Nothing.
    #[default]
    Off,
    /// Name them.
    Report,
    /// Evict their pods, too.
    Evict,
}

/// What is asked of the nodes; clones share it.
#[derive(Clone, Debug, Default)]
pub struct Asked {
    allowed: Allowed,
    nodes: Arc<Mutex<Nodes>>,
}

/// The nodes by name. A reader gets a snapshot.
type Nodes = Arc<BTreeMap<String, Arc<NodeTerms>>>;

impl Asked {
    /// Takes what policies ask, as far as `allowed` permits it.
    #[must_use]
    pub fn new(allowed: Allowed) -> Self {
        Self {
            allowed,
            nodes: Arc::default(),
        }
    }

    /// Takes what the policies ask of a node's claims. An invalid policy asks nothing; its problem is published with the slices.
    pub fn note(&self, view: &NodeView) {
        let mut terms = terms(view);
        match self.allowed {
            Allowed::Off => {
                if !terms.is_empty() {
                    static SAID: Once = Once::new();
                    SAID.call_once(|| tracing::warn!("a SharingPolicy has spec.idle, but this controller looks for no idle claims: set the chart's controller.idleClaims"));
                }
                return;
            }
            Allowed::Report => {
                let report = |(gpu, terms): (String, IdleTerms)| (gpu, terms.report_only());
                terms = terms.into_iter().map(report).collect();
            }
            Allowed::Evict => {}
        }
        let mut nodes = self.nodes();
        let known = nodes.get(&view.name);
        if view.gpu_node.is_none() {
            Arc::make_mut(&mut nodes).remove(&view.name);
        } else if known.is_none_or(|known| **known != terms) {
            Arc::make_mut(&mut nodes).insert(view.name.clone(), Arc::new(terms));
        }
    }

    /// What is asked of each node that was reconciled; empty for most nodes.
    #[must_use]
    pub fn all(&self) -> Nodes {
        Arc::clone(&self.nodes())
    }

    /// Forgets everything: every node is reconciled again before anything is asked.
    pub fn clear(&self) {
        *self.nodes() = Nodes::default();
    }

    fn nodes(&self) -> MutexGuard<'_, Nodes> {
        self.nodes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn terms(view: &NodeView) -> NodeTerms {
    let status = view.gpu_node.as_ref().and_then(|it| it.status.as_ref());
    let inventory = status.and_then(|it| it.inventory.as_ref());
    let Some((inventory, node)) = inventory.zip(view.node.as_ref()) else {
        return NodeTerms::new();
    };
    let gpus = inventory.gpus.iter().filter_map(|gpu| {
        let asked = policy::idle(&view.policies, node.labels(), gpu).ok()?;
        Some((gpu.uuid.clone(), asked?))
    });
    gpus.collect()
}

/// How long after a look at a node the next one is due.
#[must_use]
pub fn pause(terms: &NodeTerms) -> Duration {
    let soonest = terms.values().map(IdleTerms::after).min();
    let pause = soonest.unwrap_or(LONGEST) / LOOKS;
    pause.clamp(SHORTEST, LONGEST)
}
