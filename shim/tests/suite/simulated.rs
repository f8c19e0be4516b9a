//! On the simulated machine: compares the shim's answers with what the GPU holds.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tranche_shim_tests::{DRIVER, Driver, Machine, Node, Probe, Share, World, real_drivers, text};

use crate::cap::{BLOCK, CAP};
use crate::families::{Case, with_variable, write};

const MIB: u64 = 1 << 20;

/// A container with 20 GiB of the first of two GPUs, and 40 GiB of the second.
fn two_gpus() -> (World, [Share; 2], [String; 2]) {
    let world = World::new(Driver::Simulator(2));
    let [first, second]: [String; 2] = world
        .node()
        .gpus()
        .into_iter()
        .map(|gpu| gpu.uuid)
        .collect::<Vec<_>>()
        .try_into()
        .unwrap();
    let shares = [
        world.share("gpu-0", &first, Some(CAP)),
        world.share("gpu-1", &second, Some(2 * CAP)),
    ];
    (world, shares, [first, second])
}

fn ready(probe: &mut Probe, device: u32) {
    probe.must("init");
    probe.must(&format!("primary {device}"));
}

#[test]
fn nvidia_smi_shows_exactly_the_share() {
    let (world, _shares, _) = two_gpus();
    let mut probe = world.probe("name");
    ready(&mut probe, 0);
    probe.must(&format!("alloc {}", 5u64 << 30));
    let smi = world.node().root().join("usr/bin/nvidia-smi");
    let ran = world.run(&smi, &[]);
    let table = text(&ran.stdout);
    assert_eq!(text(&ran.stderr), "", "{table}");
    assert!(table.contains(" 5120MiB / 20480MiB "), "{table}");
    assert!(table.contains("    0MiB / 40960MiB "), "{table}");
    let ran = world.run(
        &smi,
        &[
            "--query-gpu=memory.total,memory.used,memory.free",
            "--format=csv,noheader",
        ],
    );
    assert_eq!(
        text(&ran.stdout),
        "20480 MiB, 5120 MiB, 15360 MiB\n40960 MiB, 0 MiB, 40960 MiB\n"
    );
    // A program that has ended uses nothing.
    probe.kill();
    let query = ["--query-gpu=memory.used", "--format=csv,noheader"];
    assert_eq!(text(&world.run(&smi, &query).stdout), "0 MiB\n0 MiB\n");
}

#[test]
fn the_gpu_holds_what_the_account_says() {
    let (world, [share, _], _) = two_gpus();
    let mut probe = world.probe("name");
    ready(&mut probe, 0);
    let context = world.node().gpus()[0].used;
    assert!(
        context > 0,
        "a context is not in the cap, and not free of charge"
    );
    let info = probe.must("info");
    assert_eq!((info.number(0), info.number(1)), (CAP, CAP));
    let whole = probe.must(&format!("alloc {CAP}")).number(0);
    assert_eq!(world.node().gpus()[0].used - context, CAP);
    assert_eq!(probe.ask("alloc 1").code, 2);
    probe.must(&format!("free {whole}"));
    assert_eq!(
        (world.node().gpus()[0].used - context, share.used()),
        (0, 0)
    );
    // A block and a byte takes two blocks.
    for _ in 0..100 {
        probe.must(&format!("alloc {}", 2 * MIB + 1));
    }
    assert_eq!(world.node().gpus()[0].used - context, 400 * MIB);
    assert_eq!(share.used(), 400 * MIB);
}

