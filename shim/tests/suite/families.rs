//! Every way to take device memory, on the simulated machine: the account equals what the GPU holds, also
//! with a full cap, and nothing is left in the end.

use std::time::{Duration, Instant};

use tranche_shim_tests::{DRIVER, Driver, Machine, Probe, Share, World};

use crate::cap::{BLOCK, CAP, GPU_0, ready};

const OUT_OF_MEMORY: i64 = 2;
const DONE: i64 = 0;

/// A container with a share of the machine's GPU, where a context is charged what it takes on the machine.
pub struct Case {
    pub world: World,
    pub share: Share,
    pub context: u64,
    pub probe: Probe,
}

impl Case {
    /// On the simple machine, where the GPU holds exactly what the account says, at any time.
    pub fn new() -> Self {
        Self::on(Machine::Simple)
    }

    pub fn on(machine: Machine) -> Self {
        let world = World::new(Driver::Machine(machine, 1));
        let gpu = world.node().gpus().remove(0);
        let context = context_memory(&world);
        let share = world.share_beside("gpu-0", &gpu.uuid, Some(CAP), context);
        let mut probe = world.probe("name");
        probe.must("init");
        probe.must("primary 0");
        let case = Self {
            world,
            share,
            context,
            probe,
        };
        case.holds(0);
        case
    }

    /// The GPU holds what the account says, and that is so much beside the context.
    pub fn holds(&self, bytes: u64) {
        let (held, used) = (self.world.node().gpus()[0].used, self.share.used());
        assert_eq!((held, used), (bytes + self.context, bytes + self.context));
    }

    /// Waits until the GPU holds so much beside the context: what the last descriptor kept is freed a little later.
    pub fn wait_until_held(&self, bytes: u64) {
        let start = Instant::now();
        while self.world.node().gpus()[0].used != bytes + self.context {
            assert!(start.elapsed() < Duration::from_secs(20), "still held");
            std::thread::yield_now();
        }
    }

    /// The most that the GPU has ever held.
    pub fn peak(&self) -> u64 {
        self.world.node().peak(0)
    }

    /// The GPU holds no more than the account says.
    fn covered(&self) {
        let (held, used) = (self.world.node().gpus()[0].used, self.share.used());
        assert!(held <= used && used <= CAP + self.context, "{held} {used}");
    }
}

/// What a context takes on the simulated H100.
pub fn context_memory(world: &World) -> u64 {
    let idle = world.node().gpus().remove(0);
    let share = world.share("measure", &idle.uuid, None);
    let mut probe = world.probe("name");
    probe.must("init");
    probe.must("primary 0");
    let context = world.node().gpus()[0].used - idle.used;
    probe.must("unprimary 0");
    drop(probe);
    world.remove(&share);
    context.next_multiple_of(BLOCK)
}

/// Words 16 to 19: the properties of device memory that can be exported.
const ON_DEVICE: &str = "set 16 4294967297 1 0 0";

/// Physical memory of so many bytes; its handle.
pub fn create(probe: &mut Probe, bytes: u64) -> u64 {
    probe.must(ON_DEVICE);
    probe.get(&format!("cuMemCreate &0 {bytes} &16 0"))
}

/// Reserves addresses; returns the first.
pub fn reserve(probe: &mut Probe, bytes: u64) -> u64 {
    probe.get(&format!("cuMemAddressReserve &0 {bytes} 0 0 0"))
}

/// PyTorch's expandable segments: one range of addresses, mapped and unmapped piece by piece.
#[test]
fn expandable_segments() {
    const PIECE: u64 = 20 << 20;
    let mut case = Case::new();
    let probe = &mut case.probe;
    let base = reserve(probe, CAP);
    let handles: Vec<u64> = (0..8)
        .map(|nth| {
            let handle = create(probe, PIECE);
            let at = base + nth * PIECE;
            assert_eq!(
                probe.call(&format!("cuMemMap {at} {PIECE} 0 {handle} 0")),
                DONE
            );
            probe.must("set 24 1 3");
            assert_eq!(
                probe.call(&format!("cuMemSetAccess {at} {PIECE} &24 1")),
                DONE
            );
            handle
        })
        .collect();
    case.holds(8 * PIECE);
    let probe = &mut case.probe;
    // The rest of the cap, and not a byte more.
    let left = CAP - 8 * PIECE;
    let rest = create(probe, left);
    probe.must(ON_DEVICE);
    assert_eq!(
        probe.call(&format!("cuMemCreate &0 {BLOCK} &16 0")),
        OUT_OF_MEMORY
    );
    assert_eq!(probe.call(&format!("cuMemRelease {rest}")), DONE);
    // One is unmapped, then several at once; then the handles are released.
    assert_eq!(probe.call(&format!("cuMemUnmap {base} {PIECE}")), DONE);
    assert_eq!(
        probe.call(&format!("cuMemUnmap {} {}", base + PIECE, 7 * PIECE)),
        DONE
    );
    case.holds(8 * PIECE);
    for handle in handles {
        assert_eq!(case.probe.call(&format!("cuMemRelease {handle}")), DONE);
    }
    case.holds(0);
}

