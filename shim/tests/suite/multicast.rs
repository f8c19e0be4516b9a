//! Multicast objects: memory is charged while it is bound to one, also after its handle is released.

use tranche_shim_tests::{Driver, Machine, Probe, Share, World};

use crate::cap::{BLOCK, CAP, one_gpu, ready};
use crate::families::reserve;

const DONE: i64 = 0;
const INVALID_VALUE: i64 = 1;
const OUT_OF_MEMORY: i64 = 2;
const BYTES: u64 = 8 * BLOCK;

/// A process on two GPUs with a share of each, and no context.
struct Team {
    world: World,
    shares: [Share; 2],
    /// What the GPUs hold without any allocation.
    idle: [u64; 2],
    probe: Probe,
}

impl Team {
    fn new() -> Self {
        let world = World::new(Driver::Machine(Machine::Simple, 2));
        let gpus: [_; 2] = world.node().gpus().try_into().unwrap();
        let shares =
            [0, 1].map(|nth: usize| world.share(&format!("gpu-{nth}"), &gpus[nth].uuid, Some(CAP)));
        let mut probe = world.probe("name");
        probe.must("init");
        Self {
            world,
            shares,
            idle: gpus.map(|gpu| gpu.used),
            probe,
        }
    }

    /// The GPUs hold what the accounts say, and that is so much.
    fn holds(&self, bytes: [u64; 2]) {
        let gpus = self.world.node().gpus();
        let held = [0, 1].map(|nth| gpus[nth].used - self.idle[nth]);
        let used = [0, 1].map(|nth: usize| self.shares[nth].used());
        assert_eq!((held, used), (bytes, bytes));
    }
}

/// Physical memory of a device; its handle.
fn create(probe: &mut Probe, device: u64, bytes: u64) -> u64 {
    probe.must(&format!("set 16 1 {} 0 0", 1 | device << 32));
    probe.get(&format!("cuMemCreate &0 {bytes} &16 0"))
}

/// An object for so many devices; its handle.
fn object(probe: &mut Probe, devices: u64, bytes: u64) -> u64 {
    probe.must(&format!("set 40 {devices} {bytes} 0 0"));
    probe.get("cuMulticastCreate &0 &40")
}

/// An object of both GPUs.
fn object_of_both(probe: &mut Probe) -> u64 {
    let object = object(probe, 2, BYTES);
    for device in 0..2 {
        add(probe, object, device);
    }
    object
}

fn add(probe: &mut Probe, object: u64, device: u64) {
    must(probe, &format!("cuMulticastAddDevice {object} {device}"));
}

fn must(probe: &mut Probe, call: &str) {
    assert_eq!(probe.call(call), DONE, "{call}");
}

fn release(probe: &mut Probe, handle: u64) {
    must(probe, &format!("cuMemRelease {handle}"));
}

#[test]
fn bound_memory_stays_charged_until_it_is_unbound() {
    let mut team = Team::new();
    let probe = &mut team.probe;
    let object = object_of_both(probe);
    team.holds([0, 0]);
    let probe = &mut team.probe;
    for device in 0..2 {
        let memory = create(probe, device, BYTES);
        must(
            probe,
            &format!("cuMulticastBindMem {object} 0 {memory} 0 {BYTES} 0"),
        );
        release(probe, memory);
    }
    team.holds([BYTES, BYTES]);
    // The rest of the cap, and no more.
    let probe = &mut team.probe;
    let rest = create(probe, 0, CAP - BYTES);
    probe.must("set 16 1 1 0 0");
    let more = format!("cuMemCreate &0 {BLOCK} &16 0");
    assert_eq!(probe.call(&more), OUT_OF_MEMORY);
    release(probe, rest);
    must(probe, &format!("cuMulticastUnbind {object} 0 0 {BYTES}"));
    team.holds([0, BYTES]);
    // Unbound twice, and with another size: refused, and nothing is given back.
    let probe = &mut team.probe;
    for wrong in [
        format!("cuMulticastUnbind {object} 0 0 {BYTES}"),
        format!("cuMulticastUnbind {object} 1 0 {BLOCK}"),
    ] {
        assert_eq!(probe.call(&wrong), INVALID_VALUE);
    }
    team.holds([0, BYTES]);
    must(
        &mut team.probe,
        &format!("cuMulticastUnbind {object} 1 0 {BYTES}"),
    );
    team.holds([0, 0]);
    release(&mut team.probe, object);
    team.holds([0, 0]);
}

