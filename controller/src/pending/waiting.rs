//! The pods that wait, and what is known of their claims. Pure.
//!
//! At most [`MOST`] pods that have claims are kept, each with its key, the names of its claims or templates and the reason: some
//! 200 bytes. The reason comes from fields: the status and the reason of the pod's condition `PodScheduled`, and whether its
//! claims have devices. The condition's message is for people, and changes with kube-scheduler's release.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Pod, PodCondition};
use k8s_openapi::api::resource::v1::{DeviceClaim, ResourceClaim};
use kube::runtime::watcher::Event;
use tranche_api::names;
use tranche_driver::extended_resources::{self, IMPLICIT};

/// The most pods that are kept, some 2 MB. More are not counted, and the log says so.
pub const MOST: usize = 10_000;

/// Why a pod has not started.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reason {
    /// The scheduler finds no node, and a claim of ours has no devices.
    Unallocated,
    /// The scheduler finds no node, although all claims of ours have devices.
    Unschedulable,
    /// A claim, or the template of one, is missing.
    ClaimMissing,
    /// A scheduling gate is closed.
    Gated,
    /// It has a node, which has not started its containers yet: the claim is being prepared, an image is being pulled.
    Starting,
    /// The scheduler has not looked at it yet.
    NotScheduled,
    /// Anything else; the condition's message says it.
    Other,
}

impl Reason {
    /// Its name in metrics.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Unallocated => "unallocated",
            Self::Unschedulable => "unschedulable",
            Self::ClaimMissing => "claim_missing",
            Self::Gated => "gated",
            Self::Starting => "starting",
            Self::NotScheduled => "not_scheduled",
            Self::Other => "other",
        }
    }
}

/// What the condition `PodScheduled` says of a pod whose phase is Pending.
fn reason(scheduled: Option<&PodCondition>) -> Reason {
    let Some(condition) = scheduled else {
        return Reason::NotScheduled;
    };
    match (condition.status.as_str(), condition.reason.as_deref()) {
        ("True", _) => Reason::Starting,
        (_, Some("SchedulingGated")) => Reason::Gated,
        (_, Some("Unschedulable")) => Reason::Unschedulable,
        _ => Reason::Other,
    }
}

/// How a pod gets devices: by a claim, by the template of one, or by a resource.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Source {
    /// A ResourceClaim, by its name in the pod's namespace.
    Claim(Box<str>),
    Template(Box<str>),
    /// A resource of its containers that a DeviceClass may stand for.
    Resource(Box<str>),
}

/// Whose devices a source asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ownership {
    /// It asks for devices of our classes.
    Ours,
    /// It is a claim that asks for devices of our classes, and has them.
    Allocated,
    /// It asks for no device of our classes.
    Others,
    /// It does not exist: nobody knows which driver's devices it would ask for.
    Missing,
}

impl Ownership {
    /// The ownership of a claim, by its spec and its allocation.
    #[must_use]
    pub fn of(claim: &ResourceClaim) -> Self {
        let status = claim.status.as_ref();
        let has_devices = status.is_some_and(|status| status.allocation.is_some());
        let spec = claim.spec.as_ref();
        match ownership(spec.and_then(|spec| spec.devices.as_ref())) {
            Self::Ours if has_devices => Self::Allocated,
            known => known,
        }
    }
}

/// A pod that has claims and has not started.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WaitingPod {
    pub namespace: Box<str>,
    pub name: Box<str>,
    /// Whether a container asks for one of our classes by the class's name, without a claim.
    pub asks: bool,
    /// How it gets devices.
    pub sources: Box<[Source]>,
    pub reason: Reason,
    /// When it was created.
    pub since: Timestamp,
}

