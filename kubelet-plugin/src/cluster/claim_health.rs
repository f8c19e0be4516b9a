//! Writes the condition `Healthy` on claims whose GPU has a fault (`status.devices[].conditions`).
//!
//! The condition has a field manager of its own: it changes at other times than what [`status`](super::status) writes, and
//! an apply without it removes it.

use std::collections::BTreeMap;

use jiff::Timestamp;
use k8s_openapi::api::resource::v1::ResourceClaim;
use kube::api::{Patch, PatchParams};
use kube::{Api, Client};
use serde_json::{Value, json};
use tranche_api::conditions::{HEALTHY, condition};
use tranche_driver::health::Verdict;
use tranche_driver::journal::ClaimRecord;

use crate::cluster::api_server::within;
use crate::cluster::status::{applied, with_key};

const FIELD_MANAGER: &str = "tranche-kubelet-plugin-health";

/// Writes on `record`'s claim the verdicts of its devices that have a fault, by the devices' keys; with none, the condition
/// goes. An error says why it could not be written. A claim that is gone needs nothing.
pub async fn write(
    client: &Client,
    record: &ClaimRecord,
    faulty: &BTreeMap<String, Verdict>,
    now: Timestamp,
) -> Result<(), String> {
    let allocation = &record.plan.allocation;
    let claims: Api<ResourceClaim> = Api::namespaced(client.clone(), &allocation.namespace);
    let params = PatchParams::apply(FIELD_MANAGER).force();
    let body = body(record, faulty, now);
    let patch = Patch::Apply(&body);
    match within(claims.patch_status(&allocation.name, &params, &patch)).await {
        Ok(Ok(_)) => Ok(()),
        Ok(Err(kube::Error::Api(status))) if matches!(status.code, 404 | 409) => Ok(()),
        Ok(Err(error)) => Err(error.to_string()),
        Err(silent) => Err(silent.to_string()),
    }
}

fn body(record: &ClaimRecord, faulty: &BTreeMap<String, Verdict>, now: Timestamp) -> Value {
    let devices = record.plan.devices.iter().filter_map(|device| {
        let verdict = faulty.get(&device.key)?;
        let since = verdict.taint.as_ref().map(|taint| taint.since);
        let since = since.and_then(|since| Timestamp::from_second(since).ok());
        let (status, reason) = (verdict.status.as_str(), &verdict.reason);
        let condition = condition(
            HEALTHY,
            status,
            reason,
            &verdict.message,
            &[],
            since.unwrap_or(now),
        );
        let mut entry = with_key(device);
        entry["conditions"] = json!([condition]);
        Some(entry)
    });
    applied(record, &devices.collect::<Vec<_>>())
}
