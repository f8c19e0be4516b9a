//! An API server in the test's process: enough of one for the controller's client to list, watch and write
//! against, with versions, conflicts, preconditions and server-side apply of `status.published`.
//!
//! It records every write, and it can be told to drop fields or to refuse requests.

pub mod cluster;

use std::collections::{BTreeMap, VecDeque};
use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use bytes::Bytes;
use futures::{Stream, StreamExt, stream};
use http::{Method, Request, Response, StatusCode};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use jiff::Timestamp;
use kube::Client;
use kube::client::Body;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tranche_serving::Clock;

/// A write that was asked for and stored: verb, resource, name.
pub type StoredWrite = (String, String, String);

/// What happens to a request before it is looked at.
#[derive(Clone, Debug)]
pub enum Fault {
    /// Answered with this status, not executed.
    Refuse(u16),
    /// Executed, but the answer is lost: the client sees this status.
    LoseAnswer(u16),
    /// Never answered, not executed.
    Hang,
}

#[derive(Default)]
struct Store {
    version: u64,
    uids: u64,
    objects: BTreeMap<(String, String), Value>,
    history: Vec<(u64, String, Value)>,
    watches: Vec<(String, mpsc::UnboundedSender<(u64, Value)>)>,
    writes: Vec<StoredWrite>,
    /// When each of these was stored.
    written_at: Vec<Instant>,
    /// Lists that were answered, by resource.
    lists: BTreeMap<String, usize>,
    /// Reads of single objects that were answered, by resource.
    gets: BTreeMap<String, usize>,
    /// Writes that were asked for, stored or not.
    attempts: usize,
    /// How late watches deliver.
    lag: Duration,
    /// Faults of requests whose `verb resource` begins with the text, used up one by one.
    faults: Vec<(String, VecDeque<Fault>)>,
    /// Fields of ResourceSlices and of `status.published` that this server does not know.
    unknown_fields: Vec<String>,
}

/// The server. Clones are the same server.
#[derive(Clone)]
pub struct Api {
    store: Arc<Mutex<Store>>,
    clock: Clock,
}

type Answer = Response<UnsyncBoxBody<Bytes, Infallible>>;

impl Api {
    /// An empty one, by this clock.
    pub fn new(clock: Clock) -> Self {
        Self {
            store: Arc::default(),
            clock,
        }
    }

    /// A client of it. With a token, all its requests hang from the moment the token is cancelled: the
    /// machine it runs on has lost its network.
    pub fn client(&self, cut: Option<CancellationToken>) -> Client {
        let api = self.clone();
        let service = tower::service_fn(move |request: Request<Body>| {
            let (api, cut) = (api.clone(), cut.clone());
            async move {
                if cut.is_some_and(|cut| cut.is_cancelled()) {
                    std::future::pending::<()>().await;
                }
                Ok::<_, Infallible>(api.answer(request).await)
            }
        });
        Client::new(service, "default")
    }

