mod oversubscribed;
mod priority;
mod shared_partition;

use proptest::prelude::*;
use serde_json::{Value, json};
use tranche_api::gpu_node::{Gpu, Inventory};

use super::*;
use crate::cdi::Capability;
use crate::testing::{allocation, capped, gpu, inventory, plain, with};

fn two_gpus() -> Inventory {
    inventory(vec![gpu(0), gpu(1)])
}

fn prepared(name: &str, results: &[Value], held: &[PreparationPlan]) -> PreparationPlan {
    plan(&allocation(name, results), &two_gpus(), held).unwrap_or_else(|error| panic!("{error}"))
}

fn refusal(results: &[Value], held: &[PreparationPlan]) -> String {
    plan(&allocation("new", results), &two_gpus(), held)
        .expect_err("refused")
        .to_string()
}

fn timeshared(minor: u32) -> Value {
    with(
        plain(&format!("gpu-{minor:08x}-timeshared")),
        &json!({"shareID": "s"}),
    )
}

fn concurrent(minor: u32, memory: &str, threads: &str) -> Value {
    let device = format!("gpu-{minor:08x}-concurrent");
    with(capped(memory, threads), &json!({"device": device}))
}

fn with_mig() -> Inventory {
    let mut inventory = two_gpus();
    inventory.mig_geometries = vec![crate::mig::tables::h100(&[&gpu(0).uuid])];
    inventory
}

fn admin(device: &str) -> Value {
    with(plain(device), &json!({"adminAccess": true}))
}

#[test]
fn a_share_gets_pages_and_then_its_spec() {
    let plan = prepared("a", &[capped("20Gi", "25")], &[]);
    let key = "uid-of-a-gpu-0".to_owned();
    let cap = Cap::Share {
        memory: 20 << 30,
        resident: None,
        cores: 25,
        mode: ComputeMode::Strict,
        priority: Priority::Normal,
        context_memory: 512 << 20,
        mps: false,
    };
    assert_eq!(
        plan.devices,
        [PreparedDevice {
            key: key.clone(),
            request: "gpu".to_owned(),
            pool: "node-a/gpu".to_owned(),
            device: "gpu-00000000-capped".to_owned(),
            share_id: Some("5a1f3a5c-7a80-4d6f-8f2e-111111111111".to_owned()),
            tier: Tier::Capped,
            admin_access: false,
            gpu_uuid: gpu(0).uuid,
            minor: 0,
            pci_bus_id: "0000:00:00.0".to_owned(),
            partition: None,
            vfio: None,
            time_slice: None,
            cap,
            cdi_ids: vec![
                "gpu.tranche.dev/claim=uid-of-a-gpu-0".to_owned(),
                cdi::DriverDevice::Capped { pages: PAGES }.id(),
            ],
        }]
    );
    assert_eq!(
        plan.steps,
        [
            Step::WriteCapPage {
                key: key.clone(),
                gpu_uuid: gpu(0).uuid,
                cap,
            },
            Step::CreateAccountPage {
                key: key.clone(),
                account: Account::Memory,
            },
            Step::WriteCdiSpec {},
        ]
    );
    assert_eq!(
        plan.undo(),
        [
            Undo::RemoveCdiSpec,
            Undo::RemoveAccountPage {
                key: key.clone(),
                account: Account::Memory,
            },
            Undo::RemoveCapPage { key },
        ]
    );
}

