//! How functions are exported: one macro, so that each is its signature and its
//! answer.

use crate::code::Code;

/// Exports functions in the shape of CUDA's: each body gives `Result<(), Code>`.
///
/// A second name is the function's per-thread-default-stream variant: the same,
/// but the null stream in the argument named in brackets means the calling
/// thread's stream. `[]` is for functions that wait anyway.
///
/// A body may use its pointers: CUDA's contract is that each is null or valid for
/// what its type says, and the helpers below refuse null.
macro_rules! export {
    () => {};
    (fn $name:ident($($argument:ident: $kind:ty),* $(,)?) $body:block $($rest:tt)*) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $kind),*) -> u32 {
            tranche_simulator_machine::distinct!($name);
            #[allow(unused_unsafe, reason = "not every body needs it")]
            let answer = || -> Result<(), $crate::code::Code> {
                // SAFETY: the caller keeps CUDA's contract, see above.
                unsafe { $body }
            };
            answer().map_or_else(|code| code.0, |()| 0)
        }
        $crate::export::export! { $($rest)* }
    };
    (fn $name:ident, $variant:ident [$($stream:ident)?]
        ($($argument:ident: $kind:ty),* $(,)?) $body:block $($rest:tt)*) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $variant($($argument: $kind),*) -> u32 {
            tranche_simulator_machine::distinct!($variant);
            $(let $stream = $crate::object::per_thread($stream);)?
            // SAFETY: the same contract.
            unsafe { $name($($argument),*) }
        }
        $crate::export::export! {
            fn $name($($argument: $kind),*) $body
            $($rest)*
        }
    };
}
pub(crate) use export;

/// Writes `value` where the caller wants it.
///
/// # Safety
/// `to` is null or valid for a write.
pub unsafe fn put<T>(to: *mut T, value: T) -> Result<(), Code> {
    if to.is_null() {
        return Err(Code::INVALID_VALUE);
    }
    // SAFETY: not null, so valid by the contract above. C callers' alignment is
    // the type's, but a packed struct of another language may not be.
    unsafe { to.write_unaligned(value) };
    Ok(())
}

/// Writes `value` where the caller wants it, if the caller wants it.
///
/// # Safety
/// `to` is null or valid for a write.
pub unsafe fn put_wanted<T>(to: *mut T, value: T) {
    if !to.is_null() {
        // SAFETY: as in `put`.
        unsafe { to.write_unaligned(value) };
    }
}

/// Reads what the caller passes by reference.
///
/// # Safety
/// `from` is null or valid for a read.
pub unsafe fn get<T: Copy>(from: *const T) -> Result<T, Code> {
    if from.is_null() {
        return Err(Code::INVALID_VALUE);
    }
    // SAFETY: not null, so valid by the contract above.
    Ok(unsafe { from.read_unaligned() })
}
