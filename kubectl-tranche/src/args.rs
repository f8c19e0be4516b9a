//! The command line.

use std::path::PathBuf;

use clap::{Parser, Subcommand, ValueEnum};
use clap_complete::Shell;

use crate::cluster::Connection;
use crate::money::Money;
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
    /// How much of nodes, GPUs and pods is allocated and used
    Top(TopArgs),
    /// Each GPU as a bar: its tier, shares, partitions and free room
    Map(MapArgs),
    /// What holders pay, what is free, stranded or idle, and what sharing saves
    Cost(CostArgs),
    /// From answers, or from a running pod, to a tier and a claim to apply
    Recommend(RecommendArgs),
    /// What is wrong with Tranche in this cluster, and the way out
    Doctor,
    /// Keeps new claims off a GPU or a node's GPUs
    Cordon(TargetArgs),
    /// Lets claims have a cordoned GPU or node again
    Uncordon(TargetArgs),
    /// Cordons a GPU or a node's GPUs, and evicts the pods that have them, as far as their budgets allow
    Drain(DrainArgs),
    /// Packs what support needs into a .tar.gz, without secrets
    Collect {
        /// The archive; else tranche-TIME.tar.gz in the current folder
        #[arg(long, value_name = "FILE")]
        file: Option<PathBuf>,
    },
    /// A local web page: the GPUs as a map, who waits and why, use and cost; live
    Ui(UiArgs),
    /// Why a pod or claim waits, by the rules of kube-scheduler, or what it has and who is beside it
    Explain(ExplainArgs),
    /// The versions of this program, of the API server and of the node plugins
    Version {
        /// Only this program's, without a cluster
        #[arg(long)]
        client: bool,
    },
    /// The completions of a shell, for `kubectl tranche` and `kubectl-tranche`
    Completion {
        /// The shell
        shell: Shell,
    },
}

/// Arguments of `get`.
#[derive(Clone, Debug, clap::Args)]
pub struct GetArgs {
    /// claims, pods, gpus or nodes, and one of them: the name of a claim, pod or node; of a GPU its UUID or the beginning of
    /// it, a MIG UUID, or a device's name
    #[arg(value_name = "TYPE [NAME]|TYPE/NAME", num_args = 0..=2)]
    pub what: Vec<String>,
    #[command(flatten)]
    /// The namespaces.
    pub scope: ScopeArgs,
}

/// Arguments of `cordon` and `uncordon`.
#[derive(Clone, Debug, clap::Args)]
pub struct TargetArgs {
    /// A node, or a GPU: its UUID or the beginning of it, or gpu-<first 8 digits>
    #[arg(value_name = "GPU|NODE")]
    pub target: String,
}

/// Arguments of `drain`.
#[derive(Clone, Debug, clap::Args)]
pub struct DrainArgs {
    #[command(flatten)]
    /// What to drain.
    pub target: TargetArgs,
    /// Seconds to wait for pods to end and for budgets to allow it
    #[arg(long, value_name = "SECONDS", default_value_t = 300)]
    pub timeout: u64,
    /// Evict also pods that no controller makes again
    #[arg(long)]
    pub force: bool,
    /// Only show who would be evicted
    #[arg(long)]
    pub dry_run: bool,
}

/// Words that name nothing that a command shows.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WordsError {
    /// Not a kind of object.
    #[error("there is no type {found:?} here: use {known}")]
    Type {
        /// What was given.
        found: String,
        /// The types, in words.
        known: &'static str,
    },
    /// `TYPE/NAME NAME`.
    #[error("{0} and {1}: write TYPE NAME or TYPE/NAME")]
    TwoNames(String, String),
}

/// `TYPE`, `TYPE NAME` or `TYPE/NAME`, as kubectl reads them.
fn type_and_name(words: &[String]) -> Result<(Option<&str>, Option<&str>), WordsError> {
    match words {
        [] => Ok((None, None)),
        [word, rest @ ..] => match (word.split_once('/'), rest) {
            (Some((kind, name)), []) => Ok((Some(kind), Some(name))),
            (Some(_), [more, ..]) => Err(WordsError::TwoNames(word.clone(), more.clone())),
            (None, []) => Ok((Some(word), None)),
            (None, [name, ..]) => Ok((Some(word), Some(name))),
        },
    }
}

