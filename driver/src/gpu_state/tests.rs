use proptest::prelude::*;

use super::*;
use crate::mig::tables;

/// A GPU, and the durable record of it.
#[derive(Clone, Debug)]
struct Machine {
    geometry: Geometry,
    actual: Actual,
    record: GpuChanges,
    ids: u32,
    /// The ids of instances that an administrator created.
    foreign: BTreeSet<u32>,
    /// Whether a daemon runs. The plugin learns it only from the answers to its requests.
    has_daemon: bool,
    /// The MIG devices that have a daemon. The plugin learns them only from the answers to its requests.
    daemons: BTreeSet<String>,
    /// The supervisor does not end any partition's daemon.
    is_stuck: bool,
    steps: usize,
}

fn placement(text: &str) -> Placement {
    let (profile, start) = text.split_once('@').unwrap();
    Placement {
        profile: profile.parse().unwrap(),
        start: start.parse().unwrap(),
    }
}

fn wanted(text: &str) -> Wanted {
    let placements: BTreeSet<Placement> = text.split_whitespace().map(placement).collect();
    Wanted {
        held: placements.clone(),
        make: placements,
        ..Wanted::default()
    }
}

impl Machine {
    fn new() -> Self {
        Self {
            geometry: Geometry::read(&tables::h100(&["GPU"])).unwrap(),
            actual: Actual::default(),
            record: GpuChanges::default(),
            ids: 0,
            foreign: BTreeSet::new(),
            has_daemon: false,
            daemons: BTreeSet::new(),
            is_stuck: false,
            steps: 0,
        }
    }

    fn is_free(&self, placement: Placement) -> bool {
        let slices = |placement: Placement| {
            let partition = self.geometry.partition(placement);
            partition.map(|partition| partition.slices)
        };
        let placements = self.actual.instances.iter().map(|it| it.placement);
        let mut left = Some(self.geometry.whole);
        for placement in placements.chain([placement]) {
            left = left
                .zip(slices(placement))
                .and_then(|(left, taken)| left.less(taken));
        }
        left.is_some()
    }

    fn make(&mut self, placement: Placement) -> u32 {
        assert!(self.actual.mig_mode.current, "MIG mode is off");
        assert!(
            self.is_free(placement),
            "{placement:?} is not free: {:?}",
            self.actual
        );
        self.ids += 1;
        self.actual.instances.push(Instance {
            id: self.ids,
            placement,
            compute: Vec::new(),
        });
        self.ids
    }

    fn instance(&mut self, id: u32) -> &mut Instance {
        let mut there = self.actual.instances.iter_mut();
        there.find(|it| it.id == id).expect("the instance is there")
    }

    /// Behaves like a driver.
    fn change(&mut self, change: Change) {
        match change {
            Change::SwitchMigMode { on } => {
                assert!(self.actual.instances.is_empty(), "there are instances");
                self.actual.mig_mode = MigMode {
                    current: on,
                    pending: on,
                };
            }
            Change::CreateInstance(placement) => {
                self.make(placement);
            }
            Change::CreateComputeInstance { instance } => {
                let slices = self.instance(instance).placement.profile.compute_slices;
                self.instance(instance).compute.push(ComputeInstance {
                    id: 0,
                    uuid: format!("MIG-{instance}"),
                    slices: slices.into(),
                });
            }
            Change::DestroyComputeInstance { instance, compute } => {
                assert!(!self.foreign.contains(&instance), "{instance} is not ours");
                let daemons = self.daemons.clone();
                let is_served = |it: &ComputeInstance| daemons.contains(&it.uuid);
                let compute_instances = &mut self.instance(instance).compute;
                assert!(!compute_instances.iter().any(is_served), "under a daemon");
                compute_instances.retain(|it| it.id != compute);
            }
            Change::DestroyInstance { instance } => {
                assert!(!self.foreign.contains(&instance), "{instance} is not ours");
                assert_eq!(self.instance(instance).compute, []);
                self.actual.instances.retain(|it| it.id != instance);
            }
        }
    }

