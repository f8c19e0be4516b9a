//! Searches every few seconds for other systems that hand out this node's GPUs (NVIDIA's device
//! plugin, its DRA driver, HAMi): plugins that accept connections, their devices in the kubelet, and
//! the slices of NVIDIA's DRA driver. [`tranche_driver::competing_drivers`] evaluates the findings.

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use k8s_openapi::api::resource::v1::ResourceSlice;
use kube::api::ListParams;
use kube::{Api, Client};
use tokio::net::UnixStream;
use tokio::sync::watch;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};
use tranche_api::gpu_node::Inventory;
use tranche_driver::competing_drivers::{self, NVIDIA_DRIVER, Observations, Verdict, verdict};

use crate::cluster::api_server::within;
use crate::gpu::driver_state::DriverState;
use crate::kubelet::pod_resources::Kubelet;

/// How often to search: the longest time until another system, or its end, is detected.
const EVERY: Duration = Duration::from_secs(5);
/// The time limit for an answer of a plugin or the kubelet.
const DEADLINE: Duration = Duration::from_secs(3);
/// How old the kubelet's answer may be: another part may have asked a moment ago.
const POD_RESOURCES_AGE: Duration = Duration::from_secs(4);
/// How often the API server is asked for the slices of NVIDIA's DRA driver while it runs.
const SLICES_EVERY: Duration = Duration::from_secs(30);

/// The folders to search.
#[derive(Clone, Debug)]
pub struct SocketFolders {
    /// The kubelet's `device-plugins`, where device plugins have their sockets.
    pub device_plugins: PathBuf,
    /// The kubelet's `plugins_registry`, where DRA drivers have their registration sockets.
    pub registry: PathBuf,
}

/// The API server's answer: GPU UUIDs by device, or why there is none.
type PublishedDevices = Result<BTreeMap<String, String>, String>;

/// Searches for other systems.
pub struct CompetingDriverSearch {
    folders: SocketFolders,
    kubelet: Arc<dyn Kubelet>,
    slices: Api<ResourceSlice>,
    node: String,
    /// The newest answer of the API server, and when it was asked.
    published: Option<(Instant, PublishedDevices)>,
}

impl fmt::Debug for CompetingDriverSearch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CompetingDriverSearch")
            .field("folders", &self.folders)
            .finish_non_exhaustive()
    }
}

impl CompetingDriverSearch {
    /// A search on the node `node`.
    #[must_use]
    pub fn new(
        folders: SocketFolders,
        kubelet: Arc<dyn Kubelet>,
        client: Client,
        node: String,
    ) -> Self {
        Self {
            folders,
            kubelet,
            slices: Api::all(client),
            node,
            published: None,
        }
    }

    /// Keeps `found` up to date until cancelled; it starts when the driver was checked.
    pub async fn run(
        mut self,
        mut driver: watch::Receiver<DriverState>,
        found: watch::Sender<Option<Verdict>>,
        stop: CancellationToken,
    ) {
        let mut ticks = tokio::time::interval(EVERY);
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                _ = ticks.tick() => {}
                Ok(()) = driver.changed() => {}
            }
            let inventory = match &*driver.borrow_and_update() {
                DriverState::Unknown => continue,
                DriverState::Absent(_) => Inventory::default(),
                DriverState::Ready(ready) => ready.inventory.clone(),
            };
            let seen = self.observe().await;
            publish(&found, verdict(&inventory, &seen));
        }
    }

    /// Observes everything once.
    async fn observe(&mut self) -> Observations {
        let SocketFolders {
            device_plugins,
            registry,
        } = self.folders.clone();
        let (plugin_sockets, dra_sockets, kubelet) = tokio::join!(
            live_sockets(&device_plugins, is_plugin_socket),
            live_sockets(&registry, is_dra_socket),
            self.ask_kubelet(),
        );
        let claimed = kubelet.as_ref().is_ok_and(|k| !k.claimed.is_empty());
        let slices = if dra_sockets.is_empty() && !claimed {
            self.published = None;
            None
        } else {
            Some(self.slices().await)
        };
        Observations {
            kubelet: Some(kubelet),
            plugin_sockets,
            dra_sockets,
            slices,
        }
    }

    /// The kubelet's device plugins, and the pods that hold devices of other systems.
    async fn ask_kubelet(&self) -> Result<competing_drivers::Kubelet, String> {
        let listing = timeout(DEADLINE, self.kubelet.list(POD_RESOURCES_AGE))
            .await
            .map_err(|_| format!("no answer within {} s", DEADLINE.as_secs()))?
            .map_err(|error| error.to_string())?;
        listing.others.clone()
    }

    /// The devices of NVIDIA's DRA driver on this node, with the UUIDs of their GPUs.
    async fn slices(&mut self) -> PublishedDevices {
        let fresh =
            |(at, answer): &(Instant, Result<_, _>)| answer.is_ok() && at.elapsed() < SLICES_EVERY;
        if let Some((_, answer)) = self.published.as_ref().filter(|known| fresh(known)) {
            return answer.clone();
        }
        let fields = format!("spec.nodeName={},spec.driver={NVIDIA_DRIVER}", self.node);
        // The API server answers from its cache: that is as current and as cheap as a watch.
        let params = ListParams::default().fields(&fields).match_any();
        let answer = match within(self.slices.list(&params)).await {
            Ok(Ok(list)) => Ok(list.items.iter().flat_map(uuids).collect()),
            Ok(Err(error)) => Err(error.to_string()),
            Err(silent) => Err(silent.to_string()),
        };
        self.published = Some((Instant::now(), answer.clone()));
        answer
    }
}

