//! An API server that serves claims, counts, and fails on demand.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex};

use http::{Request, Response, StatusCode};
use kube::Client;
use kube::client::Body;
use serde_json::{Value, json};

/// How a request is answered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mood {
    /// As it should be.
    #[default]
    Well,
    /// With this status.
    Failing(u16),
    /// Never.
    Silent,
}

#[derive(Debug, Default)]
struct State {
    objects: BTreeMap<String, Value>,
    mood: Mood,
    requests: Vec<(String, String, Value)>,
}

/// Shared with every client made from it.
#[derive(Clone, Debug, Default)]
pub struct FakeApi(Arc<Mutex<State>>);

impl FakeApi {
    /// Stores a claim under its namespace and name.
    pub fn put(&self, claim: Value) {
        let path = path(&claim);
        self.0.lock().unwrap().objects.insert(path, claim);
    }

    /// Deletes a claim.
    pub fn delete(&self, claim: &Value) {
        self.0.lock().unwrap().objects.remove(&path(claim));
    }

    pub fn set_mood(&self, mood: Mood) {
        self.0.lock().unwrap().mood = mood;
    }

    /// Method, path and body of every request so far.
    pub fn requests(&self) -> Vec<(String, String, Value)> {
        self.0.lock().unwrap().requests.clone()
    }

    pub fn client(&self) -> Client {
        let state = Arc::clone(&self.0);
        let service = tower::service_fn(move |request: Request<Body>| {
            let state = Arc::clone(&state);
            async move { Ok::<_, Infallible>(answer(&state, request).await) }
        });
        Client::new(service, "default")
    }
}

fn path(claim: &Value) -> String {
    let meta = &claim["metadata"];
    format!(
        "/apis/resource.k8s.io/v1/namespaces/{}/resourceclaims/{}",
        meta["namespace"].as_str().unwrap(),
        meta["name"].as_str().unwrap()
    )
}

async fn answer(state: &Mutex<State>, request: Request<Body>) -> Response<Body> {
    let method = request.method().to_string();
    let path = request.uri().path().to_owned();
    let bytes = request.into_body().collect_bytes().await.unwrap_or_default();
    let body = serde_json::from_slice(&bytes).unwrap_or(Value::Null);
    let (mood, object) = {
        let mut state = state.lock().unwrap();
        state.requests.push((method.clone(), path.clone(), body.clone()));
        let object = match method.as_str() {
            "GET" => state.objects.get(&path).cloned(),
            // A write is answered by what it wrote.
            _ => Some(body),
        };
        (state.mood, object)
    };
    let (status, body) = match (mood, object) {
        (Mood::Silent, _) => std::future::pending().await,
        (Mood::Failing(status), _) => (status, failure(status)),
        (Mood::Well, Some(object)) => (200, object),
        (Mood::Well, None) => (404, failure(404)),
    };
    Response::builder()
        .status(StatusCode::from_u16(status).unwrap())
        .body(Body::from(body.to_string().into_bytes()))
        .unwrap()
}

fn failure(code: u16) -> Value {
    json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": format!("scripted {code}"), "code": code,
        "reason": if code == 404 { "NotFound" } else { "Scripted" },
    })
}
