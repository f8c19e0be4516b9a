//! NVML's answers for a share, with a driver whose processes the tests script.

use std::collections::BTreeMap;
use std::fs;
use std::io::Write as _;
use std::process::{Command, Stdio};

use tranche_shim_core::ComputePolicy;
use tranche_shim_tests::{Driver, World, text};

use crate::cap::{BLOCK, CAP, GPU_0, GPU_1, ready};

const MIB: u64 = 1 << 20;
/// A process of another container, and one with a host PID.
const FOREIGN: [u32; 2] = [4_000_001, 4_000_002];

/// Answers by function: its code, and the rest of its line.
type Answers = BTreeMap<String, (i64, String)>;

/// The client's answers for the GPU that it gets by this call.
fn ask(world: &World, how: &str, which: &str, pids: &[u32]) -> Answers {
    ask_by(world.command("python3"), world, how, which, pids)
}

fn ask_by(mut command: Command, world: &World, how: &str, which: &str, pids: &[u32]) -> Answers {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/nvml-client.py");
    let mut child = command
        .args([script, how, which])
        .env("ODD_NVML", world.folder().join("processes"))
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let pids: Vec<String> = pids.iter().map(u32::to_string).collect();
    let mut input = child.stdin.take().unwrap();
    input.write_all(pids.join(" ").as_bytes()).unwrap();
    drop(input);
    let ran = child.wait_with_output().unwrap();
    assert!(ran.status.success(), "{}", text(&ran.stderr));
    text(&ran.stdout)
        .lines()
        .map(|line| {
            let mut words = line.splitn(3, ' ');
            let name = words.next().unwrap().to_owned();
            let code = words.next().unwrap().parse().unwrap();
            (name, (code, words.next().unwrap_or("").to_owned()))
        })
        .collect()
}

/// Scripts the driver's processes with their bytes and percentages of the GPU.
fn driver_says(world: &World, processes: &[(u32, u64, u32)]) {
    let lines: Vec<String> = processes
        .iter()
        .map(|(pid, bytes, percent)| format!("process {pid} {bytes} {percent}\n"))
        .collect();
    fs::write(world.folder().join("processes"), lines.concat()).unwrap();
}

fn is(answers: &Answers, name: &str, code: i64, values: &str) {
    assert_eq!(
        answers.get(name),
        Some(&(code, values.to_owned())),
        "{name}: {answers:#?}"
    );
}

/// The answer is a list of these entries, which begin with a PID, in any order.
fn has(answers: &Answers, name: &str, count: &str, entries: &[String]) {
    let (code, values) = &answers[name];
    let mut words: Vec<&str> = values.split(' ').collect();
    words[1..].sort_by_key(|entry| entry.split(',').next().unwrap().parse::<u64>().unwrap());
    assert_eq!((*code, words[0]), (0, count), "{name}: {values}");
    assert_eq!(words[1..], *entries, "{name}");
}

