//! Serves the page and its stream of events on loopback.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use futures::{Stream, stream};
use tokio::sync::watch;

use super::guard::{Admitted, Guard, Visitor};
use super::live::Published;

/// Time without a change after which the stream sends a sign of life. After three times as long the page takes it for ended.
const ALIVE: Duration = Duration::from_secs(5);

/// The page loads only from this server, and no other page may embed it.
const POLICY: &str =
    "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'";
const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const ICON: &str = "image/svg+xml";
const SCRIPT: &str = "text/javascript; charset=utf-8";

#[derive(Clone, Debug)]
struct Served {
    guard: Arc<Guard>,
    published: watch::Receiver<Published>,
}

pub(super) fn router(guard: Guard, published: watch::Receiver<Published>) -> Router {
    let served = Served {
        guard: Arc::new(guard),
        published,
    };
    Router::new()
        .route(
            "/",
            get(async || file(HTML, include_str!("assets/index.html"))),
        )
        .route(
            "/style.css",
            get(async || file(CSS, include_str!("assets/style.css"))),
        )
        .route(
            "/state.js",
            get(async || file(SCRIPT, include_str!("assets/state.js"))),
        )
        .route(
            "/map.js",
            get(async || file(SCRIPT, include_str!("assets/map.js"))),
        )
        .route(
            "/rail.js",
            get(async || file(SCRIPT, include_str!("assets/rail.js"))),
        )
        .route(
            "/app.js",
            get(async || file(SCRIPT, include_str!("assets/app.js"))),
        )
        .route(
            "/icon.svg",
            get(async || file(ICON, include_str!("assets/icon.svg"))),
        )
        .route("/events", get(events))
        .layer(middleware::from_fn_with_state(served.clone(), guarded))
        .with_state(served)
}

fn file(kind: &'static str, text: &'static str) -> Response {
    ([(header::CONTENT_TYPE, kind)], text).into_response()
}

/// Answers only the user who started the command.
async fn guarded(State(served): State<Served>, request: Request, next: Next) -> Response {
    let headers = request.headers();
    let text = |name: HeaderName| headers.get(name).and_then(|it| it.to_str().ok());
    let visitor = Visitor {
        host: text(header::HOST),
        cookie: text(header::COOKIE),
        query: request.uri().query(),
        site: text(HeaderName::from_static("sec-fetch-site")),
        mode: text(HeaderName::from_static("sec-fetch-mode")),
    };
    let mut response = match served.guard.admit(visitor) {
        Ok(Admitted::ByCookie) => next.run(request).await,
        Ok(Admitted::ByUrl) => {
            let mut response = next.run(request).await;
            if let Ok(cookie) = HeaderValue::from_str(&served.guard.cookie()) {
                response.headers_mut().insert(header::SET_COOKIE, cookie);
            }
            response
        }
        Err(refused) => (StatusCode::FORBIDDEN, format!("{refused}\n")).into_response(),
    };
    protect(response.headers_mut());
    response
}

fn protect(headers: &mut HeaderMap) {
    let fixed = [
        (header::CONTENT_SECURITY_POLICY, POLICY),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::CACHE_CONTROL, "no-store"),
        (
            HeaderName::from_static("cross-origin-resource-policy"),
            "same-origin",
        ),
    ];
    for (name, value) in fixed {
        headers.insert(name, HeaderValue::from_static(value));
    }
}

/// Streams all records, then changes. A slow page gets several changes as one.
async fn events(
    State(served): State<Served>,
) -> Sse<impl Stream<Item = Result<Event, Infallible>>> {
    let mut published = served.published;
    // The current records are new for this page.
    published.mark_changed();
    let events = stream::unfold(
        (published, Published::default()),
        |(mut published, old)| async move {
            loop {
                published.changed().await.ok()?;
                let new = published.borrow_and_update().clone();
                if let Some(event) = event(&old, &new) {
                    return Some((Ok(event), (published, new)));
                }
            }
        },
    );
    Sse::new(events).keep_alive(
        KeepAlive::new()
            .interval(ALIVE)
            .event(Event::default().event("alive").data("")),
    )
}

fn event(old: &Published, new: &Published) -> Option<Event> {
    let records = new.records.as_ref()?;
    let (kind, message) = match &old.records {
        None => ("state", records.message(new.seq)),
        Some(before) => ("delta", before.delta(records).message(old.seq, new.seq)),
    };
    Some(Event::default().event(kind).data(message))
}

#[cfg(test)]
mod tests;
