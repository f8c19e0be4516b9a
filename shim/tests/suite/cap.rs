//! The cap holds to the byte, on every path, for every device and process.

use std::time::{Duration, Instant};

use tranche_shim_tests::{Driver, Probe, Share, World};

use crate::families::{with_variable, write};

/// The odd driver's first and second GPU.
pub const GPU_0: &str = "GPU-11111111-1111-1111-1111-111111111100";
pub const GPU_1: &str = "GPU-11111111-1111-1111-1111-111111111101";

pub const CAP: u64 = 20 << 30;
/// The driver takes memory in blocks of so many bytes.
pub const BLOCK: u64 = 2 << 20;
const OUT_OF_MEMORY: i64 = 2;
const NOT_SUPPORTED: i64 = 801;

/// A container with 20 GiB on the first GPU, and one GPU.
pub fn one_gpu() -> (World, Share) {
    let world = World::new(Driver::Odd);
    let share = world.share("gpu-0", GPU_0, Some(CAP));
    (world, share)
}

/// A process that has initialised CUDA with `devices` GPUs, and has a context on the first.
pub fn ready(world: &World, devices: u32) -> Probe {
    let mut probe = world.probe("name");
    start(&mut probe, devices);
    probe
}

/// The same with a process that was just started.
pub fn start(probe: &mut Probe, devices: u32) {
    // The odd driver is opened by the first call.
    probe.ask("count");
    probe.ask(&format!("steer devices {devices}"));
    probe.must("init");
    probe.must("context 0");
}

#[test]
fn the_cap_is_exact_to_the_byte() {
    let (world, share) = one_gpu();
    let mut probe = ready(&world, 1);
    let whole = probe.must(&format!("alloc {CAP}"));
    assert_eq!(share.used(), CAP);
    assert_eq!(probe.ask("alloc 1").code, OUT_OF_MEMORY);
    assert_eq!(share.read(|account| account.refused()), 1);
    probe.must(&format!("free {}", whole.number(0)));
    assert_eq!(share.used(), 0);
    assert_eq!(probe.ask(&format!("alloc {}", CAP + 1)).code, OUT_OF_MEMORY);
    // After a refusal it continues.
    probe.must(&format!("alloc {}", CAP - (1 << 20)));
    assert_eq!(share.used(), CAP, "as the driver takes it: in blocks");
    probe.must("free-last");
    probe.must(&format!("alloc {}", CAP - BLOCK));
    let last = probe.must("alloc 1048576").number(0);
    // It would lie in that block, but needs a reservation of another block meanwhile.
    assert_eq!(probe.ask("alloc 1").code, OUT_OF_MEMORY);
    probe.must(&format!("free {last}"));
    probe.must(&format!("alloc {BLOCK}"));
    assert_eq!(share.read(|account| account.peak()), CAP);
    assert_eq!(probe.ask("steer held 0").code, i64::try_from(CAP).unwrap());
}

/// If no whole block is left, the rest of the cap can still be allocated, to the byte.
#[test]
fn the_last_piece_of_a_cap_needs_no_whole_block() {
    const ODD: u64 = (3 << 20) + 12345;
    let world = World::new(Driver::Odd);
    let share = world.share("gpu-0", GPU_0, Some(ODD));
    let mut probe = ready(&world, 1);
    let whole = probe.must(&format!("alloc {ODD}")).number(0);
    assert_eq!(
        (share.used(), probe.ask("alloc 1").code),
        (ODD, OUT_OF_MEMORY)
    );
    probe.must(&format!("free {whole}"));
    probe.must("alloc 1048577");
    assert_eq!(share.used(), 2 << 20);
    probe.must(&format!("alloc {}", ODD - (2 << 20)));
    assert_eq!(
        (share.used(), probe.ask("alloc 1").code),
        (ODD, OUT_OF_MEMORY)
    );
}

#[test]
fn every_family_is_charged_and_any_free_gives_back() {
    let (world, share) = one_gpu();
    let mut probe = ready(&world, 1);
    for allocate in ["alloc", "managed", "async"] {
        for free in ["free", "free-async"] {
            let pointer = probe.must(&format!("{allocate} 4096")).number(0);
            assert_eq!(share.used(), BLOCK, "{allocate}");
            probe.must(&format!("{free} {pointer}"));
            // Pools give back later.
            probe.must("synchronize");
            assert_eq!(share.used(), 0, "{allocate}, {free}");
        }
    }
}

/// Small allocations share blocks. Each block is charged once, while it contains an allocation.
#[test]
fn a_block_is_charged_while_anything_lies_in_it() {
    let (world, share) = one_gpu();
    let mut probe = ready(&world, 1);
    let pointers: Vec<u64> = (0..1024)
        .map(|_| probe.must("alloc 4096").number(0))
        .collect();
    assert_eq!(share.used(), 2 * BLOCK, "512 in each");
    // One allocation in each block stays.
    for nth in (0..1024).filter(|nth| nth % 512 != 7) {
        probe.must(&format!("free {}", pointers[nth]));
    }
    assert_eq!(share.used(), 2 * BLOCK);
    probe.must(&format!("free {}", pointers[7]));
    assert_eq!(share.used(), BLOCK);
    probe.must(&format!("free {}", pointers[512 + 7]));
    assert_eq!(share.used(), 0);
}