#[test]
fn the_shares_own_processes_and_what_they_take() {
    let world = World::new(Driver::Odd);
    let share = world.share_of_time("gpu-0", GPU_0, Some(CAP), Some(25), ComputePolicy::Strict);
    let (mut first, mut second) = (ready(&world, 1), ready(&world, 1));
    first.must(&format!("alloc {}", 6 * MIB));
    second.must(&format!("alloc {}", 8 * MIB));
    // It has joined, and holds nothing.
    let _idle = ready(&world, 1);
    let charged: BTreeMap<u64, u64> = share.read(|account| {
        account
            .processes()
            .map(|process| (process.pid, process.charged))
            .collect()
    });
    let [a, b] = [first.pid(), second.pid()];
    driver_says(
        &world,
        &[
            (FOREIGN[0], 40 << 30, 60),
            (a, 99, 10),
            (FOREIGN[1], 1, 7),
            (b, 99, 5),
        ],
    );
    let answers = ask(
        &world,
        "nvmlDeviceGetHandleByIndex_v2",
        "0",
        &[a, FOREIGN[0]],
    );
    let used: u64 = 14 * MIB;
    let memory = format!("{CAP},{},{used}", CAP - used);
    for name in ["Memory", "BAR1Memory"] {
        is(&answers, &format!("nvmlDeviceGet{name}Info"), 0, &memory);
    }
    let protected = "nvmlDeviceGetConfComputeProtectedMemoryUsage";
    is(&answers, protected, 0, &memory);
    // Their order is that of their slots, which is arbitrary.
    let holders: Vec<String> = charged
        .iter()
        .filter(|(_, bytes)| **bytes > 0)
        .map(|(pid, bytes)| format!("{pid},{bytes}"))
        .collect();
    assert_eq!(holders.len(), 2);
    let same = |name: &str, count: &str, entries: &[String]| has(&answers, name, count, entries);
    for name in ["", "_v2", "_v3"].map(|v| format!("nvmlDeviceGetComputeRunningProcesses{v}")) {
        same(&name, "2", &holders);
        is(&answers, &format!("{name}/small"), 7, "2");
    }
    same("details/0", "2", &holders);
    same("table/213", "2", &holders);
    is(&answers, "table/213/small", 7, "2");
    for pid in [a, b] {
        let name = format!("process {pid}");
        is(&answers, &format!("table/213/{pid}"), 0, &name);
    }
    for other in ["table/214", "table/215", "details/1", "details/2"] {
        is(&answers, other, 0, "0");
    }
    for kind in ["Graphics", "MPSCompute"] {
        is(
            &answers,
            &format!("nvmlDeviceGet{kind}RunningProcesses_v3"),
            0,
            "0",
        );
        // The odd driver does not have this function.
        is(
            &answers,
            &format!("nvmlDeviceGet{kind}RunningProcesses"),
            13,
            "64",
        );
    }
    // 10 and 5 % of the GPU are 40 and 20 % of a quarter.
    let sorted =
        |samples: [(u32, String); 2]| BTreeMap::from(samples).into_values().collect::<Vec<_>>();
    let samples = sorted([(a, format!("{a},40,5,3,4")), (b, format!("{b},20,2,3,4"))]);
    same("nvmlDeviceGetProcessUtilization", "2", &samples);
    is(&answers, "nvmlDeviceGetProcessUtilization/small", 7, "2");
    let infos = sorted([(a, format!("{a},40,1,5")), (b, format!("{b},20,1,5"))]);
    same("infos/1", "2", &infos);
    is(&answers, "infos/2", 25, "64");
    is(&answers, "nvmlDeviceGetUtilizationRates", 0, "60,7");
    is(&answers, "dynamic", 0, "60,7,95,0");
    is(&answers, "samples/0", 0, "97,97");
    is(&answers, "samples/1", 0, "60,60");
    is(&answers, "samples/2", 0, "7,7");
    let pids: Vec<String> = BTreeMap::from([(a, a.to_string()), (b, b.to_string())])
        .into_values()
        .collect();
    same("nvmlDeviceGetAccountingPids", "2", &pids);
    is(&answers, &format!("stats/{a}"), 0, "42");
    is(&answers, &format!("stats2/{a}"), 0, "42");
    is(&answers, &format!("stats/{}", FOREIGN[0]), 6, "0");
    is(&answers, &format!("stats2/{}", FOREIGN[0]), 6, "0");
}

#[test]
fn a_share_that_does_nothing_is_idle_beside_busy_neighbours() {
    let world = World::new(Driver::Odd);
    world.share_of_time("gpu-0", GPU_0, Some(CAP), Some(5), ComputePolicy::Strict);
    driver_says(&world, &[(FOREIGN[0], 40 << 30, 90)]);
    let answers = ask(&world, "nvmlDeviceGetHandleByIndex_v2", "0", &[]);
    is(&answers, "nvmlDeviceGetUtilizationRates", 0, "0,0");
    is(&answers, "nvmlDeviceGetProcessUtilization", 6, "0");
    is(&answers, "infos/1", 6, "0");
    is(&answers, "nvmlDeviceGetComputeRunningProcesses_v3", 0, "0");
    is(&answers, "nvmlDeviceGetAccountingPids", 0, "0");
    // No process does any work.
    driver_says(&world, &[]);
    let answers = ask(&world, "nvmlDeviceGetHandleByIndex_v2", "0", &[]);
    is(&answers, "nvmlDeviceGetUtilizationRates", 0, "0,0");
}

