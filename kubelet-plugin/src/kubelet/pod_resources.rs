//! Reads from the kubelet's pod resources socket which claims and which other devices the pods of this node use. That needs no
//! request to the API server and no RBAC rule.
//!
//! There is one client: parts that ask at the same time, or a moment later, get the same answer.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use tokio::sync::Mutex;
use tokio::time::Instant;
use tonic::transport::Channel;
use tranche_driver::competing_drivers::{Kubelet as Others, NVIDIA_DRIVER, PluginDevice};
use tranche_driver::journal::ClaimRecord;
use tranche_driver::preparation::PreparedDevice;

use crate::kubelet::proto::podresources::pod_resources_lister_client::PodResourcesListerClient;
use crate::kubelet::proto::podresources::{
    AllocatableResourcesRequest, ContainerDevices, ListPodResourcesRequest, PodResources as Pod,
};
use crate::kubelet::sockets::connect;

/// The time limit for the kubelet's answer.
const DEADLINE: Duration = Duration::from_secs(10);

/// The longest answer: the limit of the kubelet's own client (`podresources.DefaultMaxMsgSize`).
const LONGEST: usize = 16 << 20;

/// A container of a pod of the node.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Container {
    pub namespace: String,
    pub pod: String,
    pub name: String,
}

/// What the pods of a node use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InUse {
    /// The containers that have a CDI device.
    devices: BTreeMap<String, BTreeSet<Container>>,
    /// All pods, by namespace and name.
    pods: BTreeSet<(String, String)>,
}

impl InUse {
    /// The containers that use a claim's device.
    pub fn users(&self, device: &PreparedDevice) -> impl Iterator<Item = &Container> {
        // The claim's own id is the first; the others are the driver's.
        let own = device.cdi_ids.first();
        own.and_then(|id| self.devices.get(id))
            .into_iter()
            .flatten()
    }

    /// Whether the kubelet has a pod of this name.
    #[must_use]
    pub fn has_pod(&self, namespace: &str, name: &str) -> bool {
        self.pods.contains(&(namespace.to_owned(), name.to_owned()))
    }

    /// The pods that use a claim, by the claim's own CDI devices; none if the kubelet lists none. CDI
    /// device names contain the claim's UID, so another claim of the same name is not confused with it.
    #[must_use]
    pub fn pods(&self, record: &ClaimRecord) -> BTreeSet<String> {
        let devices = record.plan.devices.iter();
        let users = devices.flat_map(|device| self.users(device));
        users.map(|container| container.pod.clone()).collect()
    }
}

impl FromIterator<(String, Container)> for InUse {
    /// From pairs of a CDI device and a container.
    fn from_iter<T: IntoIterator<Item = (String, Container)>>(pairs: T) -> Self {
        let mut in_use = Self::default();
        for (device, container) in pairs {
            let pod = (container.namespace.clone(), container.pod.clone());
            in_use.pods.insert(pod);
            in_use.devices.entry(device).or_default().insert(container);
        }
        in_use
    }
}

/// The kubelet did not answer.
#[derive(Debug, thiserror::Error)]
#[error("the kubelet does not list on {socket} what its pods use: {problem}")]
pub struct PodResourcesError {
    pub socket: PathBuf,
    pub problem: String,
}

/// One answer of the kubelet.
#[derive(Clone, Debug)]
pub struct Listing {
    /// What the pods use of this driver, without pods that have ended and without claims that only ordinary init
    /// containers use, or no container at all.
    pub in_use: InUse,
    /// Devices of other systems; an error if the kubelet does not say what device plugins offer.
    pub others: Result<Others, String>,
}

/// A source of what the pods of the node use.
pub trait Kubelet: Send + Sync + fmt::Debug {
    /// What they use now, or used at most `max_age` ago.
    fn list(&self, max_age: Duration) -> BoxFuture<'_, Result<Arc<Listing>, PodResourcesError>>;
}

/// The kubelet's pod resources service.
#[derive(Debug)]
pub struct PodResources {
    socket: PathBuf,
    /// The newest answer, and when it was asked for. Locked while the kubelet is asked, so that all who wait get that answer.
    newest: Mutex<Option<(Instant, Arc<Listing>)>>,
}

type Client = PodResourcesListerClient<Channel>;