impl GetArgs {
    /// What to list, and the name of one of them.
    pub fn question(&self) -> Result<(Kind, Option<String>), WordsError> {
        let (kind, name) = type_and_name(&self.what)?;
        let kind = match kind {
            None => Kind::Claims,
            Some(word) => {
                Kind::from_str(&word.to_ascii_lowercase(), true).map_err(|_| WordsError::Type {
                    found: word.to_owned(),
                    known: "claims, pods, gpus or nodes",
                })?
            }
        };
        let name = name.filter(|name| !name.is_empty()).map(str::to_owned);
        Ok((kind, name))
    }
}

/// Arguments of `ui`.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct UiArgs {
    /// The port of 127.0.0.1 on which the page is served; 0 for any
    #[arg(long, default_value_t = 0)]
    pub port: u16,
}

/// What `get` lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Kind {
    /// Claims and their devices
    #[value(aliases = ["claim", "resourceclaim", "resourceclaims"])]
    Claims,
    /// Pods and their devices
    #[value(aliases = ["pod", "po"])]
    Pods,
    /// GPUs and their pods
    #[value(aliases = ["gpu", "device", "devices"])]
    Gpus,
    /// Nodes with GPUs
    #[value(aliases = ["node", "no", "gpunode", "gpunodes"])]
    Nodes,
}

/// Arguments of `top`.
#[derive(Clone, Debug, clap::Args)]
pub struct TopArgs {
    /// What to list
    #[arg(value_enum, default_value = "gpus")]
    pub kind: TopKind,
    #[command(flatten)]
    /// The namespaces whose pods are shown.
    pub scope: ScopeArgs,
    #[command(flatten)]
    /// Whether to show it again and again.
    pub watch: WatchArgs,
}

/// What `top` lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TopKind {
    /// Nodes with GPUs
    #[value(aliases = ["node", "no"])]
    Nodes,
    /// GPUs
    #[value(alias = "gpu")]
    Gpus,
    /// Pods with GPUs
    #[value(aliases = ["pod", "po"])]
    Pods,
}

/// Arguments of `map`.
#[derive(Clone, Debug, clap::Args)]
pub struct MapArgs {
    /// Draw with ASCII characters, also where the locale is UTF-8
    #[arg(long)]
    pub ascii: bool,
    #[command(flatten)]
    /// Whether to show it again and again.
    pub watch: WatchArgs,
}

/// Arguments of `cost`.
#[derive(Clone, Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct CostArgs {
    /// How the rows are grouped
    #[arg(long, value_enum, default_value = "namespace")]
    pub by: CostBy,
    #[command(subcommand)]
    /// A subcommand instead of the bill.
    pub command: Option<CostCommand>,
}

/// How `cost` groups its rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, serde::Serialize)]
#[serde(rename_all = "camelCase")]
pub enum CostBy {
    /// Namespaces
    Namespace,
    /// Claims
    Claim,
    /// Tiers
    Tier,
    /// Nodes
    Node,
}

/// A subcommand instead of the bill.
#[derive(Clone, Debug, Subcommand)]
pub enum CostCommand {
    /// Jobs on whole GPUs against the same jobs on shares; needs no cluster
    Calculator {
        /// Jobs, each on a GPU of its own today
        #[arg(long, default_value_t = 10)]
        gpus: u32,
        /// What a GPU costs for an hour, in dollars
        #[arg(long, default_value = "3.50")]
        price: Money,
        /// Jobs that share a GPU
        #[arg(long, default_value_t = 4)]
        tenants: u32,
        /// How much longer a job takes in its share, percent
        #[arg(long, default_value_t = 8)]
        overhead: u32,
    },
}