#[test]
fn a_concurrent_share_has_its_caps_by_mps_and_the_shim() {
    let config = crate::testing::config("FromClaim", &[], &json!({"mode": "workConserving"}));
    let claim = crate::testing::claim(&[concurrent(0, "20Gi", "25")], &[config]);
    let allocation = Allocation::from_claim(&claim, "node-a/gpu").unwrap();
    let plan = plan(&allocation, &two_gpus(), []).unwrap();
    let device = &plan.devices[0];
    let cap = Cap::Share {
        memory: 20 << 30,
        resident: None,
        cores: 25,
        mode: ComputeMode::Strict,
        priority: Priority::Normal,
        context_memory: 512 << 20,
        mps: true,
    };
    assert_eq!((device.tier, device.cap), (Tier::Concurrent, cap));
    assert_eq!(
        device.cdi_ids[1],
        cdi::DriverDevice::Capped { pages: PAGES }.id()
    );
    assert_eq!(plan.steps.len(), 3, "pages, account and spec");
    assert_eq!(plan.changed_gpus(), BTreeSet::from([&*gpu(0).uuid]));
    let needs_mps = |number| held_of(&gpu(number).uuid, [&plan]).mps;
    assert!(needs_mps(0) && !needs_mps(1));
    let other = prepared("b", &[capped("1Gi", "1")], &[]);
    assert!(held_of(&gpu(0).uuid, [&other, &plan]).mps);
    assert!(!held_of(&gpu(0).uuid, [&other]).mps);
}

/// What an allocator that ignores counters might allocate.
#[test]
fn a_concurrent_share_goes_with_no_other_tier() {
    let held = prepared("held", &[concurrent(0, "20Gi", "60")], &[]);
    let held = std::slice::from_ref(&held);
    for other in [
        capped("1Gi", "1"),
        timeshared(0),
        plain("gpu-00000000"),
        plain("gpu-00000000-mig-1g10gb-6"),
    ] {
        let error = match plan(&allocation("new", &[other]), &with_mig(), held) {
            Err(error) => error.to_string(),
            Ok(plan) => panic!("{plan:?}"),
        };
        assert!(
            error.contains("held by claim team-a/held in the tier concurrent"),
            "{error}"
        );
    }
    prepared("b", &[concurrent(0, "20Gi", "40")], held);
    prepared("b", &[admin("gpu-00000000-concurrent")], held);
    let error = refusal(&[concurrent(0, "20Gi", "41")], held);
    assert!(error.contains("101 of 100 percent"), "{error}");
    let error = refusal(&[concurrent(0, "70Gi", "1")], held);
    assert!(error.contains("memory would add up to 90Gi"), "{error}");
}

#[test]
fn an_uncapped_device_gets_an_uncapped_page_and_the_driver() {
    for result in [
        plain("gpu-00000001"),
        timeshared(1),
        admin("gpu-00000001-capped"),
    ] {
        let plan = prepared("a", &[result], &[]);
        assert_eq!(plan.devices[0].cap, Cap::None {});
        assert_eq!(plan.devices[0].cdi_ids[1], "gpu.tranche.dev/driver=full");
        assert!(matches!(
            plan.steps[..],
            [
                Step::WriteCapPage {
                    cap: Cap::None {},
                    ..
                },
                Step::WriteCdiSpec {}
            ]
        ));
    }
}

#[test]
fn keys_differ_within_a_claim_and_between_claims() {
    let both = with(capped("1Gi", "1"), &json!({"request": "gpu/small"}));
    let plan = prepared("a", &[capped("1Gi", "1"), both.clone()], &[]);
    let other = prepared("b", &[both], &[]);
    let keys: Vec<_> = plan
        .devices
        .iter()
        .chain(&other.devices)
        .map(|d| &*d.key)
        .collect();
    assert_eq!(keys, ["uid-of-a-gpu-0", "uid-of-a-gpu-1", "uid-of-b-gpu-0"]);
    assert!(plan.devices.iter().all(|device| device.request == "gpu"));
}

#[test]
fn a_gpu_that_is_gone_is_named_with_those_that_are_there() {
    assert_eq!(
        refusal(&[plain("gpu-00000007")], &[]),
        "claim team-a/new, request gpu, device gpu-00000007: GPU with a UUID that begins with 00000007 is gone, the driver sees GPU-00000000-0000-0000-0000-000000000000, GPU-00000001-0000-0000-0000-000000000001: see the kernel log (`dmesg`) for its Xid, or delete the claim's pods to have another GPU allocated"
    );
    let error = plan(
        &allocation("new", &[plain("gpu-00000000")]),
        &inventory(vec![]),
        [],
    )
    .unwrap_err();
    assert!(
        error.to_string().contains("the driver sees no GPU"),
        "{error}"
    );
}

