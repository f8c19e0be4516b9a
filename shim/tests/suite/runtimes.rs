//! NVIDIA's own runtime, static and shared, from 11.8 to 13: each of its look-ups through the shim, over the real
//! drivers, gets the driver's function or exactly its twin. Without a GPU it ends there.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use tranche_shim_coverage::{Class, Coverage};
use tranche_shim_tests::{Driver, World, cache, compile, text};

use crate::cap::{CAP, GPU_0};

const PROGRAM: &str = "#include <stdio.h>\n\
    extern int cudaGetDeviceCount(int *); extern int cudaFree(void *);\n\
    int main(void) { int n = -1, code = cudaGetDeviceCount(&n); printf(\"%d %d\", code, cudaFree(0)); return 0; }\n";

/// The runtimes' libraries by version, unpacked at the first call.
fn runtimes() -> Vec<(String, Vec<PathBuf>)> {
    let folder = cache().join("cuda-runtimes");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../symbols");
    let done = Command::new(script)
        .arg("runtimes")
        .arg(&folder)
        .output()
        .unwrap();
    assert!(done.status.success(), "{}", text(&done.stderr));
    let mut found: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap())
        .filter(|entry| !entry.file_name().to_string_lossy().starts_with('.'))
        .map(|entry| {
            let files = fs::read_dir(entry.path())
                .unwrap()
                .map(|file| file.unwrap().path())
                .collect();
            (entry.file_name().to_string_lossy().into_owned(), files)
        })
        .collect();
    found.sort();
    found
}

/// One look-up, as `front.c` records it.
#[derive(Debug)]
struct LookUp<'a> {
    name: &'a str,
    codes: [&'a str; 2],
    statuses: [&'a str; 2],
    same: bool,
    ours: (&'a str, &'a str),
    real: &'a str,
}

fn look_up(line: &str) -> LookUp<'_> {
    let words: Vec<&str> = line.split(' ').collect();
    let [
        _,
        name,
        _,
        _,
        code,
        theirs,
        status,
        their_status,
        same,
        file,
        symbol,
        real,
    ] = words[..]
    else {
        panic!("{line}");
    };
    LookUp {
        name,
        codes: [code, theirs],
        statuses: [status, their_status],
        same: same == "same",
        ours: (file, symbol),
        real,
    }
}

#[test]
fn every_look_up_of_every_runtime_is_exact() {
    let coverage = Coverage::cuda().unwrap();
    let class = |symbol: &str| {
        let row = coverage.rows().iter().find(|row| row.symbol == symbol);
        row.map(|row| row.class)
    };
    let mut linked_both_ways = 0;
    for release in ["bookworm", "trixie"] {
        let world = World::new(Driver::Real(release));
        world.share("gpu-0", GPU_0, Some(CAP));
        let (front, source) = (
            world.folder().join("front.so"),
            world.folder().join("program.c"),
        );
        let soname = "-Wl,-soname,libcuda.so.1";
        compile("front.c", &front, &["-shared", "-fPIC", soname, "-ldl"]);
        fs::write(&source, PROGRAM).unwrap();
        let preload = fs::read_to_string("/etc/ld.so.preload").unwrap();
        for (version, libraries) in runtimes() {
            for library in libraries {
                let is_static = library.extension().is_some_and(|e| e == "a");
                let what = format!("libcudart {version}, static: {is_static}, on {release}");
                let program = world.folder().join("program");
                fs::write("/etc/ld.so.preload", "").unwrap();
                let folder = library.parent().unwrap().display();
                let arguments = [
                    library.to_str().unwrap(),
                    &format!("-Wl,-rpath,{folder}"),
                    "-lpthread",
                    "-ldl",
                    "-lrt",
                ];
                compile(source.to_str().unwrap(), &program, &arguments);
                // The loader finds the front in place of the shim.
                fs::write(
                    "/etc/ld.so.preload",
                    format!("{}\n{preload}", front.display()),
                )
                .unwrap();
                let log = world.folder().join("look-ups");
                let _ = fs::remove_file(&log);
                let ran = world
                    .command(&program)
                    .env("LOOKUPS", &log)
                    .output()
                    .unwrap();
                fs::write("/etc/ld.so.preload", &preload).unwrap();
                let answer = text(&ran.stdout);
                assert_eq!(text(&ran.stderr), "", "{what}");
                let through = world.run(&program, &[]);
                assert_eq!(text(&through.stdout), answer, "{what}");

                let log = fs::read_to_string(log).unwrap_or_default();
                let look_ups: Vec<LookUp<'_>> = log.lines().map(look_up).collect();
                let mut twins = 0;
                for look_up in &look_ups {
                    assert_eq!(look_up.codes[0], look_up.codes[1], "{what}: {look_up:?}");
                    assert_eq!(
                        look_up.statuses[0], look_up.statuses[1],
                        "{what}: {look_up:?}"
                    );
                    if class(look_up.real).is_some_and(|class| class != Class::Passes) {
                        let ours = ("/usr/lib/tranche/libcuda.so.1", look_up.real);
                        assert_eq!(look_up.ours, ours, "{what}: {look_up:?}");
                        twins += 1;
                    } else {
                        assert!(look_up.same, "{what}: {look_up:?}");
                    }
                }
                println!(
                    "{what}: {} look-ups, {twins} twins, {answer}",
                    look_ups.len()
                );
                assert!(look_ups.len() > 350 && twins > 30, "{what}: {look_ups:?}");
                assert!(look_ups.iter().any(|look_up| look_up.name == "cuMemAlloc"));
                // No GPU; or a driver that is older than the runtime.
                assert!(matches!(&*answer, "100 100" | "35 35"), "{what}: {answer}");
                linked_both_ways |= 1 << u8::from(is_static);
            }
        }
    }
    assert_eq!(linked_both_ways, 3, "shared and static");
}
