//! What NVML reports about the health of a GPU.

use nvml_wrapper::Device;
use nvml_wrapper::enums::device::SampleValue;
use nvml_wrapper::error::NvmlError as Reason;
use nvml_wrapper::structs::device::FieldId;
use nvml_wrapper::sys_exports::field_id;
use tranche_driver::health::{RecoveryAction, Report};

use super::NvmlError;
use super::call::call;

const FIELDS: [u32; 3] = [
    field_id::NVML_FI_DEV_REMAPPED_PENDING,
    field_id::NVML_FI_DEV_REMAPPED_FAILURE,
    field_id::NVML_FI_DEV_GET_GPU_RECOVERY_ACTION,
];

/// Fields that the model or the driver does not have are left out.
pub(super) fn read(device: &Device<'_>, uuid: &str) -> Result<Report, NvmlError> {
    const CALL: &str = "nvmlDeviceGetFieldValues";
    let samples = call(CALL, uuid, device.field_values_for(&FIELDS.map(FieldId)))?;
    let mut report = Report::default();
    for (field, sample) in FIELDS.into_iter().zip(samples) {
        let value = match sample.and_then(|sample| sample.value) {
            Ok(SampleValue::U32(value)) => u64::from(value),
            Ok(SampleValue::U64(value)) => value,
            Ok(SampleValue::I64(value)) => value.unsigned_abs(),
            Err(Reason::GpuLost) => return call(CALL, uuid, Err(Reason::GpuLost)),
            Ok(SampleValue::F64(_)) | Err(_) => continue,
        };
        match field {
            field_id::NVML_FI_DEV_REMAPPED_PENDING => report.remap_pending = value != 0,
            field_id::NVML_FI_DEV_REMAPPED_FAILURE => report.remap_failed = value != 0,
            _ => report.recovery_action = Some(RecoveryAction::of(value)),
        }
    }
    Ok(report)
}
