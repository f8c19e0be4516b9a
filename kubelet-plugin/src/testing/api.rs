//! An API server that stores objects, counts requests, and fails on demand.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex};

use http::{Request, Response, StatusCode};
use kube::Client;
use kube::client::Body;
use serde_json::{Value, json};
use tokio::sync::Notify;

/// How a request is answered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mood {
    /// As it should be.
    #[default]
    Well,
    /// With this status.
    Failing(u16),
    /// Never.
    NoAnswer,
    /// Closes the connection, so many times.
    Breaking(u32),
}

#[derive(Debug, Default)]
struct State {
    objects: BTreeMap<String, Value>,
    mood: Mood,
    requests: Vec<(String, String, Value)>,
    /// The events of the next watch of a path.
    watches: BTreeMap<String, VecDeque<Value>>,
}

/// Shared with every client made from it.
#[derive(Clone, Debug, Default)]
pub struct FakeApi(Arc<Mutex<State>>, Arc<Notify>);

impl FakeApi {
    /// Stores a claim under its namespace and name.
    pub fn put(&self, claim: Value) {
        let path = path(&claim);
        self.0.lock().unwrap().objects.insert(path, claim);
    }

    pub fn delete(&self, claim: &Value) {
        self.0.lock().unwrap().objects.remove(&path(claim));
    }

    /// Deletes the object at a path.
    pub fn delete_at(&self, path: &str) {
        self.0.lock().unwrap().objects.remove(path);
    }

    /// Stores any object under its path.
    pub fn put_at(&self, path: &str, object: Value) {
        let mut state = self.0.lock().unwrap();
        state.objects.insert(path.to_owned(), object);
    }

    /// The object at a path.
    pub fn at(&self, path: &str) -> Option<Value> {
        self.0.lock().unwrap().objects.get(path).cloned()
    }

    /// The events that a waiting watch of the path, or the next one, delivers before it ends.
    pub fn watch_delivers(&self, path: &str, events: impl IntoIterator<Item = Value>) {
        let events = events.into_iter().collect();
        self.0
            .lock()
            .unwrap()
            .watches
            .insert(path.to_owned(), events);
        self.1.notify_waiters();
    }

    /// Paths of the requests with this method so far.
    pub fn paths(&self, method: &str) -> Vec<String> {
        let requests = self.requests();
        let of_method = requests.into_iter().filter(|(m, _, _)| m == method);
        of_method.map(|(_, path, _)| path).collect()
    }

    pub fn set_mood(&self, mood: Mood) {
        self.0.lock().unwrap().mood = mood;
    }

    /// Method, path and body of every request so far.
    pub fn requests(&self) -> Vec<(String, String, Value)> {
        self.0.lock().unwrap().requests.clone()
    }

    pub fn client(&self) -> Client {
        let this = self.clone();
        let service = tower::service_fn(move |request: Request<Body>| {
            let this = this.clone();
            async move {
                if this.breaks() {
                    return Err(std::io::Error::from(std::io::ErrorKind::ConnectionReset));
                }
                Ok(this.answer(request).await)
            }
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

impl FakeApi {
    fn breaks(&self) -> bool {
        let mood = &mut self.0.lock().unwrap().mood;
        let Mood::Breaking(left) = *mood else {
            return false;
        };
        *mood = if left > 1 {
            Mood::Breaking(left - 1)
        } else {
            Mood::Well
        };
        true
    }

    async fn answer(&self, request: Request<Body>) -> Response<Body> {
        let method = request.method().to_string();
        let path = request.uri().path().to_owned();
        let query = request.uri().query().unwrap_or_default();
        if query.contains("watch=true") {
            return self.watch(&path).await;
        }
        let bytes = request
            .into_body()
            .collect_bytes()
            .await
            .unwrap_or_default();
        let body = serde_json::from_slice(&bytes).unwrap_or(Value::Null);
        let (mood, object) = {
            let mut state = self.0.lock().unwrap();
            let before = state
                .requests
                .iter()
                .rfind(|(m, p, _)| *m == method && *p == path)
                .map(|(_, _, body)| body.clone());
            let seen = (method.clone(), path.clone(), body.clone());
            state.requests.push(seen);
            let object = match method.as_str() {
                "GET" => state.objects.get(&path).cloned(),
                _ if state.mood == Mood::Well => {
                    Some(apply(&mut state.objects, &path, body, before.as_ref()))
                }
                _ => None,
            };
            (state.mood, object)
        };
        let (status, body) = match (mood, object) {
            (Mood::NoAnswer, _) => std::future::pending().await,
            (Mood::Breaking(_), _) => unreachable!("broken before"),
            (Mood::Failing(status), _) => (status, failure(status)),
            (Mood::Well, Some(object)) => (200, object),
            (Mood::Well, None) => (404, not_found(&path)),
        };
        Response::builder()
            .status(StatusCode::from_u16(status).unwrap())
            .body(Body::from(body.to_string().into_bytes()))
            .unwrap()
    }

    async fn watch(&self, path: &str) -> Response<Body> {
        loop {
            let woken = self.1.notified();
            let events = self.0.lock().unwrap().watches.remove(path);
            if let Some(events) = events {
                let lines: Vec<_> = events.iter().map(ToString::to_string).collect();
                let text = lines.join("\n") + "\n";
                return Response::new(Body::from(text.into_bytes()));
            }
            woken.await;
        }
    }
}

/// The needed part of server-side apply: a status is merged field by field into the stored object,
/// without the fields that the last apply (`before`) had and this one lacks; a new object is stored.
fn apply(
    objects: &mut BTreeMap<String, Value>,
    path: &str,
    body: Value,
    before: Option<&Value>,
) -> Value {
    let Some(object) = path.strip_suffix("/status") else {
        return objects.entry(path.to_owned()).or_insert(body).clone();
    };
    let object = objects
        .entry(object.to_owned())
        .or_insert_with(|| body.clone());
    if let Some(status) = body["status"].as_object() {
        let owned = before.and_then(|before| before["status"].as_object());
        for field in owned.into_iter().flat_map(|owned| owned.keys()) {
            if let (Some(stored), false) =
                (object["status"].as_object_mut(), status.contains_key(field))
            {
                stored.remove(field);
            }
        }
        for (field, value) in status {
            object["status"][field] = value.clone();
        }
    }
    object.clone()
}

/// The API server's own Status that there is nothing at a path.
fn not_found(path: &str) -> Value {
    let mut parts = path.rsplit('/');
    let (name, kind) = (parts.next(), parts.next());
    json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": "not found", "code": 404, "reason": "NotFound",
        "details": {"group": path.split('/').nth(2), "kind": kind, "name": name},
    })
}

fn failure(code: u16) -> Value {
    json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure",
        "message": format!("scripted {code}"), "code": code,
        "reason": if code == 404 { "NotFound" } else { "Scripted" },
    })
}