    fn store(&self) -> MutexGuard<'_, Store> {
        self.store
            .lock()
            .expect("no test panics while it holds the lock")
    }

    async fn answer(&self, request: Request<Body>) -> Answer {
        let (parts, body) = request.into_parts();
        let bytes = body.collect().await.expect("a whole body").to_bytes();
        let body: Value = serde_json::from_slice(&bytes).unwrap_or(Value::Null);
        let query: BTreeMap<String, String> = parts
            .uri
            .query()
            .unwrap_or_default()
            .split('&')
            .filter_map(|pair| pair.split_once('='))
            .map(|(key, value)| {
                (
                    key.to_owned(),
                    value.replace("%3D", "=").replace("%2C", ","),
                )
            })
            .collect();
        let path = Path::parse(parts.uri.path());
        let verb = match parts.method {
            Method::GET if query.contains_key("watch") => "watch",
            Method::GET if path.name.is_none() => "list",
            Method::GET => "get",
            Method::POST => "create",
            Method::PUT => "update",
            Method::DELETE => "delete",
            Method::PATCH => "patch",
            ref other => panic!("{other} is not expected"),
        };
        if parts.method != Method::GET && path.plural != "leases" {
            self.store().attempts += 1;
        }
        let fault = self.store().fault(&format!("{verb} {}", path.resource()));
        match fault {
            Some(Fault::Hang) => std::future::pending().await,
            Some(Fault::Refuse(code)) => return status(code, "told to refuse"),
            _ => {}
        }
        let answer = match verb {
            "watch" => self.watch(&path, &query),
            "list" => self.list(&path, &query),
            "get" => {
                let mut store = self.store();
                *store.gets.entry(path.resource()).or_default() += 1;
                store.get(&path)
            }
            "create" => self.store().create(&path, body, self.clock.now()),
            "update" => self.store().update(&path, body, self.clock.now()),
            "delete" => self.store().delete(&path, &body["preconditions"]),
            _ => self.store().apply(&path, &body),
        };
        match fault {
            Some(Fault::LoseAnswer(code)) => status(code, "told to lose the answer"),
            _ => answer,
        }
    }

    fn list(&self, path: &Path, query: &BTreeMap<String, String>) -> Answer {
        let mut store = self.store();
        *store.lists.entry(path.resource()).or_default() += 1;
        let items: Vec<_> = store
            .objects
            .iter()
            .filter(|((plural, _), object)| *plural == path.plural && selected(object, query))
            .map(|(_, object)| object.clone())
            .collect();
        answer(
            StatusCode::OK,
            &json!({
                "kind": "List", "apiVersion": "v1",
                "metadata": {"resourceVersion": store.version.to_string()},
                "items": items,
            }),
        )
    }

    fn watch(&self, path: &Path, query: &BTreeMap<String, String>) -> Answer {
        let mut store = self.store();
        let since: u64 = query
            .get("resourceVersion")
            .and_then(|v| v.parse().ok())
            .unwrap_or(0);
        let (sender, receiver) = mpsc::unbounded_channel();
        for (version, plural, event) in &store.history {
            if *plural == path.plural && *version > since {
                sender.send((*version, event.clone())).expect("open");
            }
        }
        store.watches.push((path.plural.clone(), sender));
        let seconds = query
            .get("timeoutSeconds")
            .and_then(|v| v.parse().ok())
            .unwrap_or(290);
        let (query, lag) = (query.clone(), store.lag);
        let events = lines(receiver)
            .then(move |event| async move {
                tokio::time::sleep(lag).await;
                event
            })
            .filter(move |event| {
                let selected = selected(&event["object"], &query);
                async move { selected }
            })
            .map(|event| {
                let mut line = event.to_string();
                line.push('\n');
                Ok(http_body::Frame::data(Bytes::from(line)))
            })
            .take_until(tokio::time::sleep(Duration::from_secs(seconds)));
        Response::new(StreamBody::new(events).boxed_unsync())
    }

    /// Stores an object as its owner would, whatever was there.
    pub fn put(&self, plural: &str, mut object: Value) {
        let mut store = self.store();
        let name = name_of(&object);
        let key = (plural.to_owned(), name);
        if let Some(old) = store.objects.get(&key).cloned() {
            object["metadata"]["uid"] = old["metadata"]["uid"].clone();
            store.save("MODIFIED", key, object);
        } else {
            store.uids += 1;
            let uid = store.uids.to_string();
            object["metadata"]["uid"] = json!(uid);
            store.save("ADDED", key, object);
        }
    }

    /// Changes a stored object.
    pub fn edit(&self, plural: &str, name: &str, change: impl FnOnce(&mut Value)) {
        let mut store = self.store();
        let key = (plural.to_owned(), name.to_owned());
        let mut object = store.objects.get(&key).cloned().expect("stored");
        change(&mut object);
        store.save("MODIFIED", key, object);
    }

    /// Removes an object.
    pub fn remove(&self, plural: &str, name: &str) {
        let mut store = self.store();
        store.erase(&(plural.to_owned(), name.to_owned()));
    }

    /// The stored objects of a kind.
    pub fn all(&self, plural: &str) -> Vec<Value> {
        self.store()
            .objects
            .iter()
            .filter(|((p, _), _)| p == plural)
            .map(|(_, object)| object.clone())
            .collect()
    }

    /// One stored object.
    pub fn one(&self, plural: &str, name: &str) -> Value {
        self.store()
            .objects
            .get(&(plural.to_owned(), name.to_owned()))
            .cloned()
            .unwrap_or(Value::Null)
    }

    /// Writes so far, but those to leases.
    pub fn writes(&self) -> Vec<StoredWrite> {
        let store = self.store();
        let other = store
            .writes
            .iter()
            .filter(|(_, plural, _)| plural != "leases");
        other.cloned().collect()
    }

    /// The number of [`Self::writes`].
    pub fn write_count(&self) -> usize {
        let store = self.store();
        let other = store
            .writes
            .iter()
            .filter(|(_, plural, _)| plural != "leases");
        other.count()
    }

    /// Writes so far with the times at which they were stored, but those to leases.
    pub fn writes_in_time(&self) -> Vec<(Instant, StoredWrite)> {
        let store = self.store();
        let all = store.written_at.iter().zip(&store.writes);
        all.filter(|(_, (_, plural, _))| plural != "leases")
            .map(|(at, record)| (*at, record.clone()))
            .collect()
    }

    /// Lists of a resource that were answered.
    pub fn lists(&self, resource: &str) -> usize {
        self.store().lists.get(resource).copied().unwrap_or(0)
    }

    /// Reads of single objects of a resource that were answered.
    pub fn gets(&self, resource: &str) -> usize {
        self.store().gets.get(resource).copied().unwrap_or(0)
    }

    /// Writes that were asked for so far, stored or not, but those to leases.
    pub fn attempts(&self) -> usize {
        self.store().attempts
    }

    /// Watches that begin from now on deliver this late.
    pub fn lag(&self, lag: Duration) {
        self.store().lag = lag;
    }

    /// Sets the faults of the next requests whose `verb resource` begins with `request`.
    pub fn fault(&self, request: &str, faults: impl IntoIterator<Item = Fault>) {
        self.store()
            .faults
            .push((request.to_owned(), faults.into_iter().collect()));
    }

    /// Has the server forget these fields of the devices in ResourceSlices.
    pub fn drop_fields(&self, fields: &[&str]) {
        self.store().unknown_fields = fields.iter().map(ToString::to_string).collect();
    }
}