impl PodResources {
    /// Uses the socket at `socket`.
    #[must_use]
    pub fn new(socket: PathBuf) -> Self {
        Self {
            socket,
            newest: Mutex::default(),
        }
    }

    async fn newest(&self, oldest: Instant) -> Result<Arc<Listing>, String> {
        let mut newest = self.newest.lock().await;
        if let Some((asked, listing)) = &*newest
            && *asked >= oldest
        {
            return Ok(Arc::clone(listing));
        }
        let asked = Instant::now();
        let listing = Arc::new(self.ask().await?);
        *newest = Some((asked, Arc::clone(&listing)));
        Ok(listing)
    }

    async fn ask(&self) -> Result<Listing, String> {
        let channel = connect(&self.socket, "localhost")
            .await
            .map_err(|error| reason(&error))?;
        let mut client = Client::new(channel).max_decoding_message_size(LONGEST);
        // The list comes last, so that it has a device that a pod gets in between.
        let offered = client
            .get_allocatable_resources(AllocatableResourcesRequest {})
            .await;
        let listed = client.list(ListPodResourcesRequest {}).await;
        let pods = listed
            .map_err(|e| e.to_string())?
            .into_inner()
            .pod_resources;
        let others = offered
            .map_err(|e| e.to_string())
            .map(|offered| others(&offered.into_inner().devices, &pods));
        Ok(Listing {
            in_use: in_use(pods),
            others,
        })
    }
}

impl Kubelet for PodResources {
    fn list(&self, max_age: Duration) -> BoxFuture<'_, Result<Arc<Listing>, PodResourcesError>> {
        // An answer that is asked for after this moment is new enough for this caller.
        let now = Instant::now();
        let oldest = now.checked_sub(max_age).unwrap_or(now);
        Box::pin(async move {
            let listed = tokio::time::timeout(DEADLINE, self.newest(oldest)).await;
            listed
                .unwrap_or_else(|_| Err(format!("no answer within {} s", DEADLINE.as_secs())))
                .map_err(|problem| PodResourcesError {
                    socket: self.socket.clone(),
                    problem,
                })
        })
    }
}

fn in_use(pods: Vec<Pod>) -> InUse {
    let names: BTreeSet<_> = pods
        .iter()
        .map(|pod| (pod.namespace.clone(), pod.name.clone()))
        .collect();
    let mut pairs = Vec::new();
    for pod in pods {
        for container in pod.containers {
            let user = Container {
                namespace: pod.namespace.clone(),
                pod: pod.name.clone(),
                name: container.name,
            };
            let claims = container.dynamic_resources.into_iter();
            let devices = claims.flat_map(|claim| claim.claim_resources);
            let ids = devices.flat_map(|device| device.cdi_devices);
            pairs.extend(ids.map(|id| (id.name, user.clone())));
        }
    }
    let in_use: InUse = pairs.into_iter().collect();
    // This adds the pods without a device.
    InUse {
        pods: names,
        ..in_use
    }
}

/// What device plugins offer, and what pods hold of them and of NVIDIA's DRA driver.
fn others(offered: &[ContainerDevices], pods: &[Pod]) -> Others {
    let mut others = Others {
        offered: offered.iter().flat_map(plugin_devices).collect(),
        ..Others::default()
    };
    for pod in pods {
        let name = format!("{}/{}", pod.namespace, pod.name);
        for container in &pod.containers {
            for device in container.devices.iter().flat_map(plugin_devices) {
                others.held.push((name.clone(), device));
            }
            let claims = container.dynamic_resources.iter();
            for device in claims.flat_map(|claim| &claim.claim_resources) {
                if device.driver_name == NVIDIA_DRIVER {
                    let device = device.device_name.clone();
                    others.claimed.push((name.clone(), device));
                }
            }
        }
    }
    others
}

fn plugin_devices(devices: &ContainerDevices) -> impl Iterator<Item = PluginDevice> + '_ {
    devices.device_ids.iter().map(|id| PluginDevice {
        resource: devices.resource_name.clone(),
        id: id.clone(),
    })
}

/// The innermost cause, because the transport's message says nothing.
fn reason(error: &dyn std::error::Error) -> String {
    let mut error = error;
    while let Some(source) = error.source() {
        error = source;
    }
    error.to_string()
}

#[cfg(test)]
mod tests {
    use tonic::transport::Server;
    use tonic::{Request, Response, Status};

