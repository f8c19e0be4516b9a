//! A test's connection to a probe.

use std::io::{BufRead as _, BufReader, Write as _};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

/// A running probe; killed when dropped.
#[derive(Debug)]
pub struct Probe {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

/// What the driver answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    pub code: i64,
    pub values: Vec<String>,
}

impl Answer {
    /// The `nth` value as a number.
    #[must_use]
    pub fn number(&self, nth: usize) -> u64 {
        self.values[nth].parse().unwrap()
    }
}

impl Probe {
    pub(crate) fn start(command: &mut Command) -> Self {
        let mut child = command
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let input = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        Self {
            child,
            input,
            output,
        }
    }

    /// Starts a probe by the test's own command.
    #[must_use]
    pub fn by(command: &mut Command) -> Self {
        Self::start(command)
    }

    /// Sends a command without waiting for its answer.
    pub fn send(&mut self, command: &str) {
        writeln!(self.input, "{command}").unwrap();
    }

    /// Waits for the answer to a command.
    pub fn receive(&mut self) -> Answer {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        let mut words = line.split_whitespace();
        let Some(code) = words.next() else {
            panic!("the probe died: {}", self.stderr());
        };
        Answer {
            code: code.parse().unwrap_or_else(|_| panic!("answer {line:?}")),
            values: words.map(str::to_owned).collect(),
        }
    }

    /// Sends a command and waits for its answer.
    pub fn ask(&mut self, command: &str) -> Answer {
        self.send(command);
        self.receive()
    }

    /// Asks, and expects success.
    pub fn must(&mut self, command: &str) -> Answer {
        let answer = self.ask(command);
        assert_eq!(answer.code, 0, "{command}: {answer:?}");
        answer
    }

    /// Calls a function of the driver by name: see `probe_raw.rs`.
    pub fn call(&mut self, call: &str) -> i64 {
        self.ask(&format!("call {call}")).code
    }

    /// Calls a function that must succeed, and returns word 0.
    pub fn get(&mut self, call: &str) -> u64 {
        assert_eq!(self.call(call), 0, "{call}");
        self.must("words 0 1").number(0)
    }

    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Kills it as the kernel's OOM killer would, and waits until it is gone.
    pub fn kill(&mut self) {
        self.begin_to_kill();
        self.child.wait().unwrap();
    }

    /// Kills it and does not wait.
    pub fn begin_to_kill(&mut self) {
        self.child.kill().unwrap();
    }

    /// Waits until it has ended by itself, and returns what it wrote to stderr.
    pub fn wait(&mut self) -> String {
        self.rest()
    }

    /// Ends it, and returns what it wrote to stderr.
    pub fn stderr(&mut self) -> String {
        let _ = self.child.kill();
        self.rest()
    }

    fn rest(&mut self) -> String {
        let mut text = String::new();
        if let Some(mut stderr) = self.child.stderr.take() {
            std::io::Read::read_to_string(&mut stderr, &mut text).unwrap();
        }
        let _ = self.child.wait();
        text
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