#[test]
fn a_name_that_two_gpus_fit_is_refused() {
    let twin = Gpu {
        uuid: "GPU-00000000-0000-0000-0000-0000000000ff".to_owned(),
        ..gpu(1)
    };
    let both = inventory(vec![gpu(0), twin]);
    let error = plan(&allocation("new", &[plain("gpu-00000000")]), &both, []).unwrap_err();
    assert_eq!(
        error.to_string(),
        "claim team-a/new, request gpu, device gpu-00000000: the UUIDs of GPU-00000000-0000-0000-0000-000000000000, GPU-00000000-0000-0000-0000-0000000000ff begin alike, so the name does not tell which of them was allocated: delete the claim's pods to have a device allocated by its longer name"
    );
    let longer = plain("gpu-000000000000000000000000000000ff");
    let plan = plan(&allocation("new", &[longer]), &both, []).unwrap();
    assert_eq!(plan.devices[0].minor, 1);
}

#[test]
fn a_plan_finds_its_gpus_again_by_uuid() {
    let before = prepared("a", &[plain("gpu-00000000")], &[]);
    let mut swapped = two_gpus();
    let minors = (swapped.gpus[0].minor, swapped.gpus[1].minor);
    (swapped.gpus[1].minor, swapped.gpus[0].minor) = minors;
    swapped.gpus[0].pci_bus_id = "0000:ff:00.0".to_owned();
    let after = before.located(&swapped).unwrap();
    assert_eq!(after.devices[0].minor, 1);
    assert_eq!(after.devices[0].pci_bus_id, "0000:ff:00.0");
    assert_eq!(after.devices[0].gpu_uuid, gpu(0).uuid);
    assert_eq!(after.steps, before.steps);

    let replaced = inventory(vec![gpu(1)]);
    assert_eq!(
        before.located(&replaced).unwrap_err().to_string(),
        "claim team-a/a, request gpu, device gpu-00000000: GPU GPU-00000000-0000-0000-0000-000000000000 is gone, the driver sees GPU-00000001-0000-0000-0000-000000000001: see the kernel log (`dmesg`) for its Xid, or delete the claim's pods to have another GPU allocated"
    );
}

#[test]
fn a_share_larger_than_the_gpu_is_refused() {
    let most = (81_559_u64 - 600) << 20;
    let fits = capped(&most.to_string(), "1");
    assert_eq!(prepared("a", &[fits], &[]).devices.len(), 1);
    assert_eq!(
        refusal(&[capped(&(most + 1).to_string(), "1")], &[]),
        "claim team-a/new, request gpu, device gpu-00000000-capped: the share's memory is 84891664385, but GPU GPU-00000000-0000-0000-0000-000000000000 has only 80959Mi"
    );
}

#[test]
fn a_description_that_makes_no_sense_is_refused() {
    let mut strange = gpu(0);
    strange.reserved_memory = "-1".parse().unwrap();
    let error = plan(
        &allocation("new", &[plain("gpu-00000000")]),
        &inventory(vec![strange]),
        [],
    );
    assert_eq!(
        error.unwrap_err().to_string(),
        "claim team-a/new, request gpu, device gpu-00000000: GPU GPU-00000000-0000-0000-0000-000000000000: reservedMemory -1 is negative"
    );
}

