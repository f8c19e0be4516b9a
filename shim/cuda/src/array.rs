//! Arrays and mipmaps: memory in the driver's own layout.
//!
//! The driver returns how much memory an array needs only for one without memory (deferred mapping). So an array of the
//! same shape is created and destroyed first. If the driver cannot do that (before 11.6, or for this shape), a formula
//! that assumes the largest tiles of any hardware gives the charge. Arrays are charged in whole blocks, because it is
//! unknown in which block a small one lies.

use tranche_shim_core::Entry;
use tranche_shim_core::physical::Mark;

use crate::abi::{
    ArrayShape2, ArrayShape3, CUDA_ARRAY_MEMORY_REQUIREMENTS, CUDA_ARRAY3D_DEFERRED_MAPPING,
    CUDA_ARRAY3D_SPARSE, CUarray, CUdevice, CUresult,
};
use crate::charge::{self, charge, note};
use crate::device::Device;
use crate::driver::{Call, real};
use crate::keys::{self, Kind, key};
use crate::memory::Width;
use crate::process::{self, Process};
use crate::vmm;

/// The kind of array.
#[derive(Clone, Copy)]
pub enum Shape {
    Array(ArrayShape3<usize>),
    /// A mipmap with so many levels, each half the size of the one before.
    Mipmap(ArrayShape3<usize>, u32),
}

/// A shape without depth.
///
/// # Safety
///
/// Null, or readable.
pub unsafe fn flat<S: Width>(shape: *const ArrayShape2<S>) -> Option<Shape> {
    // SAFETY: the caller's promise.
    let shape = unsafe { shape.as_ref()? };
    Some(Shape::Array(ArrayShape3 {
        width: Width::narrow(shape.width.wide()),
        height: Width::narrow(shape.height.wide()),
        depth: 0,
        format: shape.format,
        channels: shape.channels,
        flags: 0,
    }))
}

/// A shape with depth.
///
/// # Safety
///
/// Null, or readable.
pub unsafe fn deep<S: Width>(shape: *const ArrayShape3<S>) -> Option<ArrayShape3<usize>> {
    // SAFETY: the caller's promise.
    let shape = unsafe { shape.as_ref()? };
    Some(ArrayShape3 {
        width: Width::narrow(shape.width.wide()),
        height: Width::narrow(shape.height.wide()),
        depth: Width::narrow(shape.depth.wide()),
        format: shape.format,
        channels: shape.channels,
        flags: shape.flags,
    })
}

/// Makes an array or a mipmap.
pub fn make(array: *mut CUarray, shape: Option<Shape>, driver: Call<'_>) -> CUresult {
    let Some(shape) = shape.filter(|_| !array.is_null()) else {
        return driver.make();
    };
    if !shape.has_memory() {
        return make_empty(array, shape, driver);
    }
    let bytes = |device: &'static Device| {
        let bytes = shape
            .bytes_said(device)
            .or_else(|| shape.bytes_at_most())
            .ok_or(CUresult::OUT_OF_MEMORY)?;
        let taken = device.taken_by(bytes.max(1));
        Ok((taken, taken))
    };
    charge(Process::current_capped, bytes, driver, |reserved| {
        // SAFETY: not null, and the driver has just written to it.
        let array = unsafe { array.read() };
        let context = reserved.process.contexts.current();
        reserved.note(key(Kind::Array, array as u64), context);
        Ok(())
    })
}

/// Makes an array without memory. What is later mapped to a sparse array stays mapped until the array or its context
/// ends.
fn make_empty(array: *mut CUarray, shape: Shape, driver: Call<'_>) -> CUresult {
    let result = driver.make();
    if result.is_ok()
        && shape.is_sparse()
        && let Some(process) = process::joined()
    {
        let entry = Entry {
            bytes: 0,
            device: 0,
            context: process.contexts.current(),
        };
        // SAFETY: not null, and the driver has just written to it.
        note(process, vmm::array_key(unsafe { array.read() }), entry);
    }
    result
}

/// Ends the mappings to an array that were made before `mark`, because its entry of the table ended with its context.
pub fn forget(process: &Process, number: u64, mark: Mark) {
    if keys::is_of(number, Kind::Array) {
        process.note_physical(|physical, freed| physical.end_owner(number, mark, freed));
    }
}

