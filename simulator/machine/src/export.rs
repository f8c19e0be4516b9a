//! How the libraries export functions.

/// Makes a function's body unlike every other: the compiler would give equal
/// bodies one address, and who resolves symbols by address (as `cuGetProcAddress`
/// is checked, and shims do) could not tell them apart.
#[macro_export]
macro_rules! distinct {
    ($name:ident) => {
        // SAFETY: a comment; no instruction comes of it.
        unsafe {
            std::arch::asm!(
                concat!("/* ", stringify!($name), " */"),
                options(nomem, nostack, preserves_flags)
            );
        }
    };
}

/// Exports functions that give one answer, whatever they are asked.
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