/// Memory that is bound repeatedly never exceeds the cap.
#[test]
fn repeated_bindings_never_exceed_the_cap() {
    let mut team = Team::new();
    let probe = &mut team.probe;
    let taken = create(probe, 0, CAP - 4 * BYTES);
    let mut bound = 0;
    for _ in 0..10 {
        let object = object_of_both(probe);
        probe.must("set 16 1 1 0 0");
        let code = probe.call(&format!("cuMemCreate &0 {BYTES} &16 0"));
        if code != DONE {
            assert_eq!(code, OUT_OF_MEMORY);
            continue;
        }
        let memory = probe.must("words 0 1").number(0);
        must(
            probe,
            &format!("cuMulticastBindMem {object} 0 {memory} 0 {BYTES} 0"),
        );
        release(probe, memory);
        bound += 1;
    }
    assert_eq!(bound, 4);
    team.holds([CAP, 0]);
    assert!(team.world.node().peak(0) - team.idle[0] <= CAP);
    release(&mut team.probe, taken);
    team.holds([4 * BYTES, 0]);
}

/// The object ends with its last handle and mapping.
#[test]
fn bound_memory_goes_with_the_object() {
    let mut team = Team::new();
    let probe = &mut team.probe;
    let object = object_of_both(probe);
    for device in 0..2 {
        // Bound in two halves.
        for at in [0, BYTES / 2] {
            let memory = create(probe, device, BYTES);
            let half = format!(
                "cuMulticastBindMem {object} {at} {memory} {at} {} 0",
                BYTES / 2
            );
            must(probe, &half);
            release(probe, memory);
        }
    }
    team.holds([2 * BYTES; 2]);
    let probe = &mut team.probe;
    let base = reserve(probe, BYTES);
    must(probe, &format!("cuMemMap {base} {BYTES} 0 {object} 0"));
    let again = probe.get(&format!("cuMemRetainAllocationHandle &0 {base}"));
    release(probe, object);
    release(probe, again);
    team.holds([2 * BYTES; 2]);
    must(&mut team.probe, &format!("cuMemUnmap {base} {BYTES}"));
    team.holds([0, 0]);
}

/// Memory that is bound by its address stays bound when it is unmapped.
#[test]
fn memory_is_bound_by_its_address() {
    let mut team = Team::new();
    let probe = &mut team.probe;
    let object = object_of_both(probe);
    let base = reserve(probe, BYTES);
    let memory = create(probe, 1, BYTES);
    must(probe, &format!("cuMemMap {base} {BYTES} 0 {memory} 0"));
    release(probe, memory);
    let (middle, half) = (base + BYTES / 2, BYTES / 2);
    must(
        probe,
        &format!("cuMulticastBindAddr {object} 0 {middle} {half} 0"),
    );
    must(probe, &format!("cuMemUnmap {base} {BYTES}"));
    team.holds([0, BYTES]);
    must(
        &mut team.probe,
        &format!("cuMulticastUnbind {object} 1 0 {half}"),
    );
    team.holds([0, 0]);
}

#[test]
fn a_bind_that_fails_leaves_no_charge() {
    let mut team = Team::new();
    let probe = &mut team.probe;
    let object = object_of_both(probe);
    let memory = create(probe, 0, BYTES);
    for wrong in [
        // Beyond the object, beyond the memory, and not of whole blocks.
        format!("cuMulticastBindMem {object} {BLOCK} {memory} 0 {BYTES} 0"),
        format!("cuMulticastBindMem {object} 0 {memory} {BLOCK} {BYTES} 0"),
        format!("cuMulticastBindMem {object} 0 {memory} 0 4096 0"),
        format!("cuMulticastBindAddr {object} 0 4096 {BYTES} 0"),
    ] {
        assert_eq!(probe.call(&wrong), INVALID_VALUE, "{wrong}");
    }
    must(
        probe,
        &format!("cuMulticastBindMem {object} 0 {memory} 0 {BYTES} 0"),
    );
    // A binding at the same place is refused; the first one stays.
    let other = create(probe, 0, BYTES);
    let again = format!("cuMulticastBindMem {object} {BLOCK} {other} 0 {BLOCK} 0");
    assert_eq!(probe.call(&again), INVALID_VALUE);
    release(probe, other);
    release(probe, memory);
    team.holds([BYTES, 0]);
    release(&mut team.probe, object);
    team.holds([0, 0]);
}

