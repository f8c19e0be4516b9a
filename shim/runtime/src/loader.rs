//! Finds the dynamic loader's functions in this program's C library.
//!
//! Since glibc 2.34 they are in libc.so.6, before that in libdl.so.2; musl has them in its only library.
//! A dependency on libdl.so.2 would load it into every process of a container, although few have such an
//! old glibc. So the functions are weak symbols. If they are missing, libdl.so.2 is opened with internal
//! functions of old versions of libc.so.6 (`__libc_dlopen_mode`, `__libc_dlsym`).

use core::ffi::{CStr, c_char, c_int, c_void};
use core::mem::transmute;
use core::ptr;
use core::sync::atomic::{AtomicPtr, Ordering};

type Open = unsafe extern "C" fn(*const c_char, c_int) -> *mut c_void;
type Symbol = unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void;
type Error = unsafe extern "C" fn() -> *mut c_char;

/// The functions: `dlopen(3)`, `dlsym(3)`, `dlerror(3)`.
#[derive(Clone, Copy, Debug)]
pub struct Loader {
    /// `dlopen`
    pub open: Open,
    /// `dlsym`
    pub symbol: Symbol,
    /// `dlerror`
    pub error: Error,
}

/// The flag that glibc's `dlopen` passes to its internal function.
const RTLD_DLOPEN: c_int = c_int::MIN;

/// The address of a weak function; null if it is missing.
macro_rules! weak {
    ($name:literal) => {{
        let at: *mut c_void;
        // SAFETY: reads the linker's table of addresses, in which this name has an entry.
        unsafe {
            core::arch::asm!(
                concat!(".weak ", $name),
                concat!("mov {}, qword ptr [rip + ", $name, "@GOTPCREL]"),
                out(reg) at,
                options(pure, readonly, nostack, preserves_flags),
            );
        }
        at
    }};
}

impl Loader {
    /// The loader of this program; `None` if its C library has none.
    #[must_use]
    #[inline(never)]
    pub fn find() -> Option<Self> {
        let known = [weak!("dlopen"), weak!("dlsym"), weak!("dlerror")];
        let [open, symbol, error] = if known.contains(&ptr::null_mut()) {
            from_libdl([c"dlopen", c"dlsym", c"dlerror"])?
        } else {
            known
        };
        // SAFETY: the C library's functions of these names, not null, whose types POSIX says.
        unsafe {
            Some(Self {
                open: transmute::<*mut c_void, Open>(open),
                symbol: transmute::<*mut c_void, Symbol>(symbol),
                error: transmute::<*mut c_void, Error>(error),
            })
        }
    }
}

/// Functions of libdl.so.2, which this opens, once.
fn from_libdl<const N: usize>(names: [&CStr; N]) -> Option<[*mut c_void; N]> {
    static LIBDL: AtomicPtr<c_void> = AtomicPtr::new(ptr::null_mut());
    let (open, symbol) = (weak!("__libc_dlopen_mode"), weak!("__libc_dlsym"));
    if open.is_null() || symbol.is_null() {
        return None;
    }
    // SAFETY: not null, and as `dlopen` and `dlsym` (glibc's include/dlfcn.h, up to 2.33).
    let (open, symbol) = unsafe {
        (
            transmute::<*mut c_void, Open>(open),
            transmute::<*mut c_void, Symbol>(symbol),
        )
    };
    let mut libdl = LIBDL.load(Ordering::Acquire);
    if libdl.is_null() {
        // SAFETY: a C string. Two threads that come here together get the same handle.
        libdl = unsafe { open(c"libdl.so.2".as_ptr(), libc::RTLD_NOW | RTLD_DLOPEN) };
        LIBDL.store(libdl, Ordering::Release);
    }
    if libdl.is_null() {
        return None;
    }
    // SAFETY: an open handle and C strings.
    let found = names.map(|name| unsafe { symbol(libdl, name.as_ptr()) });
    (!found.contains(&ptr::null_mut())).then_some(found)
}
