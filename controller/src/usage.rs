//! The API `usage.gpu.tranche.dev`: who uses which part of which GPU now, for people and tools with their own rights, and without a
//! write. The API server sends requests on (an APIService), as with `metrics.k8s.io`; every replica answers.
//!
//! ```text
//!  API server ─► server ─► front_proxy (is it the API server, and for whom) ─► request (what is asked)
//!                  ├─► nodes ─► the node plugins' /usage        plugins: where they are
//!                  ├─► claims ─► which claims there are
//!                  └─► resources: objects and tables            documents: discovery
//! ```
//!
//! [`trust`] follows the ConfigMap with which the API server says who it is.

pub mod claims;
pub mod documents;
pub mod front_proxy;
pub mod nodes;
pub mod plugins;
pub mod request;
pub mod resources;
pub mod server;
pub mod trust;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use kube::Client;
use tokio_util::sync::CancellationToken;
use tranche_serving::access::Access;
use tranche_serving::{server::ServeError, tls::TlsError};

use claims::Claims;
use nodes::{Https, Nodes};
use plugins::Plugins;
use server::Usage;

/// The node plugins, which run in `namespace`; they are sent the token in the file `token`, which is for
/// [`tranche_serving::access::AUDIENCE`].
pub fn nodes(client: Client, namespace: &str, token: PathBuf) -> Result<Nodes, TlsError> {
    let https = Https::new(token)?;
    Ok(Nodes::new(Plugins::follow(client, namespace), https))
}

/// Serves what `nodes` tell on `endpoint` until `stop`.
pub async fn serve(
    endpoint: SocketAddr,
    client: Client,
    nodes: Arc<Nodes>,
    stop: CancellationToken,
) -> Result<(), ServeError> {
    let usage = Usage {
        trust: trust::follow(client.clone()),
        access: Access::new(client.clone()),
        claims: Claims::new(client, Arc::clone(&nodes)),
        nodes,
    };
    server::serve(endpoint, usage, stop).await
}
