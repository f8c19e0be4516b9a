mod mutations;

use k8s_openapi::api::resource::v1::ResourceClaim;
use proptest::prelude::*;
use serde_json::{Value, json};
use tranche_api::names::pool;
use tranche_api::share_config::ComputeMode;

use super::*;
use crate::testing::{NODE, UID, capped, claim, config, plain, with};

fn read(claim: &ResourceClaim) -> Result<Allocation, String> {
    Allocation::from_claim(claim, &pool(NODE)).map_err(|error| error.to_string())
}

fn refusal(claim: &ResourceClaim) -> String {
    read(claim).expect_err("refused")
}

#[test]
fn a_share_is_read() {
    let allocation = read(&claim(&[capped("20Gi", "25")], &[])).unwrap();
    assert_eq!(allocation.uid, UID);
    assert_eq!(
        (&*allocation.namespace, &*allocation.name),
        ("team-a", "train")
    );
    let device = &allocation.devices[0];
    assert_eq!(device.request, "gpu");
    assert_eq!(device.device.to_string(), "gpu-00000000-capped");
    assert_eq!(
        device.grant,
        Grant::Capped {
            share_id: "5a1f3a5c-7a80-4d6f-8f2e-111111111111".to_owned(),
            memory: 20 << 30,
            cores: 25,
            context_memory: 512 << 20,
        }
    );
    assert_eq!(device.config, ShareConfig::default());
}

#[test]
fn every_way_to_write_an_amount_is_read() {
    for memory in ["20Gi", "20480Mi", "21474836480", "21474836480000m"] {
        let allocation = read(&claim(&[capped(memory, "25")], &[])).unwrap();
        assert!(
            matches!(allocation.devices[0].grant, Grant::Capped { memory: bytes, .. } if bytes == 20 << 30)
        );
    }
}

#[test]
fn other_grants_are_read() {
    let grant = |result| {
        read(&claim(&[result], &[])).unwrap().devices[0]
            .grant
            .clone()
    };
    assert_eq!(grant(plain("gpu-00000001")), Grant::Whole {});
    assert_eq!(
        grant(with(
            plain("gpu-00000001-timeshared"),
            &json!({"shareID": "s"})
        )),
        Grant::Timeshared {
            share_id: "s".to_owned()
        }
    );
    assert_eq!(
        grant(with(
            plain("gpu-00000001-capped"),
            &json!({"adminAccess": true})
        )),
        Grant::Admin { share_id: None }
    );
    assert_eq!(
        grant(with(capped("1Gi", "1"), &json!({"adminAccess": false}))).share_id(),
        Some("5a1f3a5c-7a80-4d6f-8f2e-111111111111")
    );
}

#[test]
fn results_of_others_and_of_other_nodes_are_left_alone() {
    let foreign = with(plain("gpu-00000000"), &json!({"driver": "gpu.nvidia.com"}));
    let elsewhere = with(plain("gpu-00000000"), &json!({"pool": "node-b/gpu"}));
    let ours = with(plain("gpu-00000001"), &json!({"request": "second"}));
    let allocation = read(&claim(&[foreign.clone(), elsewhere.clone(), ours], &[])).unwrap();
    assert_eq!(allocation.devices.len(), 1);
    assert_eq!(allocation.devices[0].request, "second");
    assert_eq!(
        refusal(&claim(&[foreign, elsewhere], &[])),
        "claim team-a/train: status.allocation.devices.results has nothing of driver gpu.tranche.dev in pool node-a/gpu: the claim is allocated elsewhere"
    );
}

#[test]
fn a_subrequest_belongs_to_its_request() {
    let result = with(plain("gpu-00000000"), &json!({"request": "gpu/large"}));
    let allocation = read(&claim(&[result], &[])).unwrap();
    assert_eq!(allocation.devices[0].main_request(), "gpu");
}

/// The refusal of a claim with this one result.
fn refused(device: &str, problem: &str) -> String {
    format!("claim team-a/train: request gpu, device {device}: {problem}")
}

