//! The decisions against a model of a node: whatever the kubelet, the plugin, people, claims and crashes do, and
//! in whatever order, what is promised holds after every single write.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::ResourceExt;
use kube::core::PartialObjectMeta;
use proptest::prelude::*;
use serde_json::json;
use tranche_api::gpu_node::{Gpu, Inventory, Published, Registration};
use tranche_api::withheld::reason;
use tranche_api::{GpuNode, GpuNodeSpec, GpuNodeStatus, SharingPolicy, WithheldGpu};
use tranche_controller::index::NodeView;
use tranche_controller::known::KnownSlice;
use tranche_controller::offered;
use tranche_controller::pool::{Memory, Write};
use tranche_controller::reconcile::{Evidence, Step, reconcile};
use tranche_controller::withdrawn::{HeldDevices, USABLE};

/// What may happen to a node.
#[derive(Clone, Debug)]
enum Happening {
    /// The plugin registers anew; it lives from now on.
    Register,
    Die,
    /// The kubelet removes every slice.
    Wipe,
    /// Somebody removes one slice.
    Remove(usize),
    /// The plugin finds these GPUs, if it lives.
    Gpus(BTreeSet<u32>),
    /// The driver goes, if the plugin lives.
    NoDriver,
    /// The plugin withholds these GPUs, if it lives.
    Withhold(BTreeSet<u32>),
    Policy(usize),
    /// A claim takes a device that the scheduler could give.
    Allocate(usize),
    /// A claim that tolerates all taints takes any device, a minute and more before anything else happens.
    Tolerate(usize),
    /// A claim releases its device.
    Release(usize),
    /// The controller takes this many steps, each of them cut off after so many writes.
    Steps(usize, usize),
    /// The controller is replaced by one that remembers nothing.
    Restart,
    /// Seconds pass.
    Pass(u8),
}

fn happening() -> impl Strategy<Value = Happening> {
    prop_oneof![
        2 => Just(Happening::Register),
        1 => Just(Happening::Die),
        2 => Just(Happening::Wipe),
        2 => (0usize..4).prop_map(Happening::Remove),
        3 => prop::collection::btree_set(0u32..3, 0..=3).prop_map(Happening::Gpus),
        1 => Just(Happening::NoDriver),
        2 => prop::collection::btree_set(0u32..3, 0..=2).prop_map(Happening::Withhold),
        2 => (0usize..POLICIES.len()).prop_map(Happening::Policy),
        4 => (0usize..9).prop_map(Happening::Allocate),
        1 => (0usize..9).prop_map(Happening::Tolerate),
        3 => (0usize..9).prop_map(Happening::Release),
        8 => (1usize..6, 0usize..5).prop_map(|(steps, writes)| Happening::Steps(steps, writes)),
        1 => Just(Happening::Restart),
        3 => (1u8..70).prop_map(Happening::Pass),
    ]
}

const POLICIES: [&str; 4] = [
    r#"{"tiers": ["exclusive", "capped", "timeshared"]}"#,
    r#"{"tiers": ["exclusive"]}"#,
    r#"{"tiers": ["capped"], "capped": {"maxSharers": 4}}"#,
    // An invalid policy.
    r#"{"tiers": ["capped"], "capped": {"memoryStep": "0"}}"#,
];
const BROKEN: usize = 3;

struct World {
    now: Timestamp,
    version: u64,
    alive: bool,
    policy: usize,
    gpu_node: GpuNode,
    slices: BTreeMap<String, ResourceSlice>,
    claims: BTreeSet<String>,
    memory: Memory,
    evidence: Evidence,
    /// When the plugin wrote last.
    registered: Timestamp,
    /// Devices that claims hold and that something other than the controller removed.
    lost: BTreeSet<String>,
}

impl World {
    fn new() -> Self {
        let mut gpu_node = GpuNode::new("a", GpuNodeSpec::default());
        gpu_node.status = Some(GpuNodeStatus {
            inventory: Some(inventory(&BTreeSet::from([0, 1]))),
            registration: Some(Registration {
                epoch: 0,
                plugin_version: "0.1.0".to_owned(),
            }),
            ..GpuNodeStatus::default()
        });
        Self {
            now: Timestamp::UNIX_EPOCH + SignedDuration::from_hours(24),
            version: 0,
            alive: false,
            policy: 0,
            gpu_node,
            slices: BTreeMap::new(),
            claims: BTreeSet::new(),
            memory: Memory::default(),
            evidence: Evidence::default(),
            registered: Timestamp::UNIX_EPOCH,
            lost: BTreeSet::new(),
        }
    }

