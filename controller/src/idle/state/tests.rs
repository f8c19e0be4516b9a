use proptest::prelude::*;
use serde_json::{Value, json};
use tranche_api::usage::NodeUsage;

use super::*;
use crate::idle::holder::holders;

const fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

const EVICT: IdleRule = IdleRule {
    after: seconds(30),
    action: Action::Evict { grace: seconds(10) },
};

const fn idle(for_seconds: u64) -> Activity {
    Activity {
        idle: Some(seconds(for_seconds)),
        memory: 1,
    }
}

/// Steps every second from a kernel at 0 on; what was done, by the second.
fn history(
    terms: impl Fn(u64) -> Option<IdleRule>,
    seen: impl Fn(u64) -> Activity,
    until: u64,
) -> Vec<(u64, Step)> {
    let mut watch = Watch::default();
    let mut done = Vec::new();
    for now in 0..until {
        let step;
        (watch, step) = watch.step(seconds(now), terms(now), seen(now));
        if step != Step::Nothing {
            done.push((now, step));
        }
    }
    done
}

const NOTICE: Step = Step::Notice { idle: seconds(30) };

#[test]
fn it_is_named_then_evicted_after_its_grace_until_it_is_gone() {
    let done = history(|_| Some(EVICT), idle, 42);
    assert_eq!(done, [(30, NOTICE), (40, Step::Evict), (41, Step::Evict)]);
    let report = IdleRule {
        action: Action::Report,
        ..EVICT
    };
    assert_eq!(history(|_| Some(report), idle, 1000), [(30, NOTICE)]);
}

#[test]
fn what_ends_the_notice() {
    let back = |why| [(30, NOTICE), (35, Step::Withdraw(why))];
    // A kernel.
    let worked = |now| idle(if now < 35 { now } else { now - 35 });
    assert_eq!(history(|_| Some(EVICT), worked, 60), back(Why::Works));
    // An exemption, or a policy that asks nothing of the namespace.
    let exempt = |now| (now < 35).then_some(EVICT);
    assert_eq!(history(exempt, idle, 60), back(Why::NotAsked));
    // A driver that does not answer.
    let unknown = |now| Activity {
        idle: (now < 35).then_some(seconds(now)),
        ..idle(now)
    };
    assert_eq!(history(|_| Some(EVICT), unknown, 60), back(Why::NotKnown));
    // It gave its memory back.
    let empty = |now| Activity {
        memory: u64::from(now < 35),
        ..idle(now)
    };
    assert_eq!(history(|_| Some(EVICT), empty, 60), back(Why::HoldsNothing));
}

#[test]
fn nobody_is_evicted_untold_or_sooner_than_told() {
    let evict = |grace| IdleRule {
        action: Action::Evict {
            grace: seconds(grace),
        },
        ..EVICT
    };
    let report = IdleRule {
        action: Action::Report,
        ..EVICT
    };
    let becomes = |at, before, after| {
        let terms = move |now| Some(if now < at { before } else { after });
        history(terms, idle, 100)
    };
    let again = |at| (at, Step::Notice { idle: seconds(at) });
    assert_eq!(
        becomes(60, report, EVICT)[..3],
        [(30, NOTICE), again(60), (70, Step::Evict)]
    );
    assert_eq!(becomes(35, EVICT, report), [(30, NOTICE), again(35)]);
    assert_eq!(
        becomes(35, evict(40), EVICT)[..2],
        [(30, NOTICE), (70, Step::Evict)]
    );
    assert_eq!(
        becomes(35, EVICT, evict(40))[..2],
        [(30, NOTICE), (70, Step::Evict)]
    );
}

/// It worked between two steps, and was idle for long enough before the second.
#[test]
fn work_that_no_step_saw_begins_the_grace_anew() {
    let (watch, step) = Watch::default().step(seconds(100), Some(EVICT), idle(30));
    assert_eq!(step, NOTICE);
    let (watch, step) = watch.step(seconds(200), Some(EVICT), idle(40));
    assert_eq!(step, Step::Notice { idle: seconds(40) });
    let (watch, step) = watch.step(seconds(209), Some(EVICT), idle(49));
    assert_eq!(step, Step::Nothing);
    assert_eq!(
        watch.step(seconds(210), Some(EVICT), idle(50)).1,
        Step::Evict
    );
}

fn node(gpus: &Value) -> NodeUsage {
    serde_json::from_value(json!({"node": "a", "unixMillis": 0, "gpus": gpus})).unwrap()
}

fn share(claim: &str, idle: Option<u64>, memory: u64) -> Value {
    json!({
        "claim": {"namespace": "n", "name": claim, "uid": claim}, "request": "gpu", "pool": "a/gpu", "device": claim,
        "tier": "capped", "memory": {"reserved": 0, "used": memory}, "processes": 1, "idleSeconds": idle,
    })
}