#[test]
fn bad_results_are_refused_by_claim_request_device_and_field() {
    let without = |field: &str| with(capped("20Gi", "25"), &json!({field: null}));
    let consuming =
        |consumed: Value| with(capped("1", "1"), &json!({"consumedCapacity": consumed}));
    for (result, expected) in [
        (
            plain("mig-0"),
            refused(
                "mig-0",
                r#""mig-0" is not a device name: ours are gpu-<first digits of the UUID>, gpu-<…>-<tier>, gpu-<…>-capped-<percent>, gpu-<…>-mig-<profile>-<start> and gpu-<…>-<tier>-<profile>-<start>"#,
            ),
        ),
        (
            without("shareID"),
            refused(
                "gpu-00000000-capped",
                "shareID is missing, though the tier capped is shared: is the feature gate DRAConsumableCapacity off?",
            ),
        ),
        (
            with(plain("gpu-00000000"), &json!({"shareID": "s"})),
            refused(
                "gpu-00000000",
                "shareID s is set, though the tier exclusive is not shared",
            ),
        ),
        (
            without("consumedCapacity"),
            refused(
                "gpu-00000000-capped",
                "consumedCapacity[memory] is missing: is the feature gate DRAConsumableCapacity off?",
            ),
        ),
        (
            consuming(json!({"memory": "1Gi"})),
            refused(
                "gpu-00000000-capped",
                "consumedCapacity[cores] is missing: is the feature gate DRAConsumableCapacity off?",
            ),
        ),
    ] {
        assert_eq!(refusal(&claim(&[result], &[])), expected);
    }
}

#[test]
fn bad_sizes_are_refused_by_capacity() {
    for (result, problem) in [
        (
            capped("20GB", "25"),
            r#"consumedCapacity[memory] "20GB" ends in the unknown suffix "GB": use one of Ki Mi Gi Ti Pi Ei, n u m k M G T P E, or an exponent such as e3"#,
        ),
        (
            capped("-1Gi", "25"),
            "consumedCapacity[memory] -1Gi is negative",
        ),
        (
            capped("500m", "25"),
            "consumedCapacity[memory] 500m is not a whole number",
        ),
        (
            capped("0", "25"),
            "consumedCapacity[memory] is 0, must be at least 1 byte and less than 2^64-1",
        ),
        (
            capped("18446744073709551615", "25"),
            "consumedCapacity[memory] is 18446744073709551615, must be at least 1 byte and less than 2^64-1",
        ),
        (
            capped("1Gi", "0"),
            "consumedCapacity[cores] is 0, must be 1 to 100 percent",
        ),
        (
            capped("1Gi", "101"),
            "consumedCapacity[cores] is 101, must be 1 to 100 percent",
        ),
        (
            capped("1Gi", "256"),
            "consumedCapacity[cores] is 256, must be 1 to 100 percent",
        ),
        (
            capped("1Gi", "12500m"),
            "consumedCapacity[cores] 12500m is not a whole number",
        ),
    ] {
        assert_eq!(
            refusal(&claim(&[result], &[])),
            refused("gpu-00000000-capped", problem)
        );
    }
}

#[test]
fn a_claim_without_allocation_or_uid_is_refused() {
    let mut unallocated = claim(&[plain("gpu-00000000")], &[]);
    unallocated.status = None;
    assert_eq!(
        refusal(&unallocated),
        "claim team-a/train: status.allocation is missing: the claim is not allocated, or not any more"
    );
    for uid in ["", "../../etc", "a/b", "-a", "a-", &"a".repeat(65)] {
        let mut strange = claim(&[plain("gpu-00000000")], &[]);
        strange.metadata.uid = Some(uid.to_owned());
        assert_eq!(
            refusal(&strange),
            format!("claim team-a/train: metadata.uid {uid:?} is not a UID")
        );
    }
}

#[test]
fn a_claim_of_another_uid_is_refused() {
    let claim = claim(&[plain("gpu-00000000")], &[]);
    assert_eq!(check_uid(&claim, UID), Ok(()));
    assert_eq!(
        check_uid(&claim, "old").unwrap_err().to_string(),
        format!(
            "claim team-a/train: metadata.uid is {UID}, not old: the claim was deleted and another took its name; delete the pod that waits for the old one"
        )
    );
}

