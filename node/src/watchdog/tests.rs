//! Programs of a share with an account and a driver, sampled at any moment: an honest share is never reported, a bypass
//! always is.

use proptest::prelude::*;
use tranche_api::sharing_policy::UNACCOUNTED;

use super::compare::{
    Basis, Findings, GpuWatch, Owner, ProcessId, ProcessSample, Sample, ShareSample, SlotSample,
    UNOWNED_TOLERANCE,
};

const MIB: u64 = 1 << 20;
/// The driver's allocation granularity.
const GRANULARITY: u64 = 2 * MIB;
const CONTEXT: u64 = 300 * MIB;

/// A program: its slot, and its memory in the driver.
#[derive(Clone, Debug, Default)]
struct Program {
    charged: u64,
    changes: u64,
    held: u64,
    /// No longer charged but still held; freed after the next sample.
    late: u64,
    allocations: Vec<u64>,
    /// An allocation that is charged and not yet made.
    asked: Option<u64>,
    /// Memory that the driver has freed and that is still charged.
    returned: Option<u64>,
    /// Bytes that it allocated without the shim.
    hidden: u64,
    has_no_slot: bool,
}

impl Program {
    /// With a context, as the shim charges it.
    fn start() -> Self {
        Self {
            charged: CONTEXT,
            held: CONTEXT,
            ..Self::default()
        }
    }

    fn change(&mut self, charged: u64) {
        self.charged = charged;
        self.changes += 1;
    }

    /// One step of one call: charge, allocate, free, return the charge.
    fn step(&mut self, action: &Action, left: u64) {
        if let Some(bytes) = self.asked.take() {
            self.held += bytes;
            self.allocations.push(bytes);
        } else if let Some(bytes) = self.returned.take() {
            self.change(self.charged - bytes);
        } else {
            match *action {
                Action::Allocate(bytes) => {
                    // Charged in the shim's blocks; the driver rounds within its granularity.
                    let bytes = (bytes * MIB).next_multiple_of(GRANULARITY);
                    if bytes <= left && self.allocations.len() < 64 {
                        self.change(self.charged + bytes);
                        self.asked = Some(bytes);
                    }
                }
                Action::Free { nth, late } => {
                    if self.allocations.is_empty() {
                        return;
                    }
                    let bytes = self.allocations.remove(nth % self.allocations.len());
                    if late && self.late == 0 {
                        self.late = bytes;
                    } else {
                        self.held -= bytes;
                    }
                    self.returned = Some(bytes);
                }
            }
        }
    }
}

#[derive(Clone, Debug)]
enum Action {
    Allocate(u64),
    Free { nth: usize, late: bool },
}

fn action() -> impl Strategy<Value = Action> {
    prop_oneof![
        (1u64..3000).prop_map(Action::Allocate),
        (any::<usize>(), any::<bool>()).prop_map(|(nth, late)| Action::Free { nth, late }),
    ]
}

/// What happens between two readings: the program and its action.
type Steps = Vec<(usize, Action)>;

/// A sample's three gaps: before the first copy of the account, before NVML, before the second copy.
fn gaps() -> impl Strategy<Value = [Steps; 3]> {
    let steps = || proptest::collection::vec((0usize..3, action()), 0..6);
    [steps(), steps(), steps()]
}

struct World {
    programs: Vec<Program>,
    limit: u64,
    watch: GpuWatch,
    now: u64,
    /// Samples since a program freed late.
    since_late: u32,
    /// The driver's rounding of each allocation beyond its charge.
    rounding: u64,
}

impl World {
    fn new(programs: usize, limit: u64, rounding: u64) -> Self {
        Self {
            programs: vec![Program::start(); programs],
            limit,
            watch: GpuWatch::default(),
            now: 0,
            since_late: 2,
            rounding,
        }
    }

    fn step(&mut self, steps: &Steps) {
        for (nth, action) in steps {
            let used: u64 = self.programs.iter().map(|p| p.charged).sum();
            let nth = nth % self.programs.len();
            let may_be_late = self.since_late >= 2;
            let action = match action {
                Action::Free { nth, late } => Action::Free {
                    nth: *nth,
                    late: *late && may_be_late,
                },
                allocate @ Action::Allocate(_) => allocate.clone(),
            };
            self.programs[nth].step(&action, self.limit.saturating_sub(used));
        }
    }

