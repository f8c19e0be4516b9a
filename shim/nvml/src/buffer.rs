//! Room for lists of a length that nobody knows before: a mapping of its own for as long as a call takes.

use tranche_shim_runtime::shares;
use tranche_shim_runtime::sys::{self, Mapping};

use crate::abi::Return;

/// Room for `len` entries of a type of NVML's.
pub struct Buffer<T> {
    mapping: Mapping,
    len: usize,
    entries: core::marker::PhantomData<T>,
}

/// A type of which zeros are a value: NVML's structs of numbers.
///
/// # Safety
///
/// All zeros must be a valid value, and so must whatever the driver writes.
pub unsafe trait Plain: Copy {}

// SAFETY: a number.
unsafe impl Plain for u32 {}

impl<T: Plain> Buffer<T> {
    /// Room for `len` entries, all zeros.
    pub fn new(len: usize) -> Result<Self, Return> {
        let len = len.max(1);
        match len.checked_mul(size_of::<T>()).map(sys::map_private) {
            Some(Ok(mapping)) => Ok(Self {
                mapping,
                len,
                entries: core::marker::PhantomData,
            }),
            Some(Err(errno)) => {
                let _ = shares::refuse_memory(errno);
                Err(Return::MEMORY)
            }
            None => Err(Return::MEMORY),
        }
    }

    /// The room, for the driver to write to.
    pub fn room(&mut self) -> *mut T {
        self.mapping.start.as_ptr().cast()
    }

    /// The first `len` entries.
    pub fn seen(&self, len: usize) -> &[T] {
        let start: *const T = self.mapping.start.as_ptr().cast();
        // SAFETY: as in `first`; nobody writes while this is borrowed.
        unsafe { core::slice::from_raw_parts(start, len.min(self.len)) }
    }

    /// The first `len` entries, to be changed.
    pub fn first(&mut self, len: usize) -> &mut [T] {
        let len = len.min(self.len);
        // SAFETY: the mapping holds that many, page-aligned, of a type of which zeros and whatever the
        // driver writes are values; it is this buffer's alone.
        unsafe { core::slice::from_raw_parts_mut(self.room(), len) }
    }
}

impl<T> Drop for Buffer<T> {
    fn drop(&mut self) {
        // SAFETY: `first` borrows from this buffer, so nothing refers to it any more.
        unsafe { sys::unmap(self.mapping) };
    }
}