fn mode(result: Value, configs: &[Value]) -> ComputeMode {
    read(&claim(&[result], configs)).unwrap().devices[0]
        .config
        .compute
        .mode
}

#[test]
fn the_claim_has_the_last_word_whatever_the_order() {
    let class = config("FromClass", &[], &json!({"mode": "workConserving"}));
    let claim = config("FromClaim", &[], &json!({"mode": "strict"}));
    for configs in [[class.clone(), claim.clone()], [claim, class.clone()]] {
        assert_eq!(mode(plain("gpu-00000000"), &configs), ComputeMode::Strict);
    }
    // A field that the claim leaves out stays as the class has it.
    let silent = config("FromClaim", &[], &json!({}));
    assert_eq!(
        mode(plain("gpu-00000000"), &[class, silent]),
        ComputeMode::WorkConserving
    );
}

#[test]
fn a_config_holds_for_the_requests_that_it_names() {
    let named = config("FromClaim", &["gpu"], &json!({"mode": "workConserving"}));
    let sub = with(plain("gpu-00000000"), &json!({"request": "gpu/large"}));
    let other = with(plain("gpu-00000000"), &json!({"request": "other"}));
    assert_eq!(
        mode(sub, std::slice::from_ref(&named)),
        ComputeMode::WorkConserving
    );
    assert_eq!(mode(other, &[named]), ComputeMode::Strict);
}

#[test]
fn bad_parameters_are_refused_by_position_source_and_path() {
    let good = config("FromClass", &[], &json!({}));
    let foreign = json!({
        "source": "FromClaim",
        "opaque": {"driver": "gpu.nvidia.com", "parameters": {"kind": "GpuConfig"}},
    });
    let typo = config("FromClaim", &["elsewhere"], &json!({"mdoe": "strict"}));
    assert_eq!(
        refusal(&claim(
            &[plain("gpu-00000000")],
            &[good.clone(), foreign.clone(), typo]
        )),
        "claim team-a/train: status.allocation.devices.config[2] (FromClaim): opaque.parameters: compute.mdoe is unknown: the fields here are mode, priority"
    );
    let strange = config("FromNowhere", &[], &json!({}));
    assert_eq!(
        refusal(&claim(&[plain("gpu-00000000")], &[strange])),
        "claim team-a/train: status.allocation.devices.config[0] (FromNowhere): source is unknown, must be FromClass or FromClaim"
    );
    assert!(read(&claim(&[plain("gpu-00000000")], &[good, foreign])).is_ok());
}

#[test]
fn an_allocation_survives_the_journal() {
    let results = [
        capped("20Gi", "25"),
        plain("gpu-00000001"),
        with(plain("gpu-00000002-timeshared"), &json!({"shareID": "s"})),
        with(plain("gpu-00000003"), &json!({"adminAccess": true})),
    ];
    let allocation = read(&claim(&results, &[])).unwrap();
    let text = serde_json::to_string(&allocation).unwrap();
    assert_eq!(
        serde_json::from_str::<Allocation>(&text).unwrap(),
        allocation
    );
}

proptest! {
    #[test]
    fn no_result_makes_it_panic(
        device in "(gpu-[0-9]{1,3}(-(capped|timeshared|exclusive|concurrent))?)|.*",
        request in ".*",
        share_id in prop::option::of(".*"),
        admin in prop::option::of(any::<bool>()),
        memory in prop::option::of("[-+]?[0-9]{0,25}(Gi|Mi|m|e[0-9]{1,3})?"),
        cores in prop::option::of("[-+]?[0-9]{0,5}m?"),
    ) {
        let result = json!({
            "request": request, "driver": DRIVER, "pool": pool(NODE), "device": device,
            "shareID": share_id, "adminAccess": admin,
            "consumedCapacity": {"memory": memory.unwrap_or_default(), "cores": cores.unwrap_or_default()},
        });
        if let Ok(allocation) = read(&claim(&[result], &[]))
            && let Grant::Capped { memory, cores, .. } = allocation.devices[0].grant
        {
            prop_assert!(memory > 0 && memory < u64::MAX && (1..=100).contains(&cores));
        }
    }
}

