//! The controller's binary: see the crate's documentation.

use clap::Parser;
use tranche_controller::args::Args;

// Two threads: one for the loop, one so that a long list being decoded does not hold it up.
#[tokio::main(worker_threads = 2)]
async fn main() -> anyhow::Result<()> {
    Args::parse().run().await
}