/// Memory that a pool keeps is charged until the pool gives it back.
#[test]
fn a_pool_is_charged_with_what_it_keeps() {
    let (world, share) = one_gpu();
    let mut probe = ready(&world, 1);
    probe.ask(&format!("steer pool_step {}", 32 << 20));
    let first = probe.must("async 4096").number(0);
    assert_eq!(share.used(), 32 << 20);
    let second = probe.must(&format!("async {}", 100 << 20)).number(0);
    assert_eq!(share.used(), 128 << 20);
    probe.must(&format!("free-async {first}"));
    probe.must(&format!("free {second}"));
    assert_eq!(share.used(), 128 << 20, "it keeps it");
    assert_eq!(probe.must("info").number(0), CAP - (128 << 20));
    probe.must("synchronize");
    assert_eq!(share.used(), 0);
}

/// If the cap is full, a pool's unused memory is given back, but no more than is needed.
#[test]
fn a_full_cap_trims_the_pools() {
    let (world, share) = one_gpu();
    let mut probe = ready(&world, 1);
    probe.ask("steer pool_keeps 1");
    let kept = probe.must(&format!("async {}", CAP / 2)).number(0);
    let live = probe.must(&format!("async {}", CAP / 4)).number(0);
    probe.must(&format!("free-async {kept}"));
    assert_eq!(share.used(), CAP / 4 * 3);
    probe.must(&format!("alloc {}", CAP / 4 + (64 << 20)));
    assert_eq!(share.used(), CAP, "trimmed by 64 MiB");
    probe.must(&format!("async {}", CAP / 4));
    assert!(share.used() <= CAP);
    assert_eq!(
        probe.ask(&format!("alloc {}", CAP / 4)).code,
        OUT_OF_MEMORY,
        "what is live stays"
    );
    probe.must(&format!("free {live}"));
    probe.must(&format!("alloc {}", CAP / 4));
    assert!(probe.ask("steer held 0").code <= i64::try_from(CAP).unwrap());
    assert_eq!(
        probe.ask("steer held 0").code,
        i64::try_from(share.used()).unwrap()
    );
}

/// Before an allocation is refused, pending stream-ordered frees are waited for.
#[test]
fn a_full_cap_waits_for_pending_frees() {
    let (world, share) = one_gpu();
    let mut probe = ready(&world, 1);
    probe.ask("steer pool_keeps 1");
    probe.ask("steer frees_wait 1");
    let pending = probe.must(&format!("async {}", CAP / 2)).number(0);
    probe.must(&format!("free-async {pending}"));
    assert_eq!(share.used(), CAP / 2);
    probe.must(&format!("alloc {CAP}"));
    assert_eq!((share.used(), probe.ask("steer waits 0").code), (CAP, 1));
    assert_eq!(probe.ask("steer held 0").code, i64::try_from(CAP).unwrap());
}

/// If nothing of the cap is left, a pool's unused memory can still be allocated from it.
#[test]
fn a_pool_with_room_is_used_where_the_cap_is_full() {
    let (world, share) = one_gpu();
    let mut probe = ready(&world, 1);
    probe.ask("steer pool_keeps 1");
    probe.ask(&format!("steer pool_step {}", 32 << 20));
    probe.must("async 4096");
    assert_eq!(share.used(), 32 << 20);
    probe.must(&format!("alloc {}", CAP - (32 << 20)));
    assert_eq!(share.used(), CAP);
    for nth in 1..16 {
        assert_eq!(probe.ask("async 4096").code, 0, "the {nth}th");
    }
    assert_eq!(share.used(), CAP);
    assert_eq!(
        probe.ask(&format!("async {}", 32 << 20)).code,
        OUT_OF_MEMORY
    );
    assert_eq!(probe.ask("steer held 0").code, i64::try_from(CAP).unwrap());
}

/// Memory that is freed in a capture is in use until the graph is launched, and no call waits for that: a pool without other
/// room is not used.
#[test]
fn what_a_pool_has_in_use_is_not_room() {
    let (world, share) = one_gpu();
    let mut probe = ready(&world, 1);
    probe.ask("steer pool_keeps 1");
    probe.ask("steer frees_wait 1");
    let half = format!("async {}", CAP / 2);
    let pending = probe.must(&half).number(0);
    probe.must(&format!("alloc {}", CAP / 2));
    assert_eq!(probe.call("cuStreamBeginCapture_v2 9 0"), 0);
    probe.must(&format!("free-async {pending}"));
    assert_eq!(probe.ask(&half).code, OUT_OF_MEMORY);
    assert_eq!(probe.call("cuStreamEndCapture 9 &0"), 0);
    probe.must(&half);
    let peak = probe.ask("steer peak 0").code;
    assert_eq!((peak, share.used()), (i64::try_from(CAP).unwrap(), CAP));
}

