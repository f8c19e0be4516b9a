//! On which GPUs several claims are allocated that are created at the same time.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::resource::v1::ResourceClaim;
use tranche_allocator_oracle::{Knowledge, Outcome, Scheduler};
use tranche_api::tier::Tier;
use tranche_driver::slices::{self, NodeInput};

use crate::demand::{Ask, Claim, Class, Number, Request};
use crate::node::{Policy, inventory};

const GPUS: usize = 8;

/// A node of eight H100 that are offered in these tiers, without claims.
fn publish(scheduler: &mut Scheduler, tiers: &[Tier]) {
    let policy = Policy {
        tiers: tiers.to_vec(),
        max_sharers: 16,
        expected_sharers: 4,
        context: 512,
        over: None,
        step: 1 << 20,
        default_memory: None,
        cores_step: 1,
        default_cores: None,
        timeshared_sharers: 16,
    };
    let plan = slices::plan(&NodeInput {
        name: "node-a",
        uid: "7c1b2f6e-0d5e-4a43-8a07-5c9f1a2b3c4d",
        labels: &BTreeMap::new(),
        inventory: &inventory(&[0; GPUS]),
        withheld: &[],
        health: &[],
        policies: &[policy.object()],
        retained: &[],
    })
    .unwrap();
    let objects: Vec<_> = plan
        .slices
        .iter()
        .map(|slice| plan.object(slice, 1))
        .collect();
    scheduler.reset().unwrap();
    scheduler.publish("node-a", &objects).unwrap();
}

fn claim(name: &str, class: Class, apart: bool) -> ResourceClaim {
    let claim = Claim {
        requests: vec![Request::Exactly(Ask {
            class,
            number: Number::Exactly(1),
            memory: None,
            cores: None,
            product: None,
            apart,
        })],
        uuids: None,
    };
    claim.object(name)
}

/// The device that the claim gets.
fn allocate(scheduler: &mut Scheduler, claim: &ResourceClaim) -> Option<String> {
    let outcome = scheduler.allocate(std::slice::from_ref(claim), Knowledge::All);
    let Outcome::Allocated(results) = outcome.unwrap() else {
        return None;
    };
    let devices = results.into_iter().filter_map(|it| it.devices?.results);
    devices.flatten().map(|it| it.device).next()
}

#[test]
fn shares_fill_one_gpu_unless_they_ask_for_different_ones() {
    let mut scheduler = crate::start();
    for tier in [Tier::Capped, Tier::Concurrent, Tier::Timeshared] {
        publish(&mut scheduler, &Tier::ALL);
        let class = Class::Tier(tier);
        let mut devices = |name: &str, count: usize, apart| -> Vec<Option<String>> {
            let claims = (0..count).map(|number| claim(&format!("{name}-{number}"), class, apart));
            claims
                .map(|claim| allocate(&mut scheduler, &claim))
                .collect()
        };
        let together: BTreeSet<_> = devices("together", 4, false).into_iter().collect();
        assert_eq!(together.len(), 1, "{together:?}");
        let apart = devices("apart", GPUS, true);
        let different: BTreeSet<_> = apart.iter().flatten().collect();
        assert_eq!(different.len(), GPUS, "{apart:?}");
        // There is no further GPU. Others have room beside them.
        assert_eq!(devices("one-more", 1, true), [None]);
        let others = devices("others", 3 * GPUS, false);
        assert!(others.iter().all(Option::is_some), "{others:?}");
    }
}

#[test]
fn a_claim_for_hardware_isolation_gets_no_share() {
    let mut scheduler = crate::start();
    let hard = |name: &str| claim(name, Class::Hard, false);
    let shared = Tier::ALL.into_iter().filter(|tier| tier.is_shared());
    publish(&mut scheduler, &shared.collect::<Vec<_>>());
    assert_eq!(allocate(&mut scheduler, &hard("only-shares")), None);
    // As many as there are whole GPUs, beside one that is shared.
    publish(&mut scheduler, &[Tier::Capped, Tier::Exclusive]);
    let share = claim("share", Class::Tier(Tier::Capped), false);
    assert!(allocate(&mut scheduler, &share).is_some());
    for number in 1..GPUS {
        let device = allocate(&mut scheduler, &hard(&format!("hard-{number}")));
        assert_eq!(device, Some(format!("gpu-{number:08x}")));
    }
    assert_eq!(allocate(&mut scheduler, &hard("no-gpu-left")), None);
}