/// llama.cpp's pool: the handle is released while it is mapped.
#[test]
fn a_handle_that_is_released_while_mapped() {
    let mut case = Case::new();
    let probe = &mut case.probe;
    let base = reserve(probe, 8 * BLOCK);
    for at in [base, base + 4 * BLOCK] {
        let handle = create(probe, 4 * BLOCK);
        assert_eq!(
            probe.call(&format!("cuMemMap {at} {} 0 {handle} 0", 4 * BLOCK)),
            DONE
        );
        assert_eq!(probe.call(&format!("cuMemRelease {handle}")), DONE);
        // The driver refuses one release too many.
        assert_ne!(probe.call(&format!("cuMemRelease {handle}")), DONE);
    }
    case.holds(8 * BLOCK);
    let probe = &mut case.probe;
    // A part of a mapping cannot be unmapped, and stays charged.
    assert_ne!(probe.call(&format!("cuMemUnmap {base} {BLOCK}")), DONE);
    case.holds(8 * BLOCK);
    let probe = &mut case.probe;
    assert_eq!(
        probe.call(&format!("cuMemUnmap {base} {}", 8 * BLOCK)),
        DONE
    );
    case.holds(0);
}

/// vLLM's cumem: handles found again by their address.
#[test]
fn handles_by_address_and_by_descriptor() {
    let mut case = Case::new();
    let probe = &mut case.probe;
    let base = reserve(probe, 4 * BLOCK);
    let handle = create(probe, 4 * BLOCK);
    assert_eq!(
        probe.call(&format!("cuMemMap {base} {} 0 {handle} 0", 4 * BLOCK)),
        DONE
    );
    let again = probe.get(&format!("cuMemRetainAllocationHandle &0 {base}"));
    assert_eq!(
        probe.call(&format!("cuMemUnmap {base} {}", 4 * BLOCK)),
        DONE
    );
    assert_eq!(probe.call(&format!("cuMemRelease {again}")), DONE);
    case.holds(4 * BLOCK);
    let probe = &mut case.probe;
    // Exported, and imported again by any descriptor: it is the same memory.
    let files = [(); 2].map(|()| export(probe, handle));
    let take = format!("take-descriptor {} {}", probe.pid(), files[0]);
    let copy = probe.must(&take).number(0);
    let imported = [files[1], copy].map(|file| {
        let imported = probe.get(&format!("cuMemImportFromShareableHandle &0 {file} 1"));
        assert_ne!(imported, handle);
        imported
    });
    case.holds(4 * BLOCK);
    let probe = &mut case.probe;
    for file in [files[0], files[1], copy] {
        probe.must(&format!("close {file}"));
    }
    for handle in [handle, imported[1]] {
        assert_eq!(probe.call(&format!("cuMemRelease {handle}")), DONE);
    }
    // The other import keeps it.
    assert_eq!(case.share.used(), 4 * BLOCK + case.context);
    let last = imported[0];
    assert_eq!(case.probe.call(&format!("cuMemRelease {last}")), DONE);
    case.wait_until_held(0);
    case.probe.must("info");
    case.holds(0);
}

/// A descriptor by which a handle's memory can be imported.
fn export(probe: &mut Probe, handle: u64) -> u64 {
    probe.get(&format!("cuMemExportToShareableHandle &0 {handle} 1 0")) & 0xffff_ffff
}

/// Memory of so many bytes that only a descriptor keeps.
fn left_by_descriptor(probe: &mut Probe, bytes: u64) -> u64 {
    let handle = create(probe, bytes);
    let file = export(probe, handle);
    assert_eq!(probe.call(&format!("cuMemRelease {handle}")), DONE);
    file
}

/// Memory exists, and is charged, until its last descriptor is closed in any process.
#[test]
fn an_open_descriptor_keeps_its_memory_charged() {
    const BYTES: u64 = 64 << 20;
    let mut case = Case::new();
    let file = left_by_descriptor(&mut case.probe, BYTES);
    case.holds(BYTES);
    let rest = case.probe.must(&format!("alloc {}", CAP - BYTES)).number(0);
    assert_eq!(case.probe.ask("alloc 1").code, OUT_OF_MEMORY);
    case.holds(CAP);
    case.probe.must(&format!("free {rest}"));
    // It is passed to another process, and closed here.
    let mut other = case.world.probe("name");
    let take = format!("take-descriptor {} {file}", case.probe.pid());
    let taken = other.must(&take).number(0);
    case.probe.must(&format!("close {file}"));
    let all = format!("alloc {CAP}");
    assert_eq!(case.probe.ask(&all).code, OUT_OF_MEMORY);
    other.must(&format!("close {taken}"));
    case.wait_until_held(0);
    case.probe.must(&all);
    case.holds(CAP);
}

/// NCCL and PyTorch export many times: descriptors that are closed leave no charge, and late closes are noticed.
#[test]
fn descriptors_that_are_closed_leave_no_charge() {
    let mut case = Case::new();
    let mut late = Vec::new();
    for nth in 0..300 {
        let probe = &mut case.probe;
        let handle = create(probe, BLOCK);
        for _ in 0..3 {
            let file = export(probe, handle);
            probe.must(&format!("close {file}"));
        }
        if nth % 2 == 0 {
            late.push(export(probe, handle));
        }
        assert_eq!(probe.call(&format!("cuMemRelease {handle}")), DONE);
    }
    // A query of the free memory checks all of them.
    case.probe.must("info");
    case.holds(late.len() as u64 * BLOCK);
    let probe = &mut case.probe;
    let before = probe.must("descriptors").number(0);
    for file in late {
        probe.must(&format!("close {file}"));
    }
    case.wait_until_held(0);
    assert_eq!(case.probe.must("info").number(0), CAP);
    case.holds(0);
    let left = case.probe.must("descriptors").number(0);
    assert!(left < before - 150, "{left} descriptors of {before}");
}

