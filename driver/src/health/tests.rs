//! From looks at a GPU to its condition and taint.

use tranche_api::gpu_node::{PublishedFault, PublishedHealth, TaintEffect};
use tranche_api::sharing_policy::FaultEffect;

use super::*;

const BOOT: &str = "boot-1";

/// A GPU, looked at again and again.
struct Gpu {
    record: Option<Record>,
    seen: Seen,
    terms: HealthTerms,
    boot: &'static str,
    is_held: bool,
}

fn reports(recovery_action: Option<RecoveryAction>) -> Seen {
    Seen::Report(Report {
        recovery_action,
        ..Report::default()
    })
}

/// Of a driver since 565.
fn fine() -> Seen {
    reports(Some(RecoveryAction::None))
}

/// Of an older driver.
fn silent() -> Seen {
    reports(None)
}

impl Gpu {
    fn new(seen: Seen) -> Self {
        Self {
            record: None,
            seen,
            terms: HealthTerms::default(),
            boot: BOOT,
            is_held: false,
        }
    }

    fn with(seen: Seen, published: &PublishedHealth) -> Self {
        let terms = HealthTerms::of(published);
        Self {
            terms,
            ..Self::new(seen)
        }
    }

    fn look(&mut self, now: i64, xids: &[u64]) -> Verdict {
        let look = Look {
            seen: &self.seen,
            xids,
            boot: self.boot,
            now,
        };
        self.record = observe(self.record.take(), look, &self.terms);
        // As across a restart of the plugin.
        let text = serde_json::to_string(&self.record).unwrap();
        assert_eq!(
            serde_json::from_str::<Option<Record>>(&text).unwrap(),
            self.record
        );
        verdict(
            self.record.as_ref(),
            &self.seen,
            self.is_held,
            &self.terms,
            now,
        )
    }

    fn wants_check(&self) -> bool {
        let record = self.record.as_ref();
        record.is_some_and(|record| record.wants_check(&self.seen, &self.terms))
    }
}

#[test]
fn errors_of_programs_and_unlisted_xids_change_nothing() {
    let mut gpu = Gpu::new(fine());
    for xid in [13, 31, 43, 45, 63, 92, 94, 109, 154, 999, u64::MAX] {
        let verdict = gpu.look(1, &[xid]);
        assert_eq!(
            (verdict.status, verdict.taint),
            (Status::Healthy, None),
            "{xid}"
        );
    }
    assert_eq!(gpu.record, None);
}

#[test]
fn every_xid_of_the_table_has_the_effect_of_its_severity() {
    assert!(
        xid::TABLE.is_sorted_by_key(|row| row.number),
        "it is searched"
    );
    for row in xid::TABLE {
        let mut gpu = Gpu::new(fine());
        let verdict = gpu.look(7, &[row.number.into()]);
        let has_effect = row.severity != Severity::None;
        assert_eq!(verdict.status == Status::Unhealthy, has_effect, "{row:?}");
        let Some(taint) = verdict.taint else {
            assert!(!has_effect, "{row:?}");
            continue;
        };
        assert_eq!(taint.value, format!("Xid{}", row.number));
        assert_eq!((taint.effect, taint.since), (TaintEffect::NoSchedule, 7));
        assert!(verdict.message.contains(row.meaning), "{}", verdict.message);
    }
}

#[test]
fn a_fault_stays_until_a_check_whatever_is_reported_afterwards() {
    let mut gpu = Gpu::new(reports(Some(RecoveryAction::Reset)));
    let first = gpu.look(10, &[48]);
    assert_eq!(
        first.reason, "ResetRequired",
        "of equal ones the first by name"
    );
    assert!(first.message.contains("Xid 48") && first.message.contains("--gpu-reset"));
    assert!(!gpu.wants_check());
    gpu.seen = fine();
    let reset = gpu.look(20, &[]);
    assert_eq!(reset.status, Status::Unhealthy);
    assert_eq!(reset.taint.as_ref().map(|it| it.since), Some(10), "stable");
    assert!(gpu.wants_check());
    assert!(reset.message.contains("being checked"), "{}", reset.message);
    gpu.is_held = true;
    let held = gpu.look(21, &[]);
    assert!(
        held.message.contains("no claim holds it"),
        "{}",
        held.message
    );
    gpu.is_held = false;
    gpu.record
        .as_mut()
        .unwrap()
        .note_check("cuInit returned error 3".into());
    let failed = gpu.look(22, &[]);
    assert!(
        failed.message.contains("cuInit returned error 3"),
        "{}",
        failed.message
    );
}

#[test]
fn under_a_driver_without_recovery_actions_a_reset_must_be_shown() {
    // A look that fails does not show one.
    let mut gpu = Gpu::new(silent());
    gpu.look(1, &[48]);
    for seen in [silent(), Seen::Unwatched("closed".into()), silent()] {
        gpu.seen = seen;
        let verdict = gpu.look(2, &[]);
        assert!(!gpu.wants_check());
        assert_eq!(verdict.status, Status::Unhealthy);
    }
    let message = gpu.look(3, &[]).message;
    assert!(message.contains("cordon the node"), "{message}");
    let other_ways: [fn(&mut Gpu); 3] = [
        |gpu| gpu.boot = "boot-2",
        |gpu| gpu.record.as_mut().unwrap().note_maintenance(),
        |gpu| {
            gpu.seen = Seen::Lost;
            gpu.look(4, &[79]);
            assert!(!gpu.wants_check());
            gpu.seen = silent();
        },
    ];
    for is_reset in other_ways {
        let mut gpu = Gpu::new(silent());
        gpu.look(1, &[48]);
        is_reset(&mut gpu);
        gpu.look(5, &[]);
        assert!(gpu.wants_check());
        // A new fault needs a new reset.
        gpu.look(6, &[95]);
        assert!(!gpu.wants_check());
    }
}