/// Destroys an array or a mipmap.
pub fn end(array: CUarray, driver: Call<'_>) -> CUresult {
    let Some(process) = process::joined() else {
        return driver.make();
    };
    charge::end(
        process,
        [key(Kind::Array, array as u64)],
        || vmm::end_array(process, array, driver),
        |_, entry| {
            if let Some(device) = process.device_numbered(entry.device) {
                process.release(device, entry.bytes);
            }
        },
    )
}

impl Shape {
    fn base(&self) -> &ArrayShape3<usize> {
        match self {
            Self::Array(shape) | Self::Mipmap(shape, _) => shape,
        }
    }

    /// Whether memory can be mapped to it piece by piece.
    fn is_sparse(&self) -> bool {
        self.base().flags & CUDA_ARRAY3D_SPARSE != 0
    }

    /// Whether it has its own memory. Otherwise memory is mapped to it later.
    fn has_memory(&self) -> bool {
        self.base().flags & (CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING) == 0
    }

    /// How much memory it would take, as the driver says.
    fn bytes_said(&self, device: &Device) -> Option<u64> {
        let shape = ArrayShape3 {
            flags: self.base().flags | CUDA_ARRAY3D_DEFERRED_MAPPING,
            ..*self.base()
        };
        let mut twin = 0;
        let mut needs = CUDA_ARRAY_MEMORY_REQUIREMENTS::default();
        // SAFETY: reads the local shape, writes the local handle and needs; the twin is destroyed, and
        // nothing else uses it.
        let result = unsafe {
            match self {
                Self::Array(_) => {
                    let made = real!(cuArray3DCreate_v2: fn(*mut CUarray, *const ArrayShape3<usize>))(
                        &raw mut twin,
                        &raw const shape,
                    );
                    if !made.is_ok() {
                        return None;
                    }
                    let result = real!(cuArrayGetMemoryRequirements: fn(*mut CUDA_ARRAY_MEMORY_REQUIREMENTS, CUarray, CUdevice))(
                        &raw mut needs,
                        twin,
                        device.handle,
                    );
                    real!(cuArrayDestroy: fn(CUarray))(twin);
                    result
                }
                Self::Mipmap(_, levels) => {
                    let made = real!(cuMipmappedArrayCreate: fn(*mut CUarray, *const ArrayShape3<usize>, u32))(
                        &raw mut twin,
                        &raw const shape,
                        *levels,
                    );
                    if !made.is_ok() {
                        return None;
                    }
                    let result = real!(cuMipmappedArrayGetMemoryRequirements: fn(*mut CUDA_ARRAY_MEMORY_REQUIREMENTS, CUarray, CUdevice))(
                        &raw mut needs,
                        twin,
                        device.handle,
                    );
                    real!(cuMipmappedArrayDestroy: fn(CUarray))(twin);
                    result
                }
            }
        };
        (result.is_ok() && needs.size > 0).then_some(needs.size as u64)
    }

    /// An upper bound of its size on any hardware.
    fn bytes_at_most(&self) -> Option<u64> {
        let levels = match *self {
            Self::Array(_) => 1,
            Self::Mipmap(_, levels) => levels.clamp(1, 32),
        };
        let base = self.base();
        let element = element(base.format).checked_mul(u64::from(base.channels.max(1)))?;
        (0..levels).try_fold(0u64, |sum, level| {
            let halved = |extent: usize| match extent as u64 {
                0 => 0,
                extent => (extent >> level).max(1),
            };
            // Tiles of at most 512 bytes by 128 rows by 32 layers, no larger than twice what they hold.
            let padded = |extent: u64, tile: u64| {
                extent.checked_next_multiple_of(tile.min(extent.checked_next_power_of_two()?))
            };
            let row = halved(base.width)
                .checked_mul(element)?
                .checked_next_multiple_of(512)?;
            let rows = padded(halved(base.height).max(1), 128)?.max(8);
            let layers = padded(halved(base.depth).max(1), 32)?;
            let level = row.checked_mul(rows)?.checked_mul(layers)?;
            sum.checked_add(level)
        })
    }
}

/// Bytes of a channel; for block formats, planar formats and unknown ones, the most that an element can have.
fn element(format: u32) -> u64 {
    match format {
        0x01 | 0x08 => 1,
        0x02 | 0x09 | 0x10 => 2,
        0x03 | 0x0a | 0x20 => 4,
        _ => 16,
    }
}
