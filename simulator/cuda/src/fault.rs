//! Faults of kernels: a kernel whose name contains `sim_illegal_address` accesses memory that is not allocated.

use std::sync::OnceLock;
use std::sync::atomic::Ordering;

use crate::code::Code;
use crate::driver::{driver, has_reached};

/// The GPU and the mark of this process's first kernel that faults.
static FIRST: OnceLock<(usize, u64)> = OnceLock::new();

/// A kernel faults when this process's work on a GPU reaches `mark`.
pub fn at(gpu: usize, mark: u64) {
    FIRST.get_or_init(|| (gpu, mark));
}

/// Fails after a fault of this process, or of another client of its MPS daemon.
pub fn check() -> Result<(), Code> {
    let driver = driver()?;
    let fault = || {
        driver.shared.slots[driver.slot]
            .fault
            .load(Ordering::Acquire)
    };
    if let Some((gpu, mark)) = FIRST.get()
        && fault() == 0
        && has_reached(*gpu, *mark)
    {
        driver
            .shared
            .fault(driver.slot, *gpu, Code::ILLEGAL_ADDRESS.0);
    }
    match fault() {
        0 => Ok(()),
        code => Err(Code(code)),
    }
}
