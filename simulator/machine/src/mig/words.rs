//! The words of the shared page that describe the existing MIG instances.

use std::sync::atomic::{AtomicU32, AtomicU64};

use super::capability::COMPUTE_INSTANCES;
use crate::turns::Turns;

/// The words of a GPU instance; its index is its id. All zeros: there is no such instance.
#[derive(Debug)]
#[repr(C)]
pub struct GpuInstance {
    /// A number that no other instance of this page has or had; 0 if there is no instance.
    pub(crate) serial: AtomicU64,
    /// [`super::model::GpuProfile::kind`].
    pub(crate) kind: AtomicU32,
    pub(crate) start: AtomicU32,
    /// Bytes that its processes hold.
    pub(crate) used: AtomicU64,
    /// The highest value that `used` has had.
    pub(crate) peak: AtomicU64,
    pub(crate) compute: [ComputeInstance; COMPUTE_INSTANCES],
}

/// The words of a compute instance; its index is its id.
#[derive(Debug)]
#[repr(C)]
pub struct ComputeInstance {
    pub(crate) serial: AtomicU64,
    /// [`super::model::ComputeProfile::kind`].
    pub(crate) kind: AtomicU32,
    pub(crate) start: AtomicU32,
    pub(crate) uuid: [AtomicU64; 2],
    pub(crate) turns: Turns,
}
