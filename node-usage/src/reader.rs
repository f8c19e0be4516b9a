//! Asks a node's plugin, within a deadline, and accepts only usage of the plugin's own node.

use std::collections::BTreeSet;
use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use axum::body::Bytes;
use futures::future::BoxFuture;
use tokio::sync::Semaphore;
use tranche_api::names::own_node;
use tranche_api::usage::{GpuUsage, NodeUsage, PATH};
use tranche_serving::client::Client;

use crate::plugins::Plugins;

/// How long a plugin may take.
pub const DEADLINE: Duration = Duration::from_secs(2);
/// The most plugins that are asked at the same time, and so the most answers in memory.
pub const AT_ONCE: usize = 64;
/// The longest answer in bytes: a node of 16 GPUs with 48 shares each has some 700 KB.
pub const MAX_ANSWER: usize = 1 << 20;

/// Asks a plugin.
pub trait Scrape: Send + Sync + 'static {
    /// The body of its answer. The caller sets the deadline.
    fn scrape(&self, plugin: SocketAddr) -> BoxFuture<'_, Result<Bytes, String>>;
}

/// Asks by HTTPS, with a token of this pod for [`tranche_serving::access::AUDIENCE`].
#[derive(Debug)]
struct Https {
    client: Client,
    /// The kubelet renews the file.
    token: PathBuf,
}

impl Scrape for Https {
    fn scrape(&self, plugin: SocketAddr) -> BoxFuture<'_, Result<Bytes, String>> {
        Box::pin(async move {
            let token = tokio::fs::read_to_string(&self.token)
                .await
                .map_err(|error| format!("{}: {error}", self.token.display()))?;
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
            let line: String = text
                .lines()
                .next()
                .unwrap_or_default()
                .chars()
                .filter(|it| !it.is_control())
                .take(200)
                .collect();
            Err(format!("{status}: {line}"))
        })
    }
}

/// Reads the usage of nodes from their plugins.
pub struct Reader {
    plugins: Plugins,
    scrape: Box<dyn Scrape>,
    turns: Semaphore,
}

impl fmt::Debug for Reader {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Reader")
            .field("plugins", &self.plugins)
            .finish_non_exhaustive()
    }
}

impl Reader {
    /// Asks `plugins` by HTTPS, with the token in the file `token`.
    pub fn https(plugins: Plugins, token: PathBuf) -> Result<Self, rustls::Error> {
        let client = Client::new()?;
        Ok(Self::new(plugins, Https { client, token }))
    }

    /// Asks `plugins` by `scrape`.
    #[must_use]
    pub fn new(plugins: Plugins, scrape: impl Scrape) -> Self {
        Self {
            plugins,
            scrape: Box::new(scrape),
            turns: Semaphore::new(AT_ONCE),
        }
    }

    /// Where the plugins are.
    #[must_use]
    pub fn plugins(&self) -> &Plugins {
        &self.plugins
    }

    /// The nodes that have a plugin; `None` before the plugins are listed.
    #[must_use]
    pub fn names(&self) -> Option<BTreeSet<String>> {
        self.plugins.nodes()
    }

    /// The usage of `node`, or why it is not known.
    pub async fn usage(&self, node: &str) -> Result<NodeUsage, String> {
        let plugin = self.plugins.of(node)?;
        self.ask(node, plugin, |_, usage| Ok(usage)).await
    }

    /// The result of `keep` for the answer of `node`, whose plugin is at `plugin`; or why the usage is not known.
    pub async fn ask<T>(
        &self,
        node: &str,
        plugin: SocketAddr,
        keep: impl FnOnce(&[u8], NodeUsage) -> Result<T, String>,
    ) -> Result<T, String> {
        // The semaphore is never closed.
        let _turn = self.turns.acquire().await;
        let answer = match tokio::time::timeout(DEADLINE, self.scrape.scrape(plugin)).await {
            Ok(answer) => {
                answer.and_then(|body| of_node(node, &body).and_then(|usage| keep(&body, usage)))
            }
            Err(_) => Err(format!("no answer within {} s", DEADLINE.as_secs())),
        };
        answer.map_err(|problem| format!("the node plugin at {plugin} did not answer: {problem}"))
    }
}

/// The usage in `body`, if it is the usage of `node`.
fn of_node(node: &str, body: &[u8]) -> Result<NodeUsage, String> {
    let usage: NodeUsage =
        serde_json::from_slice(body).map_err(|error| format!("no NodeUsage: {error}"))?;
    if usage.node != node {
        return Err(format!("it speaks for the node {:?}", usage.node));
    }
    let foreign = usage
        .gpus
        .iter()
        .flat_map(GpuUsage::all_shares)
        .find(|it| own_node(&it.pool) != Some(node));
    match foreign {
        Some(share) => Err(format!("it speaks for the pool {:?}", share.pool)),
        None => Ok(usage),
    }
}