    /// One step; `None` after the last one.
    fn step(
        &mut self,
        wanted: &Wanted,
    ) -> Option<Result<BTreeMap<Placement, Partition>, Obstacle>> {
        self.steps += 1;
        match next(wanted, &self.record, &self.actual, Some(&self.geometry)) {
            Ok(Next::Write(record)) => {
                assert_ne!(record, self.record, "nothing new was written");
                self.record = record;
            }
            Ok(Next::Change(change)) => self.change(change),
            Ok(Next::SetComputeMode(mode)) => {
                assert!(!self.has_daemon, "under a running daemon");
                assert_ne!(self.actual.compute_mode, mode);
                self.actual.compute_mode = mode;
            }
            Ok(Next::EnsureDaemon(Served::Partition(uuid))) => {
                let mut recorded = self.record.partition_daemons.iter();
                assert!(recorded.any(|it| it.uuid == uuid), "without a record");
                let mut devices = self.actual.instances.iter().flat_map(|it| &it.compute);
                assert!(devices.any(|it| it.uuid == uuid), "of no device");
                self.daemons.insert(uuid.clone());
                self.actual.partition_daemons.insert(uuid, Daemon::Ready);
            }
            Ok(Next::EndDaemon(Served::Partition(uuid))) => {
                let ended = if self.is_stuck {
                    Daemon::Stuck
                } else {
                    self.daemons.remove(&uuid);
                    Daemon::Ended
                };
                self.actual.partition_daemons.insert(uuid, ended);
            }
            Ok(Next::EnsureDaemon(Served::Gpu)) => {
                assert!(self.record.mps.is_some(), "without a record");
                assert_eq!(self.actual.compute_mode, ComputeMode::ExclusiveProcess);
                assert!(!self.actual.mig_mode.current || !self.record.switched_mig_on);
                self.has_daemon = true;
                self.actual.daemon = Daemon::Ready;
            }
            Ok(Next::EndDaemon(Served::Gpu)) => {
                self.has_daemon = false;
                self.actual.daemon = Daemon::Ended;
            }
            Ok(Next::Done(done)) => return Some(Ok(done)),
            Err(obstacle) => return Some(Err(obstacle)),
        }
        None
    }

    /// The knowledge of a plugin that has just started.
    fn forget(&mut self) {
        self.actual.daemon = Daemon::Unknown;
        self.actual.partition_daemons.clear();
    }

    fn reach(&mut self, wanted: &Wanted) -> Result<BTreeMap<Placement, Partition>, Obstacle> {
        self.forget();
        for _ in 0..200 {
            if let Some(end) = self.step(wanted) {
                return end;
            }
        }
        panic!("no end: {wanted:?} {self:?}");
    }

    /// MIG instances do not survive a reboot; from Hopper on, MIG mode does not either.
    fn reboot(&mut self) {
        self.actual = Actual::default();
        self.has_daemon = false;
        self.daemons.clear();
        self.foreign.clear();
    }
}

#[test]
fn partitions_come_and_go_and_mig_mode_with_them() {
    let mut machine = Machine::new();
    let two = wanted("1g.10gb@6 3g.40gb@0");
    let done = machine.reach(&two).unwrap();
    assert_eq!(done.len(), 2);
    assert!(machine.actual.mig_mode.current && machine.record.switched_mig_on);
    let neighbour = done[&placement("3g.40gb@0")].clone();

    // The neighbour is not touched.
    let done = machine.reach(&wanted("3g.40gb@0 2g.20gb@4")).unwrap();
    assert_eq!(done[&placement("3g.40gb@0")], neighbour);
    assert_eq!(machine.reach(&Wanted::default()), Ok(BTreeMap::new()));
    assert_eq!(machine.actual, Actual::default());
    assert!(machine.record.is_empty());
    machine.forget();
    let steps = machine.steps;
    machine.reach(&Wanted::default()).unwrap();
    assert_eq!(machine.steps, steps + 1, "nothing is left to do");
}

