//! What the nodes answer, kept for two seconds, so that many readers cost as much as one.
//!
//! Answers are kept deflated: 1,000 full nodes take 15 MiB instead of 73 MB of JSON.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use flate2::Compression;
use flate2::read::DeflateDecoder;
use flate2::write::DeflateEncoder;
use tokio::time::Instant;
use tranche_api::usage::NodeUsage;
use tranche_node_usage::Reader;

/// How long an answer is used.
const FRESH: Duration = Duration::from_secs(2);
/// How long a failure is used, so that repeated reads do not wait for a dead node each time.
const FAILED: Duration = Duration::from_secs(10);

/// A node's usage, deflated.
#[derive(Clone, PartialEq, Eq)]
pub struct Packed(Box<[u8]>);

impl fmt::Debug for Packed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Packed({} bytes)", self.0.len())
    }
}

impl Packed {
    fn pack(body: &[u8]) -> Result<Self, String> {
        let mut encoder = DeflateEncoder::new(Vec::new(), Compression::fast());
        let packed = io::Write::write_all(&mut encoder, body)
            .and_then(|()| encoder.finish())
            .map_err(|error| format!("pack: {error}"))?;
        Ok(Self(packed.into_boxed_slice()))
    }

    pub fn unpack(&self) -> Result<NodeUsage, String> {
        serde_json::from_reader(io::BufReader::new(DeflateDecoder::new(&*self.0)))
            .map_err(|error| format!("unpack: {error}"))
    }
}

/// A node's usage, or why it is not known.
pub type Answer = Result<Packed, String>;

#[derive(Clone, Debug)]
struct Kept {
    plugin: SocketAddr,
    until: Instant,
    answer: Arc<Answer>,
}

/// The reader that holds the lock asks the node; the others wait and find the answer.
type Entry = Arc<tokio::sync::Mutex<Option<Kept>>>;

/// All nodes with plugins.
#[derive(Debug)]
pub struct Nodes {
    reader: Reader,
    entries: Mutex<BTreeMap<String, Entry>>,
}

impl Nodes {
    #[must_use]
    pub fn new(reader: Reader) -> Self {
        Self {
            reader,
            entries: Mutex::default(),
        }
    }

    /// The nodes that have a plugin; `None` before they are known.
    #[must_use]
    pub fn names(&self) -> Option<BTreeSet<String>> {
        self.reader.names()
    }

    /// A node's usage; it is at most [`FRESH`] old.
    pub async fn answer(&self, node: &str) -> Arc<Answer> {
        let plugin = match self.reader.plugins().of(node) {
            Ok(plugin) => plugin,
            Err(problem) => return Arc::new(Err(problem)),
        };
        let entry = Arc::clone(self.entries().entry(node.to_owned()).or_default());
        let mut kept = entry.lock().await;
        if let Some(kept) = &*kept
            && kept.plugin == plugin
            && Instant::now() < kept.until
        {
            return Arc::clone(&kept.answer);
        }
        let packed = self
            .reader
            .ask(node, plugin, |body, _| Packed::pack(body))
            .await;
        let answer = Arc::new(packed);
        let time = if answer.is_ok() { FRESH } else { FAILED };
        *kept = Some(Kept {
            plugin,
            until: Instant::now() + time,
            answer: Arc::clone(&answer),
        });
        answer
    }

    /// A node's usage as [`answer`](Self::answer) has it, or why it is not known.
    pub async fn usage(&self, node: &str) -> Result<NodeUsage, String> {
        match &*self.answer(node).await {
            Ok(packed) => packed.unpack(),
            Err(problem) => Err(problem.clone()),
        }
    }

    /// Forgets answers that are too old, again and again.
    pub async fn forget(&self) {
        loop {
            tokio::time::sleep(FAILED).await;
            let now = Instant::now();
            // An entry that is locked is in use.
            self.entries().retain(|_, entry| match entry.try_lock() {
                Ok(kept) => kept.as_ref().is_some_and(|kept| now < kept.until),
                Err(_) => true,
            });
        }
    }

    fn entries(&self) -> std::sync::MutexGuard<'_, BTreeMap<String, Entry>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests;
