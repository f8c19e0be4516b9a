//! An open shell in a container: `docker exec` costs a tenth of a CPU second, and a test runs dozens of scripts.

use std::process::Stdio;

use anyhow::{Context, bail};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStdin, ChildStdout, Command};

/// A shell that runs one script after another. It ends when it is dropped.
#[derive(Debug)]
pub(crate) struct Shell {
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    process: Child,
}

/// How a script ended.
#[derive(Debug)]
pub(crate) struct Ended {
    pub(crate) status: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Shell {
    /// Opens a shell as root.
    pub(crate) fn open(container: &str) -> anyhow::Result<Self> {
        let mut docker = Command::new("docker");
        docker.args(["exec", "--interactive", container, "sh"]);
        Self::of(docker)
    }

    fn of(mut program: Command) -> anyhow::Result<Self> {
        let mut process = program
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .context("running docker: source target/cluster/env")?;
        Ok(Self {
            input: process.stdin.take().context("its input")?,
            output: BufReader::new(process.stdout.take().context("its output")?),
            process,
        })
    }

    /// Runs a script in a subshell, which ends at the first command that fails.
    pub(crate) async fn run(&mut self, script: &str) -> anyhow::Result<Ended> {
        let mark = uuid::Uuid::new_v4().simple().to_string();
        let quoted = script.replace('\'', r"'\''");
        let command = format!(
            "exec 3>&1; errors=$(sh -euc '{quoted}' </dev/null 2>&1 >&3 3>&-); status=$?
            printf '\\n{mark}\\n%s\\n{mark}\\n%s\\n{mark}\\n' \"$errors\" $status\n"
        );
        // If the shell has ended, its output says why.
        let _ = self.input.write_all(command.as_bytes()).await;
        let stdout = self.until(&mark).await?;
        let stderr = self.until(&mark).await?;
        let status = self.until(&mark).await?.parse()?;
        Ok(Ended {
            status,
            stdout,
            stderr,
        })
    }

    /// The output before a line with `mark`, without the last newline.
    async fn until(&mut self, mark: &str) -> anyhow::Result<String> {
        let mut bytes = Vec::new();
        let mark = format!("{mark}\n").into_bytes();
        while !bytes.ends_with(&mark) {
            if self.output.read_until(b'\n', &mut bytes).await? == 0 {
                let mut errors = String::new();
                if let Some(stderr) = &mut self.process.stderr {
                    stderr.read_to_string(&mut errors).await?;
                }
                bail!("the node's shell has ended: {}", errors.trim());
            }
        }
        bytes.truncate(bytes.len() - mark.len());
        bytes.pop();
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_script_has_its_own_status_and_output() -> anyhow::Result<()> {
        let mut shell = Shell::of(Command::new("sh"))?;
        for (script, status, stdout, stderr) in [
            ("echo \"it's\" two; echo lines", 0, "it's two\nlines\n", ""),
            ("printf 'no newline'", 0, "no newline", ""),
            (
                "echo before; echo why >&2; false; echo after",
                1,
                "before\n",
                "why",
            ),
            ("exit 7", 7, "", ""),
            ("cat; cd /; x=1", 0, "", ""),
            ("echo ${x-none}; sleep 2 >/dev/null 2>&1 &", 0, "none\n", ""),
        ] {
            let ended = shell.run(script).await?;
            assert_eq!(ended.status, status, "{script}: {ended:?}");
            assert_eq!(ended.stdout, stdout, "{script}");
            assert_eq!(ended.stderr, stderr, "{script}");
        }
        Ok(())
    }

    #[tokio::test]
    async fn a_shell_that_ends_says_why() -> anyhow::Result<()> {
        let mut program = Command::new("sh");
        program.args(["-c", "read line; echo no such container >&2"]);
        let ended = Shell::of(program)?.run("true").await;
        let error = ended.expect_err("it has ended").to_string();
        assert!(error.contains("no such container"), "{error}");
        Ok(())
    }
}
