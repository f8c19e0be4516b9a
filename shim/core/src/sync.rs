//! The atomics: the standard ones in the product; in tests, ones that can kill the thread at a chosen
//! access, to test a crash at every step; under loom, those of loom.

pub(crate) use core::sync::atomic::Ordering;

#[cfg(not(loom))]
pub(crate) use core::sync::atomic::fence;

#[cfg(loom)]
pub(crate) use loom::sync::atomic::fence;

#[cfg(not(any(test, loom)))]
pub(crate) use core::sync::atomic::AtomicU64;

#[cfg(any(test, loom))]
pub(crate) use killable::{AtomicU64, kill_after};

#[cfg(any(test, loom))]
mod killable {
    #[cfg(not(loom))]
    use core::sync::atomic::AtomicU64 as Inner;
    use std::cell::Cell;

    #[cfg(loom)]
    use loom::sync::atomic::AtomicU64 as Inner;

    use super::Ordering;

    // loom's threads share one thread of the system, so they need loom's thread-locals.
    #[cfg(loom)]
    use loom::thread_local;
    #[cfg(not(loom))]
    use std::thread_local;

    thread_local! {
        #[allow(clippy::missing_const_for_thread_local, reason = "loom's macro knows no const")]
        static LEFT: Cell<Option<u32>> = Cell::new(None);
    }

    /// The panic payload of a killed thread.
    #[derive(Debug)]
    pub(crate) struct Killed;

    /// Lets `run` do `steps` writes to shared memory and unwinds with [`Killed`] at the next.
    /// Returns whether it finished.
    pub(crate) fn kill_after(steps: u32, run: impl FnOnce()) -> bool {
        LEFT.with(|left| left.set(Some(steps)));
        let end = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run));
        LEFT.with(|left| left.set(None));
        match end {
            Ok(()) => true,
            Err(cause) if cause.is::<Killed>() => false,
            Err(cause) => std::panic::resume_unwind(cause),
        }
    }

    fn step() {
        let dies = LEFT.with(|left| match left.get() {
            None => false,
            Some(0) => true,
            Some(steps) => {
                left.set(Some(steps - 1));
                false
            }
        });
        if dies {
            std::panic::resume_unwind(std::boxed::Box::new(Killed));
        }
    }

    #[derive(Debug)]
    pub(crate) struct AtomicU64(Inner);

    impl AtomicU64 {
        pub(crate) fn new(value: u64) -> Self {
            Self(Inner::new(value))
        }
        pub(crate) fn load(&self, order: Ordering) -> u64 {
            self.0.load(order)
        }
        pub(crate) fn store(&self, value: u64, order: Ordering) {
            step();
            self.0.store(value, order);
        }
        pub(crate) fn swap(&self, value: u64, order: Ordering) -> u64 {
            step();
            self.0.swap(value, order)
        }
        pub(crate) fn fetch_add(&self, value: u64, order: Ordering) -> u64 {
            step();
            self.0.fetch_add(value, order)
        }
        pub(crate) fn fetch_sub(&self, value: u64, order: Ordering) -> u64 {
            step();
            self.0.fetch_sub(value, order)
        }
        pub(crate) fn fetch_or(&self, value: u64, order: Ordering) -> u64 {
            step();
            self.0.fetch_or(value, order)
        }
        pub(crate) fn fetch_and(&self, value: u64, order: Ordering) -> u64 {
            step();
            self.0.fetch_and(value, order)
        }
        pub(crate) fn fetch_max(&self, value: u64, order: Ordering) -> u64 {
            step();
            self.0.fetch_max(value, order)
        }
        pub(crate) fn compare_exchange(
            &self,
            current: u64,
            new: u64,
            success: Ordering,
            failure: Ordering,
        ) -> Result<u64, u64> {
            step();
            self.0.compare_exchange(current, new, success, failure)
        }
        pub(crate) fn compare_exchange_weak(
            &self,
            current: u64,
            new: u64,
            success: Ordering,
            failure: Ordering,
        ) -> Result<u64, u64> {
            step();
            self.0.compare_exchange_weak(current, new, success, failure)
        }
    }
}