/// The driver loads a library into every context, also into later ones, but not onto GPUs without one.
#[test]
fn a_library_is_charged_on_every_gpu_that_has_a_context() {
    // Its variable, and its code.
    const LIBRARY: u64 = (1 << 30) + BLOCK;
    let (world, [first, second], _) = two_gpus();
    let mut probe = world.probe("name");
    probe.must("init");
    probe.must("primary 0");
    let before = first.used();
    let used = || (first.used() - before, second.used());
    write(&mut probe, &with_variable(1 << 30));
    let library = probe.get("cuLibraryLoadData &0 &100 0 0 0 0 0 0");
    assert_eq!(used(), (LIBRARY, 0));
    // More than the first GPU's share has left, but not more than the second one's.
    write(&mut probe, &with_variable(CAP));
    assert_eq!(probe.call("cuLibraryLoadData &0 &100 0 0 0 0 0 0"), 2);
    assert_eq!(used(), (LIBRARY, 0));
    // The second GPU's first context brings it there; its second one does not bring it again.
    probe.must("primary 1");
    assert_eq!(used(), (LIBRARY, LIBRARY));
    probe.must("context 1");
    assert_eq!(used(), (LIBRARY, LIBRARY));
    write(&mut probe, &with_variable(2 << 30));
    let larger = probe.get("cuLibraryLoadData &0 &100 0 0 0 0 0 0");
    let both = LIBRARY + (2 << 30);
    assert_eq!(used(), (both, both));
    write(&mut probe, &with_variable(CAP));
    assert_eq!(probe.call("cuLibraryLoadData &0 &100 0 0 0 0 0 0"), 2);
    assert_eq!(used(), (both, both));
    for library in [library, larger] {
        assert_eq!(probe.call(&format!("cuLibraryUnload {library}")), 0);
    }
    assert_eq!(used(), (0, 0));
}

/// A context in which there is no room for the libraries is refused, and nothing of them stays charged there.
#[test]
fn a_context_needs_room_for_the_libraries() {
    let (world, [first, second], _) = two_gpus();
    let mut probe = world.probe("name");
    probe.must("init");
    probe.must("primary 1");
    write(&mut probe, &with_variable(CAP + BLOCK));
    let library = probe.get("cuLibraryLoadData &0 &100 0 0 0 0 0 0");
    let used = second.used();
    for attempt in ["primary 0", "context 0"] {
        assert_eq!(probe.ask(attempt).code, 2, "{attempt}");
        assert_eq!((first.used(), second.used()), (0, used));
    }
    assert_eq!(probe.call(&format!("cuLibraryUnload {library}")), 0);
    assert_eq!((first.used(), second.used()), (0, 0));
    probe.must("primary 0");
}

/// A forked child has the driver's files too: until it closes them, its parent's memory stays allocated and
/// charged.
#[test]
fn a_child_keeps_its_dead_parents_memory() {
    let mut case = Case::new();
    case.probe.must(&format!("alloc {CAP}"));
    assert_eq!(case.probe.ask("fork").values, ["child"]);
    case.probe.kill();
    let mut other = case.world.probe("name");
    other.must("init");
    assert_eq!(other.ask("primary 0").code, 2, "not even a context");
    case.holds(CAP);
    case.probe.send("end");
    let start = Instant::now();
    while other.ask("primary 0").code != 0 {
        assert!(start.elapsed() < Duration::from_secs(2), "it stays charged");
    }
    other.must(&format!("alloc {CAP}"));
    case.holds(CAP);
}

#[test]
fn in_any_order_each_gpu_has_its_own_cap() {
    let (world, shares, [first, second]) = two_gpus();
    let reversed = format!("{second},{first}");
    for (visible, caps) in [
        ("0,1", vec![CAP, 2 * CAP]),
        ("1,0", vec![2 * CAP, CAP]),
        (&reversed, vec![2 * CAP, CAP]),
        ("1", vec![2 * CAP]),
        (&first, vec![CAP]),
    ] {
        let mut probe = Probe::by(
            world
                .command(tranche_shim_tests::probe_path())
                .arg("name")
                .env("CUDA_VISIBLE_DEVICES", visible),
        );
        probe.must("init");
        assert_eq!(probe.must("count").number(0), caps.len() as u64);
        for (device, cap) in caps.into_iter().enumerate() {
            probe.must(&format!("primary {device}"));
            assert_eq!(
                probe.must("info").number(1),
                cap,
                "{visible}, device {device}"
            );
            assert_eq!(probe.must(&format!("total {device}")).number(0), cap);
            let whole = probe.must(&format!("alloc {cap}")).number(0);
            assert_eq!(probe.ask("alloc 1").code, 2);
            let used = shares.each_ref().map(Share::used);
            assert_eq!(used.iter().sum::<u64>(), cap);
            probe.must(&format!("free {whole}"));
        }
    }
}

