//! What a claim asked for. The scheduler rounds a request up to the next amount that the device allows, so that 0 becomes the smallest
//! share; the allocation does not show it.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::{CapacityRequirements, ResourceClaim};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity as Wire;
use tranche_api::Quantity;
use tranche_api::names::capacity;

use super::DeviceProblem;

/// The least memory that a claim may ask for, in bytes. A smaller number is one whose unit was forgotten.
const LEAST_MEMORY: u64 = 1 << 20;
/// Below this number the forgotten unit is more likely Gi than Mi.
const MOST_GI: u64 = 1024;
const MOST_CORES: u64 = 100;

/// Refuses amounts that no claim can mean. `request` is `main` or `main/sub`.
///
/// The chart's admission policy has the same rules, but it does not see classes that are written after the claim.
pub(super) fn check(claim: &ResourceClaim, request: &str) -> Result<(), DeviceProblem> {
    let Some(asked) = asked(claim, request).and_then(|it| it.requests.as_ref()) else {
        return Ok(());
    };
    if let Some(memory) = count(asked, capacity::MEMORY)? {
        if memory == 0 {
            return Err(problem(capacity::MEMORY, "0", "at least 1Mi"));
        }
        if memory < LEAST_MEMORY {
            let unit = if memory > MOST_GI { "Mi" } else { "Gi" };
            let expected = format!("at least 1Mi: write the unit, for example {memory}{unit}");
            return Err(problem(capacity::MEMORY, &memory.to_string(), &expected));
        }
    }
    match count(asked, capacity::CORES)? {
        Some(cores) if !(1..=MOST_CORES).contains(&cores) => Err(problem(
            capacity::CORES,
            &cores.to_string(),
            "a percentage, 1 to 100",
        )),
        _ => Ok(()),
    }
}

fn asked<'a>(claim: &'a ResourceClaim, request: &str) -> Option<&'a CapacityRequirements> {
    let devices = claim.spec.as_ref()?.devices.as_ref()?;
    let (main, sub) = match request.split_once('/') {
        Some((main, sub)) => (main, Some(sub)),
        None => (request, None),
    };
    let found = devices
        .requests
        .iter()
        .flatten()
        .find(|it| it.name == main)?;
    match sub {
        None => found.exactly.as_ref()?.capacity.as_ref(),
        Some(sub) => {
            let mut alternatives = found.first_available.iter().flatten();
            alternatives.find(|it| it.name == sub)?.capacity.as_ref()
        }
    }
}

/// An amount, where the claim asks for it; an integer of 0 or more.
fn count(
    asked: &BTreeMap<String, Wire>,
    capacity: &'static str,
) -> Result<Option<u64>, DeviceProblem> {
    let Some(wire) = asked.get(capacity) else {
        return Ok(None);
    };
    let count = Quantity::try_from(wire).ok().map(Quantity::to_count);
    match count {
        Some(Ok(count)) => Ok(Some(count)),
        _ => Err(problem(capacity, &wire.0, "a whole number, 1 or more")),
    }
}

fn problem(capacity: &'static str, found: &str, expected: &str) -> DeviceProblem {
    DeviceProblem::Request {
        capacity,
        found: found.to_owned(),
        expected: expected.to_owned(),
    }
}
