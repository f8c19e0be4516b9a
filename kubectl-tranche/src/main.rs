//! `kubectl tranche`.

use std::process::ExitCode;

use clap::Parser;
use kubectl_tranche::args::Args;

#[tokio::main]
async fn main() -> ExitCode {
    kubectl_tranche::run(Args::parse()).await
}
