//! Decides which test may use the cluster: one test alone, or one test on each node.
//!
//! The locks are files, so they work between several runs of the suite, and end with a killed process. Tests on a node go first: a
//! test that waits for the cluster keeps no node empty, and starts when no test on a node is left.

use std::fs::{File, TryLockError};
use std::path::PathBuf;
use std::time::Duration;

use anyhow::Context;
use tokio::sync::Mutex;

/// Time between two looks at locked nodes: a thread cannot wait for the locks of several files at once.
const LOOK: Duration = Duration::from_millis(100);

/// Locked by the test that looks at the nodes. If each of a hundred waiting tests looked, that would take a sixth of a CPU.
static LOOKING: Mutex<()> = Mutex::const_new(());

/// The right to use the cluster, or a node of it, until it is dropped.
#[derive(Debug)]
pub struct Turn {
    _cluster: File,
    _node: Option<File>,
}

impl Turn {
    /// Waits for the whole cluster.
    pub async fn on_the_cluster() -> anyhow::Result<Self> {
        let file = open("cluster")?;
        let cluster = tokio::task::spawn_blocking(|| file.lock().map(|()| file)).await??;
        Ok(Self {
            _cluster: cluster,
            _node: None,
        })
    }

    /// Waits for one of the nodes with these names; returns its index.
    pub async fn on_one_of(nodes: &[String]) -> anyhow::Result<(Self, usize)> {
        let file = open("cluster")?;
        let cluster = tokio::task::spawn_blocking(|| file.lock_shared().map(|()| file)).await??;
        let _looking = LOOKING.lock().await;
        loop {
            for (index, name) in nodes.iter().enumerate() {
                let node = open(name)?;
                match node.try_lock() {
                    Ok(()) => {
                        let turn = Self {
                            _cluster: cluster,
                            _node: Some(node),
                        };
                        return Ok((turn, index));
                    }
                    Err(TryLockError::WouldBlock) => {}
                    Err(TryLockError::Error(error)) => return Err(error).context(name.clone()),
                }
            }
            tokio::time::sleep(LOOK).await;
        }
    }
}

fn open(name: &str) -> anyhow::Result<File> {
    let path: PathBuf = std::env::temp_dir().join(format!("tranche-e2e-{name}.lock"));
    File::create(&path).with_context(|| path.display().to_string())
}