#[test]
fn an_administrators_partition_is_used_as_it_is() {
    let mut machine = Machine::new();
    machine.actual.mig_mode = MigMode {
        current: true,
        pending: true,
    };
    let foreign = machine.make(placement("2g.20gb@4"));
    machine.foreign.insert(foreign);
    let one = wanted("2g.20gb@4");
    // Without a compute instance no claim can have it.
    assert!(matches!(machine.reach(&one), Err(Obstacle::Foreign { .. })));
    machine.change(Change::CreateComputeInstance { instance: foreign });
    let before = machine.actual.clone();
    let done = machine.reach(&one).unwrap();
    assert_eq!(done[&placement("2g.20gb@4")].instance, foreign);
    machine.reach(&Wanted::default()).unwrap();
    assert_eq!(machine.actual, before);
}

#[test]
fn what_is_in_the_way_of_another_claim_does_not_fail_this_one() {
    let mut machine = Machine::new();
    machine.actual.mig_mode = MigMode {
        current: true,
        pending: true,
    };
    let foreign = machine.make(placement("4g.40gb@0"));
    machine.foreign.insert(foreign);
    let mut both = wanted("2g.20gb@2 1g.10gb@6");
    machine.reach(&both).unwrap_err();
    both.make.remove(&placement("2g.20gb@2"));
    assert_eq!(machine.reach(&both).unwrap().len(), 1);
}

#[test]
fn an_administrators_mode_and_instances_stay() {
    let mut machine = Machine::new();
    machine.actual.mig_mode = MigMode {
        current: true,
        pending: true,
    };
    let foreign = machine.make(placement("4g.40gb@0"));
    machine.foreign.insert(foreign);
    let before = machine.actual.clone();
    machine.reach(&wanted("3g.40gb@4")).unwrap();
    let refused = machine.reach(&wanted("3g.40gb@4 1g.10gb@2"));
    let text = refused.unwrap_err().to_string();
    assert!(
        text.contains("GPU instance 1 (4g.40gb at memory slice 0)"),
        "{text}"
    );
    machine.reach(&Wanted::default()).unwrap();
    assert_eq!(machine.actual, before);
}

#[test]
fn mig_mode_stays_where_somebody_else_uses_it_meanwhile() {
    let mut machine = Machine::new();
    machine.reach(&wanted("1g.10gb@6")).unwrap();
    let foreign = machine.make(placement("2g.20gb@0"));
    machine.foreign.insert(foreign);
    machine.reach(&Wanted::default()).unwrap();
    assert!(machine.actual.mig_mode.current && machine.record.is_empty());
}

#[test]
fn an_instance_in_the_place_of_ours_is_somebody_elses() {
    let mut machine = Machine::new();
    let one = wanted("2g.20gb@4");
    machine.reach(&one).unwrap();
    machine.actual.instances.clear();
    let foreign = machine.make(placement("2g.20gb@4"));
    machine.foreign.insert(foreign);
    let refused = machine.reach(&one);
    assert!(
        matches!(refused, Err(Obstacle::Foreign { .. })),
        "{refused:?}"
    );
    machine.reach(&Wanted::default()).unwrap();
    assert!(machine.record.is_empty());
    assert_eq!(machine.actual.instances.len(), 1);
}

#[test]
fn what_nobody_can_change_without_a_reset_is_said() {
    let mut machine = Machine::new();
    machine.actual.mig_mode.pending = true;
    assert_eq!(
        machine.reach(&wanted("1g.10gb@6")),
        Err(Obstacle::NeedsReset)
    );
    let none = machine.reach(&wanted("1g.10gb@7")).unwrap_err();
    assert_eq!(none, Obstacle::NoSuchPartition(placement("1g.10gb@7")));
}

#[test]
fn an_instance_that_somebody_divided_is_named() {
    let mut machine = Machine::new();
    let one = wanted("2g.20gb@4");
    machine.reach(&one).unwrap();
    let extra = ComputeInstance {
        id: 1,
        uuid: "MIG-x".into(),
        slices: 1,
    };
    machine.actual.instances[0].compute.push(extra);
    let divided = machine.reach(&one).unwrap_err();
    assert!(divided.to_string().contains("-dci -gi 1"), "{divided}");
}

fn concurrent(mps: WantedDaemon) -> Wanted {
    Wanted {
        mps,
        ..Wanted::default()
    }
}

