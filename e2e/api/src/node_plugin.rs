//! The node plugin of a hollow node: the real writer of GpuNodes, with the rights of its pod, for an invented driver.

use std::sync::Arc;

use anyhow::{Context, bail};
use k8s_openapi::api::core::v1::{Node, Pod};
use kube::{Api, ResourceExt};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tranche_api::gpu_node::{Gpu, GpuVfio, Inventory, MigMode};
use tranche_api::quantity::Quantity;
use tranche_driver::competing_drivers::{Observations, verdict};
use tranche_driver::mig::tables;
use tranche_kubelet_plugin::cluster::events::Events;
use tranche_kubelet_plugin::cluster::gpu_node::{GpuNodeWriter, Sources};
use tranche_kubelet_plugin::cluster::node_policy::NodePolicy;
use tranche_kubelet_plugin::gpu::driver_state::{DriverState, Ready};
use tranche_kubelet_plugin::kubelet::registration::Registered;
use tranche_kubelet_plugin::ledger::Refused;
use tranche_serving::Clock;

use crate::account;
use crate::control_plane::ControlPlane;

const GPUS: u32 = 2;

/// Keeps the GpuNode of the pod's node up to date until this future is dropped.
pub(crate) async fn run(control_plane: &ControlPlane, pod: &Pod) -> anyhow::Result<()> {
    let node = pod
        .spec
        .as_ref()
        .and_then(|spec| spec.node_name.clone())
        .context("a node")?;
    let client = control_plane
        .client_with(&account::token(control_plane, pod).await?)
        .await?;
    let nodes: Api<Node> = Api::all(client.clone());
    let inventory = inventory(&nodes.get(&node).await?.uid().context("the node's UID")?);
    let others = verdict(&inventory, &Observations::default());
    let ready = Ready {
        inventory,
        hang: None,
        withheld: Vec::new(),
        spec: None,
        dev_root: "/".into(),
        dev_root_on_host: "/".into(),
    };
    let sources = Sources {
        driver: unread(DriverState::Ready(Arc::new(ready))),
        others: unread(Some(others)),
        unowned: unread(Vec::new()),
        daemons: unread(Vec::new()),
        health: unread(None),
        registered: unread(Registered {
            count: 1,
            now: true,
        }),
        refused: unread(Refused::default()),
    };
    let events = Events::new(client.clone(), &node);
    let writer = GpuNodeWriter::new(client, node, events, Clock::system(), Arc::default());
    let policy = watch::channel(NodePolicy::default()).0;
    Box::pin(writer.run(sources, policy, CancellationToken::new())).await;
    bail!("the writer of the GpuNode ended")
}

/// A receiver that has not read its value.
fn unread<T>(value: T) -> watch::Receiver<T> {
    let mut unread = watch::channel(value).1;
    unread.mark_changed();
    unread
}

/// The GPUs of the machine that `make cluster-up` simulates. Their UUIDs begin with a number of the GPU and one of the node, because
/// devices are named by these digits.
fn inventory(node: &str) -> Inventory {
    let gpus = (0..GPUS).map(|number| Gpu {
        uuid: format!("GPU-{number}{}", &node[1..]),
        minor: number,
        index: Some(number),
        product_name: "Simulated H100 80GB HBM3".to_owned(),
        brand: "Nvidia".to_owned(),
        architecture: "Hopper".to_owned(),
        cuda_compute_capability: "9.0".to_owned(),
        pci_bus_id: format!("0000:{:02x}:00.0", 16 + number),
        pcie_root: Some(format!("pci0000:{:02x}", 15 + number)),
        numa_node: Some(number % 2),
        memory: Quantity::from_bytes(81_559 << 20),
        reserved_memory: Quantity::from_bytes(551 << 20),
        context_memory: None,
        multiprocessors: Some(132),
        mig_capable: true,
        mig_mode: MigMode::default(),
        mig_instances: Vec::new(),
        vfio: Some(GpuVfio {
            iommu_group: number,
            obstacle: None,
        }),
        vgpu: None,
    });
    let mut inventory = Inventory::new("535.261.03".to_owned(), "12.2".to_owned(), gpus.collect());
    let uuids: Vec<_> = inventory.gpus.iter().map(|gpu| gpu.uuid.as_str()).collect();
    inventory.mig_geometries = vec![tables::h100(&uuids)];
    inventory
}