/// Arguments of `recommend`.
#[derive(Clone, Debug, clap::Args)]
pub struct RecommendArgs {
    /// Answers, such as size=part; on a terminal the command asks the other questions
    #[arg(value_name = "QUESTION=ANSWER")]
    pub answers: Vec<String>,
    /// A running pod of the namespace, whose claim and use give the sizes
    #[arg(long, value_name = "NAME")]
    pub pod: Option<String>,
    /// Memory of the claim
    #[arg(long, value_name = "BYTES")]
    pub memory: Option<String>,
    /// Cores of the claim, percent
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(1..=100))]
    pub cores: Option<u8>,
    /// Name of the ResourceClaimTemplate
    #[arg(long, default_value = "gpu")]
    pub name: String,
}

/// Whether to show a result again and again.
#[derive(Clone, Copy, Debug, clap::Args)]
pub struct WatchArgs {
    /// Show it again and again, until Ctrl-C
    #[arg(long, short)]
    pub watch: bool,
    /// Seconds between two readings
    #[arg(long, value_name = "SECONDS", default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub interval: u64,
}

/// The namespaces whose claims and pods are shown.
#[derive(Clone, Copy, Debug, Default, clap::Args)]
pub struct ScopeArgs {
    /// Claims and pods of all namespaces
    #[arg(long, short = 'A')]
    pub all_namespaces: bool,
}

/// Arguments of `explain`.
#[derive(Clone, Debug, clap::Args)]
pub struct ExplainArgs {
    /// The pod or claim: its name, pod NAME or claim NAME, or pod/NAME or claim/NAME
    #[arg(value_name = "NAME|TYPE NAME|TYPE/NAME", num_args = 1..=2, required = true)]
    pub what: Vec<String>,
}

impl ExplainArgs {
    /// `pod` or `claim`, where it is given, and the name.
    pub fn subject(&self) -> Result<(Option<&'static str>, &str), WordsError> {
        let (kind, name) = match type_and_name(&self.what)? {
            (Some(name), None) => return Ok((None, name)),
            (kind, name) => (kind.unwrap_or_default(), name.unwrap_or_default()),
        };
        let kind = match kind.to_ascii_lowercase().as_str() {
            "pod" | "pods" | "po" => "pod",
            "claim" | "claims" | "resourceclaim" | "resourceclaims" => "claim",
            _ => {
                return Err(WordsError::Type {
                    found: kind.to_owned(),
                    known: "pod or claim",
                });
            }
        };
        Ok((Some(kind), name))
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        Args::command().debug_assert();
    }

    #[test]
    fn objects_are_named_as_for_kubectl() {
        let words = |words: &str| words.split_whitespace().map(str::to_owned).collect();
        let get = |text: &str| {
            let args = GetArgs {
                what: words(text),
                scope: ScopeArgs::default(),
            };
            args.question()
        };
        let named = |name: &str| Some(name.to_owned());
        for (text, expected) in [
            ("", (Kind::Claims, None)),
            ("pods", (Kind::Pods, None)),
            ("pod one", (Kind::Pods, named("one"))),
            ("Pod/one", (Kind::Pods, named("one"))),
            ("gpu GPU-a0", (Kind::Gpus, named("GPU-a0"))),
            ("no", (Kind::Nodes, None)),
        ] {
            assert_eq!(get(text), Ok(expected), "{text}");
        }
        let error = get("services").unwrap_err().to_string();
        assert!(error.contains("claims, pods, gpus or nodes"), "{error}");
        assert!(get("pod/one two").is_err());

        let explain = |text: &str| {
            let args = ExplainArgs { what: words(text) };
            let subject = args.subject();
            subject.map(|(kind, name)| (kind, name.to_owned()))
        };
        for (text, kind) in [
            ("one", None),
            ("pod one", Some("pod")),
            ("po/one", Some("pod")),
            ("claim/one", Some("claim")),
            ("resourceclaim one", Some("claim")),
        ] {
            assert_eq!(explain(text), Ok((kind, "one".to_owned())), "{text}");
        }
        assert!(explain("node/one").is_err());
    }
}
