//! The node plugin's process; everything is in the library.
#![forbid(unsafe_code)]

use anyhow::Context as _;
use std::path::PathBuf;
use std::time::Duration;

use clap::Parser;
use tranche_kubelet_plugin::{app, args::Args, share::sweep::RECLAIM};

/// Two threads: most of the work is waiting for disk and API server, and every thread takes memory.
const THREADS: usize = 2;

/// About as many fsyncs as a disk merges.
const BLOCKING_THREADS: usize = 16;

/// Shorter than the time in which the periodic tasks use all threads in turn, so that idle threads
/// end.
const IDLE: Duration = Duration::from_secs(1);

fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next().is_some_and(|first| first == RECLAIM) {
        let account: PathBuf = arguments.next().unwrap_or_default().into();
        tranche_node::sweep::reclaim(&account)?;
        return Ok(());
    }
    let args = Args::parse();
    tranche_serving::log::start(args.log_format).context("RUST_LOG")?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(THREADS)
        .max_blocking_threads(BLOCKING_THREADS)
        .thread_keep_alive(IDLE)
        .enable_all()
        .build()?;
    let result = runtime.block_on(app::run(args));
    // A thread that waits for the node's lock would delay the exit.
    runtime.shutdown_background();
    result
}
