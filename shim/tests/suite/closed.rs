//! If anything about a share is wrong, the GPU is not used, and a line on stderr says why.

use std::fs;

use tranche_shim_core::{AccountPage, CapPage, ComputePolicy, Priority, cap};
use tranche_shim_tests::{DRIVER, Driver, Probe, SHARES, World, compile, probe_path};

use crate::cap::{CAP, GPU_0, ready};

const NOT_PERMITTED: i64 = 800;
const NOT_INITIALISED: i64 = 3;
const NO_DRIVER: i64 = 303;
const OUT_OF_MEMORY: i64 = 2;

/// Checks that `cuInit` fails, that its one line has these words, and that nothing can be allocated.
fn refuses(world: &World, words: &[&str]) {
    let mut probe = world.probe("name");
    probe.ask("count");
    assert_eq!(probe.ask("init").code, NOT_PERMITTED);
    let code = probe.ask("alloc 4096").code;
    assert!(matches!(code, NOT_INITIALISED | NOT_PERMITTED), "{code}");
    assert_eq!(probe.ask("init").code, NOT_PERMITTED);
    says(&mut probe, words);
}

fn says(probe: &mut Probe, words: &[&str]) {
    let stderr = probe.stderr();
    assert_eq!(stderr.lines().count(), 1, "one line: {stderr}");
    assert!(stderr.starts_with("tranche: "), "{stderr}");
    for word in words {
        assert!(stderr.contains(word), "{word}: {stderr}");
    }
}

