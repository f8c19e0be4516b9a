//! The model of the scheduler's allocator (`tranche_driver::allocator`) against the allocator itself, on slices and claims of
//! any driver: counters over several devices, request policies, selectors, taints, constraints, node selection, pools that are
//! incomplete, invalid or being replaced, admin access. `tests/allocations` compares the two on our own slices.

#![allow(
    clippy::unwrap_used,
    reason = "a test that cannot go on should say where"
)]

mod claims;
mod slices;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ops::AddAssign;

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceSlice};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError, TestRunner};
use serde_json::{Value, json};
use tranche_allocator_oracle::comparison::compare;
use tranche_allocator_oracle::{Error, Knowledge, Outcome, Scheduler};
use tranche_driver::allocator::{Cluster, Selectors};

use claims::Pod;

/// What happens in a cluster.
#[derive(Clone, Debug)]
enum Event {
    /// A pod is created.
    Pod(Pod),
    /// A pod ends.
    End(prop::sample::Index),
    /// The drivers publish other slices.
    Publish(Vec<Value>),
}

#[derive(Clone, Copy, Debug, Default)]
struct Count {
    allocated: u32,
    pending: u32,
    failed: u32,
}

impl AddAssign for Count {
    fn add_assign(&mut self, other: Self) {
        self.allocated += other.allocated;
        self.pending += other.pending;
        self.failed += other.failed;
    }
}

fn object<T: serde::de::DeserializeOwned>(value: &Value) -> T {
    serde_json::from_value(value.clone()).unwrap()
}

fn classes() -> Vec<DeviceClass> {
    let class = |name: &str, selectors: &[&str]| {
        let selectors = selectors
            .iter()
            .map(|it| json!({"cel": {"expression": it}}));
        object(&json!({
            "metadata": {"name": name},
            "spec": {"selectors": selectors.collect::<Vec<_>>()},
        }))
    };
    vec![
        class("any", &[]),
        class("a", &["device.driver == 'a.example.com'"]),
        class(
            "shared",
            &[
                "device.allowMultipleAllocations",
                "has(device.attributes['a.example.com'].index)",
            ],
        ),
        class("whole", &["!device.allowMultipleAllocations"]),
    ]
}

fn labels() -> BTreeMap<String, String> {
    BTreeMap::from([("zone".to_owned(), "1".to_owned())])
}

fn any_event() -> impl Strategy<Value = Event> {
    prop_oneof![
        10 => claims::any_pod().prop_map(Event::Pod),
        3 => any::<prop::sample::Index>().prop_map(Event::End),
        1 => slices::any_slices().prop_map(Event::Publish),
    ]
}

fn story(
    scheduler: &mut Scheduler,
    first: &[Value],
    events: &[Event],
    distort: impl Fn(&mut ResourceSlice),
) -> Result<Count, String> {
    let classes = classes();
    let selectors = Selectors::default();
    let node: Node = object(&json!({"metadata": {"name": "node-a", "labels": labels()}}));
    let mut count = Count::default();
    let mut held: Vec<ResourceClaim> = Vec::new();
    scheduler.reset().map_err(|error| error.to_string())?;
    let publish = |scheduler: &mut Scheduler, slices: &[Value]| {
        let mut slices: Vec<ResourceSlice> = slices.iter().map(object).collect();
        let published = scheduler.publish_to("node-a", &labels(), &slices);
        slices.iter_mut().for_each(&distort);
        published
            .map(|()| slices)
            .map_err(|error| error.to_string())
    };
    let mut slices = publish(scheduler, first)?;
    for (number, event) in events.iter().enumerate() {
        match event {
            Event::Publish(other) => slices = publish(scheduler, other)?,
            Event::End(which) if !held.is_empty() => {
                let ended = held.remove(which.index(held.len()));
                let name = format!("team-a/{}", ended.metadata.name.unwrap());
                scheduler
                    .release(&[name])
                    .map_err(|error| error.to_string())?;
            }
            Event::End(_) => {}
            Event::Pod(pod) => {
                let objects: Vec<Value> = pod.claims(number);
                let claims: Vec<ResourceClaim> = objects.iter().map(object).collect();
                let outcome = scheduler.allocate(&claims, Knowledge::All);
                // The API server limits the cost of a claim's selectors.
                if let Err(Error::Refused(why)) = &outcome
                    && why.contains("too complex, exceeds cost limit")
                {
                    continue;
                }
                let cluster = Cluster {
                    slices: &slices,
                    classes: &classes,
                    claims: &held.iter().collect::<Vec<_>>(),
                    selectors: &selectors,
                };
                let wanted: Vec<&ResourceClaim> = claims.iter().collect();
                let verdict = cluster.judge(&node, &wanted);
                let same = compare(&outcome, &verdict);
                same.map_err(|difference| format!("event {number}: {difference}"))?;
                match outcome {
                    Ok(Outcome::Allocated(results)) => {
                        count.allocated += 1;
                        for (mut object, result) in objects.into_iter().zip(results) {
                            object["status"] = json!({"allocation": result});
                            held.push(self::object(&object));
                        }
                    }
                    Ok(Outcome::Unschedulable(_)) => count.pending += 1,
                    Err(Error::Refused(_)) => count.failed += 1,
                    Err(error) => return Err(error.to_string()),
                }
            }
        }
    }
    Ok(count)
}