/// With MIG and vGPU the driver's answer is passed on.
#[test]
fn without_utilization_by_process_the_driver_answers() {
    const NOT_SUPPORTED: i64 = 3;
    let world = World::new(Driver::Odd);
    world.share_of_time("gpu-0", GPU_0, Some(CAP), Some(25), ComputePolicy::Strict);
    driver_says(&world, &[(FOREIGN[0], 40 << 30, 60)]);
    let mut command = world.command("python3");
    command.env("ODD_NVML_COARSE", "1");
    let answers = ask_by(command, &world, "nvmlDeviceGetHandleByIndex_v2", "0", &[]);
    is(&answers, "nvmlDeviceGetUtilizationRates", 0, "97,96");
    is(&answers, "dynamic", 0, "97,96,95,0");
    is(&answers, "samples/1", 0, "97,97");
    assert_eq!(
        answers["nvmlDeviceGetProcessUtilization"].0, NOT_SUPPORTED,
        "{answers:?}"
    );
    is(
        &answers,
        "nvmlDeviceGetMemoryInfo",
        0,
        &format!("{CAP},{CAP},0"),
    );
}

/// GPM's samples are of the whole GPU: a share has none.
#[test]
fn gpm_is_not_supported_for_a_share() {
    let world = World::new(Driver::Odd);
    world.share("gpu-0", GPU_0, Some(CAP));
    world.share("gpu-1", GPU_1, None);
    driver_says(&world, &[]);
    let answers = ask(&world, "nvmlDeviceGetHandleByIndex_v2", "0", &[]);
    is(&answers, "nvmlGpmQueryDeviceSupport", 0, "0");
    is(&answers, "nvmlGpmSampleGet", 3, "");
    is(&answers, "nvmlGpmMigSampleGet", 3, "");
    // A GPU without a cap is the driver's.
    let answers = ask(&world, "nvmlDeviceGetHandleByIndex_v2", "1", &[]);
    is(&answers, "nvmlGpmQueryDeviceSupport", 0, "1");
    is(&answers, "nvmlGpmSampleGet", 0, "");
}

#[test]
fn a_share_that_gets_more_than_its_cores_is_fully_used() {
    let world = World::new(Driver::Odd);
    world.share_of_time("gpu-0", GPU_0, Some(CAP), Some(25), ComputePolicy::Strict);
    let mut probe = ready(&world, 1);
    probe.must("alloc 4096");
    // For example a work-conserving share: twice its cores.
    driver_says(&world, &[(probe.pid(), 4096, 50)]);
    let answers = ask(&world, "nvmlDeviceGetHandleByIndex_v2", "0", &[]);
    is(&answers, "nvmlDeviceGetUtilizationRates", 0, "100,25");
}

/// For each call that returns a handle, it is the same GPU with its own share.
#[test]
fn every_way_to_get_a_handle_gives_the_gpus_own_share() {
    let world = World::new(Driver::Odd);
    world.share("a", GPU_1, Some(2 * CAP));
    world.share("b", GPU_0, Some(CAP));
    driver_says(&world, &[]);
    for (gpu, uuid, cap) in [(0, GPU_0, CAP), (1, GPU_1, 2 * CAP)] {
        let (serial, bus) = (
            format!("165012345678{gpu}"),
            format!("00000000:1{gpu}:00.{gpu}"),
        );
        for (how, which) in [
            ("Index", gpu.to_string()),
            ("Index_v2", gpu.to_string()),
            ("UUID", uuid.to_owned()),
            ("Serial", serial),
            ("PciBusId", bus.clone()),
            ("PciBusId_v2", bus),
        ] {
            let answers = ask(&world, &format!("nvmlDeviceGetHandleBy{how}"), &which, &[]);
            is(
                &answers,
                "nvmlDeviceGetMemoryInfo",
                0,
                &format!("{cap},{cap},0"),
            );
        }
    }
}

