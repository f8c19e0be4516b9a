//! Spares, which a process freed and keeps for its next allocation: they are free memory for every process.

use tranche_shim_tests::{Driver, Probe, Share, World};

use crate::cap::{BLOCK, CAP, GPU_0, one_gpu, ready};

const OUT_OF_MEMORY: i64 = 2;
/// The largest spare of a process.
const MOST: u64 = 16 << 20;

/// Allocates as much as a spare holds, in blocks, and frees it.
fn keep(probe: &mut Probe) {
    let pointers: Vec<u64> = (0..MOST / BLOCK)
        .map(|_| probe.must(&format!("alloc {BLOCK}")).number(0))
        .collect();
    for pointer in pointers {
        probe.must(&format!("free {pointer}"));
    }
}

/// Bytes of all spares.
fn kept(share: &Share) -> u64 {
    share.read(|account| account.reserved() - account.used())
}

#[test]
fn the_spares_of_four_processes_are_free_for_a_fifth() {
    let (world, share) = one_gpu();
    let mut four: Vec<Probe> = (0..4).map(|_| ready(&world, 1)).collect();
    let mut fifth = ready(&world, 1);
    four.iter_mut().for_each(keep);
    assert_eq!((share.used(), kept(&share)), (0, 4 * MOST));
    for probe in four.iter_mut().chain([&mut fifth]) {
        assert_eq!(probe.must("info").number(0), CAP);
    }
    let all = format!("alloc {CAP}");
    fifth.must(&all);
    assert_eq!((share.used(), kept(&share)), (CAP, 0));
    for probe in &mut four {
        assert_eq!(probe.ask("alloc 1").code, OUT_OF_MEMORY);
        assert_eq!(probe.must("info").number(0), 0);
    }
    fifth.must("free-last");
    keep(&mut fifth);
    // A process that has a part of it itself.
    keep(&mut four[0]);
    four[0].must(&all);
    assert_eq!(fifth.ask("alloc 1").code, OUT_OF_MEMORY);
    assert_eq!(share.read(|account| account.peak()), CAP);
}

#[test]
fn the_spare_of_a_killed_process_is_free() {
    let (world, share) = one_gpu();
    let (mut victim, mut other) = (ready(&world, 1), ready(&world, 1));
    victim.must(&format!("alloc {BLOCK}"));
    keep(&mut victim);
    assert_eq!((share.used(), kept(&share)), (BLOCK, MOST));
    victim.kill();
    other.must(&format!("alloc {CAP}"));
    assert_eq!((share.used(), kept(&share)), (CAP, 0));
}

/// The allocations of four processes always fit together, but not with their spares: no process is refused.
#[test]
fn processes_that_keep_more_than_fits_are_never_refused() {
    let world = World::new(Driver::Odd);
    let share = world.share("gpu-0", GPU_0, Some(5 * MOST / 4));
    let mut probes: Vec<Probe> = (0..4).map(|_| ready(&world, 1)).collect();
    for round in 0..20 {
        keep(&mut probes[round % 4]);
        for probe in &mut probes {
            probe.send(&format!("repeat 500 {}", MOST / 4));
        }
        for probe in &mut probes {
            let answer = probe.receive();
            assert_eq!((answer.code, answer.number(0)), (0, 0), "{answer:?}");
        }
        assert_eq!(share.used(), 0);
    }
}
