//! An image with its own libcuda has the cap too, after the hook has covered the library.

use std::fs;
use std::path::Path;

use tranche_shim_tests::{DRIVER, Driver, Probe, World, text};

use crate::cap::CAP;

/// The simulator's driver version.
const NODE: &str = "535.261.03";
const COMPAT: &str = "/usr/local/cuda/compat";

/// A container with 20 GiB of a simulated GPU, and copies of the driver's libcuda at these paths.
fn with_copies(copies: &[&str]) -> World {
    let world = World::new(Driver::Simulator(1));
    let gpu = &world.node().gpus()[0].uuid;
    world.share("gpu-0", gpu, Some(CAP));
    for copy in copies {
        fs::create_dir_all(Path::new(copy).parent().unwrap()).unwrap();
        fs::copy(DRIVER, copy).unwrap();
    }
    world
}

/// The memory that a program sees if it loads libcuda by `how`.
fn total(probe: &mut Probe) -> u64 {
    probe.must("init");
    probe.must("primary 0");
    probe.must("info").number(1)
}

fn is_capped(probe: &mut Probe, how: &str) {
    assert_eq!(total(probe), CAP, "{how}");
    probe.must(&format!("alloc {CAP}"));
    assert_eq!(probe.ask("alloc 1").code, 2, "{how}");
}

#[test]
fn a_libcuda_of_the_image_is_the_shim_however_it_is_found() {
    let copies = [
        "/usr/local/cuda/compat/libcuda.so.470.82.01",
        "/usr/local/cuda/compat/lib.real/libcuda.so.1",
        "/usr/local/cuda/lib64/stubs/libcuda.so",
        "/usr/local/own/libcuda.so",
    ];
    let world = with_copies(&copies);
    std::os::unix::fs::symlink("libcuda.so.470.82.01", format!("{COMPAT}/libcuda.so")).unwrap();
    let by_name = |folder: &str| {
        let mut command = world.command(tranche_shim_tests::probe_path());
        command.arg("libcuda.so").env("LD_LIBRARY_PATH", folder);
        Probe::by(&mut command)
    };
    // Without the hook the program uses a driver without a cap.
    for copy in copies {
        assert!(total(&mut world.probe(copy)) > CAP, "{copy}");
    }
    assert!(total(&mut by_name(COMPAT)) > CAP);

    let path = "LD_LIBRARY_PATH=/usr/local/own:/usr/local/nowhere";
    let covered = world.cover_libraries(&[path], NODE).unwrap();
    assert_eq!(covered.compat, None);
    for copy in copies {
        is_capped(&mut world.probe(copy), copy);
    }
    for folder in [COMPAT, "/usr/local/cuda/lib64/stubs", "/usr/local/own"] {
        is_capped(&mut by_name(folder), folder);
    }
    is_capped(&mut world.probe("name"), "name");
}

#[test]
fn a_newer_libcuda_of_the_image_is_used_behind_the_shim() {
    let copy = format!("{COMPAT}/libcuda.so.999.1");
    let world = with_copies(&[&copy]);
    // The node's own library does not work, so a working one is the image's.
    fs::write(DRIVER, "too old").unwrap();
    let covered = world.cover_libraries(&[], NODE).unwrap();
    assert_eq!(covered.compat.as_deref(), Some(Path::new(&copy)));
    for how in ["name", &copy] {
        is_capped(&mut world.probe(how), how);
    }
}

#[test]
fn a_libcuda_of_the_image_that_is_not_newer_is_not_used() {
    let copy = format!("{COMPAT}/libcuda.so.535.54.03");
    let world = with_copies(&[&copy]);
    let covered = world.cover_libraries(&[], NODE).unwrap();
    assert_eq!(covered.compat, None);
    is_capped(&mut world.probe(&copy), &copy);
}

/// The hook cannot know a folder that only the program knows (its RUNPATH), one that a script in the container puts
/// into LD_LIBRARY_PATH, nor a file that is made later. There the preload list is what gives the program the shim.
#[test]
fn a_libcuda_that_the_hook_cannot_know_is_the_shim_by_its_name() {
    let copy = "/usr/local/hidden/libcuda.so.1";
    let world = with_copies(&[]);
    let program = world.folder().join("sanitized");
    let runpath = "-Wl,-rpath,/usr/local/hidden";
    tranche_shim_tests::compile("sanitized.c", &program, &[runpath, "-ldl"]);
    world.cover_libraries(&[], NODE).unwrap();
    fs::create_dir_all("/usr/local/hidden").unwrap();
    fs::copy(DRIVER, copy).unwrap();
    let allocated = || {
        let ran = world.run(&program, &[&CAP.to_string()]);
        text(&ran.stdout)
    };
    let by_path = || {
        let mut command = world.command(tranche_shim_tests::probe_path());
        command
            .arg("name")
            .env("LD_LIBRARY_PATH", "/usr/local/hidden");
        Probe::by(&mut command)
    };
    assert_eq!(allocated(), "0 2\n");
    is_capped(&mut by_path(), "LD_LIBRARY_PATH");
    world.without_preload();
    assert_eq!(allocated(), "0 0\n");
    assert!(total(&mut by_path()) > CAP);
}
