//! What kube-scheduler allocates for claims, and why it allocates nothing: the rules of the structured allocator of
//! Kubernetes 1.37 with the features that the release enables by default.
//!
//! `tests/rules` compares these rules with the scheduler's own code: the verdict and the devices are the same. Where
//! this model cannot decide, it returns [`Problem::Unjudged`] and does not guess.
//!
//! ```text
//!  slices, node ──► pool ───────┐
//!  claims that are allocated ──► held ├──► search ──► Verdict
//!  claims that wait ──► request ┘         └──► report ──► Obstacle of each device ──► release
//! ```
//!
//! Not modelled, because the release disables them: list attributes in constraints, derived attributes, compatibility groups
//! and node resources of devices. The limit on the cost of a selector is not modelled either.
#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod capacity;
mod constraint;
mod held;
mod node;
mod pool;
mod problem;
mod release;
mod report;
mod request;
mod search;
mod selector;
mod taint;
mod verdict;

use std::collections::BTreeMap;

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceSlice};

pub use node::{matches as term_matches, selects as selector_matches};
pub use problem::Problem;
pub use search::MOST_STEPS;
pub use selector::Selectors;
pub use taint::{add_rules as add_taint_rules, name_rules as name_taint_rules};
pub use verdict::{
    DeviceId, DeviceReport, Granted, Holder, Obstacle, PoolProblem, Release, Report, RequestReport,
    Verdict,
};

use held::Allocations;
use pool::Pool;
use search::{Search, Selections};

/// What the allocator knows.
#[derive(Clone, Copy, Debug)]
pub struct Cluster<'a> {
    /// All slices of the cluster, of all drivers, with the taints of DeviceTaintRules ([`add_taint_rules`]).
    pub slices: &'a [ResourceSlice],
    /// All of them.
    pub classes: &'a [DeviceClass],
    /// All claims; the devices of those that are allocated are in use.
    pub claims: &'a [&'a ResourceClaim],
    /// Parsed selectors, kept between calls.
    pub selectors: &'a Selectors,
    /// The steps after which a search is given up, at most [`MOST_STEPS`].
    pub most_steps: usize,
}

impl<'a> Cluster<'a> {
    /// Whether a node has devices for claims that are not allocated, and which devices. The claims belong to one pod and are in the
    /// order of its `spec.resourceClaims`.
    #[must_use]
    pub fn judge(&self, node: &Node, claims: &[&'a ResourceClaim]) -> Verdict {
        let judged = pool::gather(self.slices, node)
            .and_then(|pools| self.verdict(node, &pools, &Selections::default(), claims, &[]));
        judged.unwrap_or_else(Verdict::Problem)
    }

    /// As [`Cluster::judge`], with the reason of every device.
    #[must_use]
    pub fn explain(&self, node: &Node, claims: &[&'a ResourceClaim]) -> Report {
        let failed = |problem| Report {
            verdict: Verdict::Problem(problem),
            pools: Vec::new(),
            requests: Vec::new(),
        };
        self.report(node, claims).unwrap_or_else(failed)
    }

    /// The smallest set of claims that a bounded search finds whose release makes the claims fit on a node; `None` if it finds none
    /// with fewer than `fewer_than` claims. `report` is the node's report.
    #[must_use]
    pub fn releases(
        &self,
        node: &Node,
        claims: &[&'a ResourceClaim],
        report: &Report,
        fewer_than: usize,
    ) -> Option<Release> {
        let pools = pool::gather(self.slices, node).ok()?;
        let selections = Selections::default();
        release::find(report, fewer_than, |released| {
            let verdict = self.verdict(node, &pools, &selections, claims, released);
            matches!(verdict, Ok(Verdict::Fits(_)))
        })
    }

    /// The verdict without the claims that are released.
    fn verdict(
        &self,
        node: &Node,
        pools: &[Pool<'a>],
        selections: &Selections<'a>,
        claims: &[&'a ResourceClaim],
        released: &[&str],
    ) -> Result<Verdict, Problem> {
        let kept = self.claims.iter().copied().filter(|claim| {
            released.is_empty() || !released.contains(&request::name(claim).as_str())
        });
        let held = Allocations::of(&kept.collect::<Vec<_>>())?;
        let wanted = self.wanted(claims)?;
        let mut search = Search::new(
            node,
            pools,
            &held,
            self.selectors,
            selections,
            wanted,
            self.most_steps,
        )?;
        if search.run()? {
            Ok(Verdict::Fits(self::granted(&search, pools)))
        } else {
            Ok(Verdict::DoesNotFit)
        }
    }

    fn report(&self, node: &Node, claims: &[&'a ResourceClaim]) -> Result<Report, Problem> {
        let pools = pool::gather(self.slices, node)?;
        let selections = Selections::default();
        let verdict = self.verdict(node, &pools, &selections, claims, &[]);
        let held = Allocations::of(self.claims)?;
        let wanted = self.wanted(claims)?;
        let mut search = Search::new(
            node,
            &pools,
            &held,
            self.selectors,
            &selections,
            wanted,
            self.most_steps,
        )?;
        let requests = report::requests(&mut search, &pools, &held);
        Ok(Report {
            pools: report::pool_problems(&pools),
            // The verdict says what the problem is.
            requests: requests.unwrap_or_default(),
            verdict: verdict.unwrap_or_else(Verdict::Problem),
        })
    }

    fn wanted(&self, claims: &[&'a ResourceClaim]) -> Result<Vec<request::Claim<'a>>, Problem> {
        let named = self
            .classes
            .iter()
            .filter_map(|class| Some((class.metadata.name.as_deref()?, class)));
        let classes: BTreeMap<&'a str, &'a DeviceClass> = named.collect();
        let wanted = claims.iter().map(|claim| request::read(claim, &classes));
        wanted.collect()
    }
}

fn granted(search: &Search<'_, '_>, pools: &[Pool<'_>]) -> Vec<Vec<Granted>> {
    let claims = search.claims.iter().zip(&search.chosen);
    let granted = claims.map(|(claim, chosen)| {
        let devices = chosen.iter().map(|chosen| {
            let ask = &claim.requests[chosen.request].asks[chosen.alternative];
            let consumed = chosen.consumed.iter().flatten();
            Granted {
                request: ask.full_name(),
                device: report::id(pools, search, chosen.position),
                share: chosen.consumed.is_some(),
                consumed: consumed
                    .map(|(name, amount)| ((*name).to_owned(), *amount))
                    .collect(),
            }
        });
        devices.collect()
    });
    granted.collect()
}

#[cfg(test)]
mod tests;
