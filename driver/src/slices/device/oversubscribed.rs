//! Capped shares of a GPU whose memory is oversubscribed.
//!
//! The device's own name has the percentage, so that the GPU's counters keep such shares and others apart, also after a
//! change of the policy. Its attributes differ, too: the class of the tier does not select it, so only a claim that
//! asks for such a share gets one.

use k8s_openapi::api::resource::v1::DeviceAttribute;
use tranche_api::gpu_node::Gpu;
use tranche_api::names::{OVERSUBSCRIBED, attribute};
use tranche_api::tier::{Isolation, Tier};

use super::{OfferError, int, text};
use crate::oversubscription::Oversubscription;

/// Whether the driver can move memory of the GPU to the host.
pub(super) fn check(gpu: &Gpu) -> Result<(), OfferError> {
    let capability = &gpu.cuda_compute_capability;
    let major = capability.split('.').next().unwrap_or_default();
    let why = if gpu.is_vgpu() {
        "it is a vGPU, in which managed memory is off unless its host switches it on".to_owned()
    } else if major.parse::<u32>().is_ok_and(|major| major < 6) {
        format!(
            "its compute capability is {capability}, and memory moves page by page from 6.0 (Pascal) on"
        )
    } else {
        return Ok(());
    };
    Err(OfferError::NotOversubscribed { why })
}

/// The difference to other capped shares: a neighbour can push a share's memory out of the GPU.
pub(super) fn attributes(over: Oversubscription) -> [(String, DeviceAttribute); 4] {
    let percent = i64::from(over.percent());
    [
        (attribute::ISOLATION, text(OVERSUBSCRIBED)),
        (
            attribute::ISOLATION_LEVEL,
            int(i64::from(Tier::Timeshared.level())),
        ),
        (attribute::MEMORY_ISOLATION, text(Isolation::None.as_str())),
        (attribute::MEMORY_OVERSUBSCRIPTION, int(percent)),
    ]
    .map(|(name, value)| (name.to_owned(), value))
}
