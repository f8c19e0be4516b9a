//! GPUs of claims for virtual machines, through the kubelet's calls.

use std::time::Duration;

use tokio::time::Instant;
use tranche_driver::vfio::User;
use tranche_node::nvml::{Driver as _, Gated};

use super::*;

const OTHER: &str = "GPU-00000001-0000-0000-0000-000000000001";

fn one_at_vfio(name: &str, gpu: u32) -> serde_json::Value {
    claim(name, &[passthrough("x", gpu)])
}

#[tokio::test]
async fn a_gpu_is_bound_to_vfio_for_its_claim_and_goes_back() {
    let world = World::new();
    let plugin = world.start();
    world.api.put(one_at_vfio("a", 0));
    let record = plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
    let device = &record.plan.devices[0];
    let group = device.vfio.as_ref().unwrap().group.as_ref().unwrap();
    assert_eq!(group.functions, ["0000:1b:00.0", "0000:1b:00.1"]);
    assert_eq!(world.pci.changed().len(), 2);
    assert!(world.mig.mig_state(GPU).is_err(), "the driver knows it");
    assert!(world.mig.mig_state(OTHER).is_ok(), "the other GPU went too");

    let devices = world.cdi_devices("uid-of-a");
    let edits = &devices[0]["containerEdits"];
    let nodes: Vec<_> = edits["deviceNodes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|node| node["path"].as_str().unwrap())
        .collect();
    assert_eq!(
        nodes,
        ["/dev/vfio/vfio", "/dev/vfio/27"],
        "and none of NVIDIA's"
    );
    let ids = &device.cdi_ids;
    assert_eq!(ids.len(), 1, "no library of the driver: {ids:?}");

    // A second call of the kubelet changes nothing.
    let again = plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
    assert_eq!(again.plan, record.plan);
    plugin.preparer.unprepare(&claim_ref("a")).await.unwrap();
    nothing_is_left(&world, "unprepared");
}

/// An NVML that stays open would not see the GPU, nor would any other that this process opens beside it.
#[tokio::test]
async fn a_gpu_that_comes_back_waits_until_nvml_is_closed() {
    let world = World::new();
    let plugin = world.start();
    world.api.put(one_at_vfio("a", 0));
    plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
    let kept = Gated::new(Box::new(world.mig.clone()), plugin.gate.clone());
    let (open, before) = (kept.open().unwrap(), kept.traces());
    let closes = tokio::task::spawn_blocking(move || {
        while kept.traces() == before {
            std::thread::yield_now();
        }
        // It is noticed a while later.
        std::thread::sleep(Duration::from_millis(100));
        drop(open);
    });
    plugin.preparer.unprepare(&claim_ref("a")).await.unwrap();
    assert!(plugin.gate.shut().wait_for_closed(Duration::ZERO));
    closes.await.unwrap();
}

#[tokio::test(start_paused = true)]
async fn a_gpu_is_refused_while_a_program_has_it_open() {
    let world = World::new();
    let plugin = world.start();
    world.api.put(one_at_vfio("a", 0));
    world.pci.is_open(Some("python3"));
    let error = refusal(&plugin, "a").await;
    assert!(
        error.contains("the process 4711 (\"python3\") has the GPU 0000:1b:00.0 open"),
        "{error}"
    );
    nothing_is_left(&world, "refused");
    // Only an administrator can end the persistence daemon.
    world.pci.is_open(Some(User::PERSISTENCE_DAEMON));
    let start = Instant::now();
    let error = refusal(&plugin, "a").await;
    assert!(
        error.contains("nvidia-smi -pm 0 -i 0000:1b:00.0"),
        "{error}"
    );
    assert!(start.elapsed() < Duration::from_secs(1));
    world.pci.is_open(None);
    plugin.preparer.prepare(&claim_ref("a")).await.unwrap();

    // The virtual machine has it open: the claim stays until its end.
    world.pci.is_open(Some("qemu-system-x86"));
    let error = plugin
        .preparer
        .unprepare(&claim_ref("a"))
        .await
        .unwrap_err();
    assert!(error.to_string().contains("qemu-system-x86"), "{error}");
    assert_eq!(world.pci.changed().len(), 2);
    world.pci.is_open(None);
    plugin.preparer.unprepare(&claim_ref("a")).await.unwrap();
    nothing_is_left(&world, "unprepared");
}

/// All that other tiers need of the GPU is taken back first.
#[tokio::test(start_paused = true)]
async fn a_gpu_that_was_divided_goes_to_vfio_whole() {
    let world = World::new();
    let plugin = world.start();
    world.api.put(two_partitions());
    plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
    plugin.preparer.unprepare(&claim_ref("a")).await.unwrap();
    world.api.put(one_at_vfio("b", 0));
    plugin.preparer.prepare(&claim_ref("b")).await.unwrap();
    // The other GPU is divided meanwhile, and the shares of a GPU at VFIO are refused.
    world.api.put(claim("c", &[partition("x", 1, "1g10gb-6")]));
    plugin.preparer.prepare(&claim_ref("c")).await.unwrap();
    world.api.put(claim("d", &[partition("x", 0, "1g10gb-6")]));
    let error = refusal(&plugin, "d").await;
    assert!(error.contains("team/b"), "{error}");
    for name in ["b", "c"] {
        plugin.preparer.unprepare(&claim_ref(name)).await.unwrap();
    }
    nothing_is_left(&world, "unprepared");
}

/// After a boot the kernel's own drivers have all functions, and other GPUs have the addresses.
#[tokio::test]
async fn a_boot_ends_it_and_the_claim_gets_the_same_gpu_again() {
    let mut world = World::new();
    world.api.put(one_at_vfio("a", 0));
    world.prepare("a").await;
    world.reboot_in_another_order();
    let plugin = world.start();
    settle(&plugin).await;
    let record = plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
    assert_eq!(record.plan.devices[0].pci_bus_id, "0000:1c:00.0");
    assert!(world.mig.mig_state(GPU).is_err() && world.mig.mig_state(OTHER).is_ok());
    plugin.preparer.unprepare(&claim_ref("a")).await.unwrap();
    nothing_is_left(&world, "unprepared");
}