#[test]
fn rows_and_lost_gpus_are_faults_while_nvml_reports_them() {
    let report = |remap_pending, remap_failed| {
        Seen::Report(Report {
            recovery_action: None,
            remap_pending,
            remap_failed,
        })
    };
    for (seen, reason) in [
        (report(true, false), "RowRemapPending"),
        (report(false, true), "RowRemapFailure"),
        (Seen::Lost, "GpuLost"),
        (reports(Some(RecoveryAction::Reboot)), "RebootRequired"),
        (reports(Some(RecoveryAction::Drain)), "DrainRequired"),
        (reports(Some(RecoveryAction::of(9))), "ResetRequired"),
    ] {
        let mut gpu = Gpu::new(seen);
        assert_eq!(gpu.look(1, &[]).reason, reason);
        assert!(!gpu.wants_check(), "{reason}");
        gpu.seen = silent();
        assert_eq!(gpu.look(2, &[]).reason, reason, "until a check");
        assert!(gpu.wants_check(), "{reason}");
    }
}

#[test]
fn a_gpu_that_cannot_be_asked_is_neither_healthy_nor_unhealthy() {
    let mut gpu = Gpu::new(Seen::Unwatched("NVML is closed".into()));
    let verdict = gpu.look(1, &[]);
    assert_eq!((verdict.status, verdict.taint), (Status::Unknown, None));
    assert_eq!(verdict.message, "NVML is closed");
}

#[test]
fn a_policy_sets_the_effect_of_faults_and_when_pods_go() {
    use TaintEffect::{NoExecute, NoSchedule};

    let rule = |fault: &str, effect| PublishedFault {
        fault: fault.to_owned(),
        effect,
    };
    let published = PublishedHealth {
        effect: TaintEffect::NoExecute,
        grace_seconds: Some(60),
        faults: vec![
            rule("Xid74", FaultEffect::NoExecute),
            rule("Xid48", FaultEffect::Ignore),
            rule("Xid95", FaultEffect::NoSchedule),
            rule("Xid31", FaultEffect::NoSchedule),
            rule("of another release", FaultEffect::NoExecute),
        ],
    };
    let effect = |xid, now| {
        let mut gpu = Gpu::with(fine(), &published);
        gpu.look(100, &[xid]);
        gpu.look(now, &[]).taint.map(|it| (it.effect, it.since))
    };
    for xid in [79, 74] {
        assert_eq!(effect(xid, 159), Some((NoSchedule, 100)), "{xid}");
        assert_eq!(effect(xid, 160), Some((NoExecute, 160)), "{xid}");
        assert_eq!(effect(xid, 9_999), Some((NoExecute, 160)), "{xid}");
    }
    assert_eq!(effect(48, 160), None);
    assert_eq!(effect(95, 9_999), Some((NoSchedule, 100)));
    assert_eq!(effect(31, 9_999), Some((NoSchedule, 100)));
    assert_eq!(effect(64, 9_999), Some((NoSchedule, 100)), "the GPU works");
}

#[test]
fn a_fault_that_the_policy_comes_to_ignore_is_over_at_once() {
    let mut gpu = Gpu::new(silent());
    gpu.look(1, &[74]);
    let faults = vec![PublishedFault {
        fault: "Xid74".into(),
        effect: FaultEffect::Ignore,
    }];
    gpu.terms = HealthTerms::of(&PublishedHealth {
        faults,
        ..PublishedHealth::default()
    });
    assert_eq!(gpu.look(2, &[]).status, Status::Healthy);
}

#[test]
fn the_worst_fault_is_the_reason() {
    let mut gpu = Gpu::new(fine());
    gpu.look(1, &[74]);
    let verdict = gpu.look(2, &[79, 48]);
    assert_eq!(verdict.reason, "Xid48", "of equal ones the first");
    assert_eq!(verdict.taint.unwrap().since, 1, "since the first fault");
}

#[test]
fn names_of_faults_are_exact() {
    use tranche_api::sharing_policy::FAULTS;
    for name in FAULTS.into_iter().chain(["Xid1", "Xid4294967295"]) {
        assert_eq!(name.parse::<Fault>().unwrap().to_string(), name);
    }
    for name in [
        "",
        "Xid",
        "Xid07",
        "Xid+7",
        "xid7",
        "Xid4294967296",
        "gpuLost",
    ] {
        let error = name.parse::<Fault>().unwrap_err().to_string();
        assert!(
            error.contains("GpuLost") && error.contains("Xid79"),
            "{error}"
        );
    }
}

#[test]
fn the_page_has_every_xid_with_its_action_and_effect() {
    let page = include_str!("../../../docs/health.md");
    for row in xid::TABLE {
        let effect = match row.severity {
            Severity::None => "none",
            Severity::Degraded => "no new claims",
            Severity::Broken => "the policy's",
        };
        let line = format!(
            "| {} | {} | {} | {effect} |",
            row.number, row.meaning, row.action
        );
        assert!(page.contains(&line), "docs/health.md lacks: {line}");
    }
}
