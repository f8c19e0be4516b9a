//! The macros that export functions, and how they read and write their arguments.

use std::ffi::{CStr, c_char};

use tranche_simulator_machine::export::{get_or, put_or};

use crate::code::Code;

/// Exports NVML functions: each body evaluates to `Result<(), Code>`.
macro_rules! export {
    ($(fn $name:ident($($argument:ident: $kind:ty),* $(,)?) $body:block)+) => {
        $(
            tranche_simulator_machine::exported! { $crate::code::Code, fn $name($($argument: $kind),*) $body }
        )+
    };
}
pub(crate) use export;

/// Exports NVML functions with the same answer for every GPU.
macro_rules! export_constants {
    ($($name:ident = $value:expr;)+) => {
        $crate::export::export! {
            $(
                fn $name(of: nvmlDevice_t, to: *mut u32) {
                    device(of)?;
                    put(to, $value)
                }
            )+
        }
    };
}
pub(crate) use export_constants;

/// Writes `value` to the caller's pointer.
///
/// # Safety
/// `to` is null or valid for a write.
pub unsafe fn put<T>(to: *mut T, value: T) -> Result<(), Code> {
    // SAFETY: the caller's contract.
    unsafe { put_or(to, value, Code::INVALID_ARGUMENT) }
}

/// Reads an argument that is passed by reference.
///
/// # Safety
/// `from` is null or valid for a read.
pub unsafe fn get<T: Copy>(from: *const T) -> Result<T, Code> {
    // SAFETY: the caller's contract.
    unsafe { get_or(from, Code::INVALID_ARGUMENT) }
}

/// Writes `text` and its final zero into a buffer of `length` bytes.
///
/// # Safety
/// `to` is null or valid for `length` bytes.
pub unsafe fn put_text(to: *mut c_char, length: u32, text: &str) -> Result<(), Code> {
    if to.is_null() {
        return Err(Code::INVALID_ARGUMENT);
    }
    if text.len() >= length as usize {
        return Err(Code::INSUFFICIENT_SIZE);
    }
    // SAFETY: the text and its zero fit, checked above.
    unsafe {
        to.cast::<u8>()
            .copy_from_nonoverlapping(text.as_ptr(), text.len());
        to.add(text.len()).write(0);
    }
    Ok(())
}

/// Reads a caller's text.
///
/// # Safety
/// `from` is null or a C string that outlives the call.
pub unsafe fn get_text<'a>(from: *const c_char) -> Result<&'a str, Code> {
    if from.is_null() {
        return Err(Code::INVALID_ARGUMENT);
    }
    // SAFETY: a C string by the contract above.
    unsafe { CStr::from_ptr(from) }
        .to_str()
        .map_err(|_| Code::INVALID_ARGUMENT)
}

/// `text` as an array of characters in one of NVML's structs.
pub fn characters<const N: usize>(text: &str) -> [c_char; N] {
    let mut array = [0; N];
    for (to, from) in array[..N - 1].iter_mut().zip(text.bytes()) {
        *to = from.cast_signed();
    }
    array
}

/// Writes a list as NVML does: `count` has the caller's room and gets the list's length. Too little room is
/// `NVML_ERROR_INSUFFICIENT_SIZE`.
///
/// # Safety
/// `count` is null or valid; `to` is null or valid for `*count` entries.
pub unsafe fn put_list<T: Copy>(count: *mut u32, to: *mut T, list: &[T]) -> Result<(), Code> {
    // SAFETY: by the contract above.
    unsafe {
        let room = get(count)? as usize;
        put(count, u32::try_from(list.len()).unwrap_or(u32::MAX))?;
        if room < list.len() {
            return Err(Code::INSUFFICIENT_SIZE);
        }
        if list.is_empty() {
            return Ok(());
        }
        if to.is_null() {
            return Err(Code::INVALID_ARGUMENT);
        }
        for (index, entry) in list.iter().enumerate() {
            to.add(index).write_unaligned(*entry);
        }
    }
    Ok(())
}