impl WaitingPod {
    /// What is kept of a pod.
    #[must_use]
    pub fn of(pod: &Pod) -> Self {
        let (metadata, spec) = (&pod.metadata, pod.spec.as_ref());
        let status = pod.status.as_ref();
        let text = |text: &Option<String>| text.as_deref().unwrap_or_default().into();
        let claims = spec.and_then(|spec| spec.resource_claims.as_ref());
        let by_claims = claims.into_iter().flatten().filter_map(|claim| {
            let name = claim.resource_claim_name.as_deref();
            let template = claim.resource_claim_template_name.as_deref();
            name.map(|it| Source::Claim(it.into()))
                .or_else(|| template.map(|it| Source::Template(it.into())))
        });
        let resources = extended_resources::names(pod);
        let asks_for_class = |name: &&str| name.strip_prefix(IMPLICIT).is_some_and(names::is_class);
        let asks = resources.iter().any(asks_for_class);
        let others = resources.into_iter().filter(|it| !it.starts_with(IMPLICIT));
        let sources = by_claims.chain(others.map(|it| Source::Resource(it.into())));
        let conditions = status.and_then(|status| status.conditions.as_ref());
        let scheduled = conditions
            .into_iter()
            .flatten()
            .find(|condition| condition.type_ == "PodScheduled");
        let created = metadata.creation_timestamp.as_ref();
        Self {
            namespace: text(&metadata.namespace),
            name: text(&metadata.name),
            asks,
            sources: sources.collect(),
            reason: reason(scheduled),
            since: created.map_or(Timestamp::UNIX_EPOCH, |time| time.0),
        }
    }

    fn has_claims(&self) -> bool {
        self.asks || !self.sources.is_empty()
    }
}

/// Whether a claim with this spec asks for devices of our classes.
#[must_use]
pub fn ownership(spec: Option<&DeviceClaim>) -> Ownership {
    let requests = spec.and_then(|spec| spec.requests.as_ref());
    let ours = requests.into_iter().flatten().any(|request| {
        let exactly = request.exactly.iter().map(|it| &it.device_class_name);
        let first = request.first_available.iter().flatten();
        exactly
            .chain(first.map(|it| &it.device_class_name))
            .any(|class| names::is_class(class))
    });
    if ours {
        Ownership::Ours
    } else {
        Ownership::Others
    }
}

/// How many pods wait, and since when.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Count {
    pub pods: usize,
    /// When the oldest of them was created.
    pub since: Timestamp,
}

type Pods = BTreeMap<(Box<str>, Box<str>), WaitingPod>;

/// What was read of a source.
#[derive(Clone, Copy, Debug)]
struct Found {
    known: Ownership,
    /// Whether it is to be read again.
    is_old: bool,
}

/// The pods that wait, and what is known of their claims.
#[derive(Debug, Default)]
pub struct Pending {
    pods: Pods,
    /// Pods of a list that is not complete yet.
    incoming: Option<Pods>,
    sources: BTreeMap<(Box<str>, Source), Found>,
    full: bool,
}

impl Pending {
    /// Applies one event of the watch.
    pub fn apply(&mut self, event: Event<WaitingPod>) {
        match event {
            Event::Init => self.incoming = Some(Pods::new()),
            Event::InitApply(pod) => {
                let incoming = self.incoming.get_or_insert_default();
                self.full |= !keep(incoming, pod);
            }
            Event::InitDone => self.pods = self.incoming.take().unwrap_or_default(),
            Event::Apply(pod) => self.full |= !keep(&mut self.pods, pod),
            Event::Delete(pod) => {
                self.pods.remove(&(pod.namespace, pod.name));
            }
        }
    }

    /// Whether pods were left out since the last call.
    pub fn was_full(&mut self) -> bool {
        std::mem::take(&mut self.full)
    }

    /// At most `most` sources to read, by namespace: the unknown ones and those that may have changed. Forgets the sources that
    /// no pod names any more.
    pub fn to_read(&mut self, most: usize) -> Vec<(Box<str>, Source)> {
        let named: BTreeSet<_> = self
            .pods
            .values()
            .flat_map(|pod| {
                let sources = pod.sources.iter().cloned();
                sources.map(|source| (pod.namespace.clone(), source))
            })
            .collect();
        self.sources.retain(|source, _| named.contains(source));
        let to_read = named
            .into_iter()
            .filter(|source| self.sources.get(source).is_none_or(|found| found.is_old));
        to_read.take(most).collect()
    }

    /// Notes what was read of a source.
    pub fn learn(&mut self, namespace: Box<str>, source: Source, known: Ownership) {
        let is_old = false;
        self.sources
            .insert((namespace, source), Found { known, is_old });
    }