#[test]
fn a_daemon_comes_and_goes_and_the_compute_mode_with_it() {
    for before in [ComputeMode::Default, ComputeMode::ExclusiveProcess] {
        let mut machine = Machine::new();
        machine.actual.compute_mode = before;
        machine.reach(&concurrent(WantedDaemon::Ready)).unwrap();
        assert!(machine.has_daemon);
        assert_eq!(machine.actual.compute_mode, ComputeMode::ExclusiveProcess);
        // A claim with another daemon's share is released: the supervisor gets no request.
        machine.reach(&concurrent(WantedDaemon::Held)).unwrap();
        assert_eq!(machine.actual.daemon, Daemon::Unknown);
        machine.reach(&Wanted::default()).unwrap();
        assert!(!machine.has_daemon);
        assert_eq!(machine.actual.compute_mode, before);
        assert!(machine.record.is_empty());
    }
}

#[test]
fn a_gpu_without_mig_has_a_daemon_too() {
    let mut wanted = concurrent(WantedDaemon::Ready);
    let (record, actual) = (GpuChanges::default(), Actual::default());
    let first = next(&wanted, &record, &actual, None);
    assert!(matches!(
        first,
        Ok(Next::Write(GpuChanges { mps: Some(_), .. }))
    ));
    wanted.make.insert(placement("1g.10gb@6"));
    let none = next(&wanted, &record, &actual, None);
    assert_eq!(none, Err(Obstacle::NoSuchPartition(placement("1g.10gb@6"))));
}

#[test]
fn a_compute_mode_that_somebody_else_set_meanwhile_stays() {
    let mut machine = Machine::new();
    machine.reach(&concurrent(WantedDaemon::Ready)).unwrap();
    machine.actual.compute_mode = ComputeMode::Prohibited;
    machine.reach(&Wanted::default()).unwrap();
    assert_eq!(machine.actual.compute_mode, ComputeMode::Prohibited);
    let refused = machine.reach(&concurrent(WantedDaemon::Ready));
    assert_eq!(refused, Err(Obstacle::Prohibited));
    assert!(machine.record.is_empty());
}

#[test]
fn a_daemon_ends_before_partitions_and_starts_without_mig_mode() {
    let mut machine = Machine::new();
    machine.reach(&concurrent(WantedDaemon::Ready)).unwrap();
    machine.reach(&wanted("1g.10gb@6")).unwrap();
    assert!(!machine.has_daemon && machine.record.mps.is_none());
    assert_eq!(machine.actual.compute_mode, ComputeMode::Default);
    machine.reach(&concurrent(WantedDaemon::Ready)).unwrap();
    assert!(machine.has_daemon && !machine.actual.mig_mode.current);
}

/// These partitions, all of them with concurrent shares.
fn concurrent_on(text: &str, daemon: WantedDaemon) -> Wanted {
    let mut wanted = wanted(text);
    let daemons = wanted.held.iter().map(|placement| (*placement, daemon));
    wanted.partition_daemons = daemons.collect();
    wanted
}

#[test]
fn a_partitions_daemon_starts_after_it_and_ends_before_it() {
    let mut machine = Machine::new();
    let mut both = concurrent_on("3g.40gb@4 1g.10gb@0", WantedDaemon::Ready);
    machine.reach(&both).unwrap();
    assert_eq!(machine.daemons.len(), 2);
    assert_eq!(machine.actual.compute_mode, ComputeMode::Default);
    // The shares of one partition are released; the supervisor gets no request about the other's daemon.
    both.partition_daemons.remove(&placement("1g.10gb@0"));
    both.held.remove(&placement("1g.10gb@0"));
    both.make.clear();
    both.partition_daemons
        .insert(placement("3g.40gb@4"), WantedDaemon::Held);
    machine.reach(&both).unwrap();
    let left: Vec<_> = machine.daemons.iter().collect();
    assert_eq!(left, [&machine.actual.instances[0].compute[0].uuid]);
    assert_eq!(machine.actual.partition_daemons.get(left[0]), None);
    // The partition itself is wanted now, without a daemon.
    machine.reach(&wanted("3g.40gb@4")).unwrap();
    assert!(machine.daemons.is_empty() && machine.record.partition_daemons.is_empty());
    machine.reach(&Wanted::default()).unwrap();
    assert!(machine.record.is_empty() && !machine.actual.mig_mode.current);
}

