//! The memory of a GPU in this container.

use tranche_shim_core::GpuUuid;
use tranche_shim_runtime::complain::Refused;
use tranche_shim_runtime::{accounts, container_shares};

use crate::abi::{Device, Memory, Return};
use crate::users::{identify, refuse};

/// The memory of the container's shares of one GPU, in bytes.
pub struct Sum {
    /// The sum of the caps.
    pub total: u64,
    /// Memory that the shares' processes hold.
    pub used: u64,
}

impl Sum {
    /// Memory that is left.
    pub fn free(&self) -> u64 {
        self.total.saturating_sub(self.used)
    }

    /// Makes a part of the GPU's memory no larger than the share.
    pub fn bound(&self, part: &mut Memory) {
        part.total = part.total.min(self.total);
        part.used = part.used.min(self.used).min(part.total);
        part.free = part.total - part.used;
    }
}

/// The driver's answer, corrected if the GPU has a cap.
pub fn answer(
    device: Device,
    driver: impl FnOnce() -> Return,
    correct: impl FnOnce(Sum),
) -> Return {
    let result = driver();
    if result != Return::SUCCESS {
        return result;
    }
    let Some(gpu) = identify(device) else {
        return Return::NO_PERMISSION;
    };
    match sum(device, gpu) {
        Ok(None) => result,
        Ok(Some(sum)) => {
            correct(sum);
            result
        }
        Err(Refused) => Return::NO_PERMISSION,
    }
}

/// `None` if the GPU has no cap.
fn sum(device: Device, gpu: GpuUuid) -> Result<Option<Sum>, Refused> {
    let (mut known, mut capped, mut sum) = (false, true, Sum { total: 0, used: 0 });
    let mut context = 0;
    container_shares::each(&mut |share| {
        if share.gpu == gpu {
            known = true;
            match share.limit {
                None => capped = false,
                Some(limit) => {
                    sum.total = sum.total.saturating_add(limit);
                    sum.used = sum.used.saturating_add(accounts::used(share)?);
                    context = share.context.max(context);
                }
            }
        }
        Ok(())
    })?;
    // One context is not part of the memory and is not shown to programs.
    sum.used = sum.used.saturating_sub(context).min(sum.total);
    if known {
        Ok(capped.then_some(sum))
    } else {
        Err(refuse(device, gpu))
    }
}