#[test]
fn a_gpu_without_a_cap_is_the_drivers() {
    let world = World::new(Driver::Odd);
    world.share("gpu-0", GPU_0, None);
    driver_says(&world, &[(FOREIGN[0], 40 << 30, 90)]);
    let answers = ask(&world, "nvmlDeviceGetHandleByIndex_v2", "0", &[FOREIGN[0]]);
    let foreign = format!("1 {},{}", FOREIGN[0], 40u64 << 30);
    is(
        &answers,
        "nvmlDeviceGetComputeRunningProcesses",
        0,
        &foreign,
    );
    is(&answers, "details/0", 0, &foreign);
    for place in 213..=215 {
        is(&answers, &format!("table/{place}"), 0, &foreign);
    }
    is(&answers, "nvmlDeviceGetUtilizationRates", 0, "97,96");
    is(&answers, "dynamic", 0, "97,96,95,0");
    is(&answers, "samples/1", 0, "97,97");
    is(&answers, &format!("stats/{}", FOREIGN[0]), 0, "42");
}

/// NVML refuses it like CUDA.
#[test]
fn nvml_shows_no_other_share_of_a_gpu_without_a_page() {
    let world = World::new(Driver::Odd);
    world.share("gpu-0", GPU_0, Some(CAP));
    driver_says(&world, &[(FOREIGN[0], 40 << 30, 90)]);
    let answers = ask(&world, "nvmlDeviceGetHandleByIndex_v2", "1", &[FOREIGN[0]]);
    for name in [
        "nvmlDeviceGetMemoryInfo",
        "nvmlDeviceGetComputeRunningProcesses_v3",
        "table/213",
        "table/214",
        "table/215",
        "nvmlDeviceGetUtilizationRates",
        "nvmlDeviceGetProcessUtilization",
        "nvmlDeviceGetAccountingPids",
    ] {
        assert_eq!(answers[name].0, 4, "{name}: {answers:?}");
    }
}

/// nvidia-smi needs the rest of its private table; of other tables nothing is known.
#[test]
fn of_nvidias_private_tables_only_the_lists_are_ours() {
    const NOT_SUPPORTED: i64 = 3;
    let world = World::new(Driver::Odd);
    world.share("gpu-0", GPU_0, Some(CAP));
    let mut probe = ready(&world, 1);
    probe.must(&format!("alloc {BLOCK}"));
    driver_says(&world, &[(FOREIGN[0], 40 << 30, 60)]);
    let with_words = |words: &str| {
        let mut command = world.command("python3");
        command
            .env("ODD_NVML_WORDS", words)
            .env("ODD_NVML_COARSE", "1");
        ask_by(command, &world, "nvmlDeviceGetHandleByIndex_v2", "0", &[])
    };
    for words in ["217", "251"] {
        let answers = with_words(words);
        is(&answers, "table", 0, words);
        is(&answers, "table/last", 7, "");
        let own = format!("1 {},{BLOCK}", probe.pid());
        is(&answers, "table/213", 0, &own);
        let name = format!("table/213/{}", probe.pid());
        is(&answers, &name, 0, "[Not Found]");
        let foreign = format!("1 {},{}", FOREIGN[0], 40u64 << 30);
        is(&answers, "other/213", 0, &foreign);
    }
    // A table that ends before the lists is of a driver that nobody has seen.
    for words in ["215", "5000"] {
        let answers = with_words(words);
        is(&answers, "table", NOT_SUPPORTED, "0");
    }
}