fn publish(found: &watch::Sender<Option<Verdict>>, new: Verdict) {
    found.send_if_modified(|known| {
        if known.as_ref() == Some(&new) {
            return false;
        }
        if !new.condition.holds {
            warn!(
                message = new.condition.message,
                "another system hands out GPUs of this node"
            );
        } else if known.as_ref().is_some_and(|known| !known.condition.holds) {
            info!("no other system hands out GPUs of this node any more");
        }
        *known = Some(new);
        true
    });
}

/// `nvidia-gpu.sock`, `nvidia-gpu.shared.sock`, `nvidia-mig-1g.10gb.sock`, and HAMi's.
fn is_plugin_socket(name: &str) -> bool {
    name.starts_with("nvidia-") && has_socket_extension(name)
}

/// `gpu.nvidia.com-reg.sock`, with rolling updates `gpu.nvidia.com-<uid>-reg.sock`.
fn is_dra_socket(name: &str) -> bool {
    name.strip_prefix(NVIDIA_DRIVER)
        .is_some_and(|rest| rest.starts_with('-') && rest.ends_with("-reg.sock"))
}

fn has_socket_extension(name: &str) -> bool {
    Path::new(name).extension().is_some_and(|e| e == "sock")
}

/// The sockets of a folder that accept a connection, by name. A file that a dead plugin left does not.
/// A missing folder has none.
async fn live_sockets(folder: &Path, is_meant: fn(&str) -> bool) -> BTreeSet<String> {
    let names = match socket_names(folder, is_meant) {
        Ok(names) => names,
        Err(error) => {
            if error.kind() != io::ErrorKind::NotFound {
                warn!(%error, folder = %folder.display(), "cannot search for other device plugins and drivers");
            }
            return BTreeSet::new();
        }
    };
    let mut live = BTreeSet::new();
    for name in names {
        let connected = timeout(DEADLINE, UnixStream::connect(folder.join(&name))).await;
        // A timeout also means that the plugin is alive: its queue is full.
        if !matches!(connected, Ok(Err(_))) {
            live.insert(name);
        }
    }
    live
}

fn socket_names(folder: &Path, is_meant: fn(&str) -> bool) -> io::Result<Vec<String>> {
    let mut names = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        if let Ok(name) = entry?.file_name().into_string()
            && is_meant(&name)
        {
            names.push(name);
        }
    }
    Ok(names)
}

/// The devices of a slice of NVIDIA's DRA driver, with the UUIDs of their GPUs: for a MIG device that
/// of its parent.
fn uuids(slice: &ResourceSlice) -> Vec<(String, String)> {
    let devices = slice.spec.devices.iter().flatten();
    devices
        .filter_map(|device| {
            let attributes = device.attributes.as_ref()?;
            let uuid = attributes
                .get("parentUUID")
                .or_else(|| attributes.get("uuid"))?;
            Some((device.name.clone(), uuid.string.clone()?))
        })
        .collect()
}
