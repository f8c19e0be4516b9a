//! Partitions: from the planned devices the allocator allocates what MIG can create by the rules of the simulator, and
//! nothing else.

use std::cell::RefCell;
use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::{ResourceClaim, ResourceSlice};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError, TestRunner};
use serde_json::{Value, json};
use tranche_allocator_oracle::{Knowledge, Outcome, Scheduler, geometry};
use tranche_api::names::DRIVER;
use tranche_api::tier::Tier;
use tranche_driver::claim::DeviceName;
use tranche_driver::slices::{self, Content, NodeInput};
use tranche_simulator_machine::mig::rules::{Placed, fits};
use tranche_simulator_machine::mig::{GpuProfile, Model, ModelName};

use crate::node::{Policy, inventory};

const MODELS: [ModelName; 7] = [
    ModelName::A30,
    ModelName::A100Gb40,
    ModelName::A100Gb80,
    ModelName::H100,
    ModelName::H200,
    ModelName::B200,
    ModelName::RtxPro6000,
];

/// The most shares of a GPU, or of a partition.
const SHARERS: usize = 4;

/// The slices of a node with one GPU of a model: all tiers, and all its partitions, exclusive and shared.
fn slices(model: &Model) -> Vec<ResourceSlice> {
    let policy = Policy {
        tiers: Tier::ALL.to_vec(),
        max_sharers: 4,
        expected_sharers: 4,
        context: 512,
        over: None,
        step: 1 << 20,
        default_memory: None,
        cores_step: 1,
        default_cores: None,
        timeshared_sharers: 4,
    };
    let mut policy = policy.object();
    let profiles = model.profiles.iter().map(|it| it.name.to_owned());
    policy.spec.capped.on_partitions = profiles.collect();
    let shared = &policy.spec.capped.on_partitions;
    policy.spec.concurrent.on_partitions.clone_from(shared);
    let mut inventory = inventory(&[0]);
    inventory.mig_geometries = vec![geometry::of(model, &[inventory.gpus[0].uuid.clone()])];
    let plan = slices::plan(&NodeInput {
        name: "node-a",
        uid: "7c1b2f6e-0d5e-4a43-8a07-5c9f1a2b3c4d",
        labels: &BTreeMap::new(),
        inventory: &inventory,
        withheld: &[],
        health: &[],
        policies: &[policy],
        retained: &[],
    })
    .unwrap();
    assert_eq!(plan.withheld, [], "{:?}", model.name);
    for slice in &plan.slices {
        if let Content::Devices(devices) = &slice.content {
            // The API's limit for a slice whose devices consume counters.
            assert!(devices.len() <= 64, "{:?}: {}", model.name, devices.len());
        }
    }
    let objects = plan.slices.iter().map(|slice| plan.object(slice, 1));
    objects.collect()
}

