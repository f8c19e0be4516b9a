//! Helpers of several tests: the scheduler's allocations, the controller's metrics.

use std::fmt;

use anyhow::{Context, ensure};
use k8s_openapi::api::core::v1::Pod;
use k8s_openapi::api::resource::v1::{Device, DeviceRequestAllocationResult, ResourceSlice};
use kube::ResourceExt;
use kube::api::{Api, ListParams};
use tokio::net::TcpStream;
use tokio::sync::Mutex;
use tranche_api::names::{attribute, capacity};
use tranche_e2e::system::text;
use tranche_e2e::{Case, Namespace, SYSTEM};

/// Locked by a test that kills the controller's leader, and by a test that measures how soon the leader repairs something.
pub static LEADER: Mutex<()> = Mutex::const_new(());

/// A device that a claim has.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Allocated {
    pub tier: String,
    /// The profile of a partition, or a share's memory.
    pub size: Option<String>,
    pub uuid: String,
}

impl fmt::Display for Allocated {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.tier)?;
        self.size.iter().try_for_each(|size| write!(f, " {size}"))
    }
}

/// The devices of the claims of a namespace, or of one of its pods.
pub async fn allocated(
    case: &Case,
    namespace: &Namespace,
    pod: Option<&str>,
) -> anyhow::Result<Vec<Allocated>> {
    let api: Api<ResourceSlice> = Api::all(case.client.clone());
    let slices = api.list(&ListParams::default()).await?;
    let mut allocated = Vec::new();
    for claim in namespace.claims().list(&ListParams::default()).await? {
        let status = claim.status.unwrap_or_default();
        let mut users = status.reserved_for.iter().flatten();
        if pod.is_some_and(|pod| users.all(|user| user.name != pod)) {
            continue;
        }
        let results = status.allocation.and_then(|it| it.devices?.results);
        for result in results.into_iter().flatten() {
            let mut devices = slices
                .items
                .iter()
                .filter(|it| it.spec.pool.name == result.pool)
                .flat_map(|slice| slice.spec.devices.iter().flatten());
            let device = devices
                .find(|device| device.name == result.device)
                .with_context(|| format!("{} is not published", result.device))?;
            allocated.push(described(device, &result)?);
        }
    }
    allocated.sort();
    Ok(allocated)
}

fn described(device: &Device, result: &DeviceRequestAllocationResult) -> anyhow::Result<Allocated> {
    let of = |name| text(device, name).map(str::to_owned);
    let consumed = result
        .consumed_capacity
        .as_ref()
        .and_then(|it| it.get(capacity::MEMORY));
    let gpu = of(attribute::PARENT_UUID).or_else(|| of(attribute::UUID));
    Ok(Allocated {
        tier: of(attribute::ISOLATION).with_context(|| format!("{device:?}"))?,
        size: of(attribute::PROFILE).or_else(|| consumed.map(|memory| memory.0.clone())),
        uuid: gpu.with_context(|| format!("{device:?}"))?,
    })
}

/// The controller's response to a reader of its metrics.
pub async fn read_controller(case: &Case, path: &str, token: &str) -> anyhow::Result<String> {
    let api: Api<Pod> = Api::namespaced(case.client.clone(), SYSTEM);
    let controllers = ListParams::default().labels("app.kubernetes.io/component=controller");
    let pods = api.list(&controllers).await?;
    let running = pods
        .items
        .iter()
        .find_map(|pod| Some((pod, pod.status.as_ref()?.pod_ip.clone()?)));
    let (pod, address) = running.context("a controller that runs")?;
    let containers = pod.spec.iter().flat_map(|spec| &spec.containers);
    let mut ports = containers.flat_map(|container| container.ports.iter().flatten());
    let metrics = ports.find(|port| port.name.as_deref() == Some("metrics"));
    let port = u16::try_from(metrics.context("a port for metrics")?.container_port)?;
    let stream = TcpStream::connect((address.as_str(), port))
        .await
        .with_context(|| pod.name_any())?;
    let (code, text) = tranche_serving::testing::get(stream, path, Some(token)).await?;
    ensure!(code == 200, "{code}: {text}");
    Ok(text)
}
