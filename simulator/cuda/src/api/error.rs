//! Names and texts of error codes.

use std::ffi::{CStr, c_char};

use crate::code::{self, Code, Row};
use crate::export::put;

/// Writes one column of a code's row, or null if there is no such code.
///
/// # Safety
/// `to` is null or valid for a write.
unsafe fn put_column(to: *mut *const c_char, code: u32, column: fn(&Row) -> &'static CStr) -> u32 {
    let row = code::row(code);
    let text = row.map_or(std::ptr::null(), |row| column(row).as_ptr());
    // SAFETY: the caller's contract.
    match unsafe { put(to, text) } {
        Ok(()) if row.is_some() => 0,
        _ => Code::INVALID_VALUE.0,
    }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorName(code: u32, name: *mut *const c_char) -> u32 {
    // SAFETY: the caller keeps CUDA's contract.
    unsafe { put_column(name, code, |row| row.1) }
}

#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetErrorString(code: u32, text: *mut *const c_char) -> u32 {
    // SAFETY: as above.
    unsafe { put_column(text, code, |row| row.2) }
}
