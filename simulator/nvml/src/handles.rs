//! Handles of MIG's instances and devices. A handle belongs to one instance: after that is destroyed, the handle is invalid,
//! even if another instance has the same ids.

use std::ffi::c_void;
use std::sync::{Mutex, PoisonError};

/// An instance or a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Target {
    pub kind: Kind,
    /// Index of the GPU in the page.
    pub gpu: usize,
    /// Id of the GPU instance.
    pub instance: usize,
    /// Id of the compute instance; 0 for a GPU instance.
    pub compute: usize,
    /// The instance's number, which no other instance has or had.
    pub serial: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    GpuInstance,
    ComputeInstance,
    Device,
}

/// The targets with a handle, which is the target's address. They stay until the process ends.
static TARGETS: Mutex<Vec<&'static Target>> = Mutex::new(Vec::new());

/// The handle of a target.
pub fn handle_of(target: Target) -> *mut c_void {
    let mut targets = TARGETS.lock().unwrap_or_else(PoisonError::into_inner);
    let known = targets.iter().find(|it| ***it == target).copied();
    let place = known.unwrap_or_else(|| {
        let place = Box::leak(Box::new(target));
        targets.push(place);
        place
    });
    std::ptr::from_ref(place).cast_mut().cast()
}

/// The target of a handle.
pub fn target_of(handle: *mut c_void, kind: Kind) -> Option<Target> {
    let targets = TARGETS.lock().unwrap_or_else(PoisonError::into_inner);
    let is_it = |it: &&&Target| std::ptr::eq(**it, handle.cast()) && it.kind == kind;
    targets.iter().find(is_it).map(|it| **it)
}
