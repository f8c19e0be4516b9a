//! Runs a command: the only file that knows all others.

use std::io::{self, IsTerminal};
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::CommandFactory;
use futures::future::try_join;

use crate::args::{
    Args, Command, CostArgs, CostCommand, DrainArgs, ExplainArgs, GetArgs, Kind, MapArgs,
    RecommendArgs, ScopeArgs, TargetArgs, TopArgs, TopKind, WatchArgs, WordsError,
};
use crate::cluster::{Cluster, ConnectError, Connection};
use crate::cost::{Calculator, CalculatorError, Prices};
use crate::model::Model;
use crate::output::{self, Block, Format, FormatError, Tone, View};
use crate::recommend::AnswerError;
use crate::snapshot::{Cause, Gap, Resource, Scope, Snapshot};
use crate::usage::Usage;
use crate::version::Version;
use crate::{collect, cordon, cost, doctor, explain, get, map, recommend, top, ui, usage, watch};

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
    Ui(#[from] ui::UiError),
    #[error(transparent)]
    Explain(#[from] explain::Error),
    #[error(transparent)]
    Cordon(#[from] cordon::Error),
    #[error(transparent)]
    Words(#[from] WordsError),
    #[error(transparent)]
    Format(#[from] FormatError),
    #[error(transparent)]
    Calculator(#[from] CalculatorError),
    #[error(transparent)]
    Answer(#[from] AnswerError),
    #[error(transparent)]
    Size(#[from] recommend::SizeError),
    #[error("cannot write {}: {source}; name another file with --file", path.display())]
    Archive { path: PathBuf, source: io::Error },
    #[error("cannot write the result: {0}")]
    Write(#[from] io::Error),
}

/// Runs the command, prints its result, and returns whether it worked.
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
        Command::Cost(cost) => Box::pin(run_cost(&connection, cost, output)).await,
        Command::Recommend(it) => Box::pin(run_recommend(&connection, it, output)).await,
        Command::Doctor => Box::pin(run_doctor(&connection, output)).await,
        Command::Cordon(it) => Box::pin(run_cordon(&connection, it, true, output)).await,
        Command::Uncordon(it) => Box::pin(run_cordon(&connection, it, false, output)).await,
        Command::Drain(it) => Box::pin(run_drain(&connection, it, output)).await,
        Command::Version { client } => Box::pin(run_version(&connection, client, output)).await,
        Command::Collect { file } => Box::pin(run_collect(&connection, file, output)).await,
        Command::Ui(args) => {
            let cluster = connection.connect().await?;
            Box::pin(ui::serve(&cluster, args.port)).await?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Explain(explain) => Box::pin(run_explain(&connection, explain, output)).await,
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
    let (kind, name) = args.question()?;
    let cluster = connection.connect().await?;
    if kind == Kind::Nodes {
        return Box::pin(get_nodes(&cluster, name.as_deref(), format)).await;
    }
    let scope = scope(connection, args.scope, &cluster);
    let asked = [
        Resource::GpuNodes,
        Resource::ResourceSlices,
        Resource::ResourceClaims,
        Resource::DeviceClasses,
    ];
    // The pods of a GPU may be in any namespace.
    let read = match kind {
        Kind::Gpus => Scope::All,
        _ => scope.clone(),
    };
    let snapshot = read_all(&cluster, &asked, read).await?;
    // `get` shows no use.
    let usage = Ok(Usage::default());
    let model = Model::new(&snapshot, &usage);
    let question = get::Question { kind, name, scope };
    let answer = get::answer(&model, &question)?;
    show(&answer, format, &notes(&snapshot, &usage))
}

/// The rows of `top nodes`, once.
async fn get_nodes(
    cluster: &Cluster,
    name: Option<&str>,
    format: Format,
) -> Result<ExitCode, Failure> {
    let (snapshot, usage) = read_with_use(cluster, &GPUS, Scope::All).await?;
    let mut model = Model::new(&snapshot, &usage);
    if let Some(name) = name {
        model.nodes.retain(|node| node.name == name);
        if model.nodes.is_empty() {
            return Err(get::NotFound::Node(name.to_owned()).into());
        }
    }
    let answer = top::answer(&model, TopKind::Nodes, &Scope::All);
    show(&answer, format, &notes(&snapshot, &usage))
}

/// What `top` and `map` read, beside the use.
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
        let (snapshot, usage) = read_with_use(&cluster, &GPUS, Scope::All).await?;
        let model = Model::new(&snapshot, &usage);
        let answer = top::answer(&model, args.kind, &scope);
        Ok((answer, notes(&snapshot, &usage)))
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
        let (snapshot, usage) = read_with_use(&cluster, &GPUS, Scope::All).await?;
        let model = Model::new(&snapshot, &usage);
        Ok((map::map(&model, is_ascii), notes(&snapshot, &usage)))
    };
    show_or_watch(args.watch, format, &mut read).await
}

async fn run_cost(
    connection: &Connection,
    args: CostArgs,
    format: Format,
) -> Result<ExitCode, Failure> {
    if let Some(CostCommand::Calculator {
        gpus,
        price,
        tenants,
        overhead,
    }) = args.command
    {
        let calculator = Calculator {
            gpus,
            price,
            tenants,
            overhead,
        };
        return show(&cost::compare(calculator)?, format, &[]);
    }
    let cluster = connection.connect().await?;
    let asked = [
        Resource::GpuNodes,
        Resource::ResourceSlices,
        Resource::ResourceClaims,
        Resource::Prices,
    ];
    let (snapshot, usage) = read_with_use(&cluster, &asked, Scope::All).await?;
    let model = Model::new(&snapshot, &usage);
    let (prices, errors) = Prices::read(&snapshot.prices.clone().unwrap_or_default());
    let answer = cost::answer(&model, args.by, &prices, &errors);
    show(&answer, format, &notes(&snapshot, &usage))
}

async fn run_recommend(
    connection: &Connection,
    args: RecommendArgs,
    format: Format,
) -> Result<ExitCode, Failure> {
    let mut answers = recommend::read(&args.answers)?;
    let mut size = recommend::Size::default();
    let mut notes = Vec::new();
    if let Some(pod) = &args.pod {
        let cluster = connection.connect().await?;
        let scope = Scope::Namespace(cluster.namespace.clone());
        let asked = [
            Resource::GpuNodes,
            Resource::ResourceSlices,
            Resource::ResourceClaims,
        ];
        let (snapshot, usage) = read_with_use(&cluster, &asked, scope.clone()).await?;
        let model = Model::new(&snapshot, &usage);
        let known = recommend::of_pod(&model, &snapshot, &cluster.namespace, pod)?;
        for (question, answer) in known.answers {
            answers.entry(question).or_insert(answer);
        }
        size = known.size;
        notes.extend(self::notes(&snapshot, &usage));
        notes.extend(known.hint);
    }
    if let Some(memory) = &args.memory {
        size = size.with_memory(memory)?;
    }
    size.cores = args.cores.or(size.cores);
    let is_interactive = io::stdin().is_terminal() && io::stderr().is_terminal();
    let ask = if is_interactive {
        ask
    } else {
        recommend::all_missing
    };
    let (leaf, path) = recommend::walk(&answers, ask)?;
    let namespace = connection.namespace.as_deref();
    let recommendation = recommend::recommend(leaf, path, &args.name, namespace, size);
    show(&recommendation, format, &notes)
}

/// Asks on the terminal. The question goes to standard error, so that users can pipe the YAML.
fn ask(question: &recommend::Question) -> Result<&'static recommend::Choice, AnswerError> {
    let mut known = format!("{}\n", question.text);
    for choice in question.choices {
        known.push_str("  ");
        known.push_str(choice.answer);
        known.push_str(": ");
        known.push_str(choice.meaning);
        known.push('\n');
    }
    loop {
        output::note(Tone::Heading, known.trim_end());
        let mut line = String::new();
        let read = io::stdin()
            .read_line(&mut line)
            .map_err(|error| AnswerError::Read(error.to_string()))?;
        if read == 0 {
            return recommend::missing(question);
        }
        match question.choice(line.trim()) {
            Ok(choice) => return Ok(choice),
            Err(error) => output::note(Tone::Warning, &error.to_string()),
        }
    }
}

async fn run_doctor(connection: &Connection, format: Format) -> Result<ExitCode, Failure> {
    let cluster = connection.connect().await?;
    let facts = Box::pin(cluster.facts()).await;
    if let Some(gap) = unreachable(&facts.snapshot) {
        return Err(Failure::Gap(gap.clone()));
    }
    let report = doctor::examine(&facts);
    show(&report, format, &[])?;
    Ok(if report.has_errors() {
        ExitCode::FAILURE
    } else {
        ExitCode::SUCCESS
    })
}

/// Reads what is needed to find a GPU or a node.
async fn target(cluster: &Cluster, name: &str) -> Result<cordon::Target, Failure> {
    let asked = [
        Resource::GpuNodes,
        Resource::ResourceSlices,
        Resource::ResourceClaims,
    ];
    let snapshot = read_all(cluster, &asked, Scope::All).await?;
    let model = Model::new(&snapshot, &Ok(Usage::default()));
    Ok(cordon::Target::find(name, &snapshot, &model)?)
}

async fn run_cordon(
    connection: &Connection,
    args: TargetArgs,
    is_wanted: bool,
    format: Format,
) -> Result<ExitCode, Failure> {
    let cluster = connection.connect().await?;
    let target = Box::pin(target(&cluster, &args.target)).await?;
    let rules = cordon::existing(&cluster).await?;
    let (missing, superfluous) = if is_wanted {
        target.check()?;
        (target.missing(&rules), Vec::new())
    } else {
        (Vec::new(), target.own_rules(&rules))
    };
    cordon::apply(&cluster, &missing, &superfluous).await?;
    let changed = missing.len() + superfluous.len();
    let mut answer = cordon::Cordoned::new(&target, is_wanted, changed);
    if !is_wanted {
        answer.still_cordoned = target.still_cordoned(&rules);
    }
    show(&answer, format, &[])
}

async fn run_drain(
    connection: &Connection,
    args: DrainArgs,
    format: Format,
) -> Result<ExitCode, Failure> {
    let cluster = connection.connect().await?;
    let target = Box::pin(target(&cluster, &args.target.target)).await?;
    if !args.dry_run {
        let rules = cordon::existing(&cluster).await?;
        cordon::apply(&cluster, &target.missing(&rules), &[]).await?;
    }
    let how = cordon::Drain {
        timeout: Duration::from_secs(args.timeout),
        force: args.force,
        dry_run: args.dry_run,
    };
    let drained = Box::pin(cordon::drain(&cluster, &target, how)).await?;
    show(&drained, format, &[])?;
    Ok(if drained.left.is_empty() || args.dry_run {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}

async fn run_version(
    connection: &Connection,
    is_client_only: bool,
    format: Format,
) -> Result<ExitCode, Failure> {
    let mut version = Version::of_client();
    let mut notes = Vec::new();
    if !is_client_only {
        let cluster = connection.connect().await?;
        match cluster.version().await {
            Ok(of_cluster) => version.kubernetes = Some(of_cluster),
            Err(why) => notes.push(format!("the API server does not tell its version: {why}")),
        }
        let snapshot = Box::pin(cluster.read(&[Resource::GpuNodes], Scope::All)).await;
        version.add_plugins(&snapshot);
        notes.extend(snapshot.gaps.iter().map(|gap| gap.message.clone()));
    }
    show(&version, format, &notes)
}

async fn run_collect(
    connection: &Connection,
    file: Option<PathBuf>,
    format: Format,
) -> Result<ExitCode, Failure> {
    let cluster = connection.connect().await?;
    let evidence = Box::pin(cluster.evidence()).await;
    if let Some(gap) = unreachable(&evidence.facts.snapshot) {
        return Err(Failure::Gap(gap.clone()));
    }
    let now = jiff::Timestamp::now();
    let folder = format!("tranche-{}", now.strftime("%Y%m%dT%H%M%SZ"));
    let path = file.unwrap_or_else(|| PathBuf::from(format!("{folder}.tar.gz")));
    let files = collect::files(&evidence);
    let seconds = u64::try_from(now.as_second()).unwrap_or_default();
    let archive = collect::archive(&files, &folder, seconds)?;
    std::fs::write(&path, archive).map_err(|source| Failure::Archive {
        path: path.clone(),
        source,
    })?;
    let collected = collect::Collected {
        archive: path.display().to_string(),
        files: files.into_iter().map(|file| file.path).collect(),
        missing: evidence.missing,
    };
    show(&collected, format, &[])
}

/// The gap of a cluster that does not answer, so that there is nothing to show.
fn unreachable(snapshot: &Snapshot) -> Option<&Gap> {
    let mut gaps = snapshot.gaps.iter();
    gaps.find(|gap| matches!(gap.cause, Cause::Unreachable | Cause::Unauthenticated))
}

async fn run_explain(
    connection: &Connection,
    args: ExplainArgs,
    format: Format,
) -> Result<ExitCode, Failure> {
    let cluster = connection.connect().await?;
    let (kind, name) = args.subject()?;
    let (facts, snapshot) = Box::pin(explain::read(&cluster, kind, name)).await?;
    let model = Model::new(&snapshot, &Ok(Usage::default()));
    let explanation = explain::explain(&facts, &model);
    show(&explanation, format, &facts.gaps)
}

/// Reads the environment as `setlocale` does: the first of these variables that is not empty names the character set.
fn is_utf8_locale(variable: impl Fn(&str) -> Option<String>) -> bool {
    let names = ["LC_ALL", "LC_CTYPE", "LANG"].into_iter();
    let mut set = names.filter_map(variable).filter(|value| !value.is_empty());
    set.next().is_some_and(|value| {
        let value = value.to_ascii_lowercase();
        value.contains("utf-8") || value.contains("utf8")
    })
}

/// Shows the result of `read` and what is missing in it, once or repeatedly.
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

/// Reads the resources, or returns the gap that prevents any result.
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

/// The same, and the use at the same time.
async fn read_with_use(
    cluster: &Cluster,
    asked: &[Resource],
    scope: Scope,
) -> Result<(Snapshot, usage::UsageResult), Failure> {
    let usage = async { Ok(Box::pin(cluster.usage(&scope)).await) };
    try_join(read_all(cluster, asked, scope.clone()), usage).await
}

/// All namespaces, or the namespace of the flag or of the context.
fn scope(connection: &Connection, args: ScopeArgs, cluster: &Cluster) -> Scope {
    if args.all_namespaces && connection.namespace.is_none() {
        Scope::All
    } else {
        Scope::Namespace(cluster.namespace.clone())
    }
}

/// What is missing in the result, a line for each gap.
fn notes(snapshot: &Snapshot, usage: &usage::UsageResult) -> Vec<String> {
    let gaps = snapshot.gaps.iter().map(|gap| gap.message.clone());
    gaps.chain(usage::notes(usage)).collect()
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