fn gpu(uuid: &str, shares: &[Value]) -> Value {
    json!({"uuid": uuid, "minor": 0, "pciBusID": "", "productName": "", "shares": shares})
}

#[test]
fn a_claim_is_as_idle_as_its_busiest_device() {
    let both = json!([
        gpu(
            "GPU-1",
            &[share("one", Some(60), 2), share("two", Some(9), 4)]
        ),
        gpu("GPU-2", &[share("one", Some(40), 3)]),
    ]);
    let holders = holders(&node(&both));
    let one = &holders["one"];
    assert_eq!((one.seen.idle, one.seen.memory), (Some(seconds(40)), 5));
    assert_eq!(one.gpus.len(), 2);
    assert_eq!(
        holders["two"].seen,
        Activity {
            idle: Some(seconds(9)),
            memory: 4
        }
    );
}

#[test]
fn a_claim_is_unknown_if_one_of_its_devices_is_unknown() {
    let seen = |gpus: Value| holders(&node(&gpus))["one"].seen.idle;
    let unknown = json!([
        gpu("GPU-1", &[share("one", None, 2)]),
        gpu("GPU-2", &[share("one", Some(40), 3)])
    ]);
    assert_eq!(seen(unknown), None);
    let mut silent = gpu("GPU-1", &[share("one", Some(40), 3)]);
    silent["problem"] = "the driver does not answer".into();
    assert_eq!(seen(json!([silent])), None);
    let partition = json!([{"uuid": "GPU-1", "minor": 0, "pciBusID": "", "productName": "", "partitions": [
        {"uuid": "MIG-1", "profile": "1g.10gb", "gpuInstance": 1, "computeInstance": 0, "shares": [share("one", Some(7), 1)]},
    ]}]);
    assert_eq!(seen(partition), Some(seconds(7)));
}

#[test]
fn for_a_claim_on_several_gpus_the_more_patient_terms_hold() {
    let evict = |after, grace| IdleRule {
        after: seconds(after),
        action: Action::Evict {
            grace: seconds(grace),
        },
    };
    assert_eq!(evict(30, 60).more_patient(evict(40, 10)), evict(40, 60));
    let report = IdleRule {
        after: seconds(9),
        action: Action::Report,
    };
    assert_eq!(
        evict(30, 60).more_patient(report),
        IdleRule {
            after: seconds(30),
            action: Action::Report
        }
    );
}

/// What is true in one second: whether it works, whether that is known, whether anything is asked of it, and whether anybody looks.
fn second() -> impl Strategy<Value = [bool; 4]> {
    let flags = (0..20_u8, 0..30_u8, 0..30_u8, 0..3_u8);
    flags.prop_map(|(works, known, asked, looked)| [works == 0, known > 0, asked > 0, looked > 0])
}

proptest! {
    /// An eviction comes after `after` and `grace` without work, after a notice that is `grace` old, and nothing that would have
    /// ended the notice was seen since.
    #[test]
    fn nobody_is_evicted_too_early(
        seconds_of in prop::collection::vec(second(), 0..300),
        after in 1..20_u64,
        grace in 0..20_u64,
    ) {
        let terms = IdleRule { after: seconds(after), action: Action::Evict { grace: seconds(grace) } };
        let (mut watch, mut worked, mut noticed) = (Watch::default(), 0, None);
        for (now, &[works, is_known, is_asked, is_looked_at]) in (0..).zip(&seconds_of) {
            if works {
                worked = now;
            }
            if !is_looked_at {
                continue;
            }
            let seen = Activity { idle: is_known.then_some(seconds(now - worked)), memory: 1 };
            let step;
            (watch, step) = watch.step(seconds(now), is_asked.then_some(terms), seen);
            if !is_known || !is_asked || now - worked < after {
                prop_assert!(matches!(step, Step::Nothing | Step::Withdraw(_)), "{now}: {step:?}");
                noticed = None;
            }
            match step {
                Step::Notice { .. } => noticed = Some(now),
                Step::Withdraw(_) => prop_assert_eq!(watch, Watch::Busy),
                Step::Evict => {
                    let at = noticed.expect("it was told");
                    prop_assert!(now - at >= grace && worked <= at, "{now}: told at {at}, worked at {worked}");
                    prop_assert!(now - worked >= after + grace, "{now}: worked at {worked}");
                }
                Step::Nothing => {}
            }
        }
    }

    /// The status of a claim is written only when something changes.
    #[test]
    fn it_is_named_once(until in 31..500_u64) {
        let report = IdleRule { action: Action::Report, ..EVICT };
        prop_assert_eq!(history(|_| Some(report), idle, until).len(), 1);
    }
}
