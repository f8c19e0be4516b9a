//! Shares of a GPU whose memory is oversubscribed.

use super::*;

fn share(percent: u32, memory: &str) -> Value {
    let device = format!("gpu-00000000-capped-{percent}");
    with(capped(memory, "10"), &json!({"device": device}))
}

#[test]
fn a_share_has_a_part_of_the_gpu_and_an_account_of_it() {
    let plan = prepared("a", &[share(250, "100Gi")], &[]);
    let key = "uid-of-a-gpu-0".to_owned();
    let cap = Cap::Share {
        memory: 100 << 30,
        resident: Some(40 << 30),
        cores: 10,
        mode: ComputeMode::Strict,
        priority: Priority::Normal,
        context_memory: 512 << 20,
        mps: false,
    };
    assert_eq!(
        (plan.devices[0].tier, plan.devices[0].cap),
        (Tier::Capped, cap)
    );
    assert_eq!(cap.on_gpu(), 40 << 30);
    let account = |account| Step::CreateAccountPage {
        key: key.clone(),
        account,
    };
    assert_eq!(
        plan.steps,
        [
            Step::WriteCapPage {
                key: key.clone(),
                gpu_uuid: gpu(0).uuid,
                cap,
            },
            account(Account::Memory),
            account(Account::Resident),
            Step::WriteCdiSpec {},
        ]
    );
    let undone = |account| Undo::RemoveAccountPage {
        key: key.clone(),
        account,
    };
    assert_eq!(
        plan.undo()[1..3],
        [undone(Account::Resident), undone(Account::Memory)]
    );
    // Another release gets the same plan.
    let json = serde_json::to_value(&plan).unwrap();
    assert_eq!(
        serde_json::from_value::<PreparationPlan>(json).unwrap(),
        plan
    );
}

#[test]
fn a_share_without_oversubscribed_memory_is_written_as_before() {
    let plan = prepared("a", &[capped("20Gi", "10")], &[]);
    let text = serde_json::to_string(&plan).unwrap();
    assert!(
        !text.contains("resident") && !text.contains(r#""account""#),
        "{text}"
    );
}

#[test]
fn parts_of_the_gpu_add_up_to_the_gpu_at_most() {
    // 79.06 GiB of the GPU.
    let held = prepared("held", &[share(200, "100Gi")], &[]);
    let held = std::slice::from_ref(&held);
    prepared("b", &[share(200, "58Gi")], held);
    let error = refusal(&[share(200, "59Gi")], held);
    assert!(
        error.contains("memory would add up to 81408Mi of 80959Mi"),
        "{error}"
    );
    // What a scheduler that ignores counters might allocate.
    prepared("b", &[capped("29Gi", "10")], held);
    let error = refusal(&[capped("30Gi", "10")], held);
    assert!(error.contains("memory would add up to 80Gi of"), "{error}");
    let error = refusal(&[share(200, "160Gi")], &[]);
    assert!(error.contains("the share's memory is 80Gi"), "{error}");
}
