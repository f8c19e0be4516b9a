//! Compares the rules' verdict with what the scheduler's allocator does.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::{AllocationResult, DeviceRequestAllocationResult};
use tranche_allocator_oracle::{Error, Outcome};
use tranche_api::Quantity;
use tranche_scheduler_rules::{Granted, Problem, Verdict};

/// The difference between the scheduler's outcome and the verdict by the rules.
pub fn compare(outcome: &Result<Outcome, Error>, verdict: &Verdict) -> Result<(), String> {
    let same = match (outcome, verdict) {
        (Ok(Outcome::Allocated(results)), Verdict::Fits(granted)) => {
            self::same_devices(results, granted)?
        }
        (Ok(Outcome::Unschedulable(_)), Verdict::DoesNotFit) => true,
        (Err(Error::Refused(why)), Verdict::Problem(Problem::Stops(_))) => {
            // Not the API server, which has seen the claims before.
            !why.contains(" is invalid: ")
        }
        _ => false,
    };
    if same {
        return Ok(());
    }
    Err(format!(
        "the scheduler: {outcome:?}; the rules: {verdict:?}"
    ))
}

fn same_devices(results: &[AllocationResult], granted: &[Vec<Granted>]) -> Result<bool, String> {
    if results.len() != granted.len() {
        return Ok(false);
    }
    for (result, granted) in results.iter().zip(granted) {
        let devices = result
            .devices
            .as_ref()
            .and_then(|devices| devices.results.as_deref())
            .unwrap_or_default();
        if devices.len() != granted.len() {
            return Ok(false);
        }
        for (device, granted) in devices.iter().zip(granted) {
            let id = &granted.device;
            let same = device.request == granted.request
                && device.driver == id.driver
                && device.pool == id.pool
                && device.device == id.device
                && device.share_id.is_some() == granted.share
                && self::consumed(device)? == granted.consumed;
            if !same {
                return Ok(false);
            }
        }
    }
    Ok(true)
}

fn consumed(device: &DeviceRequestAllocationResult) -> Result<BTreeMap<String, Quantity>, String> {
    let consumed = device
        .consumed_capacity
        .iter()
        .flatten()
        .map(|(name, amount)| {
            let amount = Quantity::try_from(amount).map_err(|error| error.to_string())?;
            Ok((name.clone(), amount))
        });
    consumed.collect()
}