/// The rest of the share is not reserved twice for a module's variables.
#[test]
fn a_module_is_loaded_into_what_a_pool_has_freed() {
    let (world, share) = one_gpu();
    let mut probe = ready(&world, 1);
    probe.ask("steer frees_wait 1");
    let pending = probe.must(&format!("async {}", CAP - 4 * BLOCK)).number(0);
    probe.must(&format!("free-async {pending}"));
    write(&mut probe, &with_variable(CAP - 2 * BLOCK));
    let module = probe.get("cuModuleLoadData &0 &100");
    assert!((CAP - 2 * BLOCK..=CAP).contains(&share.used()));
    assert_eq!(probe.call(&format!("cuModuleUnload {module}")), 0);
    assert_eq!(share.used(), 0);
}

/// Memory that another process exported is charged to the importer, in every way of importing, until it is released.
#[test]
fn an_import_is_charged_for_as_long_as_it_is_held() {
    const BYTES: u64 = 10 * BLOCK;
    let (world, share) = one_gpu();
    let mut probe = ready(&world, 1);
    probe.ask(&format!("steer foreign {BYTES}"));
    // The handle is passed by value: on the stack, after the words for registers.
    let ipc = "cuIpcOpenMemHandle_v2 &0 0 0 0 0 0";
    let pool = "cuMemPoolImportPointer &0 8192 &8";
    let vmm = "cuMemImportFromShareableHandle &0 7 1";
    let pointer = probe.get(ipc);
    assert_eq!(share.used(), BYTES);
    assert_eq!(probe.get(ipc), pointer);
    assert_eq!(share.used(), BYTES, "opened twice, and there once");
    for left in [BYTES, 0] {
        assert_eq!(probe.call(&format!("cuIpcCloseMemHandle {pointer}")), 0);
        assert_eq!(share.used(), left);
    }
    let pointer = probe.get(pool);
    assert_eq!(share.used(), BYTES);
    assert_eq!(probe.call(&format!("cuMemFree_v2 {pointer}")), 0);
    assert_eq!(share.used(), 0);
    let handle = probe.get(vmm);
    assert_eq!(share.used(), BYTES, "found by mapping it");
    assert_eq!(
        probe.call(&format!("cuMemMap 4096 {BYTES} 0 {handle} 0")),
        0
    );
    assert_eq!(probe.call(&format!("cuMemRelease {handle}")), 0);
    assert_eq!(share.used(), BYTES, "it is mapped");
    assert_eq!(probe.call(&format!("cuMemUnmap 4096 {BYTES}")), 0);
    assert_eq!(share.used(), 0);
    // If there is no room for it, it is released again.
    let all = probe.must(&format!("alloc {}", CAP - BLOCK)).number(0);
    for import in [ipc, pool, vmm] {
        assert_eq!(probe.call(import), OUT_OF_MEMORY, "{import}");
    }
    probe.must(&format!("free {all}"));
    assert_eq!(share.used(), 0);
}

/// The driver does not return the size of what it imports. It is found out where the driver maps parts of an allocation, with
/// a bounded number of calls.
#[test]
fn the_size_of_an_import_is_found_out() {
    let (world, share) = one_gpu();
    let mut probe = ready(&world, 1);
    let import = "cuMemImportFromShareableHandle &0 7 1";
    let most = CAP / BLOCK;
    for (blocks, fits) in [
        (1, true),
        (2, true),
        (8, true),
        (12, true),
        (1001, true),
        (most - 1, true),
        (most, true),
        // More than the share may hold.
        (most + 1, false),
        (2 * most - 2, false),
        (100 * most, false),
    ] {
        probe.ask(&format!("steer foreign {}", blocks * BLOCK));
        let before = maps(&mut probe);
        let code = probe.call(import);
        let calls = maps(&mut probe) - before;
        assert!(calls <= 20, "{calls} calls for {blocks} blocks");
        let handle = probe.must("words 0 1").number(0);
        if fits {
            assert_eq!((code, share.used()), (0, blocks * BLOCK), "{blocks}");
            assert_eq!(probe.call(&format!("cuMemRelease {handle}")), 0);
        } else {
            assert_eq!(code, OUT_OF_MEMORY, "{blocks}");
        }
        assert_eq!(share.used(), 0);
    }
}

/// How often the driver was asked to map.
fn maps(probe: &mut Probe) -> i64 {
    probe.ask("steer maps 0").code
}

