//! A gRPC service in the kubelet's place on a real socket, and device plugins that start and end.

use std::os::unix::net::UnixListener;
use std::sync::Mutex;

use serde_json::json;
use tonic::transport::Server;
use tonic::{Request, Response, Status};

use super::*;
use crate::kubelet::pod_resources::PodResources;
use crate::kubelet::proto::podresources as proto;
use crate::kubelet::proto::podresources::pod_resources_lister_server::{
    PodResourcesLister, PodResourcesListerServer,
};
use crate::kubelet::sockets::Socket;
use crate::testing::{NODE, World};

const SLICES: &str = "/apis/resource.k8s.io/v1/resourceslices";

/// The kubelet's pod resources service, with what device plugins told it.
#[derive(Clone, Debug, Default)]
struct KubeletService {
    offered: Arc<Mutex<Vec<proto::ContainerDevices>>>,
    pods: Arc<Mutex<Vec<proto::PodResources>>>,
}

#[tonic::async_trait]
impl PodResourcesLister for KubeletService {
    async fn list(
        &self,
        _: Request<proto::ListPodResourcesRequest>,
    ) -> Result<Response<proto::ListPodResourcesResponse>, Status> {
        let pod_resources = self.pods.lock().unwrap().clone();
        Ok(Response::new(proto::ListPodResourcesResponse {
            pod_resources,
        }))
    }

    async fn get_allocatable_resources(
        &self,
        _: Request<proto::AllocatableResourcesRequest>,
    ) -> Result<Response<proto::AllocatableResourcesResponse>, Status> {
        let devices = self.offered.lock().unwrap().clone();
        Ok(Response::new(proto::AllocatableResourcesResponse {
            devices,
        }))
    }
}

struct Node {
    world: World,
    folders: SocketFolders,
    kubelet: KubeletService,
    uuids: Vec<String>,
    socket: Option<Socket>,
}

impl Node {
    fn new() -> Self {
        let world = World::new();
        let root = world.dir.path();
        let folders = SocketFolders {
            device_plugins: root.join("device-plugins"),
            registry: world.layout.registry.clone(),
        };
        let gpus = &world.ready.inventory.gpus;
        Self {
            uuids: gpus.iter().map(|gpu| gpu.uuid.clone()).collect(),
            world,
            folders,
            kubelet: KubeletService::default(),
            socket: None,
        }
    }

    fn with_kubelet() -> Self {
        let mut node = Self::new();
        let (socket, incoming) = Socket::listen(&node.kubelet_socket()).unwrap();
        let service = PodResourcesListerServer::new(node.kubelet.clone());
        tokio::spawn(
            Server::builder()
                .add_service(service)
                .serve_with_incoming(incoming),
        );
        node.socket = Some(socket);
        node
    }

    fn kubelet_socket(&self) -> PathBuf {
        self.world.dir.path().join("kubelet.sock")
    }

    fn search(&self) -> CompetingDriverSearch {
        CompetingDriverSearch::new(
            self.folders.clone(),
            Arc::new(PodResources::new(self.kubelet_socket())),
            self.world.api.client(),
            NODE.to_owned(),
        )
    }

    async fn withheld(&self) -> Vec<String> {
        let seen = self.search().observe().await;
        let verdict = verdict(&self.world.ready.inventory, &seen);
        verdict
            .withheld
            .into_iter()
            .map(|entry| entry.gpu)
            .collect()
    }

    /// A plugin's socket in a folder; when it is dropped, the file stays and does not accept
    /// connections.
    fn plugin(folder: &Path, name: &str) -> UnixListener {
        std::fs::create_dir_all(folder).unwrap();
        let path = folder.join(name);
        let _ = std::fs::remove_file(&path);
        UnixListener::bind(path).unwrap()
    }
}

fn devices(resource: &str, ids: &[&str]) -> proto::ContainerDevices {
    proto::ContainerDevices {
        resource_name: resource.to_owned(),
        device_ids: ids.iter().map(|id| (*id).to_owned()).collect(),
    }
}

fn pod(name: &str, container: proto::ContainerResources) -> proto::PodResources {
    proto::PodResources {
        name: name.to_owned(),
        namespace: "team".to_owned(),
        containers: vec![container],
    }
}

#[tokio::test]
async fn a_device_plugins_gpus_are_those_that_the_kubelet_names() {
    let node = Node::with_kubelet();
    assert_eq!(node.withheld().await, [""; 0]);
    let replica = format!("{}::3", node.uuids[1]);
    *node.kubelet.offered.lock().unwrap() = vec![devices("nvidia.com/gpu.shared", &[&replica])];
    assert_eq!(node.withheld().await, [node.uuids[1].clone()]);

    // The plugin is gone; a pod that it served still holds the other GPU.
    node.kubelet.offered.lock().unwrap().clear();
    *node.kubelet.pods.lock().unwrap() = vec![pod(
        "train",
        proto::ContainerResources {
            devices: vec![devices("nvidia.com/gpu", &[&node.uuids[0]])],
            ..proto::ContainerResources::default()
        },
    )];
    assert_eq!(node.withheld().await, [node.uuids[0].clone()]);
    node.kubelet.pods.lock().unwrap().clear();
    assert_eq!(node.withheld().await, [""; 0]);
}

