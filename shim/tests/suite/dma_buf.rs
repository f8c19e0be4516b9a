//! The memory of `dma-buf`s stays charged until the process ends, because it is unknown when their last descriptor is closed
//! (ADR 0027).

use tranche_shim_tests::{Driver, Machine, Probe, World};

use crate::cap::{BLOCK, CAP, one_gpu, ready};
use crate::families::{Case, create, reserve};

const DONE: i64 = 0;
const INVALID_VALUE: i64 = 1;
const OUT_OF_MEMORY: i64 = 2;
const BYTES: u64 = 64 << 20;

/// Asks for a `dma-buf` of a range; returns the driver's code.
fn ask(probe: &mut Probe, start: u64, bytes: u64) -> i64 {
    probe.call(&format!(
        "cuMemGetHandleForAddressRange &0 {start} {bytes} 1 0"
    ))
}

/// A `dma-buf` of a range.
fn dma_buf(probe: &mut Probe, start: u64, bytes: u64) -> u64 {
    assert_eq!(ask(probe, start, bytes), DONE);
    probe.must("words 0 1").number(0) & 0xffff_ffff
}

fn alloc(probe: &mut Probe, bytes: u64) -> u64 {
    probe.must(&format!("alloc {bytes}")).number(0)
}

fn free(probe: &mut Probe, pointer: u64) {
    probe.must(&format!("free {pointer}"));
}

/// Maps memory of so many bytes at an address; only the mapping keeps it.
fn map(probe: &mut Probe, at: u64, bytes: u64) {
    let handle = create(probe, bytes);
    assert_eq!(
        probe.call(&format!("cuMemMap {at} {bytes} 0 {handle} 0")),
        DONE
    );
    assert_eq!(probe.call(&format!("cuMemRelease {handle}")), DONE);
}

/// The memory exists until the last descriptor is closed, and is charged until the process ends.
#[test]
fn memory_that_is_freed_stays_charged() {
    let mut case = Case::new();
    let probe = &mut case.probe;
    let pointer = alloc(probe, BYTES);
    // Further ones of parts of the range: it is the same memory.
    let file = dma_buf(probe, pointer + (4 << 20), 8192);
    for _ in 0..10 {
        let file = dma_buf(probe, pointer, BYTES);
        probe.must(&format!("close {file}"));
    }
    case.holds(BYTES);
    free(&mut case.probe, pointer);
    case.holds(BYTES);
    let rest = alloc(&mut case.probe, CAP - BYTES);
    assert_eq!(case.probe.ask("alloc 1").code, OUT_OF_MEMORY);
    case.holds(CAP);
    free(&mut case.probe, rest);
    // It cannot be opened again, as the shim does with other descriptors.
    let path = format!("/proc/{}/fd/{file}", case.probe.pid());
    let error = std::fs::File::open(path).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(6), "ENXIO");
    // It is passed to another process, and closed here.
    let mut other = case.world.probe("name");
    let take = format!("take-descriptor {} {file}", case.probe.pid());
    let taken = other.must(&take).number(0);
    case.probe.must(&format!("close {file}"));
    case.probe.must("info");
    case.holds(BYTES);
    other.must(&format!("close {taken}"));
    case.wait_until_held(0);
    assert_eq!(case.probe.must("info").number(0), CAP - BYTES);
    // Another process of the share can use all that the first one leaves.
    case.probe.must("end");
    case.probe.wait();
    other.must("init");
    other.must("primary 0");
    alloc(&mut other, CAP);
}

