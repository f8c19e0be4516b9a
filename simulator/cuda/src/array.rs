//! Arrays: device memory with a shape. Textures and surfaces are not simulated.
//!
//! An array with deferred mapping has no memory, and none can be mapped to it here. It has the memory requirements of
//! its shape.

use crate::code::Code;
use crate::context::current;
use crate::memory;
use crate::object::{Handle, Kind, Object, StoredHandle};

/// cuda.h's `CUDA_ARRAY3D_DESCRIPTOR`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Shape3 {
    pub width: usize,
    pub height: usize,
    pub depth: usize,
    pub format: u32,
    pub channels: u32,
    pub flags: u32,
}

/// cuda.h's `CUDA_ARRAY_DESCRIPTOR`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Shape2 {
    pub width: usize,
    pub height: usize,
    pub format: u32,
    pub channels: u32,
}

#[derive(Debug)]
pub struct Array {
    /// 0 for an array without memory.
    address: u64,
    bytes: u64,
    pub shape: Shape3,
    element: u64,
}

impl Kind for Array {
    const TAG: u64 = 0x4152_5200_0000_0001;
}

impl Array {
    /// The address of its memory.
    pub fn address(&self) -> Result<u64, Code> {
        if self.address == 0 {
            Err(Code::INVALID_VALUE)
        } else {
            Ok(self.address)
        }
    }

    /// Bytes from a row to the next.
    pub fn pitch(&self) -> u64 {
        self.shape.width as u64 * self.element
    }

    /// Rows in a layer.
    pub fn rows(&self) -> u64 {
        self.shape.height.max(1) as u64
    }
}

/// Bytes of an element of so many channels.
fn element(format: u32, channels: u32) -> Result<u64, Code> {
    let bytes = match format {
        0x01 | 0x08 => 1,
        0x02 | 0x09 | 0x10 => 2,
        0x03 | 0x0a | 0x20 => 4,
        _ => return Err(Code::INVALID_VALUE),
    };
    if matches!(channels, 1 | 2 | 4) {
        Ok(bytes * u64::from(channels))
    } else {
        Err(Code::INVALID_VALUE)
    }
}

/// `CUDA_ARRAY3D_DEFERRED_MAPPING`.
const DEFERRED: u32 = 0x80;

/// cuda.h's `CUDA_ARRAY_MEMORY_REQUIREMENTS`.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Requirements {
    size: usize,
    alignment: usize,
    reserved: [u32; 4],
}

impl Requirements {
    pub fn of(bytes: u64) -> Self {
        Self {
            size: usize::try_from(bytes).unwrap_or(usize::MAX),
            alignment: 64 << 10,
            reserved: [0; 4],
        }
    }
}

/// Creates an array.
pub fn create(shape: Shape3) -> Result<Handle, Code> {
    let context = current()?;
    let element = element(shape.format, shape.channels)?;
    let bytes = [shape.width, shape.height.max(1), shape.depth.max(1)]
        .iter()
        .try_fold(element, |bytes, extent| bytes.checked_mul(*extent as u64))
        .ok_or(Code::INVALID_VALUE)?;
    let address = if shape.flags & DEFERRED == 0 {
        memory::allocate(context, bytes)?
    } else {
        0
    };
    Ok(Object::create(Array {
        address,
        bytes,
        shape,
        element,
    })
    .handle())
}

/// A mipmapped array: arrays, each of half the size of the one before.
#[derive(Debug)]
pub struct Mipmap {
    pub levels: Vec<StoredHandle>,
}

impl Kind for Mipmap {
    const TAG: u64 = 0x4d49_5000_0000_0001;
}

/// Frees an array.
pub fn destroy(array: Handle) -> Result<(), Code> {
    // SAFETY: a handle that a caller or `create` gave.
    let array = unsafe { Object::<Array>::find(array)? };
    let address = array.address;
    array.destroy();
    if address == 0 {
        return Ok(());
    }
    memory::free(address)
}

/// Bytes that an array without memory would take.
pub fn required_bytes(array: Handle) -> Result<u64, Code> {
    // SAFETY: a handle that a caller or `create` gave.
    let array = unsafe { Object::<Array>::find(array)? };
    if array.address == 0 {
        Ok(array.bytes)
    } else {
        Err(Code::INVALID_VALUE)
    }
}

/// Creates a mipmapped array.
pub fn create_mipmap(shape: Shape3, levels: u32) -> Result<Handle, Code> {
    if levels == 0 || levels > 32 {
        return Err(Code::INVALID_VALUE);
    }
    let mut made = Vec::new();
    for level in 0..levels {
        let halved = |extent: usize| {
            if extent == 0 {
                0
            } else {
                (extent >> level).max(1)
            }
        };
        let smaller = Shape3 {
            width: halved(shape.width),
            height: halved(shape.height),
            depth: halved(shape.depth),
            ..shape
        };
        match create(smaller) {
            Ok(array) => made.push(StoredHandle(array)),
            Err(code) => {
                for array in made {
                    let _ = destroy(array.0);
                }
                return Err(code);
            }
        }
    }
    Ok(Object::create(Mipmap { levels: made }).handle())
}