/// A program that closes all unknown descriptors closes the shim's too, and may reuse their numbers. Then the shim cannot
/// find out whether the memory is still exported, and it stays charged.
#[test]
fn a_descriptor_with_a_closed_witness_stays_charged() {
    const BYTES: u64 = 64 << 20;
    let mut case = Case::new();
    let file = left_by_descriptor(&mut case.probe, BYTES);
    let mut other = case.world.probe("name");
    let take = format!("take-descriptor {} {file}", case.probe.pid());
    other.must(&take);
    // The shim's witness has the next free number.
    let witness = file + 1;
    for number in [file, witness] {
        case.probe.must(&format!("close {number}"));
    }
    let another = case.world.folder().join("another");
    std::fs::write(&another, "").unwrap();
    let open = format!("open-to-write {}", another.display());
    while case.probe.must(&open).number(0) < witness {}
    assert_eq!(case.probe.ask(&format!("alloc {CAP}")).code, OUT_OF_MEMORY);
    case.holds(BYTES);
}

/// The exporter ends, in the same or another share: its charge is given back, and the importer stays charged.
#[test]
fn an_import_outlives_its_exporter() {
    const BYTES: u64 = 64 << 20;
    let mut case = Case::new();
    let mut exporter = case.world.probe("name");
    exporter.must("init");
    exporter.must("primary 0");
    let handle = create(&mut exporter, BYTES);
    let export = format!("cuMemExportToShareableHandle &0 {handle} 1 0");
    let file = exporter.get(&export) & 0xffff_ffff;
    let before = case.share.used();
    assert_eq!(before, BYTES + 2 * case.context);
    let take = format!("take-descriptor {} {file}", exporter.pid());
    let file = case.probe.must(&take).number(0);
    let imported = case
        .probe
        .get(&format!("cuMemImportFromShareableHandle &0 {file} 1"));
    case.probe.must(&format!("close {file}"));
    exporter.kill();
    // A process that would be refused reclaims what dead ones had.
    assert_eq!(
        case.probe.ask(&format!("alloc {}", CAP - BYTES + 1)).code,
        OUT_OF_MEMORY
    );
    let rest = case.probe.must(&format!("alloc {}", CAP - BYTES)).number(0);
    case.probe.must(&format!("free {rest}"));
    assert_eq!(case.share.used(), BYTES + case.context);
    assert_eq!(case.probe.call(&format!("cuMemRelease {imported}")), DONE);
    assert_eq!(case.share.used(), case.context);
}

/// Maps a handle's memory at an address, with access to it.
fn map(probe: &mut Probe, at: u64, bytes: u64, handle: u64) {
    probe.must("set 40 1 3");
    for call in [
        format!("cuMemMap {at} {bytes} 0 {handle} 0"),
        format!("cuMemSetAccess {at} {bytes} &40 1"),
    ] {
        assert_eq!(probe.call(&call), DONE, "{call}");
    }
}

/// The handle under which a process imports what another one has exported.
fn import(probe: &mut Probe, exporter: &Probe, file: u64) -> Result<u64, i64> {
    let take = format!("take-descriptor {} {file}", exporter.pid());
    let file = probe.must(&take).number(0);
    let code = probe.call(&format!("cuMemImportFromShareableHandle &0 {file} 1"));
    let imported = probe.must("words 0 1").number(0);
    probe.must(&format!("close {file}"));
    if code == DONE {
        Ok(imported)
    } else {
        Err(code)
    }
}

/// Imports are charged their size: at once if the driver maps parts of an allocation, otherwise when they are mapped.
#[test]
fn what_another_process_exported_is_imported_and_charged() {
    for machine in Machine::ALL {
        let mut case = Case::on(machine);
        let mut exporter = case.world.probe("name");
        exporter.must("init");
        exporter.must("primary 0");
        let contexts = 2 * case.context;
        for blocks in [1, 2, 7, 64, 1001] {
            let bytes = blocks * BLOCK;
            let handle = create(&mut exporter, bytes);
            let base = reserve(&mut exporter, bytes);
            map(&mut exporter, base, bytes, handle);
            let write = format!("cuMemsetD8_v2 {base} 90 {bytes}");
            assert_eq!(exporter.call(&write), DONE);
            let file = export(&mut exporter, handle);
            let probe = &mut case.probe;
            let imported = import(probe, &exporter, file).unwrap();
            let at_once = match machine {
                Machine::Simple => bytes,
                Machine::Realistic => BLOCK,
            };
            assert_eq!(case.share.used(), bytes + at_once + contexts);
            let at = reserve(probe, bytes);
            map(probe, at, bytes, imported);
            assert_eq!(case.share.used(), 2 * bytes + contexts, "{machine:?}");
            let read = format!("cuMemcpyDtoH_v2 &8 {} 8", at + bytes - 8);
            assert_eq!(probe.call(&read), DONE);
            assert_eq!(probe.must("words 8 1").number(0), 0x5a5a_5a5a_5a5a_5a5a);
            // The exporter frees it, and only the import keeps it.
            for call in [
                format!("cuMemUnmap {base} {bytes}"),
                format!("cuMemRelease {handle}"),
            ] {
                assert_eq!(exporter.call(&call), DONE);
            }
            exporter.must(&format!("close {file}"));
            exporter.must("info");
            assert_eq!(case.share.used(), bytes + contexts);
            for (call, left) in [
                (format!("cuMemRelease {imported}"), bytes),
                (format!("cuMemUnmap {at} {bytes}"), 0),
            ] {
                assert_eq!(case.probe.call(&call), DONE);
                assert_eq!(case.share.used(), left + contexts);
            }
            case.wait_until_held(case.context);
        }
    }
}

