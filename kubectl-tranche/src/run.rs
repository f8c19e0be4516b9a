//! Runs a command: the only file that knows all the others.

use std::io;
use std::process::ExitCode;

use clap::CommandFactory;

use crate::args::{Args, Command, GetArgs, ScopeArgs};
use crate::cluster::{Cluster, ConnectError, Connection};
use crate::get;
use crate::model::Model;
use crate::output::{self, Format, FormatError, Tone, View};
use crate::snapshot::{Gap, Resource, Scope, Snapshot};
use crate::usage;

/// Why a command has no result: one line.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error(transparent)]
    Connect(#[from] ConnectError),
    #[error("{}", .0.message)]
    Gap(Gap),
    #[error(transparent)]
    NotFound(#[from] get::NotFound),
    #[error(transparent)]
    Format(#[from] FormatError),
    #[error("cannot write the result: {0}")]
    Write(#[from] io::Error),
}

/// Runs the command, prints what it gives, and says whether it worked.
pub async fn run(args: Args) -> ExitCode {
    match Box::pin(dispatch(args)).await {
        Ok(code) => code,
        Err(failure) => {
            output::note(Tone::Bad, &format!("error: {failure}"));
            ExitCode::FAILURE
        }
    }
}

async fn dispatch(args: Args) -> Result<ExitCode, Failure> {
    let Args {
        connection,
        output,
        command,
    } = args;
    match command {
        Command::Get(get) => Box::pin(run_get(&connection, get, output)).await,
        Command::Completion { shell } => {
            let mut command = Args::command();
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut command, "kubectl-tranche", &mut script);
            output::print(&String::from_utf8_lossy(&script))?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

async fn run_get(
    connection: &Connection,
    args: GetArgs,
    format: Format,
) -> Result<ExitCode, Failure> {
    let cluster = connection.connect().await?;
    let scope = scope(connection, args.scope, &cluster);
    let asked = [
        Resource::GpuNodes,
        Resource::ResourceSlices,
        Resource::ResourceClaims,
        Resource::DeviceClasses,
    ];
    // A GPU's pods are of all namespaces.
    let read = match args.kind {
        crate::args::Kind::Gpus => Scope::All,
        _ => scope.clone(),
    };
    let snapshot = read_all(&cluster, &asked, read).await?;
    let model = Model::new(&snapshot, &Err(usage::NOT_SERVED.to_owned()));
    let question = get::Question {
        kind: args.kind,
        name: args.name,
        scope,
    };
    let answer = get::answer(&model, &question)?;
    show(&answer, format, &notes(&snapshot))
}

/// Reads, or says what stands in the way of any result.
async fn read_all(
    cluster: &Cluster,
    asked: &[Resource],
    scope: Scope,
) -> Result<Snapshot, Failure> {
    let snapshot = cluster.read(asked, scope).await;
    match snapshot.obstacle() {
        Some(gap) => Err(Failure::Gap(gap.clone())),
        None => Ok(snapshot),
    }
}

/// All namespaces, or that of the flag or the context.
fn scope(connection: &Connection, args: ScopeArgs, cluster: &Cluster) -> Scope {
    if args.all_namespaces && connection.namespace.is_none() {
        Scope::All
    } else {
        Scope::Namespace(cluster.namespace.clone())
    }
}

/// What is missing in the result, a line for each gap.
fn notes(snapshot: &Snapshot) -> Vec<String> {
    let gaps = snapshot.gaps.iter();
    gaps.map(|gap| gap.message.clone()).collect()
}

fn show(value: &impl View, format: Format, notes: &[String]) -> Result<ExitCode, Failure> {
    output::print(&output::text(value, format)?)?;
    for note in notes {
        output::note(Tone::Faint, &format!("note: {note}"));
    }
    Ok(ExitCode::SUCCESS)
}