    /// Marks the sources that may have changed, to be read again: claims and templates that were missing, claims that may get or
    /// lose devices, and resources that no class of ours stood for.
    pub fn read_again(&mut self) {
        for ((_, source), found) in &mut self.sources {
            found.is_old = match (source, found.known) {
                (_, Ownership::Missing)
                | (Source::Claim(_), Ownership::Ours | Ownership::Allocated)
                | (Source::Resource(_), Ownership::Others) => true,
                _ => found.is_old,
            };
        }
    }

    /// The pods that wait for ours, by namespace and reason. A pod whose claim or template is missing is counted under
    /// [`Reason::ClaimMissing`], because nobody can know which driver's it would be.
    #[must_use]
    pub fn counts(&self) -> BTreeMap<(Box<str>, Reason), Count> {
        let mut counts = BTreeMap::new();
        for pod in self.pods.values() {
            let Some(reason) = self.waits(pod) else {
                continue;
            };
            let count = counts
                .entry((pod.namespace.clone(), reason))
                .or_insert(Count {
                    pods: 0,
                    since: pod.since,
                });
            count.pods += 1;
            count.since = count.since.min(pod.since);
        }
        counts
    }

    /// Why the pod waits; `None` if it does not wait for our devices.
    fn waits(&self, pod: &WaitingPod) -> Option<Reason> {
        let known: Vec<Ownership> = pod
            .sources
            .iter()
            .filter_map(|source| {
                let key = (pod.namespace.clone(), source.clone());
                self.sources.get(&key).map(|found| found.known)
            })
            .collect();
        if known.contains(&Ownership::Missing) {
            return Some(Reason::ClaimMissing);
        }
        let lacks_devices = pod.asks || known.contains(&Ownership::Ours);
        if !lacks_devices && !known.contains(&Ownership::Allocated) {
            return None;
        }
        Some(match pod.reason {
            Reason::Unschedulable if lacks_devices => Reason::Unallocated,
            reason => reason,
        })
    }
}

