//! Runs the kit for machines with a GPU (`bench/gpu`) on the simulated machine with the habits of real drivers. Some short parts
//! run in every test run; all of them run in `make nightly`, from the kit that `make gpu-kit` makes.

use crate::common;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;

use common::{kill, until};
use serde_json::Value;
use tranche_shim_tests::{Node, probe_path, text};

/// The largest size of the kit, in bytes: it travels beside a copy of the tree, in 64 MiB together.
const MOST: u64 = 8 << 20;

fn repository() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}

/// The kit in `TRANCHE_GPU_KIT`, or one of what the tests were built with.
fn kit() -> &'static Path {
    static KIT: OnceLock<PathBuf> = OnceLock::new();
    KIT.get_or_init(|| {
        let kit = std::env::var_os("TRANCHE_GPU_KIT")
            .map_or_else(assembled, |made| repository().join(made));
        kit.canonicalize().unwrap()
    })
}

fn assembled() -> PathBuf {
    let (kit, programs) = (
        Path::new(env!("CARGO_TARGET_TMPDIR")).join("gpu-kit"),
        tempfile::tempdir().unwrap(),
    );
    for (program, name) in [
        (PathBuf::from(env!("CARGO_BIN_EXE_tranche")), "tranche"),
        (probe_path(), "tranche-shim-probe"),
    ] {
        std::os::unix::fs::symlink(program.canonicalize().unwrap(), programs.path().join(name))
            .unwrap();
    }
    let done = Command::new(repository().join("bench/gpu/assemble"))
        .arg(&kit)
        .arg(programs.path())
        .output()
        .unwrap();
    assert!(done.status.success(), "{}", text(&done.stderr));
    kit
}

/// All files below a folder, by their paths in it.
fn files(folder: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files(&path));
        } else {
            found.push(path);
        }
    }
    found
}

/// A machine with two simulated GPUs, and a folder for results.
struct Machine {
    node: Node,
    results: tempfile::TempDir,
}

impl Machine {
    fn new(name: &str) -> Self {
        let name = format!("tranche-gpu-kit-{}-{name}", std::process::id());
        Self {
            node: Node::start(
                std::env::temp_dir().join(name),
                tranche_shim_tests::Machine::Realistic,
                2,
            ),
            results: tempfile::tempdir().unwrap(),
        }
    }

    /// The kit's arguments for these parts; for all parts if `parts` is empty.
    fn arguments(&self, parts: &str) -> Vec<String> {
        let run = kit().join("bench/gpu/run");
        let (root, results) = (self.node.root(), self.results.path());
        let mut line = vec![
            run.to_str().unwrap(),
            "--quick",
            "--gpu",
            "1",
            "--memory",
            "8",
            "--driver-root",
            root.to_str().unwrap(),
            "--results",
            results.to_str().unwrap(),
        ];
        if !parts.is_empty() {
            line.extend(["--only", parts]);
        }
        line.into_iter().map(str::to_owned).collect()
    }

    fn run(&self, parts: &str, more: &[&str]) -> Output {
        command(&self.arguments(parts)).args(more).output().unwrap()
    }

    fn start(&self, parts: &str) -> Child {
        command(&self.arguments(parts))
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap()
    }

    /// The only result, if there is one yet.
    fn result(&self) -> Option<Value> {
        let path = files(self.results.path())
            .into_iter()
            .find(|path| path.extension().is_some_and(|it| it == "json"))?;
        Some(serde_json::from_slice(&fs::read(path).unwrap()).unwrap())
    }

    fn table(&self) -> String {
        let all = files(self.results.path());
        let path = all
            .iter()
            .find(|path| path.extension().is_some_and(|it| it == "md"));
        fs::read_to_string(path.unwrap()).unwrap()
    }

    /// A part of the result.
    fn part(&self, name: &str) -> Value {
        let result = self.result().unwrap();
        let parts = result["parts"].as_array().unwrap();
        let part = parts.iter().find(|part| part["name"] == name);
        part.unwrap_or_else(|| panic!("{name}: {result}")).clone()
    }

    /// Waits until the GPUs' memory is free.
    fn becomes_empty(&self, before: u64) {
        until("the GPU is free", || self.used() == before);
    }

    fn used(&self) -> u64 {
        self.node.gpus().iter().map(|gpu| gpu.used).sum()
    }
}

/// The kit with its own `/run`: the simulated GPUs of all machines have the same UUIDs, so the shares of all kits in one `/run`
/// would add up.
fn command(arguments: &[String]) -> Command {
    let script = "mount -t tmpfs x /run && exec \"$@\"";
    let mut command = Command::new("unshare");
    command
        .args(["-m", "sh", "-c", script, "sh"])
        .args(arguments);
    command
}

