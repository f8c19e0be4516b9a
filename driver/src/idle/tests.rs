use proptest::prelude::*;
use serde_json::json;

use super::*;

const fn seconds(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

const EVICT: Terms = Terms {
    after: seconds(30),
    action: Action::Evict { grace: seconds(10) },
};

const fn idle(for_seconds: u64) -> Seen {
    Seen {
        idle: Some(seconds(for_seconds)),
        memory: 1,
    }
}

/// Steps every second from a kernel at 0 on; what was done, by the second.
fn history(
    terms: impl Fn(u64) -> Option<Terms>,
    seen: impl Fn(u64) -> Seen,
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
    let report = Terms {
        action: Action::Report,
        ..EVICT
    };
    assert_eq!(history(|_| Some(report), idle, 1000), [(30, NOTICE)]);
}

#[test]
fn what_ends_the_notice() {
    let back = [(30, NOTICE), (35, Step::Withdraw)];
    // A kernel.
    let worked = |now| idle(if now < 35 { now } else { now - 35 });
    assert_eq!(history(|_| Some(EVICT), worked, 60), back);
    // An exemption, or a policy that asks nothing of the namespace.
    let exempt = |now| (now < 35).then_some(EVICT);
    assert_eq!(history(exempt, idle, 60), back);
    // A driver that does not answer.
    let unknown = |now| Seen {
        idle: (now < 35).then_some(seconds(now)),
        ..idle(now)
    };
    assert_eq!(history(|_| Some(EVICT), unknown, 60), back);
    // It gave its memory back.
    let empty = |now| Seen {
        memory: u64::from(now < 35),
        ..idle(now)
    };
    assert_eq!(history(|_| Some(EVICT), empty, 60), back);
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

fn usage(idle_seconds: Option<u64>) -> ShareUsage {
    serde_json::from_value(json!({
        "claim": {"namespace": "n", "name": "c", "uid": "u"}, "request": "gpu", "pool": "p", "device": "d",
        "tier": "capped", "memory": {"reserved": 0, "used": 7}, "processes": 1, "idleSeconds": idle_seconds,
    }))
    .unwrap()
}

#[test]
fn an_account_can_only_make_its_own_share_look_busy() {
    let idle = |nvml, account: Option<u64>| Seen::of(&usage(nvml), account.map(seconds)).idle;
    assert_eq!(idle(Some(60), None), Some(seconds(60)));
    assert_eq!(idle(Some(60), Some(5)), Some(seconds(5)));
    assert_eq!(idle(Some(5), Some(u64::MAX)), Some(seconds(5)));
    assert_eq!(
        idle(None, Some(60)),
        None,
        "what NVML does not know is not idle"
    );
    assert_eq!(Seen::of(&usage(None), None).memory, 7);
}

/// What is true in one second.
#[derive(Clone, Copy, Debug)]
struct Second {
    works: bool,
    is_known: bool,
    is_asked: bool,
    is_looked_at: bool,
}

fn second() -> impl Strategy<Value = Second> {
    let flags = (0..20_u8, 0..30_u8, 0..30_u8, 0..3_u8);
    flags.prop_map(|(works, known, asked, looked)| Second {
        works: works == 0,
        is_known: known > 0,
        is_asked: asked > 0,
        is_looked_at: looked > 0,
    })
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
        let terms = Terms { after: seconds(after), action: Action::Evict { grace: seconds(grace) } };
        let (mut watch, mut worked, mut noticed) = (Watch::default(), 0, None);
        for (now, it) in (0..).zip(&seconds_of) {
            if it.works {
                worked = now;
            }
            if !it.is_looked_at {
                continue;
            }
            let seen = Seen { idle: it.is_known.then_some(seconds(now - worked)), memory: 1 };
            let step;
            (watch, step) = watch.step(seconds(now), it.is_asked.then_some(terms), seen);
            if !it.is_known || !it.is_asked || now - worked < after {
                prop_assert!(matches!(step, Step::Nothing | Step::Withdraw), "{now}: {step:?}");
                noticed = None;
            }
            match step {
                Step::Notice { .. } => noticed = Some(now),
                Step::Withdraw => prop_assert_eq!(watch, Watch::Busy),
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
        let report = Terms { action: Action::Report, ..EVICT };
        prop_assert_eq!(history(|_| Some(report), idle, until).len(), 1);
    }
}
