//! Look-up of functions by name, as `cuGetProcAddress` does it for a program built against some CUDA version.

use std::ffi::c_void;

use crate::code::Code;
use crate::table::TABLE;

/// `CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM`. 0 and 1 both mean the legacy stream.
const PER_THREAD: u64 = 2;

/// `CUdriverProcAddressQueryResult`
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Status {
    Found = 0,
    NotFound = 1,
    TooOld = 2,
}

/// Looks a name up as the driver of CUDA version `driver` does for a program built against version `wanted`.
pub fn look_up(
    name: &str,
    wanted: i32,
    flags: u64,
    driver: i32,
) -> Result<(*const c_void, Status), Code> {
    if flags > 3 {
        return Err(Code::INVALID_VALUE);
    }
    let none = std::ptr::null();
    let Ok(index) = TABLE.binary_search_by_key(&name, |entry| entry.name) else {
        return Ok((none, Status::NotFound));
    };
    let entry = &TABLE[index];
    let per_thread = flags & PER_THREAD != 0 && !entry.per_thread.is_empty();
    let versions = if per_thread {
        entry.per_thread
    } else {
        entry.legacy
    };
    // A driver does not know newer functions, however new the program is.
    let mut known = versions.iter().filter(|version| version.since <= driver);
    if known.clone().next().is_none() {
        return Ok((none, Status::NotFound));
    }
    match known.rfind(|version| version.since <= wanted) {
        Some(version) => Ok((version.function.0, Status::Found)),
        None => Ok((none, Status::TooOld)),
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
    fn a_driver_does_not_know_newer_functions() {
        let found = |name, wanted, driver| look_up(name, wanted, 0, driver).unwrap().1;
        assert_eq!(found("cuMemAlloc", 12_000, 12_020), Status::Found);
        assert_eq!(found("cuMemAlloc", 1, 12_020), Status::TooOld);
        assert_eq!(found("cuNothing", 12_000, 12_020), Status::NotFound);
        assert_eq!(found("cuGreenCtxCreate", 13_000, 12_020), Status::NotFound);
        assert_eq!(found("cuGreenCtxCreate", 13_000, 13_000), Status::Found);
        assert_eq!(
            look_up("cuMemAlloc", 12_000, 4, 12_020),
            Err(Code::INVALID_VALUE)
        );
    }
}