/// Where the driver maps only whole allocations, or the attempt to map a part fails for another reason, an import is charged
/// a block, and the rest before the program's first mapping.
#[test]
fn an_import_of_unknown_size_is_charged_when_it_is_mapped() {
    let (world, share) = one_gpu();
    let mut probe = ready(&world, 1);
    let import = |probe: &mut Probe, blocks: u64| {
        probe.ask(&format!("steer foreign {}", blocks * BLOCK));
        probe.ask(&format!("steer map_step {}", blocks * BLOCK));
        let before = maps(probe);
        let handle = probe.get("cuMemImportFromShareableHandle &0 7 1");
        assert_eq!(maps(probe) - before, 1);
        handle
    };
    let map =
        |at: u64, blocks: u64, handle| format!("cuMemMap {at} {} 0 {handle} 0", blocks * BLOCK);
    let most = CAP / BLOCK;
    for blocks in [2, 3, 1000, most - 1, most] {
        let handle = import(&mut probe, blocks);
        assert_eq!(share.used(), BLOCK);
        // The driver refuses.
        assert_eq!(probe.call(&map(4096, blocks - 1, handle)), 1);
        assert_eq!(share.used(), BLOCK);
        for at in [4096, CAP] {
            assert_eq!(probe.call(&map(at, blocks, handle)), 0);
            assert_eq!(share.used(), blocks * BLOCK, "mapped twice, and there once");
        }
        assert_eq!(
            probe.call(&format!("cuMemUnmap 4096 {}", blocks * BLOCK)),
            0
        );
        assert_eq!(probe.call(&format!("cuMemRelease {handle}")), 0);
        assert_eq!(share.used(), blocks * BLOCK);
        assert_eq!(
            probe.call(&format!("cuMemUnmap {CAP} {}", blocks * BLOCK)),
            0
        );
        assert_eq!(share.used(), 0);
    }
    // More than the share may hold, or has left.
    let taken = probe.must(&format!("alloc {}", 8 * BLOCK)).number(0);
    for blocks in [most - 7, most + 1, 100 * most] {
        let handle = import(&mut probe, blocks);
        let before = maps(&mut probe);
        assert_eq!(probe.call(&map(4096, blocks, handle)), OUT_OF_MEMORY);
        assert_eq!(maps(&mut probe), before, "before the driver");
        assert_eq!(share.used(), 9 * BLOCK);
        assert_eq!(probe.call(&format!("cuMemRelease {handle}")), 0);
        assert_eq!(share.used(), 8 * BLOCK);
    }
    probe.must(&format!("free {taken}"));
    // It never is mapped.
    let handle = import(&mut probe, 1000);
    // Nor by a tile or a multicast object, which do not show its size.
    probe.must(&format!("set 16 64 64 0 {} 64", 0x20u64 | 1 << 32));
    let array = probe.get("cuArray3DCreate_v2 &0 &16");
    probe.must(&format!("set 32 0 {array} 0 0 0 0 0 1 {handle} 0 1 0"));
    assert_eq!(probe.call("cuMemMapArrayAsync &32 1 0"), NOT_SUPPORTED);
    let object = probe.get("cuMulticastCreate &0 &16");
    let bind = format!(
        "cuMulticastBindMem {object} 0 {handle} {BLOCK} {} 0",
        2 * BLOCK
    );
    assert_eq!(probe.call(&bind), NOT_SUPPORTED);
    assert_eq!(share.used(), BLOCK);
    assert_eq!(probe.call(&format!("cuMemRelease {handle}")), 0);
    assert_eq!(share.used(), 0);
    // An error that says nothing about the size.
    for code in [OUT_OF_MEMORY, 800] {
        probe.ask(&format!("steer foreign {}", 8 * BLOCK));
        probe.ask(&format!("steer map_step {BLOCK}"));
        probe.ask(&format!("steer fail_next {code}"));
        let handle = probe.get("cuMemImportFromShareableHandle &0 7 1");
        assert_eq!(probe.call(&map(4096, 8, handle)), 0);
        assert_eq!(share.used(), 8 * BLOCK);
        assert_eq!(probe.call(&format!("cuMemUnmap 4096 {}", 8 * BLOCK)), 0);
        assert_eq!(probe.call(&format!("cuMemRelease {handle}")), 0);
        assert_eq!(share.used(), 0);
    }
}

/// Imports into a context, and mappings to its sparse arrays, end with it.
#[test]
fn what_a_context_holds_of_others_ends_with_it() {
    const BYTES: u64 = 10 * BLOCK;
    const CONTEXT: u64 = 0x1000;
    let (world, share) = one_gpu();
    let mut probe = ready(&world, 1);
    probe.ask(&format!("steer foreign {BYTES}"));
    let open = "cuIpcOpenMemHandle_v2 &0 0 0 0 0 0";
    probe.get(open);
    probe.get(open);
    assert_eq!(share.used(), BYTES);
    probe.must(&format!("destroy {CONTEXT}"));
    assert_eq!(share.used(), 0);
    // Another context gets its handle.
    probe.must("context 0");
    let pointer = probe.get(open);
    assert_eq!(share.used(), BYTES);
    assert_eq!(probe.call(&format!("cuIpcCloseMemHandle {pointer}")), 0);
    assert_eq!(share.used(), 0);
    // A sparse array of 64 × 64 floats, and memory that only the array keeps.
    probe.must(&format!("set 16 64 64 0 {} 64", 0x20u64 | 1 << 32));
    let array = probe.get("cuArray3DCreate_v2 &0 &16");
    probe.must("set 24 4294967297 1 0 0");
    let handle = probe.get(&format!("cuMemCreate &0 {BYTES} &24 0"));
    probe.must(&format!("set 32 0 {array} 0 0 0 0 0 1 {handle} 0 1 0"));
    assert_eq!(probe.call("cuMemMapArrayAsync &32 1 0"), 0);
    assert_eq!(probe.call(&format!("cuMemRelease {handle}")), 0);
    assert_eq!(share.used(), BYTES, "the array shows it");
    probe.must(&format!("destroy {CONTEXT}"));
    assert_eq!(share.used(), 0);
}

