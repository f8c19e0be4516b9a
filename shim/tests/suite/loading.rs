//! A program gets the shim in every way in which it can load the driver, and no environment changes
//! the cap.

use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::Command;

use tranche_shim_tests::{DRIVER, Driver, Probe, World, cache, compile, probe_path, text};

use crate::cap::{CAP, GPU_0, GPU_1, one_gpu, start};

/// A new process sees the cap and can allocate exactly the cap.
pub fn capped(probe: &mut Probe) {
    start(probe, 1);
    assert_eq!(probe.must("info").number(1), CAP);
    probe.must(&format!("alloc {CAP}"));
    assert_eq!(probe.ask("alloc 1").code, 2);
}

/// Checks that a program prints the cap as the total memory.
fn says_the_cap(world: &World, program: impl AsRef<OsStr>, arguments: &[&str]) {
    let ran = world.run(program, arguments);
    let (output, errors) = (text(&ran.stdout), text(&ran.stderr));
    assert_eq!(output.trim(), CAP.to_string(), "{arguments:?}: {errors}");
}

#[test]
fn every_way_of_the_loader_gets_the_cap() {
    for how in [
        "name",
        "deepbind",
        "global",
        "default",
        "/usr/lib/x86_64-linux-gnu/libcuda.so.1",
        "namespace",
    ] {
        let (world, _share) = one_gpu();
        let mut probe = world.probe(how);
        if how == "namespace" {
            // The odd driver is scripted in the main namespace only: here it shows both of its GPUs.
            world.share("gpu-1", GPU_1, Some(CAP));
            probe.must("init");
            probe.must("context 0");
            probe.must(&format!("alloc {CAP}"));
            assert_eq!(probe.ask("alloc 1").code, 2);
            continue;
        }
        capped(&mut probe);
    }
}

#[test]
fn without_the_preload_list() {
    for how in ["name", "deepbind", "global"] {
        let (world, _share) = one_gpu();
        world.without_preload();
        capped(&mut world.probe(how));
    }
}

#[test]
fn linked_at_build_time_and_through_ctypes() {
    let (world, _share) = one_gpu();
    let source = world.folder().join("linked.c");
    fs::write(
        &source,
        "#include <stdio.h>\n#include <stddef.h>\nint cuInit(unsigned); int cuCtxCreate_v2(void**, unsigned, int); int cuMemGetInfo_v2(size_t*, size_t*);\n\
         int main(void) { size_t f, t; void *c; int r = cuInit(0); if (r) return r; cuCtxCreate_v2(&c, 0, 0); cuMemGetInfo_v2(&f, &t); printf(\"%zu\\n\", t); return 0; }\n",
    )
    .unwrap();
    let program = world.folder().join("linked");
    let done = world
        .command("cc")
        .arg("-w")
        .arg("-o")
        .arg(&program)
        .arg(&source)
        .arg("-l:libcuda.so.1")
        .output()
        .unwrap();
    assert!(done.status.success(), "{}", text(&done.stderr));
    world.share("gpu-1", GPU_1, Some(CAP));
    says_the_cap(&world, &program, &[]);

    let script = "import ctypes as c\n\
        cuda = c.CDLL('libcuda.so.1')\n\
        context, free, total = c.c_void_p(), c.c_size_t(), c.c_size_t()\n\
        assert cuda.cuInit(0) == 0\n\
        assert cuda.cuCtxCreate_v2(c.byref(context), 0, 0) == 0\n\
        assert cuda.cuMemGetInfo_v2(c.byref(free), c.byref(total)) == 0\n\
        print(total.value)\n";
    says_the_cap(&world, "python3", &["-c", script]);
}

#[test]
fn the_environment_does_not_change_the_cap() {
    let forged = [
        ("CUDA_DEVICE_MEMORY_LIMIT", "80g"),
        ("CUDA_DEVICE_MEMORY_LIMIT_0", "0"),
        ("CUDA_DISABLE_CONTROL", "true"),
        ("LD_PRELOAD", ""),
        ("TRANCHE_SHARES", "/tmp"),
        ("CUDA_REDIRECT", DRIVER),
    ];
    for (program, arguments) in [
        (probe_path(), vec!["name".into()]),
        (
            "/usr/bin/env".into(),
            vec!["-i".into(), probe_path().into_os_string(), "name".into()],
        ),
    ] {
        let (world, _share) = one_gpu();
        capped(&mut Probe::by(
            world.command(program).args(arguments).envs(forged),
        ));
    }
    let (world, _share) = one_gpu();
    capped(&mut Probe::by(
        world.command(probe_path()).arg("name").env_clear(),
    ));
}

