//! `tranche run`, from the command line to the command.

use std::convert::Infallible;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use tranche_cdi_hook::libraries::{self, Process, SearchError};
use tranche_cdi_hook::rootfs::Rootfs;
use tranche_driver::cdi::container_path;

use crate::args::Run;
use crate::layout::{Layout, ThisHost, plan};
use crate::mounts::{self, MountError};
use crate::program::{self, ProgramError};
use crate::wire::{Answer, Grant, Request};

/// The exit code if `tranche` itself fails, as with env(1), timeout(1) and container engines.
pub const FAILED: u8 = 125;

/// Which GPUs CUDA shows to a program; batch systems set it.
const VISIBLE: &str = "CUDA_VISIBLE_DEVICES";

/// Why the command does not run.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    #[error(
        "this process is already in a share of a GPU ({}): run the command without `tranche run`",
        container_path::SHARES
    )]
    Nested,
    #[error(
        "--shim: found no folder with libcuda.so.1 and libnvidia-ml.so.1 of Tranche in {0}: build \
         them by `make shim`"
    )]
    NoShim(String),
    #[error("{option} {path}: {source}")]
    Path {
        option: &'static str,
        path: PathBuf,
        source: std::io::Error,
    },
    #[error(transparent)]
    Program(#[from] ProgramError),
    #[error("{0}")]
    Refused(String),
    #[error("the supervisor: {0}")]
    Supervisor(String),
    #[error("the search for copies of the driver's libraries failed: {0}")]
    Search(#[from] SearchError),
    #[error(transparent)]
    Mount(#[from] MountError),
}

impl RunError {
    /// The same as of a shell, env(1) and timeout(1): 127 not found, 126 not executable, 125
    /// otherwise.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Program(ProgramError::NotFound(_)) => 127,
            Self::Program(_) => 126,
            _ => FAILED,
        }
    }
}

/// Executes the command in its share; returns only if that fails.
pub fn run(args: &Run) -> RunError {
    match try_run(args) {
        Ok(never) => match never {},
        Err(error) => error,
    }
}

fn try_run(args: &Run) -> Result<Infallible, RunError> {
    if Path::new(container_path::SHARES).exists() {
        return Err(RunError::Nested);
    }
    let request = request(args)?;
    let grant = ask_supervisor(&request)?;
    let mut layout = plan(&grant, &ThisHost);
    cover_copies(&mut layout)?;
    if std::env::var_os(VISIBLE).is_some() {
        // The command sees one GPU, so an index of the host is not valid there.
        layout
            .env
            .push((VISIBLE.to_owned(), grant.gpu_uuid.clone()));
    }
    mounts::enter_namespace()?;
    mounts::lay_out(&layout, &grant.stage)?;
    // Only now, because it may be one of the driver's programs.
    let program = match args.command.first() {
        Some(name) => program::find(name)?,
        None => return Err(ProgramError::NotFound(PathBuf::new()).into()),
    };
    program::check(&program)?;
    let error = program::become_command(&program, &args.command, &layout.env);
    Err(error.into())
}

/// Covers the copies of the driver's libraries that the command would find before ours: in folders
/// of its environment, of forward compatibility packages and of the CUDA toolkit.
fn cover_copies(layout: &mut Layout) -> Result<(), SearchError> {
    let root = Rootfs::open(Path::new("/"))?;
    let process = Process {
        cwd: std::env::current_dir().unwrap_or_default(),
        env: std::env::vars_os()
            .map(|(name, value)| format!("{}={}", name.display(), value.display()))
            .collect(),
    };
    let folders = libraries::folders(&root, &process)?;
    for stem in ["libcuda.so", "libnvidia-ml.so"] {
        let found = libraries::find(&root, &folders, &[stem])?;
        let copies: Vec<PathBuf> = found.into_iter().map(|library| library.file.path).collect();
        layout.cover(&format!("{stem}.1"), &copies, &ThisHost);
    }
    Ok(())
}

fn request(args: &Run) -> Result<Request, RunError> {
    let pid = std::process::id();
    let real = |option, path: &Path| {
        path.canonicalize().map_err(|source| RunError::Path {
            option,
            path: path.to_owned(),
            source,
        })
    };
    Ok(Request {
        share: args.share.clone().unwrap_or_else(|| format!("run-{pid}")),
        joinable: args.share.is_some(),
        memory: args.memory,
        cores: args.cores,
        mode: args.mode.map(Into::into),
        context_memory: args.context_memory,
        gpu: args.gpu.clone(),
        driver_root: real("--driver-root", &args.driver_root)?,
        shim: match &args.shim {
            Some(folder) => real("--shim", folder)?,
            None => shim()?,
        },
        pid: i32::try_from(pid).unwrap_or_default(),
    })
}

/// The shim's folder, beside this program as built, or as installed.
fn shim() -> Result<PathBuf, RunError> {
    let program = std::env::current_exe().unwrap_or_default();
    let folder = program.parent().unwrap_or(Path::new("/"));
    let places = [
        folder.to_owned(),
        folder.join("../shim"),
        folder.join("../lib/tranche"),
        container_path::ROOT.into(),
    ];
    let whole = |place: &&PathBuf| {
        ["libcuda.so.1", "libnvidia-ml.so.1"]
            .iter()
            .all(|library| place.join(library).is_file())
    };
    let found = places.iter().find(whole);
    found
        .and_then(|place| place.canonicalize().ok())
        .ok_or_else(|| {
            let looked: Vec<_> = places
                .iter()
                .map(|place| place.display().to_string())
                .collect();
            RunError::NoShim(looked.join(", "))
        })
}

/// Starts a supervisor and reads its answer.
fn ask_supervisor(request: &Request) -> Result<Grant, RunError> {
    let broken = |e: &dyn std::fmt::Display| RunError::Supervisor(e.to_string());
    let mut child = Command::new("/proc/self/exe")
        .args(["supervise", &request.share])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|e| broken(&e))?;
    if let Some(mut input) = child.stdin.take() {
        let text = serde_json::to_vec(request).map_err(|e| broken(&e))?;
        input.write_all(&text).map_err(|e| broken(&e))?;
    }
    let mut text = String::new();
    if let Some(output) = child.stdout.take() {
        let mut lines = std::io::BufReader::new(output);
        std::io::BufRead::read_line(&mut lines, &mut text).map_err(|e| broken(&e))?;
    }
    // It has started the detached supervisor and ended.
    child.wait().map_err(|e| broken(&e))?;
    let answer: Answer =
        serde_json::from_str(&text).map_err(|_| broken(&"it ended without an answer"))?;
    answer.map_err(RunError::Refused)
}
