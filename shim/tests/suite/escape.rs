//! Every way in which a program can take device memory, tried with a full cap: in none of them does a share get more
//! than its cap, as the machine counts it at any instant.

use tranche_shim_tests::{Machine, Probe};

use crate::cap::{BLOCK, CAP};
use crate::families::{Case, with_variable, write};

const OUT_OF_MEMORY: i64 = 2;

/// A way to take device memory: takes about so many bytes and keeps them; returns the driver's code.
pub type Way = fn(&mut Probe, u64) -> i64;

pub const WAYS: [(&str, Way); 18] = [
    ("cuMemAlloc", |probe, bytes| {
        probe.ask(&format!("alloc {bytes}")).code
    }),
    ("small allocations", |probe, _| {
        probe.ask("alloc 700000").code
    }),
    ("cuMemAllocPitch", |probe, bytes| {
        probe.ask(&format!("pitch 1000 {}", bytes / 1024)).code
    }),
    ("managed memory", |probe, bytes| {
        let answer = probe.ask(&format!("managed {bytes}"));
        if answer.code != 0 {
            return answer.code;
        }
        probe.call(&format!(
            "cuMemPrefetchAsync {} {bytes} 0 0",
            answer.number(0)
        ))
    }),
    ("cuMemAllocAsync", |probe, bytes| {
        probe.ask(&format!("async {bytes}")).code
    }),
    ("cuMemAllocAsync, freed at once", |probe, bytes| {
        let answer = probe.ask(&format!("async {bytes}"));
        if answer.code != 0 {
            return answer.code;
        }
        probe.ask(&format!("free-async {}", answer.number(0))).code
    }),
    ("a pool that keeps everything", |probe, bytes| {
        probe.must("set 16 1 1 0 0 0 0 0 0 0 0 0");
        let pool = probe.get("cuMemPoolCreate &0 &16");
        probe.must(&format!("set 32 {}", u64::MAX));
        assert_eq!(
            probe.call(&format!("cuMemPoolSetAttribute {pool} 4 &32")),
            0
        );
        probe.call(&format!("cuMemAllocFromPoolAsync &0 {bytes} {pool} 0"))
    }),
    ("cuMemCreate", |probe, bytes| {
        probe.must("set 16 4294967297 1 0 0");
        probe.call(&format!(
            "cuMemCreate &0 {} &16 0",
            bytes.next_multiple_of(BLOCK)
        ))
    }),
    ("a dma-buf of memory that is freed", |probe, bytes| {
        let answer = probe.ask(&format!("alloc {bytes}"));
        if answer.code != 0 {
            return answer.code;
        }
        let pointer = answer.number(0);
        let whole = bytes & !4095;
        let code = probe.call(&format!(
            "cuMemGetHandleForAddressRange &0 {pointer} {whole} 1 0"
        ));
        assert_eq!(probe.ask(&format!("free {pointer}")).code, 0);
        code
    }),
    ("an array", |probe, bytes| {
        // Rows of 4,096 floats.
        probe.must(&format!(
            "set 16 4096 {} {}",
            bytes / 16384,
            0x20u64 | 1 << 32
        ));
        probe.call("cuArrayCreate_v2 &0 &16")
    }),
    ("a mipmapped array", |probe, bytes| {
        probe.must(&format!(
            "set 16 4096 {} 0 {} 0",
            bytes / 16384,
            0x20u64 | 1 << 32
        ));
        probe.call("cuMipmappedArrayCreate &0 &16 2")
    }),
    ("a graph that is launched", |probe, bytes| {
        launch_graph(probe, bytes).0
    }),
    ("a graph that is launched and destroyed", |probe, bytes| {
        let (code, executable) = launch_graph(probe, bytes);
        if code == 0 {
            probe.call(&format!("cuGraphExecDestroy {executable}"))
        } else {
            code
        }
    }),
    ("a module with a variable", |probe, bytes| {
        write(probe, &with_variable(bytes));
        probe.call("cuModuleLoadData &0 &100")
    }),
    ("the kernels' heap", |probe, bytes| {
        assert_eq!(probe.call("cuCtxGetLimit &0 2"), 0);
        let now = probe.must("words 0 1").number(0);
        probe.call(&format!("cuCtxSetLimit 2 {}", now + bytes))
    }),
    ("stacks", |probe, bytes| {
        assert_eq!(probe.call("cuCtxGetLimit &0 0"), 0);
        let now = probe.must("words 0 1").number(0);
        // For each of the threads that an H100 runs at a time.
        let more = (bytes / (132 * 2048)).next_multiple_of(256);
        probe.call(&format!("cuCtxSetLimit 0 {}", now + more))
    }),
    ("another context", |probe, _| {
        assert_eq!(probe.call("cuCtxGetCurrent &8"), 0);
        let code = probe.ask("context 0").code;
        let before = probe.must("words 8 1").number(0);
        probe.must(&format!("current {before}"));
        code
    }),
    ("a library with a variable", |probe, bytes| {
        write(probe, &with_variable(bytes));
        probe.call("cuLibraryLoadData &0 &100 0 0 0 0 0 0")
    }),
];

