//! Decides the next step for one node, as a pure function.
//!
//! Every call considers everything and returns one step, so that a restart, a lost event or a half
//! executed step needs no special case: the next call finds what is still missing.
//!
//! ```text
//!            the Node is gone ──────────────────────────► delete what is left
//!            epoch not published yet ───► Publish ─┐
//!  view ──►                                        ├──► slices differ? write them
//!            every recorded slice exists ► Keep ───┘    record differs? write status.published
//!                                                       something obsolete? delete it
//!            no GpuNode, never registered, or
//!            a recorded slice is missing ► Wait ────────► delete what is left, a few seconds later
//! ```
//!
//! **A node without a driver** has a registration and no inventory. It is planned as a node without GPUs: its
//! devices are tainted at once, those that no claim holds are removed, and the others stay tainted, so that
//! their GPUs' counters stay taken until the driver is back or the claims end.
//!
//! **The epoch rule** (docs/adr/0005). The kubelet removes the slices of a plugin that is gone, and only the
//! plugin knows that it is alive. So slices are created for a registration that has not been
//! published yet, and never again for the same one: once `published.epoch` equals the registration's,
//! a missing slice means that it was removed, and a running plugin requests it with a new epoch.
//! A request that is older than the kubelet's patience with a plugin that is gone (this controller was
//! away) is accepted only when the node plugin's pod is ready, because the kubelet may already have
//! deleted the slices of a dead plugin and will not do so again. The record follows the slices and
//! precedes the removal of obsolete ones: every slice that the record names has existed, and we remove
//! none of them while the pool stands.

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use kube::ResourceExt;
use tranche_api::GpuNode;
use tranche_api::gpu_node::{Inventory, Published, PublishedGpu, Registration};
use tranche_api::{GpuNodeStatus, withheld};
use tranche_driver::policy;
use tranche_driver::slices::{self, NodeInput};

use crate::index::NodeView;
use crate::known::{KnownSlice, PLUGIN};
use crate::offered;
use crate::pool::{self, Difference, Memory, Write};
use crate::withdrawn::{self, HeldDevices, ReadDevices};

/// What to do next.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// Nothing is to be done.
    Nothing,
    /// Write these slices, in this order.
    Slices(Vec<Write>),
    /// Write `status.published`.
    Record(Published),
    /// Read these slices, by name and version, then ask again with all of their devices.
    ReadSlices(Vec<(String, String)>),
    /// List the claims, then ask again with what they hold.
    ListClaims,
    /// Look whether the node plugin's pod is ready, then ask again.
    FindPlugin,
}

impl Step {
    /// How many requests it makes.
    #[must_use]
    pub fn requests(&self) -> usize {
        match self {
            Self::Nothing | Self::ListClaims => 0,
            Self::Slices(writes) => writes.len(),
            Self::ReadSlices(slices) => slices.len(),
            Self::Record(_) | Self::FindPlugin => 1,
        }
    }
}

/// Information that steps requested in addition to the watches.
#[derive(Clone, Debug, Default)]
pub struct Evidence {
    /// What [`Step::ListClaims`] found.
    pub held: Option<HeldDevices>,
    /// What [`Step::FindPlugin`] found, and when.
    pub plugin_ready: Option<(bool, Timestamp)>,
    /// What [`Step::ReadSlices`] read.
    pub read: ReadDevices,
}

/// Evidence gets old while the node waits for its turn.
impl Evidence {
    fn held(&self, now: Timestamp) -> Option<&HeldDevices> {
        self.held.as_ref().filter(|held| now <= held.until)
    }

    fn plugin_ready(&self, now: Timestamp) -> Option<bool> {
        let (ready, at) = self.plugin_ready?;
        (now <= at + FRESH).then_some(ready)
    }
}

/// The next step, and when to decide again.
#[derive(Clone, Debug, PartialEq)]
pub struct Decision {
    /// What to do next.
    pub step: Step,
    /// When to reconcile again although nothing changed.
    pub again: Option<Duration>,
}

impl Decision {
    fn only(step: Step) -> Self {
        Self { step, again: None }
    }