#[test]
fn claims_are_compared_by_the_schedulers_whole_decision() {
    let results = [
        capped("20Gi", "25"),
        with(plain("gpu-00000001"), &json!({"request": "whole"})),
    ];
    let of = |results: &[Value]| read(&claim(results, &[])).unwrap();
    let held = of(&results);
    let mut richer = held.clone();
    richer.devices[0].config.compute.mode = ComputeMode::WorkConserving;
    let Grant::Capped { context_memory, .. } = &mut richer.devices[0].grant else {
        panic!("{richer:?}")
    };
    *context_memory += 1;
    assert!(held.is_same_as(&richer));
    for change in [
        json!({"request": "other"}),
        json!({"device": "gpu-00000001-capped"}),
        json!({"shareID": "5a1f3a5c-7a80-4d6f-8f2e-222222222222"}),
        json!({"adminAccess": true}),
        json!({"consumedCapacity": {"memory": "21Gi", "cores": "25"}}),
        json!({"consumedCapacity": {"memory": "20Gi", "cores": "26"}}),
    ] {
        let anew = of(&[with(results[0].clone(), &change), results[1].clone()]);
        assert!(!held.is_same_as(&anew), "{change}");
    }
    assert!(!held.is_same_as(&of(&results[..1])));
    let other = Allocation {
        uid: "other".to_owned(),
        ..held.clone()
    };
    assert!(!held.is_same_as(&other));
}

/// The claim asks for these amounts, by a class whose name says nothing.
fn asking(amounts: &Value) -> ResourceClaim {
    let mut claim = claim(&[capped("1Mi", "1")], &[]);
    let request = json!({"name": "gpu", "exactly": {
        "deviceClassName": "gpu-small", "capacity": {"requests": amounts},
    }});
    claim.spec = serde_json::from_value(json!({"devices": {"requests": [request]}})).unwrap();
    claim
}

#[test]
fn an_amount_that_the_scheduler_rounded_up_from_nothing_is_refused() {
    for (amounts, expected) in [
        (
            json!({"memory": "0"}),
            "capacity.requests[memory] is 0, must be at least 1Mi",
        ),
        (
            json!({"memory": "20"}),
            "is 20, must be at least 1Mi: write the unit, for example 20Gi",
        ),
        (
            json!({"memory": "8192"}),
            "write the unit, for example 8192Mi",
        ),
        (
            json!({"memory": "1500m"}),
            "is 1500m, must be a whole number",
        ),
        (
            json!({"cores": "0"}),
            "capacity.requests[cores] is 0, must be a percentage, 1 to 100",
        ),
        (json!({"cores": "1k"}), "is 1000, must be a percentage"),
        (json!({"cores": "-5"}), "is -5, must be a whole number"),
    ] {
        let text = refusal(&asking(&amounts));
        assert!(
            text.contains("request gpu, device ") && text.contains(expected),
            "{amounts}: {text}"
        );
    }
    for amounts in [json!({"memory": "1Mi"}), json!({"cores": "100"}), json!({})] {
        read(&asking(&amounts)).unwrap();
    }
    // An alternative has amounts of its own.
    let mut claim = claim(
        &[with(capped("1Mi", "1"), &json!({"request": "gpu/small"}))],
        &[],
    );
    let of = |name: &str, memory: &str| {
        json!({
            "name": name, "deviceClassName": "gpu-small", "capacity": {"requests": {"memory": memory}},
        })
    };
    let mut give = |large: &str, small: &str| {
        let request =
            json!({"name": "gpu", "firstAvailable": [of("large", large), of("small", small)]});
        claim.spec = serde_json::from_value(json!({"devices": {"requests": [request]}})).unwrap();
        read(&claim)
    };
    give("0", "1Gi").unwrap();
    assert!(give("1Gi", "0").unwrap_err().contains("gpu/small"));
    // Who observes gets no share.
    let mut observing = asking(&json!({"memory": "0"}));
    let results = observing
        .status
        .as_mut()
        .unwrap()
        .allocation
        .as_mut()
        .unwrap();
    let devices = results.devices.as_mut().unwrap().results.as_mut().unwrap();
    devices[0].admin_access = Some(true);
    read(&observing).unwrap();
}
