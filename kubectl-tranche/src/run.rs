//! Runs a command: the only file that knows all the others.

use std::io;
use std::process::ExitCode;
use std::time::Duration;

use clap::CommandFactory;

use crate::args::{Args, Command, GetArgs, MapArgs, ScopeArgs, TopArgs, WatchArgs};
use crate::cluster::{Cluster, ConnectError, Connection};
use crate::model::Model;
use crate::output::{self, Block, Format, FormatError, Tone, View};
use crate::snapshot::{Gap, Resource, Scope, Snapshot};
use crate::{get, map, top, usage, watch};

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
        Command::Top(top) => Box::pin(run_top(&connection, top, output)).await,
        Command::Map(map) => Box::pin(run_map(&connection, map, output)).await,
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
    let model = Model::new(&snapshot, &usage());
    let question = get::Question {
        kind: args.kind,
        name: args.name,
        scope,
    };
    let answer = get::answer(&model, &question)?;
    show(&answer, format, &notes(&snapshot))
}

/// What `top` and `map` read.
const GPUS: [Resource; 3] = [
    Resource::GpuNodes,
    Resource::ResourceSlices,
    Resource::ResourceClaims,
];

async fn run_top(
    connection: &Connection,
    args: TopArgs,
    format: Format,
) -> Result<ExitCode, Failure> {
    let cluster = connection.connect().await?;
    let scope = scope(connection, args.scope, &cluster);
    let mut read = async || {
        let snapshot = read_all(&cluster, &GPUS, Scope::All).await?;
        let model = Model::new(&snapshot, &usage());
        let notes = notes(&snapshot)
            .into_iter()
            .chain(model.usage_unknown.clone());
        Ok((top::answer(&model, args.kind, &scope), notes.collect()))
    };
    show_or_watch(args.watch, format, &mut read).await
}

async fn run_map(
    connection: &Connection,
    args: MapArgs,
    format: Format,
) -> Result<ExitCode, Failure> {
    let cluster = connection.connect().await?;
    let is_ascii = args.ascii || !is_utf8_locale(|name| std::env::var(name).ok());
    let mut read = async || {
        let snapshot = read_all(&cluster, &GPUS, Scope::All).await?;
        let model = Model::new(&snapshot, &usage());
        Ok((map::map(&model, is_ascii), notes(&snapshot)))
    };
    show_or_watch(args.watch, format, &mut read).await
}

/// The use of GPUs. Nobody serves it yet.
fn usage() -> usage::Known {
    Err(usage::NOT_SERVED.to_owned())
}

/// As `setlocale` reads the environment: the first of these that is set and not empty names the characters.
fn is_utf8_locale(variable: impl Fn(&str) -> Option<String>) -> bool {
    let names = ["LC_ALL", "LC_CTYPE", "LANG"].into_iter();
    let mut set = names.filter_map(variable).filter(|value| !value.is_empty());
    set.next().is_some_and(|value| {
        let value = value.to_ascii_lowercase();
        value.contains("utf-8") || value.contains("utf8")
    })
}

/// Shows what `read` gives and what is missing in it, once or again and again.
async fn show_or_watch<V: View>(
    args: WatchArgs,
    format: Format,
    read: &mut impl AsyncFnMut() -> Result<(V, Vec<String>), Failure>,
) -> Result<ExitCode, Failure> {
    if !args.watch {
        let (value, notes) = read().await?;
        return show(&value, format, &notes);
    }
    let text = async || {
        let (value, notes) = read().await?;
        let mut text = output::text(&value, format)?;
        if matches!(format, Format::Table | Format::Wide) {
            let notes = notes
                .iter()
                .map(|note| Block::Line(Tone::Faint, format!("note: {note}")));
            text.push_str(&output::lines(&notes.collect::<Vec<_>>()));
        }
        Ok(text)
    };
    watch::watch::<Failure>(Duration::from_secs(args.interval), text).await?;
    Ok(ExitCode::SUCCESS)
}

/// Reads, or says what stands in the way of any result.
async fn read_all(
    cluster: &Cluster,
    asked: &[Resource],
    scope: Scope,
) -> Result<Snapshot, Failure> {
    let snapshot = Box::pin(cluster.read(asked, scope)).await;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_variable_that_is_set_names_the_characters() {
        let locale = |set: &[(&str, &str)]| {
            is_utf8_locale(|name| {
                let found = set.iter().find(|(key, _)| *key == name);
                found.map(|(_, value)| (*value).to_owned())
            })
        };
        assert!(locale(&[("LANG", "en_US.UTF-8")]));
        assert!(locale(&[("LC_ALL", ""), ("LC_CTYPE", "C.utf8")]));
        assert!(!locale(&[("LC_ALL", "C"), ("LANG", "en_US.UTF-8")]));
        assert!(!locale(&[]));
    }
}
