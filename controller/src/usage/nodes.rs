//! What the nodes' plugins answer: asked in parallel, within a deadline, and kept for two seconds, so that many readers cost as much as one.
//!
//! Memory is bounded: answers are kept deflated, at most [`AT_ONCE`] are read or unpacked at a time, and none may have more than
//! [`MAX_ANSWER`] bytes.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::body::Bytes;
use flate2::Compression;
use flate2::read::DeflateDecoder;
use flate2::write::DeflateEncoder;
use futures::future::BoxFuture;
use tokio::sync::Semaphore;
use tokio::time::Instant;
use tranche_api::names::own_node;
use tranche_api::usage::{GpuUsage, NodeUsage, PATH};
use tranche_serving::client::Client;

use super::plugins::Plugins;

/// How long an answer is used.
pub const FRESH: Duration = Duration::from_secs(2);
/// How long a failure is used: readers that come again and again do not wait for a dead node each time.
const FAILED: Duration = Duration::from_secs(10);
/// How long a plugin may take.
pub const DEADLINE: Duration = Duration::from_secs(2);
/// Plugins that are asked at the same time.
pub const AT_ONCE: usize = 64;
/// The longest answer in bytes: a node of 16 GPUs with 48 shares each has some 700 KB.
const MAX_ANSWER: usize = 1 << 20;

/// Asks a plugin.
pub trait Scrape: Send + Sync + 'static {
    /// The body of its answer. The caller sets the deadline.
    fn scrape(&self, plugin: SocketAddr) -> BoxFuture<'_, Result<Bytes, String>>;
}

/// Asks by HTTPS, with a token of this pod for [`tranche_serving::access::AUDIENCE`].
#[derive(Debug)]
pub struct Https {
    client: Client,
    token: PathBuf,
}

impl Https {
    /// Sends the token in the file `token`, which the kubelet renews.
    pub fn new(token: PathBuf) -> Result<Self, rustls::Error> {
        let client = Client::new()?;
        Ok(Self { client, token })
    }
}

impl Scrape for Https {
    fn scrape(&self, plugin: SocketAddr) -> BoxFuture<'_, Result<Bytes, String>> {
        Box::pin(async move {
            let token = tokio::fs::read_to_string(&self.token).await;
            let token = token.map_err(|error| format!("{}: {error}", self.token.display()))?;
            let answer = self
                .client
                .get(plugin, PATH, Some(token.trim()), MAX_ANSWER)
                .await;
            let (status, body) = answer.map_err(|error| error.to_string())?;
            if status.is_success() {
                return Ok(body);
            }
            let text = String::from_utf8_lossy(&body);
            // It is shown in terminals.
            let line = text.lines().next().unwrap_or_default().chars();
            let line: String = line.filter(|it| !it.is_control()).take(200).collect();
            Err(format!("{status}: {line}"))
        })
    }
}

/// A node's usage, deflated.
#[derive(Clone, PartialEq, Eq)]
pub struct Packed(Box<[u8]>);

impl fmt::Debug for Packed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Packed({} bytes)", self.0.len())
    }
}

impl Packed {
    /// Checks that a body is the usage of `node`, and packs it.
    fn pack(node: &str, body: &[u8]) -> Result<Self, String> {
        let usage: NodeUsage =
            serde_json::from_slice(body).map_err(|error| format!("no NodeUsage: {error}"))?;
        if usage.node != node {
            return Err(format!("it speaks for the node {:?}", usage.node));
        }
        let mut shares = usage.gpus.iter().flat_map(GpuUsage::all_shares);
        if let Some(foreign) = shares.find(|it| own_node(&it.pool) != Some(node)) {
            return Err(format!("it speaks for the pool {:?}", foreign.pool));
        }
        let mut encoder = DeflateEncoder::new(Vec::new(), Compression::fast());
        let packed = io::Write::write_all(&mut encoder, body).and_then(|()| encoder.finish());
        let packed = packed.map_err(|error| format!("pack: {error}"))?;
        Ok(Self(packed.into_boxed_slice()))
    }

    /// The usage.
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

/// Whoever holds the lock asks; the others wait, and find the answer.
type Entry = Arc<tokio::sync::Mutex<Option<Kept>>>;

/// All nodes with plugins.
pub struct Nodes {
    plugins: Plugins,
    scrape: Box<dyn Scrape>,
    turns: Semaphore,
    entries: Mutex<BTreeMap<String, Entry>>,
}

impl fmt::Debug for Nodes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nodes")
            .field("plugins", &self.plugins)
            .finish_non_exhaustive()
    }
}

impl Nodes {
    /// Asks `plugins` by `scrape`.
    #[must_use]
    pub fn new(plugins: Plugins, scrape: impl Scrape) -> Self {
        Self {
            plugins,
            scrape: Box::new(scrape),
            turns: Semaphore::new(AT_ONCE),
            entries: Mutex::default(),
        }
    }

    /// The nodes that have a plugin; `None` before they are known.
    #[must_use]
    pub fn names(&self) -> Option<BTreeSet<String>> {
        self.plugins.nodes()
    }

    /// A node's usage; it is at most [`FRESH`] old.
    pub async fn answer(&self, node: &str) -> Arc<Answer> {
        let plugin = match self.plugins.of(node) {
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
        let answer = Arc::new(self.ask(node, plugin).await);
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

    async fn ask(&self, node: &str, plugin: SocketAddr) -> Answer {
        // The semaphore is never closed.
        let _turn = self.turns.acquire().await;
        let answer = match tokio::time::timeout(DEADLINE, self.scrape.scrape(plugin)).await {
            Ok(answer) => answer.and_then(|body| Packed::pack(node, &body)),
            Err(_) => Err(format!("no answer within {} s", DEADLINE.as_secs())),
        };
        answer.map_err(|problem| format!("the node plugin at {plugin} did not answer: {problem}"))
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