/// Every program reads the preload list, and none may be affected.
#[test]
fn programs_without_cuda_run_as_ever() {
    let world = World::new(Driver::Missing);
    for (program, arguments) in [
        ("true", &[][..]),
        ("sh", &["-c", "echo x | cat | grep -q x"]),
        ("python3", &["-c", "import os; os.fork()"]),
    ] {
        let ran = world.run(program, arguments);
        assert!(ran.status.success(), "{program}: {}", text(&ran.stderr));
        assert_eq!(text(&ran.stderr), "");
    }
}

/// The odd driver has two GPUs.
fn two_gpus() -> World {
    let world = World::new(Driver::Odd);
    world.share("gpu-0", GPU_0, Some(CAP));
    world.share("gpu-1", GPU_1, Some(CAP));
    world
}

#[test]
fn every_way_to_look_up_gets_the_cap() {
    let world = two_gpus();
    symlink("libcuda.so.1", "/usr/lib/x86_64-linux-gnu/libcuda.so").unwrap();
    let program = world.folder().join("ways");
    compile("ways.c", &program, &["-ldl"]);
    for way in [
        "name",
        "next",
        "default",
        "address",
        "deepbind",
        "namespace",
        "unversioned",
    ] {
        says_the_cap(&world, &program, &[way]);
    }
}

/// NVIDIA's functions have no symbol version, and neither have ours: a look-up with a version fails in both.
#[test]
fn a_look_up_with_a_version_fails_as_in_the_drivers_library() {
    let program = |world: &World| {
        let program = world.folder().join("ways");
        compile("ways.c", &program, &["-ldl"]);
        world.run(program, &["version"])
    };
    let world = World::new(Driver::Real("bookworm"));
    world.share("gpu-0", GPU_0, Some(CAP));
    assert_eq!(text(&program(&world).stdout), "not found\n");
    world.without_preload();
    fs::copy(DRIVER, "/usr/lib/x86_64-linux-gnu/libcuda.so.1").unwrap();
    assert_eq!(text(&program(&world).stdout), "not found\n");
}

/// A static program has no preload list and its own loader, which finds the file.
#[test]
fn a_static_program_gets_the_cap() {
    let world = two_gpus();
    let program = world.folder().join("static");
    compile("ways.c", &program, &["-static-pie", "-ldl"]);
    says_the_cap(&world, &program, &["static"]);
}

/// The folder that a script of this crate fills from Debian.
fn fetched(script: &str) -> String {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join(script);
    let fetched = Command::new(script).arg(cache()).output().unwrap();
    assert!(fetched.status.success(), "{}", text(&fetched.stderr));
    text(&fetched.stdout).trim().to_owned()
}

/// With an old glibc, whose loader functions are in libdl.so.2.
#[test]
#[ignore = "needs Debian 11, which mirrors need not keep"]
fn a_program_of_an_old_glibc_gets_the_cap() {
    let old = fetched("fetch-old-glibc");
    let world = World::new(Driver::Real("bookworm"));
    world.share("gpu-0", GPU_0, Some(CAP));
    let program = world.folder().join("old");
    compile(
        "old-glibc.c",
        &program,
        &[
            "-nostartfiles",
            "-Wl,--allow-shlib-undefined",
            "/usr/lib/x86_64-linux-gnu/libcuda.so.1",
        ],
    );
    for libraries in [old.as_str(), "/lib/x86_64-linux-gnu"] {
        let loader = format!("{libraries}/ld-linux-x86-64.so.2");
        let path = format!("{libraries}:/usr/lib/x86_64-linux-gnu");
        let program = program.to_str().unwrap();
        let ran = world.run(&loader, &["--library-path", &path, program]);
        let expected = "0 12020 CUDA_ERROR_NO_DEVICE\n";
        assert_eq!(text(&ran.stdout), expected, "{}", text(&ran.stderr));
    }
}

/// musl's loader opens the shim, which needs nothing that musl lacks, but not the driver.
#[test]
fn a_program_of_another_c_library_is_refused() {
    let musl = fetched("fetch-musl");
    let world = World::new(Driver::Real("bookworm"));
    world.share("gpu-0", GPU_0, Some(CAP));
    let program = world.folder().join("musl");
    let file = |name: &str| format!("{musl}/{name}");
    let loader = format!("-Wl,-dynamic-linker,{}", file("ld-musl-x86_64.so.1"));
    compile(
        "musl.c",
        &program,
        &[
            "-nostdlib",
            "-no-pie",
            &file("crt1.o"),
            &file("crti.o"),
            &file("libc.so"),
            &file("crtn.o"),
            &loader,
        ],
    );
    let ran = world.run(&program, &[]);
    assert_eq!(text(&ran.stdout), "303\n", "{}", text(&ran.stderr));
    let errors = text(&ran.stderr);
    assert_eq!(errors.lines().count(), 1, "{errors}");
    for words in ["tranche: ", "GNU C library", "glibc, or install gcompat"] {
        assert!(errors.contains(words), "{words}: {errors}");
    }
}