/// Memory is allocated, made into a `dma-buf` and freed until the cap is full.
#[test]
fn repeated_dma_bufs_never_exceed_the_cap() {
    let large: fn(&mut Probe) -> i64 = |probe| {
        let answer = probe.ask(&format!("alloc {}", 8 * BLOCK));
        if answer.code != DONE {
            return answer.code;
        }
        dma_buf(probe, answer.number(0), 4096);
        free(probe, answer.number(0));
        DONE
    };
    let small: fn(&mut Probe) -> i64 = |probe| {
        // A block has room for two or for more of them, in whatever order they are freed.
        let pointers = [(); 3].map(|()| probe.ask("alloc 700000"));
        let mut code = DONE;
        for answer in pointers {
            if answer.code == DONE {
                let whole = ask(probe, answer.number(0) & !4095, 4096);
                free(probe, answer.number(0));
                code = code.max(whole);
            } else {
                code = answer.code;
            }
        }
        code
    };
    let mapped: fn(&mut Probe) -> i64 = |probe| {
        let base = reserve(probe, 8 * BLOCK);
        probe.must("set 16 4294967297 1 0 0");
        let code = probe.call(&format!("cuMemCreate &0 {} &16 0", 8 * BLOCK));
        if code != DONE {
            return code;
        }
        let handle = probe.must("words 0 1").number(0);
        let bytes = 8 * BLOCK;
        assert_eq!(
            probe.call(&format!("cuMemMap {base} {bytes} 0 {handle} 0")),
            DONE
        );
        assert_eq!(probe.call(&format!("cuMemRelease {handle}")), DONE);
        dma_buf(probe, base + BLOCK, 4096);
        assert_eq!(probe.call(&format!("cuMemUnmap {base} {bytes}")), DONE);
        DONE
    };
    for machine in Machine::ALL {
        for (what, way) in [("large", large), ("small", small), ("mapped", mapped)] {
            let mut case = Case::on(machine);
            alloc(&mut case.probe, CAP - 100 * BLOCK);
            let full = (0..200).any(|_| way(&mut case.probe) == OUT_OF_MEMORY);
            assert!(full, "{what}, {machine:?}: nothing was left");
            let (peak, limit) = (case.peak(), CAP + case.context);
            assert!(peak <= limit, "{what}, {machine:?}: {peak} of {limit}");
            assert!(case.share.used() <= limit);
        }
    }
}

#[test]
fn a_range_over_two_mappings_keeps_both() {
    let mut case = Case::new();
    let probe = &mut case.probe;
    let base = reserve(probe, 12 * BLOCK);
    for nth in 0..3 {
        map(probe, base + nth * 4 * BLOCK, 4 * BLOCK);
    }
    let file = dma_buf(probe, base + 2 * BLOCK, 4 * BLOCK);
    case.holds(12 * BLOCK);
    let unmap = format!("cuMemUnmap {base} {}", 12 * BLOCK);
    assert_eq!(case.probe.call(&unmap), DONE);
    case.holds(8 * BLOCK);
    case.probe.must(&format!("close {file}"));
    case.wait_until_held(0);
    assert_eq!(case.share.used(), 8 * BLOCK + case.context);
}

/// A `dma-buf` keeps the whole block that a small allocation shares with others.
#[test]
fn a_small_allocation_is_charged_its_block() {
    let mut case = Case::new();
    // An allocation alone in its block needs no more than before, so a full cap has room for it.
    let alone = alloc(&mut case.probe, 700_000);
    let rest = alloc(&mut case.probe, CAP - BLOCK);
    for _ in 0..3 {
        dma_buf(&mut case.probe, alone, 4096);
    }
    case.holds(CAP);
    free(&mut case.probe, rest);
    case.holds(BLOCK);
    free(&mut case.probe, alone);
    case.holds(BLOCK);
    // One of two allocations in another block. The other one keeps the block's charge.
    let [first, second] = [(); 2].map(|()| alloc(&mut case.probe, 700_000));
    assert_eq!(first >> 21, second >> 21);
    case.holds(2 * BLOCK);
    for _ in 0..3 {
        dma_buf(&mut case.probe, first, 4096);
    }
    assert_eq!(case.share.used(), 3 * BLOCK + case.context);
    free(&mut case.probe, second);
    case.holds(2 * BLOCK);
    free(&mut case.probe, first);
    case.holds(2 * BLOCK);
}

/// A range has whole pages: it may begin before the allocation, where there is no memory.
#[test]
fn an_allocation_within_a_page_is_found() {
    let mut case = Case::on(Machine::Realistic);
    let [first, second] = [512, 1536].map(|bytes| alloc(&mut case.probe, bytes));
    assert_eq!(first >> 12, second >> 12, "in one page");
    free(&mut case.probe, first);
    dma_buf(&mut case.probe, first & !4095, 4096);
    free(&mut case.probe, second);
    case.holds(BLOCK);
}

