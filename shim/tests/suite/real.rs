//! Against the real driver's libraries, which answer `cuGetProcAddress` without a GPU.

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::fs;
use std::process::Command;

use tranche_shim_coverage::Coverage;
use tranche_shim_tests::{DRIVER, Driver, World, built, real_drivers, text};

use crate::cap::{CAP, GPU_0};

/// Debian's releases, whose drivers are 535 and 550.
pub const RELEASES: [&str; 2] = ["bookworm", "trixie"];

/// The functions that a library exports.
pub fn functions(library: &std::path::Path) -> BTreeSet<String> {
    let ran = Command::new("nm")
        .args(["-D", "--defined-only"])
        .arg(library)
        .output()
        .unwrap();
    text(&ran.stdout)
        .lines()
        .filter_map(|line| {
            line.split_once(" T ")
                .map(|(_, name)| name.split('@').next().unwrap().to_owned())
        })
        .collect()
}

#[test]
fn every_function_of_every_driver_is_exported() {
    for (library, coverage) in [
        ("libcuda.so.1", Coverage::cuda().unwrap()),
        ("libnvidia-ml.so.1", Coverage::nvml().unwrap()),
    ] {
        let ours = functions(&built(library));
        let listed: BTreeSet<String> = coverage
            .rows()
            .iter()
            .map(|row| row.symbol.to_owned())
            .chain(["__asan_default_options".to_owned()])
            .collect();
        assert_eq!(ours, listed, "{library} exports what its symbols.txt lists");
        for release in RELEASES {
            let theirs = functions(&real_drivers().join(release).join(library));
            let missing: Vec<_> = theirs.difference(&ours).collect();
            assert!(
                missing.is_empty(),
                "{library} of {release}: {missing:?}: run shim/symbols update"
            );
        }
    }
}

/// For every symbol and flag, and every version at which any symbol's answer changes and the one before it: our
/// answer is the real driver's or, for the functions that we handle, our twin.
#[test]
fn every_look_up_is_answered_as_the_driver_does() {
    let coverage = Coverage::cuda().unwrap();
    let rows = coverage.rows();
    let changes: BTreeSet<u32> = rows
        .iter()
        .filter_map(|row| row.since)
        .flat_map(|since| [since.number() - 1, since.number()])
        .chain([0, 1, 99_990])
        .collect();
    let words: Vec<String> = changes.iter().map(u32::to_string).collect();
    let mut list = words.join(" ");
    for row in rows {
        write!(list, "\n{} {}", row.symbol, row.class).unwrap();
    }
    for release in RELEASES {
        let world = World::new(Driver::Real(release));
        world.share("gpu-0", GPU_0, Some(CAP));
        let file = world.folder().join("symbols");
        fs::write(&file, &list).unwrap();
        let mut probe = world.probe("name");
        let answer = probe.must(&format!("compare {}", file.display()));
        let [same, ours, different] = [0, 1, 2].map(|nth| answer.number(nth));
        assert_eq!(different, 0, "{release}: {answer:?}");
        // Old and new variants and both streams must have been compared.
        assert!(same > 100_000 && ours > 5_000, "{release}: {answer:?}");
    }
}

#[test]
fn the_real_drivers_own_errors_come_through() {
    for release in RELEASES {
        let world = World::new(Driver::Real(release));
        world.share("gpu-0", GPU_0, Some(CAP));
        let mut probe = world.probe("name");
        // Not initialised; then no device.
        assert_eq!(probe.ask("count").code, 3);
        assert_eq!(probe.ask("alloc 4096").code, 3);
        let init = probe.ask("init").code;
        assert!(matches!(init, 100 | 999), "cuInit without a GPU: {init}");
        assert_eq!(probe.stderr(), "");
        // A real driver that is started by root makes its device nodes itself. They must not stay on the machine,
        // so the world has its own /dev, without the usual nodes.
        assert!(fs::exists("/dev/nvidiactl").unwrap(), "{release}");
        assert!(!fs::exists("/dev/full").unwrap());
    }
}