    fn delete_all(view: &NodeView) -> Self {
        if view.slices.is_empty() {
            return Self::only(Step::Nothing);
        }
        let writes = view.slices.iter().map(|s| Write::delete(s)).collect();
        Self::only(Step::Slices(writes))
    }
}

/// The oldest registration that is accepted without a check. The kubelet deletes the slices 30 s after a
/// plugin was lost.
const FRESH: SignedDuration = SignedDuration::from_secs(20);
/// How often to check again for a plugin that is not ready.
const CHECK_AGAIN: Duration = Duration::from_secs(10);

/// What the epochs allow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    /// A registration that is not published yet: slices may be created.
    Publish,
    /// Everything recorded exists: the pool may change.
    Keep,
    /// Something recorded is missing: only the plugin can ask for it again.
    Wait,
}

fn phase(
    slices: &[impl AsRef<KnownSlice>],
    registration: &Registration,
    published: &Published,
) -> Phase {
    // The plugin describes its node before the kubelet knows it; epochs count from one.
    if registration.epoch < 1 {
        return Phase::Wait;
    }
    if published.epoch != registration.epoch {
        return Phase::Publish;
    }
    if gone(slices, published) == 0 {
        Phase::Keep
    } else {
        Phase::Wait
    }
}

/// How many of the published slices do not exist.
fn gone(slices: &[impl AsRef<KnownSlice>], published: &Published) -> usize {
    let exists = |name: &str| slices.iter().any(|slice| *slice.as_ref().name == *name);
    let names = published.slices.iter();
    names.filter(|name| !exists(name)).count()
}

/// How many slices are missing: those that were published for the plugin's registration and are gone, or 1 if none was
/// published for it yet. 0 for a node without a plugin or without a driver.
#[must_use]
pub fn missing_slices(view: &NodeView) -> usize {
    let status = view.gpu_node.as_ref().and_then(|g| g.status.as_ref());
    let registration = status.and_then(|status| status.registration.as_ref());
    let Some(registration) = registration.filter(|it| it.epoch >= 1 && view.node.is_some()) else {
        return 0;
    };
    let Some(published) = status.and_then(|status| status.published.as_ref()) else {
        return 1;
    };
    if published.epoch == registration.epoch {
        gone(&view.slices, published)
    } else {
        1
    }
}

/// Whether the plugin's last write is so old that the plugin may be dead and its slices wiped already. The
/// API server records the time of each field manager's last write.
fn is_stale(gpu_node: &GpuNode, now: Timestamp) -> bool {
    let writes = gpu_node.metadata.managed_fields.iter().flatten();
    writes
        .filter(|write| write.manager.as_deref() == Some(PLUGIN))
        .filter_map(|write| write.time.as_ref())
        .map(|time| time.0)
        .max()
        .is_some_and(|last| last + FRESH < now)
}