/// Keeps a pod that has claims; false where there are too many.
fn keep(pods: &mut Pods, pod: WaitingPod) -> bool {
    let key = (pod.namespace.clone(), pod.name.clone());
    if !pod.has_claims() {
        return true;
    }
    if pods.len() >= MOST && !pods.contains_key(&key) {
        return false;
    }
    pods.insert(key, pod);
    true
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pod(name: &str, sources: &[Source]) -> WaitingPod {
        WaitingPod {
            namespace: "team".into(),
            name: name.into(),
            asks: false,
            sources: sources.into(),
            reason: Reason::Unschedulable,
            since: Timestamp::from_second(1000).expect("a time"),
        }
    }

    fn template(name: &str) -> Source {
        Source::Template(name.into())
    }

    fn number(pending: &Pending) -> usize {
        pending.counts().values().map(|count| count.pods).sum()
    }

    #[test]
    fn a_pod_counts_from_when_its_claims_are_ours_until_it_is_gone() {
        let mut pending = Pending::default();
        pending.apply(Event::Apply(pod("a", &[template("quarter")])));
        pending.apply(Event::Apply(pod("b", &[template("quarter")])));
        pending.apply(Event::Apply(pod("c", &[template("network")])));
        assert_eq!(number(&pending), 0, "nothing is known");
        let asked = pending.to_read(9);
        assert_eq!(asked.len(), 2, "one request for each template: {asked:?}");
        pending.learn("team".into(), template("quarter"), Ownership::Ours);
        pending.learn("team".into(), template("network"), Ownership::Others);
        assert_eq!(number(&pending), 2);
        assert!(pending.to_read(9).is_empty());
        pending.apply(Event::Delete(pod("a", &[])));
        assert_eq!(number(&pending), 1);
    }

    #[test]
    fn a_missing_claim_is_a_reason_and_is_asked_for_again() {
        let mut pending = Pending::default();
        let source = Source::Claim("gone".into());
        pending.apply(Event::Apply(pod("a", std::slice::from_ref(&source))));
        pending.learn("team".into(), source.clone(), Ownership::Missing);
        let reasons: Vec<_> = pending.counts().into_keys().map(|(_, it)| it).collect();
        assert_eq!(reasons, [Reason::ClaimMissing]);
        assert!(pending.to_read(9).is_empty());
        pending.read_again();
        assert_eq!(number(&pending), 1, "it counts until it is read");
        assert_eq!(pending.to_read(9), [("team".into(), source)]);
    }

    #[test]
    fn a_pod_whose_claims_have_devices_waits_for_something_else() {
        let mut pending = Pending::default();
        let shared = Source::Claim("shared".into());
        pending.apply(Event::Apply(pod(
            "a",
            &[shared.clone(), template("quarter")],
        )));
        pending.apply(Event::Apply(pod("b", std::slice::from_ref(&shared))));
        pending.learn("team".into(), template("quarter"), Ownership::Ours);
        pending.learn("team".into(), shared.clone(), Ownership::Ours);
        let reasons = |pending: &Pending| -> Vec<(Reason, usize)> {
            let counts = pending.counts().into_iter();
            counts.map(|((_, it), count)| (it, count.pods)).collect()
        };
        assert_eq!(reasons(&pending), [(Reason::Unallocated, 2)]);
        pending.read_again();
        assert_eq!(
            pending.to_read(9),
            [("team".into(), shared.clone())],
            "a template never changes"
        );
        pending.learn("team".into(), shared, Ownership::Allocated);
        assert_eq!(
            reasons(&pending),
            [(Reason::Unallocated, 1), (Reason::Unschedulable, 1)]
        );
    }

    #[test]
    fn the_reason_is_in_fields_and_not_in_the_message() {
        let said = |status: &str, reason: &str| PodCondition {
            type_: "PodScheduled".to_owned(),
            status: status.to_owned(),
            reason: Some(reason.to_owned()),
            message: Some("0/2 nodes are available: 2 Insufficient cpu.".to_owned()),
            ..PodCondition::default()
        };
        for (status, why, expected) in [
            ("True", "", Reason::Starting),
            ("False", "SchedulingGated", Reason::Gated),
            ("False", "Unschedulable", Reason::Unschedulable),
            ("False", "SchedulerError", Reason::Other),
        ] {
            assert_eq!(reason(Some(&said(status, why))), expected, "{status} {why}");
        }
        assert_eq!(reason(None), Reason::NotScheduled);
    }

    #[test]
    fn a_claim_says_whether_it_has_devices() -> Result<(), serde_json::Error> {
        let claim = |class: &str, status: serde_json::Value| {
            serde_json::from_value::<ResourceClaim>(json!({
                "metadata": {"name": "a"}, "status": status,
                "spec": {"devices": {"requests": [{"name": "g", "exactly": {"deviceClassName": class}}]}},
            }))
        };
        let allocated = json!({"allocation": {"devices": {"results": []}}});
        let ours = "capped.gpu.tranche.dev";
        assert_eq!(Ownership::of(&claim(ours, json!({}))?), Ownership::Ours);
        assert_eq!(
            Ownership::of(&claim(ours, allocated.clone())?),
            Ownership::Allocated
        );
        assert_eq!(
            Ownership::of(&claim("gpu.nvidia.com", allocated)?),
            Ownership::Others
        );
        Ok(())
    }

    #[test]
    fn a_resource_without_a_class_is_looked_up_again_later() {
        let mut pending = Pending::default();
        let source = Source::Resource("nvidia.com/gpu".into());
        pending.apply(Event::Apply(pod("a", std::slice::from_ref(&source))));
        pending.learn("team".into(), source.clone(), Ownership::Others);
        assert_eq!(number(&pending), 0);
        pending.read_again();
        assert_eq!(pending.to_read(9), [("team".into(), source.clone())]);
        pending.learn("team".into(), source, Ownership::Ours);
        assert_eq!(number(&pending), 1);
        pending.read_again();
        assert_eq!(pending.to_read(9), []);
    }

    #[test]
    fn the_oldest_pod_gives_the_time() {
        let mut pending = Pending::default();
        for (name, second) in [("young", 3000), ("old", 2000)] {
            let since = Timestamp::from_second(second).expect("a time");
            pending.apply(Event::Apply(WaitingPod {
                since,
                asks: true,
                ..pod(name, &[])
            }));
        }
        let count = pending.counts().into_values().next().expect("one count");
        assert_eq!((count.pods, count.since.as_second()), (2, 2000));
    }

    #[test]
    fn a_list_replaces_what_was_known_when_it_is_complete() {
        let mut pending = Pending::default();
        let asks = |name| WaitingPod {
            asks: true,
            ..pod(name, &[])
        };
        pending.apply(Event::Apply(asks("a")));
        pending.apply(Event::Init);
        pending.apply(Event::InitApply(asks("b")));
        pending.apply(Event::InitApply(asks("c")));
        assert_eq!(number(&pending), 1);
        pending.apply(Event::InitDone);
        assert_eq!(number(&pending), 2);
    }

    #[test]
    fn pods_with_claims_are_kept_up_to_a_limit() {
        let mut pending = Pending::default();
        for number in 0..=MOST {
            let name = format!("p{number}");
            pending.apply(Event::Apply(pod(&name, &[template("quarter")])));
            pending.apply(Event::Apply(pod(&format!("q{number}"), &[])));
        }
        assert_eq!(pending.pods.len(), MOST);
        assert!(pending.was_full());
        assert!(!pending.was_full());
        pending.apply(Event::Apply(pod("p0", &[template("half")])));
        assert!(!pending.was_full(), "a pod that is kept may change");
    }

    #[test]
    fn a_source_that_no_pod_names_is_forgotten() {
        let mut pending = Pending::default();
        pending.apply(Event::Apply(pod("a", &[template("quarter")])));
        pending.learn("team".into(), template("quarter"), Ownership::Ours);
        pending.apply(Event::Delete(pod("a", &[])));
        pending.to_read(9);
        assert!(pending.sources.is_empty());
    }

    #[test]
    fn what_a_pod_waits_for_is_read_from_its_spec() -> Result<(), serde_json::Error> {
        let pod: Pod = serde_json::from_value(json!({
            "metadata": {"namespace": "team", "name": "a", "creationTimestamp": "2026-01-01T00:00:00Z"},
            "spec": {
                "containers": [{"name": "c", "resources": {"requests": {"cpu": "1", "nvidia.com/gpu": "2"}}}],
                "resourceClaims": [
                    {"name": "x", "resourceClaimName": "own"}, {"name": "y", "resourceClaimTemplateName": "quarter"},
                ],
            },
            "status": {"conditions": [
                {"type": "PodScheduled", "status": "False", "reason": "Unschedulable",
                 "message": "0/2 nodes are available: 2 cannot allocate all claims."},
            ]},
        }))?;
        let waiting = WaitingPod::of(&pod);
        assert_eq!(
            *waiting.sources,
            [
                Source::Claim("own".into()),
                template("quarter"),
                Source::Resource("nvidia.com/gpu".into())
            ]
        );
        assert_eq!(
            (waiting.asks, waiting.reason),
            (false, Reason::Unschedulable)
        );
        let implicit: Pod = serde_json::from_value(json!({
            "metadata": {"namespace": "team", "name": "b"},
            "spec": {"containers": [{"name": "c", "resources": {"requests": {
                "deviceclass.resource.kubernetes.io/capped.gpu.tranche.dev": "1"}}}]},
        }))?;
        let waiting = WaitingPod::of(&implicit);
        assert!(waiting.asks);
        assert_eq!(waiting.reason, Reason::NotScheduled);
        Ok(())
    }

    #[test]
    fn a_claim_is_ours_by_the_class_of_any_request() -> Result<(), serde_json::Error> {
        for (requests, expected) in [
            (
                json!([{"name": "g", "exactly": {"deviceClassName": "capped.gpu.tranche.dev"}}]),
                Ownership::Ours,
            ),
            (
                json!([{"name": "g", "exactly": {"deviceClassName": "gpu.nvidia.com"}}]),
                Ownership::Others,
            ),
            (
                json!([{"name": "g", "exactly": {"deviceClassName": "notgpu.tranche.dev"}}]),
                Ownership::Others,
            ),
            (
                json!([{"name": "g", "firstAvailable": [
                    {"name": "a", "deviceClassName": "gpu.nvidia.com"},
                    {"name": "b", "deviceClassName": "hard.gpu.tranche.dev"}]}]),
                Ownership::Ours,
            ),
        ] {
            let spec: DeviceClaim = serde_json::from_value(json!({"requests": requests}))?;
            assert_eq!(ownership(Some(&spec)), expected, "{requests}");
        }
        assert_eq!(ownership(None), Ownership::Others);
        Ok(())
    }
}