/// If the share has no room for an import, it is refused, or its mapping, and nothing is charged or kept of it.
#[test]
fn an_import_beyond_the_cap_is_refused() {
    for machine in Machine::ALL {
        let mut case = Case::on(machine);
        // A process without the shim.
        let mut exporter = case.world.probe(DRIVER);
        exporter.must("init");
        exporter.must("primary 0");
        let other = case.world.node().gpus()[0].used - case.context;
        let rest = case.probe.must(&format!("alloc {}", CAP - 8 * BLOCK));
        let rest = rest.number(0);
        let charged = case.share.used();
        for blocks in [9, 1000, CAP / BLOCK, CAP / BLOCK + 1, CAP / BLOCK + 100] {
            let bytes = blocks * BLOCK;
            let handle = create(&mut exporter, bytes);
            let file = export(&mut exporter, handle);
            let result = import(&mut case.probe, &exporter, file);
            if machine == Machine::Simple {
                assert_eq!(result, Err(OUT_OF_MEMORY), "{blocks} {machine:?}");
            } else {
                let imported = result.unwrap();
                let at = reserve(&mut case.probe, bytes);
                let map = format!("cuMemMap {at} {bytes} 0 {imported} 0");
                assert_eq!(case.probe.call(&map), OUT_OF_MEMORY, "{blocks}");
                let release = format!("cuMemRelease {imported}");
                assert_eq!(case.probe.call(&release), DONE);
            }
            assert_eq!(case.share.used(), charged);
            // It exists as long as its exporter keeps it.
            assert_eq!(exporter.call(&format!("cuMemRelease {handle}")), DONE);
            exporter.must(&format!("close {file}"));
            case.wait_until_held(other + CAP - 8 * BLOCK);
        }
        let handle = create(&mut exporter, 8 * BLOCK);
        let file = export(&mut exporter, handle);
        let imported = import(&mut case.probe, &exporter, file).unwrap();
        let at = reserve(&mut case.probe, 8 * BLOCK);
        map(&mut case.probe, at, 8 * BLOCK, imported);
        assert_eq!(case.share.used(), CAP + case.context);
        case.probe.must(&format!("free {rest}"));
        // What a killed process has imported is given back.
        case.probe.kill();
        let mut next = case.world.probe("name");
        next.must("init");
        next.must("primary 0");
        let all = next.must(&format!("alloc {CAP}")).number(0);
        next.must(&format!("free {all}"));
        assert_eq!(case.share.used(), case.context);
    }
}

#[test]
fn pools_with_and_without_a_threshold() {
    const PIECE: u64 = 64 << 20;
    let mut case = Case::new();
    for threshold in [0, 100 << 20, u64::MAX] {
        let probe = &mut case.probe;
        probe.must("set 16 1 1 0 0 0 0 0 0 0 0 0");
        let pool = probe.get("cuMemPoolCreate &0 &16");
        probe.must(&format!("set 32 {threshold}"));
        assert_eq!(
            probe.call(&format!("cuMemPoolSetAttribute {pool} 4 &32")),
            DONE
        );
        let mut pieces: Vec<u64> = (0..3)
            .map(|_| probe.get(&format!("cuMemAllocFromPoolAsync &0 {PIECE} {pool} 0")))
            .collect();
        case.holds(3 * PIECE);
        let probe = &mut case.probe;
        let mixed = pieces.pop().unwrap();
        assert_eq!(probe.call(&format!("cuMemFreeAsync {mixed} 0")), DONE);
        assert_eq!(
            probe.call(&format!("cuMemFree_v2 {}", pieces.pop().unwrap())),
            DONE
        );
        let kept = threshold.clamp(PIECE, 3 * PIECE);
        case.holds(kept);
        let probe = &mut case.probe;
        // Another allocation can use what the pool keeps, up to the cap and not a byte more.
        let all = probe.get(&format!("cuMemAlloc_v2 &0 {}", CAP - PIECE));
        assert_eq!(probe.call("cuMemAlloc_v2 &0 1"), OUT_OF_MEMORY);
        assert_eq!(
            probe.call(&format!("cuMemAllocFromPoolAsync &0 4096 {pool} 0")),
            OUT_OF_MEMORY
        );
        case.holds(CAP);
        let probe = &mut case.probe;
        assert_eq!(probe.call(&format!("cuMemFree_v2 {all}")), DONE);
        // The pool is destroyed before its allocations are freed.
        assert_eq!(probe.call(&format!("cuMemPoolDestroy {pool}")), DONE);
        case.holds(PIECE);
        let last = pieces.pop().unwrap();
        assert_eq!(case.probe.call(&format!("cuMemFreeAsync {last} 0")), DONE);
        case.holds(0);
    }
}