    fn copy(&self) -> Vec<(u64, u64)> {
        self.programs
            .iter()
            .map(|p| (p.charged, p.changes))
            .collect()
    }

    fn sample(&mut self, gaps: &[Steps; 3]) -> Findings {
        self.step(&gaps[0]);
        let before = self.copy();
        self.step(&gaps[1]);
        let rounding = self.rounding;
        let held = |p: &Program| p.held + p.hidden + p.allocations.len() as u64 * rounding;
        let processes: Vec<_> = (1u32..)
            .zip(&self.programs)
            .map(|(pid, program)| process(pid, held(program)))
            .collect();
        self.step(&gaps[2]);
        let after = self.copy();
        let slots = (1u64..).zip(before.iter().zip(&after)).zip(&self.programs);
        let slots =
            slots
                .filter(|(_, program)| !program.has_no_slot)
                .map(|((pid, (before, after)), _)| SlotSample {
                    pid,
                    charged: (before == after).then_some(after.0),
                });
        let sample = Sample {
            shares: vec![ShareSample {
                movable: 0,
                key: "share".into(),
                limit: self.limit,
                context: CONTEXT,
                slots: Some(slots.collect()),
            }],
            processes,
            used: None,
            context: Some(CONTEXT),
            unaccounted: UNACCOUNTED,
        };
        self.since_late += 1;
        for program in &mut self.programs {
            if program.late > 0 {
                self.since_late = 0;
                program.held -= std::mem::take(&mut program.late);
            }
        }
        self.now += 1_000_000_000;
        self.watch.step(self.now, &sample)
    }
}

fn process(pid: u32, bytes: u64) -> ProcessSample {
    ProcessSample {
        id: ProcessId { pid, started: 7 },
        inner_pid: Some(pid.into()),
        bytes,
        owner: Owner::Shares {
            pod: Some("pod".into()),
            keys: vec!["share".into()],
        },
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(512))]

    /// However calls and samples interleave, and however the driver rounds within its granularity.
    #[test]
    fn an_honest_share_is_never_named(
        samples in proptest::collection::vec(gaps(), 1..40),
        rounding in 0..=GRANULARITY,
        limit in 1u64..80,
    ) {
        let mut world = World::new(3, limit << 30, rounding);
        for gaps in samples {
            let findings = world.sample(&gaps);
            prop_assert_eq!(findings.bypasses, vec![]);
        }
    }

    /// A bypass of 256 MiB or more, in a process whose slot does not change during every reading.
    #[test]
    fn a_bypass_is_named_within_two_samples(
        samples in proptest::collection::vec(gaps(), 0..20),
        neighbours in [gaps(), gaps()],
        hidden in UNACCOUNTED + 1..64 << 30,
        has_no_slot: bool,
    ) {
        let mut world = World::new(3, 80 << 30, 0);
        for gaps in samples {
            world.sample(&gaps);
        }
        // The third program finishes its call and then allocates without the shim.
        for _ in 0..2 {
            let program = &mut world.programs[2];
            if program.asked.is_some() || program.returned.is_some() {
                program.step(&Action::Free { nth: 0, late: false }, 0);
            }
        }
        world.programs[2].hidden = hidden;
        world.programs[2].has_no_slot = has_no_slot;
        let others = |gaps: [Steps; 3]| gaps.map(|steps| {
            steps.into_iter().map(|(nth, action)| (nth % 2, action)).collect()
        });
        let [first, second] = neighbours.map(others);
        // After a late free, which looks the same, it may be reported at once.
        let at_once = world.sample(&first);
        let findings = world.sample(&second);
        let named: Vec<_> = findings.bypasses.iter().map(|b| b.process.pid).collect();
        prop_assert!(named.contains(&3), "{:?}", findings);
        let basis = if has_no_slot { Basis::NoSlot } else { Basis::Process };
        let bypass = findings.bypasses.iter().find(|b| b.basis == basis).unwrap();
        prop_assert!(bypass.bytes >= hidden);
        let news = at_once.bypasses.iter().chain(&findings.bypasses).filter(|b| b.basis == basis);
        prop_assert_eq!(news.filter(|b| b.process.pid == 3 && b.must_report).count(), 1);
    }

    /// Whatever its tenant writes into the page, and however often it changes it.
    #[test]
    fn memory_beyond_the_share_is_named_whatever_the_page_says(
        slots in proptest::collection::vec((0u64..4, any::<Option<u64>>()), 0..6),
        readable: bool,
        beyond in 1u64..64 << 30,
    ) {
        let limit = 20 << 30;
        let processes = 2;
        let allowed = limit + processes * UNACCOUNTED;
        let slots = slots.into_iter().map(|(pid, charged)| SlotSample { pid, charged });
        let sample = Sample {
            shares: vec![ShareSample {
                movable: 0,
                key: "share".into(),
                limit,
                context: CONTEXT,
                slots: readable.then(|| slots.collect()),
            }],
            processes: vec![process(1, 1 << 30), process(2, allowed - (1 << 30) + beyond)],
            used: None,
            context: Some(CONTEXT),
            unaccounted: UNACCOUNTED,
        };
        let mut watch = GpuWatch::default();
        prop_assert!(watch.step(0, &sample).bypasses.is_empty());
        let findings = watch.step(1, &sample);
        prop_assert!(!findings.bypasses.is_empty());
    }
}