#[test]
fn a_daemon_of_a_partition_that_was_made_again_is_another_one() {
    let mut machine = Machine::new();
    let one = concurrent_on("3g.40gb@4", WantedDaemon::Ready);
    machine.reach(&one).unwrap();
    let before = machine.daemons.clone();
    machine.actual.instances.clear();
    machine.reach(&one).unwrap();
    assert_eq!(machine.daemons.len(), 1);
    assert_ne!(machine.daemons, before);
}

#[test]
fn a_partition_with_a_stuck_daemon_stays_and_delays_no_other() {
    let mut machine = Machine::new();
    machine
        .reach(&concurrent_on("3g.40gb@4", WantedDaemon::Ready))
        .unwrap();
    machine.is_stuck = true;
    machine.reach(&wanted("1g.10gb@0")).unwrap();
    let placements: Vec<_> = machine
        .actual
        .instances
        .iter()
        .map(|it| it.placement)
        .collect();
    assert_eq!(placements, [placement("3g.40gb@4"), placement("1g.10gb@0")]);
    // The GPU is not used for another tier either.
    for other in [Wanted::default(), concurrent(WantedDaemon::Ready)] {
        machine.reach(&other).unwrap();
        assert!(machine.actual.mig_mode.current && machine.record.switched_mig_on);
        assert!(!machine.has_daemon);
    }
    machine.is_stuck = false;
    machine.reach(&Wanted::default()).unwrap();
    assert!(machine.daemons.is_empty() && machine.record.is_empty());
}

#[test]
fn no_daemon_starts_where_an_administrator_keeps_programs_away() {
    let mut machine = Machine::new();
    machine.actual.compute_mode = ComputeMode::Prohibited;
    let refused = machine.reach(&concurrent_on("3g.40gb@4", WantedDaemon::Ready));
    assert_eq!(refused, Err(Obstacle::Prohibited));
    assert_eq!(machine.record.partition_daemons, []);
}

/// Something that happens between two steps.
#[derive(Clone, Debug)]
enum Event {
    /// Claims come and go: these partitions are held now, some of them in concurrent shares. A claim is being prepared,
    /// or none is.
    Want(Vec<(prop::sample::Index, Option<bool>)>),
    /// Concurrent shares instead. A claim is being prepared, or none is.
    Share(bool),
    /// The plugin does this many steps, then it is killed.
    Steps(usize),
    Reboot,
    /// An administrator creates an instance, with or without its compute instance.
    Make(prop::sample::Index, bool),
    /// An administrator removes one, ours or not.
    Remove(prop::sample::Index),
}

fn any_event() -> impl Strategy<Value = Event> {
    let index = any::<prop::sample::Index>;
    prop_oneof![
        4 => prop::collection::vec((index(), any::<Option<bool>>()), 0..6).prop_map(Event::Want),
        3 => any::<bool>().prop_map(Event::Share),
        6 => (0_usize..9).prop_map(Event::Steps),
        1 => Just(Event::Reboot),
        2 => (index(), any::<bool>()).prop_map(|(pick, whole)| Event::Make(pick, whole)),
        2 => index().prop_map(Event::Remove),
    ]
}

