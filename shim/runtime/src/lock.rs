//! A lock between threads. All zeros is a free lock, so that it is free in a forked child.

use core::cell::UnsafeCell;
use core::sync::atomic::{AtomicU32, Ordering};

const FREE: u32 = 0;
const HELD: u32 = 1;
const WAITED_FOR: u32 = 2;

/// A value behind a lock, which is not recursive.
#[derive(Debug)]
pub struct Guarded<T> {
    state: AtomicU32,
    value: UnsafeCell<T>,
}

// SAFETY: only `with` hands the value out, to the one thread that holds the lock.
unsafe impl<T: Send> Sync for Guarded<T> {}

impl<T> Guarded<T> {
    /// Calls a function with the value; waits while another thread holds the lock.
    pub fn with<R>(&self, act: impl FnOnce(&mut T) -> R) -> R {
        if self
            .state
            .compare_exchange(FREE, HELD, Ordering::Acquire, Ordering::Relaxed)
            .is_err()
        {
            wait(&self.state);
        }
        // SAFETY: this thread holds the lock until the store below, and nothing unwinds.
        let result = act(unsafe { &mut *self.value.get() });
        if self.state.swap(FREE, Ordering::Release) == WAITED_FOR {
            wake(&self.state);
        }
        result
    }
}

// Not part of `with`, which is generic and has many copies.
#[cold]
#[inline(never)]
fn wait(state: &AtomicU32) {
    while state.swap(WAITED_FOR, Ordering::Acquire) != FREE {
        futex(state, libc::FUTEX_WAIT, WAITED_FOR);
    }
}

#[cold]
#[inline(never)]
fn wake(state: &AtomicU32) {
    futex(state, libc::FUTEX_WAKE, 1);
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