#[test]
fn the_real_nvidia_smi_runs_over_the_real_nvml() {
    for release in RELEASES {
        let world = World::new(Driver::Real(release));
        world.share("gpu-0", GPU_0, Some(CAP));
        let smi = real_drivers().join(release).join("nvidia-smi");
        let ran = world.run(&smi, &[]);
        // There is no kernel driver, and the library reports that.
        assert!(
            text(&ran.stdout).contains(
                "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver"
            ),
            "{release}: {}{}",
            text(&ran.stdout),
            text(&ran.stderr)
        );
        assert_eq!(text(&ran.stderr), "");
    }
}

/// Before nvmlInit, each of the driver's functions refuses in its own words. It says "not found" only for a name that the
/// shim did not find in its own table of symbols.
#[test]
fn every_function_of_the_real_nvml_is_reached() {
    const ASK: &str = "import ctypes, sys\n\
        nvml = ctypes.CDLL('libnvidia-ml.so.1')\n\
        for name in sys.argv[1:]:\n    \
            if getattr(nvml, name)(*[None] * 8) == 13: print(name)\n";
    for release in RELEASES {
        let world = World::new(Driver::Real(release));
        world.share("gpu-0", GPU_0, Some(CAP));
        let theirs = functions(&real_drivers().join(release).join("libnvidia-ml.so.1"));
        let names: Vec<&str> = theirs
            .iter()
            .map(String::as_str)
            .filter(|name| name.starts_with("nvml") && *name != "nvmlErrorString")
            .collect();
        assert!(names.len() > 300, "{release}: {}", names.len());
        let ran = world.run("python3", &[&["-c", ASK], &names[..]].concat());
        assert!(ran.status.success(), "{release}: {}", text(&ran.stderr));
        assert_eq!(text(&ran.stdout), "", "{release}");
    }
}

#[test]
fn nvml_refuses_without_shares() {
    let world = World::new(Driver::Real("bookworm"));
    let ran = world.run(real_drivers().join("bookworm/nvidia-smi"), &[]);
    assert!(!ran.status.success());
    assert!(
        text(&ran.stderr).starts_with("tranche: "),
        "{}",
        text(&ran.stderr)
    );
    assert!(
        text(&ran.stdout).contains("Insufficient Permissions"),
        "{}",
        text(&ran.stdout)
    );
}

#[test]
fn libcudarts_look_ups_get_our_functions() {
    let world = World::new(Driver::Real("bookworm"));
    world.share("gpu-0", GPU_0, Some(CAP));
    let mut probe = world.probe("name");
    for (request, expected) in [
        ("cuMemAlloc 2000 0", "cuMemAlloc"),
        ("cuMemAlloc 3020 0", "cuMemAlloc_v2"),
        ("cuMemAllocAsync 11020 0", "cuMemAllocAsync"),
        ("cuMemAllocAsync 11020 2", "cuMemAllocAsync_ptsz"),
        ("cuGetProcAddress 11030 0", "cuGetProcAddress"),
        ("cuGetProcAddress 12000 0", "cuGetProcAddress_v2"),
        ("cuMemGetInfo 12000 0", "cuMemGetInfo_v2"),
        ("cuLaunchKernel 12000 0", "cuLaunchKernel"),
        ("cuLaunchKernel 12000 2", "cuLaunchKernel_ptsz"),
        ("cuGraphLaunch 12000 2", "cuGraphLaunch_ptsz"),
    ] {
        let answer = probe.must(&format!("address {request}"));
        assert_eq!(answer.values[2], expected, "{request}");
        assert!(
            answer.values[1].starts_with("/usr/lib/tranche/libcuda"),
            "{request}: {answer:?}"
        );
    }
    let passes = probe.must("address cuMemcpyAsync 12000 2");
    assert_eq!(passes.values[1..], [DRIVER, "cuMemcpyAsync_ptsz"]);
}