#[test]
fn a_request_that_is_no_name_is_refused() {
    let result = with(plain("gpu-00000000"), &json!({"request": "a b"}));
    let error = refusal(&[result], &[]);
    assert!(
        error.contains(r#""uid-of-new-a b-0" is not a valid CDI device name"#),
        "{error}"
    );
}

#[test]
fn an_exclusive_gpu_goes_with_nothing() {
    let exclusive = prepared("a", &[plain("gpu-00000000")], &[]);
    for result in [plain("gpu-00000000"), capped("1Gi", "1"), timeshared(0)] {
        let error = refusal(&[result], std::slice::from_ref(&exclusive));
        assert!(
            error.ends_with("is held by claim team-a/a in the tier exclusive, and an exclusive device cannot be shared: wait until that claim is released"),
            "{error}"
        );
    }
    let shared = prepared("a", &[capped("1Gi", "1")], &[]);
    let error = refusal(&[plain("gpu-00000000")], &[shared]);
    assert!(
        error.contains(
            "held by claim team-a/a in the tier capped, and an exclusive device cannot be shared"
        ),
        "{error}"
    );
    prepared("b", &[plain("gpu-00000001")], &[exclusive]);
}

#[test]
fn one_gpu_serves_one_tier_at_a_time() {
    let held = [prepared("a", &[capped("1Gi", "1")], &[])];
    let error = refusal(&[timeshared(0)], &held);
    assert!(
        error.ends_with(
            "is held by claim team-a/a in the tier capped: wait until that claim is released"
        ),
        "{error}"
    );
    prepared("b", &[timeshared(1)], &held);
}

#[test]
fn shares_add_up_to_no_more_than_the_gpu() {
    let held = [
        prepared("a", &[capped("40Gi", "50")], &[]),
        prepared("b", &[capped("20Gi", "25")], &[]),
    ];
    prepared("c", &[capped("19Gi", "25")], &held);
    assert_eq!(
        refusal(&[capped("20Gi", "25")], &held),
        "claim team-a/new, request gpu, device gpu-00000000-capped: GPU GPU-00000000-0000-0000-0000-000000000000: the shares' memory would add up to 80Gi of 80959Mi; held by team-a/a, team-a/b"
    );
    assert_eq!(
        refusal(&[capped("1Gi", "26")], &held),
        "claim team-a/new, request gpu, device gpu-00000000-capped: GPU GPU-00000000-0000-0000-0000-000000000000: the shares' cores would add up to 101 of 100 percent; held by team-a/a, team-a/b"
    );
}

#[test]
fn the_last_byte_can_be_had_and_no_more() {
    let most = (81_559_u64 - 600) << 20;
    let held = [prepared("a", &[capped("40Gi", "1")], &[])];
    let rest = most - (40 << 30);
    prepared("b", &[capped(&rest.to_string(), "99")], &held);
    let error = refusal(&[capped(&(rest + 1).to_string(), "1")], &held);
    assert!(
        error.contains("would add up to 84891664385 of 80959Mi"),
        "{error}"
    );
}

#[test]
fn the_devices_of_one_claim_are_checked_against_each_other() {
    let error = refusal(&[plain("gpu-00000000"), capped("1Gi", "1")], &[]);
    assert!(
        error.contains("held by claim team-a/new in the tier exclusive"),
        "{error}"
    );
    let error = refusal(&[capped("40Gi", "1"), capped("40Gi", "1")], &[]);
    assert!(error.contains("would add up to 80Gi"), "{error}");
}

#[test]
fn admin_access_holds_nothing_and_minds_nobody() {
    let exclusive = prepared("a", &[plain("gpu-00000000")], &[]);
    let monitor = prepared(
        "b",
        &[admin("gpu-00000000")],
        std::slice::from_ref(&exclusive),
    );
    prepared("c", &[admin("gpu-00000000-capped")], &[exclusive]);
    prepared("d", &[plain("gpu-00000000")], &[monitor]);
}

#[test]
fn a_claims_own_earlier_plan_is_no_conflict() {
    let earlier = prepared("a", &[plain("gpu-00000000")], &[]);
    assert_eq!(
        prepared(
            "a",
            &[plain("gpu-00000000")],
            std::slice::from_ref(&earlier)
        ),
        earlier
    );
}

/// Results on two GPUs in all tiers; many of them conflict.
fn any_results() -> impl Strategy<Value = Vec<Value>> {
    let one =
        (0..3_u32, 0..5_u32, 1..90_u64, 1..=100_u8).prop_map(
            |(minor, kind, gib, cores)| match kind {
                0 => plain(&format!("gpu-{minor:08x}")),
                1 => timeshared(minor),
                2 => admin(&format!("gpu-{minor:08x}-capped")),
                3 => with(
                    capped(&format!("{}Gi", 2 * gib), &cores.to_string()),
                    &json!({"device": format!("gpu-{minor:08x}-capped-{}", 150 + cores)}),
                ),
                _ => with(
                    capped(&format!("{gib}Gi"), &cores.to_string()),
                    &json!({"device": format!("gpu-{minor:08x}-capped")}),
                ),
            },
        );
    prop::collection::vec(one, 1..4)
}

proptest! {
    /// For all requests of the scheduler in any order, the claims that are prepared at the same
    /// time do not conflict.
    #[test]
    fn no_order_of_claims_breaks_a_gpu(claims in prop::collection::vec(any_results(), 1..12)) {
        let inventory = two_gpus();
        let mut held: Vec<PreparationPlan> = Vec::new();
        for (index, results) in claims.iter().enumerate() {
            if let Ok(plan) = plan(&allocation(&index.to_string(), results), &inventory, &held) {
                held.push(plan);
            }
        }
        for gpu in &inventory.gpus {
            let on_gpu: Vec<&PreparedDevice> = held
                .iter()
                .flat_map(|plan| &plan.devices)
                .filter(|device| device.gpu_uuid == gpu.uuid && !device.admin_access)
                .collect();
            let tiers: std::collections::BTreeSet<_> = on_gpu.iter().map(|d| d.tier).collect();
            prop_assert!(tiers.len() <= 1);
            if tiers.contains(&Tier::Exclusive) {
                prop_assert_eq!(on_gpu.len(), 1);
            }
            let caps = on_gpu.iter().filter_map(|device| match device.cap {
                Cap::Share { cores, .. } => Some((device.cap.on_gpu(), u64::from(cores))),
                Cap::None {} => None,
            });
            let (memory, cores) = caps.fold((0, 0), |sum, cap| (sum.0 + cap.0, sum.1 + cap.1));
            prop_assert!(memory <= available_memory(gpu).unwrap());
            prop_assert!(cores <= 100);
        }
        let keys: Vec<_> = held.iter().flat_map(|plan| &plan.devices).map(|d| &d.key).collect();
        let unique: std::collections::BTreeSet<_> = keys.iter().collect();
        prop_assert_eq!(unique.len(), keys.len());
    }
}

#[test]
fn named_libraries_precede_the_shim_and_only_on_capped_devices() {
    let allocation = allocation("a", &[capped("1Gi", "10"), plain("gpu-00000001")]);
    let inventory = inventory(vec![gpu(0), gpu(1)]);
    let before = plan(&allocation, &inventory, []).unwrap();
    let video = BTreeSet::from([Capability::Video, Capability::OpenCl]);
    let own = gpu(0).uuid;
    let after = before.clone().with_capabilities(|gpu| {
        if gpu == own {
            video.clone()
        } else {
            BTreeSet::from([Capability::Ngx])
        }
    });
    let ids = |plan: &PreparationPlan, nth: usize| plan.devices[nth].cdi_ids.clone();
    let (claim, shim) = (&ids(&before, 0)[0], &ids(&before, 0)[1]);
    assert_eq!(
        ids(&after, 0),
        [
            claim,
            "gpu.tranche.dev/driver=video",
            "gpu.tranche.dev/driver=opencl",
            shim
        ]
    );
    assert_eq!(ids(&after, 1), ids(&before, 1));
}