#[tokio::test]
async fn a_socket_file_of_a_dead_plugin_is_ignored() {
    // There is no kubelet, so a running plugin counts for all GPUs.
    let node = Node::new();
    let folder = node.folders.device_plugins.clone();
    assert_eq!(node.withheld().await, [""; 0], "no folder, no plugin");
    let plugin = Node::plugin(&folder, "nvidia-gpu.sock");
    assert_eq!(node.withheld().await, node.uuids);
    drop(plugin);
    assert!(folder.join("nvidia-gpu.sock").exists());
    assert_eq!(node.withheld().await, [""; 0]);
    // Other plugins and the kubelet's own files do not count.
    let _others = [
        Node::plugin(&folder, "kubelet.sock"),
        Node::plugin(&folder, "rdma.sock"),
    ];
    std::fs::write(folder.join("nvidia-gpu.txt"), "").unwrap();
    assert_eq!(node.withheld().await, [""; 0]);
}

#[tokio::test]
async fn nvidias_dra_driver_is_noticed_by_its_socket_and_its_slices() {
    let node = Node::with_kubelet();
    let slice = json!({
        "metadata": {"name": "theirs"},
        "spec": {
            "driver": "gpu.nvidia.com", "nodeName": NODE,
            "pool": {"name": NODE, "generation": 1, "resourceSliceCount": 1},
            "devices": [
                {"name": "gpu-0", "attributes": {"uuid": {"string": node.uuids[1]}}},
                {"name": "no-uuid", "attributes": {}},
            ],
        },
    });
    let list = json!({"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSliceList", "metadata": {}, "items": [slice]});
    node.world.api.put_at(SLICES, list);
    assert_eq!(node.withheld().await, [""; 0], "its driver does not run");

    let driver = Node::plugin(&node.folders.registry, "gpu.nvidia.com-reg.sock");
    assert_eq!(node.withheld().await, [node.uuids[1].clone()]);
    drop(driver);
    assert_eq!(node.withheld().await, [""; 0]);
    let rolling = Node::plugin(&node.folders.registry, "gpu.nvidia.com-8d1f-reg.sock");
    assert_eq!(node.withheld().await, [node.uuids[1].clone()]);
    drop(rolling);
    let other = Node::plugin(&node.folders.registry, "compute-domain.nvidia.com-reg.sock");
    assert_eq!(node.withheld().await, [""; 0]);
    drop(other);

    // The driver is gone, and a pod still holds a claim of it.
    let held = proto::ClaimResource {
        driver_name: "gpu.nvidia.com".to_owned(),
        device_name: "gpu-0".to_owned(),
        ..proto::ClaimResource::default()
    };
    *node.kubelet.pods.lock().unwrap() = vec![pod(
        "train",
        proto::ContainerResources {
            dynamic_resources: vec![proto::DynamicResource {
                claim_resources: vec![held],
                ..proto::DynamicResource::default()
            }],
            ..proto::ContainerResources::default()
        },
    )];
    assert_eq!(node.withheld().await, [node.uuids[1].clone()]);
    node.world.api.delete_at(SLICES);
    assert_eq!(
        node.withheld().await,
        node.uuids,
        "nobody says which GPU it is"
    );
}

#[tokio::test(start_paused = true)]
async fn what_changes_is_noticed_within_seconds_and_heals() {
    let node = Node::new();
    let (_driver, driver) = watch::channel(DriverState::Ready(Arc::clone(&node.world.ready)));
    let (found, mut verdicts) = watch::channel(None);
    let stop = CancellationToken::new();
    tokio::spawn(node.search().run(driver, found, stop.clone()));
    let mut until = async |count: usize| {
        let is =
            |verdict: &Option<Verdict>| verdict.as_ref().is_some_and(|v| v.withheld.len() == count);
        let began = tokio::time::Instant::now();
        timeout(Duration::from_mins(1), verdicts.wait_for(is))
            .await
            .unwrap()
            .unwrap();
        began.elapsed()
    };
    until(0).await;
    let plugin = Node::plugin(&node.folders.device_plugins, "nvidia-gpu.sock");
    let noticed = until(2).await;
    drop(plugin);
    let healed = until(0).await;
    stop.cancel();
    for took in [noticed, healed] {
        assert!(took <= EVERY + DEADLINE, "{took:?}");
    }
}
