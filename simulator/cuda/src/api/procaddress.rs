//! Look-up of functions by name.

use std::ffi::{CStr, c_char, c_void};

use crate::code::Code;
use crate::driver::cuda_version;
use crate::export::{export, get, put, put_wanted};
use crate::procaddress::{Status, look_up};

/// # Safety
/// `name` is null or a C string.
unsafe fn resolve(
    name: *const c_char,
    wanted: i32,
    flags: u64,
) -> Result<(*const c_void, Status), Code> {
    // SAFETY: the caller's contract.
    let name = unsafe {
        get(name)?;
        CStr::from_ptr(name)
    };
    look_up(name.to_str().unwrap_or(""), wanted, flags, cuda_version())
}

export! {
    fn cuGetProcAddress(name: *const c_char, to: *mut *const c_void, wanted: i32, flags: u64) {
        match resolve(name, wanted, flags)? {
            (function, Status::Found) => put(to, function),
            _ => Err(Code::NOT_FOUND),
        }
    }
    fn cuGetProcAddress_v2(name: *const c_char, to: *mut *const c_void, wanted: i32, flags: u64, status: *mut u32) {
        let (function, found) = resolve(name, wanted, flags)?;
        put_wanted(status, found as u32);
        put(to, function)
    }
}
