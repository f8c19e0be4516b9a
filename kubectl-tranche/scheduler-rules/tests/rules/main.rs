//! The rules against kube-scheduler's allocator itself, on slices and claims of any driver (counters over several devices,
//! request policies, selectors, taints, constraints, node selection, pools that are incomplete, invalid or being replaced, admin
//! access) and on slices of ours.

#![allow(
    clippy::unwrap_used,
    reason = "a test that cannot go on should say where"
)]

mod claims;
mod comparison;
mod ours;
mod slices;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::ops::AddAssign;

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceSlice};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError, TestRunner};
use serde_json::{Value, json};
use tranche_allocator_oracle::{Error, Knowledge, Outcome, Scheduler};
use tranche_scheduler_rules::{Cluster, Problem, Selectors, Verdict};

use claims::Pod;
use comparison::compare;

/// A hundredth of what the rules would search for users: without optimization that takes as long.
const MOST_STEPS: usize = tranche_scheduler_rules::MOST_STEPS / 100;

/// What happens in a cluster.
#[derive(Clone, Debug)]
enum Event {
    /// A pod is created.
    Pod(Pod),
    End(prop::sample::Index),
    /// The drivers publish other slices.
    Publish(Vec<Value>),
}

#[derive(Clone, Copy, Debug, Default)]
struct Count {
    allocated: u32,
    pending: u32,
    failed: u32,
    /// The rules or the scheduler gave up their search.
    too_long: u32,
}

impl AddAssign for Count {
    fn add_assign(&mut self, other: Self) {
        self.allocated += other.allocated;
        self.pending += other.pending;
        self.failed += other.failed;
        self.too_long += other.too_long;
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

type Story = (Vec<Value>, Vec<Event>);

/// The slices that are published first, and at most `longest` events.
fn any_story<S>(
    slices: fn() -> S,
    pod: impl Strategy<Value = Pod>,
    longest: usize,
) -> impl Strategy<Value = Story>
where
    S: Strategy<Value = Vec<Value>>,
{
    let event = prop_oneof![
        10 => pod.prop_map(Event::Pod),
        3 => any::<prop::sample::Index>().prop_map(Event::End),
        1 => slices().prop_map(Event::Publish),
    ];
    (slices(), prop::collection::vec(event, 1..=longest))
}

fn story(
    scheduler: &mut Scheduler,
    classes: &[DeviceClass],
    (first, events): &Story,
    distort: impl Fn(&mut ResourceSlice),
) -> Result<Count, String> {
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
                let cluster = Cluster {
                    slices: &slices,
                    classes,
                    claims: &held.iter().collect::<Vec<_>>(),
                    selectors: &selectors,
                    most_steps: MOST_STEPS,
                };
                let wanted: Vec<&ResourceClaim> = claims.iter().collect();
                let verdict = cluster.judge(&node, &wanted);
                // Asking the scheduler, too, would take its whole time limit.
                if let Verdict::Problem(Problem::Unjudged(_)) = verdict {
                    count.too_long += 1;
                    continue;
                }
                let outcome = scheduler.allocate(&claims, Knowledge::All);
                match &outcome {
                    Err(Error::TimedOut) => {
                        count.too_long += 1;
                        continue;
                    }
                    // The API server limits the cost of a claim's selectors.
                    Err(Error::Refused(why)) if why.contains("too complex, exceeds cost limit") => {
                        continue;
                    }
                    _ => {}
                }
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

fn run(
    stories: u32,
    classes: &[DeviceClass],
    story: impl Strategy<Value = Story>,
    distort: fn(&mut ResourceSlice),
    shrink: u32,
) -> Result<Count, String> {
    let mut scheduler = Scheduler::start().unwrap_or_else(|error| panic!("{error}"));
    scheduler.replace_classes(classes).unwrap();
    let scheduler = RefCell::new(scheduler);
    let count = Cell::new(Count::default());
    let config = Config {
        cases: stories,
        failure_persistence: None,
        max_shrink_iters: shrink,
        ..Config::default()
    };
    let result = TestRunner::new(config).run(&story, |story| {
        let mut sum = count.get();
        let told = self::story(&mut scheduler.borrow_mut(), classes, &story, distort);
        sum += told.map_err(TestCaseError::fail)?;
        count.set(sum);
        Ok(())
    });
    result
        .map(|()| count.get())
        .map_err(|failure| failure.to_string())
}

fn story_of_any_driver() -> impl Strategy<Value = Story> {
    any_story(slices::any_slices, claims::any_pod(), 13)
}

#[test]
fn the_rules_allocate_as_the_scheduler_does() {
    let stories = 250 * tranche_allocator_oracle::stories_factor();
    let count = run(stories, &classes(), story_of_any_driver(), |_| {}, 2_000)
        .unwrap_or_else(|failure| panic!("{failure}"));
    println!("{stories} stories: {count:?}");
    // Each outcome happened in many stories.
    assert!(count.allocated > stories, "{count:?}");
    assert!(count.pending > stories, "{count:?}");
    assert!(10 * count.failed > stories, "{count:?}");
    assert!(10 * count.too_long < stories, "{count:?}");
}

#[test]
fn the_rules_allocate_as_the_scheduler_does_on_slices_of_ours() {
    let stories = 75 * tranche_allocator_oracle::stories_factor();
    let story = any_story(ours::any_slices, ours::any_pod(), 20);
    let count = run(stories, &ours::classes(), story, |_| {}, 500)
        .unwrap_or_else(|failure| panic!("{failure}"));
    println!("{stories} stories: {count:?}");
    assert!(
        count.allocated > 2 * stories && count.pending > stories,
        "{count:?}"
    );
    assert!(10 * count.too_long < stories, "{count:?}");
}

/// Breaks each rule on purpose: the rules get other slices than the scheduler.
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
        let noticed = run(300, &classes(), story_of_any_driver(), fault, 0);
        assert!(noticed.is_err(), "fault {number}: {noticed:?}");
    }
}
