//! Faults of kernels, and the processes that each affects.
//!
//! After a kernel's access to memory that is not allocated, "the process is left in an inconsistent state and any further CUDA
//! work will return the same error" (CUDA Driver API, `CUDA_ERROR_ILLEGAL_ADDRESS`). Other processes are not affected, except the
//! clients of the same MPS daemon: a fault "is reported to all the clients running on the subset of GPUs in which the fatal fault
//! is contained" (NVIDIA's MPS documentation, "MPS Error Containment").

use std::sync::atomic::Ordering;

use crate::layout::{ProcessSlot, Shared};

impl Shared {
    /// Notes that the process `slot` is a client of the MPS daemon with this identity, which is not 0.
    pub fn join_mps(&self, slot: usize, daemon: u64) {
        self.slots[slot].mps_daemon.store(daemon, Ordering::Release);
    }

    /// Notes that a kernel of the process `slot` has faulted on a GPU: later calls of all affected processes return `code`.
    pub fn fault(&self, slot: usize, gpu: usize, code: u32) {
        let faulted = &self.slots[slot];
        faulted.fault.store(code, Ordering::Release);
        let daemon = faulted.mps_daemon.load(Ordering::Acquire);
        if daemon == 0 {
            return;
        }
        for other in &self.slots {
            let is_client = other.mps_daemon.load(Ordering::Acquire) == daemon;
            if is_client && other.used[gpu].load(Ordering::Relaxed) > 0 {
                other.fault.store(code, Ordering::Release);
            }
        }
    }
}

impl ProcessSlot {
    /// Makes the slot ready for its next process.
    pub(crate) fn forget_faults(&self) {
        self.mps_daemon.store(0, Ordering::Relaxed);
        self.fault.store(0, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::test_page;

    const CODE: u32 = 700;
    const DAEMON: u64 = 7;

    fn client(page: &Shared, slot: usize) {
        page.join_mps(slot, DAEMON);
        page.charge(slot, 0, 1 << 20, || {}).unwrap();
    }

    fn faults(page: &Shared) -> [u32; 3] {
        [0, 1, 2].map(|slot| page.slots[slot].fault.load(Ordering::Acquire))
    }

    #[test]
    fn a_fault_reaches_the_clients_of_its_daemon() {
        let page = test_page(include_str!("../../machines/T4.toml"));
        client(page, 0);
        client(page, 1);
        page.charge(2, 0, 1 << 20, || {}).unwrap();
        page.fault(0, 0, CODE);
        assert_eq!(faults(page), [CODE, CODE, 0]);
    }

    #[test]
    fn a_slots_next_process_has_no_fault_and_no_daemon_of_the_last() {
        let page = test_page(include_str!("../../machines/T4.toml"));
        client(page, 0);
        client(page, 1);
        page.fault(0, 0, CODE);
        page.reclaim(0);
        page.reclaim(1);
        assert_eq!(faults(page), [0; 3]);
        // In the first slot a client of the same daemon again, in the second a process without one.
        client(page, 0);
        page.charge(1, 0, 1 << 20, || {}).unwrap();
        page.fault(0, 0, CODE);
        assert_eq!(faults(page), [CODE, 0, 0]);
    }
}
