//! Handles: contexts, streams, events and the like behind CUDA's opaque pointers.
//!
//! A handle is the object's address, so that using one costs nothing. A destroyed
//! object stays in quarantine for a while: a handle used after its end is an error
//! with a name, not a crash, as long as the program notices soon.

use std::any::Any;
use std::collections::VecDeque;
use std::ffi::c_void;
use std::ops::Deref;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

use crate::code::Code;

/// An opaque pointer of CUDA's.
pub type Handle = *mut c_void;

/// A handle kept to be given back.
#[derive(Debug, Clone, Copy)]
pub struct Kept(pub Handle);
// SAFETY: a number to us: nothing looks behind it but `Object::find`.
unsafe impl Send for Kept {}
// SAFETY: as above.
unsafe impl Sync for Kept {}

/// A pointer that the program wants back on another thread.
#[derive(Debug, Clone, Copy)]
pub struct Token(pub *mut c_void);
// SAFETY: CUDA's contract for user data of host functions and graphs: the program
// knows that another thread gets it. Nothing here looks behind it.
unsafe impl Send for Token {}
// SAFETY: as above.
unsafe impl Sync for Token {}

/// `CU_STREAM_PER_THREAD`, the handle of the calling thread's default stream.
pub const PER_THREAD: usize = 2;

/// The handle that a per-thread-default-stream function means.
pub fn per_thread(stream: Handle) -> Handle {
    if stream.is_null() {
        PER_THREAD as Handle
    } else {
        stream
    }
}

/// What can be behind a handle.
pub trait Kind: Any + Send + Sync {
    /// What tells it from everything else.
    const TAG: u64;
    /// What a handle of something else, or of something destroyed, is.
    const WRONG: Code = Code::INVALID_HANDLE;
}

/// An object with its tag; the tag is gone when it is destroyed.
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

/// Destroyed objects that keep their memory.
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

    /// The handle to give out.
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
        // SAFETY: readable by the contract above. 'static holds for objects that
        // are not destroyed; those that are stay in quarantine for long enough
        // for calls already under way.
        let object = unsafe { &*object };
        if object.tag.load(Ordering::Acquire) == T::TAG {
            Ok(object)
        } else {
            Err(T::WRONG)
        }
    }

    /// Whether it has not been destroyed.
    pub fn alive(&self) -> bool {
        self.tag.load(Ordering::Acquire) == T::TAG
    }

    /// Ends the handle but not the object, which others still refer to; false if another call has
    /// done so.
    pub fn abandon(&'static self) -> bool {
        self.tag
            .compare_exchange(T::TAG, 0, Ordering::AcqRel, Ordering::Relaxed)
            .is_ok()
    }

    /// Ends the object; false if another call has done so.
    pub fn destroy(&'static self) -> bool {
        let first = self.abandon();
        if first {
            // SAFETY: only the call that ended the handle comes here.
            unsafe { self.bury() };
        }
        first
    }

    /// Ends an object that was abandoned and that nobody refers to any more.
    ///
    /// # Safety
    /// Called once.
    pub unsafe fn bury(&'static self) {
        // SAFETY: `create` leaked it from a Box, which nobody else takes back.
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
