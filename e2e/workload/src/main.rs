//! The CUDA program that the suite's pods run: it asks the driver what there is, and takes it.
//!
//! ```text
//!  command line ─► a command ─► gpu (the driver API, through cudarc) ─► report: a line to read, or JSON
//! ```
//!
//! It knows nothing of Tranche: it is any CUDA program, and what it finds is what one finds.
#![deny(unsafe_code)]

mod amount;
mod copy;
mod fill;
mod gpu;
mod hold;
mod info;
mod kernel;
mod pattern;
mod report;
mod spin;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Asks the CUDA driver what there is, and takes it.
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    #[command(subcommand)]
    command: Command,
    /// One JSON object a line instead of text
    #[arg(long, global = true)]
    json: bool,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Every device: UUID, name, total and free memory
    Info,
    /// Takes memory until the driver refuses, gives it back, and goes on
    Fill(fill::Fill),
    /// Takes memory and keeps it, checking it at every heartbeat, until SIGTERM
    Hold(hold::Hold),
    /// Sends bytes to the device, across it, and back, and compares them
    Copy(copy::Copy),
    /// Keeps the GPU busy, and says how busy it let itself be kept
    Spin(spin::Spin),
}

fn main() -> ExitCode {
    let args = Args::parse();
    let report = report::Report::new(args.json);
    let done = match args.command {
        Command::Info => info::run(report),
        Command::Fill(fill) => fill.run(report),
        Command::Hold(hold) => hold.run(report),
        Command::Copy(copy) => copy.run(report),
        Command::Spin(spin) => spin.run(report),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("tranche-workload: {error:#}");
            ExitCode::FAILURE
        }
    }
}