/// All descriptors of a real driver are of one file (`/dev/nvidiactl`). Each keeps its own memory, and this process's exports
/// are distinguished from another's.
#[test]
fn descriptors_of_one_file_are_told_apart() {
    const BYTES: u64 = 10 * BLOCK;
    const FOREIGN: u64 = 3 * BLOCK;
    let (world, share) = one_gpu();
    let mut probe = ready(&world, 1);
    probe.ask(&format!("steer foreign {FOREIGN}"));
    probe.must("set 16 4294967297 1 0 0");
    let handles = [(); 2].map(|()| probe.get(&format!("cuMemCreate &0 {BYTES} &16 0")));
    let before = probe.must("descriptors").number(0);
    let files = handles.map(|handle| {
        let export = format!("cuMemExportToShareableHandle &0 {handle} 1 0");
        probe.get(&export) & 0xffff_ffff
    });
    let after = probe.must("descriptors").number(0);
    assert_eq!(after - before, 3, "one of the shim's for both");
    let foreign = "open-to-write /usr/lib/tranche/driver/control";
    let foreign = probe.must(foreign).number(0);
    for (file, more) in [(files[0], 0), (files[1], 0), (foreign, FOREIGN)] {
        let handle = probe.get(&format!("cuMemImportFromShareableHandle &0 {file} 1"));
        assert_eq!(share.used(), 2 * BYTES + more);
        assert_eq!(probe.call(&format!("cuMemRelease {handle}")), 0);
        assert_eq!(share.used(), 2 * BYTES);
    }
    for handle in handles {
        assert_eq!(probe.call(&format!("cuMemRelease {handle}")), 0);
    }
    for (file, left) in files.into_iter().zip([BYTES, 0]) {
        probe.must(&format!("close {file}"));
        probe.must("info");
        assert_eq!(share.used(), left);
    }
    // The shim's witness is closed too.
    assert_eq!(probe.must("descriptors").number(0), before + 1);
}

/// The memory of a destroyed pool exists until the descriptors by which it was exported are closed.
#[test]
fn an_open_descriptor_keeps_what_a_pool_had() {
    const BYTES: u64 = 64 << 20;
    let (world, share) = one_gpu();
    let mut probe = ready(&world, 1);
    probe.ask("steer pool_keeps 1");
    probe.must("set 16 4294967297 1 0 0 0 0 0 0 0 0");
    let pool = probe.get("cuMemPoolCreate &0 &16");
    let pointer = probe.get(&format!("cuMemAllocFromPoolAsync &0 {BYTES} {pool} 0"));
    let export = format!("cuMemPoolExportToShareableHandle &0 {pool} 1 0");
    let files = [(); 2].map(|()| probe.get(&export) & 0xffff_ffff);
    assert_eq!(probe.call(&format!("cuMemPoolDestroy {pool}")), 0);
    probe.must(&format!("close {}", files[0]));
    probe.must(&format!("free {pointer}"));
    assert_eq!(share.used(), BYTES);
    let all = format!("alloc {CAP}");
    assert_eq!(probe.ask(&all).code, OUT_OF_MEMORY);
    probe.must(&format!("close {}", files[1]));
    probe.must(&all);
    assert_eq!(share.used(), CAP);
}

/// The memory that a graph takes at its first launch is charged before, and what the driver keeps afterwards
/// stays charged.
#[test]
fn a_graph_is_charged_before_it_is_launched() {
    const BYTES: u64 = 1 << 30;
    let (world, share) = one_gpu();
    let mut probe = ready(&world, 1);
    let graph = probe.get("cuGraphCreate &0 0");
    probe.must(&format!("set 16 1 1 0 0 0 0 0 0 0 0 0 0 0 {BYTES} 0"));
    probe.get(&format!("cuGraphAddMemAllocNode &0 {graph} 0 0 &16"));
    assert_eq!(share.used(), 0, "an address takes nothing");
    let executable = probe.get(&format!("cuGraphInstantiateWithFlags &0 {graph} 0"));
    assert_eq!(share.used(), BYTES);
    let rest = probe.must(&format!("alloc {}", CAP - BYTES)).number(0);
    assert_eq!(
        probe.call(&format!("cuGraphInstantiateWithFlags &0 {graph} 0")),
        OUT_OF_MEMORY
    );
    for _ in 0..2 {
        assert_eq!(probe.call(&format!("cuGraphLaunch {executable} 0")), 0);
        assert_eq!(probe.ask("steer held 0").code, i64::try_from(CAP).unwrap());
    }
    probe.must(&format!("free {rest}"));
    assert_eq!(probe.call(&format!("cuGraphExecDestroy {executable}")), 0);
    assert_eq!(share.used(), BYTES, "the driver keeps it");
    // Another allocation can use it.
    let all = probe.must(&format!("alloc {CAP}")).number(0);
    probe.must(&format!("free {all}"));
    assert_eq!(share.used(), 0);
}

/// A pool that grows by more than any known one: it does not keep what is not covered.
#[test]
fn a_pool_that_takes_too_much_is_refused() {
    let (world, share) = one_gpu();
    let mut probe = ready(&world, 1);
    probe.must(&format!("alloc {}", CAP - (64 << 20)));
    probe.ask(&format!("steer pool_step {}", 128 << 20));
    assert_eq!(probe.ask("async 4096").code, OUT_OF_MEMORY);
    probe.must("synchronize");
    assert_eq!(share.used(), CAP - (64 << 20));
    probe.ask(&format!("steer pool_step {}", 32 << 20));
    probe.must("async 4096");
    assert_eq!(share.used(), CAP - (32 << 20));
}

