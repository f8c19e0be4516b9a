//! Shares with a priority.

use super::*;
use crate::cdi::NodePaths;
use crate::claim_spec::claim_spec;

/// The plan of a share with `compute.priority`.
fn asked(result: Value, priority: &str) -> PreparationPlan {
    let config = crate::testing::config("FromClaim", &[], &json!({"priority": priority}));
    let claim = crate::testing::claim(&[result], &[config]);
    let allocation = Allocation::from_claim(&claim, "node-a/gpu").unwrap();
    plan(&allocation, &two_gpus(), []).unwrap()
}

fn priority_of(plan: &PreparationPlan) -> Priority {
    let cap = plan.devices[0].cap;
    let is_cap_page = |step: &&Step| matches!(step, Step::WriteCapPage { .. });
    let Some(Step::WriteCapPage { cap: page, .. }) = plan.steps.iter().find(is_cap_page) else {
        panic!("no cap page: {plan:?}")
    };
    assert_eq!(*page, cap);
    cap.priority()
}

#[test]
fn a_capped_share_has_the_priority_of_its_claim() {
    let share = || capped("20Gi", "25");
    for (word, priority) in [
        ("high", Priority::High),
        ("normal", Priority::Normal),
        ("low", Priority::Low { floor: 10 }),
    ] {
        assert_eq!(priority_of(&asked(share(), word)), priority);
    }
    assert_eq!(
        priority_of(&prepared("a", &[share()], &[])),
        Priority::Normal
    );
    // In another tier it has no effect.
    let other = concurrent(0, "20Gi", "25");
    assert_eq!(priority_of(&asked(other, "high")), Priority::Normal);
    assert_eq!(
        priority_of(&asked(plain("gpu-00000000"), "low")),
        Priority::Normal
    );
}

#[test]
fn a_policys_floor_is_for_low_shares() {
    let with_floor = |word, floor| asked(capped("20Gi", "25"), word).with_floors(move |_| floor);
    assert_eq!(
        priority_of(&with_floor("low", 30)),
        Priority::Low { floor: 30 }
    );
    assert_eq!(
        priority_of(&with_floor("low", 500)),
        Priority::Low { floor: 100 }
    );
    assert_eq!(priority_of(&with_floor("high", 30)), Priority::High);
}

#[test]
fn containers_write_or_read_the_load_page_of_their_gpu() {
    let paths = NodePaths {
        shares: "/run/tranche/shares".to_owned(),
        hooks: "/var/lib/tranche".to_owned(),
        metadata: None,
        mps: "/run/tranche/mps".to_owned(),
        load: "/run/tranche/load".to_owned(),
        dev_root: "/".to_owned(),
    };
    for (word, option, variable) in [
        ("high", Some("rw"), Some("TRANCHE_GPU_0_PRIORITY=high")),
        ("normal", None, None),
        ("low", Some("ro"), Some("TRANCHE_GPU_0_PRIORITY=low")),
    ] {
        let plan = asked(capped("20Gi", "25"), word);
        let spec = claim_spec(&plan, &paths).unwrap();
        let edits = &spec.devices()[0].container_edits;
        let from = format!("/run/tranche/load/{}/load", gpu(0).uuid);
        let mount = edits.mounts.iter().find(|mount| mount.host_path == from);
        assert_eq!(mount.map(|it| &*it.options[0]), option, "{word}");
        let to = format!("/usr/lib/tranche/shares/{}/load", plan.devices[0].key);
        assert!(mount.is_none_or(|it| it.container_path == to), "{mount:?}");
        let env = edits.env.iter().find(|it| it.contains("PRIORITY"));
        assert_eq!(env.map(String::as_str), variable, "{word}");
    }
}

/// A journal of a release without priorities is read.
#[test]
fn a_normal_priority_is_not_in_the_journal() {
    let text = |word| serde_json::to_string(&asked(capped("20Gi", "25"), word)).unwrap();
    assert!(!text("normal").contains("riority"), "{}", text("normal"));
    for word in ["high", "normal", "low"] {
        let plan = asked(capped("20Gi", "25"), word);
        assert_eq!(
            serde_json::from_str::<PreparationPlan>(&text(word)).unwrap(),
            plan
        );
    }
}
