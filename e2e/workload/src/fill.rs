//! `fill`: allocates memory until the driver refuses, frees it, and continues.

use std::fmt;

use anyhow::{Context, ensure};
use clap::Args;
use serde::Serialize;

use crate::amount::Amount;
use crate::gpu::{Gpu, Memory, Refusal, Way, named};
use crate::pattern;
use crate::report::Report;

/// Bytes that are written into a piece of memory.
const TOUCHED: usize = 4096;

/// The options.
#[derive(Args, Debug)]
pub struct Fill {
    /// Size of a piece; halved at each refusal, down to --least
    #[arg(long, default_value = "256Mi")]
    chunk: Amount,
    /// The smallest piece that is tried; the driver takes large ones by blocks of 2 MiB
    #[arg(long, default_value = "2Mi")]
    least: Amount,
    /// The call
    #[arg(long, value_enum, default_value_t = Way::Device)]
    way: Way,
    /// The device; all of them, one after another, where absent
    #[arg(long)]
    device: Option<usize>,
}

/// The result.
#[derive(Debug, Serialize)]
struct Outcome {
    device: usize,
    uuid: String,
    way: Way,
    /// `cuDeviceTotalMem`, bytes.
    total: u64,
    /// Bytes held when the smallest piece was refused.
    filled: u64,
    /// The number of pieces.
    pieces: usize,
    /// How often the driver returned `CUDA_ERROR_OUT_OF_MEMORY`.
    refused: u32,
    /// Bytes free after everything was freed.
    free_after: u64,
    /// Wrong bytes, before or after the refusal.
    errors: u64,
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "device {}: took {} ({} bytes, {} pieces), then CUDA_ERROR_OUT_OF_MEMORY; \
             gave it back, {} free, took and used a piece again; {} wrong bytes",
            self.device,
            Amount(self.filled),
            self.filled,
            self.pieces,
            Amount(self.free_after),
            self.errors
        )
    }
}

impl Fill {
    /// A line for each device.
    pub fn run(&self, report: Report) -> anyhow::Result<()> {
        ensure!(
            self.least.0 <= self.chunk.0,
            "--least {} is more than --chunk {}",
            self.least,
            self.chunk
        );
        for gpu in Gpu::open_all(self.device)? {
            let filled = self
                .fill(&gpu)
                .with_context(|| format!("device {}", gpu.ordinal()))?;
            report.print(&filled)?;
            ensure!(
                filled.errors == 0,
                "{} bytes are not as written",
                filled.errors
            );
        }
        Ok(())
    }

    fn fill(&self, gpu: &Gpu) -> anyhow::Result<Outcome> {
        let (pieces, refused) = self.take_all(gpu)?;
        let filled = pieces.iter().map(|piece| piece.len() as u64).sum();
        let mut errors = 0;
        for (seed, piece) in pieces.iter().enumerate() {
            errors += check(piece, seed as u64)?;
        }
        let count = pieces.len();
        for piece in pieces {
            piece.free()?;
        }
        let (free_after, _) = gpu.memory()?;
        // A refusal has no effect: the program continues.
        let mut again = gpu
            .take(self.least, self.way)
            .map_err(Refusal::into_error)
            .context("after everything was given back")?;
        write(&mut again, u64::MAX)?;
        errors += check(&again, u64::MAX)?;
        again.free()?;
        Ok(Outcome {
            device: gpu.ordinal(),
            uuid: gpu.uuid()?,
            way: self.way,
            total: gpu.total()?,
            filled,
            pieces: count,
            refused,
            free_after,
            errors,
        })
    }

    /// Allocates everything that the driver gives, down to the smallest piece; also returns the
    /// number of refusals.
    fn take_all(&self, gpu: &Gpu) -> anyhow::Result<(Vec<Memory>, u32)> {
        let mut pieces = Vec::new();
        let mut refused = 0;
        let mut size = self.chunk;
        loop {
            match gpu.take(size, self.way) {
                Ok(mut piece) => {
                    write(&mut piece, pieces.len() as u64)?;
                    pieces.push(piece);
                }
                Err(Refusal::OutOfMemory) => {
                    refused += 1;
                    if size == self.least {
                        return Ok((pieces, refused));
                    }
                    // Whole multiples leave no gaps.
                    let least = self.least.0;
                    size = Amount((size.0 / 2 / least * least).max(least));
                }
                Err(Refusal::Other(error)) => {
                    return Err(named(error))
                        .with_context(|| format!("taking {size} after {} pieces", pieces.len()));
                }
            }
        }
    }
}

/// Writes a pattern at both ends.
fn write(piece: &mut Memory, seed: u64) -> anyhow::Result<()> {
    let len = piece.len().min(TOUCHED);
    let bytes = pattern::bytes(seed, len);
    piece.write(0, &bytes)?;
    piece.write(piece.len() - len, &bytes)
}

/// The number of wrong bytes of the pattern.
fn check(piece: &Memory, seed: u64) -> anyhow::Result<u64> {
    let len = piece.len().min(TOUCHED);
    let expected = pattern::bytes(seed, len);
    // Where both ends overlap, the last write is the content.
    let last = piece.read(piece.len() - len, len)?;
    let mut errors = pattern::differences(&expected, &last);
    if piece.len() >= 2 * len {
        errors += pattern::differences(&expected, &piece.read(0, len)?);
    }
    Ok(errors)
}
