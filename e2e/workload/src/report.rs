//! What the program says: for people a line, for the suite the same as JSON.

use std::fmt::Display;
use std::io::Write;

use anyhow::Context;
use serde::Serialize;

/// How to say it.
#[derive(Clone, Copy, Debug)]
pub struct Report {
    json: bool,
}

impl Report {
    /// As JSON, or as text.
    pub const fn new(json: bool) -> Self {
        Self { json }
    }

    /// Says one thing, on one line, at once: a pipe's reader waits for it.
    pub fn say(self, what: &(impl Serialize + Display)) -> anyhow::Result<()> {
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
