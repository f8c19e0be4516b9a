//! What the hooks for memory do: reserve, ask the driver, commit or roll back.

use core::ptr;

use tranche_shim_core::Entry;

use crate::abi::{
    CUcontext, CUdevice, CUdeviceptr, CUdeviceptr_v1, CUmemLocation, CUmemPoolProps, CUmemoryPool,
    CUresult, CUstream,
};
use crate::driver::real;
use crate::process::{self, Process, current_context};
use crate::share::{Cap, Device};

/// On which device an allocation will lie.
#[derive(Clone, Copy)]
pub enum Place {
    /// That of the current context.
    Current,
    /// That of a stream, with memory of the device's pool.
    Stream(CUstream),
    /// That of a memory pool; the stream is where it is needed first.
    Pool(CUmemoryPool, CUstream),
}

/// A number in one of the driver's two widths: of today, or of before CUDA 3.2.
pub trait Width: Copy {
    fn wide(self) -> u64;
    fn narrow(wide: u64) -> Self;
}

impl Width for usize {
    fn wide(self) -> u64 {
        self as u64
    }
    #[expect(clippy::cast_possible_truncation, reason = "64 bits")]
    fn narrow(wide: u64) -> Self {
        wide as usize
    }
}

impl Width for CUdeviceptr {
    fn wide(self) -> u64 {
        self
    }
    fn narrow(wide: u64) -> Self {
        wide
    }
}

impl Width for CUdeviceptr_v1 {
    fn wide(self) -> u64 {
        u64::from(self)
    }
    fn narrow(wide: u64) -> Self {
        Self::try_from(wide).unwrap_or(Self::MAX)
    }
}

/// Bytes reserved for an allocation that the driver is asked for.
struct Reserved {
    process: &'static Process,
    device: &'static Device,
    bytes: u64,
    context: u64,
}

impl Reserved {
    /// `None` where the memory lies on a device without a cap, or on none.
    fn new(place: Place, bytes: u64) -> Result<Option<Self>, CUresult> {
        let process = process::current()?;
        let device = match place.device(process)? {
            Some(device) if device.is_capped() => device,
            _ => return Ok(None),
        };
        let (taken, context) = match place {
            Place::Current => (device.taken_by(bytes), current_context() as u64),
            // A pool has blocks already, and goes with none of the contexts.
            Place::Stream(_) | Place::Pool(..) => (bytes, 0),
        };
        let bytes = process.reserve(device, bytes, taken)?;
        Ok(Some(Self {
            process,
            device,
            bytes,
            context,
        }))
    }

    fn commit(self, pointer: u64) {
        let entry = Entry {
            bytes: self.bytes,
            device: self.device.number,
            context: self.context,
        };
        // A table full of a million allocations: this one stays charged to the end of the process.
        if let Ok(Some(former)) = self.process.pointers.put(pointer, entry) {
            // Freed behind our back: the driver would not have given the address out again.
            give_back(self.process, former);
        }
    }

    fn roll_back(self) {
        self.process.release(self.device, self.bytes);
    }
}

fn give_back(process: &Process, entry: Entry) {
    if let Some(device) = process.device_numbered(entry.device) {
        process.release(device, entry.bytes);
    }
}

/// An allocation of `bytes` whose address the driver writes to `pointer`.
#[inline]
pub fn allocate<P: Width>(
    place: Place,
    bytes: u64,
    pointer: *mut P,
    driver: impl FnOnce() -> CUresult,
) -> CUresult {
    if pointer.is_null() || bytes == 0 {
        // The driver refuses it, in its own words.
        return driver();
    }
    let reserved = match Reserved::new(place, bytes) {
        Ok(Some(reserved)) => reserved,
        Ok(None) => return driver(),
        Err(code) => return code,
    };
    let result = driver();
    if result.is_ok() {
        // SAFETY: not null, and the driver has just written to it.
        reserved.commit(unsafe { pointer.read() }.wide());
    } else {
        reserved.roll_back();
    }
    result
}

/// Rows of `width` bytes, which the driver pads: to this many bytes on all hardware so far.
const PITCH: u64 = 512;

