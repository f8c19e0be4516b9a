//! `cuGetProcAddress`, in both its forms.
//!
//! The driver answers first, for the requested version and flags, with its own errors and statuses. If its answer is a
//! function of which the shim has a twin, the twin takes its place. So version (`_v2`) and stream semantics (`_ptsz`)
//! are exact by construction, also for later versions.
//!
//! Two cases cannot be mapped: a function that the shim does not know, and a new variant, with unknown arguments, of a
//! function that it handles. They are not found, as they are not by `dlsym`, and one line on stderr says so. Programs expect
//! that of an older driver.

use core::ffi::{CStr, c_char, c_int};
use core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use tranche_shim_core::MessagePart;
use tranche_shim_runtime::complain::refuse;

use crate::abi::{CUresult, Function};
use crate::driver::{self, Call, PASSING, PASSING_NAMES, SYMBOLS, index};

/// `CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND`.
const SYMBOL_NOT_FOUND: c_int = 1;

/// Replaces the driver's answer by our twin. `status` may be null.
pub fn ours(
    symbol: *const c_char,
    function: *mut Function,
    status: *mut c_int,
    driver: Call<'_>,
) -> CUresult {
    let result = driver.make();
    if !result.is_ok() || function.is_null() {
        return result;
    }
    // SAFETY: not null, and the driver has just written to it.
    let real = unsafe { function.read() };
    if real.is_null() {
        return result;
    }
    if let Some(twin) = twin(real) {
        // SAFETY: as above.
        unsafe { function.write(twin) };
        return result;
    }
    // SAFETY: the driver found a function by this C string.
    let name = unsafe { CStr::from_ptr(symbol) };
    if PASSING_NAMES.binary_search(&hash(name)).is_ok() {
        return result;
    }
    let _ = refuse(&[&[
        MessagePart::Text("this driver has the function "),
        MessagePart::Text(name.to_str().unwrap_or("")),
        MessagePart::Text(
            ", or a variant of it, that this release of Tranche does not know; programs do not find it, because the cap \
             might not hold for it: use a newer release",
        ),
    ]]);
    // SAFETY: as above; the status is the program's to be written to, or null.
    unsafe {
        function.write(core::ptr::null_mut());
        if !status.is_null() {
            status.write(SYMBOL_NOT_FOUND);
        }
    }
    CUresult::NOT_FOUND
}

/// The hash that the build script uses for names without suffix.
fn hash(name: &CStr) -> u32 {
    name.to_bytes().iter().fold(0x811c_9dc5, |hash, &byte| {
        (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193)
    })
}

/// Real functions by address, each with the number of our twin above 48 bits; 0 means free. It is filled
/// once; if several threads fill it, all write the same values.
static TWINS: [AtomicU64; TWINS_LEN] = [const { AtomicU64::new(0) }; TWINS_LEN];
static FILLED: AtomicBool = AtomicBool::new(false);

const TWINS_LEN: usize = (2 * (SYMBOLS - PASSING)).next_power_of_two();
const ADDRESS: u64 = (1 << 48) - 1;

fn twin(real: Function) -> Option<Function> {
    if !FILLED.load(Ordering::Acquire) {
        fill();
    }
    let real = real as u64 & ADDRESS;
    for place in places(real) {
        let entry = TWINS[place].load(Ordering::Relaxed);
        if entry == 0 {
            return None;
        }
        if entry & ADDRESS == real {
            let number = usize::try_from(entry >> 48).ok()?;
            return driver::handled(number).map(|symbol| symbol.0.cast_mut().cast());
        }
    }
    None
}

#[cold]
#[inline(never)]
fn fill() {
    for (number, index) in (PASSING..SYMBOLS).enumerate() {
        let Some(real) = driver::real_if_any(index) else {
            continue;
        };
        let real = real as u64 & ADDRESS;
        let entry = real | (number as u64) << 48;
        for place in places(real) {
            let free =
                TWINS[place].compare_exchange(0, entry, Ordering::Relaxed, Ordering::Relaxed);
            // The same address under a second name (an alias in the driver) keeps its first.
            if free.is_ok() || free.is_err_and(|there| there & ADDRESS == real) {
                break;
            }
        }
    }
    FILLED.store(true, Ordering::Release);
}

/// The places where a function is searched, in order. They depend on its offset in the driver's library, not on its
/// address, so that a look-up takes the same time in every process.
fn places(address: u64) -> impl Iterator<Item = usize> {
    let offset = address.wrapping_sub(driver::address(index::cuInit) as u64);
    let hash = offset.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> (u64::BITS - TWINS_LEN.ilog2());
    #[expect(clippy::cast_possible_truncation, reason = "below the table's length")]
    let first = hash as usize;
    (0..TWINS_LEN).map(move |probe| (first + probe) % TWINS_LEN)
}