/// The functions of CUDA 13.1, with a driver that binds anything.
#[test]
fn newer_functions_bind_as_well() {
    let (world, share) = one_gpu();
    let mut probe = ready(&world, 1);
    let probe = &mut probe;
    probe.ask(&format!("steer foreign {BYTES}"));
    let object = object(probe, 2, BYTES);
    let memory = create(probe, 0, BYTES);
    must(
        probe,
        &format!("cuMulticastBindMem_v2 {object} 0 0 {memory} 0 {BYTES} 0"),
    );
    release(probe, memory);
    assert_eq!(share.used(), BYTES);
    let base = 0x6000_0000_0000u64;
    let mapped = create(probe, 0, BYTES);
    must(probe, &format!("cuMemMap {base} {BYTES} 0 {mapped} 0"));
    release(probe, mapped);
    let bind = format!("cuMulticastBindAddr_v2 {object} 0 {BYTES} {base} {BYTES} 0");
    must(probe, &bind);
    must(probe, &format!("cuMemUnmap {base} {BYTES}"));
    assert_eq!(share.used(), 2 * BYTES);
    must(
        probe,
        &format!("cuMulticastUnbind {object} 0 {BYTES} {BYTES}"),
    );
    assert_eq!(share.used(), BYTES);
    release(probe, object);
    assert_eq!(share.used(), 0);
}

/// A pool's memory may lie in any piece of the pool: all of them are charged once more while it is bound.
#[test]
fn a_pools_memory_is_charged_once_more() {
    const POOL: u64 = 64 << 20;
    let (world, share) = one_gpu();
    let mut probe = ready(&world, 1);
    let probe = &mut probe;
    probe.ask(&format!("steer foreign {BYTES}"));
    let pointer = probe.must(&format!("async {POOL}")).number(0);
    let object = object(probe, 2, BYTES);
    assert_eq!(share.used(), POOL);
    let bind = format!("cuMulticastBindAddr {object} 0 {pointer} {BYTES} 0");
    probe.ask("steer fail_next 801");
    assert_eq!(probe.call(&bind), 801);
    assert_eq!(share.used(), POOL);
    must(probe, &bind);
    // The pool also keeps it until it is trimmed.
    probe.must(&format!("free {pointer}"));
    assert_eq!(share.used(), 2 * POOL);
    must(probe, &format!("cuMulticastUnbind {object} 0 0 {BYTES}"));
    assert_eq!(share.used(), POOL);
    // If there is no room for it, the driver is not called.
    let pointer = probe.must(&format!("async {POOL}")).number(0);
    probe.must(&format!("alloc {}", CAP - POOL));
    let bind = format!("cuMulticastBindAddr {object} 0 {pointer} {BYTES} 0");
    assert_eq!(probe.call(&bind), OUT_OF_MEMORY);
    assert_eq!(share.used(), CAP);
}

/// An object of another process is not charged; what is bound to it ends with this process's handle.
#[test]
fn what_is_bound_to_an_import_goes_with_it() {
    let (world, share) = one_gpu();
    let mut probe = ready(&world, 1);
    let probe = &mut probe;
    probe.ask(&format!("steer foreign {BYTES}"));
    // The driver does not say where its memory lies.
    probe.ask("steer fail_properties 1");
    let file = "open-to-write /usr/lib/tranche/driver/control";
    let memory = create(probe, 0, BYTES);
    let made = format!("cuMemExportToShareableHandle &0 {memory} 1 0");
    probe.get(&made);
    let file = probe.must(file).number(0);
    let object = probe.get(&format!("cuMemImportFromShareableHandle &0 {file} 1"));
    assert_eq!(share.used(), BYTES);
    let bound = create(probe, 0, BYTES);
    must(
        probe,
        &format!("cuMulticastBindMem {object} 0 {bound} 0 {BYTES} 0"),
    );
    release(probe, bound);
    assert_eq!(share.used(), 2 * BYTES);
    release(probe, object);
    assert_eq!(share.used(), BYTES);
}
