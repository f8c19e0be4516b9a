//! The node plugin's process; everything is in the library.
#![forbid(unsafe_code)]

use anyhow::Context as _;
use std::path::PathBuf;

use clap::Parser;
use tranche_kubelet_plugin::{app, args::Args, share::sweep::RECLAIM};

fn main() -> anyhow::Result<()> {
    let mut arguments = std::env::args_os().skip(1);
    if arguments.next().is_some_and(|first| first == RECLAIM) {
        let account: PathBuf = arguments.next().unwrap_or_default().into();
        tranche_node::sweep::reclaim(&account)?;
        return Ok(());
    }
    let args = Args::parse();
    tranche_serving::log::start(args.log_format).context("RUST_LOG")?;
    let runtime = app::runtime()?;
    let result = runtime.block_on(app::run(args));
    // A thread that waits for the node's lock would delay the exit.
    runtime.shutdown_background();
    result
}
