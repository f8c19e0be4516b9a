//! Asks a control daemon with the driver's own program.
//!
//! The daemon serves one connection at a time, and turns others away. The program then fails, or it succeeds and prints nothing,
//! which is also the answer to most commands. So each command is sent together with a question that always has an answer.

use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use tokio::io::AsyncWriteExt as _;
use tokio::process::Command;

use crate::limits::{LimitError, Limits};

/// The daemon answers within milliseconds, but a client that connects and sends nothing keeps it from answering others.
const PATIENCE: Duration = Duration::from_secs(2);

/// A question with an answer, a number, in every state of the daemon.
const WITNESS: &str = "get_default_active_thread_percentage";

/// How often a command is given until the daemon does not turn it away, and the time in between.
const ATTEMPTS: u32 = 20;
/// See [`ATTEMPTS`].
const PAUSE: Duration = Duration::from_millis(50);

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// The program cannot be executed.
    #[error("cannot execute {program}: {source}")]
    Execute {
        program: PathBuf,
        source: std::io::Error,
    },
    /// No answer in time.
    #[error(
        "the MPS control daemon has not answered {command:?} within {} s: a process may have connected to it and says nothing",
        PATIENCE.as_secs()
    )]
    TimedOut { command: String },
    /// It has refused, or there is no daemon.
    #[error("{command:?}: the MPS control daemon: {answer}")]
    Failed {
        command: String,
        /// What the program printed.
        answer: String,
    },
    /// It has turned the program away at each attempt.
    #[error(
        "{command:?}: the MPS control daemon is busy with other connections: a process may connect to it again and again"
    )]
    Busy { command: String },
    /// It has not set a limit.
    #[error(transparent)]
    Limit(#[from] LimitError),
}

#[derive(Clone, Debug)]
pub struct Control {
    pub program: PathBuf,
    /// The folder of the daemon's sockets.
    pub pipes: PathBuf,
}

impl Control {
    /// Gives a command and returns the daemon's answer, which is empty for most of its errors.
    pub async fn ask(&self, command: &str) -> Result<String, ControlError> {
        let mut attempt = 1;
        loop {
            match self.ask_once(command).await {
                // Where there is no daemon, the attempts end soon enough.
                Err(ControlError::Busy { .. } | ControlError::Failed { .. })
                    if attempt < ATTEMPTS =>
                {
                    attempt += 1;
                }
                answered => return answered,
            }
            tokio::time::sleep(PAUSE).await;
        }
    }

    async fn ask_once(&self, command: &str) -> Result<String, ControlError> {
        let answer = tokio::time::timeout(PATIENCE, self.run(command));
        let output = match answer.await {
            Ok(output) => output.map_err(|source| ControlError::Execute {
                program: self.program.clone(),
                source,
            })?,
            Err(_) => {
                return Err(ControlError::TimedOut {
                    command: command.to_owned(),
                });
            }
        };
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        if output.status.success() {
            let answers = text(&output.stdout);
            return match answers.split_once('\n').unwrap_or((&answers, "")) {
                (witness, answer) if witness.parse::<f64>().is_ok() => Ok(answer.to_owned()),
                _ => Err(ControlError::Busy {
                    command: command.to_owned(),
                }),
            };
        }
        Err(ControlError::Failed {
            command: command.to_owned(),
            answer: format!("{} {}", text(&output.stdout), text(&output.stderr))
                .trim()
                .to_owned(),
        })
    }

    async fn run(&self, command: &str) -> std::io::Result<std::process::Output> {
        let mut child = Command::new(&self.program)
            .env_clear()
            .env("CUDA_MPS_PIPE_DIRECTORY", &self.pipes)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()?;
        if let Some(mut stdin) = child.stdin.take() {
            // Without a daemon the program ends before it reads.
            let commands = format!("{WITNESS}\n{command}\n");
            let _ = stdin.write_all(commands.as_bytes()).await;
        }
        child.wait_with_output().await
    }

    /// Fails if it does not answer.
    pub async fn is_ready(&self) -> Result<(), ControlError> {
        self.has_servers().await.map(drop)
    }

    /// Whether it has servers. A daemon without a server has no clients.
    pub async fn has_servers(&self) -> Result<bool, ControlError> {
        Ok(!self.ask("get_server_list").await?.is_empty())
    }

    /// Sets the limits, and reads them back.
    pub async fn limit(&self, limits: Limits) -> Result<(), ControlError> {
        for setting in limits.settings() {
            self.ask(&setting.set).await?;
            setting.check(&self.ask(&setting.get).await?)?;
        }
        Ok(())
    }

    /// Ends it and its servers, in a few seconds even where clients are at work.
    pub async fn quit(&self) -> Result<(), ControlError> {
        self.ask("quit -t 1").await.map(drop)
    }
}