fn rows(part: &Value) -> Vec<Value> {
    part["rows"].as_array().unwrap().clone()
}

/// All rows that do not depend on time must hold; times on the simulator may miss their targets.
#[test]
#[ignore = "takes long: `make nightly` runs it"]
fn every_part_runs_on_the_simulated_machine() {
    let machine = Machine::new("all");
    let ran = machine.run("", &[]);
    let table = text(&ran.stdout);
    assert!(ran.status.success(), "{table}{}", text(&ran.stderr));
    let result = machine.result().unwrap();
    let names: Vec<_> = result["parts"]
        .as_array()
        .unwrap()
        .iter()
        .map(|part| part["name"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(names, listed());
    assert_eq!(result["machine"]["gpu"], "Simulated H100 80GB HBM3");
    for name in [
        "lookups",
        "sizes",
        "local_memory",
        "pools",
        "faults",
        "ways",
        "closed",
    ] {
        assert_eq!(machine.part(name)["status"], "held", "{name}: {table}");
    }
    // What is not simulated says so.
    for (part, row, why) in [
        ("runtime", "on libcudart", "NVIDIA's own libcuda"),
        ("imports", "cuIpcOpenMemHandle", "not supported"),
        ("imports", "a pool's pointer", "not supported"),
        ("unseen", "8 green contexts", "not supported"),
        ("unseen", "a profiler", "no libcupti"),
        ("host_memory", "plain memory that a kernel reads", "no HMM"),
        (
            "driver_limits",
            "the driver's memory limit",
            "nvmlDeviceSetMemoryLimits_v1",
        ),
        ("driver_limits", "MPS v3", "protocol 3"),
    ] {
        let found = rows(&machine.part(part));
        let found = found.iter().find(|it| it["name"] == row);
        let found = found.unwrap_or_else(|| panic!("{part}, {row}: {table}"));
        assert_eq!(found["status"], "absent", "{found}");
        assert!(found["why"].as_str().unwrap().contains(why), "{found}");
    }
    // Each row about a share of time has what explains a miss.
    let alone = rows(&machine.part("shares_alone"));
    let series = &alone[0]["numbers"]["series"];
    for name in ["nvml", "position", "carried", "scale"] {
        let readings = series[name].as_array().unwrap();
        assert!(readings.iter().any(Value::is_number), "{name}: {series}");
    }
    let frameworks = machine.part("frameworks");
    let row = |name: &str| {
        let found = rows(&frameworks)
            .into_iter()
            .find(|row| row["name"] == name);
        found.unwrap_or_else(|| panic!("{name}: {table}"))
    };
    assert_eq!(
        row("driver API: reached, percent of the cap")["numbers"]["value"],
        100.0
    );
    assert_eq!(row("driver API: refused by")["status"], "held");
    for part in result["parts"].as_array().unwrap() {
        for row in rows(part) {
            let status = row["status"].as_str().unwrap();
            assert!(["held", "missed", "absent"].contains(&status), "{row}");
        }
        assert!(table.contains(part["name"].as_str().unwrap()), "{table}");
    }
    assert_eq!(table, machine.table(), "what is printed is what is written");
}

/// The parts of all plans, in their order.
fn listed() -> Vec<String> {
    let listed = Command::new(kit().join("bench/gpu/run"))
        .arg("--list")
        .output()
        .unwrap();
    text(&listed.stdout)
        .lines()
        .map(|line| line.split_whitespace().nth(1).unwrap().to_owned())
        .collect()
}

/// What `make test` runs of the kit.
#[test]
fn the_shortest_parts_run_on_the_simulated_machine() {
    let machine = Machine::new("short");
    let ran = machine.run("lookups,closed,imports,tables", &[]);
    let table = text(&ran.stdout);
    assert!(ran.status.success(), "{table}{}", text(&ran.stderr));
    for name in ["lookups", "closed", "imports", "tables"] {
        assert_eq!(machine.part(name)["status"], "held", "{name}: {table}");
    }
}

/// Every part settles a row of SPECIFICATION.md, and every such row names its part.
#[test]
fn parts_and_rows_of_the_specification_name_each_other() {
    let specification = fs::read_to_string(repository().join("SPECIFICATION.md")).unwrap();
    let (_, section) = specification.split_once("## On real GPUs").unwrap();
    let (section, _) = section.split_once("\n## ").unwrap();
    let named: BTreeSet<_> = section
        .lines()
        .filter(|line| line.contains("| pending on silicon |"))
        .flat_map(|line| line.split('|').rev().nth(1).unwrap().split('`'))
        .filter(|name| !name.trim_matches([' ', ',']).is_empty())
        .map(str::to_owned)
        .collect();
    let parts = listed();
    assert_eq!(
        named,
        parts.iter().cloned().collect(),
        "parts of the rows, and parts of the kit"
    );
    assert_eq!(parts.len(), named.len(), "a part is in one plan");
}

/// An installed framework: real numba, from the simulator's client environment.
#[test]
#[ignore = "takes long: `make nightly` runs it"]
fn an_installed_framework_is_filled_to_the_cap() {
    let machine = Machine::new("numba");
    let clients = repository().join("simulator/client-environment");
    let folder = Command::new(clients).arg("cuda12").output().unwrap();
    assert!(folder.status.success(), "{}", text(&folder.stderr));
    let python = Path::new(text(&folder.stdout).trim()).join("bin/python");
    let mut line = machine.arguments("frameworks");
    line.insert(0, python.to_str().unwrap().to_owned());
    let ran = command(&line)
        .env("CUDA_PYTHON_DISABLE_MAJOR_VERSION_WARNING", "1")
        .output()
        .unwrap();
    let part = machine.part("frameworks");
    let of_numba: Vec<_> = rows(&part)
        .into_iter()
        .filter(|row| row["name"].as_str().unwrap().starts_with("numba: "))
        .collect();
    assert_eq!(of_numba.len(), 3, "{part}{}", text(&ran.stderr));
    for row in of_numba {
        assert_eq!(row["status"], "held", "{row}");
    }
}

/// Scripts with the names of NVIDIA's tools, which run the program and print a result.
#[test]
#[ignore = "takes long: `make nightly` runs it"]
fn a_tools_output_in_a_share_is_compared_with_that_without() {
    let machine = Machine::new("tools");
    let tools = tempfile::tempdir().unwrap();
    let tool = |name: &str, body: &str| {
        let path = tools.path().join(name);
        let start = "while [ ! -x \"$1\" ]; do shift; done\n\"$@\"";
        fs::write(&path, format!("#!/bin/sh\n{start}\n{body}\n")).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        fs::set_permissions(&path, mode).unwrap();
    };
    tool("compute-sanitizer", "echo ERROR SUMMARY: 0 errors");
    // A tool that finds an error only in a share.
    let differs =
        "test -e /usr/lib/tranche/shares && echo exited with code 1 || echo exited normally";
    tool("cuda-gdb", differs);
    let path = format!(
        "{}:{}",
        tools.path().display(),
        std::env::var("PATH").unwrap()
    );
    let ran = command(&machine.arguments("tools"))
        .env("PATH", path)
        .output()
        .unwrap();
    assert!(ran.status.success(), "{}", text(&ran.stderr));
    let statuses: Vec<_> = rows(&machine.part("tools"))
        .iter()
        .map(|row| row["status"].as_str().unwrap().to_owned())
        .collect();
    assert_eq!(statuses, ["held", "missed", "absent"]);
}

#[test]
#[ignore = "takes long: `make nightly` runs it"]
fn a_part_that_exceeds_its_time_is_ended_and_keeps_its_rows() {
    let machine = Machine::new("overrun");
    let before = machine.used();
    let ran = machine.run("sizes,faults", &["--part-seconds", "8"]);
    assert!(!ran.status.success());
    let part = machine.part("sizes");
    assert_eq!(part["status"], "failed");
    let rows = rows(&part);
    assert!(rows.len() > 1, "the rows before are kept: {part}");
    let why = rows.last().unwrap()["why"].as_str().unwrap();
    assert!(why.contains("not ended after 8 s"), "{why}");
    assert_eq!(machine.part("faults")["status"], "held", "the next one ran");
    machine.becomes_empty(before);
}

#[test]
#[ignore = "takes long: `make nightly` runs it"]
fn an_ended_or_killed_run_keeps_its_results_and_frees_the_gpu() {
    for signal in [rustix::process::Signal::TERM, rustix::process::Signal::KILL] {
        let machine = Machine::new(&format!("ended-{}", signal.as_raw()));
        let before = machine.used();
        let mut child = machine.start("closed,sizes");
        until("the second part has a row", || {
            machine
                .result()
                .is_some_and(|it| it["parts"].as_array().unwrap().len() > 1)
        });
        kill(child.id(), signal);
        child.wait().unwrap();
        let part = machine.part("sizes");
        assert!(!rows(&part).is_empty(), "{part}");
        assert!(machine.table().contains("| sizes |"));
        machine.becomes_empty(before);
    }
}

/// Several runs are joined into one result. If a part ran twice, its later result is kept.
#[test]
#[ignore = "takes long: `make nightly` runs it"]
fn results_of_several_runs_are_joined() {
    let (first, second) = (Machine::new("first"), Machine::new("second"));
    assert!(first.run("closed", &[]).status.success());
    assert!(second.run("pools", &[]).status.success());
    let json = |machine: &Machine| {
        let all = files(machine.results.path());
        let found = all
            .into_iter()
            .find(|path| path.extension().unwrap() == "json");
        found.unwrap()
    };
    let to = tempfile::tempdir().unwrap();
    let ran = Command::new(kit().join("bench/gpu/run"))
        .arg("--results")
        .arg(to.path())
        .arg("--join")
        .args([json(&first), json(&second)])
        .output()
        .unwrap();
    assert!(ran.status.success(), "{}", text(&ran.stderr));
    let table = text(&ran.stdout);
    assert!(
        table.contains("| closed |") && table.contains("| pools |"),
        "{table}"
    );
    assert_eq!(files(to.path()).len(), 2);
}

/// Without CAP_SYS_ADMIN and user namespaces no mounts are possible: parts that need a share report why they are absent.
#[test]
#[ignore = "takes long: `make nightly` runs it"]
fn without_mounts_the_parts_without_a_share_run() {
    let machine = Machine::new("mounts");
    let script = "echo 0 >/proc/sys/user/max_user_namespaces
        exec setpriv --bounding-set=-sys_admin --inh-caps=-sys_admin \"$@\"";
    let ran = Command::new("unshare")
        .args(["-U", "-r", "sh", "-c", script, "sh"])
        .args(machine.arguments("sizes,pools,closed"))
        .output()
        .unwrap();
    assert!(ran.status.success(), "{}", text(&ran.stderr));
    let pools = machine.part("pools");
    assert_eq!(pools["status"], "absent");
    let why = pools["why"].as_str().unwrap();
    assert!(why.contains("no mount namespace"), "{why}");
    for name in ["sizes", "closed"] {
        assert_eq!(
            machine.part(name)["status"],
            "held",
            "{}",
            machine.part(name)
        );
    }
}

/// A driver that is only in `/usr/local/nvidia`, as on rented machines and on GKE, is found and capped.
#[test]
#[ignore = "takes long: `make nightly` runs it"]
fn a_driver_in_usr_local_nvidia_is_found() {
    let machine = Machine::new("elsewhere");
    let script = r#"
        mkdir /dev/shm
        mount -t tmpfs x /dev/shm
        mkdir -p "/usr/local/nvidia/$folder_of_libraries" /usr/local/nvidia/bin
        mv /usr/lib/x86_64-linux-gnu/libcuda.so* /usr/lib/x86_64-linux-gnu/libnvidia-ml.so* "/usr/local/nvidia/$folder_of_libraries"
        mv /usr/bin/nvidia-smi /usr/local/nvidia/bin
        /usr/bin/nvidia-sim-persistenced --root / >/dev/null 2>&1 &
        trap "kill $!" EXIT
        until [ -e /run/nvidia-persistenced/socket ]; do sleep 0.01; done
        "$kit/bench/gpu/run" --quick --gpu 1 --memory 8 --results "$results" --only frameworks,ways
    "#;
    for folder in ["lib64", "lib"] {
        let work = tempfile::tempdir().unwrap();
        let ran = common::on_a_machine_of_its_own(work.path(), script)
            .env("folder_of_libraries", folder)
            .env("kit", kit())
            .env("results", machine.results.path())
            .output()
            .unwrap();
        let (out, errors) = (text(&ran.stdout), text(&ran.stderr));
        assert!(ran.status.success(), "{folder}: {out}{errors}");
        assert_eq!(machine.part("ways")["status"], "held", "{folder}: {out}");
        let smi = &rows(&machine.part("frameworks"))[0];
        assert_eq!(smi["status"], "held", "{folder}: {smi}");
    }
}

#[test]
fn errors_name_the_missing_driver_and_the_unknown_part() {
    let empty = tempfile::tempdir().unwrap();
    let ran = Command::new(kit().join("bench/gpu/run"))
        .arg("--driver-root")
        .arg(empty.path())
        .output()
        .unwrap();
    assert!(!ran.status.success());
    let errors = text(&ran.stderr);
    assert!(
        errors.contains("no working NVIDIA driver") && errors.contains("--driver-root"),
        "{errors}"
    );
    let ran = Command::new(kit().join("bench/gpu/run"))
        .args(["--only", "pool"])
        .output()
        .unwrap();
    assert!(
        text(&ran.stderr).contains("choose from lookups"),
        "{}",
        text(&ran.stderr)
    );
}

/// The kit is below its largest size, and has all programs.
#[test]
#[ignore = "needs the kit that `make gpu-kit` makes: `make nightly` runs it"]
fn the_kit_is_small_and_complete() {
    let kit = kit();
    let size: u64 = files(kit)
        .iter()
        .map(|path| path.symlink_metadata().unwrap().len())
        .sum();
    assert!(size < MOST, "{size} bytes in {}", kit.display());
    for program in ["tranche", "tranche-shim-probe", "runtime"] {
        assert!(kit.join("bin").join(program).exists(), "{program}");
    }
}