fn page(change: impl FnOnce(&mut CapPage<'_>)) -> Vec<u8> {
    let mut page = CapPage {
        gpu_uuid: GPU_0,
        memory_limit: Some(CAP),
        resident_limit: None,
        context_memory: 0,
        cores: None,
        mps_threads: None,
        compute_policy: ComputePolicy::Strict,
        priority: Priority::Normal,
        claim_uid: "5f0c2b9e-0000-4000-8000-000000000001",
        device_key: "gpu-0",
    };
    change(&mut page);
    page.encode().unwrap().to_vec()
}

#[test]
fn without_shares() {
    let world = World::new(Driver::Odd);
    refuses(&world, &[SHARES, "empty", "recreate the pod"]);
    fs::remove_dir(SHARES).unwrap();
    refuses(
        &world,
        &[SHARES, "cannot be read (errno 2)", "recreate the pod"],
    );
}

/// In a sandbox (gVisor) the message names what its kernel lacks, not another cause.
#[test]
fn a_kernel_that_cannot_wipe_memory_on_fork_is_refused() {
    let world = World::new(Driver::Odd);
    world.share("gpu-0", GPU_0, Some(CAP));
    let library = world.folder().join("no-wipe.so");
    compile("no-wipe.c", &library, &["-shared", "-fPIC"]);
    let mut command = world.command(probe_path());
    command.arg("name").env("LD_PRELOAD", library);
    let mut probe = Probe::by(&mut command);
    probe.ask("count");
    assert_eq!(probe.ask("init").code, NOT_PERMITTED);
    says(
        &mut probe,
        &[
            "madvise(MADV_WIPEONFORK) (errno 22)",
            "gVisor",
            "runtime class",
        ],
    );
}

#[test]
fn without_a_page() {
    let world = World::new(Driver::Odd);
    fs::create_dir(format!("{SHARES}/gpu-0")).unwrap();
    refuses(&world, &["gpu-0/cap", "errno 2"]);
}

#[test]
fn a_page_that_the_container_can_write_is_refused() {
    let world = World::new(Driver::Odd);
    let share = world.share("gpu-0", GPU_0, Some(CAP));
    world.make_writable(&share);
    refuses(&world, &["gpu-0/cap", "read-only"]);
    drop(world);

    // A page in the container's own file system.
    let world = World::new(Driver::Odd);
    fs::create_dir(format!("{SHARES}/gpu-0")).unwrap();
    fs::write(format!("{SHARES}/gpu-0/cap"), page(|_| {})).unwrap();
    fs::write(format!("{SHARES}/gpu-0/account"), AccountPage::initial()).unwrap();
    refuses(&world, &["gpu-0/cap", "read-only"]);
}

#[test]
fn a_corrupt_page_is_refused() {
    for (at, words) in [
        (0, "not a page of Tranche"),
        (16, "checksum"),
        (200, "checksum"),
    ] {
        let world = World::new(Driver::Odd);
        let mut bytes = page(|_| {});
        bytes[at] ^= 1;
        world.share_with("gpu-0", &bytes, AccountPage::initial());
        refuses(&world, &["gpu-0/cap", words]);
    }
    let world = World::new(Driver::Odd);
    world.share_with("gpu-0", &page(|_| {})[..100], AccountPage::initial());
    refuses(&world, &["gpu-0/cap", "100 bytes, not 4096"]);
}

#[test]
fn a_page_of_another_release_is_refused() {
    let world = World::new(Driver::Odd);
    let mut bytes = page(|_| {});
    bytes[8] = 99;
    world.share_with("gpu-0", &bytes, AccountPage::initial());
    let reads = format!("reads {}", cap::ABI);
    refuses(
        &world,
        &["gpu-0/cap", "layout version 99", &reads, "same release"],
    );
}

#[test]
fn one_wrong_page_among_right_ones_is_refused() {
    let world = World::new(Driver::Odd);
    world.share("gpu-0", GPU_0, Some(CAP));
    world.share_with("gpu-1", &[0; 4096], AccountPage::initial());
    refuses(&world, &["gpu-1/cap"]);
}

#[test]
fn a_wrong_account_is_refused() {
    let mut other = AccountPage::initial().to_vec();
    other[8] = 7;
    for (account, words) in [
        (&other[..], "layout version 7"),
        (&other[..4096], "4096 bytes"),
        (&[], "0 bytes"),
    ] {
        let world = World::new(Driver::Odd);
        world.share_with("gpu-0", &page(|_| {}), account);
        let mut probe = world.probe("name");
        probe.ask("count");
        probe.ask("steer devices 1");
        assert_eq!(probe.ask("init").code, NOT_PERMITTED);
        says(&mut probe, &["gpu-0/account", words]);
    }
}

#[test]
fn a_gpu_without_a_page_is_refused() {
    let world = World::new(Driver::Odd);
    world.share("gpu-0", GPU_0, Some(CAP));
    // Two GPUs are visible.
    refuses(
        &world,
        &[
            "GPU-11111111-1111-1111-1111-111111111101",
            "without a page",
            "recreate the pod",
        ],
    );
}

#[test]
fn without_a_driver() {
    let world = World::new(Driver::Missing);
    world.share("gpu-0", GPU_0, Some(CAP));
    let mut probe = world.probe("name");
    assert_eq!(probe.ask("count").code, NO_DRIVER);
    assert_eq!(probe.ask("init").code, NO_DRIVER);
    assert_eq!(probe.ask("alloc 4096").code, NO_DRIVER);
    says(&mut probe, &[DRIVER, "driver"]);
}

/// A wrong mount puts the shim where the driver should be: no endless loop.
#[test]
fn the_shim_as_its_own_driver_is_refused() {
    let world = World::new(Driver::Missing);
    world.share("gpu-0", GPU_0, Some(CAP));
    fs::hard_link("/usr/lib/tranche/libcuda.so.1", DRIVER).unwrap();
    let mut probe = world.probe("name");
    assert_eq!(probe.ask("init").code, NO_DRIVER);
    says(&mut probe, &["not the driver's library"]);
}

#[test]
fn a_repaired_share_works_in_the_same_process() {
    let world = World::new(Driver::Odd);
    let mut probe = world.probe("name");
    probe.ask("count");
    probe.ask("steer devices 1");
    assert_eq!(probe.ask("init").code, NOT_PERMITTED);
    world.share("gpu-0", GPU_0, Some(CAP));
    probe.must("init");
    probe.must("context 0");
    assert_eq!(probe.must("info").number(1), CAP);
}

/// A newer driver's unknown variant, which would bypass the cap, is not handed out; known ones are.
#[test]
fn an_unknown_variant_is_not_handed_out() {
    let world = World::new(Driver::Odd);
    world.share("gpu-0", GPU_0, Some(CAP));
    let mut probe = world.probe("name");
    let known = probe.ask("address cuMemAlloc 13000 0");
    assert_eq!((known.code, known.values[2].as_str()), (0, "cuMemAlloc_v2"));
    assert!(
        known.values[1].starts_with("/usr/lib/tranche/lib"),
        "{known:?}"
    );
    let unknown = probe.ask("address cuMemAlloc 14000 0");
    assert_eq!(
        (unknown.code, unknown.values.join(" ").as_str()),
        (500, "1 - -")
    );
    says(&mut probe, &["cuMemAlloc", "newer release"]);
}

/// So is a newer driver's function that the shim does not know.
#[test]
fn an_unknown_function_is_not_handed_out() {
    let world = World::new(Driver::Odd);
    world.share("gpu-0", GPU_0, Some(CAP));
    let mut probe = world.probe("name");
    let passes = probe.ask("address cuDriverGetVersion 12000 0");
    assert_eq!(passes.code, 0, "{passes:?}");
    let unknown = probe.ask("address cuFutureAlloc 12000 0");
    assert_eq!(
        (unknown.code, unknown.values.join(" ").as_str()),
        (500, "1 - -")
    );
    says(&mut probe, &["cuFutureAlloc", "newer release"]);
}

/// A context's limit that the shim does not know might take memory, and so may moving a process to another GPU.
#[test]
fn unknown_limits_and_moves_to_another_gpu_are_refused() {
    const UNSUPPORTED_LIMIT: i64 = 215;
    const NOT_SUPPORTED: i64 = 801;
    const PER_BLOCK: u32 = 10;
    // The odd driver's multiprocessor runs 20 blocks.
    const BLOCKS: u64 = 20;
    let world = World::new(Driver::Odd);
    let share = world.share("gpu-0", GPU_0, Some(CAP));
    let mut probe = ready(&world, 1);
    let before = share.used();
    assert_eq!(probe.call("cuCtxSetLimit 6 1000000"), 0);
    assert_eq!(probe.call("cuCtxSetLimit 11 1"), UNSUPPORTED_LIMIT);
    let per_block = |bytes: u64| format!("cuCtxSetLimit {PER_BLOCK} {bytes}");
    assert_eq!(probe.call(&per_block(2 * CAP / BLOCKS)), OUT_OF_MEMORY);
    assert_eq!(share.used(), before);
    assert_eq!(probe.call(&per_block(1 << 20)), 0);
    assert!(share.used() >= before + (BLOCKS << 20));
    assert_eq!(probe.call(&per_block(0)), 0);
    assert_eq!(share.used(), before);

    let restore = "cuCheckpointProcessRestore 1 &100";
    assert_eq!(probe.call("cuCheckpointProcessRestore 1 0"), 0);
    probe.must("set 100 0 0 0 0 0 0 0 0");
    assert_eq!(probe.call(restore), 0);
    probe.must("set 101 1");
    assert_eq!(probe.call(restore), NOT_SUPPORTED);
}

/// A function that the driver lacks returns "not found", although the shim exports every symbol of
/// every driver.
#[test]
fn a_function_that_the_driver_lacks_is_not_found() {
    let world = World::new(Driver::Odd);
    world.share("gpu-0", GPU_0, Some(CAP));
    let mut probe = world.probe("name");
    // The driver answers "not initialized" before anything is charged.
    for command in ["primary 0", "async-ptsz 4096"] {
        assert_eq!(probe.ask(command).code, 3);
    }
    probe.ask("steer devices 1");
    probe.must("init");
    probe.must("context 0");
    for command in ["primary 0", "async-ptsz 4096"] {
        assert_eq!(probe.ask(command).code, 500);
    }
}

/// An oversubscribed share on a driver that cannot move managed memory, and one without its second account.
#[test]
fn memory_that_cannot_be_oversubscribed() {
    let world = World::new(Driver::Odd);
    let share = world.share_oversubscribed("gpu-0", GPU_0, (CAP, CAP / 2), 0);
    refuses(
        &world,
        &["gpu-0/cap: ", "oversubscribed", "concurrentManagedAccess"],
    );
    world.remove_page(&share, "resident");
    let mut probe = world.probe("name");
    probe.ask("steer moves_managed 1");
    assert_eq!(probe.ask("init").code, NOT_PERMITTED);
    says(
        &mut probe,
        &["gpu-0/resident: ", "cannot be read (errno 2)"],
    );
}
