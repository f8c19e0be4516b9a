//! Device memory: one ledger for all processes. The memory of a process is freed however it ends.

use crate::common;

use std::io::ErrorKind;

use common::{GIB, MIB, Machine};
use tranche_simulator_machine::{Access, AttachError, Attachment, DriverRoot};

/// A context of the H100-80 machine.
const CONTEXT: u64 = 518 * MIB;
const OUT_OF_MEMORY: &str = "CUDA_ERROR_OUT_OF_MEMORY";

#[test]
fn memory_shows_in_nvml_and_is_freed_by_a_kill() {
    let machine = Machine::start("H100-80", 2);
    let mut program = machine.program();
    assert_eq!(program.ask("use 1"), "Simulated H100 80GB HBM3");
    assert_eq!(machine.used(0), 0);
    assert_eq!(machine.used(1), CONTEXT);
    assert_eq!(program.ask(&format!("alloc {}", 3 * GIB)), "ok");
    assert_eq!(program.ask(&format!("check {}", 3 * GIB)), "ok");
    assert_eq!(machine.used(1), CONTEXT + 3 * GIB);

    let nvml = machine.nvml();
    let processes = nvml
        .device_by_index(1)
        .unwrap()
        .running_compute_processes()
        .unwrap();
    let [process] = &processes[..] else {
        panic!("{processes:?}")
    };
    assert_eq!(process.pid, program.pid());
    assert!(
        nvml.device_by_index(0)
            .unwrap()
            .running_compute_processes()
            .unwrap()
            .is_empty()
    );

    program.kill();
    machine.wait_for_used(1, 0);
    assert!(
        nvml.device_by_index(1)
            .unwrap()
            .running_compute_processes()
            .unwrap()
            .is_empty()
    );
}

#[test]
fn processes_together_never_exceed_the_gpu() {
    let machine = Machine::start("H100-80", 1);
    let (mut first, mut second) = (machine.program(), machine.program());
    first.ask("use 0");
    second.ask("use 0");
    assert_eq!(first.ask(&format!("alloc {}", 50 * GIB)), "ok");
    assert_eq!(second.ask(&format!("alloc {}", 50 * GIB)), OUT_OF_MEMORY);
    // All free memory can be allocated, to the last block.
    let info = second.ask("info");
    let free: u64 = info.split(' ').next().unwrap().parse().unwrap();
    assert_eq!(free, 81008 * MIB - 2 * CONTEXT - 50 * GIB);
    assert_eq!(second.ask(&format!("alloc {}", free + 1)), OUT_OF_MEMORY);
    assert_eq!(second.ask(&format!("alloc {free}")), "ok");
    assert_eq!(first.ask("alloc 1"), OUT_OF_MEMORY);
    // The memory of a process that ended can be allocated.
    first.end();
    machine.wait_for_used(0, free + CONTEXT);
    assert_eq!(second.ask(&format!("alloc {}", 50 * GIB)), "ok");
    assert_eq!(second.ask("free"), "ok");
    assert_eq!(machine.used(0), CONTEXT);
}

/// A forked child has the driver's files, and the driver frees memory when the last of them is closed.
#[test]
fn a_killed_parents_memory_stays_charged_until_its_child_ends() {
    let machine = Machine::start("T4", 1);
    let mut program = machine.program();
    program.ask("use 0");
    program.ask(&format!("alloc {GIB}"));
    let child: i32 = program.ask("leave-child").parse().unwrap();
    program.kill();
    machine.wait_for_no_process(0);
    assert_eq!(machine.used(0), GIB + 102 * MIB);
    // SAFETY: a process of this test, which runs until now.
    unsafe { libc::kill(child, libc::SIGKILL) };
    machine.wait_for_used(0, 0);
}

#[test]
fn kills_at_any_moment_leave_the_ledger_exact() {
    let machine = Machine::start("T4", 1);
    let mut bystander = machine.program();
    bystander.ask("use 0");
    bystander.ask(&format!("alloc {GIB}"));
    let expected = GIB + 102 * MIB;
    for round in 0..15 {
        let mut programs: Vec<_> = (0..3).map(|_| machine.program()).collect();
        for program in &mut programs {
            program.ask("use 0");
            program.ask("churn");
        }
        // Each round kills at another moment.
        std::thread::sleep(std::time::Duration::from_micros(997 * round));
        drop(programs);
        machine.wait_for_used(0, expected);
    }
    assert_eq!(bystander.ask(&format!("alloc {}", 13 * GIB)), "ok");
}

#[test]
fn programs_survive_the_daemon_and_its_successor_frees_the_dead() {
    let mut machine = Machine::start("H100-80", 1);
    let (mut survivor, mut victim) = (machine.program(), machine.program());
    survivor.ask("use 0");
    victim.ask("use 0");
    survivor.ask(&format!("alloc {}", 10 * GIB));
    victim.ask(&format!("alloc {}", 20 * GIB));
    machine.kill_daemon();
    victim.kill();
    assert_eq!(
        survivor.ask(&format!("alloc {GIB}")),
        "ok",
        "a running program needs no daemon"
    );
    assert_eq!(machine.program().ask("init"), "CUDA_ERROR_NO_DEVICE");
    machine.start_daemon();
    machine.wait_for_used(0, CONTEXT + 11 * GIB);
    assert_eq!(survivor.ask("free"), "ok");
    survivor.kill();
    machine.wait_for_used(0, 0);
}

/// A process that finds the daemon's socket can always connect to it.
#[test]
fn a_socket_that_exists_listens() {
    let mut machine = Machine::start("H100-80", 1);
    for _ in 0..100 {
        machine.kill_daemon();
        let root = DriverRoot::new(machine.path(""));
        std::fs::remove_file(root.socket()).unwrap();
        let early = std::thread::spawn(move || {
            loop {
                match Attachment::new(&root, Access::Observe) {
                    Err(AttachError::NoDaemon { source, .. })
                        if source.kind() == ErrorKind::NotFound => {}
                    other => break other,
                }
            }
        });
        machine.start_daemon();
        early.join().unwrap().unwrap();
    }
}

#[test]
fn cuda_does_not_work_in_a_forked_child() {
    let machine = Machine::start("T4", 1);
    let mut program = machine.program();
    program.ask("use 0");
    // CUDA_ERROR_NOT_INITIALIZED, as with the real driver.
    assert_eq!(program.ask("fork"), "3");
    assert_eq!(program.ask("alloc 1"), "ok", "CUDA works in the parent");
}

#[test]
fn gpus_without_a_device_node_are_not_visible() {
    let machine = Machine::start("T4", 3);
    std::fs::remove_file(machine.path("dev/nvidia1")).unwrap();
    assert_eq!(machine.nvml().device_count().unwrap(), 2);
    assert_eq!(
        machine
            .nvml()
            .device_by_index(1)
            .unwrap()
            .minor_number()
            .unwrap(),
        2
    );
    let mut program = machine.program();
    program.ask("init");
    assert_eq!(program.ask("count"), "2");
    let uuid = machine.nvml().device_by_index(1).unwrap().uuid().unwrap();
    let mut program = machine.program_with(&[("CUDA_VISIBLE_DEVICES", &uuid)]);
    program.ask("init");
    assert_eq!(program.ask("count"), "1");
    std::fs::remove_file(machine.path("dev/nvidiactl")).unwrap();
    assert_eq!(machine.program().ask("init"), "CUDA_ERROR_NO_DEVICE");
    assert!(matches!(
        machine.try_nvml(),
        Err(nvml_wrapper::error::NvmlError::DriverNotLoaded)
    ));
}
