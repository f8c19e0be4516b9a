//! Memory of a GPU's heap that `dma-buf`s keep.
//!
//! A memory object is an allocation of whole blocks, or a block that several allocations share. It is charged until it is
//! freed and no `dma-buf` keeps it. A later allocation at its addresses is another object.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::device::{Device, device};

#[derive(Debug)]
struct Object {
    device: i32,
    start: u64,
    bytes: u64,
    /// The number of `dma-buf`s that keep it.
    holders: u32,
    /// Whether it was freed, so that only `dma-buf`s keep it.
    is_freed: bool,
}

/// Objects by number.
fn objects() -> MutexGuard<'static, BTreeMap<u64, Object>> {
    static OBJECTS: Mutex<BTreeMap<u64, Object>> = Mutex::new(BTreeMap::new());
    OBJECTS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Holds the object that begins at `start` and was not freed; returns its number.
pub fn hold(device: i32, start: u64, bytes: u64) -> u64 {
    let mut objects = objects();
    let is_it = |it: &Object| (it.device, it.start, it.is_freed) == (device, start, false);
    if let Some((number, object)) = objects.iter_mut().find(|(_, object)| is_it(object)) {
        object.holders += 1;
        return *number;
    }
    let number = objects.keys().next_back().map_or(1, |last| last + 1);
    let object = Object {
        device,
        start,
        bytes,
        holders: 1,
        is_freed: false,
    };
    objects.insert(number, object);
    number
}

/// Ends a hold by [`hold`].
pub fn let_go(number: u64) {
    let mut objects = objects();
    let Some(object) = objects.get_mut(&number) else {
        return;
    };
    object.holders -= 1;
    if object.holders > 0 {
        return;
    }
    if let Some(object) = objects.remove(&number)
        && object.is_freed
        && let Ok(device) = device(object.device)
    {
        device.release(object.bytes);
    }
}

/// Returns the memory of an object that is freed, unless it is held.
pub fn free(device: &Device, start: u64, bytes: u64) {
    let mut objects = objects();
    let is_it =
        |it: &&mut Object| (it.device, it.start, it.is_freed) == (device.ordinal, start, false);
    if let Some(object) = objects.values_mut().find(is_it) {
        object.is_freed = true;
    } else {
        drop(objects);
        device.release(bytes);
    }
}
