//! Which requests the server answers, and how.

use axum::body::{Body, to_bytes};
use axum::http::Request;
use futures::StreamExt;
use tower::ServiceExt;

use super::super::records::Records;
use super::*;

fn published(seq: u64, nodes: &[&str]) -> Published {
    let mut records = Records::default();
    for node in nodes {
        records.set(&format!("node/{node}"), node).unwrap();
    }
    Published {
        seq,
        records: Some(Arc::new(records)),
    }
}

fn served(published: Published) -> (Router, watch::Sender<Published>) {
    let (sender, receiver) = watch::channel(published);
    (router(Guard::new("secret".into(), 8080), receiver), sender)
}

fn request(path: &str, cookie: &str) -> Request<Body> {
    let request = Request::get(path)
        .header("host", "127.0.0.1:8080")
        .header("cookie", cookie);
    request.body(Body::empty()).unwrap()
}

const COOKIE: &str = "tranche-ui-8080=secret";

#[tokio::test]
async fn files_of_the_page_are_served_and_other_origins_are_forbidden() {
    let (router, _sender) = served(published(1, &[]));
    let answer = router
        .clone()
        .oneshot(request("/?token=secret", ""))
        .await
        .unwrap();
    assert_eq!(answer.status(), StatusCode::OK);
    assert!(
        answer.headers()["set-cookie"]
            .to_str()
            .unwrap()
            .contains("SameSite=Strict")
    );
    assert!(
        answer.headers()["content-security-policy"]
            .to_str()
            .unwrap()
            .starts_with("default-src 'self'")
    );
    let body = to_bytes(answer.into_body(), 1 << 20).await.unwrap();
    let page = String::from_utf8(body.to_vec()).unwrap();
    let scripts = [
        include_str!("../assets/app.js"),
        include_str!("../assets/map.js"),
        include_str!("../assets/rail.js"),
    ]
    .concat();
    let attributes = page
        .split(['"', ' '])
        .filter(|it| it.starts_with('/') && it.contains('.'));
    let imports = scripts
        .split('\'')
        .filter_map(|it| it.strip_prefix("./"))
        .map(|it| format!("/{it}"));
    let named: Vec<String> = attributes.map(str::to_owned).chain(imports).collect();
    assert!(named.len() >= 6, "{named:?}");
    for path in named {
        let answer = router
            .clone()
            .oneshot(request(&path, COOKIE))
            .await
            .unwrap();
        assert_eq!(answer.status(), StatusCode::OK, "{path}");
    }
    // Only the icon may name a URL, its XML namespace.
    assert!(!page.contains("http") && !scripts.contains("https://"));
}

#[tokio::test]
async fn nothing_is_answered_without_the_secret() {
    let (router, _sender) = served(published(1, &["a"]));
    for path in ["/", "/app.js", "/events", "/nothing"] {
        let answer = router.clone().oneshot(request(path, "")).await.unwrap();
        assert_eq!(answer.status(), StatusCode::FORBIDDEN, "{path}");
        assert!(answer.headers().contains_key("content-security-policy"));
    }
}

#[tokio::test]
async fn a_stream_begins_with_everything_and_goes_on_with_differences() {
    let (router, sender) = served(published(7, &["a", "b"]));
    let answer = router.oneshot(request("/events", COOKIE)).await.unwrap();
    let mut events = answer.into_body().into_data_stream();
    let first = events.next().await.unwrap().unwrap();
    assert_eq!(
        String::from_utf8_lossy(&first),
        "event: state\ndata: {\"seq\":7,\"records\":{\"node/a\":\"a\",\"node/b\":\"b\"}}\n\n"
    );
    // The page gets two changes as one if it has not read the first.
    sender.send_replace(published(8, &["a"]));
    sender.send_replace(published(9, &["a", "c"]));
    let second = events.next().await.unwrap().unwrap();
    assert_eq!(
        String::from_utf8_lossy(&second),
        "event: delta\ndata: {\"since\":7,\"seq\":9,\"set\":{\"node/c\":\"c\"},\"gone\":[\"node/b\"]}\n\n"
    );
}
