//! The macro that exports functions, and how they read and write their arguments.

use tranche_simulator_machine::export::{get_or, put_or};

use crate::code::Code;

/// Exports CUDA functions: each body evaluates to `Result<(), Code>`.
///
/// A second name is the function's variant for per-thread default streams. It differs in one thing: the null stream in
/// the argument that is named in brackets means the calling thread's stream. `[]` is for functions that wait in any case.
macro_rules! export {
    () => {};
    (fn $name:ident($($argument:ident: $kind:ty),* $(,)?) $body:block $($rest:tt)*) => {
        tranche_simulator_machine::exported! { $crate::code::Code, fn $name($($argument: $kind),*) $body }
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

/// Writes `value` to the caller's pointer.
///
/// # Safety
/// `to` is null or valid for a write.
pub unsafe fn put<T>(to: *mut T, value: T) -> Result<(), Code> {
    // SAFETY: the caller's contract.
    unsafe { put_or(to, value, Code::INVALID_VALUE) }
}

/// Writes `value` to the caller's pointer, if that is not null.
///
/// # Safety
/// `to` is null or valid for a write.
pub unsafe fn put_wanted<T>(to: *mut T, value: T) {
    // SAFETY: the caller's contract.
    let _ = unsafe { put(to, value) };
}

/// Reads an argument that is passed by reference.
///
/// # Safety
/// `from` is null or valid for a read.
pub unsafe fn get<T: Copy>(from: *const T) -> Result<T, Code> {
    // SAFETY: the caller's contract.
    unsafe { get_or(from, Code::INVALID_VALUE) }
}
