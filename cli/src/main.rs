//! `tranche run`: a capped share of a GPU for one command, without Kubernetes.
//!
//! ```text
//!  tranche run ──request──► supervisor: NVML, the driver's files ─► admit: does it fit the user's other
//! shares?
//!      │                        │ pages in /run/tranche/run/<share>          │
//!      │ ◄──────grant───────────┴────────── CDI specs, as a pod's container gets them
//!      ├─ layout: which mounts, as a value
//!      ├─ mounts: a namespace of its own, and the mounts in it
//!      └─ exec COMMAND            supervisor: sweeps and samples until command and children are gone
//! ```
//!
//! The process that the user started becomes the command: exit code, signals and terminal are the
//! command's own. The supervisor runs in a session of its own.
//!
//! - [`args`]: the command line;
//! - [`wire`]: the messages between command and supervisor;
//! - [`admit`]: decides whether a share is granted, without I/O;
//! - [`shares`]: the user's shares on this machine: their folders, locks and pages;
//! - [`supervisor`], [`duties`]: grant a share and maintain it;
//! - [`contexts`]: the measured memory of a CUDA context;
//! - [`driver`]: the paths of a driver's files on this host;
//! - [`layout`], [`mounts`]: the command's file system;
//! - [`program`]: the command itself.
#![forbid(unsafe_code)]

mod admit;
mod args;
mod contexts;
mod driver;
mod duties;
mod layout;
mod mounts;
mod program;
mod run;
mod shares;
mod supervisor;
mod wire;

use std::process::ExitCode;

use clap::Parser as _;

use args::{Args, Command};
use run::FAILED;

fn main() -> ExitCode {
    let args = match Args::try_parse() {
        Ok(args) => args,
        Err(error) => {
            let _ = error.print();
            return if error.use_stderr() {
                ExitCode::from(FAILED)
            } else {
                ExitCode::SUCCESS
            };
        }
    };
    match args.command {
        Command::Run(run) => {
            let error = run::run(&run);
            eprintln!("tranche: {error}");
            ExitCode::from(error.exit_code())
        }
        Command::Supervise(supervise) => supervisor::main(&supervise),
        Command::Driver { driver_root } => match driver::find(driver_root.as_deref()) {
            Ok((root, libraries)) => {
                println!("{}\n{}", root.display(), libraries.display());
                ExitCode::SUCCESS
            }
            Err(error) => {
                eprintln!("tranche: {error}");
                ExitCode::from(FAILED)
            }
        },
        Command::Reclaim { account } => match tranche_node::sweep::reclaim(&account) {
            Ok(_) => ExitCode::SUCCESS,
            Err(_) => ExitCode::from(FAILED),
        },
    }
}