    fn status(&mut self) -> &mut GpuNodeStatus {
        self.gpu_node.status.as_mut().expect("set at the start")
    }

    fn epoch(&mut self) -> &mut i64 {
        let registration = self.status().registration.as_mut();
        &mut registration.expect("set at the start").epoch
    }

    fn bump(&mut self) {
        *self.epoch() += 1;
        self.registered = self.now;
        let wrote =
            json!([{"manager": "tranche-kubelet-plugin", "time": format!("{:.0}", self.now)}]);
        self.gpu_node.metadata.managed_fields =
            serde_json::from_value(wrote).expect("managed fields");
    }

    fn published(&self) -> Published {
        let status = self.gpu_node.status.as_ref().expect("set at the start");
        status.published.clone().unwrap_or_default()
    }

    fn view(&self) -> NodeView {
        let json = json!({"metadata": {"name": "a", "uid": "node-uid"}});
        let node: PartialObjectMeta<Node> = serde_json::from_value(json).expect("a node");
        let spec = serde_json::from_str(POLICIES[self.policy]).expect("a policy");
        NodeView {
            name: "a".to_owned(),
            node: Some(Arc::new(node)),
            gpu_node: Some(Arc::new(self.gpu_node.clone())),
            policies: Arc::new([SharingPolicy::new("default", spec)]),
            slices: self
                .slices
                .values()
                .map(|slice| Arc::new(KnownSlice::from(slice)))
                .collect(),
        }
    }

    fn devices(&self) -> BTreeSet<String> {
        let slices = self.slices.values();
        slices
            .flat_map(|s| s.spec.devices.iter().flatten())
            .map(|d| d.name.clone())
            .collect()
    }

    /// What the scheduler may give: from a whole pool, without a taint.
    fn offered(&self) -> BTreeSet<String> {
        let generation = self.slices.values().map(|s| s.spec.pool.generation).max();
        let newest: Vec<_> = self
            .slices
            .values()
            .filter(|s| Some(s.spec.pool.generation) == generation)
            .collect();
        let count = i64::try_from(newest.len()).expect("a few");
        let whole = |s: &&ResourceSlice| s.spec.pool.resource_slice_count == count;
        if !newest.iter().all(whole) {
            return BTreeSet::new();
        }
        newest
            .iter()
            .flat_map(|s| s.spec.devices.iter().flatten())
            .filter(|d| d.taints.as_ref().is_none_or(Vec::is_empty))
            .map(|d| d.name.clone())
            .collect()
    }

    fn happen(&mut self, happening: &Happening) {
        match happening {
            Happening::Register => {
                self.alive = true;
                self.bump();
            }
            Happening::Die => self.alive = false,
            Happening::Wipe => {
                self.slices.clear();
                self.note_losses();
            }
            Happening::Remove(nth) => {
                let name = self.slices.keys().nth(*nth).cloned();
                if let Some(name) = name {
                    self.slices.remove(&name);
                    self.note_losses();
                }
            }
            Happening::Gpus(minors) => {
                if self.alive {
                    self.status().inventory = Some(inventory(minors));
                }
            }
            Happening::NoDriver => {
                if self.alive {
                    self.status().inventory = None;
                }
            }
            Happening::Withhold(minors) => {
                if self.alive {
                    let entry = |minor: &u32| {
                        WithheldGpu::whole(&uuid(*minor), reason::OTHER_PROVIDER, String::new())
                    };
                    self.status().withheld = minors.iter().map(entry).collect();
                }
            }
            Happening::Policy(policy) => self.policy = *policy,
            Happening::Allocate(nth) => {
                self.claims.extend(self.offered().into_iter().nth(*nth));
            }
            Happening::Tolerate(nth) => {
                self.claims.extend(self.devices().into_iter().nth(*nth));
                self.now += SignedDuration::from_secs(61);
            }
            Happening::Release(nth) => {
                if let Some(device) = self.claims.iter().nth(*nth).cloned() {
                    self.claims.remove(&device);
                    self.lost.remove(&device);
                }
            }
            Happening::Steps(steps, writes) => {
                for _ in 0..*steps {
                    self.step(*writes);
                    self.ask();
                }
            }
            Happening::Restart => {
                self.memory = Memory::default();
                self.evidence = Evidence::default();
            }
            Happening::Pass(seconds) => self.now += SignedDuration::from_secs((*seconds).into()),
        }
        self.ask();
    }