proptest! {
    /// Whatever interrupts, in the end the GPU has what is wanted and what others created, and nothing else.
    #[test]
    fn every_interruption_leads_to_the_same_end(events in prop::collection::vec(any_event(), 1..25)) {
        let mut machine = Machine::new();
        let mut now = Wanted::default();
        for event in events {
            match event {
                Event::Want(picks) => {
                    now = Wanted::default();
                    let mut left = machine.geometry.whole;
                    for (pick, share) in picks {
                        let partition = pick.get(&machine.geometry.partitions);
                        if let Some(less) = left.less(partition.slices) {
                            left = less;
                            let placement = Placement { profile: partition.profile, start: partition.start };
                            now.held.insert(placement);
                            now.make.insert(placement);
                            let daemon = share.map(|is_now| if is_now { WantedDaemon::Ready } else { WantedDaemon::Held });
                            now.partition_daemons.extend(daemon.map(|daemon| (placement, daemon)));
                        }
                    }
                }
                Event::Share(is_now) => {
                    now = concurrent(if is_now { WantedDaemon::Ready } else { WantedDaemon::Held });
                }
                Event::Steps(steps) => {
                    machine.forget();
                    for _ in 0..steps {
                        if machine.step(&now).is_some() {
                            break;
                        }
                    }
                }
                Event::Reboot => machine.reboot(),
                Event::Make(pick, whole) => {
                    let partition = pick.get(&machine.geometry.partitions);
                    let placement = Placement { profile: partition.profile, start: partition.start };
                    // If Tranche is about to create the same one, nobody can tell who owns it.
                    let is_ours = machine.record.instances.iter().any(|it| it.placement == placement && it.id.is_none());
                    if machine.actual.mig_mode.current && machine.is_free(placement) && !is_ours {
                        let id = machine.make(placement);
                        machine.foreign.insert(id);
                        if whole {
                            machine.change(Change::CreateComputeInstance { instance: id });
                        }
                    }
                }
                Event::Remove(pick) => {
                    if !machine.actual.instances.is_empty() {
                        let at = pick.index(machine.actual.instances.len());
                        machine.actual.instances.remove(at);
                    }
                }
            }
        }
        let end = machine.reach(&now);
        match end {
            Ok(done) => {
                prop_assert!(done.keys().eq(&now.held));
                let (foreign, ours): (Vec<&Instance>, Vec<&Instance>) =
                    machine.actual.instances.iter().partition(|it| machine.foreign.contains(&it.id));
                let ours: BTreeSet<Placement> = ours.iter().map(|it| it.placement).collect();
                let used = foreign.iter().map(|it| it.placement).filter(|placement| now.held.contains(placement));
                prop_assert_eq!(&ours | &used.collect(), now.held.clone());
                prop_assert!(foreign.iter().all(|it| !ours.contains(&it.placement)));
                let all_foreign = foreign.len();
                for (placement, partition) in &done {
                    let is_served = machine.daemons.contains(&partition.uuid);
                    match now.partition_daemons.get(placement) {
                        Some(WantedDaemon::Ready) => prop_assert!(is_served),
                        Some(_) => {}
                        None => prop_assert!(!is_served),
                    }
                }
                let recorded: BTreeSet<_> = machine.record.partition_daemons.iter().map(|it| it.uuid.clone()).collect();
                prop_assert!(machine.daemons.is_subset(&recorded), "{:?}", machine.daemons);
                prop_assert!(machine.has_daemon || now.mps != WantedDaemon::Ready);
                if now.mps == WantedDaemon::None {
                    prop_assert!(!machine.has_daemon && machine.record.mps.is_none());
                    prop_assert_eq!(machine.actual.compute_mode, ComputeMode::Default);
                }
                if now.held.is_empty() && now.mps == WantedDaemon::None {
                    prop_assert!(machine.record.is_empty());
                    prop_assert!(all_foreign > 0 || !machine.actual.mig_mode.current || !machine.foreign.is_empty());
                }
            }
            Err(Obstacle::Foreign { id, .. }) => prop_assert!(machine.foreign.contains(&id)),
            Err(other) => prop_assert!(false, "{other}"),
        }
    }

    #[test]
    fn a_record_is_read_back(switched in any::<bool>(), mps in any::<bool>(), picks in prop::collection::vec((0_usize..25, any::<Option<u32>>()), 0..5), daemons: bool) {
        let geometry = Machine::new().geometry;
        let owned = |(at, id): (usize, Option<u32>)| {
            let partition: &crate::mig::Partition = &geometry.partitions[at];
            Owned { placement: Placement { profile: partition.profile, start: partition.start }, id }
        };
        let instances: Vec<Owned> = picks.into_iter().map(owned).collect();
        let served = instances.iter().filter(|_| daemons);
        let record = GpuChanges {
            switched_mig_on: switched,
            mps: mps.then_some(OwnedDaemon { compute_mode_before: ComputeMode::Default }),
            partition_daemons: served.map(|it| PartitionDaemon { placement: it.placement, uuid: "MIG-1".to_owned() }).collect(),
            instances,
            ..GpuChanges::default()
        };
        let text = serde_json::to_string(&record).unwrap();
        prop_assert_eq!(serde_json::from_str::<GpuChanges>(&text).unwrap(), record);
    }
}
