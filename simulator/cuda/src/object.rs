//! Handles: the objects (contexts, streams, events and others) behind CUDA's opaque pointers.
//!
//! A handle is the object's address, so that its use costs nothing. A destroyed object stays in quarantine for a while;
//! meanwhile the use of its handle is an error, not a crash.

use std::any::Any;
use std::collections::VecDeque;
use std::ffi::c_void;
use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::code::Code;

/// An opaque pointer of CUDA.
pub type Handle = *mut c_void;

/// A handle that is stored and may be used by any thread.
#[derive(Debug, Clone, Copy)]
pub struct StoredHandle(pub Handle);
// SAFETY: a number. Only `Object::find` dereferences it.
unsafe impl Send for StoredHandle {}
// SAFETY: as above.
unsafe impl Sync for StoredHandle {}

/// A pointer that the program gets back on another thread.
#[derive(Debug, Clone, Copy)]
pub struct Token(pub *mut c_void);
// SAFETY: CUDA's contract for user data of host functions and graphs: the program knows that another thread gets it. It is
// not dereferenced here.
unsafe impl Send for Token {}
// SAFETY: as above.
unsafe impl Sync for Token {}

/// `CU_STREAM_PER_THREAD`, the handle of the calling thread's default stream.
pub const PER_THREAD: usize = 2;

/// The handle that `stream` means in functions for per-thread default streams.
pub fn per_thread(stream: Handle) -> Handle {
    if stream.is_null() {
        PER_THREAD as Handle
    } else {
        stream
    }
}

/// A type that can be behind a handle.
pub trait Kind: Any + Send + Sync {
    /// A number that no other type has.
    const TAG: u64;
    /// The error for a handle of another type, or of a destroyed object.
    const WRONG: Code = Code::INVALID_HANDLE;
}

/// An object with its tag, which is 0 after the object is destroyed.
#[derive(Debug)]
#[repr(C)]
pub struct Object<T> {
    tag: AtomicU64,
    inner: T,
}

impl<T> Deref for Object<T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.inner
    }
}

/// The number of destroyed objects that keep their memory.
const QUARANTINE: usize = 4096;
static RETIRED: Mutex<VecDeque<Box<dyn Any + Send>>> = Mutex::new(VecDeque::new());

impl<T: Kind> Object<T> {
    /// Makes an object that lives until it is destroyed.
    pub fn create(inner: T) -> &'static Self {
        Box::leak(Box::new(Self {
            tag: AtomicU64::new(T::TAG),
            inner,
        }))
    }

    pub fn handle(&self) -> Handle {
        std::ptr::from_ref(self).cast_mut().cast()
    }

    /// The object behind a handle.
    ///
    /// # Safety
    /// `handle` is null, small, or an address that can be read, as handles that
    /// this library gave out are.
    pub unsafe fn find(handle: Handle) -> Result<&'static Self, Code> {
        let object = handle.cast::<Self>();
        // 1 and 2 are special streams; no object lies in the first page.
        if (object as usize) < 4096 || !object.is_aligned() {
            return Err(T::WRONG);
        }
        // SAFETY: readable by the contract above. 'static holds for objects that are not destroyed. Destroyed ones stay in
        // quarantine longer than the calls that have begun before.
        let object = unsafe { &*object };
        if object.tag.load(Ordering::Acquire) == T::TAG {
            Ok(object)
        } else {
            Err(T::WRONG)
        }
    }

    /// Whether it has not been destroyed.
    pub fn is_alive(&self) -> bool {
        self.tag.load(Ordering::Acquire) == T::TAG
    }

    /// Ends the handle but not the object, to which others still refer; false if another call has done so.
    pub fn end_handle(&'static self) -> bool {
        self.tag
            .compare_exchange(T::TAG, 0, Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
    }

    /// Ends the object; false if another call has done so.
    pub fn destroy(&'static self) -> bool {
        let first = self.end_handle();
        if first {
            // SAFETY: only the call that ended the handle gets here.
            unsafe { self.quarantine() };
        }
        first
    }

    /// Ends an object whose handle has ended and to which nothing refers.
    ///
    /// # Safety
    /// Called once.
    pub unsafe fn quarantine(&'static self) {
        // SAFETY: `create` leaked it from a Box, which nothing else takes.
        let object = unsafe { Box::from_raw(std::ptr::from_ref(self).cast_mut()) };
        let mut retired = RETIRED.lock().unwrap_or_else(PoisonError::into_inner);
        retired.push_back(object);
        let oldest = (retired.len() > QUARANTINE).then(|| retired.pop_front());
        drop(retired);
        drop(oldest);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Thing(u32);
    impl Kind for Thing {
        const TAG: u64 = 0x7411_0001;
    }

    #[test]
    fn a_handle_works_until_its_object_is_destroyed() {
        // SAFETY: handles made here, in quarantine after their end, or small.
        let find = |handle| unsafe { Object::<Thing>::find(handle) };
        let thing = Object::create(Thing(7));
        let handle = thing.handle();
        assert_eq!(find(handle).unwrap().0, 7);
        assert!(thing.destroy());
        assert!(!thing.destroy());
        assert_eq!(find(handle).err(), Some(Code::INVALID_HANDLE));
        assert_eq!(find(2 as Handle).err(), Some(Code::INVALID_HANDLE));
    }
}
