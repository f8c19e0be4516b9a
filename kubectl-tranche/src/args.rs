//! The command line.

use clap::{Parser, Subcommand, ValueEnum};
use clap_complete::Shell;

use crate::cluster::Connection;
use crate::output::Format;

/// Who has which part of which GPU, what is free, what it costs, and what is wrong
#[derive(Clone, Debug, Parser)]
#[command(name = "kubectl-tranche", bin_name = "kubectl tranche", version)]
pub struct Args {
    #[command(flatten)]
    /// Which cluster.
    pub connection: Connection,
    /// How results are shown
    #[arg(long, short, global = true, value_enum, default_value_t)]
    pub output: Format,
    #[command(subcommand)]
    /// What to do.
    pub command: Command,
}

/// What to do.
#[derive(Clone, Debug, Subcommand)]
pub enum Command {
    /// Which claim and which pod has which GPU, and the reverse
    Get(GetArgs),
    /// The completions of a shell, for `kubectl tranche` and `kubectl-tranche`
    Completion {
        /// The shell
        shell: Shell,
    },
}

/// Arguments of `get`.
#[derive(Clone, Debug, clap::Args)]
pub struct GetArgs {
    /// What to list
    #[arg(value_enum, default_value = "claims")]
    pub kind: Kind,
    /// One of them: the name of a claim or pod; of a GPU its UUID or the beginning of it, a MIG UUID, or a device's name
    pub name: Option<String>,
    #[command(flatten)]
    /// Of which namespaces.
    pub scope: ScopeArgs,
}

/// What `get` lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Kind {
    /// Claims and their devices
    #[value(alias = "claim")]
    Claims,
    /// Pods and their devices
    #[value(aliases = ["pod", "po"])]
    Pods,
    /// GPUs and their pods
    #[value(aliases = ["gpu", "device", "devices"])]
    Gpus,
}

/// Of which namespaces claims and pods are shown.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
pub struct ScopeArgs {
    /// Of all namespaces
    #[arg(long, short = 'A')]
    pub all_namespaces: bool,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Args::command().debug_assert();
    }
}
