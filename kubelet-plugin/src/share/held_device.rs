//! How usage and the watchdog describe a held device.

use tranche_api::Tier;
use tranche_api::usage::ClaimReference;
use tranche_driver::journal::ClaimRecord;
use tranche_driver::preparation::{Cap, PreparedDevice};
use tranche_driver::usage::Limit;

/// How a usage names a claim.
#[must_use]
pub fn reference(record: &ClaimRecord) -> ClaimReference {
    let allocation = &record.plan.allocation;
    ClaimReference {
        namespace: allocation.namespace.clone(),
        name: allocation.name.clone(),
        uid: allocation.uid.clone(),
    }
}

/// How much memory a device's claim may hold.
#[must_use]
pub fn limit(device: &PreparedDevice) -> Limit {
    match device.cap {
        Cap::Share { context_memory, .. } => Limit::Share {
            allocated: device.cap.on_gpu(),
            reserved: context_memory,
        },
        Cap::None {} if device.tier == Tier::Timeshared => Limit::Unlimited,
        Cap::None {} => Limit::Alone,
    }
}
