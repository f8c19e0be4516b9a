//! The length of a GPU's time slices.

#[cfg(test)]
mod tests;

use tracing::info;
use tranche_driver::gpu_state::{GpuChanges, NextTimeSlice, next_time_slice};

use super::{GpuError, Gpus};

/// The most steps from any length to any other: back to the former one, the record, and to the new one.
const MOST_STEPS: usize = 10;

impl Gpus {
    /// Sets the time slices of a GPU, whose lock the caller holds, to the length that claims want. The driver is asked
    /// only if a claim wants a length, or if Tranche has set one.
    pub(super) fn reconcile_time_slice(
        &self,
        gpu_uuid: &str,
        record: &mut GpuChanges,
    ) -> Result<(), GpuError> {
        let wanted = self.ledger.time_slices(gpu_uuid);
        if wanted.is_empty() && record.time_slice.is_none() {
            return Ok(());
        }
        let opened = self.hardware.nvml.open()?;
        for _ in 0..MOST_STEPS {
            let actual = opened.nvml.time_slice(gpu_uuid)?;
            match next_time_slice(&wanted, record.time_slice, actual) {
                NextTimeSlice::Write(changed) => {
                    let mut new = record.clone();
                    new.time_slice = changed;
                    self.records.write(gpu_uuid, &new)?;
                    *record = new;
                }
                NextTimeSlice::Set(interval) => {
                    info!(
                        gpu = gpu_uuid,
                        ?interval,
                        "setting the length of time slices"
                    );
                    opened.nvml.set_time_slice(gpu_uuid, interval)?;
                }
                NextTimeSlice::Done => return Ok(()),
            }
        }
        Err(GpuError::Restless {
            gpu: gpu_uuid.to_owned(),
        })
    }
}