impl Store {
    fn fault(&mut self, request: &str) -> Option<Fault> {
        self.faults
            .iter_mut()
            .filter(|(prefix, _)| request.starts_with(prefix.as_str()))
            .find_map(|(_, faults)| faults.pop_front())
    }

    fn save(&mut self, event: &str, key: (String, String), mut object: Value) -> Value {
        self.version += 1;
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        self.send_event(event, &key.0, &object);
        self.objects.insert(key, object.clone());
        object
    }

    fn erase(&mut self, key: &(String, String)) -> Option<Value> {
        let mut object = self.objects.remove(key)?;
        self.version += 1;
        object["metadata"]["resourceVersion"] = json!(self.version.to_string());
        self.send_event("DELETED", &key.0, &object);
        Some(object)
    }

    fn send_event(&mut self, event: &str, plural: &str, object: &Value) {
        let event = json!({"type": event, "object": object});
        let version = self.version;
        self.watches
            .retain(|(p, sender)| p != plural || sender.send((version, event.clone())).is_ok());
        self.history.push((version, plural.to_owned(), event));
    }

    fn wrote(&mut self, verb: &str, path: &Path, name: &str) {
        self.writes
            .push((verb.to_owned(), path.resource(), name.to_owned()));
        self.written_at.push(Instant::now());
    }

    fn get(&self, path: &Path) -> Answer {
        match self.objects.get(&path.key()) {
            Some(object) => answer(StatusCode::OK, object),
            None => status(404, "NotFound"),
        }
    }

    fn create(&mut self, path: &Path, mut object: Value, now: Timestamp) -> Answer {
        let name = name_of(&object);
        let key = (path.plural.clone(), name.clone());
        if self.objects.contains_key(&key) {
            return status(409, "AlreadyExists");
        }
        self.uids += 1;
        object["metadata"]["uid"] = json!(self.uids.to_string());
        self.normalise(&path.plural, &mut object, now);
        self.wrote("create", path, &name);
        let stored = self.save("ADDED", key, object);
        answer(StatusCode::CREATED, &stored)
    }

    fn update(&mut self, path: &Path, mut object: Value, now: Timestamp) -> Answer {
        let Some(old) = self.objects.get(&path.key()).cloned() else {
            return status(404, "NotFound");
        };
        if object["metadata"]["resourceVersion"] != old["metadata"]["resourceVersion"] {
            return status(409, "Conflict");
        }
        object["metadata"]["uid"] = old["metadata"]["uid"].clone();
        self.normalise(&path.plural, &mut object, now);
        self.wrote("update", path, &name_of(&object));
        // A write that changes nothing is not stored.
        if object == old {
            return answer(StatusCode::OK, &old);
        }
        let stored = self.save("MODIFIED", path.key(), object);
        answer(StatusCode::OK, &stored)
    }

    fn delete(&mut self, path: &Path, preconditions: &Value) -> Answer {
        let Some(old) = self.objects.get(&path.key()) else {
            return status(404, "NotFound");
        };
        for field in ["uid", "resourceVersion"] {
            if !preconditions[field].is_null() && preconditions[field] != old["metadata"][field] {
                return status(409, "Conflict");
            }
        }
        self.wrote("delete", path, path.name.as_deref().unwrap_or_default());
        let object = self.erase(&path.key()).expect("found above");
        answer(StatusCode::OK, &object)
    }

