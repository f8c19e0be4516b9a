//! The supervisor's process; everything is in the library.
#![forbid(unsafe_code)]

use std::ffi::OsString;
use std::fs::{self, File};
use std::path::PathBuf;

use anyhow::Context as _;
use clap::{Parser, Subcommand};
use rustix::fs::{FlockOperation, flock};
use tracing::info;
use tranche_mps::client::Client;
use tranche_mps::enter::enter;
use tranche_mps::layout::FOLDER;
use tranche_mps::server::serve;
use tranche_mps::supervisor::{Node, Supervisor};
use tranche_node::root::DriverRoot;
use tranche_serving::LogFormat;

/// Runs NVIDIA's MPS control daemon for each GPU of this node with concurrent shares
#[derive(Debug, Parser)]
#[command(version)]
struct Args {
    #[command(subcommand)]
    command: Subcommands,
}

#[derive(Debug, Subcommand)]
enum Subcommands {
    /// Starts, watches and ends daemons as the node plugin asks
    Run(Run),
    /// Prints the daemons of this node, as JSON
    List {
        /// The folder of the daemons' files
        #[arg(long, default_value = FOLDER)]
        folder: PathBuf,
    },
    /// Becomes a daemon, in a mount namespace of its own
    #[command(hide = true)]
    Enter {
        #[arg(long)]
        pipes: PathBuf,
        #[arg(long)]
        shm: PathBuf,
        program: PathBuf,
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<OsString>,
    },
}

#[derive(Debug, Parser)]
struct Run {
    /// The folder of the daemons' files, on tmpfs; the same path as on the host
    #[arg(long, default_value = FOLDER)]
    folder: PathBuf,
    /// Where the host's root is mounted in this process's view
    #[arg(long, default_value = "/")]
    host_root: PathBuf,
    /// The folder of the host that has the NVIDIA driver, as the host sees it; `auto` searches the usual places
    #[arg(long, default_value = "auto")]
    driver_root: String,
    /// Bytes of /dev/shm that the clients of one GPU have together, at most
    #[arg(long, default_value_t = 1 << 30)]
    shm_size: u64,
    /// The format of log lines; RUST_LOG selects what is logged (default info)
    #[arg(long, value_enum, default_value_t = LogFormat::Text)]
    log_format: LogFormat,
}

fn main() -> anyhow::Result<()> {
    match Args::parse().command {
        // This must run before there is a second thread.
        Subcommands::Enter {
            pipes,
            shm,
            program,
            arguments,
        } => Err(enter(&pipes, &shm, &program, &arguments).into()),
        Subcommands::Run(args) => tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?
            .block_on(run(args)),
        Subcommands::List { folder } => list(&folder),
    }
}

async fn run(args: Run) -> anyhow::Result<()> {
    tranche_serving::log::start(args.log_format).context("RUST_LOG")?;
    let folder = &args.folder;
    fs::create_dir_all(folder).with_context(|| folder.display().to_string())?;
    let _lock = lock(folder)?;
    let stop = tranche_serving::stop::on_signal()?;
    let supervisor = Supervisor::start(Node {
        folder: folder.clone(),
        host: DriverRoot::open(&args.host_root)?,
        driver_root: (args.driver_root != "auto").then(|| args.driver_root.clone().into()),
        shm_size: args.shm_size,
    })?;
    info!(folder = %folder.display(), "ready");
    serve(folder, supervisor, stop)
        .await
        .with_context(|| folder.display().to_string())
}

/// Two supervisors would start two daemons for one GPU.
fn lock(folder: &std::path::Path) -> anyhow::Result<File> {
    let path = folder.join("lock");
    let file = File::create(&path).with_context(|| path.display().to_string())?;
    flock(&file, FlockOperation::NonBlockingLockExclusive).with_context(|| {
        format!(
            "{}: another supervisor of this node holds it: wait until it has ended",
            path.display()
        )
    })?;
    Ok(file)
}

fn list(folder: &std::path::Path) -> anyhow::Result<()> {
    let daemons = Client::new(folder).list()?;
    println!("{}", serde_json::to_string_pretty(&daemons)?);
    Ok(())
}
