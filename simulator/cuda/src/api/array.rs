//! Arrays and mipmapped arrays.

use crate::array::{
    Array, Mipmap, Requirements, Shape2, Shape3, create, create_mipmap, destroy, required_bytes,
};
use crate::code::Code;
use crate::device::device;
use crate::driver::driver;
use crate::export::{export, get, put};
use crate::heap::BLOCK;
use crate::object::{Handle, Object};

export! {
    fn cuMipmappedArrayCreate(to: *mut Handle, shape: *const Shape3, levels: u32) {
        put(to, create_mipmap(get(shape)?, levels)?)
    }
    fn cuMipmappedArrayGetLevel(to: *mut Handle, mipmap: Handle, level: u32) {
        driver()?;
        let mipmap = Object::<Mipmap>::find(mipmap)?;
        put(to, mipmap.levels.get(level as usize).ok_or(Code::INVALID_VALUE)?.0)
    }
    fn cuMipmappedArrayDestroy(mipmap: Handle) {
        driver()?;
        let mipmap = Object::<Mipmap>::find(mipmap)?;
        for array in &mipmap.levels {
            destroy(array.0)?;
        }
        mipmap.destroy();
        Ok(())
    }
    fn cuArrayGetMemoryRequirements(to: *mut Requirements, array: Handle, of: i32) {
        device(of)?;
        put(to, Requirements::of(required_bytes(array)?))
    }
    fn cuMipmappedArrayGetMemoryRequirements(to: *mut Requirements, mipmap: Handle, of: i32) {
        device(of)?;
        let mipmap = Object::<Mipmap>::find(mipmap)?;
        // Each level has its own blocks.
        let mut bytes = 0;
        for level in &mipmap.levels {
            bytes += required_bytes(level.0)?.next_multiple_of(BLOCK);
        }
        put(to, Requirements::of(bytes))
    }
    fn cuArrayCreate_v2(to: *mut Handle, shape: *const Shape2) {
        let shape = get(shape)?;
        put(to, create(Shape3 {
            width: shape.width,
            height: shape.height,
            depth: 0,
            format: shape.format,
            channels: shape.channels,
            flags: 0,
        })?)
    }
    fn cuArray3DCreate_v2(to: *mut Handle, shape: *const Shape3) { put(to, create(get(shape)?)?) }
    fn cuArrayDestroy(array: Handle) {
        driver()?;
        destroy(array)
    }
    fn cuArrayGetDescriptor_v2(to: *mut Shape2, array: Handle) {
        driver()?;
        let shape = Object::<Array>::find(array)?.shape;
        put(to, Shape2 {
            width: shape.width,
            height: shape.height,
            format: shape.format,
            channels: shape.channels,
        })
    }
    fn cuArray3DGetDescriptor_v2(to: *mut Shape3, array: Handle) {
        driver()?;
        put(to, Object::<Array>::find(array)?.shape)
    }
}
