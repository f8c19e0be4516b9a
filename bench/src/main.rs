//! Measures the numbers of SPECIFICATION.md.
//!
//! ```text
//!  subcommand ─► measurement ─► rows (value, spread, comparison) ─► JSON lines, text
//!                                                                               └─► report
//! ```
//!
//! Measurements of a cluster run on a GPU node, beside the plugin; `bench/run` starts them there.
#![forbid(unsafe_code)]

mod claims;
mod cluster;
mod dra;
mod packing;
mod planner;
mod pods;
mod prepare;
mod process;
mod promise;
mod row;
mod scrape;
mod shim;
mod sizes;
mod slices;
mod stats;

use std::path::PathBuf;
use std::process::ExitCode;

use anyhow::Context;
use clap::{Parser, Subcommand};

use cluster::Cluster;
use row::Row;

/// Measures the promises of SPECIFICATION.md: JSON lines on stdout, text on stderr.
#[derive(Debug, Parser)]
#[command(version)]
struct Cli {
    /// The node that this runs on
    #[arg(long, env = "HOSTNAME", default_value = "", global = true)]
    node: String,
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    /// The plugin's gRPC calls, over its socket
    Prepare(prepare::Args),
    /// Pods with and without a claim, to Running
    Pods(pods::Args),
    /// The time until slices appear
    Slices(slices::Args),
    /// The cost of a scrape of the plugin's metrics, with every GPU full of shares
    Scrape(scrape::Args),
    /// The cost of the shim, compared with the bare driver, on the simulated machine of the shim's tests, as root
    Shim(shim::Args),
    /// Memory of plugin and controller
    Memory,
    /// Sizes of the built files
    Sizes(sizes::Args),
    /// GPUs that capped shares need; with kube-scheduler's allocator (driver/allocator-oracle/build)
    Packing(packing::Args),
    /// The slices of nodes with all tiers on: number, bytes, the time to plan them
    Planner(planner::Args),
    /// Prints files of rows, in the order of SPECIFICATION.md; fails where a target is missed
    Report {
        /// Files of JSON lines
        #[arg(required = true)]
        files: Vec<PathBuf>,
    },
}

fn main() -> anyhow::Result<ExitCode> {
    let Cli { node, what } = Cli::parse();
    let rows = match &what {
        What::Prepare(args) => on_cluster(&node, async |c| prepare::run(args, c).await)?,
        What::Pods(args) => on_cluster(&node, async |c| pods::run(args, c).await)?,
        What::Slices(args) => on_cluster(&node, async |c| slices::run(args, c).await)?,
        What::Scrape(args) => on_cluster(&node, async |c| scrape::run(args, c).await)?,
        What::Shim(args) => shim::run(args)?,
        What::Memory => sizes::in_memory()?,
        What::Sizes(args) => sizes::on_disk(args)?,
        What::Packing(args) => packing::run(*args)?,
        What::Planner(args) => planner::run(*args)?,
        What::Report { files } => {
            let kept = row::report(files)?;
            return Ok(if kept {
                ExitCode::SUCCESS
            } else {
                ExitCode::FAILURE
            });
        }
    };
    row::emit(&rows)?;
    Ok(ExitCode::SUCCESS)
}

fn on_cluster(
    node: &str,
    measure: impl AsyncFnOnce(&Cluster) -> anyhow::Result<Vec<Row>>,
) -> anyhow::Result<Vec<Row>> {
    let runtime = tokio::runtime::Runtime::new().context("starting the runtime")?;
    runtime.block_on(async { measure(&Cluster::connect(node).await?).await })
}
