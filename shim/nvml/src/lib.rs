//! `libnvidia-ml.so.1` as a capped container sees it: the driver's management library, with the
//! memory of the container's shares.
//!
//! It is loaded as `libcuda.so.1` is, and exports and forwards all that any driver's does. What it
//! changes: a GPU's memory is the sum of its shares' caps, used is what the shares' processes hold,
//! and the rest is free. It reads the pages at each question and keeps nothing.
//!
//! `nvmlInit` refuses, with one line on stderr, where the pages are missing or wrong. A GPU that is
//! visible without a page does not stop it, so that `nvidia-smi` can be used to see what is amiss:
//! only the question for that GPU's memory is refused, as CUDA refuses the GPU.
#![no_std]

use core::ffi::{CStr, c_char, c_int, c_uint, c_void};

use tranche_shim_core::{GpuUuid, paths};
use tranche_shim_runtime::complain::Refused;
use tranche_shim_runtime::library::{Library, Ours};
use tranche_shim_runtime::{accounts, shares};

use symbols::index;

mod symbols {
    #![allow(
        missing_docs,
        clippy::unreadable_literal,
        reason = "generated from symbols.txt"
    )]
    use super::forward_to;
    use tranche_shim_runtime::forward;
    include!(concat!(env!("OUT_DIR"), "/symbols.rs"));
}

/// The driver's library.
static DRIVER: Library = Library::new(
    paths::REAL_NVML,
    (c"nvmlInit_v2", Ours(nvmlInit_v2 as *const ())),
);

tranche_shim_runtime::library! {
    driver: DRIVER,
    first: symbols::nvmlComputeInstanceDestroy,
    handled: HANDLED,
    missing: missing,
    unavailable: unavailable,
}

/// `nvmlReturn_t`: a number, since newer drivers return codes that we do not know.
#[repr(transparent)]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Return(c_uint);

impl Return {
    const SUCCESS: Self = Self(0);
    const NO_PERMISSION: Self = Self(4);
    const LIBRARY_NOT_FOUND: Self = Self(12);
    const FUNCTION_NOT_FOUND: Self = Self(13);
}

/// What a function answers that this driver does not have.
extern "C" fn missing() -> Return {
    Return::FUNCTION_NOT_FOUND
}

/// What every function answers without a driver.
extern "C" fn unavailable() -> Return {
    Return::LIBRARY_NOT_FOUND
}

/// A GPU, to the driver's library; opaque.
type Device = usize;

/// `nvmlMemory_t`, in bytes.
#[repr(C)]
struct Memory {
    total: u64,
    free: u64,
    used: u64,
}

/// `nvmlMemory_v2_t`, in bytes.
#[repr(C)]
struct MemoryV2 {
    version: c_uint,
    total: u64,
    reserved: u64,
    free: u64,
    used: u64,
}

macro_rules! hooks {
    ($(fn $name:ident($($argument:ident: $type:ty),*) |$driver:ident| $body:expr;)*) => {
        $(
            #[unsafe(no_mangle)]
            unsafe extern "C" fn $name($($argument: $type),*) -> Return {
                let real = typed::<unsafe extern "C" fn($($type),*) -> Return>(index::$name);
                // SAFETY: the arguments are the caller's, who owes the real function what it owes
                // this one: valid pointers, where nvml.h does not allow null.
                let $driver = || unsafe { real($($argument),*) };
                $body
            }
        )*
    };
}

hooks! {
    fn nvmlInit() |driver| initialise(driver);
    fn nvmlInitWithFlags(flags: c_uint) |driver| initialise(driver);
    fn nvmlInit_v2() |driver| initialise(driver);
    fn nvmlDeviceGetMemoryInfo(device: Device, memory: *mut Memory) |driver| tell(device, driver, |share| {
        // SAFETY: the driver has just written to it.
        let memory = unsafe { &mut *memory };
        (memory.total, memory.free, memory.used) = (share.total, share.free(), share.used);
    });
    fn nvmlDeviceGetMemoryInfo_v2(device: Device, memory: *mut MemoryV2) |driver| tell(device, driver, |share| {
        // SAFETY: the driver has just written to it, and accepted its version.
        let memory = unsafe { &mut *memory };
        (memory.total, memory.free, memory.used) = (share.total, share.free(), share.used);
        // What the driver keeps is not the share's.
        memory.reserved = 0;
    });
}