    use super::*;
    use crate::kubelet::proto::podresources as proto;
    use crate::kubelet::proto::podresources::pod_resources_lister_server::{
        PodResourcesLister, PodResourcesListerServer,
    };
    use crate::kubelet::sockets::Socket;
    use crate::testing::{World, capped, claim};

    #[derive(Debug)]
    struct Scripted(proto::ListPodResourcesResponse);

    #[tonic::async_trait]
    impl PodResourcesLister for Scripted {
        async fn list(
            &self,
            _: Request<proto::ListPodResourcesRequest>,
        ) -> Result<Response<proto::ListPodResourcesResponse>, Status> {
            Ok(Response::new(self.0.clone()))
        }

        async fn get_allocatable_resources(
            &self,
            _: Request<proto::AllocatableResourcesRequest>,
        ) -> Result<Response<proto::AllocatableResourcesResponse>, Status> {
            Ok(Response::new(proto::AllocatableResourcesResponse::default()))
        }
    }

    fn pod(name: &str, devices: &[&str]) -> proto::PodResources {
        let cdi_devices = devices.iter().map(|name| proto::CdiDevice {
            name: (*name).to_owned(),
        });
        let resource = proto::ClaimResource {
            cdi_devices: cdi_devices.collect(),
            ..proto::ClaimResource::default()
        };
        let used = proto::DynamicResource {
            claim_resources: vec![resource],
            ..proto::DynamicResource::default()
        };
        let container = proto::ContainerResources {
            name: "main".to_owned(),
            dynamic_resources: vec![used],
            ..proto::ContainerResources::default()
        };
        proto::PodResources {
            name: name.to_owned(),
            namespace: "team".to_owned(),
            containers: vec![proto::ContainerResources::default(), container],
        }
    }

    #[tokio::test]
    async fn a_claims_pods_are_those_with_its_own_cdi_devices() {
        let world = World::new();
        for name in ["a", "b"] {
            world.api.put(claim(name, &[capped("gpu", 0, "1Gi", 10)]));
        }
        let (a, b) = (world.prepare("a").await, world.prepare("b").await);
        let [own, driver] = &a.plan.devices[0].cdi_ids[..] else {
            panic!("{a:?}")
        };
        let pods = vec![
            pod("web-1", &[own, driver]),
            pod("web-0", &[driver, own]),
            pod("web-0", &[own]),
            pod("other", &[driver, "vendor.com/gpu=0"]),
        ];
        let response = proto::ListPodResourcesResponse {
            pod_resources: pods,
        };
        let path = world.dir.path().join("kubelet.sock");
        let (_socket, incoming) = Socket::listen(&path).unwrap();
        let service = PodResourcesListerServer::new(Scripted(response));
        let server = Server::builder().add_service(service);
        tokio::spawn(server.serve_with_incoming(incoming));
        let kubelet = PodResources::new(path);
        let asked = Instant::now();
        let listing = kubelet.list(Duration::ZERO).await.unwrap();
        // Only a caller that accepts an answer of this age gets the same one.
        let known = kubelet.list(Duration::from_mins(1)).await.unwrap();
        assert!(Arc::ptr_eq(&listing, &known));
        let waits = tokio::time::sleep_until(asked + Duration::from_millis(20));
        waits.await;
        let anew = kubelet.list(Duration::ZERO).await.unwrap();
        assert!(!Arc::ptr_eq(&listing, &anew));
        let in_use = &listing.in_use;
        assert!(in_use.pods(&a).iter().eq(["web-0", "web-1"]));
        assert!(in_use.pods(&b).is_empty());
        let users: Vec<_> = in_use
            .users(&a.plan.devices[0])
            .map(|it| (&*it.namespace, &*it.pod, &*it.name))
            .collect();
        assert_eq!(
            users,
            [("team", "web-0", "main"), ("team", "web-1", "main")]
        );
        assert!(in_use.has_pod("team", "other") && !in_use.has_pod("team", "web-2"));
    }

    #[tokio::test]
    async fn a_kubelet_without_the_socket_is_named() {
        let kubelet = PodResources::new("/nowhere/kubelet.sock".into());
        let error = kubelet.list(Duration::ZERO).await.unwrap_err().to_string();
        assert!(error.contains("/nowhere/kubelet.sock"), "{error}");
    }
}