#[test]
fn a_reset_returns_what_the_context_held() {
    let (world, [share, _], _) = two_gpus();
    for end in ["reset 0", "unprimary 0"] {
        let mut probe = world.probe("name");
        ready(&mut probe, 0);
        probe.must(&format!("alloc {}", 1 << 30));
        assert_eq!(share.used(), 1 << 30);
        probe.must(end);
        assert_eq!(share.used(), 0, "{end}");
    }
    // One of two references is released: the context and its memory stay.
    let mut probe = world.probe("name");
    ready(&mut probe, 0);
    probe.must("primary 0");
    probe.must(&format!("alloc {}", 1 << 30));
    probe.must("unprimary 0");
    assert_eq!(share.used(), 1 << 30);
}

/// Two containers, each with a share of the same GPU and two processes that allocate at random.
#[test]
fn two_shares_of_one_gpu_never_exceed_their_caps() {
    /// The simulated H100's value.
    const CONTEXT: u64 = 518 << 20;
    let root = std::env::temp_dir().join(format!("tranche-shim-{}-two", std::process::id()));
    let node = Arc::new(Node::start(root, Machine::Simple, 1));
    let gpu = node.gpus()[0].uuid.clone();
    std::thread::scope(|scope| {
        let containers = [CAP, 2 * CAP].map(|cap| {
            let (node, gpu) = (&node, &gpu);
            scope.spawn(move || {
                let world = World::on(node);
                let share = world.share("gpu-0", gpu, Some(cap));
                let mut probes = [world.probe("name"), world.probe("name")];
                for probe in &mut probes {
                    ready(probe, 0);
                    probe.send(&format!("threads 4 40000 {}", cap / 4));
                }
                for probe in &mut probes {
                    let answer = probe.receive();
                    assert!(answer.number(0) > 0 && answer.number(1) > 0, "{answer:?}");
                    assert_eq!(answer.number(2), 0, "no other error: {answer:?}");
                }
                let peak = share.read(|account| account.peak());
                assert!(peak <= cap && peak > cap / 4 * 3, "{peak} of {cap}");
                assert_eq!(share.used(), 0);
            })
        });
        let mut samples = 0;
        while containers.iter().any(|container| !container.is_finished()) {
            // Allocations of at most half a block are too rare here to matter.
            let held = node.gpus()[0].used;
            assert!(held <= 3 * CAP + 4 * CONTEXT, "{held}");
            samples += 1;
        }
        assert!(samples > 3);
        for container in containers {
            container.join().unwrap();
        }
    });
}

/// After a process was killed at any moment, another process can use its memory.
#[test]
fn a_kill_in_the_middle_of_work_leaves_nothing() {
    let (world, [share, _], _) = two_gpus();
    let mut neighbour = world.probe("name");
    ready(&mut neighbour, 0);
    let alone = world.node().gpus()[0].used;
    for millis in 0..8 {
        let mut victim = world.probe("name");
        ready(&mut victim, 0);
        victim.send(&format!("threads 4 1000000 {}", CAP / 8));
        std::thread::sleep(Duration::from_millis(millis));
        victim.kill();
        // The account is correct at once; the daemon detects the end after a moment.
        let start = Instant::now();
        let whole = loop {
            let answer = neighbour.ask(&format!("alloc {CAP}"));
            if answer.code == 0 {
                break answer.number(0);
            }
            assert!(
                start.elapsed() < Duration::from_secs(5),
                "{} bytes stay charged",
                share.used()
            );
        };
        assert_eq!(share.used(), CAP);
        neighbour.must(&format!("free {whole}"));
    }
    let start = Instant::now();
    while world.node().gpus()[0].used != alone {
        assert!(
            start.elapsed() < Duration::from_secs(5),
            "the machine keeps memory of the dead"
        );
    }
}

