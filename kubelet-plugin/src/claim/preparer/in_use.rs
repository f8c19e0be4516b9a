//! Who uses the devices of a claim.

#[cfg(test)]
mod tests;

use tranche_driver::journal::ClaimRecord;
use tranche_driver::preparation::PreparationPlan;
use tranche_node::page::AccountFile;
use tranche_node::processes::containers::Containers;

use super::Problem;
use crate::host::layout::Layout;

/// The processes of containers that have a device of the plan.
pub(super) fn processes_of(
    plan: &PreparationPlan,
    containers: &Containers,
) -> Result<Vec<u32>, Problem> {
    let keys: Vec<_> = plan.devices.iter().map(|it| it.key.as_str()).collect();
    containers
        .processes_with(&keys)
        .map_err(|error| Problem::UsersUnknown(error.to_string()))
}

/// Refuses a claim whose devices somebody uses, or may use.
pub(super) fn refuse_in_use(
    record: &ClaimRecord,
    containers: &Containers,
    layout: &Layout,
) -> Result<(), Problem> {
    let plan = &record.plan;
    let processes = processes_of(plan, containers)?;
    if let Some(first) = processes.first() {
        let count = processes.len();
        return Err(Problem::InUse(format!(
            "{count} processes, the first is {first}"
        )));
    }
    // A process that left its container's mount namespace still has a slot in the account.
    for device in plan.devices.iter().filter(|it| it.cap.is_share()) {
        let account = layout.share(&plan.allocation.uid, &device.key).account;
        // A missing or broken page has no slots.
        if AccountFile::open(&account).is_ok_and(|file| file.is_in_use().unwrap_or(true)) {
            return Err(Problem::InUse(format!(
                "processes that count in {}",
                account.display()
            )));
        }
    }
    Ok(())
}
