//! The API server: the only input of the commands.
//!
//! ```text
//!  connect  kubeconfig and flags ─► Cluster
//!  read     Cluster ─► Snapshot: all lists at the same time, each page by page, each with its own outcome
//!  usage    Cluster ─► Usage: the aggregated usage API, summed up page by page
//!  problem  what the API server answered ─► one line that names verb, resource and way out
//! ```

mod connect;
mod evidence;
mod facts;
mod problem;
mod read;
mod usage;

use std::fmt;

#[cfg(test)]
pub(crate) use connect::ANSWER;
pub use connect::{ConnectError, Connection};
pub use problem::gap;
pub(crate) use problem::root;
pub(crate) use read::list;
pub use read::{PRICES, only_here};

/// A client of one cluster.
#[derive(Clone)]
pub struct Cluster {
    client: kube::Client,
    /// The namespace of the kubeconfig's context, or the one that a flag names.
    pub namespace: String,
    /// The namespace in which Tranche runs.
    pub system: String,
}

impl Cluster {
    /// A cluster with any client: tests pass one that answers from a table.
    #[must_use]
    pub fn new(client: kube::Client, namespace: &str, system: &str) -> Self {
        Self {
            client,
            namespace: namespace.to_owned(),
            system: system.to_owned(),
        }
    }

    /// The client, for calls that only one command makes.
    #[must_use]
    pub fn client(&self) -> kube::Client {
        self.client.clone()
    }
}

impl fmt::Debug for Cluster {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Cluster({})", self.namespace)
    }
}

#[cfg(test)]
mod tests;