/// The default pool, the current pool, and one that becomes current, also in per-thread streams.
#[test]
fn every_current_pool_is_charged() {
    let mut case = Case::new();
    let probe = &mut case.probe;
    let default = probe.get("cuMemAllocAsync &0 8388608 0");
    probe.must("set 16 1 1 0 0 0 0 0 0 0 0 0");
    let pool = probe.get("cuMemPoolCreate &0 &16");
    assert_eq!(probe.call(&format!("cuDeviceSetMemPool 0 {pool}")), DONE);
    let own = probe.get("cuMemAllocAsync_ptsz &0 4096 0");
    case.holds(5 * BLOCK);
    let probe = &mut case.probe;
    let found = probe.get("cuDeviceGetDefaultMemPool &0 0");
    probe.must("set 20 1");
    assert_eq!(probe.get("cuMemGetDefaultMemPool &0 &20 1"), found);
    let third = probe.get(&format!("cuMemAllocFromPoolAsync_ptsz &0 4096 {found} 0"));
    case.holds(6 * BLOCK);
    let probe = &mut case.probe;
    for (free, pointer) in [
        ("cuMemFreeAsync_ptsz", default),
        ("cuMemFreeAsync_ptsz", own),
        ("cuMemFreeAsync", third),
    ] {
        assert_eq!(probe.call(&format!("{free} {pointer} 0")), DONE);
    }
    case.holds(0);
}

#[test]
fn arrays_and_mipmaps() {
    let mut case = Case::new();
    let probe = &mut case.probe;
    // 4096 × 4096 floats: 64 MiB.
    probe.must(&format!("set 16 4096 4096 {}", 0x20u64 | 1 << 32));
    let flat = probe.get("cuArrayCreate_v2 &0 &16");
    case.holds(64 << 20);
    let probe = &mut case.probe;
    // The same, 8 deep; and with 3 levels.
    probe.must(&format!("set 16 4096 4096 8 {} 0", 0x20u64 | 1 << 32));
    let deep = probe.get("cuArray3DCreate_v2 &0 &16");
    probe.must("set 18 0");
    let mipmap = probe.get("cuMipmappedArrayCreate &0 &16 3");
    case.holds((64 + 512 + 64 + 16 + 4) << 20);
    let probe = &mut case.probe;
    // Deferred mapping takes nothing.
    probe.must("set 20 128");
    let deferred = probe.get("cuArray3DCreate_v2 &0 &16");
    assert_eq!(probe.call(&format!("cuArrayDestroy {deferred}")), DONE);
    case.holds((64 + 512 + 64 + 16 + 4) << 20);
    let probe = &mut case.probe;
    // Rows of a size that tiles would pad: the size that the driver reports is charged.
    probe.must(&format!("set 16 1025 32768 {}", 0x20u64 | 1 << 32));
    let uneven = probe.get("cuArrayCreate_v2 &0 &16");
    case.holds(((64 + 512 + 64 + 16 + 4) << 20) + (1025 * 32768 * 4u64).next_multiple_of(BLOCK));
    let probe = &mut case.probe;
    assert_eq!(probe.call(&format!("cuArrayDestroy {uneven}")), DONE);
    // 64 GiB under a cap of 20.
    probe.must(&format!("set 16 65536 65536 4 {} 0", 0x20u64 | 1 << 32));
    assert_eq!(probe.call("cuArray3DCreate_v2 &0 &16"), OUT_OF_MEMORY);
    for (destroy, array) in [
        ("cuArrayDestroy", flat),
        ("cuArrayDestroy", deep),
        ("cuMipmappedArrayDestroy", mipmap),
    ] {
        assert_eq!(probe.call(&format!("{destroy} {array}")), DONE);
    }
    case.holds(0);
    // They go with their context.
    case.probe
        .must(&format!("set 16 4096 4096 {}", 0x20u64 | 1 << 32));
    case.probe.get("cuArrayCreate_v2 &0 &16");
    case.probe.must("reset 0");
    assert_eq!(case.share.used(), 0);
}