/// What is asked for.
#[derive(Clone, Copy, Debug)]
enum Wanted {
    /// A partition of a profile.
    Profile(&'static GpuProfile),
    /// A partition with at least this many MiB.
    Memory(u64),
    /// A share of a partition of a profile, in one of the two tiers that share partitions.
    ShareOf(&'static GpuProfile, Tier),
    /// A tier of the whole GPU.
    Whole(Tier),
}

fn that(expression: &str) -> Value {
    json!([{"cel": {"expression": expression}}])
}

fn of_profile(profile: &GpuProfile) -> Value {
    // A whole GPU has no profile, and a selector that names a missing attribute is an error.
    let expression = format!(
        "device.attributes[\"{DRIVER}\"].type == \"mig\" && device.attributes[\"{DRIVER}\"].profile == \"{}\"",
        profile.name
    );
    that(&expression)
}

impl Wanted {
    fn accepts(self, profile: &GpuProfile) -> bool {
        match self {
            Self::Profile(wanted) => wanted == profile,
            Self::Memory(mib) => profile.memory_mib >= mib,
            Self::ShareOf(..) | Self::Whole(_) => false,
        }
    }

    fn claim(self, name: &str) -> ResourceClaim {
        let partition = Tier::Partition.class_name();
        let request = match self {
            Self::Profile(profile) => {
                json!({"deviceClassName": partition, "selectors": of_profile(profile)})
            }
            Self::ShareOf(profile, tier) => {
                json!({"deviceClassName": tier.class_name(), "selectors": of_profile(profile)})
            }
            Self::Memory(mib) => {
                let memory = format!("{mib}Mi");
                json!({"deviceClassName": partition, "capacity": {"requests": {"memory": memory}}})
            }
            Self::Whole(tier) => {
                let whole = that(&format!("device.attributes[\"{DRIVER}\"].type == \"gpu\""));
                json!({"deviceClassName": tier.class_name(), "selectors": whole})
            }
        };
        serde_json::from_value(json!({
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": {"namespace": "team-a", "name": name, "uid": name},
            "spec": {"devices": {"requests": [{"name": "gpu", "exactly": request}]}},
        }))
        .expect("a claim")
    }
}

/// The device that a claim gets.
fn allocate(scheduler: &mut Scheduler, name: &str, wanted: Wanted) -> Option<DeviceName> {
    let outcome = scheduler.allocate(&[wanted.claim(name)], Knowledge::All);
    let Outcome::Allocated(results) = outcome.unwrap() else {
        return None;
    };
    let devices = results.into_iter().filter_map(|it| it.devices?.results);
    let device = devices.flatten().map(|it| it.device).next()?;
    Some(device.parse().unwrap())
}

fn placed(model: &'static Model, device: DeviceName) -> Option<Placed> {
    let placement = device.placement()?;
    let name = placement.profile.to_string();
    let profile = model.profiles.iter().find(|it| it.name == name).unwrap();
    Some((profile, placement.start.into()))
}

/// Whether the result of a claim is right while these devices are held.
fn check(
    model: &'static Model,
    wanted: Wanted,
    held: &[DeviceName],
    got: Option<DeviceName>,
) -> Result<(), String> {
    let mut instances: Vec<Placed> = Vec::new();
    for placed in held.iter().filter_map(|it| placed(model, *it)) {
        if !instances.contains(&placed) {
            instances.push(placed);
        }
    }
    let is_whole = held.iter().any(|it| it.placement().is_none());
    if let Wanted::ShareOf(profile, tier) = wanted {
        return check_share(model, (profile, tier), held, &instances, got);
    }
    if let Wanted::Whole(tier) = wanted {
        let is_of_tier = |it: &DeviceName| it.placement().is_none() && it.tier() == tier;
        let shared = tier.is_shared() && held.len() < SHARERS && held.iter().all(is_of_tier);
        let expected = (held.is_empty() || shared).then_some(tier);
        return match got.map(DeviceName::tier) {
            got if got == expected => Ok(()),
            got => Err(format!("{got:?}, promised {expected:?}")),
        };
    }
    // All partitions that MIG can create now and that the claim accepts.
    let possible: Vec<Placed> = model
        .profiles
        .iter()
        .filter(|it| wanted.accepts(it))
        .flat_map(|it| it.starts.iter().map(move |start| (it, *start)))
        .filter(|(it, start)| !is_whole && fits(model, &instances, it, *start))
        .collect();
    let least = possible.iter().map(|(it, _)| it.memory_mib).min();
    if got.is_some_and(|it| it.tier() != Tier::Partition) {
        return Err(format!("{got:?} is no partition"));
    }
    match got.and_then(|device| placed(model, device)) {
        None if got.is_none() && possible.is_empty() => Ok(()),
        Some(got) if possible.contains(&got) && Some(got.0.memory_mib) == least => Ok(()),
        _ => Err(format!("{got:?}, possible is {possible:?}")),
    }
}

/// The same for a share of a partition: the first in order that exists and has room, or that can be created.
fn check_share(
    model: &'static Model,
    (profile, tier): (&'static GpuProfile, Tier),
    held: &[DeviceName],
    instances: &[Placed],
    got: Option<DeviceName>,
) -> Result<(), String> {
    let is_whole = held.iter().any(|it| it.placement().is_none());
    let has_room = |start: u32| {
        let at = (profile, start);
        let there: Vec<_> = held
            .iter()
            .filter(|it| placed(model, **it) == Some(at))
            .collect();
        match there.len() {
            0 => !is_whole && fits(model, instances, profile, start),
            sharers => sharers < SHARERS && there.iter().all(|it| it.tier() == tier),
        }
    };
    let starts = profile.starts.iter().copied();
    let expected = starts.filter(|start| has_room(*start)).max();
    let got_start = got.and_then(|it| placed(model, it)).map(|it| it.1);
    let is_share = got.is_none_or(|it| it.tier() == tier && it.placement().is_some());
    if is_share && got_start == expected {
        return Ok(());
    }
    Err(format!("{got:?}, promised a share at {expected:?}"))
}

#[test]
fn layouts_that_the_geometry_forbids_are_not_allocated() {
    let mut scheduler = crate::start();
    let model = Model::of(ModelName::H100);
    scheduler.publish("node-a", &slices(model)).unwrap();
    // Profiles in the order of the claims, and the number of them that get a partition.
    for (profiles, granted) in [
        (&["2g.20gb"; 4][..], 3),
        (&["3g.40gb", "3g.40gb", "1g.10gb"], 2),
        (&["1g.10gb"; 8], 7),
        (&["1g.10gb+me", "1g.10gb+me"], 1),
        (&["2g.20gb", "2g.20gb", "2g.20gb", "1g.10gb", "1g.10gb"], 4),
        (&["4g.40gb", "3g.40gb", "1g.10gb"], 2),
        (&["1g.10gb", "4g.40gb", "2g.20gb"], 3),
        (&["7g.80gb", "1g.10gb"], 1),
    ] {
        scheduler.reset().unwrap();
        let mut got = 0;
        for (number, name) in profiles.iter().enumerate() {
            let profile = model.profiles.iter().find(|it| it.name == *name).unwrap();
            let name = format!("claim-{number}");
            got += u32::from(allocate(&mut scheduler, &name, Wanted::Profile(profile)).is_some());
        }
        assert_eq!(got, granted, "{profiles:?}");
    }
}

#[derive(Clone, Copy, Debug)]
enum Event {
    Start(prop::sample::Index, Kind),
    End(prop::sample::Index),
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Profile,
    Memory,
    ShareOf(bool),
    Whole,
}

fn any_event() -> impl Strategy<Value = Event> {
    let kind = prop_oneof![6 => Just(Kind::Profile), 3 => Just(Kind::Memory), 6 => any::<bool>().prop_map(Kind::ShareOf), 1 => Just(Kind::Whole)];
    prop_oneof![
        3 => (any::<prop::sample::Index>(), kind).prop_map(|(which, kind)| Event::Start(which, kind)),
        2 => any::<prop::sample::Index>().prop_map(Event::End),
    ]
}

fn wanted(model: &'static Model, which: prop::sample::Index, kind: Kind) -> Wanted {
    let profile = which.get(model.profiles);
    match kind {
        Kind::Profile => Wanted::Profile(profile),
        Kind::ShareOf(is_capped) => {
            let tier = if is_capped {
                Tier::Capped
            } else {
                Tier::Concurrent
            };
            Wanted::ShareOf(profile, tier)
        }
        // As much as the profile has, and a little more.
        Kind::Memory => Wanted::Memory(profile.memory_mib + u64::from(which.index(2) == 1)),
        Kind::Whole => {
            let tiers = Tier::ALL.into_iter().filter(|it| *it != Tier::Partition);
            Wanted::Whole(*which.get(&tiers.collect::<Vec<_>>()))
        }
    }
}

#[test]
fn every_model_allocates_exactly_what_mig_can_create() {
    let scheduler = RefCell::new(crate::start());
    for name in MODELS {
        let model = Model::of(name);
        let published = scheduler.borrow_mut().publish("node-a", &slices(model));
        published.unwrap();
        let config = Config {
            cases: 50 * tranche_allocator_oracle::stories_factor(),
            ..Config::with_source_file(file!())
        };
        let events = prop::collection::vec(any_event(), 1..30);
        let result = TestRunner::new(config).run(&events, |events| {
            let mut scheduler = scheduler.borrow_mut();
            scheduler.reset().unwrap();
            let mut held: Vec<(String, DeviceName)> = Vec::new();
            for (number, event) in events.iter().enumerate() {
                match event {
                    Event::Start(which, kind) => {
                        let wanted = wanted(model, *which, *kind);
                        let name = format!("claim-{number}");
                        let devices: Vec<_> = held.iter().map(|(_, device)| *device).collect();
                        let got = allocate(&mut scheduler, &name, wanted);
                        check(model, wanted, &devices, got).map_err(|problem| {
                            let held: Vec<_> = devices.iter().map(ToString::to_string).collect();
                            TestCaseError::fail(format!("{wanted:?} beside {held:?}: {problem}"))
                        })?;
                        held.extend(got.map(|device| (name, device)));
                    }
                    Event::End(_) if held.is_empty() => {}
                    Event::End(which) => {
                        let (name, _) = held.swap_remove(which.index(held.len()));
                        scheduler.release(&[format!("team-a/{name}")]).unwrap();
                    }
                }
            }
            Ok(())
        });
        result.unwrap_or_else(|failure| panic!("{name:?}: {failure}"));
    }
}