#[test]
fn a_call_that_fails_leaves_no_charge() {
    let mut case = Case::new();
    let probe = &mut case.probe;
    let large = alloc(probe, BYTES);
    let small = [(); 2].map(|()| alloc(probe, 700_000));
    let base = reserve(probe, 8 * BLOCK);
    map(probe, base, 4 * BLOCK);
    let refuse_all = |probe: &mut Probe| {
        for start in [large, small[0], base] {
            // Not of whole pages; and a handle of an unknown kind.
            assert_eq!(ask(probe, start, 100), INVALID_VALUE);
            let kind = format!("cuMemGetHandleForAddressRange &0 {start} 4096 7 0");
            assert_eq!(probe.call(&kind), INVALID_VALUE);
        }
        // A range that is not mapped to its end, and one without memory.
        assert_eq!(ask(probe, base, 8 * BLOCK), INVALID_VALUE);
        assert_eq!(ask(probe, 4096, 4096), INVALID_VALUE);
        assert_eq!(ask(probe, large, !4095), INVALID_VALUE);
    };
    refuse_all(probe);
    case.holds(BYTES + BLOCK + 4 * BLOCK);
    // If the cap has no room for the block of a small allocation, the driver is not called.
    let probe = &mut case.probe;
    let rest = alloc(probe, CAP - BYTES - 5 * BLOCK);
    assert_eq!(ask(probe, small[0], 4096), OUT_OF_MEMORY);
    dma_buf(probe, rest, 4096);
    for start in [large, base] {
        assert_eq!(ask(probe, start, 100), INVALID_VALUE);
    }
    let unmap = format!("cuMemUnmap {base} {}", 4 * BLOCK);
    assert_eq!(probe.call(&unmap), DONE);
    for pointer in [large, small[0], small[1]] {
        free(probe, pointer);
    }
    case.holds(CAP - BYTES - 5 * BLOCK);
}

/// The driver frees a context's memory with it, except for what a `dma-buf` keeps.
#[test]
fn it_outlives_its_context() {
    let mut case = Case::new();
    let [own, other] = [(); 2].map(|()| alloc(&mut case.probe, BYTES));
    let file = dma_buf(&mut case.probe, own, BYTES);
    case.holds(2 * BYTES);
    case.probe.must("reset 0");
    assert_eq!(case.share.used(), BYTES);
    case.probe.must("primary 0");
    case.holds(BYTES);
    // Another allocation has its address now.
    let again = alloc(&mut case.probe, BYTES);
    assert!([own, other].contains(&again), "{again:#x}");
    case.holds(2 * BYTES);
    free(&mut case.probe, again);
    case.holds(BYTES);
    case.probe.must(&format!("close {file}"));
    case.wait_until_held(0);
    assert_eq!(case.share.used(), BYTES + case.context);
    // A failed call does not keep it.
    let last = alloc(&mut case.probe, BYTES);
    assert_eq!(ask(&mut case.probe, last, 100), INVALID_VALUE);
    case.probe.must("reset 0");
    assert_eq!(case.share.used(), BYTES);
}

/// For memory that is not a whole allocation, all blocks in which it may lie are charged again, each time.
#[test]
fn what_cannot_be_matched_is_charged_anew() {
    const FOREIGN: u64 = 3 * BLOCK;
    let (world, share) = one_gpu();
    let mut probe = ready(&world, 1);
    probe.ask(&format!("steer foreign {FOREIGN}"));
    let pooled = probe.must(&format!("async {BYTES}")).number(0);
    let mut used = share.used();
    for (start, more) in [
        (0x5000_0000_0000, FOREIGN),
        // Not at the beginning of a block.
        (0x5000_0010_0000, FOREIGN + BLOCK),
        (pooled, BYTES),
    ] {
        probe.ask("steer fail_next 801");
        assert_eq!(ask(&mut probe, start, 4096), 801);
        assert_eq!(share.used(), used, "{start:#x}");
        dma_buf(&mut probe, start, 4096);
        used += more;
        assert_eq!(share.used(), used, "{start:#x}");
    }
    alloc(&mut probe, CAP - used);
    assert_eq!(ask(&mut probe, 0x5000_0000_0000, 4096), OUT_OF_MEMORY);
    assert_eq!(share.used(), CAP);
}

/// Memory that another process exported is kept too, whether or not this process closes it.
#[test]
fn an_import_stays_charged() {
    let (world, share) = one_gpu();
    let mut probe = ready(&world, 1);
    probe.ask(&format!("steer foreign {BYTES}"));
    let pointer = probe.get("cuIpcOpenMemHandle_v2 &0 0 0 0 0 0");
    assert_eq!(share.used(), BYTES);
    for _ in 0..3 {
        dma_buf(&mut probe, pointer, 4096);
    }
    assert_eq!(probe.call(&format!("cuIpcCloseMemHandle {pointer}")), DONE);
    assert_eq!(share.used(), BYTES);
}

/// The device's attribute is the driver's answer.
#[test]
fn the_device_says_whether_it_can() {
    let world = World::new(Driver::Machine(Machine::Simple, 1));
    let gpu = world.node().gpus().remove(0);
    let _share = world.share("gpu-0", &gpu.uuid, Some(CAP));
    let mut probe = world.probe("name");
    probe.must("init");
    assert_eq!(probe.call("cuDeviceGetAttribute &0 124 0"), DONE);
    assert_eq!(probe.must("words 0 1").number(0) & 0xffff_ffff, 1);
}