/// Nodes made by hand, by the general function, and captured; launched, copied and destroyed.
#[test]
fn graphs_with_memory() {
    const PIECE: u64 = 64 << 20;
    let mut case = Case::new();
    let probe = &mut case.probe;
    let graph = probe.get("cuGraphCreate &0 0");
    // Words 16 on: CUDA_MEM_ALLOC_NODE_PARAMS, bytes at 13.
    probe.must(&format!("set 16 1 1 0 0 0 0 0 0 0 0 0 0 0 {PIECE} 0"));
    probe.get(&format!("cuGraphAddMemAllocNode &0 {graph} 0 0 &16"));
    // Words 40 on: CUgraphNodeParams of the same.
    probe.must(&format!("set 40 10 0 1 1 0 0 0 0 0 0 0 0 0 0 0 {PIECE} 0"));
    probe.get(&format!("cuGraphAddNode_v2 &0 {graph} 0 0 0 &40"));
    let executable = probe.get(&format!("cuGraphInstantiateWithFlags &0 {graph} 0"));
    for _ in 0..3 {
        assert_eq!(probe.call(&format!("cuGraphLaunch {executable} 0")), DONE);
    }
    case.holds(2 * PIECE);
    let probe = &mut case.probe;
    assert_eq!(probe.call(&format!("cuGraphDestroy {graph}")), DONE);
    case.holds(2 * PIECE);
    let probe = &mut case.probe;
    // Captured.
    let stream = probe.get("cuStreamCreate &0 1");
    assert_eq!(
        probe.call(&format!("cuStreamBeginCapture_v2 {stream} 0")),
        DONE
    );
    let pointer = probe.get(&format!("cuMemAllocAsync &0 {PIECE} {stream}"));
    assert_eq!(
        probe.call(&format!("cuMemFreeAsync {pointer} {stream}")),
        DONE
    );
    let captured = probe.get(&format!("cuStreamEndCapture {stream} &0"));
    let second = probe.get(&format!("cuGraphInstantiateWithFlags &0 {captured} 0"));
    case.holds(3 * PIECE);
    let probe = &mut case.probe;
    // Not a byte past the cap, in any way.
    let rest = probe.get(&format!("cuMemAlloc_v2 &0 {}", CAP - 3 * PIECE));
    let full = probe.get("cuGraphCreate &0 0");
    for refused in [
        format!("cuGraphAddMemAllocNode &0 {full} 0 0 &16"),
        format!("cuGraphAddNode &0 {full} 0 0 &40"),
    ] {
        assert_eq!(probe.call(&refused), OUT_OF_MEMORY, "{refused}");
    }
    // A launch with a full cap needs no more memory.
    assert_eq!(
        probe.call(&format!("cuGraphLaunch {executable} {stream}")),
        DONE
    );
    case.holds(CAP);
    let probe = &mut case.probe;
    assert_eq!(probe.call(&format!("cuMemFree_v2 {rest}")), DONE);
    for executable in [executable, second] {
        assert_eq!(
            probe.call(&format!("cuGraphExecDestroy {executable}")),
            DONE
        );
    }
    for graph in [captured, full] {
        assert_eq!(probe.call(&format!("cuGraphDestroy {graph}")), DONE);
    }
    case.holds(0);
}

/// The first context of a share does not count in its cap; every further one does.
#[test]
fn contexts_are_charged_from_the_second_on() {
    let mut case = Case::new();
    let context = case.context;
    let info = case.probe.must("info");
    assert_eq!((info.number(0), info.number(1)), (CAP, CAP));
    // A context in another process of the share.
    let mut other = case.world.probe("name");
    other.must("init");
    other.must("primary 0");
    case.holds(context);
    assert_eq!(case.probe.must("info").number(0), CAP - context);
    // And a second context in it.
    let second = other.must("context 0").number(0);
    case.holds(2 * context);
    other.must(&format!("destroy {second}"));
    case.holds(context);
    let rest = case
        .probe
        .must(&format!("alloc {}", CAP - context))
        .number(0);
    assert_eq!(case.probe.ask("alloc 1").code, OUT_OF_MEMORY);
    assert_eq!(other.ask("context 0").code, OUT_OF_MEMORY);
    let mut third = case.world.probe("name");
    third.must("init");
    assert_eq!(third.ask("primary 0").code, OUT_OF_MEMORY);
    case.holds(CAP);
    case.probe.must(&format!("free {rest}"));
    other.must("unprimary 0");
    case.holds(0);
    // Retained twice, it is one context until the last release.
    other.must("primary 0");
    other.must("primary 0");
    case.holds(context);
    other.must("unprimary 0");
    case.holds(context);
    other.must("reset 0");
    case.holds(0);
    case.covered();
}

/// NVIDIA's libraries can make contexts by functions in private tables. Such a context is charged at the first allocation or
/// launch, until it is destroyed.
#[test]
fn contexts_that_were_made_unseen_are_charged() {
    let case = Case::new();
    let context = case.context;
    for make in ["context-unseen 0", "primary-unseen 0"] {
        for use_it in ["alloc 512", "kernel sim_busy_1us"] {
            let mut other = case.world.probe("name");
            other.must("init");
            let made = other.must(make).number(0);
            assert_eq!(case.world.node().gpus()[0].used, 2 * context, "{make}");
            assert_eq!(case.share.used(), context, "{make}");
            let what = other.must(use_it).number(0);
            if use_it.starts_with("alloc") {
                other.must(&format!("free {what}"));
            } else {
                other.must(&format!("launch-grid {what} 1 0"));
                other.must("unload-last");
            }
            // Also where it is current while others are made and end.
            let second = other.must("context 0").number(0);
            other.must(&format!("destroy {second}"));
            other.must(&format!("current {made}"));
            other.must("alloc 512");
            assert_eq!(
                case.share.used(),
                context + context + BLOCK,
                "{make} {use_it}"
            );
            // It ends like any other.
            match make {
                "context-unseen 0" => other.must(&format!("destroy {made}")),
                _ => other.must("unprimary 0"),
            };
            assert_eq!(case.share.used(), context, "{make} {use_it}");
            assert_eq!(case.world.node().gpus()[0].used, context);
        }
    }
}