    fn note_losses(&mut self) {
        let there = self.devices();
        self.lost.extend(self.claims.difference(&there).cloned());
    }

    /// A running plugin asks for its slices when slices of its epoch vanished.
    fn ask(&mut self) {
        let published = self.published();
        let missing = published
            .slices
            .iter()
            .any(|n| !self.slices.contains_key(n));
        if self.alive && missing && published.epoch == *self.epoch() {
            self.bump();
        }
    }

    /// One step of the controller, cut off after so many writes. Says whether there was anything to write.
    fn step(&mut self, writes: usize) -> bool {
        let decision = reconcile(&self.view(), &mut self.memory, &self.evidence, self.now);
        let epoch = *self.epoch();
        let asked = self.published().epoch != epoch && epoch > 0;
        let missing = {
            let published = self.published();
            published
                .slices
                .iter()
                .any(|n| !self.slices.contains_key(n))
        };
        match decision.step {
            Step::Nothing => {
                self.evidence = Evidence::default();
                return false;
            }
            Step::ListClaims => {
                self.evidence.held = Some(HeldDevices {
                    devices: self.claims.clone(),
                    at: self.now,
                    until: self.now + USABLE,
                });
                return false;
            }
            Step::ReadSlices(slices) => {
                assert!(!slices.is_empty(), "nothing to read, for ever");
                for (name, version) in slices {
                    let slice = &self.slices[&name];
                    assert_eq!(slice.resource_version().as_ref(), Some(&version));
                    let devices = slice.spec.devices.clone().unwrap_or_default();
                    self.evidence.read.insert(name, (version, devices));
                }
                return false;
            }
            Step::FindPlugin => {
                self.evidence.plugin_ready = Some((self.alive, self.now));
                return false;
            }
            Step::Record(published) => {
                self.memory.recorded(&published, &published);
                let now = self.now;
                let status = self.status();
                let condition = offered::condition(&published).since(&status.conditions, now);
                status.conditions = vec![condition];
                status.published = Some(published);
            }
            Step::Slices(all) => {
                for write in all.into_iter().take(writes) {
                    if matches!(write, Write::Create(_)) {
                        assert!(asked || !missing, "a slice of a dead plugin came back");
                        let age = self.now.duration_since(self.registered);
                        let ready = self.evidence.plugin_ready;
                        let believed = ready.is_some_and(|(ready, at)| {
                            ready && self.now.duration_since(at).as_secs() <= 20
                        }) || age.as_secs() <= 20;
                        assert!(!asked || believed, "an old request was taken unseen");
                    }
                    self.write(write);
                    // We need not keep the rest of a pool after somebody removed a part of it.
                    if missing && !asked {
                        self.note_losses();
                    }
                    let there = self.devices();
                    let kept = |d: &&String| !there.contains(*d) && !self.lost.contains(*d);
                    let dropped: Vec<_> = self.claims.iter().filter(kept).collect();
                    assert!(
                        dropped.is_empty(),
                        "{dropped:?} dropped while claims hold them"
                    );
                }
            }
        }
        true
    }

    fn write(&mut self, write: Write) {
        self.version += 1;
        match write {
            Write::Create(mut slice) => {
                assert!(!self.slices.contains_key(&slice.name_any()));
                slice.metadata.uid = Some(format!("uid-{}", self.version));
                self.save(slice);
            }
            Write::Replace(slice) => {
                let old = &self.slices[&slice.name_any()];
                assert_eq!(
                    slice.metadata.resource_version,
                    old.metadata.resource_version
                );
                assert!(slice.spec.pool.generation >= old.spec.pool.generation);
                assert_ne!(slice, *old, "a write that changes nothing");
                self.save(slice);
            }
            Write::Delete { name, uid, version } => {
                let old = self.slices.remove(&name).expect("deletes what exists");
                assert_eq!(old.uid(), Some(uid));
                assert_eq!(old.resource_version(), Some(version));
            }
        }
    }

    fn save(&mut self, mut slice: ResourceSlice) {
        slice.metadata.resource_version = Some(self.version.to_string());
        for device in slice.spec.devices.iter_mut().flatten() {
            for taint in device.taints.iter_mut().flatten() {
                let now = k8s_openapi::apimachinery::pkg::apis::meta::v1::Time(self.now);
                taint.time_added.get_or_insert(now);
            }
        }
        self.slices.insert(slice.name_any(), slice);
    }

