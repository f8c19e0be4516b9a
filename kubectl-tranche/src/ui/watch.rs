//! Watches the objects that the page shows, with the user's rights: in all namespaces, or only in the context's namespace.

use std::fmt::Debug;
use std::time::Duration;

use futures::{StreamExt, TryStreamExt};
use k8s_openapi::NamespaceResourceScope;
use k8s_openapi::api::core::v1::{ConfigMap, Pod};
use k8s_openapi::api::resource::v1::{DeviceClass, ResourceClaim, ResourceSlice};
use kube::runtime::watcher::{self, Config, Event, watcher};
use kube::{Api, Resource as Described};
use serde::de::DeserializeOwned;
use tokio::sync::mpsc::Sender;
use tokio::task::JoinSet;
use tranche_api::GpuNode;
use tranche_api::names::DRIVER;

use super::store::{Change, Object};
use crate::cluster::{Cluster, PRICES, gap, only_here};
use crate::snapshot::{Cause, Resource, Scope};

/// Objects in a page of a list. A whole page is in memory, and slices are large.
const PAGE: u32 = 50;
/// Seconds after which the API server ends a watch; the next one continues where it ended. Without changes the API server sends a
/// bookmark only about once a minute, and the client does not wait that long for an answer.
const WATCH: u32 = 40;
/// Time until a failed watch is tried again: somebody may grant rights, or the server may return.
const AGAIN: Duration = Duration::from_secs(5);
/// Time between two readings of the prices, which rarely change.
const PRICES_AGAIN: Duration = Duration::from_mins(1);

/// Starts all watches. They end when the receiver is dropped, or with the set.
pub(super) fn start(cluster: &Cluster, changes: &Sender<Change>) -> JoinSet<()> {
    let mut tasks = JoinSet::new();
    let client = || cluster.client();
    let plain = || Config::default().page_size(PAGE).timeout(WATCH);
    let ours = format!("spec.driver={DRIVER}");
    // The claims' status names the pods that run.
    let pending = "status.phase=Pending";
    tasks.spawn(everywhere(
        Watched::new(Resource::GpuNodes, plain(), changes, |it| {
            Object::GpuNode(Box::new(it))
        }),
        Api::<GpuNode>::all(client()),
    ));
    tasks.spawn(everywhere(
        Watched::new(
            Resource::ResourceSlices,
            plain().fields(&ours),
            changes,
            |it| Object::Slice(Box::new(it)),
        ),
        Api::<ResourceSlice>::all(client()),
    ));
    tasks.spawn(everywhere(
        Watched::new(Resource::DeviceClasses, plain(), changes, |it| {
            Object::Class(Box::new(it))
        }),
        Api::<DeviceClass>::all(client()),
    ));
    tasks.spawn(where_allowed(
        Watched::new(Resource::ResourceClaims, plain(), changes, |it| {
            Object::Claim(Box::new(it))
        }),
        cluster.clone(),
        Api::<ResourceClaim>::namespaced,
    ));
    tasks.spawn(where_allowed(
        Watched::new(Resource::Pods, plain().fields(pending), changes, |it| {
            Object::Pod(Box::new(it))
        }),
        cluster.clone(),
        Api::<Pod>::namespaced,
    ));
    tasks.spawn(prices(cluster.clone(), changes.clone()));
    tasks
}

/// A resource that is watched.
struct Watched<T> {
    resource: Resource,
    config: Config,
    changes: Sender<Change>,
    object: fn(T) -> Object,
}

/// Why a watch stopped.
enum Stopped {
    /// The receiver was dropped.
    Unwanted,
    /// The API server refused or did not answer.
    Failed(kube::Error),
}

