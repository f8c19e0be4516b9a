//! The CUDA program that the suite's pods run.
//!
//! ```text
//!  command line ─► a command ─► gpu (the driver API, through cudarc) ─► report: a line to read, or JSON
//! ```
//!
//! It knows nothing of Tranche, so it sees what every CUDA program sees.
#![deny(unsafe_code)]

mod amount;
mod copy;
mod fault;
mod fill;
mod gpu;
mod hold;
mod info;
mod kernel;
mod pattern;
mod report;
mod serve;
mod spin;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Queries and uses the GPUs of a container
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
    Info(info::Info),
    /// Allocates memory until the driver refuses, frees it, and continues
    Fill(fill::Fill),
    /// Allocates memory and keeps it, checking it at every heartbeat, until SIGTERM
    Hold(hold::Hold),
    /// Copies bytes to the device, on the device, and back, and compares them
    Copy(copy::Copy),
    /// Keeps the GPU busy, and prints how busy it was
    Spin(spin::Spin),
    /// Does a request now and then, and prints how long requests took
    Serve(serve::Serve),
    /// Runs a kernel that writes to memory which is not allocated
    Fault(fault::Fault),
}

fn main() -> ExitCode {
    let args = Args::parse();
    let report = report::Report::new(args.json);
    let done = match args.command {
        Command::Info(info) => info.run(report),
        Command::Fill(fill) => fill.run(report),
        Command::Hold(hold) => hold.run(report),
        Command::Copy(copy) => copy.run(report),
        Command::Spin(spin) => spin.run(report),
        Command::Serve(serve) => serve.run(report),
        Command::Fault(fault) => fault.run(report),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("tranche-workload: {error:#}");
            ExitCode::FAILURE
        }
    }
}
