//! The programs of Tranche that this program contains.

use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::ExitCode;

use anyhow::Context;
use clap::Parser;

/// A program of Tranche.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Program {
    Controller,
    Kubectl,
}

const NAMES: [(&str, Program); 2] = [
    ("tranche-controller", Program::Controller),
    ("kubectl-tranche", Program::Kubectl),
];

/// The program of the name under which this process was started.
pub(crate) fn called() -> Option<Program> {
    let called = std::env::args_os().next()?;
    let name = Path::new(&called).file_name()?;
    NAMES
        .iter()
        .find(|(program, _)| *program == name)
        .map(|(_, program)| *program)
}

/// Makes a link for each program in a folder.
pub(crate) fn link(folder: &Path) -> anyhow::Result<()> {
    let this = std::env::current_exe()?;
    for (name, _) in NAMES {
        symlink(&this, folder.join(name)).context(name)?;
    }
    Ok(())
}

impl Program {
    /// Runs it with this process's arguments.
    #[tokio::main(worker_threads = 2)]
    pub(crate) async fn run(self) -> anyhow::Result<ExitCode> {
        match self {
            Self::Controller => tranche_controller::args::Args::parse()
                .run()
                .await
                .map(|()| ExitCode::SUCCESS),
            Self::Kubectl => Ok(kubectl_tranche::run(kubectl_tranche::args::Args::parse()).await),
        }
    }
}
