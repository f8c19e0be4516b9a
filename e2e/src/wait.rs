//! Waits with watches and with limits of `limits.rs`; errors show the state at the end.

use std::collections::BTreeMap;
use std::fmt::Debug;
use std::pin::pin;
use std::time::Duration;

use anyhow::{Context, bail};
use futures::StreamExt;
use kube::api::Api;
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use kube::{Resource, ResourceExt};
use serde::Serialize;
use serde::de::DeserializeOwned;

pub use crate::limits::*;
use crate::pulse::{self, Stopwatch};
use crate::record;

/// A kind that can be watched and shown.
pub trait Watched:
    Resource + Clone + DeserializeOwned + Serialize + Debug + Send + 'static
{
}
impl<K: Resource + Clone + DeserializeOwned + Serialize + Debug + Send + 'static> Watched for K {}

/// Watches all objects of `api` until `wanted` returns a value for them.
pub async fn for_all<K: Watched, T>(
    api: Api<K>,
    config: watcher::Config,
    what: &str,
    limit: Limit,
    mut wanted: impl FnMut(&BTreeMap<String, K>) -> Option<T>,
) -> anyhow::Result<T> {
    let mut known = BTreeMap::new();
    let mut fresh = BTreeMap::new();
    let took = Stopwatch::start();
    let seen = pulse::within(limit, async {
        let mut events = pin!(watcher(api, config).default_backoff());
        let mut complete = false;
        while let Some(event) = events.next().await {
            // The watcher starts again.
            let event = match event {
                Ok(event) => event,
                Err(error) => {
                    println!("watching for {what}: {error}");
                    continue;
                }
            };
            match event {
                Event::Init => fresh = BTreeMap::new(),
                Event::InitApply(object) => {
                    fresh.insert(key(&object), object);
                }
                Event::InitDone => {
                    known = std::mem::take(&mut fresh);
                    complete = true;
                }
                Event::Apply(object) => {
                    known.insert(key(&object), object);
                }
                Event::Delete(object) => {
                    known.remove(&key(&object));
                }
            }
            if complete && let Some(found) = wanted(&known) {
                return Ok(found);
            }
        }
        bail!("the watch ended")
    })
    .await;
    let Some(found) = seen else {
        let seconds = limit.seconds();
        bail!(
            "{what}: not within {seconds} s. There is: {}",
            shown(&known)
        );
    };
    record::latency(what, &took);
    found.with_context(|| format!("watching for {what}"))
}

/// Watches one object, which need not exist, until `wanted` returns a value for it.
pub async fn for_one<K: Watched, T>(
    api: Api<K>,
    name: &str,
    what: &str,
    limit: Limit,
    mut wanted: impl FnMut(Option<&K>) -> Option<T>,
) -> anyhow::Result<T> {
    let config = watcher::Config::default().fields(&format!("metadata.name={name}"));
    for_all(api, config, what, limit, |all| wanted(all.values().next())).await
}

/// Watches until there are no objects.
pub async fn for_none<K: Watched>(
    api: Api<K>,
    config: watcher::Config,
    what: &str,
    limit: Limit,
) -> anyhow::Result<()> {
    for_all(api, config, what, limit, |all| all.is_empty().then_some(())).await
}

/// Polls where no watch is possible: files on a node, a program's answer.
pub async fn for_answer<T>(
    what: &str,
    limit: Limit,
    mut ask: impl AsyncFnMut() -> anyhow::Result<Option<T>>,
) -> anyhow::Result<T> {
    let mut last = None;
    let took = Stopwatch::start();
    let answered = pulse::within(limit, async {
        let mut pause = tokio::time::interval(Duration::from_millis(200));
        loop {
            pause.tick().await;
            match ask().await {
                Ok(Some(answer)) => return answer,
                Ok(None) => last = None,
                Err(error) => last = Some(error),
            }
        }
    })
    .await;
    let Some(answer) = answered else {
        let what = format!("{what}: not within {} s", limit.seconds());
        return Err(match last {
            Some(error) => error.context(what),
            None => anyhow::anyhow!(what),
        });
    };
    record::latency(what, &took);
    Ok(answer)
}

/// Names are unique only within a namespace.
fn key<K: Watched>(object: &K) -> String {
    match object.namespace() {
        Some(namespace) => format!("{namespace}/{}", object.name_any()),
        None => object.name_any(),
    }
}

/// The objects without managed fields, shortened.
fn shown<K: Watched>(objects: &BTreeMap<String, K>) -> String {
    const SCREENFUL: usize = 3000;
    let objects: Vec<_> = objects
        .values()
        .map(|object| {
            let mut object = serde_json::to_value(object).unwrap_or_default();
            if let Some(metadata) = object.pointer_mut("/metadata") {
                *metadata = metadata["name"].take();
            }
            object
        })
        .collect();
    if objects.is_empty() {
        return "nothing".into();
    }
    let mut text = serde_json::Value::from(objects).to_string();
    if let Some((end, _)) = text.char_indices().nth(SCREENFUL) {
        text.truncate(end);
        text.push('…');
    }
    text
}
