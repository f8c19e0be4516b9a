//! What both suites of tests need.

use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// How long [`until`] waits.
const PATIENCE: Duration = Duration::from_mins(1);

/// Waits until `done` is true; panics after a minute.
pub fn until(what: &str, mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(
            start.elapsed() < PATIENCE,
            "not within {PATIENCE:?}: {what}"
        );
        std::thread::sleep(Duration::from_millis(5));
    }
}

/// Sends a signal to a process.
pub fn kill(process: u32, signal: Signal) {
    let process = Pid::from_raw(process.try_into().unwrap()).unwrap();
    kill_process(process, signal).unwrap();
}
