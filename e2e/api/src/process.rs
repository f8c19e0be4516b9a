//! Processes that end with this one.

use std::fs::File;
use std::path::Path;
use std::process::Stdio;

use anyhow::Context;
use tokio::process::{Child, Command};

/// A command whose process is killed when this process ends for any reason.
pub(crate) fn command(program: &Path) -> Command {
    let mut command = Command::new("setpriv");
    command
        .args(["--pdeathsig", "KILL", "--"])
        .arg(program)
        .kill_on_drop(true);
    command
}

/// Starts a server whose output goes to a file.
pub(crate) fn start(mut command: Command, log: &Path) -> anyhow::Result<Child> {
    let file = || File::options().create(true).append(true).open(log);
    command.stdin(Stdio::null()).stdout(file()?).stderr(file()?);
    command
        .spawn()
        .with_context(|| format!("starting {command:?}: is setpriv of util-linux installed?"))
}

/// Free ports of 127.0.0.1.
pub(crate) fn free_ports<const N: usize>() -> anyhow::Result<[u16; N]> {
    let mut held = Vec::new();
    let mut ports = [0; N];
    for port in &mut ports {
        let listener = std::net::TcpListener::bind(("127.0.0.1", 0))?;
        *port = listener.local_addr()?.port();
        held.push(listener);
    }
    Ok(ports)
}
