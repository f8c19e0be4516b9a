//! Buffers for lists of unknown length: a mapping that lives as long as a call.

use tranche_shim_runtime::container_shares;
use tranche_shim_runtime::sys::{self, Mapping};

use crate::abi::{Plain, Return};

/// A buffer for `len` entries of an NVML type.
pub struct Buffer<T> {
    mapping: Mapping,
    len: usize,
    entries: core::marker::PhantomData<T>,
}

impl<T: Plain> Buffer<T> {
    /// A buffer for `len` entries, all zeros.
    pub fn new(len: usize) -> Result<Self, Return> {
        let len = len.max(1);
        match len.checked_mul(size_of::<T>()).map(sys::map_private) {
            Some(Ok(mapping)) => Ok(Self {
                mapping,
                len,
                entries: core::marker::PhantomData,
            }),
            Some(Err(errno)) => {
                let _ = container_shares::refuse_memory(errno);
                Err(Return::MEMORY)
            }
            None => Err(Return::MEMORY),
        }
    }

    /// The buffer's address, for the driver.
    pub fn room(&mut self) -> *mut T {
        self.mapping.start.as_ptr().cast()
    }

    /// The first `len` entries.
    pub fn seen(&self, len: usize) -> &[T] {
        let start: *const T = self.mapping.start.as_ptr().cast();
        // SAFETY: as in `first`; nothing writes while this is borrowed.
        unsafe { core::slice::from_raw_parts(start, len.min(self.len)) }
    }

    /// The first `len` entries, mutable.
    pub fn first(&mut self, len: usize) -> &mut [T] {
        let len = len.min(self.len);
        // SAFETY: the mapping holds that many, page-aligned; zeros and all that the driver writes are valid
        // values of `T` (`Plain`); the mapping is this buffer's alone.
        unsafe { core::slice::from_raw_parts_mut(self.room(), len) }
    }
}

impl<T> Drop for Buffer<T> {
    fn drop(&mut self) {
        // SAFETY: `first` borrows from this buffer, so nothing refers to it any more.
        unsafe { sys::unmap(self.mapping) };
    }
}