/// Makes a graph of one memory node and launches it; returns the driver's code and the executable graph.
fn launch_graph(probe: &mut Probe, bytes: u64) -> (i64, u64) {
    let graph = probe.get("cuGraphCreate &0 0");
    probe.must(&format!("set 16 1 1 0 0 0 0 0 0 0 0 0 0 0 {bytes} 0"));
    for call in [
        format!("cuGraphAddMemAllocNode &0 {graph} 0 0 &16"),
        format!("cuGraphInstantiateWithFlags &0 {graph} 0"),
    ] {
        let code = probe.call(&call);
        if code != 0 {
            return (code, 0);
        }
    }
    let executable = probe.must("words 0 1").number(0);
    let code = probe.call(&format!("cuGraphLaunch {executable} 0"));
    assert_eq!(probe.call(&format!("cuGraphDestroy {graph}")), 0);
    (code, executable)
}

/// A kernel's code is charged with its module: its first launch at a full cap takes nothing more.
#[test]
fn code_that_is_loaded_late_stays_within_the_cap() {
    let mut case = Case::on(Machine::Realistic);
    let kernel = case.probe.must("kernel sim_busy_1us").number(0);
    assert_eq!(case.probe.ask(&format!("alloc {CAP}")).code, OUT_OF_MEMORY);
    case.probe.must(&format!("alloc {}", CAP - BLOCK));
    case.probe.must(&format!("launch-grid {kernel} 1 0"));
    // Code in the blocks of other code takes nothing more.
    let another = case.probe.must("kernel sim_busy_2us").number(0);
    case.probe.must(&format!("launch-grid {another} 1 0"));
    let text = with_variable(8) + &" ".repeat(3 << 20);
    for (load, rest) in [
        ("cuModuleLoad", ""),
        ("cuLibraryLoadFromFile", "0 0 0 0 0 0"),
    ] {
        let file = case.world.folder().join("image.ptx");
        std::fs::write(&file, &text).unwrap();
        write(&mut case.probe, &file.display().to_string());
        let code = case.probe.call(&format!("{load} &0 &100 {rest}"));
        assert_eq!(code, OUT_OF_MEMORY, "{load}");
    }
    let (peak, limit) = (case.peak(), CAP + case.context);
    assert!(peak <= limit, "{peak} bytes of {limit}");
    case.probe.must("reset 0");
    assert_eq!(case.share.used(), 0);
}

/// Fills the cap by one way, then tries every way again, in this process and in another of the share.
#[test]
fn no_way_to_take_memory_exceeds_the_cap() {
    for machine in Machine::ALL {
        for (how, fill) in WAYS {
            let mut case = Case::on(machine);
            let limit = CAP + case.context;
            let mut code = 0;
            for _ in 0..40 {
                code = fill(&mut case.probe, CAP / 20);
                if code != 0 {
                    break;
                }
            }
            // A way that frees as much as it takes never fills the cap.
            assert!(
                matches!(code, 0 | OUT_OF_MEMORY),
                "{how}, {machine:?}: {code}"
            );
            let mut other = case.world.probe("name");
            other.must("init");
            let joins = other.ask("primary 0").code == 0;
            for (again, way) in WAYS {
                for bytes in [CAP / 10, BLOCK] {
                    for probe in [Some(&mut case.probe), joins.then_some(&mut other)] {
                        let code = probe.map_or(0, |probe| way(probe, bytes));
                        assert!(
                            matches!(code, 0 | OUT_OF_MEMORY),
                            "{again} after {how}, {machine:?}: {code}"
                        );
                    }
                }
            }
            let (peak, counted) = (case.peak(), case.share.read(|account| account.peak()));
            assert!(
                peak <= limit && counted <= limit,
                "{how}, {machine:?}: {peak} bytes at most, {counted} counted, of {limit}"
            );
        }
    }
}
