//! Writes how long tests took, and how long they waited for what, to the folder that `TRANCHE_E2E_RECORD` names.

use std::fs::OpenOptions;
use std::io::Write as _;
use std::path::PathBuf;

use serde_json::json;

use crate::pulse::Stopwatch;

/// Adds a line about the running test to `e2e-times`: the time since its turn began, and the time in which the machine stood still.
pub fn test(extent: &str, took: &Stopwatch) {
    let (seconds, stalled) = (took.by_the_clock(), took.stalled());
    let (seconds, stalled) = (seconds.as_secs_f64(), stalled.as_secs_f64());
    let name = running();
    println!("{name}: {seconds:.1} s, of which the machine stood still {stalled:.1} s");
    add(
        "e2e-times",
        &format!("{seconds:6.1} s  {stalled:5.1} s stalled  {extent}  {name}"),
    );
}

/// Adds a line about something that the running test waited for to `e2e-latency.json`.
pub fn latency(what: &str, took: &Stopwatch) {
    let line = json!({
        "test": running(), "what": what,
        "seconds": took.by_the_clock().as_secs_f64(), "by_the_pulse": took.by_the_pulse().as_secs_f64(),
    });
    add("e2e-latency.json", &line.to_string());
}

/// The name of the running test: libtest gives it to its thread.
fn running() -> String {
    std::thread::current().name().unwrap_or("?").to_owned()
}

fn add(file: &str, line: &str) {
    let folder = std::env::var_os("TRANCHE_E2E_RECORD");
    let Some(folder) = folder.filter(|folder| !folder.is_empty()) else {
        return;
    };
    let path = PathBuf::from(folder).join(file);
    let file = OpenOptions::new().create(true).append(true).open(&path);
    if let Err(error) = file.and_then(|mut file| file.write_all(format!("{line}\n").as_bytes())) {
        eprintln!("{}: {error}", path.display());
    }
}
