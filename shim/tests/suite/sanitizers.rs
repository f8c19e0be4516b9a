//! Programs that a compiler has instrumented start in a share, and have its cap.

use std::path::Path;
use std::process::Command;

use tranche_shim_tests::{Driver, World, cache, compile, text};

use crate::cap::{CAP, GPU_0, GPU_1};

/// A container with 20 GiB of each GPU of the odd driver. The simulator's is no driver for MemorySanitizer: it is written in
/// Rust, whose comparisons of memory are calls that the sanitizer checks.
fn world() -> World {
    let world = World::new(Driver::Odd);
    world.share("gpu-0", GPU_0, Some(CAP));
    world.share("gpu-1", GPU_1, Some(CAP));
    world
}

/// Runs the program, which allocates the cap and one byte more.
fn is_capped(world: &World, program: &Path, what: &str) {
    let ran = world.run(program, &[&CAP.to_string()]);
    let (output, errors) = (text(&ran.stdout), text(&ran.stderr));
    assert_eq!((&*output, &*errors), ("0 2\n", ""), "{what}");
    assert!(ran.status.success(), "{what}: {}", ran.status);
}

/// A write behind a heap allocation is found, as without the shim.
fn finds_the_overflow(world: &World, program: &Path, what: &str) {
    let ran = world.run(program, &[&CAP.to_string(), "overflow"]);
    let errors = text(&ran.stderr);
    assert!(errors.contains("heap-buffer-overflow"), "{what}: {errors}");
}

/// With GCC's runtimes, shared and static. AddressSanitizer's shared one refuses to start behind a preloaded library.
#[test]
fn an_instrumented_program_starts_and_has_the_cap() {
    let world = world();
    let program = world.folder().join("sanitized");
    for flags in [
        "-fsanitize=address",
        "-fsanitize=address -static-libasan",
        "-fsanitize=leak",
        "-fsanitize=thread",
        "-fsanitize=thread -static-libtsan",
        "-fsanitize=undefined",
        "-fsanitize=undefined -static-libubsan",
    ] {
        let given: Vec<&str> = flags.split(' ').chain(["-pthread", "-ldl"]).collect();
        compile("sanitized.c", &program, &given);
        is_capped(&world, &program, flags);
        if flags.contains("address") {
            finds_the_overflow(&world, &program, flags);
        }
    }
}

/// With Clang's runtimes, of which MemorySanitizer is one that GCC does not have.
#[test]
#[ignore = "downloads Debian 12's clang, 45 MB"]
fn an_instrumented_program_of_clang_starts_and_has_the_cap() {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("fetch-clang");
    let fetched = Command::new(script).arg(cache()).output().unwrap();
    assert!(fetched.status.success(), "{}", text(&fetched.stderr));
    let clang = text(&fetched.stdout);
    let world = world();
    let (program, source) = (
        world.folder().join("sanitized"),
        Path::new(env!("CARGO_MANIFEST_DIR")).join("sanitized.c"),
    );
    for flags in [
        "-fsanitize=address",
        "-fsanitize=address -shared-libasan",
        "-fsanitize=memory",
        "-fsanitize=thread",
        "-fsanitize=undefined",
    ] {
        let compiled = Command::new(clang.trim())
            .args(["-O1", "-w", "-pthread", "-ldl", "-o"])
            .arg(&program)
            .arg(&source)
            .args(flags.split(' '))
            .output()
            .unwrap();
        assert!(
            compiled.status.success(),
            "{flags}: {}",
            text(&compiled.stderr)
        );
        is_capped(&world, &program, flags);
        if flags.contains("address") {
            finds_the_overflow(&world, &program, flags);
        }
    }
}
