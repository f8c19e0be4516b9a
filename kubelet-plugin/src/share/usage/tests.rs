//! The usage of a node with scripted GPUs, from the ledger, the kubelet's list and the watchdog's owners.

use tranche_api::usage::{GpuUsage, Peak, ShareUsage};
use tranche_driver::usage::Owner;
use tranche_node::health::XidCounts;
use tranche_node::nvml::ProcessMemory;

use super::*;
use crate::share::last_findings::Ownership;
use crate::testing::{KubeletList, NODE, Plugin, World, capped, claim, claim_ref, whole};

const GIB: u64 = 1 << 30;

fn usage_of(world: &World, plugin: &Plugin, kubelet: &KubeletList) -> Arc<Usage> {
    let parts = UsageParts {
        node: NODE.into(),
        ledger: Arc::clone(plugin.preparer.ledger()),
        layout: world.layout.clone(),
        state: plugin.driver.subscribe(),
        last_findings: Arc::clone(&plugin.last_findings),
        kubelet: Arc::new(kubelet.clone()),
    };
    let reader = Reader::new(Box::new(world.driver()), XidCounts::default());
    Arc::new(Usage::new(parts, reader))
}

/// A GPU now, whatever was read before.
fn read(usage: &Usage, uuid: &str) -> GpuUsage {
    let now = usage.read(&mut usage.lock());
    assert_eq!((&*now.node, now.gpus.len()), (NODE, 2));
    now.gpus.into_iter().find(|gpu| gpu.uuid == uuid).unwrap()
}

fn owner(key: &str) -> Owner {
    Owner::Claims {
        keys: [key.to_owned()].into(),
        pod_uid: None,
        container: None,
    }
}

#[tokio::test]
async fn each_claim_has_its_processes_memory_under_the_kubelets_names() {
    let world = World::new();
    let plugin = world.start();
    world.api.put(claim("a", &[capped("gpu", 0, "20Gi", 25)]));
    world.api.put(claim("b", &[whole("gpu", 1)]));
    let mut records = Vec::new();
    for name in ["a", "b"] {
        records.push(plugin.preparer.prepare(&claim_ref(name)).await.unwrap());
    }
    let kubelet = KubeletList::of(&records);
    let usage = usage_of(&world, &plugin, &kubelet);
    usage.list().await;
    let [first, second] = [0, 1].map(|nth: usize| records[nth].plan.devices[0].clone());
    for (uuid, pids) in [(&first.gpu_uuid, vec![7, 8]), (&second.gpu_uuid, vec![9])] {
        let process = |pid| ProcessMemory {
            pid,
            bytes: Some(GIB * u64::from(pid)),
        };
        world.mig.run(uuid, pids.into_iter().map(process).collect());
    }
    let owners = [
        (7, owner(&first.key)),
        (8, Owner::Foreign),
        (9, owner(&second.key)),
    ];
    plugin.last_findings.set_ownership(Ownership {
        owners: owners.into(),
        peaks: [(&first, 9), (&second, 8)]
            .map(|(device, gib)| {
                let bytes = gib * GIB;
                let watched_seconds = 60;
                (
                    device.key.clone(),
                    Peak {
                        bytes,
                        watched_seconds,
                    },
                )
            })
            .into(),
        ..Ownership::default()
    });
    let shared = read(&usage, &first.gpu_uuid);
    let share = &shared.shares[0];
    assert_eq!(share.claim.name, "a");
    assert_eq!(share.memory.used, 7 * GIB);
    assert_eq!(share.memory.allocated, Some(20 * GIB));
    assert_eq!(share.memory.account, Some(0));
    let peak = |share: &ShareUsage| share.memory.peak.map(|it| (it.bytes, it.watched_seconds));
    assert_eq!(peak(share), Some((9 * GIB, 60)));
    assert_eq!(share.groups[0].pod.as_deref(), Some("pod-of-a"));
    assert_eq!(share.groups[0].container.as_deref(), Some("main"));
    assert_eq!(shared.remainder.foreign_processes, 1);
    assert_eq!(shared.remainder.used, 8 * GIB);
    let alone = read(&usage, &second.gpu_uuid);
    assert_eq!(alone.shares[0].memory.used, 9 * GIB);
    assert_eq!(
        peak(&alone.shares[0]),
        Some((9 * GIB, 60)),
        "it uses more than in any sample"
    );
    assert_eq!(alone.shares[0].memory.free, alone.memory.map(|it| it.free));

    // The kubelet does not know the pod any more, twice: it was deleted by force.
    kubelet.lists(&records[1..]);
    usage.list().await;
    assert_eq!(read(&usage, &first.gpu_uuid).remainder.zombies, []);
    usage.list().await;
    let gpu = read(&usage, &first.gpu_uuid);
    let [zombie] = &gpu.remainder.zombies[..] else {
        panic!("{gpu:?}")
    };
    assert_eq!(zombie.claim.name, "a");
    assert_eq!(zombie.pod.as_deref(), Some("pod-of-a"));
    assert_eq!((zombie.used, zombie.processes), (7 * GIB, 1));
    assert_eq!(gpu.shares[0].memory.used, 0);
    // A kubelet that does not answer does not say that a pod is gone.
    kubelet.stop_answering();
    usage.list().await;
    assert_eq!(read(&usage, &first.gpu_uuid).remainder.zombies, []);
}

#[tokio::test]
async fn without_a_claim_nvml_is_open_briefly_and_reports_all_gpus() {
    let world = World::new();
    let plugin = world.start();
    let usage = usage_of(&world, &plugin, &KubeletList::default());
    let process = ProcessMemory {
        pid: 7,
        bytes: Some(GIB),
    };
    let uuid = world.ready.inventory.gpus[0].uuid.clone();
    world.mig.run(&uuid, vec![process]);
    let first = usage.get();
    assert_eq!(first.gpus.len(), 2);
    assert_eq!(first.gpus[0].remainder.foreign_used, GIB);
    assert!(!usage.lock().reader.is_open());
    // A second reader within a minute gets the same.
    assert!(Arc::ptr_eq(&first, &usage.get()));
    // If the driver is unloaded, the GPUs have no values, but a reason.
    world.mig.unload(true);
    usage.lock().last = None;
    let without = usage.get();
    let is_silent = |gpu: &GpuUsage| gpu.problem.is_some() && gpu.memory.is_none();
    assert!(without.gpus.iter().all(is_silent));
}