/// NVML refuses memory queries for a GPU without a page; CUDA does not use the GPU at all.
#[test]
fn a_gpu_without_a_page_is_not_used() {
    let world = World::new(Driver::Simulator(2));
    let gpus = world.node().gpus();
    world.share("gpu-0", &gpus[0].uuid, Some(CAP));
    let mut probe = world.probe("name");
    assert_eq!(probe.ask("init").code, 800);
    assert!(probe.stderr().contains(&gpus[1].uuid));
    let smi = world.node().root().join("usr/bin/nvidia-smi");
    let ran = world.run(&smi, &["--query-gpu=memory.total", "--format=csv,noheader"]);
    let lines = text(&ran.stdout);
    assert_eq!(lines.lines().next(), Some("20480 MiB"), "{lines}");
    assert!(
        !lines.lines().nth(1).unwrap_or("").contains("MiB"),
        "{lines}"
    );
    fs::metadata(smi).unwrap();
}

/// A neighbour outside of this container's accounts also uses the GPU.
#[test]
fn every_view_of_nvidia_smi_tells_the_share() {
    let (world, _shares, [first, _]) = two_gpus();
    let mut neighbour = world.probe(DRIVER);
    ready(&mut neighbour, 0);
    neighbour.must(&format!("alloc {}", 30u64 << 30));
    let mut probe = world.probe("name");
    ready(&mut probe, 0);
    probe.must(&format!("alloc {}", 5u64 << 30));
    let smi = world.node().root().join("usr/bin/nvidia-smi");
    let see = |arguments: &[&str]| {
        let ran = world.run(&smi, arguments);
        assert_eq!(text(&ran.stderr), "", "{arguments:?}");
        // Collapses runs of blanks.
        let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
        let lines: Vec<String> = text(&ran.stdout).lines().map(words).collect();
        lines.join("\n")
    };
    let full = see(&["-q", "-i", &first]);
    for section in [
        "FB Memory Usage\nTotal : 20480 MiB\nReserved : 0 MiB\nUsed : 5120 MiB\nFree : 15360 MiB",
        "BAR1 Memory Usage\nTotal : 20480 MiB\nUsed : 2 MiB\nFree : 20478 MiB",
    ] {
        assert!(full.contains(section), "{section}: {full}");
    }
    let xml = see(&["-q", "-x", "-i", "0"]);
    let section = "<fb_memory_usage>\n<total>20480 MiB</total>\n<reserved>0 MiB</reserved>\n\
                   <used>5120 MiB</used>\n<free>15360 MiB</free>";
    assert!(xml.contains(section), "{xml}");
    // GPU, then percent of SM, memory, encoder, decoder, JPEG and optical flow, then MB of memory and BAR1.
    let monitor = see(&["dmon", "-c", "1", "-s", "um"]);
    assert!(monitor.contains("\n0 0 0 0 0 0 0 5120 2 -"), "{monitor}");
    assert!(monitor.contains("\n1 0 0 0 0 0 0 0 0 -"), "{monitor}");
    let query = "--query-gpu=memory.total,memory.reserved,memory.used,memory.free,utilization.gpu";
    for which in ["0", &first] {
        let line = see(&["-i", which, query, "--format=csv,noheader"]);
        assert_eq!(
            line, "20480 MiB, 0 MiB, 5120 MiB, 15360 MiB, 0 %",
            "{which}"
        );
    }
}