    /// Server-side apply of the controller's part of a GpuNode's status.
    fn apply(&mut self, path: &Path, applied: &Value) -> Answer {
        let Some(mut object) = self.objects.get(&path.key()).cloned() else {
            return status(404, "NotFound");
        };
        // The controller names the version that it decided on.
        if applied["metadata"]["resourceVersion"] != object["metadata"]["resourceVersion"] {
            return status(409, "Conflict");
        }
        self.wrote("apply", path, path.name.as_deref().unwrap_or_default());
        let old = object.clone();
        object["status"]["published"] = applied["status"]["published"].clone();
        if let Some(published) = object["status"]["published"].as_object_mut() {
            published.retain(|field, _| !self.unknown_fields.contains(field));
        }
        // The list is a map by `type`.
        for condition in applied["status"]["conditions"]
            .as_array()
            .expect("conditions")
        {
            let conditions = &mut object["status"]["conditions"];
            if conditions.is_null() {
                *conditions = json!([]);
            }
            let stored = conditions.as_array_mut().expect("a list");
            stored.retain(|other| other["type"] != condition["type"]);
            stored.push(condition.clone());
        }
        if object == old {
            return answer(StatusCode::OK, &old);
        }
        let stored = self.save("MODIFIED", path.key(), object);
        answer(StatusCode::OK, &stored)
    }

    /// What the API server does to a ResourceSlice on its way to the store.
    fn normalise(&self, plural: &str, object: &mut Value, now: Timestamp) {
        if plural != "resourceslices" {
            return;
        }
        for device in object["spec"]["devices"]
            .as_array_mut()
            .into_iter()
            .flatten()
        {
            for field in &self.unknown_fields {
                device.as_object_mut().expect("a device").remove(field);
            }
            for taint in device["taints"].as_array_mut().into_iter().flatten() {
                if taint["timeAdded"].is_null() {
                    taint["timeAdded"] = json!(format!("{now:.0}"));
                }
            }
            if device["taints"].is_null() {
                device.as_object_mut().expect("a device").remove("taints");
            }
        }
    }
}

struct Path {
    plural: String,
    name: Option<String>,
    subresource: Option<String>,
}

impl Path {
    fn parse(path: &str) -> Self {
        let mut parts: Vec<_> = path.trim_matches('/').split('/').collect();
        // "api/v1" or "apis/group/version", then perhaps "namespaces/name".
        parts.drain(..if parts[0] == "api" { 2 } else { 3 });
        if parts[0] == "namespaces" {
            parts.drain(..2);
        }
        let part = |i: usize| parts.get(i).map(ToString::to_string);
        Self {
            plural: part(0).expect("a resource"),
            name: part(1),
            subresource: part(2),
        }
    }

    fn resource(&self) -> String {
        match &self.subresource {
            Some(subresource) => format!("{}/{subresource}", self.plural),
            None => self.plural.clone(),
        }
    }

    fn key(&self) -> (String, String) {
        (self.plural.clone(), self.name.clone().expect("a name"))
    }
}

fn lines(receiver: mpsc::UnboundedReceiver<(u64, Value)>) -> impl Stream<Item = Value> {
    stream::unfold(receiver, |mut receiver| async move {
        let (_, event) = receiver.recv().await?;
        Some((event, receiver))
    })
}

/// Field selectors of the form `a.b=value`.
fn selected(object: &Value, query: &BTreeMap<String, String>) -> bool {
    let Some((field, value)) = query.get("fieldSelector").and_then(|s| s.split_once('=')) else {
        return true;
    };
    let found = field.split('.').fold(object, |object, key| &object[key]);
    found.as_str() == Some(value)
}

fn name_of(object: &Value) -> String {
    object["metadata"]["name"]
        .as_str()
        .expect("objects have names")
        .to_owned()
}

fn answer(code: StatusCode, body: &Value) -> Answer {
    let mut response = Response::new(
        Full::new(Bytes::from(body.to_string()))
            .map_err(|never| match never {})
            .boxed_unsync(),
    );
    *response.status_mut() = code;
    response
}

fn status(code: u16, reason: &str) -> Answer {
    answer(
        StatusCode::from_u16(code).expect("a status"),
        &json!({
            "kind": "Status", "apiVersion": "v1", "status": "Failure",
            "code": code, "reason": reason, "message": reason, "metadata": {},
        }),
    )
}
