//! Macros and functions with which both libraries export functions.

/// Makes a function's body differ from all others. The compiler gives equal bodies one address, and programs that
/// compare addresses (tests of `cuGetProcAddress`, and shims) could not tell such functions apart.
#[macro_export]
macro_rules! distinct {
    ($name:ident) => {
        // SAFETY: only a comment, which generates no instruction.
        unsafe {
            std::arch::asm!(
                concat!("/* ", stringify!($name), " */"),
                options(nomem, nostack, preserves_flags)
            );
        }
    };
}

/// Exports a function whose body evaluates to `Result<(), $code>`. It returns the code, or 0 for success.
///
/// The body may use its pointers: the API's contract is that each is null or valid for its type, and [`put_or`] and [`get_or`]
/// refuse null.
#[macro_export]
macro_rules! exported {
    ($code:ty, fn $name:ident($($argument:ident: $kind:ty),*) $body:block) => {
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $kind),*) -> u32 {
            $crate::distinct!($name);
            if let Some(code) = $crate::faults::inject(stringify!($name)) {
                return code;
            }
            #[allow(unused_unsafe, reason = "not every body needs it")]
            let call = || -> Result<(), $code> {
                // SAFETY: the caller keeps the API's contract, see above.
                unsafe { $body }
            };
            call().map_or_else(|code| code.0, |()| 0)
        }
    };
}

/// Writes `value` to the caller's pointer; returns `refusal` for null.
///
/// # Safety
/// `to` is null or valid for a write.
pub unsafe fn put_or<T, E>(to: *mut T, value: T, refusal: E) -> Result<(), E> {
    if to.is_null() {
        return Err(refusal);
    }
    // SAFETY: not null, so valid by the contract above. C callers align by the type; a packed struct of another language
    // may not be aligned.
    unsafe { to.write_unaligned(value) };
    Ok(())
}

/// Reads an argument that is passed by reference; returns `refusal` for null.
///
/// # Safety
/// `from` is null or valid for a read.
pub unsafe fn get_or<T: Copy, E>(from: *const T, refusal: E) -> Result<T, E> {
    if from.is_null() {
        return Err(refusal);
    }
    // SAFETY: not null, so valid by the contract above.
    Ok(unsafe { from.read_unaligned() })
}

/// Exports functions that return `$answer` and do nothing.
#[macro_export]
macro_rules! absent {
    ($answer:expr => $($name:ident)+) => {
        $(
            #[unsafe(no_mangle)]
            pub extern "C" fn $name() -> u32 {
                $crate::distinct!($name);
                $answer
            }
        )+
    };
}
