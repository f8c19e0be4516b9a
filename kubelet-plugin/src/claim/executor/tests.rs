//! Pages on a tmpfs of their own.

use std::fs::{self, File};
use std::io::{ErrorKind, Write as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use tranche_driver::preparation::Cap;
use tranche_shim_core::layout;

use crate::testing::{World, capped, claim, claim_ref, whole};

/// The file systems that are mounted below a folder, including itself.
fn mounts(folder: &Path) -> Vec<String> {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
    let below = |line: &&str| Path::new(line.split(' ').nth(4).unwrap()).starts_with(folder);
    mounts.lines().filter(below).map(str::to_owned).collect()
}

/// Prepares a share of the first GPU; returns its account page.
async fn share(world: &World, name: &str) -> PathBuf {
    world.api.put(claim(name, &[capped("gpu", 0, "1Gi", 2)]));
    let record = world.prepare(name).await;
    let device = &record.plan.devices[0];
    assert!(matches!(device.cap, Cap::Share { .. }));
    let uid = &record.plan.allocation.uid;
    world.layout.share(uid, &device.key).account
}

#[tokio::test]
async fn a_tenant_that_makes_its_page_longer_takes_space_from_nobody() {
    let world = World::new();
    // It is as large as a few claims' pages, like a node's /run that is nearly full.
    let run = world.layout.shares.parent().unwrap().to_owned();
    fs::create_dir_all(&run).unwrap();
    mount("run", &run, "tmpfs", MountFlags::empty(), c"size=256k").unwrap();

    let (greedy, neighbour) = (share(&world, "a").await, share(&world, "b").await);
    let mut file = File::options().append(true).open(&greedy).unwrap();
    let mut taken = 0;
    let full = loop {
        match file.write(&[1; 4096]) {
            Ok(bytes) => taken += bytes,
            Err(error) => break error,
        }
        assert!(taken < 1 << 20, "the page grows and grows");
    };
    assert_eq!(full.kind(), ErrorKind::StorageFull);

    // The whole of the neighbour's page can be written, and a new share can be made.
    let file = File::options().write(true).open(&neighbour).unwrap();
    file.write_all_at(&vec![1; layout::LEN], 0).unwrap();
    share(&world, "c").await;
    fs::write(run.join("others"), vec![1; 64 << 10]).unwrap();
}

#[tokio::test]
async fn a_claims_pages_have_a_file_system_until_they_are_removed() {
    let world = World::new();
    let shares = world.layout.shares.clone();
    let account = share(&world, "a").await;
    let [mounted] = &mounts(&shares)[..] else {
        panic!("{:?}", mounts(&shares))
    };
    for option in ["nosuid", "nodev", "noexec", "tmpfs", "size=", "mode=755"] {
        assert!(mounted.contains(option), "{option}: {mounted}");
    }
    let inode = || fs::metadata(&account).unwrap().ino();
    let before = inode();
    // Restarts and repeated calls find it.
    let plugin = world.start();
    plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
    assert_eq!((inode(), mounts(&shares).len()), (before, 1));

    // A container that has the page open does not prevent the release.
    let _open = File::open(&account).unwrap();
    plugin.preparer.unprepare(&claim_ref("a")).await.unwrap();
    assert_eq!(mounts(&shares), [""; 0]);
    assert!(world.traces().is_empty(), "{:?}", world.traces());

    // A claim whose pages containers only read has no file system of its own.
    world.api.put(claim("b", &[whole("gpu", 1)]));
    world.prepare("b").await;
    assert_eq!(mounts(&shares), [""; 0]);
}

#[tokio::test]
async fn pages_in_a_plain_folder_stay_where_containers_mounted_them() {
    let world = World::new();
    let account = share(&world, "a").await;
    let claim = world.layout.shares.join("uid-of-a");
    // An earlier release left them in this way, without separate file systems.
    let device = account.parent().unwrap();
    let pages = ["cap", "account"].map(|page| (page, fs::read(device.join(page)).unwrap()));
    unmount(&claim, UnmountFlags::empty()).unwrap();
    fs::create_dir(device).unwrap();
    for (page, content) in pages {
        let path = device.join(page);
        fs::write(&path, content).unwrap();
        let mode =
            std::os::unix::fs::PermissionsExt::from_mode(if page == "cap" { 0o444 } else { 0o666 });
        fs::set_permissions(path, mode).unwrap();
    }
    let inodes = || ["cap", "account"].map(|page| fs::metadata(device.join(page)).unwrap().ino());
    let before = inodes();
    let plugin = world.start();
    plugin.preparer.prepare(&claim_ref("a")).await.unwrap();
    assert_eq!(inodes(), before);
    assert_eq!(mounts(&world.layout.shares), [""; 0]);
    plugin.preparer.unprepare(&claim_ref("a")).await.unwrap();
    assert!(world.traces().is_empty(), "{:?}", world.traces());
}

#[tokio::test]
async fn pages_without_a_journal_are_removed_with_their_file_system() {
    let world = World::new();
    share(&world, "a").await;
    fs::remove_file(world.layout.claims().join("uid-of-a.json")).unwrap();
    world.start();
    assert_eq!(mounts(&world.layout.shares), [""; 0]);
    assert!(world.traces().is_empty(), "{:?}", world.traces());
}