fn share(key: &str, slots: &[(u64, u64)]) -> ShareSample {
    ShareSample {
        movable: 0,
        key: key.into(),
        limit: 10 << 30,
        context: CONTEXT,
        slots: Some(
            slots
                .iter()
                .map(|&(pid, charged)| SlotSample {
                    pid,
                    charged: Some(charged),
                })
                .collect(),
        ),
    }
}

fn named(watch: &mut GpuWatch, sample: &Sample) -> Vec<(u32, Basis, u64)> {
    watch.step(0, sample);
    let findings = watch.step(1, sample);
    let named = findings.bypasses.iter();
    named.map(|b| (b.process.pid, b.basis, b.bytes)).collect()
}

#[test]
fn one_sample_alone_names_nobody_and_news_is_told_once() {
    let quiet = Sample {
        shares: vec![share("share", &[(1, CONTEXT)])],
        processes: vec![process(1, CONTEXT)],
        used: None,
        context: Some(CONTEXT),
        unaccounted: UNACCOUNTED,
    };
    let mut loud = quiet.clone();
    loud.processes[0].bytes += 1 << 30;
    let mut watch = GpuWatch::default();
    for _ in 0..10 {
        assert!(watch.step(0, &loud).bypasses.is_empty());
        assert!(watch.step(0, &quiet).bypasses.is_empty());
    }
    assert!(watch.step(3, &loud).bypasses.is_empty());
    let news = |findings: Findings| {
        findings
            .bypasses
            .iter()
            .map(|b| (b.since, b.must_report))
            .next()
    };
    assert_eq!(news(watch.step(4, &loud)), Some((3, true)));
    assert_eq!(news(watch.step(5, &loud)), Some((3, false)));
    // After one sample without it, it continues; after two it is over.
    assert_eq!(news(watch.step(6, &quiet)), Some((3, false)));
    loud.processes[0].bytes += 4 << 30;
    assert_eq!(
        news(watch.step(7, &loud)),
        Some((3, true)),
        "five times as much"
    );
    watch.step(8, &quiet);
    assert_eq!(news(watch.step(9, &quiet)), None);
    // Samples that could not be read interrupt consecutive ones.
    watch.step(10, &loud);
    watch.skip();
    assert_eq!(news(watch.step(11, &loud)), None);
}

#[test]
fn a_context_larger_than_assumed_is_no_bypass() {
    let mut sample = Sample {
        shares: vec![share("share", &[(1, CONTEXT)])],
        processes: vec![process(1, 700 * MIB)],
        used: None,
        context: Some(550 * MIB),
        unaccounted: UNACCOUNTED,
    };
    assert_eq!(named(&mut GpuWatch::default(), &sample), []);
    sample.processes[0].bytes = 850 * MIB;
    let found = named(&mut GpuWatch::default(), &sample);
    assert!(found.contains(&(1, Basis::Process, 550 * MIB)), "{found:?}");
}

