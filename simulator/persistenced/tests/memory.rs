//! Device memory: one ledger for all processes, returned by every kind of death.

mod common;

use std::io::ErrorKind;

use common::{GIB, MIB, Machine};
use tranche_simulator_machine::{Access, AttachError, Attachment, DriverRoot};

/// A context of the H100-80 machine.
const CONTEXT: u64 = 518 * MIB;
const OUT_OF_MEMORY: &str = "CUDA_ERROR_OUT_OF_MEMORY";

#[test]
fn another_process_sees_it_and_a_kill_returns_it() {
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
    // To the last block: what is free is what can be had.
    let info = second.ask("info");
    let free: u64 = info.split(' ').next().unwrap().parse().unwrap();
    assert_eq!(free, 81008 * MIB - 2 * CONTEXT - 50 * GIB);
    assert_eq!(second.ask(&format!("alloc {}", free + 1)), OUT_OF_MEMORY);
    assert_eq!(second.ask(&format!("alloc {free}")), "ok");
    assert_eq!(first.ask("alloc 1"), OUT_OF_MEMORY);
    // The neighbour's memory is its own again.
    first.end();
    machine.wait_for_used(0, free + CONTEXT);
    assert_eq!(second.ask(&format!("alloc {}", 50 * GIB)), "ok");
    assert_eq!(second.ask("free"), "ok");
    assert_eq!(machine.used(0), CONTEXT);
}

/// A child by fork has the driver's files, and the driver frees with the last of them.
#[test]
fn a_killed_parents_memory_is_taken_as_long_as_its_child_lives() {
    let machine = Machine::start("T4", 1);
    let mut program = machine.program();
    program.ask("use 0");
    program.ask(&format!("alloc {GIB}"));
    let child: i32 = program.ask("leave-child").parse().unwrap();
    program.kill();
    machine.wait_for_no_process(0);
    assert_eq!(machine.used(0), GIB + 102 * MIB);
    // SAFETY: our own child's child, alive until now.
    unsafe { libc::kill(child, libc::SIGKILL) };
    machine.wait_for_used(0, 0);
}

#[test]
fn kills_at_any_moment_lose_and_invent_nothing() {
    let machine = Machine::start("T4", 1);
    let mut witness = machine.program();
    witness.ask("use 0");
    witness.ask(&format!("alloc {GIB}"));
    let witness_has = GIB + 102 * MIB;
    for round in 0..15 {
        let mut programs: Vec<_> = (0..3).map(|_| machine.program()).collect();
        for program in &mut programs {
            program.ask("use 0");
            program.ask("churn");
        }
        // Another moment each time; what is waited for is the kill itself.
        std::thread::sleep(std::time::Duration::from_micros(997 * round));
        drop(programs);
        machine.wait_for_used(0, witness_has);
    }
    assert_eq!(witness.ask(&format!("alloc {}", 13 * GIB)), "ok");
}

#[test]
fn programs_outlive_the_daemon_and_the_dead_are_found_by_the_next() {
    let mut machine = Machine::start("H100-80", 1);
    let (mut stays, mut dies) = (machine.program(), machine.program());
    stays.ask("use 0");
    dies.ask("use 0");
    stays.ask(&format!("alloc {}", 10 * GIB));
    dies.ask(&format!("alloc {}", 20 * GIB));
    machine.kill_daemon();
    dies.kill();
    assert_eq!(
        stays.ask(&format!("alloc {GIB}")),
        "ok",
        "no daemon is needed to go on"
    );
    assert_eq!(machine.program().ask("init"), "CUDA_ERROR_NO_DEVICE");
    machine.start_daemon();
    machine.wait_for_used(0, CONTEXT + 11 * GIB);
    assert_eq!(stays.ask("free"), "ok");
    stays.kill();
    machine.wait_for_used(0, 0);
}

/// Whoever finds the daemon's socket can connect to it, however early.
#[test]
fn a_socket_that_is_there_listens() {
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
fn cuda_is_of_no_use_in_a_forked_child() {
    let machine = Machine::start("T4", 1);
    let mut program = machine.program();
    program.ask("use 0");
    // CUDA_ERROR_NOT_INITIALIZED, as from the real driver.
    assert_eq!(program.ask("fork"), "3");
    assert_eq!(program.ask("alloc 1"), "ok", "the parent goes on");
}

#[test]
fn what_cannot_be_opened_is_not_there() {
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