/// The neighbour is in the same PID namespace, as with `tranche run`, in a pod with `shareProcessNamespace` and with
/// `hostPID`: the driver lists its processes too.
#[test]
fn every_list_has_the_shares_processes_with_sizes_whose_sum_is_what_is_used() {
    const CONTEXT: u64 = 530 * MIB;
    let world = World::new(Driver::Simulator(1));
    let gpu = world.node().gpus()[0].uuid.clone();
    world.share_beside("gpu-0", &gpu, Some(CAP), CONTEXT);
    let mut neighbour = world.probe(DRIVER);
    ready(&mut neighbour, 0);
    neighbour.must(&format!("alloc {}", 30u64 << 30));
    let mut probes = [world.probe("name"), world.probe("name")];
    for (probe, gib) in probes.iter_mut().zip([5u64, 1]) {
        ready(probe, 0);
        probe.must(&format!("alloc {}", gib << 30));
    }
    let pids = probes.each_ref().map(|probe| u64::from(probe.pid()));

    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/nvml-client.py");
    let ran = world.run("python3", &[script, "nvmlDeviceGetHandleByIndex_v2", "0"]);
    let answers = text(&ran.stdout);
    let entries = |name: &str| {
        let line = answers.lines().find_map(|line| {
            let entries = line.strip_prefix(name)?.strip_prefix(" 0 2 ")?;
            Some(entries.replace(',', " "))
        });
        let line = line.unwrap_or_else(|| panic!("{name}: {answers}{}", text(&ran.stderr)));
        by_pid(line.split(' '))
    };
    let sizes = entries("nvmlDeviceGetComputeRunningProcesses_v3");
    assert_eq!(sizes.keys().copied().collect::<BTreeSet<_>>(), pids.into());
    // One of the two contexts takes its part of the cap.
    let used = (6 << 30) + CONTEXT;
    assert_eq!(sizes.values().sum::<u64>(), used);
    let memory = format!("nvmlDeviceGetMemoryInfo 0 {CAP},{},{used}\n", CAP - used);
    assert!(answers.contains(&memory), "{answers}");
    for name in [
        "nvmlDeviceGetComputeRunningProcesses",
        "nvmlDeviceGetComputeRunningProcesses_v2",
        "details/0",
        "table/213",
    ] {
        assert_eq!(entries(name), sizes, "{name}");
    }

    let own = world.node().root().join("usr/bin/nvidia-smi");
    for smi in [own, real_drivers().join("trixie/nvidia-smi")] {
        let see = |arguments: &[&str]| {
            let ran = world.run(&smi, arguments);
            assert_eq!(text(&ran.stderr), "", "{arguments:?}");
            text(&ran.stdout)
        };
        let mib: BTreeMap<u64, u64> = sizes.iter().map(|(pid, size)| (*pid, size / MIB)).collect();
        let query = "--query-compute-apps=pid,used_memory";
        let apps = see(&[query, "--format=csv,noheader,nounits"]);
        assert_eq!(by_pid(apps.split([',', '\n'])), mib, "{apps}");
        let query = ["--query-gpu=memory.used", "--format=csv,noheader"];
        assert_eq!(see(&query), format!("{} MiB\n", used / MIB));
        // What each view has for each process: in a line, or in a line each, its PID and its size, which are these numbers
        // of the line.
        let (first, second, third): (Number, Number, Number) =
            (|it| it.first(), |it| it.get(1), |it| it.get(2));
        let last: Number = |it| it.last();
        for (arguments, (pid_line, pid), (size_line, size)) in [
            (
                &[][..],
                ("tranche-shim-probe", second),
                ("tranche-shim-probe", last),
            ),
            (&["-q"], ("Process ID", first), ("Used GPU Memory", first)),
            (&["-q", "-x"], ("<pid>", first), ("<used_memory>", first)),
            (
                &["pmon", "-c", "1", "-s", "m"],
                (" C ", second),
                (" C ", third),
            ),
        ] {
            let view = see(arguments);
            let all = |part: &str, number: Number| -> Vec<u64> {
                let lines = view.lines().filter(|line| line.contains(part));
                let numbers = lines.map(|line| {
                    let words = line.split(|it: char| !it.is_ascii_digit());
                    words.filter_map(|word| word.parse().ok()).collect()
                });
                numbers
                    .filter_map(|it: Vec<u64>| number(&it).copied())
                    .collect()
            };
            let pids = all(pid_line, pid);
            let seen: BTreeMap<u64, u64> = pids.into_iter().zip(all(size_line, size)).collect();
            assert_eq!(seen, mib, "{arguments:?}: {view}");
        }
    }
}

/// Which of a line's numbers is meant.
type Number = fn(&[u64]) -> Option<&u64>;

