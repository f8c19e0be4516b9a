//! A log that cannot be written: the node's disk is full, or the log's reader has ended.
#![allow(missing_docs)]

use std::fs::File;

use tranche_serving::log::{self, LogFormat};

/// A log that cannot be written stops nothing.
fn main() -> anyhow::Result<()> {
    let stderr = rustix::io::dup(rustix::stdio::stderr())?;
    let full = File::options().write(true).open("/dev/full")?;
    rustix::stdio::dup2_stderr(&full)?;
    log::start(LogFormat::Json)?;
    let logged = std::panic::catch_unwind(|| tracing::error!("nobody reads this"));
    rustix::stdio::dup2_stderr(&stderr)?;
    assert!(logged.is_ok(), "the process would have ended");
    Ok(())
}
