//! `/healthz` and `/readyz`, on a port of their own: a client that takes all connections of the API's port cannot have the pod
//! restarted.

use std::net::SocketAddr;
use std::sync::{Arc, PoisonError};

use axum::Router;
use axum::extract::State;
use axum::http::StatusCode;
use axum::routing::get;
use tokio_util::sync::CancellationToken;

use crate::nodes::Nodes;
use crate::server::CurrentTrust;

/// What a replica needs before it can answer.
#[derive(Clone, Debug)]
pub struct Health {
    /// Who the API server is.
    pub trust: CurrentTrust,
    /// Where the node plugins are.
    pub nodes: Arc<Nodes>,
}

/// Serves health until `stop`.
pub async fn serve(
    endpoint: SocketAddr,
    health: Health,
    stop: CancellationToken,
) -> std::io::Result<()> {
    let listener = tranche_serving::listen(endpoint).await?;
    axum::serve(listener, router(health))
        .with_graceful_shutdown(stop.cancelled_owned())
        .await
}

fn router(health: Health) -> Router {
    Router::new()
        .route("/healthz", get(async || "ok"))
        .route("/readyz", get(readyz))
        .with_state(health)
}

async fn readyz(State(health): State<Health>) -> (StatusCode, &'static str) {
    let trust = health.trust.lock().unwrap_or_else(PoisonError::into_inner);
    if trust.is_none() {
        return (
            StatusCode::SERVICE_UNAVAILABLE,
            "the API server's certificate authority is not known yet; see the usage API's log",
        );
    }
    if health.nodes.names().is_none() {
        return (
            StatusCode::SERVICE_UNAVAILABLE,
            "the node plugins are not listed yet",
        );
    }
    (StatusCode::OK, "ok")
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use futures::future::BoxFuture;
    use http::Request;
    use tower::ServiceExt as _;
    use tranche_node_usage::reader::Scrape;
    use tranche_node_usage::{Plugins, Reader};

    use super::*;
    use crate::front_proxy::Trust;
    use crate::front_proxy::testing::Authority;

    struct Nobody;

    impl Scrape for Nobody {
        fn scrape(&self, _: SocketAddr) -> BoxFuture<'_, Result<bytes::Bytes, String>> {
            Box::pin(async { Err("nobody asks a node for health".to_owned()) })
        }
    }

    async fn answer(path: &str, trusts: bool, plugins: Plugins) -> StatusCode {
        let trust = trusts.then(|| Arc::new(Trust::new(&Authority::new().config_map()).unwrap()));
        let health = Health {
            trust: Arc::new(std::sync::Mutex::new(trust)),
            nodes: Arc::new(Nodes::new(Reader::new(plugins, Nobody))),
        };
        let request = Request::get(path).body(Body::empty()).unwrap();
        router(health).oneshot(request).await.unwrap().status()
    }

    #[tokio::test]
    async fn a_replica_is_ready_once_it_knows_whom_and_what_to_ask() {
        let listed = || Plugins::fixed([]);
        for (trusts, plugins, ready) in [
            (false, Plugins::default(), false),
            (true, Plugins::default(), false),
            (false, listed(), false),
            (true, listed(), true),
        ] {
            assert_eq!(answer("/healthz", trusts, plugins.clone()).await, 200);
            assert_eq!(answer("/readyz", trusts, plugins).await == 200, ready);
        }
    }
}
