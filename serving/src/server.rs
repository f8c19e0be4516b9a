//! Serves `/metrics` to authorized readers.
//!
//! As with kube-rbac-proxy and controller-runtime, the reader sends the bearer token of a ServiceAccount.
//! The API server says who its owner is and whether the owner may `get` the path `/metrics`; a ClusterRole with
//! `nonResourceURLs: [/metrics]` grants that. The certificate is self-signed and new at each start, so
//! readers skip its verification: it protects the token from passive listeners.

use std::sync::Arc;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::header::{AUTHORIZATION, WWW_AUTHENTICATE};
use axum::http::{HeaderValue, StatusCode};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;

use crate::access::{Access, Denied};
use crate::tls::{TlsError, TlsListener};

/// Serves `metrics`, which has the route [`PATH`](crate::access::PATH), on `listener` until cancelled. Every request needs a token
/// whose owner may `get` the path.
pub async fn serve(
    listener: TcpListener,
    access: Access,
    metrics: Router,
    stop: CancellationToken,
) -> Result<(), ServeError> {
    let listener = TlsListener::new(listener)?;
    let guarded = metrics.layer(from_fn_with_state(Arc::new(access), guard));
    axum::serve(listener, guarded)
        .with_graceful_shutdown(stop.cancelled_owned())
        .await?;
    Ok(())
}

/// Why metrics are not served.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// TLS could not be set up.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The server has ended.
    #[error("the metrics' server: {0}")]
    Io(#[from] std::io::Error),
}

async fn guard(State(access): State<Arc<Access>>, request: Request, next: Next) -> Response {
    let header = request.headers().get(AUTHORIZATION);
    let token = header.and_then(bearer).map(str::to_owned);
    match access.check(token.as_deref(), request.uri().path()).await {
        Ok(()) => next.run(request).await,
        Err(denied) => refusal(&denied),
    }
}

/// The token of `Authorization: Bearer TOKEN`; the scheme's name is in any case (RFC 7235, 2.1).
fn bearer(header: &HeaderValue) -> Option<&str> {
    let (scheme, token) = header.to_str().ok()?.split_once(' ')?;
    let token = token.trim();
    (scheme.eq_ignore_ascii_case("bearer") && !token.is_empty()).then_some(token)
}

fn refusal(denied: &Denied) -> Response {
    let text = format!("{denied}\n");
    match denied {
        Denied::NoToken | Denied::Unauthenticated => (
            StatusCode::UNAUTHORIZED,
            [(WWW_AUTHENTICATE, "Bearer")],
            text,
        )
            .into_response(),
        Denied::Forbidden { .. } => (StatusCode::FORBIDDEN, text).into_response(),
        Denied::Unknown => (StatusCode::SERVICE_UNAVAILABLE, text).into_response(),
    }
}

#[cfg(test)]
mod tests {
    use axum::routing::get;

    use super::*;
    use crate::access::PATH;
    use crate::access::testing::Cluster;
    use crate::testing::get as scrape;

    #[test]
    fn the_token_is_the_text_after_bearer() {
        let token = |header: &'static str| bearer(&HeaderValue::from_static(header)).is_some();
        assert!(token("Bearer abc") && token("bearer  abc"));
        for other in ["Bearer", "Bearer ", "Basic abc", "abc", ""] {
            assert!(!token(other), "{other}");
        }
    }

    #[tokio::test]
    async fn only_authorized_readers_get_the_metrics() {
        let cluster = Cluster::default();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let stop = CancellationToken::new();
        let router = Router::new().route(PATH, get(async || "tranche_up 1\n"));
        let access = Access::new(cluster.client());
        let server = tokio::spawn(serve(listener, access, router, stop.clone()));
        let get = async |path: &str, token: Option<&str>| {
            let stream = tokio::net::TcpStream::connect(address).await.unwrap();
            scrape(stream, path, token).await.unwrap()
        };
        assert_eq!(get(PATH, None).await.0, 401);
        assert_eq!(get(PATH, Some("forged")).await.0, 401);
        let (code, text) = get(PATH, Some("of-a-tenant")).await;
        assert_eq!(code, 403);
        assert!(text.contains("system:serviceaccount:team:tenant"), "{text}");
        let answer = get(PATH, Some("of-prometheus")).await;
        assert_eq!(answer, (200, "tranche_up 1\n".to_owned()));
        // The right is to one path, and without it nobody learns which others exist.
        assert_eq!(get("/other", Some("of-prometheus")).await.0, 403);
        cluster.is_down();
        assert_eq!(get(PATH, Some("of-another")).await.0, 503);

        // A client that does not speak TLS or sends nothing does not block others.
        let silent = tokio::net::TcpStream::connect(address).await.unwrap();
        assert_eq!(get(PATH, Some("of-prometheus")).await.0, 200);
        drop(silent);
        stop.cancel();
        server.await.unwrap().unwrap();
    }

    /// From another address: one address has its own turns.
    #[tokio::test]
    async fn clients_that_do_not_finish_a_handshake_delay_no_other_address() {
        use tokio::io::AsyncWriteExt as _;
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let stop = CancellationToken::new();
        let router = Router::new().route(PATH, get(async || "tranche_up 1\n"));
        let access = Access::new(Cluster::default().client());
        let server = tokio::spawn(serve(listener, access, router, stop.clone()));
        let mut hanging = Vec::new();
        for _ in 0..64 {
            let socket = tokio::net::TcpSocket::new_v4().unwrap();
            socket.bind("127.0.0.2:0".parse().unwrap()).unwrap();
            let mut client = socket.connect(address).await.unwrap();
            // The first byte of a handshake.
            client.write_all(&[22]).await.unwrap();
            hanging.push(client);
        }
        let stream = tokio::net::TcpStream::connect(address).await.unwrap();
        let answer = scrape(stream, PATH, Some("of-prometheus")).await.unwrap();
        assert_eq!(answer.0, 200);
        // It has not waited for the end of anybody's time.
        for client in &hanging {
            let read = client.try_read(&mut [0]).unwrap_err();
            assert_eq!(read.kind(), std::io::ErrorKind::WouldBlock);
        }
        stop.cancel();
        server.await.unwrap().unwrap();
    }
}