impl<T> Watched<T>
where
    T: Described<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + 'static,
{
    fn new(
        resource: Resource,
        config: Config,
        changes: &Sender<Change>,
        object: fn(T) -> Object,
    ) -> Self {
        Self {
            resource,
            config,
            changes: changes.clone(),
            object,
        }
    }

    /// Follows a list until an error that a new watch of the same list would not fix.
    async fn follow(&self, api: Api<T>, scope: &Scope) -> Stopped {
        let mut events = watcher(api, self.config.clone()).boxed();
        loop {
            let change = match events.try_next().await {
                Ok(Some(Event::Init)) => Change::Begin(self.resource),
                Ok(Some(Event::InitApply(it) | Event::Apply(it))) => Change::Set((self.object)(it)),
                Ok(Some(Event::Delete(it))) => Change::Gone((self.object)(it)),
                Ok(Some(Event::InitDone)) => Change::Complete(self.resource, scope.clone()),
                Ok(None) => return Stopped::Unwanted,
                Err(
                    watcher::Error::InitialListFailed(error)
                    | watcher::Error::WatchStartFailed(error)
                    | watcher::Error::WatchFailed(error),
                ) => return Stopped::Failed(error),
                // The watch was too old; the watcher lists again.
                Err(_) => continue,
            };
            if self.changes.send(change).await.is_err() {
                return Stopped::Unwanted;
            }
        }
    }

    /// Reports the error, and waits before the next try; `false` if the receiver was dropped.
    async fn failed(&self, error: &kube::Error) -> bool {
        let told = self
            .changes
            .send(Change::Gap(gap(self.resource, error)))
            .await;
        tokio::time::sleep(AGAIN).await;
        told.is_ok()
    }
}

/// Watches all objects of a resource.
async fn everywhere<T>(watched: Watched<T>, api: Api<T>)
where
    T: Described<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + 'static,
{
    while let Stopped::Failed(error) = watched.follow(api.clone(), &Scope::All).await {
        if !watched.failed(&error).await {
            return;
        }
    }
}

/// Watches the objects of all namespaces, or those of the context's namespace if the user may not watch all.
async fn where_allowed<T>(
    watched: Watched<T>,
    cluster: Cluster,
    here: fn(kube::Client, &str) -> Api<T>,
) where
    T: Described<DynamicType = (), Scope = NamespaceResourceScope>
        + Clone
        + Debug
        + DeserializeOwned
        + Send
        + 'static,
{
    let resource = watched.resource;
    loop {
        let api = Api::all(cluster.client());
        let Stopped::Failed(error) = watched.follow(api, &Scope::All).await else {
            return;
        };
        let missing = gap(resource, &error);
        if missing.cause != Cause::Forbidden {
            if !watched.failed(&error).await {
                return;
            }
            continue;
        }
        let only_here = Change::Gap(only_here(&missing, &cluster.namespace));
        if watched.changes.send(only_here).await.is_err() {
            return;
        }
        let scope = Scope::Namespace(cluster.namespace.clone());
        let api = here(cluster.client(), &cluster.namespace);
        match watched.follow(api, &scope).await {
            Stopped::Unwanted => return,
            Stopped::Failed(error) => {
                if !watched.failed(&error).await {
                    return;
                }
            }
        }
    }
}

/// Reads the prices from time to time: a watch would need another right.
async fn prices(cluster: Cluster, changes: Sender<Change>) {
    let maps = Api::<ConfigMap>::namespaced(cluster.client(), &cluster.system);
    loop {
        let change = match maps.get_opt(PRICES).await {
            Ok(map) => Change::Prices(map.and_then(|it| it.data)),
            Err(error) => Change::Gap(gap(Resource::Prices, &error)),
        };
        if changes.send(change).await.is_err() {
            return;
        }
        tokio::time::sleep(PRICES_AGAIN).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::ANSWER;

    #[test]
    fn an_idle_watch_ends_before_the_client_takes_it_for_lost() {
        // kube's watcher waits this much longer for the end.
        let margin = 5;
        assert!(u64::from(WATCH) + margin < ANSWER.as_secs());
    }
}
