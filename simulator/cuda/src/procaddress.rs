//! `cuGetProcAddress`, in both its forms: which function a name means for a
//! program built against some CUDA version. The table is [`crate::table`].

use std::ffi::{CStr, c_char, c_void};

use crate::code::Code;
use crate::driver::cuda_version;
use crate::export::{export, get, put, put_wanted};
use crate::table::TABLE;

/// A function, since a version of CUDA.
#[derive(Debug, Clone, Copy)]
pub struct Version {
    pub since: i32,
    pub function: Address,
}

/// The address of an exported function.
#[derive(Debug, Clone, Copy)]
pub struct Address(pub *const c_void);
// SAFETY: the address of code, never written through.
unsafe impl Send for Address {}
// SAFETY: as above.
unsafe impl Sync for Address {}

/// A name with its functions, oldest first.
#[derive(Debug, Clone, Copy)]
pub struct Entry {
    pub name: &'static str,
    /// For the legacy default stream.
    pub legacy: &'static [Version],
    /// For the per-thread default stream; empty where it makes no difference.
    pub per_thread: &'static [Version],
}

/// `CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM`; 1 is the legacy stream, which
/// is what 0 means too.
const PER_THREAD: u64 = 2;

/// `CUdriverProcAddressQueryResult`
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Answer {
    Found = 0,
    NotFound = 1,
    TooOld = 2,
}

/// Looks a name up as the driver of CUDA version `driver` does.
fn look_up(
    name: &str,
    wanted: i32,
    flags: u64,
    driver: i32,
) -> Result<(*const c_void, Answer), Code> {
    if flags > 3 {
        return Err(Code::INVALID_VALUE);
    }
    let none = std::ptr::null();
    let Ok(index) = TABLE.binary_search_by_key(&name, |entry| entry.name) else {
        return Ok((none, Answer::NotFound));
    };
    let entry = &TABLE[index];
    let per_thread = flags & PER_THREAD != 0 && !entry.per_thread.is_empty();
    let versions = if per_thread {
        entry.per_thread
    } else {
        entry.legacy
    };
    // What came after this driver is unknown to it, however new the program is.
    let mut known = versions.iter().filter(|version| version.since <= driver);
    if known.clone().next().is_none() {
        return Ok((none, Answer::NotFound));
    }
    match known.rfind(|version| version.since <= wanted) {
        Some(version) => Ok((version.function.0, Answer::Found)),
        None => Ok((none, Answer::TooOld)),
    }
}

/// # Safety
/// `name` is null or a C string.
unsafe fn resolve(
    name: *const c_char,
    wanted: i32,
    flags: u64,
) -> Result<(*const c_void, Answer), Code> {
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
            (function, Answer::Found) => put(to, function),
            _ => Err(Code::NOT_FOUND),
        }
    }
    fn cuGetProcAddress_v2(name: *const c_char, to: *mut *const c_void, wanted: i32, flags: u64, answer: *mut u32) {
        let (function, found) = resolve(name, wanted, flags)?;
        put_wanted(answer, found as u32);
        put(to, function)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_is_sorted_and_versions_ascend() {
        assert!(TABLE.windows(2).all(|pair| pair[0].name < pair[1].name));
        for entry in TABLE {
            for list in [entry.legacy, entry.per_thread] {
                assert!(
                    list.windows(2).all(|pair| pair[0].since < pair[1].since),
                    "{}",
                    entry.name
                );
            }
        }
    }

    #[test]
    fn what_came_after_the_driver_is_unknown_to_it() {
        let found = |name, wanted, driver| look_up(name, wanted, 0, driver).unwrap().1;
        assert_eq!(found("cuMemAlloc", 12_000, 12_020), Answer::Found);
        assert_eq!(found("cuMemAlloc", 1, 12_020), Answer::TooOld);
        assert_eq!(found("cuNothing", 12_000, 12_020), Answer::NotFound);
        assert_eq!(found("cuGreenCtxCreate", 13_000, 12_020), Answer::NotFound);
        assert_eq!(found("cuGreenCtxCreate", 13_000, 13_000), Answer::Found);
        assert_eq!(
            look_up("cuMemAlloc", 12_000, 4, 12_020),
            Err(Code::INVALID_VALUE)
        );
    }
}
