//! A kernel that accesses memory which is not allocated, and the processes that its fault affects.

use crate::common;

use common::{GIB, Machine};

const FAULT: &str = "CUDA_ERROR_ILLEGAL_ADDRESS";

#[test]
fn a_fault_affects_its_process_until_it_ends_and_no_other() {
    let machine = Machine::start("H100-80", 1);
    let mut other = machine.program();
    other.ask("use 0");
    assert_eq!(other.ask(&format!("alloc {GIB}")), "ok");
    let used = machine.used(0);
    let mut faulty = machine.program();
    faulty.ask("use 0");
    assert_eq!(faulty.ask("launch sim_illegal_address 1"), FAULT);
    for command in ["info", "launch plain 1", "alloc 1"] {
        assert_eq!(faulty.ask(command), FAULT, "{command}");
    }
    assert_eq!(other.ask(&format!("check {GIB}")), "ok");
    // The next process is not affected, also in the same slot.
    faulty.kill();
    machine.wait_for_used(0, used);
    let mut next = machine.program();
    next.ask("use 0");
    assert_eq!(next.ask(&format!("alloc {GIB}")), "ok");
}