/// Pairs of a PID and a number.
fn by_pid<'a>(words: impl Iterator<Item = &'a str>) -> BTreeMap<u64, u64> {
    let words = words.map(str::trim).filter(|word| !word.is_empty());
    let numbers: Vec<u64> = words.map(|word| word.parse().unwrap()).collect();
    numbers.chunks(2).map(|pair| (pair[0], pair[1])).collect()
}

/// The GPU is busy with a neighbour's kernels; the share's utilization is 0.
#[test]
fn an_idle_share_is_idle_beside_a_busy_neighbour() {
    let (world, _shares, [first, _]) = two_gpus();
    let mut probe = world.probe("name");
    ready(&mut probe, 0);
    probe.must(&format!("alloc {}", 1 << 30));
    let mut neighbour = world.probe(DRIVER);
    ready(&mut neighbour, 0);
    let kernel = neighbour.must("kernel sim_busy_1ms").number(0);
    neighbour.send(&format!("launch plain {kernel} 20000 50"));
    let smi = world.node().root().join("usr/bin/nvidia-smi");
    let query = ["--query-gpu=utilization.gpu", "--format=csv,noheader"];
    let start = Instant::now();
    while world.node().busiest() < 90 {
        assert!(
            start.elapsed() < Duration::from_secs(10),
            "the neighbour's kernels do not run"
        );
    }
    assert_eq!(text(&world.run(&smi, &query).stdout), "0 %\n0 %\n");
    let monitor = text(
        &world
            .run(&smi, &["dmon", "-c", "1", "-s", "u", "-i", &first])
            .stdout,
    );
    let line = monitor.lines().last().unwrap().split_whitespace();
    assert_eq!(
        line.take(3).collect::<Vec<_>>(),
        ["0", "0", "0"],
        "{monitor}"
    );
    // A share of the whole GPU's time, which its own process uses completely.
    neighbour.kill();
    let kernel = probe.must("kernel sim_busy_1ms").number(0);
    probe.send(&format!("launch plain {kernel} 20000 50"));
    let start = Instant::now();
    loop {
        let output = text(&world.run(&smi, &query).stdout);
        let percent = output.split(' ').next().unwrap().parse::<u64>().unwrap();
        if percent > 90 {
            break;
        }
        assert!(start.elapsed() < Duration::from_secs(10), "{output}");
    }
}

/// In a container's own PID namespace the driver lists only its own processes, with the same PIDs as the
/// account.
#[test]
fn in_a_pid_namespace_of_its_own_a_share_sees_its_own_processes() {
    let (world, _shares, [first, _]) = two_gpus();
    let mut neighbour = world.probe(DRIVER);
    ready(&mut neighbour, 0);
    neighbour.must(&format!("alloc {}", 30u64 << 30));
    let mut probe = Probe::by(
        world
            .command("unshare")
            .args(["--pid", "--fork", "--kill-child"])
            .arg(tranche_shim_tests::probe_path())
            .arg("name"),
    );
    ready(&mut probe, 0);
    probe.must(&format!("alloc {}", 5u64 << 30));
    let unshare = probe.pid();
    let children = fs::read_to_string(format!("/proc/{unshare}/task/{unshare}/children")).unwrap();
    let smi = world.node().root().join("usr/bin/nvidia-smi");
    let see = |arguments: &[&str]| {
        let inside = ["--pid", "--target", children.trim(), smi.to_str().unwrap()];
        text(&world.run("nsenter", &[&inside, arguments].concat()).stdout)
    };
    let apps = see(&[
        "--query-compute-apps=gpu_uuid,pid,used_memory",
        "--format=csv,noheader",
    ]);
    assert_eq!(apps, format!("{first}, 1, 5120 MiB\n"));
    let kernel = probe.must("kernel sim_busy_1ms").number(0);
    probe.send(&format!("launch plain {kernel} 20000 50"));
    let query = ["--query-gpu=utilization.gpu", "--format=csv,noheader"];
    let start = Instant::now();
    while !see(&query).starts_with("100 %") {
        assert!(start.elapsed() < Duration::from_secs(10), "{}", see(&query));
    }
}