#[test]
fn shares_of_one_pod_are_compared_together_and_others_apart() {
    let both = |pid, bytes| ProcessSample {
        owner: Owner::Shares {
            pod: None,
            keys: vec!["a".into(), "b".into()],
        },
        ..process(pid, bytes)
    };
    let only = |pid, bytes, key: &str| ProcessSample {
        owner: Owner::Shares {
            pod: None,
            keys: vec![key.into()],
        },
        ..process(pid, bytes)
    };
    let mut sample = Sample {
        // The process's memory is charged to both of its shares.
        shares: vec![
            share("a", &[(1, CONTEXT + (2 << 30))]),
            share("b", &[(1, 3 << 30)]),
            share("c", &[(1, CONTEXT)]),
        ],
        // The third share's process has the same PID as the first, in its own container.
        processes: vec![both(1, CONTEXT + (5 << 30)), only(1, CONTEXT, "c")],
        used: None,
        context: Some(CONTEXT),
        unaccounted: UNACCOUNTED,
    };
    sample.processes[1].id.pid = 2;
    assert_eq!(named(&mut GpuWatch::default(), &sample), []);
    sample.processes[1].bytes += 1 << 30;
    let found = named(&mut GpuWatch::default(), &sample);
    assert!(found.contains(&(2, Basis::Process, 1 << 30)), "{found:?}");
    assert!(!found.iter().any(|(pid, ..)| *pid == 1), "{found:?}");
}

#[test]
fn foreign_processes_are_counted_and_never_named() {
    let foreign = ProcessSample {
        owner: Owner::Foreign,
        ..process(9, 5 << 30)
    };
    let uncapped = ProcessSample {
        owner: Owner::Uncapped,
        ..process(8, 5 << 30)
    };
    let sample = Sample {
        shares: vec![share("share", &[])],
        processes: vec![foreign, uncapped],
        used: Some(10 << 30),
        context: None,
        unaccounted: UNACCOUNTED,
    };
    let mut watch = GpuWatch::default();
    watch.step(0, &sample);
    let findings = watch.step(1, &sample);
    assert_eq!(findings.bypasses, []);
    assert_eq!(findings.foreign, (1, 5 << 30));
    assert_eq!(findings.unowned, Some(0));
}

#[test]
fn memory_that_nobody_owns_withholds_the_gpu_until_it_is_gone() {
    let sample = |used| Sample {
        shares: vec![share("share", &[(1, CONTEXT)])],
        processes: vec![process(1, CONTEXT)],
        used: Some(CONTEXT + used),
        context: None,
        unaccounted: UNACCOUNTED,
    };
    let mut watch = GpuWatch::default();
    // The driver takes some seconds to free.
    for _ in 0..4 {
        assert!(!watch.step(0, &sample(2 << 30)).is_withheld);
    }
    assert!(!watch.step(0, &sample(UNOWNED_TOLERANCE)).is_withheld);
    for nth in 0..5 {
        let findings = watch.step(0, &sample(2 << 30));
        assert_eq!(
            (findings.is_withheld, findings.unowned),
            (nth == 4, Some(2 << 30))
        );
    }
    watch.skip();
    assert!(
        watch.is_withheld(),
        "not being read is no reason to hand it on"
    );
    assert!(watch.step(0, &sample(0)).is_withheld);
    assert!(!watch.step(0, &sample(0)).is_withheld);
}

#[test]
fn what_is_charged_to_a_dead_parent_is_not_nobodys() {
    // Its forked child has the driver's files: NVML lists no process, or the parent's PID.
    let mut sample = Sample {
        shares: vec![share("share", &[(1, 4 << 30)])],
        processes: Vec::new(),
        used: Some(4 << 30),
        context: None,
        unaccounted: UNACCOUNTED,
    };
    assert_eq!(GpuWatch::default().step(0, &sample).unowned, Some(0));
    sample.processes = vec![ProcessSample {
        owner: Owner::Ended,
        ..process(1, 4 << 30)
    }];
    assert_eq!(GpuWatch::default().step(0, &sample).unowned, Some(0));
    // Without a charge the memory has no owner.
    sample.shares = Vec::new();
    assert_eq!(GpuWatch::default().step(0, &sample).unowned, Some(4 << 30));
}
