//! `hold`: a tenant that works continuously and detects effects of its neighbours.

use std::fmt;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::Context;
use clap::Args;
use serde::Serialize;
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;

use crate::amount::Amount;
use crate::gpu::{Gpu, Memory, Refusal, Way};
use crate::pattern;
use crate::report::Report;

/// Bytes written into the memory, spread over it, and compared at every heartbeat.
const BLOCK: usize = 64 << 10;
const BLOCKS: usize = 16;
/// Allocated and freed at every heartbeat.
const WORK: Amount = Amount(1 << 20);

/// The options.
#[derive(Args, Debug)]
pub struct Hold {
    /// How much
    #[arg(long)]
    bytes: Amount,
    /// The device
    #[arg(long, default_value_t = 0)]
    device: usize,
    /// Milliseconds between heartbeats
    #[arg(long, default_value_t = 500)]
    beat: u64,
}

/// One heartbeat.
#[derive(Debug, Serialize)]
struct Heartbeat {
    beat: u64,
    uuid: String,
    held: u64,
    /// `cuMemGetInfo`, bytes.
    free: u64,
    total: u64,
    /// How long the heartbeat's own work took.
    milliseconds: u64,
    /// Errors since the start: bytes that changed, memory that was refused, calls that failed.
    errors: u64,
    /// The number of heartbeats at which the total or free memory differed from the first one,
    /// because others use the same memory.
    moved: u64,
}

impl fmt::Display for Heartbeat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "beat {}: holding {}, {} of {} free, {} ms, {} errors, moved {} times",
            self.beat,
            Amount(self.held),
            Amount(self.free),
            Amount(self.total),
            self.milliseconds,
            self.errors,
            self.moved
        )
    }
}

impl Hold {
    /// A line for each heartbeat, until SIGTERM.
    pub fn run(&self, report: Report) -> anyhow::Result<()> {
        let stop = stop_signal()?;
        let gpu = Gpu::open(self.device)?;
        let uuid = gpu.uuid()?;
        let mut memory = gpu
            .take(self.bytes, Way::Device)
            .map_err(Refusal::into_error)
            .with_context(|| format!("taking {}", self.bytes))?;
        let spots = spots(memory.len());
        for (seed, at) in spots.iter().enumerate() {
            memory.write(*at, &block(seed, memory.len()))?;
        }
        let before = gpu.memory()?;
        let (mut errors, mut moved) = (0, 0);
        for beat in 1.. {
            let start = Instant::now();
            errors += work(&gpu, &memory, &spots);
            let now = gpu.memory()?;
            moved += u64::from(now != before);
            report.print(&Heartbeat {
                beat,
                uuid: uuid.clone(),
                held: memory.len() as u64,
                free: now.0,
                total: now.1,
                milliseconds: u64::try_from(start.elapsed().as_millis()).unwrap_or(u64::MAX),
                errors,
                moved,
            })?;
            match stop.recv_timeout(Duration::from_millis(self.beat)) {
                Err(RecvTimeoutError::Timeout) => {}
                Ok(()) | Err(RecvTimeoutError::Disconnected) => break,
            }
        }
        memory.free()?;
        anyhow::ensure!(errors == 0, "{errors} errors while holding {}", self.bytes);
        Ok(())
    }
}

/// Compares the held memory and allocates a little more for a moment; counts and prints errors.
fn work(gpu: &Gpu, memory: &Memory, spots: &[usize]) -> u64 {
    let mut errors = 0;
    for (seed, at) in spots.iter().enumerate() {
        let expected = block(seed, memory.len());
        match memory.read(*at, expected.len()) {
            Ok(found) => errors += pattern::differences(&expected, &found),
            Err(error) => {
                errors += 1;
                eprintln!("tranche-workload: reading at {at}: {error:#}");
            }
        }
    }
    // A full share has no room for more, which no neighbour has caused.
    let room = gpu.memory().is_ok_and(|(free, _)| free >= WORK.0);
    if room && let Err(refusal) = gpu.take(WORK, Way::Device) {
        errors += 1;
        eprintln!(
            "tranche-workload: taking {WORK}: {:#}",
            refusal.into_error()
        );
    }
    errors
}

/// The offsets of the blocks: evenly spread, the first at the start, the last at the end; one block if there is no room for all.
fn spots(len: usize) -> Vec<usize> {
    if len < BLOCK * BLOCKS {
        return vec![0];
    }
    (0..BLOCKS)
        .map(|i| (len - BLOCK) / (BLOCKS - 1) * i)
        .collect()
}

fn block(seed: usize, len: usize) -> Vec<u8> {
    pattern::bytes(seed as u64, BLOCK.min(len))
}

fn stop_signal() -> anyhow::Result<mpsc::Receiver<()>> {
    let mut signals = Signals::new([SIGTERM, SIGINT]).context("listening for SIGTERM")?;
    let (told, stop) = mpsc::channel();
    thread::spawn(move || {
        if signals.forever().next().is_some() {
            // The receiver is gone if the program has ended meanwhile.
            let _ = told.send(());
        }
    });
    Ok(stop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_lie_within_and_apart() {
        for len in [1, BLOCK, BLOCK * BLOCKS, 20 << 30] {
            let spots = spots(len);
            assert!(spots.iter().all(|at| at + BLOCK.min(len) <= len));
            assert!(spots.windows(2).all(|pair| pair[0] + BLOCK <= pair[1]));
        }
        assert_eq!(spots(20 << 30).len(), BLOCKS);
    }
}