/// It is noticed beside contexts that the shim saw, too, by a launch. If there is no room for it, the launch is refused.
#[test]
fn a_context_that_was_made_unseen_needs_room() {
    let mut case = Case::new();
    let rest = CAP - 8 * BLOCK;
    let memory = case.probe.must(&format!("alloc {rest}")).number(0);
    let made = case.probe.must("context-unseen 0").number(0);
    let kernel = case.probe.must("kernel sim_busy_1us").number(0);
    let used = case.share.used();
    let launch = format!("launch-grid {kernel} 1 0");
    for _ in 0..2 {
        assert_eq!(case.probe.ask(&launch).code, OUT_OF_MEMORY);
        assert_eq!(case.share.used(), used);
    }
    case.probe.must(&format!("free {memory}"));
    for _ in 0..2 {
        case.probe.must(&launch);
        assert_eq!(case.share.used(), used - rest + case.context);
    }
    case.probe.must("unload-last");
    case.probe.must(&format!("destroy {made}"));
    assert_eq!(case.share.used(), case.context);
}

/// A library is charged on a device until its last context there has ended, and again with the next one, until it is unloaded.
#[test]
fn a_library_is_charged_while_its_device_has_a_context() {
    const BYTES: u64 = 32 * BLOCK;
    let mut case = Case::new();
    write(&mut case.probe, &with_variable(BYTES - BLOCK));
    let library = case.probe.get("cuLibraryLoadData &0 &100 0 0 0 0 0 0");
    let loaded = case.share.used();
    assert!((BYTES..=BYTES + BLOCK).contains(&(loaded - case.context)));
    // Another context keeps it.
    let second = case.probe.must("context 0").number(0);
    case.probe.must("unprimary 0");
    assert_eq!(case.share.used(), loaded);
    case.probe.must(&format!("destroy {second}"));
    assert_eq!(case.share.used(), 0);
    for end in ["unprimary 0", "reset 0"] {
        case.probe.must("primary 0");
        assert_eq!(case.share.used(), loaded);
        case.probe.must(end);
        assert_eq!(case.share.used(), 0, "{end}");
    }
    // It is unloaded without a context, and is not charged with the next one.
    let unload = format!("cuLibraryUnload {library}");
    assert_eq!(case.probe.call(&unload), DONE);
    case.probe.must("primary 0");
    assert_eq!(case.share.used(), case.context);
}

/// A context's limits beyond their defaults take memory: the heap of its kernels, their output, and a stack for
/// each thread that runs at a time (132 × 2,048 on the simulated H100).
#[test]
fn limits_of_a_context() {
    const HEAP: u32 = 2;
    let mut case = Case::new();
    case.probe.must("init");
    let limit = |which: u32, bytes: u64| format!("cuCtxSetLimit {which} {bytes}");
    let heap = |bytes: u64| limit(HEAP, bytes + (8 << 20));
    assert_eq!(case.probe.call(&heap(CAP / 2)), DONE);
    case.holds(CAP / 2);
    assert_eq!(case.probe.call(&heap(CAP + 1)), OUT_OF_MEMORY);
    case.holds(CAP / 2);
    assert_eq!(case.probe.call(&heap(CAP / 4)), DONE);
    case.holds(CAP / 4);
    assert_eq!(case.probe.call(&limit(1, (2 << 20) + (1 << 20))), DONE);
    case.holds(CAP / 4 + (2 << 20));
    let threads = 132 * 2048;
    assert_eq!(
        case.probe.call(&limit(0, 1024 + CAP / threads)),
        OUT_OF_MEMORY
    );
    assert_eq!(case.probe.call(&limit(0, 2048)), DONE);
    case.holds(CAP / 4 + (2 << 20) + threads * 1024);
    // Two levels are part of a context.
    assert_eq!(case.probe.call(&limit(3, 3)), DONE);
    let level = case.share.used() - case.context - (CAP / 4 + (2 << 20) + threads * 1024);
    assert_eq!(level, 860 << 20);
    assert_eq!(case.probe.call(&limit(3, 2)), DONE);
    assert_eq!(case.probe.call(&limit(3, 64)), OUT_OF_MEMORY);
    // Other limits take nothing.
    assert_eq!(case.probe.call(&limit(6, 1 << 40)), DONE);
    case.holds(CAP / 4 + (2 << 20) + threads * 1024);
    for (which, bytes) in [(0, 1024), (1, 1 << 20), (HEAP, 0)] {
        assert_eq!(case.probe.call(&limit(which, bytes)), DONE);
    }
    case.holds(0);
    // They go with their context.
    assert_eq!(case.probe.call(&heap(CAP / 2)), DONE);
    case.probe.must("reset 0");
    assert_eq!(
        (case.world.node().gpus()[0].used, case.share.used()),
        (0, 0)
    );
}

