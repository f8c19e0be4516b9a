//! The program's output: a line of text for people, or JSON for the suite.

use std::fmt::Display;
use std::io::Write;

use anyhow::Context;
use serde::Serialize;

#[derive(Clone, Copy, Debug)]
pub struct Report {
    json: bool,
}

impl Report {
    /// JSON or text.
    pub const fn new(json: bool) -> Self {
        Self { json }
    }

    /// Prints one line and flushes it, because the reader of a pipe waits for it.
    pub fn print(self, what: &(impl Serialize + Display)) -> anyhow::Result<()> {
        let line = if self.json {
            serde_json::to_string(what)?
        } else {
            what.to_string()
        };
        let mut out = std::io::stdout().lock();
        writeln!(out, "{line}")
            .and_then(|()| out.flush())
            .context("writing to stdout")
    }
}