/// The functions above, and the one below, in the order of their indices: that of their names.
static HANDLED: &[Ours] = &[
    Ours(nvmlDeviceGetMemoryInfo as *const ()),
    Ours(nvmlDeviceGetMemoryInfo_v2 as *const ()),
    Ours(nvmlErrorString as *const ()),
    Ours(nvmlInit as *const ()),
    Ours(nvmlInitWithFlags as *const ()),
    Ours(nvmlInit_v2 as *const ()),
];

const _: () = {
    let handled = [
        index::nvmlDeviceGetMemoryInfo,
        index::nvmlDeviceGetMemoryInfo_v2,
        index::nvmlErrorString,
        index::nvmlInit,
        index::nvmlInitWithFlags,
        index::nvmlInit_v2,
    ];
    assert!(symbols::PASSING + handled.len() == symbols::SYMBOLS);
    let mut nth = 0;
    while nth < handled.len() {
        assert!(handled[nth] == symbols::PASSING + nth);
        nth += 1;
    }
    assert!(!symbols::HANDLED_NAMES.is_empty());
};

/// For the hooks: the function `index` as an `F`, the type of a C function.
fn typed<F: Copy>(index: usize) -> F {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
    let address = address(index);
    // SAFETY: `F` is the type that nvml.h gives the function of this name, whose address this is, or
    // that of one of ours, which takes no arguments: in this ABI the caller clears what it passed.
    unsafe { core::mem::transmute_copy(&address) }
}

fn initialise(driver: impl FnOnce() -> Return) -> Return {
    if !DRIVER.open() {
        return Return::LIBRARY_NOT_FOUND;
    }
    match shares::each(&mut |_| Ok(())) {
        Ok(()) => driver(),
        Err(Refused) => Return::NO_PERMISSION,
    }
}

/// A GPU's memory, in bytes, as this container has it.
struct Sum {
    total: u64,
    used: u64,
}

impl Sum {
    fn free(&self) -> u64 {
        self.total.saturating_sub(self.used)
    }
}

fn tell(device: Device, driver: impl FnOnce() -> Return, correct: impl FnOnce(Sum)) -> Return {
    let result = driver();
    if result != Return::SUCCESS {
        return result;
    }
    let Some(gpu) = identify(device) else {
        return Return::NO_PERMISSION;
    };
    match sum(gpu) {
        Ok(None) => result,
        Ok(Some(sum)) => {
            correct(sum);
            result
        }
        Err(Refused) => Return::NO_PERMISSION,
    }
}

/// `None` where the GPU has no cap.
fn sum(gpu: GpuUuid) -> Result<Option<Sum>, Refused> {
    let (mut known, mut capped, mut sum) = (false, true, Sum { total: 0, used: 0 });
    shares::each(&mut |share| {
        if share.gpu == gpu {
            known = true;
            match share.limit {
                None => capped = false,
                Some(limit) => {
                    sum.total = sum.total.saturating_add(limit);
                    sum.used = sum
                        .used
                        .saturating_add(accounts::used(&share.name)?.min(limit));
                }
            }
        }
        Ok(())
    })?;
    if known {
        Ok(capped.then_some(sum))
    } else {
        Err(shares::refuse_gpu(gpu))
    }
}

fn identify(device: Device) -> Option<GpuUuid> {
    let mut text = [0u8; 96];
    let real = typed::<unsafe extern "C" fn(Device, *mut c_char, c_uint) -> Return>(
        index::nvmlDeviceGetUUID,
    );
    // SAFETY: `device` is the caller's, accepted by the driver just now; `text` has that many bytes.
    let result = unsafe { real(device, text.as_mut_ptr().cast(), 96) };
    let text = CStr::from_bytes_until_nul(&text).ok()?;
    (result == Return::SUCCESS).then_some(())?;
    GpuUuid::parse(text.to_str().ok()?)
}

/// The only function that returns no code: without a driver it has texts of its own.
#[unsafe(no_mangle)]
extern "C" fn nvmlErrorString(result: Return) -> *const c_char {
    let real = address(index::nvmlErrorString);
    if real == unavailable as *mut c_void || real == missing as *mut c_void {
        return match result {
            Return::NO_PERMISSION => c"Insufficient Permissions",
            _ => c"NVML Shared Library Not Found",
        }
        .as_ptr();
    }
    // SAFETY: the driver's function of this name, with its type in nvml.h.
    let real =
        unsafe { core::mem::transmute::<*mut c_void, extern "C" fn(c_int) -> *const c_char>(real) };
    real(result.0.cast_signed())
}

#[cfg(not(test))]
#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    tranche_shim_runtime::sys::abort()
}
