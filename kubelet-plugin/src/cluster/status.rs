//! Writes `claim.status.devices`, what a claim actually got, after the kubelet has its answer.
//!
//! One server-side apply per claim, in its own task, a moment later; it is retried for some minutes. Unprepare
//! removes nothing: the API server drops the entries when the claim is deallocated.

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use serde_json::{Value, json};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tracing::{debug, warn};
use tranche_api::Quantity;
use tranche_api::names::DRIVER;
use tranche_driver::journal::ClaimRecord;
use tranche_driver::preparation::{Cap, PreparedDevice, Priority};
use tranche_serving::Clock;

use crate::FIELD_MANAGER;
use crate::cluster::api_server::within;

/// The most concurrent writes: after a burst of Prepares they must not delay the reads of the next.
const CONCURRENT: usize = 2;
/// The pause before the first attempt: a burst of Prepares has the API server first, and a claim that is released at once costs
/// it nothing. The containers start meanwhile.
const SETTLING: Duration = Duration::from_millis(300);
/// Pauses between attempts, in seconds.
const PAUSES: [u64; 7] = [1, 2, 4, 8, 16, 32, 64];

/// Writes the claims' status.
pub struct StatusWriter {
    client: Client,
    clock: Clock,
    slots: Arc<Semaphore>,
    published: Mutex<HashMap<String, (Arc<ClaimRecord>, CancellationToken)>>,
}

impl fmt::Debug for StatusWriter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("StatusWriter")
    }
}

impl StatusWriter {
    /// Writes with `client`; conditions carry the time of `clock`.
    #[must_use]
    pub fn new(client: Client, clock: Clock) -> Self {
        Self {
            client,
            clock,
            slots: Arc::new(Semaphore::new(CONCURRENT)),
            published: Mutex::default(),
        }
    }

    /// Publishes what a claim got, unless that was published already. Returns at once.
    pub fn publish(&self, record: &Arc<ClaimRecord>) {
        let uid = &record.plan.allocation.uid;
        let mut published = self
            .published
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some((old, stop)) = published.get(uid) {
            if old.plan == record.plan {
                return;
            }
            stop.cancel();
        }
        let body = body(record, self.clock.now());
        let allocation = &record.plan.allocation;
        let api = Api::<ResourceClaim>::namespaced(self.client.clone(), &allocation.namespace);
        let stop = CancellationToken::new();
        tokio::spawn(write(
            api,
            allocation.name.clone(),
            body,
            Arc::clone(&self.slots),
            stop.clone(),
        ));
        published.insert(uid.clone(), (Arc::clone(record), stop));
    }

    /// Stops publishing a claim. A running request is finished: cancelling it would close its
    /// connection, and the next claim would need a new one.
    pub fn forget(&self, uid: &str) {
        let mut published = self
            .published
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        if let Some((_, stop)) = published.remove(uid) {
            stop.cancel();
        }
    }
}

async fn write(
    api: Api<ResourceClaim>,
    name: String,
    body: Value,
    slots: Arc<Semaphore>,
    stop: CancellationToken,
) {
    let params = PatchParams::apply(FIELD_MANAGER).force();
    let settling = tokio::time::sleep(SETTLING);
    if stop.run_until_cancelled(settling).await.is_none() {
        return;
    }
    for pause in PAUSES.map(Some).into_iter().chain([None]) {
        let Some(slot) = stop.run_until_cancelled(slots.acquire()).await else {
            return;
        };
        let patch = Patch::Apply(&body);
        let answer = within(api.patch_status(&name, &params, &patch)).await;
        drop(slot);
        let error = match answer {
            Ok(Ok(_)) => return debug!(claim = name, "published status.devices"),
            // The claim was deleted or replaced by another one.
            Ok(Err(kube::Error::Api(status))) if matches!(status.code, 404 | 409) => return,
            Ok(Err(error)) => error.to_string(),
            Err(silent) => silent.to_string(),
        };
        match pause {
            Some(pause) => {
                let pause = tokio::time::sleep(Duration::from_secs(pause));
                if stop.run_until_cancelled(pause).await.is_none() {
                    return;
                }
            }
            None => {
                return warn!(
                    claim = name,
                    error,
                    "cannot write status.devices; the claim works without it. Check that the plugin may \
                     patch resourceclaims/status and, with associated-node:patch, resourceclaims/driver"
                );
            }
        }
    }
}

fn body(record: &ClaimRecord, now: jiff::Timestamp) -> Value {
    let devices = record.plan.devices.iter();
    let entries: Vec<_> = devices.map(|device| entry(device, now)).collect();
    applied(record, &entries)
}

/// An object to apply, with these `status.devices`. With its UID the write fails for another claim of the same name.
pub(super) fn applied(record: &ClaimRecord, devices: &[Value]) -> Value {
    let allocation = &record.plan.allocation;
    json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceClaim",
        "metadata": {
            "name": allocation.name,
            "namespace": allocation.namespace,
            "uid": allocation.uid,
        },
        "status": {"devices": devices},
    })
}

fn entry(device: &PreparedDevice, now: jiff::Timestamp) -> Value {
    let mut data = json!({
        "tier": device.tier,
        "gpuUUID": device.gpu_uuid,
        "pciBusID": device.pci_bus_id,
    });
    if let Cap::Share { memory, cores, .. } = device.cap {
        data["memory"] = json!(Quantity::from_bytes(memory));
        data["cores"] = json!(cores);
    }
    match device.cap.priority() {
        Priority::Normal => {}
        Priority::High => data["priority"] = json!("high"),
        Priority::Low { floor } => {
            data["priority"] = json!("low");
            data["lowPriorityFloor"] = json!(floor);
        }
    }
    if let Some(over) = device.oversubscription() {
        data["memoryOversubscription"] = json!(over.percent());
        data["residentMemory"] = json!(Quantity::from_bytes(device.cap.on_gpu()));
    }
    if let Some(partition) = &device.partition {
        data["profile"] = json!(partition.placement.profile);
        data["memorySlice"] = json!(partition.placement.start);
        if let Some(mig) = &partition.mig {
            data["migUUID"] = json!(mig.uuid);
            data["gpuInstance"] = json!(mig.gpu_instance);
            data["computeInstance"] = json!(mig.compute_instance);
        }
    }
    let mut entry = with_key(device);
    entry["data"] = data;
    entry["conditions"] = json!([{
        "type": "Ready",
        "status": "True",
        "reason": "Prepared",
        "message": "containers get it by CDI",
        "lastTransitionTime": now.strftime("%Y-%m-%dT%H:%M:%SZ").to_string(),
    }]);
    entry
}

/// An entry of `status.devices` with its key only.
pub(super) fn with_key(device: &PreparedDevice) -> Value {
    let mut entry = json!({
        "driver": DRIVER,
        "pool": device.pool,
        "device": device.device,
    });
    if let Some(share_id) = &device.share_id {
        entry["shareID"] = json!(share_id);
    }
    entry
}