fn start() -> Scheduler {
    let mut scheduler = Scheduler::start().unwrap_or_else(|error| panic!("{error}"));
    scheduler.replace_classes(&classes()).unwrap();
    scheduler
}

fn run(stories: u32, distort: fn(&mut ResourceSlice), shrink: u32) -> Result<Count, String> {
    let scheduler = RefCell::new(start());
    let count = Cell::new(Count::default());
    let config = Config {
        cases: stories,
        failure_persistence: None,
        max_shrink_iters: shrink,
        ..Config::default()
    };
    let stories = (
        slices::any_slices(),
        prop::collection::vec(any_event(), 1..14),
    );
    let result = TestRunner::new(config).run(&stories, |(slices, events)| {
        let mut sum = count.get();
        let story = self::story(&mut scheduler.borrow_mut(), &slices, &events, distort);
        sum += story.map_err(TestCaseError::fail)?;
        count.set(sum);
        Ok(())
    });
    result
        .map(|()| count.get())
        .map_err(|failure| failure.to_string())
}

#[test]
fn the_model_allocates_as_the_scheduler_does() {
    let stories = 500 * tranche_allocator_oracle::stories_factor();
    let count = run(stories, |_| {}, 2_000).unwrap_or_else(|failure| panic!("{failure}"));
    println!("{stories} stories: {count:?}");
    // Each outcome happened in many stories.
    assert!(count.allocated > stories, "{count:?}");
    assert!(count.pending > stories, "{count:?}");
    assert!(10 * count.failed > stories, "{count:?}");
}

/// A rule that the model is made to break: what it is given differs from what the scheduler is given.
#[test]
fn a_broken_rule_is_noticed() {
    let faults: [fn(&mut ResourceSlice); 6] = [
        // Counters count for nothing.
        |slice| {
            for device in slice.spec.devices.iter_mut().flatten() {
                device.consumes_counters = None;
            }
        },
        // Request policies do not round.
        |slice| {
            let devices = slice.spec.devices.iter_mut().flatten();
            for capacity in devices.flat_map(|it| it.capacity.iter_mut().flatten()) {
                capacity.1.request_policy = None;
            }
        },
        // Taints are tolerated.
        |slice| {
            for device in slice.spec.devices.iter_mut().flatten() {
                device.taints = None;
            }
        },
        // Shared devices belong to the first claim.
        |slice| {
            for device in slice.spec.devices.iter_mut().flatten() {
                device.allow_multiple_allocations = None;
            }
        },
        // Every pool is complete.
        |slice| slice.spec.pool.generation = 1,
        // The order of devices is reversed.
        |slice| slice.spec.devices.iter_mut().for_each(|it| it.reverse()),
    ];
    for (number, fault) in faults.into_iter().enumerate() {
        let noticed = run(300, fault, 0);
        assert!(noticed.is_err(), "fault {number}: {noticed:?}");
    }
}
