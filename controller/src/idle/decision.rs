//! One step for each claim of a node: pure.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use tranche_driver::policy::{IdleRule, IdleTerms};

use super::asked::NodeTerms;
use super::holder::Holder;
use super::state::{Step, Watch, Why, is_idle};

/// What the API server says of a claim that may be idle.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Facts {
    /// The labels of its namespace.
    pub labels: BTreeMap<String, String>,
    /// Whether it, or a pod of it, is exempt by its annotation.
    pub is_kept: bool,
    /// The pods that it is reserved for.
    pub pods: Vec<PodFacts>,
}

/// What the API server says of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodFacts {
    pub name: String,
    pub uid: String,
    /// The names of its claims.
    pub claims: BTreeSet<String>,
    /// Whether it ends already.
    pub is_ending: bool,
}

/// A claim that was called idle, and when.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Noticed {
    pub node: String,
    /// The claim and its devices.
    pub holder: Holder,
    /// The state from which the next step starts.
    pub watch: Watch,
}

/// What must be done for a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Act {
    pub holder: Holder,
    /// What must be done; never [`Step::Nothing`].
    pub step: Step,
    /// What the policies ask of it, if they ask anything.
    pub terms: Option<IdleRule>,
}

/// The rule for a claim: the longest times of its GPUs' rules ([`IdleRule::more_patient`]); `None` if one of the GPUs has no rule.
fn of_gpus(
    holder: &Holder,
    asked: &NodeTerms,
    of: impl Fn(&IdleTerms) -> Option<IdleRule>,
) -> Option<IdleRule> {
    let each = holder.gpus.iter().map(|gpu| of(asked.get(gpu)?));
    each.reduce(|one, two| Some(one?.more_patient(two?)))?
}

/// The rule for a claim if its namespace were selected: it asks at least for a report.
fn in_any_namespace(holder: &Holder, asked: &NodeTerms) -> Option<IdleRule> {
    of_gpus(holder, asked, |terms| Some(terms.report()))
}

/// Whether a claim would be idle if its namespace were selected. Facts are needed only for such claims.
#[must_use]
pub fn may_be_idle(holder: &Holder, asked: &NodeTerms) -> bool {
    in_any_namespace(holder, asked).is_some_and(|terms| is_idle(terms, holder.seen))
}

/// The steps of a node's claims. `watches` has the claims that were called idle; `now` is Unix time; `facts` has the facts of each claim
/// that [`may_be_idle`]. A claim whose facts could not be read gets no step.
pub fn decide(
    now: Duration,
    node: &str,
    holders: &BTreeMap<String, Holder>,
    asked: &NodeTerms,
    facts: &BTreeMap<String, Facts>,
    watches: &mut BTreeMap<String, Noticed>,
) -> Vec<Act> {
    let mut acts = Vec::new();
    // A claim that no longer has devices has no condition either.
    watches.retain(|uid, noticed| noticed.node != node || holders.contains_key(uid));
    for (uid, holder) in holders {
        let terms = match facts.get(uid) {
            Some(facts) if facts.is_kept => None,
            Some(facts) => of_gpus(holder, asked, |terms| terms.of_namespace(&facts.labels)),
            None if may_be_idle(holder, asked) => continue,
            // Whether its namespace is selected makes no difference to a claim that works.
            None => in_any_namespace(holder, asked),
        };
        let watch = watches.get(uid).map(|it| it.watch).unwrap_or_default();
        let (watch, step) = watch.step(now, terms, holder.seen);
        match watch {
            Watch::Busy => {
                watches.remove(uid);
            }
            Watch::Noticed { .. } => {
                let noticed = Noticed {
                    node: node.to_owned(),
                    holder: holder.clone(),
                    watch,
                };
                watches.insert(uid.clone(), noticed);
            }
        }
        if step != Step::Nothing {
            acts.push(Act {
                holder: holder.clone(),
                step,
                terms,
            });
        }
    }
    spare_who_works(&mut acts, holders, facts);
    acts
}

/// The steps of all claims of a node that were called idle and cannot be any more.
pub fn withdraw(node: &str, why: Why, watches: &mut BTreeMap<String, Noticed>) -> Vec<Act> {
    let of_node = watches.extract_if(.., |_, noticed| noticed.node == node);
    let withdrawn = |(_, noticed): (String, Noticed)| Act {
        holder: noticed.holder,
        step: Step::Withdraw(why),
        terms: None,
    };
    of_node.map(withdrawn).collect()
}

#[cfg(test)]
mod tests;

/// A pod is evicted as a whole, so it stays while another of its claims works.
fn spare_who_works(
    acts: &mut Vec<Act>,
    holders: &BTreeMap<String, Holder>,
    facts: &BTreeMap<String, Facts>,
) {
    let name = |holder: &Holder| (holder.claim.namespace.clone(), holder.claim.name.clone());
    let held: BTreeSet<_> = holders.values().map(name).collect();
    let evicted: BTreeSet<_> = acts
        .iter()
        .filter(|act| act.step == Step::Evict)
        .map(|act| name(&act.holder))
        .collect();
    acts.retain(|act| {
        if act.step != Step::Evict {
            return true;
        }
        let claim = &act.holder.claim;
        let pods = facts.get(&claim.uid).map_or(&[][..], |it| &it.pods);
        let mut claims = pods.iter().flat_map(|pod| &pod.claims);
        claims.all(|other| {
            let other = (claim.namespace.clone(), other.clone());
            !held.contains(&other) || evicted.contains(&other)
        })
    });
}