#[test]
fn a_pitched_allocation_is_charged_as_the_driver_pads_it() {
    let (world, share) = one_gpu();
    let mut probe = ready(&world, 1);
    let pointer = probe.must("pitch 100 100000").number(0);
    assert_eq!(share.used(), (512u64 * 100_000).next_multiple_of(BLOCK));
    probe.must(&format!("free {pointer}"));
    assert_eq!(share.used(), 0);
    // A driver that pads less, and one that pads more than any known one.
    probe.ask("steer pitch 128");
    let pointer = probe.must("pitch 100 100000").number(0);
    assert_eq!(share.used(), (128u64 * 100_000).next_multiple_of(BLOCK));
    probe.must(&format!("free {pointer}"));
    probe.ask("steer pitch 4096");
    probe.must("pitch 100 2000");
    let padded = (4096u64 * 2000).next_multiple_of(BLOCK);
    assert!(share.used() <= padded + BLOCK && share.used() >= 4096 * 2000);
    // The padding does not exceed the cap.
    probe.must(&format!("alloc {}", CAP - share.used() - BLOCK));
    assert_eq!(probe.ask("pitch 100 2000").code, OUT_OF_MEMORY);
    assert_eq!(share.used(), CAP - BLOCK);
    let held = u64::try_from(probe.ask("steer held 0").code).unwrap();
    assert!(held <= share.used(), "{held}");
}

#[test]
fn what_the_driver_refuses_is_not_charged() {
    let (world, share) = one_gpu();
    let mut probe = ready(&world, 1);
    for (command, code) in [
        ("alloc 4096", 2),
        ("managed 4096", 719),
        ("async 4096", 999),
        ("pitch 8 8", 2),
    ] {
        probe.ask(&format!("steer fail_next {code}"));
        assert_eq!(probe.ask(command).code, code);
        assert_eq!(share.used(), 0);
    }
    // Invalid arguments reach the driver, which refuses them.
    assert_eq!(probe.ask("alloc 0").code, 1);
    assert_eq!(probe.ask("alloc-null 4096").code, 1);
}

#[test]
fn a_free_that_the_driver_refuses_stays_charged() {
    let (world, share) = one_gpu();
    let mut probe = ready(&world, 1);
    let pointer = probe.must("alloc 4096").number(0);
    probe.ask("steer fail_next 700");
    assert_eq!(probe.ask(&format!("free {pointer}")).code, 700);
    assert_eq!(share.used(), BLOCK);
    probe.must(&format!("free {pointer}"));
    assert_eq!(share.used(), 0);
    // Freed twice, and never allocated: the driver returns the error.
    assert_eq!(probe.ask(&format!("free {pointer}")).code, 1);
    assert_eq!(probe.ask("free 12345").code, 1);
    assert_eq!(share.used(), 0);
}

#[test]
fn a_context_takes_its_memory_along() {
    let (world, share) = one_gpu();
    let mut probe = ready(&world, 1);
    let context = probe.must("context 0").number(0);
    probe.must("alloc 4096");
    probe.must("alloc 8192");
    probe.must("alloc 8000000");
    assert_eq!(share.used(), 5 * BLOCK);
    probe.must(&format!("destroy {context}"));
    assert_eq!(share.used(), 0);
}

#[test]
fn total_and_free_are_the_shares() {
    let (world, share) = one_gpu();
    let mut probe = ready(&world, 1);
    let info = probe.must("info");
    assert_eq!((info.number(0), info.number(1)), (CAP, CAP));
    assert_eq!(probe.must("total 0").number(0), CAP);
    // 32 bits cannot hold 20 GiB.
    assert_eq!(probe.must("total-legacy 0").number(0), u64::from(u32::MAX));
    probe.must("alloc 4096");
    assert_eq!(probe.must("info").number(0), CAP - BLOCK);
    assert_eq!(probe.must("info-free").number(0), CAP - BLOCK);
    assert_eq!(probe.must("info-total").number(1), CAP);
    probe.must("info-none");
    // A neighbour in the same share.
    let mut other = ready(&world, 1);
    other.must("alloc 1048576");
    assert_eq!(probe.must("info").number(0), CAP - 2 * BLOCK);
    assert_eq!(share.used(), 2 * BLOCK);
}

#[test]
fn free_is_no_more_than_the_device_has() {
    let world = World::new(Driver::Odd);
    // More than the odd GPU's 80 GiB: the shim does not report more than the device has, whatever the page says.
    world.share("gpu-0", GPU_0, Some(100 << 30));
    let mut probe = ready(&world, 1);
    let info = probe.must("info");
    assert_eq!((info.number(0), info.number(1)), (80 << 30, 80 << 30));
}

