//! A lock for what cannot be done without one: the driver's calls whose effect and whose accounting
//! must not come apart. All zeros is a free one, so that the child of a fork finds it free.

use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicU32, Ordering};

const FREE: u32 = 0;
const HELD: u32 = 1;
const WAITED_FOR: u32 = 2;

/// A value behind a lock. Not to be taken again by whoever holds it.
#[derive(Debug)]
pub struct Guarded<T> {
    state: AtomicU32,
    value: UnsafeCell<T>,
}

// SAFETY: only `with` hands the value out, to the one thread that holds the lock.
unsafe impl<T: Send> Sync for Guarded<T> {}

impl<T> Guarded<T> {
    /// Does something with the value; waits for whoever is at it.
    pub fn with<R>(&self, act: impl FnOnce(&mut T) -> R) -> R {
        if self
            .state
            .compare_exchange(FREE, HELD, Ordering::Acquire, Ordering::Relaxed)
            .is_err()
        {
            self.wait();
        }
        // SAFETY: this thread holds the lock until the store below, and nothing unwinds.
        let result = act(unsafe { &mut *self.value.get() });
        if self.state.swap(FREE, Ordering::Release) == WAITED_FOR {
            futex(&self.state, libc::FUTEX_WAKE, 1);
        }
        result
    }

    #[cold]
    #[inline(never)]
    fn wait(&self) {
        while self.state.swap(WAITED_FOR, Ordering::Acquire) != FREE {
            futex(&self.state, libc::FUTEX_WAIT, WAITED_FOR);
        }
    }
}

fn futex(word: &AtomicU32, act: libc::c_int, value: u32) {
    // SAFETY: the word outlives the call, which waits at most until its value changes or a wake-up.
    unsafe {
        libc::syscall(
            libc::SYS_futex,
            word.as_ptr(),
            act | libc::FUTEX_PRIVATE_FLAG,
            value,
            core::ptr::null::<libc::timespec>(),
        )
    };
}