/// A pitched allocation. How much it takes only the driver knows, afterwards: reserved is what it
/// took so far on all hardware, and what it takes more is reserved then, or the memory freed again.
pub fn allocate_pitched<P: Width, S: Width>(
    pointer: *mut P,
    pitch: *mut S,
    (width, height): (u64, u64),
    driver: impl FnOnce() -> CUresult,
    free: impl FnOnce(P) -> CUresult,
) -> CUresult {
    if pointer.is_null() || pitch.is_null() || width == 0 || height == 0 {
        return driver();
    }
    let Some(padded) = width.checked_next_multiple_of(PITCH) else {
        return CUresult::OUT_OF_MEMORY;
    };
    let mut reserved = match Reserved::new(Place::Current, padded.saturating_mul(height)) {
        Ok(Some(reserved)) => reserved,
        Ok(None) => return driver(),
        Err(code) => return code,
    };
    let result = driver();
    if !result.is_ok() {
        reserved.roll_back();
        return result;
    }
    // SAFETY: neither is null, and the driver has just written to both.
    let (address, rows) = unsafe { (pointer.read(), pitch.read().wide().saturating_mul(height)) };
    if rows > reserved.bytes {
        let more = rows - reserved.bytes;
        match reserved.process.reserve(reserved.device, more, more) {
            Ok(more) => reserved.bytes += more,
            Err(code) => {
                free(address);
                reserved.roll_back();
                return code;
            }
        }
    } else {
        let taken = reserved.device.taken_by(rows).min(reserved.bytes);
        reserved
            .process
            .release(reserved.device, reserved.bytes - taken);
        reserved.bytes = taken;
    }
    reserved.commit(address.wide());
    result
}

/// Frees a pointer, of whatever family; one that we do not know reaches the driver as well.
#[inline]
pub fn free(pointer: u64, driver: impl FnOnce() -> CUresult) -> CUresult {
    let Some(process) = process::joined() else {
        return driver();
    };
    let Some(entry) = process.pointers.take(pointer) else {
        return driver();
    };
    let result = driver();
    if result.is_ok() {
        give_back(process, entry);
    } else if let Ok(Some(former)) = process.pointers.put(pointer, entry) {
        // Freed all the same, and given out again.
        give_back(process, former);
    }
    result
}

/// What the driver has just said of a device's memory, to be what this container has of it.
pub fn tell<S: Width>(free: *mut S, total: *mut S, driver: impl FnOnce() -> CUresult) -> CUresult {
    let result = driver();
    if !result.is_ok() {
        return result;
    }
    let told = process::current().and_then(|process| {
        let device = process.current_device()?;
        if device.is_capped() {
            correct(process.cap(device), free, total);
        }
        Ok(())
    });
    told.err().unwrap_or(result)
}

/// The total memory of a device, as this container has it.
pub fn tell_total<S: Width>(
    total: *mut S,
    handle: CUdevice,
    driver: impl FnOnce() -> CUresult,
) -> CUresult {
    let result = driver();
    if !result.is_ok() {
        return result;
    }
    match process::current() {
        Ok(process) => match process.device(handle) {
            Some(device) if device.is_capped() => {
                correct(process.cap(device), ptr::null_mut(), total);
                result
            }
            Some(_) => result,
            None => CUresult::NOT_PERMITTED,
        },
        Err(code) => code,
    }
}

/// Neither more than the cap leaves nor more than the device has. Either pointer may be null.
fn correct<S: Width>(cap: Cap, free: *mut S, total: *mut S) {
    for (value, at_most) in [(free, cap.free), (total, cap.total)] {
        if !value.is_null() {
            // SAFETY: not null, and the driver has just written to it.
            unsafe { value.write(S::narrow(at_most.min(value.read().wide()))) };
        }
    }
}

/// The end of a context: the driver frees its memory with it.
pub fn end_context(context: CUcontext, driver: impl FnOnce() -> CUresult) -> CUresult {
    let result = driver();
    if result.is_ok() {
        forget_context(context);
    }
    result
}

/// The end, maybe, of a device's primary context: at its last release, or at a reset.
pub fn end_primary_context(device: CUdevice, driver: impl FnOnce() -> CUresult) -> CUresult {
    let context = primary_context(device);
    let result = driver();
    if result.is_ok() && context.is_some() && !has_primary_context(device) {
        forget_context(context.unwrap_or(0));
    }
    result
}

fn forget_context(context: CUcontext) {
    if let (Some(process), true) = (process::joined(), context != 0) {
        process
            .pointers
            .take_context(context as u64, |entry| give_back(process, entry));
    }
}

