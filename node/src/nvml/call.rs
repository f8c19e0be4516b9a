//! The errors of calls that nvml-wrapper makes.

use nvml_wrapper::error::NvmlError as Reason;

use super::NvmlError;

/// The result of the function `call` for `object`.
pub(super) fn call<T>(
    call: &'static str,
    object: &str,
    result: Result<T, Reason>,
) -> Result<T, NvmlError> {
    result.map_err(|e| match e {
        Reason::GpuLost => NvmlError::GpuLost {
            call,
            object: object.to_owned(),
        },
        Reason::NotSupported => NvmlError::NotSupported {
            call,
            object: object.to_owned(),
        },
        e => NvmlError::Call {
            call,
            object: object.to_owned(),
            reason: e.to_string(),
        },
    })
}
