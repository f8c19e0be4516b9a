//! Helpers of both suites of tests.

use std::path::Path;
use std::process::Command;
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

/// Runs a script as root of its own machine, which has this machine's files and a simulated driver with two GPUs. The script
/// starts `nvidia-persistenced`. Its changes go to `work`.
pub fn on_a_machine_of_its_own(work: &Path, script: &str) -> Command {
    const MACHINE: &str = r#"
        set -e
        mount --make-rprivate /
        mount -t tmpfs x "$work"
        for folder in usr etc var; do
            mkdir "$work/$folder" "$work/$folder.work"
            mount -t overlay x -o "lowerdir=/$folder,upperdir=$work/$folder,workdir=$work/$folder.work" "/$folder"
        done
        mkdir "$work/dev"
        cp -a /dev/null /dev/zero /dev/urandom "$work/dev"
        mount --bind "$work/dev" /dev
        mount -t tmpfs x /run
        "$install" / --gpu-model H100-80 --gpus 2 >&2
    "#;
    let install = tranche_shim_tests::target().join("simulator/install-root");
    let mut command = Command::new("unshare");
    command
        .args(["-m", "sh", "-c", &format!("{MACHINE}{script}")])
        .env("work", work)
        .env("install", install.canonicalize().unwrap());
    command
}