#[test]
fn each_gpu_has_its_own_cap() {
    let world = World::new(Driver::Odd);
    // The folders are in another order than the GPUs.
    let second = world.share("a", GPU_1, Some(40 << 30));
    let first = world.share("b", GPU_0, Some(20 << 30));
    let mut probe = ready(&world, 2);
    let context_0 = 0x1000;
    let context_1 = probe.must("context 1").number(0);
    for (context, device, share, cap) in [
        (context_1, 1, &second, 40u64 << 30),
        (context_0, 0, &first, 20 << 30),
    ] {
        probe.must(&format!("current {context}"));
        assert_eq!(probe.must("info").number(1), cap);
        assert_eq!(probe.must(&format!("total {device}")).number(0), cap);
        probe.must(&format!("alloc {cap}"));
        assert_eq!(probe.ask("alloc 1").code, OUT_OF_MEMORY);
        assert_eq!(share.used(), cap);
    }
}

#[test]
fn shares_of_one_gpu_add_up() {
    let world = World::new(Driver::Odd);
    let shares = [
        world.share("a", GPU_0, Some(3 << 30)),
        world.share("b", GPU_0, Some(2 << 30)),
    ];
    let mut probe = ready(&world, 1);
    assert_eq!(probe.must("info").number(1), 5 << 30);
    let large = probe.must(&format!("alloc {}", 4u64 << 30)).number(0);
    probe.must(&format!("alloc {}", 1u64 << 30));
    assert_eq!(probe.ask("alloc 1").code, OUT_OF_MEMORY);
    assert_eq!(shares.each_ref().map(Share::used), [3 << 30, 2 << 30]);
    assert_eq!(probe.must("info").number(0), 0);
    probe.must(&format!("free {large}"));
    assert_eq!(shares.iter().map(Share::used).sum::<u64>(), 1 << 30);
    probe.must(&format!("alloc {}", 4u64 << 30));
}

#[test]
fn a_gpu_without_a_cap_is_the_drivers() {
    let world = World::new(Driver::Odd);
    let share = world.share("gpu-0", GPU_0, None);
    let capped = world.share("gpu-1", GPU_1, Some(1 << 30));
    let mut probe = ready(&world, 2);
    assert_eq!(probe.must("info").number(1), 80 << 30);
    let pointer = probe.must(&format!("alloc {}", 70u64 << 30)).number(0);
    probe.must(&format!("free {pointer}"));
    assert_eq!(share.used(), 0);
    probe.must("context 1");
    assert_eq!(
        probe.ask(&format!("alloc {}", 2u64 << 30)).code,
        OUT_OF_MEMORY
    );
    assert_eq!(capped.used(), 0);
}

/// What the process `dead` left is given back within a second: then no call fails any more.
fn succeeds_soon(probe: &mut Probe, call: &str, dead: &str) {
    let start = Instant::now();
    loop {
        let asked = start.elapsed();
        if probe.ask(call).code == 0 {
            return;
        }
        assert!(asked < Duration::from_secs(1), "{dead}: it stays charged");
    }
}

#[test]
fn a_killed_process_returns_its_charge() {
    let (world, share) = one_gpu();
    let mut victim = ready(&world, 1);
    victim.must(&format!("alloc {CAP}"));
    let mut other = ready(&world, 1);
    assert_eq!(other.ask("alloc 1").code, OUT_OF_MEMORY);
    victim.kill();
    // The last search was a moment ago, so it is found soon, but not at once.
    succeeds_soon(&mut other, "alloc 4096", "the victim");
    assert_eq!(share.used(), BLOCK);
    let processes: Vec<_> = share.read(|account| account.processes().collect());
    assert_eq!(processes.len(), 1);
    assert_eq!(
        (processes[0].pid, processes[0].charged),
        (u64::from(other.pid()), BLOCK)
    );
}

/// What a process left is not reported to the next one as used.
#[test]
fn memory_of_an_ended_process_is_free_for_the_next() {
    let (world, share) = one_gpu();
    let mut first = ready(&world, 1);
    let mut second = ready(&world, 1);
    first.must("alloc 1048576");
    first.kill();
    assert_eq!(share.used(), BLOCK);
    assert_eq!(second.must("info").number(0), CAP);
    second.must("alloc 1048576");
    second.kill();
    let mut third = ready(&world, 1);
    assert_eq!(third.must("info").number(0), CAP);
    assert_eq!(share.used(), 0, "who asks looks for the dead");
}

#[test]
fn closing_all_descriptors_does_not_give_the_slot_away() {
    let (world, share) = one_gpu();
    let mut probe = world.probe("name");
    let before = probe.must("descriptors");
    start(&mut probe, 1);
    probe.must(&format!("alloc {CAP}"));
    assert_eq!(
        probe.must("descriptors").number(0),
        before.number(0) + 1,
        "one descriptor of the share, which children inherit"
    );
    probe.must("close-all");
    let mut other = ready(&world, 1);
    for _ in 0..100 {
        assert_eq!(other.ask("alloc 1").code, OUT_OF_MEMORY);
    }
    assert_eq!(share.used(), CAP);
}