fn has_primary_context(device: CUdevice) -> bool {
    let (mut flags, mut active) = (0, 0);
    // SAFETY: writes to the local numbers.
    let result = unsafe {
        real!(cuDevicePrimaryCtxGetState: fn(CUdevice, *mut u32, *mut i32))(
            device,
            &raw mut flags,
            &raw mut active,
        )
    };
    result.is_ok() && active != 0
}

/// The primary context's handle, if there is one: only retaining it tells.
fn primary_context(device: CUdevice) -> Option<CUcontext> {
    process::joined()?;
    if !has_primary_context(device) {
        return None;
    }
    let mut context = 0;
    // SAFETY: writes to the local handle; the reference is given back at once.
    let result = unsafe {
        let result =
            real!(cuDevicePrimaryCtxRetain: fn(*mut CUcontext, CUdevice))(&raw mut context, device);
        if result.is_ok() {
            real!(cuDevicePrimaryCtxRelease_v2: fn(CUdevice))(device);
        }
        result
    };
    result.is_ok().then_some(context)
}

impl Place {
    /// `None` for memory of the host.
    fn device(self, process: &'static Process) -> Result<Option<&'static Device>, CUresult> {
        match self {
            Self::Pool(pool, _) if let Some(noted) = process.pointers.get(pool_key(pool)) => {
                Ok(process.device_numbered(noted.device))
            }
            Self::Pool(pool, stream) if !process.has_one_device() => {
                match device_with_default_pool(process, pool) {
                    Some(device) => Ok(Some(device)),
                    None => device_of_stream(process, stream).map(Some),
                }
            }
            Self::Stream(stream) if !process.has_one_device() => {
                device_of_stream(process, stream).map(Some)
            }
            Self::Current | Self::Stream(_) | Self::Pool(..) => process.current_device().map(Some),
        }
    }
}

/// The three streams that every context has: they are the current context's.
pub const LAST_IMPLICIT_STREAM: CUstream = 2;

pub fn device_of_stream(
    process: &'static Process,
    stream: CUstream,
) -> Result<&'static Device, CUresult> {
    if stream <= LAST_IMPLICIT_STREAM {
        return process.current_device();
    }
    let mut context = 0;
    // SAFETY: `stream` is what the program passes to the driver as a stream; the rest writes to
    // local handles, and leaves the stack of contexts as it was.
    unsafe {
        let found = real!(cuStreamGetCtx: fn(CUstream, *mut CUcontext))(stream, &raw mut context);
        if !found.is_ok() {
            return Err(found);
        }
        let pushed = real!(cuCtxPushCurrent_v2: fn(CUcontext))(context);
        if !pushed.is_ok() {
            return Err(pushed);
        }
        let device = process.current_device();
        real!(cuCtxPopCurrent_v2: fn(*mut CUcontext))(&raw mut context);
        device
    }
}

fn device_with_default_pool(
    process: &'static Process,
    pool: CUmemoryPool,
) -> Option<&'static Device> {
    process.devices().find(|device| {
        let mut own = 0;
        // SAFETY: writes to the local handle.
        let result = unsafe {
            real!(cuDeviceGetDefaultMemPool: fn(*mut CUmemoryPool, CUdevice))(
                &raw mut own,
                device.handle,
            )
        };
        result.is_ok() && own == pool
    })
}

/// Notes where a new pool's memory lies.
pub fn make_pool(
    pool: *mut CUmemoryPool,
    properties: *const CUmemPoolProps,
    driver: impl FnOnce() -> CUresult,
) -> CUresult {
    let result = driver();
    if let (true, Ok(process)) = (result.is_ok(), process::current()) {
        // SAFETY: the driver has just read and written them.
        let (pool, location) = unsafe { (pool.read(), (*properties).location) };
        let device = match location.kind {
            CUmemLocation::DEVICE => process
                .device(location.id)
                .map_or(u8::MAX, |device| device.number),
            _ => u8::MAX,
        };
        // A full table: the pool counts as its stream's device's.
        let _ = process.pointers.put(
            pool_key(pool),
            Entry {
                bytes: 0,
                device,
                context: 0,
            },
        );
    }
    result
}

/// Forgets a pool.
pub fn end_pool(pool: CUmemoryPool, driver: impl FnOnce() -> CUresult) -> CUresult {
    let result = driver();
    if let (true, Some(process)) = (result.is_ok(), process::joined()) {
        process.pointers.take(pool_key(pool));
    }
    result
}

/// Pools are noted among the pointers; device addresses never have the highest bit.
fn pool_key(pool: CUmemoryPool) -> u64 {
    pool as u64 | 1 << 63
}
