//! The model of a cluster whose slices the driver's planner made.

use tranche_api::Tier::{self, Capped, Concurrent, Exclusive, Partition, Timeshared};

use crate::testing::{self, World, busy, part, uuid};
use crate::usage::{PartUsed, Usage, Used};

use super::*;

const GI: u64 = 1 << 30;

fn model(world: &World) -> Model {
    Model::new(&world.snapshot(), &Err("nobody serves it".into()))
}

fn gpu<'a>(model: &'a Model, uuid: &str) -> &'a Gpu {
    let mut gpus = model.gpus();
    gpus.find(|(_, gpu)| gpu.uuid == uuid).unwrap().1
}

#[test]
fn gpus_have_their_tier_and_tenants() {
    let model = model(&busy());
    let shared = gpu(&model, &uuid('a', 0));
    assert_eq!(shared.tier, Some(Tier::Capped));
    let tenants: Vec<_> = shared
        .tenants()
        .map(|it| (it.claim.as_str(), it.device.memory, it.device.cores))
        .collect();
    assert_eq!(
        tenants,
        [
            ("notebook", Some(20 * GI), Some(25)),
            ("training", Some(40 * GI), Some(50))
        ]
    );
    let Room::Shares(room) = &shared.room else {
        panic!("{:?}", shared.room)
    };
    assert_eq!(room.memory - room.free_memory, 60 * GI);
    assert_eq!(
        (room.free_cores, room.free_places, room.stranded_memory),
        (25, 14, 0)
    );

    let divided = gpu(&model, &uuid('a', 1));
    assert_eq!(divided.tier, Some(Tier::Partition));
    let Room::Slices(room) = &divided.room else {
        panic!("{:?}", divided.room)
    };
    assert_eq!((room.free_compute, room.stranded_compute), (1, 1));
    assert_eq!((room.free_memory, room.stranded_memory), (0, 0));
    assert!(room.fits.is_empty());
    let profiles: Vec<_> = divided
        .held
        .iter()
        .map(|it| it.profile.as_deref())
        .collect();
    assert_eq!(profiles, [Some("3g.40gb"), Some("3g.40gb")]);

    let whole = gpu(&model, &uuid('b', 0));
    assert_eq!(
        (whole.tier, &whole.room),
        (Some(Tier::Exclusive), &Room::Nothing)
    );
    assert_eq!(whole.product, "Tesla T4");
}

#[test]
fn a_gpu_without_claims_is_free_in_all_its_tiers() {
    let model = model(&World::new());
    let free = gpu(&model, &uuid('a', 0));
    assert_eq!((free.tier, &free.room), (None, &Room::All));
    assert_eq!(
        free.offered,
        [Exclusive, Partition, Capped, Concurrent, Timeshared]
    );
    assert_eq!(
        gpu(&model, &uuid('b', 0)).offered,
        [Exclusive, Capped, Concurrent, Timeshared]
    );
}

#[test]
fn a_waiting_claim_says_what_it_wants() {
    let model = model(&busy());
    let waiting = model.claims.iter().find(|it| it.name == "waits").unwrap();
    assert_eq!(waiting.state, State::Waiting);
    let [want] = &waiting.wants[..] else {
        panic!("{waiting:?}")
    };
    assert_eq!(
        (want.class.as_str(), want.memory, want.cores),
        ("capped.gpu.tranche.dev", Some(20 * GI), Some(25))
    );
}

#[test]
fn without_gpu_nodes_the_slices_tell_of_gpus() {
    let mut snapshot = busy().snapshot();
    let full = Model::new(&snapshot, &Err(String::new()));
    snapshot.gpu_nodes.clear();
    let model = Model::new(&snapshot, &Err(String::new()));
    let names: Vec<_> = model.nodes.iter().map(|node| node.name.as_str()).collect();
    assert_eq!(names, ["node-a", "node-b"]);
    for ((_, less), (_, more)) in model.gpus().zip(full.gpus()) {
        assert_eq!(
            (&less.uuid, &less.product, less.tier),
            (&more.uuid, &more.product, more.tier)
        );
        assert_eq!((less.memory, &less.held), (more.memory, &more.held));
    }
    // Only the GpuNode says how MIG divides a GPU.
    assert_eq!(gpu(&model, &uuid('a', 1)).room, Room::Unknown);
}

#[test]
fn the_use_is_that_of_the_claims_device() {
    let world = busy();
    let used = |memory| Used {
        memory,
        ..Used::default()
    };
    let of_pod = [("notebook".to_owned(), used(1))].into();
    let notebook = PartUsed {
        all: used(2),
        pods: of_pod,
    };
    let key = part("uid-team-a-notebook", "gpu-a0000000-capped");
    let usage = Usage {
        gpus: [(testing::gpu('a', 0), used(3))].into(),
        parts: [(key, notebook)].into(),
        ..Usage::default()
    };
    let model = Model::new(&world.snapshot(), &Ok(usage));
    let shared = gpu(&model, &uuid('a', 0));
    assert_eq!(shared.used, Some(used(3)));
    let of_tenants: Vec<_> = shared.tenants().map(|it| it.used).collect();
    assert_eq!(of_tenants, [Some(used(2)), None]);
    assert_eq!(model.usage_unknown, None);
    // The pod of a claim with one pod also gets the use that no container is known for.
    let notebook = shared.tenants().next().unwrap();
    assert_eq!(notebook.used_by("notebook"), Some(used(2)));
    let mut two = notebook.clone();
    two.pods.push("second".into());
    two.used_by_pod = [("notebook".to_owned(), used(1))].into();
    assert_eq!(two.used_by("notebook"), Some(used(1)));
    assert_eq!(two.used_by("second"), None);
}

#[test]
fn an_old_generation_of_a_pool_does_not_count() {
    let mut snapshot = busy().snapshot();
    for slice in snapshot
        .slices
        .iter_mut()
        .filter(|it| it.spec.pool.name == "node-a/gpu")
    {
        slice.spec.pool.generation = 2;
    }
    let mut old = snapshot
        .slices
        .iter()
        .find(|it| it.spec.devices.is_some())
        .unwrap()
        .clone();
    old.spec.pool.generation = 1;
    if let Some(device) = old.spec.devices.iter_mut().flatten().next() {
        device.name = "gpu-a0000007-capped".into();
    }
    snapshot.slices.push(old);
    let devices = Devices::read(&snapshot.slices);
    assert!(devices.get("node-a/gpu", "gpu-a0000000-capped").is_some());
    assert!(devices.get("node-a/gpu", "gpu-a0000007-capped").is_none());
}