pub fn reconcile(
    view: &NodeView,
    memory: &mut Memory,
    evidence: &Evidence,
    now: Timestamp,
) -> Decision {
    let held = evidence.held(now);
    let status = view.gpu_node.as_ref().and_then(|g| g.status.as_ref());
    let Some(node) = &view.node else {
        return Decision::delete_all(view);
    };
    let (Some(gpu_node), Some(registration)) =
        (&view.gpu_node, status.and_then(|s| s.registration.as_ref()))
    else {
        // The GpuNode was deleted. A running plugin writes it again within a second.
        return wait(view, memory, now);
    };
    let no_driver = Inventory::default();
    let inventory = status
        .and_then(|s| s.inventory.as_ref())
        .unwrap_or(&no_driver);
    let published = status.and_then(|s| s.published.clone()).unwrap_or_default();
    let phase = phase(&view.slices, registration, &published);
    if phase == Phase::Wait && !view.slices.is_empty() {
        return wait(view, memory, now);
    }
    memory.not_waiting();

    let plan = match slices::plan(&NodeInput {
        name: &view.name,
        uid: node.metadata.uid.as_deref().unwrap_or_default(),
        labels: node.labels(),
        inventory,
        withheld: status.map_or(&[], |status| &status.withheld),
        health: status.map_or(&[], |status| &status.gpus),
        policies: &view.policies,
        retained: &withdrawn::retained(&view.slices, held, &evidence.read),
    }) {
        Ok(plan) => plan,
        // The node's name cannot name a pool: nothing was ever published.
        Err(error) => {
            let problem = error.to_string();
            return Decision::only(if published.problem == problem {
                Step::Nothing
            } else {
                Step::Record(Published {
                    problem,
                    ..published
                })
            });
        }
    };
    if phase == Phase::Wait {
        return Decision::only(Step::Nothing);
    }
    if !plan.lacking.is_empty() {
        return Decision::only(Step::ReadSlices(withdrawn::unread(
            &view.slices,
            &plan.lacking,
        )));
    }
    let names: Vec<String> = plan.slices.iter().map(|s| s.name.clone()).collect();
    memory.keep_only(&names);

    let Difference {
        generation,
        writes,
        obsolete,
    } = pool::difference(&plan, &view.slices, &published, memory);
    let creates = writes.iter().any(|write| matches!(write, Write::Create(_)));
    if phase == Phase::Publish && creates && is_stale(gpu_node, now) {
        match evidence.plugin_ready(now) {
            Some(true) => {}
            Some(false) => {
                return Decision {
                    again: Some(CHECK_AGAIN),
                    ..Decision::only(Step::Nothing)
                };
            }
            None => return Decision::only(Step::FindPlugin),
        }
    }
    let waiting = withdrawn::waiting(&plan, &view.slices, held, now);
    let record = Published {
        epoch: registration.epoch,
        pool_generation: generation,
        slice_count: u32::try_from(names.len()).unwrap_or(u32::MAX),
        slices: names,
        problem: memory.problem(),
        gpus: node_terms(view, node.labels(), inventory, &published),
        withheld_count: withheld::count(&plan.withheld),
        withheld: plan.withheld,
    };
    let step = if !writes.is_empty() {
        Step::Slices(writes)
    } else if !memory.is_recorded(&record, &published) || !has_condition(status, &record) {
        Step::Record(record)
    } else if !obsolete.is_empty() {
        Step::Slices(obsolete)
    } else if waiting.ask_claims {
        Step::ListClaims
    } else {
        Step::Nothing
    };
    Decision {
        step,
        again: waiting.again,
    }
}

/// Gives the plugin a few seconds to ask for the pool, and then deletes what is left of it. If the plugin asks,
/// what is left is still good: withdrawn devices that claims hold keep their counters.
fn wait(view: &NodeView, memory: &mut Memory, now: Timestamp) -> Decision {
    if view.slices.is_empty() {
        return Decision::only(Step::Nothing);
    }
    let patience = memory.waiting(now);
    if patience.is_zero() {
        return Decision::delete_all(view);
    }
    Decision {
        again: Some(patience),
        ..Decision::only(Step::Nothing)
    }
}

/// What the policies ask of the node itself for each GPU, in the order of UUIDs. A GPU with an invalid policy
/// keeps its last settings.
fn node_terms(
    view: &NodeView,
    labels: &BTreeMap<String, String>,
    inventory: &Inventory,
    published: &Published,
) -> Vec<PublishedGpu> {
    let last = |uuid: &str| {
        let known = published.gpus.iter().find(|gpu| gpu.uuid == uuid);
        known.cloned().unwrap_or_else(|| PublishedGpu {
            uuid: uuid.to_owned(),
            ..PublishedGpu::default()
        })
    };
    let mut gpus: Vec<_> = inventory
        .gpus
        .iter()
        .map(|gpu| {
            policy::published(&view.policies, labels, gpu).unwrap_or_else(|_| last(&gpu.uuid))
        })
        .collect();
    gpus.sort_by(|a, b| a.uuid.cmp(&b.uuid));
    gpus
}

/// Whether the node's condition says the same as the record. A missing condition is written with the next
/// record, because an older schema drops it.
fn has_condition(status: Option<&GpuNodeStatus>, record: &Published) -> bool {
    let state = offered::condition(record);
    let stored = status.map_or(&[][..], |status| &status.conditions);
    stored
        .iter()
        .find(|condition| condition.type_ == state.kind)
        .is_none_or(|condition| *condition == state.since(stored, Timestamp::UNIX_EPOCH))
}
