//! Reads from the kubelet's pod resources socket which claims the pods of this node use. That needs no
//! request to the API server and no RBAC rule.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use futures::future::BoxFuture;
use tranche_driver::journal::Record;
use tranche_driver::preparation::PreparedDevice;

use crate::kubelet::proto::podresources::ListPodResourcesRequest;
use crate::kubelet::proto::podresources::pod_resources_lister_client::PodResourcesListerClient;
use crate::kubelet::sockets::connect;

/// The time limit for the kubelet's answer.
const DEADLINE: Duration = Duration::from_secs(10);

/// The longest answer: the limit of the kubelet's own client (`podresources.DefaultMaxMsgSize`).
const LONGEST: usize = 16 << 20;

/// A container of a pod of the node.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Container {
    /// The pod's namespace.
    pub namespace: String,
    /// The pod.
    pub pod: String,
    /// Its name.
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
    pub fn pods(&self, record: &Record) -> BTreeSet<String> {
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
    /// Its socket.
    pub socket: PathBuf,
    /// Why not.
    pub problem: String,
}

/// A source of what the pods of the node use.
pub trait Kubelet: Send + Sync + fmt::Debug {
    /// What they use now, without pods that have ended and without claims that only ordinary init
    /// containers use, or no container at all.
    fn in_use(&self) -> BoxFuture<'_, Result<InUse, PodResourcesError>>;
}

/// The kubelet's pod resources service.
#[derive(Clone, Debug)]
pub struct PodResources {
    socket: PathBuf,
}

impl PodResources {
    /// Uses the socket at `socket`.
    #[must_use]
    pub fn new(socket: PathBuf) -> Self {
        Self { socket }
    }

    async fn list(&self) -> Result<InUse, String> {
        let channel = connect(&self.socket, "localhost").await;
        let channel = channel.map_err(|e| e.to_string())?;
        let mut client = PodResourcesListerClient::new(channel).max_decoding_message_size(LONGEST);
        let answer = client.list(ListPodResourcesRequest {}).await;
        let pods = answer
            .map_err(|e| e.to_string())?
            .into_inner()
            .pod_resources;
        let mut pairs = Vec::new();
        let names = pods.iter();
        let names = names.map(|pod| (pod.namespace.clone(), pod.name.clone()));
        let names: BTreeSet<_> = names.collect();
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
        let mut in_use: InUse = pairs.into_iter().collect();
        // Also those without a device.
        in_use.pods = names;
        Ok(in_use)
    }
}

impl Kubelet for PodResources {
    fn in_use(&self) -> BoxFuture<'_, Result<InUse, PodResourcesError>> {
        Box::pin(async {
            let listed = tokio::time::timeout(DEADLINE, self.list()).await;
            listed
                .unwrap_or_else(|_| Err(format!("no answer within {} s", DEADLINE.as_secs())))
                .map_err(|problem| PodResourcesError {
                    socket: self.socket.clone(),
                    problem,
                })
        })
    }
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
        let in_use = PodResources::new(path).in_use().await.unwrap();
        assert!(in_use.pods(&a).iter().eq(["web-0", "web-1"]));
        assert!(in_use.pods(&b).is_empty());
        let users = in_use.users(&a.plan.devices[0]);
        let users: Vec<_> = users
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
        let error = PodResources::new("/nowhere/kubelet.sock".into());
        let error = error.in_use().await.unwrap_err().to_string();
        assert!(error.contains("/nowhere/kubelet.sock"), "{error}");
    }
}