    /// Lets everything come to rest, with time passing, and says whether it did.
    fn rests(&mut self) -> bool {
        let mut quiet = 0;
        for _ in 0..200 {
            quiet = if self.step(usize::MAX) { 0 } else { quiet + 1 };
            self.ask();
            self.now += SignedDuration::from_secs(7);
            // Longer than every grace, and two questions more.
            if quiet == 20 {
                return true;
            }
        }
        false
    }

    fn assert_whole(&mut self) {
        let published = self.published();
        let names: Vec<_> = self.slices.keys().cloned().collect();
        assert_eq!(published.epoch, *self.epoch());
        assert_eq!(published.slices, names);
        for slice in self.slices.values() {
            assert_eq!(slice.spec.pool.generation, published.pool_generation);
            assert_eq!(
                usize::try_from(slice.spec.pool.resource_slice_count),
                Ok(names.len())
            );
        }
        let minors: Vec<u32> = {
            let inventory = self.status().inventory.iter();
            inventory.flat_map(|i| &i.gpus).map(|g| g.minor).collect()
        };
        let offered = self.offered();
        let withheld = self.status().withheld.clone();
        for minor in minors {
            let wanted: &[&str] = match self.policy {
                _ if withheld.iter().any(|entry| entry.gpu == uuid(minor)) => &[],
                BROKEN => &[],
                0 => &["", "-capped", "-timeshared"],
                1 => &[""],
                _ => &["-capped"],
            };
            for tier in wanted {
                let device = format!("gpu-{minor:08x}{tier}");
                assert!(
                    offered.contains(&device),
                    "{device} is not offered: {offered:?}"
                );
            }
        }
        for entry in &withheld {
            assert!(published.withheld.contains(entry), "{published:?}");
        }
        let there = self.devices();
        for device in there.difference(&offered) {
            assert!(
                self.claims.contains(device),
                "{device} is withdrawn and nobody holds it"
            );
        }
    }
}

fn uuid(minor: u32) -> String {
    format!("GPU-{minor:08x}-0000-0000-0000-{minor:012x}")
}

fn inventory(minors: &BTreeSet<u32>) -> Inventory {
    let gpus = minors
        .iter()
        .map(|minor| {
            let gpu = json!({
                "uuid": uuid(*minor), "minor": minor, "productName": "H100", "brand": "Nvidia",
                "architecture": "Hopper", "cudaComputeCapability": "9.0",
                "pciBusID": format!("0000:0{minor}:00.0"), "memory": "80Gi", "reservedMemory": "512Mi",
            });
            serde_json::from_value::<Gpu>(gpu).expect("a GPU")
        })
        .collect();
    Inventory::new("535.261.03".to_owned(), "12.2".to_owned(), gpus)
}

#[test]
fn a_list_of_the_claims_that_is_too_old_removes_nothing() {
    let mut world = World::new();
    world.happen(&Happening::Register);
    assert!(world.rests());
    // The tier is withdrawn, and no claim holds a device of it when the claims are listed.
    world.happen(&Happening::Policy(1));
    while world.evidence.held.is_none() {
        world.step(usize::MAX);
        world.now += SignedDuration::from_secs(7);
    }
    // The node's turn comes late, and a claim that tolerates the taint is faster.
    let capped = "gpu-00000000-capped".to_owned();
    let nth = world.devices().iter().position(|device| *device == capped);
    world.happen(&Happening::Tolerate(nth.expect("withdrawn")));
    assert!(world.claims.contains(&capped));
    assert!(world.rests());
    assert!(world.devices().contains(&capped));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn promises_hold_whatever_happens(happenings in prop::collection::vec(happening(), 1..40)) {
        let mut world = World::new();
        for happening in &happenings {
            world.happen(happening);
        }
        prop_assert!(world.rests(), "never comes to rest");
        if world.alive {
            world.assert_whole();
        }
        // A dead plugin's slices stay away.
        if !world.alive {
            world.happen(&Happening::Wipe);
            if world.published().epoch == *world.epoch() {
                prop_assert!(world.rests());
                prop_assert!(world.slices.is_empty());
            }
        }
        // A broken policy is repaired.
        world.happen(&Happening::Policy(0));
        world.happen(&Happening::Register);
        world.happen(&Happening::Withhold(BTreeSet::new()));
        prop_assert!(world.rests());
        world.assert_whole();
    }
}