#[test]
fn a_child_has_its_own_slot_and_charges() {
    let (world, share) = one_gpu();
    let mut probe = ready(&world, 1);
    let pointer = probe.must("alloc 4096").number(0);
    assert_eq!(probe.ask("fork").values, ["child"]);
    // In the child, this driver (which keeps its state across fork) frees the parent's memory: the charge
    // stays the parent's.
    probe.must("alloc 1048576");
    assert_eq!(share.used(), 2 * BLOCK);
    assert_eq!(share.read(|account| account.processes().count()), 2);
    probe.must(&format!("free {pointer}"));
    assert_eq!(share.used(), 2 * BLOCK);
    assert_eq!(probe.must("info").number(0), CAP - share.used());
    probe.send("end");
    assert_eq!(probe.receive().code, 0);
    assert_eq!(probe.receive().values, ["parent"]);
    // The dead child's charge is given back when another process needs it.
    probe.must(&format!("alloc {}", CAP - BLOCK));
    assert_eq!(share.used(), CAP);
    probe.must(&format!("free {pointer}"));
    assert_eq!(share.used(), CAP - BLOCK);
}

/// exec gives back all that a program was charged.
#[test]
fn exec_gives_everything_back() {
    let (world, share) = one_gpu();
    let mut probe = ready(&world, 1);
    probe.must(&format!("alloc {CAP}"));
    probe.must("exec");
    start(&mut probe, 1);
    probe.must(&format!("alloc {CAP}"));
    assert_eq!(share.used(), CAP);
}

/// A request that is refused does not reserve anything meanwhile that another one would need.
#[test]
fn a_refusal_does_not_refuse_others() {
    for shares in [1, 2] {
        let world = World::new(Driver::Odd);
        for nth in 0..shares {
            world.share(&format!("share-{nth}"), GPU_0, Some(CAP / shares));
        }
        let mut greedy = ready(&world, 1);
        let mut modest = ready(&world, 1);
        greedy.must(&format!("alloc {}", CAP / 2));
        greedy.send(&format!("repeat 500000 {}", CAP / 4 * 3));
        let answer = modest.must(&format!("repeat 250000 {}", 2 << 20));
        assert_eq!(answer.number(0), 0, "{shares} shares: {answer:?}");
        assert_eq!(greedy.receive().number(0), 500_000);
    }
}

/// A driver frees a process's memory when the last of its files is closed, and a forked child has these files
/// too, such as a worker that outlives its training script.
#[test]
fn a_dead_parents_memory_is_charged_until_its_child_closes_it() {
    for last in ["end", "exec", "close-all"] {
        let (world, share) = one_gpu();
        let mut parent = ready(&world, 1);
        parent.must(&format!("alloc {CAP}"));
        let mut other = ready(&world, 1);
        parent.ask("fork");
        parent.kill();
        // The child continues with the parent's pipes.
        for _ in 0..20 {
            assert_eq!(parent.ask("alloc 4096").code, OUT_OF_MEMORY);
            assert_eq!(other.ask("alloc 4096").code, OUT_OF_MEMORY);
        }
        assert_eq!(share.used(), CAP);
        parent.send(last);
        succeeds_soon(&mut other, "alloc 4096", last);
        assert_eq!(share.used(), BLOCK);
    }
}

#[test]
fn threads_and_processes_never_exceed_the_cap() {
    let (world, share) = one_gpu();
    let mut probes: Vec<Probe> = (0..6).map(|_| ready(&world, 1)).collect();
    // Allocations of up to an eighth of the cap: most of the time it is full.
    for probe in &mut probes {
        probe.send(&format!("threads 4 50000 {}", CAP / 8));
    }
    let mut victim = ready(&world, 1);
    let mut kills = 0;
    let done = std::thread::scope(|scope| {
        let workers: Vec<_> = probes
            .iter_mut()
            .map(|probe| scope.spawn(|| probe.receive()))
            .collect();
        while workers.iter().any(|worker| !worker.is_finished()) {
            victim.send(&format!("threads 4 1000000 {}", CAP / 8));
            std::thread::sleep(Duration::from_millis(10));
            assert!(share.used() <= CAP);
            victim.kill();
            kills += 1;
            victim = ready(&world, 1);
        }
        workers
            .into_iter()
            .map(|worker| worker.join().unwrap())
            .collect::<Vec<_>>()
    });
    for answer in &done {
        assert!(answer.number(0) > 0 && answer.number(1) > 0, "{answer:?}");
        assert_eq!(answer.number(2), 0, "{answer:?}");
    }
    assert!(kills > 1, "{kills}");
    assert!(share.read(|account| account.peak()) <= CAP);
    assert!(share.read(|account| account.peak()) > CAP / 8 * 7);
    // All is given back, also what killed processes held, at whatever instruction they were killed.
    succeeds_soon(&mut victim, &format!("alloc {CAP}"), "the killed");
}

#[test]
fn arguments_in_all_registers_and_on_the_stack_come_through() {
    let (world, _) = one_gpu();
    let mut probe = ready(&world, 1);
    // 1+2·2+3·3+5·4+7·5+11·6+13·7+17·8+19·9+23·10+29·11; the first call and the second, which is direct.
    // One function that is only forwarded, with eight arguments, and one that we handle, with eleven.
    let sum = 1 + 4 + 9 + 20 + 35 + 66 + 91 + 136;
    for _ in 0..2 {
        let answer = probe.ask("registers");
        assert_eq!(answer.code, sum + 171 + 230 + 319);
        assert_eq!(
            (answer.number(0), answer.number(1)),
            (sum.unsigned_abs(), 1500)
        );
    }
}