/// The driver lets one of two threads end an object that both end at once, and the share loses nothing.
#[test]
fn an_object_that_two_threads_end_at_once_is_given_back() {
    const ROUNDS: u64 = 200;
    for what in ["array", "module"] {
        let mut case = Case::new();
        let before = case.share.used();
        let ended = case.probe.must(&format!("end-twice {what} {ROUNDS}"));
        assert_eq!(ended.number(0), ROUNDS, "{what}");
        assert_eq!(case.share.used(), before, "{what}");

        // The call that has the charge always fails.
        let world = World::new(Driver::Odd);
        let share = world.share("gpu-0", GPU_0, Some(CAP));
        let mut probe = ready(&world, 1);
        probe.ask("steer ends_twice 1");
        let before = share.used();
        let ended = probe.must(&format!("end-twice {what} {ROUNDS}"));
        assert_eq!(ended.number(0), ROUNDS, "{what}");
        assert_eq!(share.used(), before, "{what}");
    }
}

/// Writes a text, with a zero, to the words from 100 on.
pub fn write(probe: &mut Probe, text: &str) {
    let mut bytes = text.as_bytes().to_vec();
    bytes.resize((text.len() / 8 + 1) * 8, 0);
    let words: Vec<String> = bytes
        .chunks_exact(8)
        .map(|word| u64::from_le_bytes(word.try_into().unwrap()).to_string())
        .collect();
    probe.must(&format!("set 100 {}", words.join(" ")));
}

pub fn with_variable(bytes: u64) -> String {
    format!(
        ".version 8.0\n.target sm_80\n.address_size 64\n.global .align 4 .b8 big[{bytes}];\n.entry f() {{ ret; }}\n"
    )
}

/// A module's variables and code are charged like other memory.
#[test]
fn modules_are_charged_with_their_variables() {
    let mut case = Case::new();
    // All of their code shares a block.
    let context = case.context + BLOCK;
    let probe = &mut case.probe;
    write(probe, &with_variable(1 << 30));
    let module = probe.get("cuModuleLoadData &0 &100");
    assert_eq!(case.share.used(), context + (1 << 30));
    let probe = &mut case.probe;
    let library = probe.get("cuLibraryLoadData &0 &100 0 0 0 0 0 0");
    // Small ones share a block.
    write(probe, &with_variable(64));
    let small = [0, 1].map(|_| probe.get("cuModuleLoadDataEx &0 &100 0 0 0"));
    assert_eq!(case.share.used(), context + (2 << 30) + BLOCK);
    let probe = &mut case.probe;
    write(probe, &with_variable(CAP));
    assert_eq!(probe.call("cuModuleLoadData &0 &100"), OUT_OF_MEMORY);
    write(probe, "no image");
    assert_eq!(probe.call("cuModuleLoadData &0 &100"), 200);
    let file = case.world.folder().join("image.ptx");
    std::fs::write(&file, with_variable(3 << 30)).unwrap();
    let probe = &mut case.probe;
    write(probe, &file.display().to_string());
    let from_file = probe.get("cuModuleLoad &0 &100");
    assert_eq!(case.share.used(), context + (5 << 30) + BLOCK);
    let probe = &mut case.probe;
    assert_eq!(probe.call(&format!("cuLibraryUnload {library}")), DONE);
    for module in [module, small[0], from_file] {
        assert_eq!(probe.call(&format!("cuModuleUnload {module}")), DONE);
    }
    assert_eq!(case.share.used(), context + BLOCK);
    // The last module ends with its context.
    case.probe.must("reset 0");
    assert_eq!(case.share.used(), 0);
}

/// Several shares of one GPU together have room for one context beside their memory, not for one each.
#[test]
fn shares_of_one_gpu_have_one_context_beside_them() {
    let mut case = Case::new();
    case.probe.kill();
    let gpu = case.world.node().gpus().remove(0).uuid;
    let second = case
        .world
        .share_beside("gpu-1", &gpu, Some(CAP), case.context);
    let mut probe = case.world.probe("name");
    probe.must("init");
    probe.must("primary 0");
    let info = probe.must("info");
    assert_eq!((info.number(0), info.number(1)), (2 * CAP, 2 * CAP));
    probe.must(&format!("alloc {}", 2 * CAP));
    assert_eq!(probe.ask("alloc 1").code, OUT_OF_MEMORY);
    assert_eq!(probe.must("info").number(0), 0);
    assert_eq!(case.share.used() + second.used(), 2 * CAP + case.context);
    let smi = case.world.node().root().join("usr/bin/nvidia-smi");
    let query = [
        "--query-gpu=memory.total,memory.used",
        "--format=csv,noheader",
    ];
    let output = tranche_shim_tests::text(&case.world.run(&smi, &query).stdout);
    assert_eq!(output, format!("{0} MiB, {0} MiB\n", (2 * CAP) >> 20));
}

/// Memory of every kind is freed when its process ends.
#[test]
fn a_killed_process_leaves_nothing_of_any_kind() {
    let mut case = Case::new();
    let probe = &mut case.probe;
    create(probe, 4 * BLOCK);
    probe.must("alloc 4096");
    probe.get("cuMemAllocAsync &0 4096 0");
    probe.must(&format!("set 16 4096 4096 {}", 0x20u64 | 1 << 32));
    probe.get("cuArrayCreate_v2 &0 &16");
    assert!(case.share.used() > 64 << 20);
    case.probe.kill();
    let mut next = case.world.probe("name");
    next.must("init");
    next.must("primary 0");
    assert_eq!(next.must("info").number(0), CAP);
    assert_eq!(case.share.used(), case.context);
}
