//! kube-scheduler's allocator works on the slices that we plan. It allocates what we promise, and the node can prepare
//! every allocation. The node refuses what an allocator grants without knowledge of the other claims.

#![allow(
    clippy::unwrap_used,
    reason = "a test that cannot go on should say where"
)]

mod demand;
mod model;
mod node;
mod partitions;
mod placement;
mod run;

use std::cell::{Cell, RefCell};

use k8s_openapi::api::resource::v1::{Device, DeviceTaint};
use proptest::test_runner::{Config, TestCaseError, TestRunner};
use tranche_allocator_oracle::Scheduler;
use tranche_api::Quantity;
use tranche_api::names::capacity;
use tranche_api::tier::Tier;

use demand::{Ask, Claim, Class, Number, Request};
use node::{Event, Policy, Story};
use run::Count;

fn start() -> Scheduler {
    Scheduler::start().unwrap_or_else(|error| panic!("{error}"))
}

/// Runs this number of stories of nodes with this number of GPUs, each with at most `longest` events; `TRANCHE_STORIES`
/// is a factor.
fn tell(stories: u32, gpus: usize, longest: usize) {
    let stories = stories * tranche_allocator_oracle::stories_factor();
    let scheduler = RefCell::new(start());
    let count = Cell::new(Count::default());
    let config = Config {
        cases: stories,
        ..Config::with_source_file(file!())
    };
    let result = TestRunner::new(config).run(&node::any_story(gpus, longest), |story| {
        let counted = run::story(&mut scheduler.borrow_mut(), &story, |_| {});
        count.set(count.get() + counted.map_err(TestCaseError::fail)?);
        Ok(())
    });
    result.unwrap_or_else(|failure| panic!("{failure}"));
    let count = count.get();
    println!("{stories} stories: {count:?}");
    // Each of these happened in many of the stories. The averages are at least twice as high, because random stories
    // differ.
    assert!(count.started > stories, "{count:?}");
    assert!(2 * count.refused > stories, "{count:?}");
    assert!(20 * count.withdrawn > stories, "{count:?}");
    assert!(20 * count.timed_out < stories, "{count:?}");
}

#[test]
fn one_gpu_is_allocated_as_promised() {
    tell(750, 1, 22);
}

#[test]
fn two_gpus_are_allocated_as_promised() {
    tell(650, 2, 20);
}

#[test]
fn eight_gpus_are_allocated_as_promised() {
    tell(250, 8, 44);
}

fn share(gib: u64) -> Event {
    pod(Class::Tier(Tier::Capped), Some(gib << 30))
}

fn pod(class: Class, memory: Option<u64>) -> Event {
    Event::Pod(vec![Claim {
        requests: vec![Request::Exactly(Ask {
            class,
            number: Number::Exactly(1),
            memory,
            cores: Some(10),
            product: None,
            apart: false,
        })],
        uuids: None,
    }])
}

/// A change of the slices, and what happens on an H100 with 80 GiB.
type Fault = (fn(&mut Device), Vec<Event>);

/// Memory of a capped device that is published twice as large as it is.
fn doubled(device: &mut Device) {
    let capacities = device.capacity.as_mut().unwrap();
    if let Some(memory) = capacities.get_mut(capacity::MEMORY) {
        let value = Quantity::try_from(&memory.value).unwrap();
        memory.value = value.checked_add(value).unwrap().into();
    }
}

#[test]
fn faults_of_the_slices_are_noticed() {
    let exclusive = || pod(Class::Tier(Tier::Exclusive), None);
    let faults: [Fault; 5] = [
        // A shared device does not take the GPU's counters.
        (
            |device| {
                if device.allow_multiple_allocations == Some(true) {
                    device.consumes_counters = None;
                }
            },
            vec![share(10), exclusive()],
        ),
        // The exclusive device does not.
        (
            |device| {
                if device.allow_multiple_allocations.is_none() {
                    device.consumes_counters = None;
                }
            },
            vec![exclusive(), share(10)],
        ),
        (doubled, vec![share(50), share(50)]),
        // A claim that names no size gets all memory.
        (
            |device| {
                let capacities = device.capacity.as_mut().unwrap();
                let memory = capacities.get_mut(capacity::MEMORY);
                if let Some(memory) = memory {
                    memory.request_policy = None;
                }
            },
            vec![pod(Class::Tier(Tier::Capped), None)],
        ),
        // A device that no claim can get.
        (
            |device| device.taints = Some(vec![closed()]),
            vec![share(10)],
        ),
    ];
    let mut scheduler = start();
    for (number, (fault, events)) in faults.into_iter().enumerate() {
        let story = Story {
            gpus: vec![0],
            policy: Policy {
                tiers: Tier::ALL.to_vec(),
                max_sharers: 8,
                expected_sharers: 4,
                context: 512,
                over: None,
                step: 1 << 20,
                default_memory: None,
                cores_step: 1,
                default_cores: None,
                timeshared_sharers: 4,
            },
            events,
        };
        run::story(&mut scheduler, &story, |_| {}).unwrap();
        let noticed = run::story(&mut scheduler, &story, fault);
        assert!(noticed.is_err(), "fault {number}");
    }
}

fn closed() -> DeviceTaint {
    DeviceTaint {
        key: "example.com/closed".to_owned(),
        effect: "NoSchedule".to_owned(),
        ..DeviceTaint::default()
    }
}
