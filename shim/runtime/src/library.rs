//! The real driver's library behind each of our symbols.
//!
//! ```text
//!  caller ──► cuFoo: mov eax, 17 ──► forward_to: TABLE[17] ? ──► the real cuFoo
//!                                        └── 0: resolve(17): name of our symbol 17 ──► dlsym ──► TABLE[17]
//! ```
//!
//! A forwarded call is three instructions and two jumps, and looks to the real function as if the
//! caller had called it. The table is zero in the file: loading the library relocates nothing for it.
//! The names are not stored twice: a symbol's name is [looked up](crate::names) once, by address, in our own
//! symbol table. For that, the forwarding stubs lie in one section, [`STRIDE`] bytes apart, in the order of their
//! indices. If they did not, a symbol would be missing, but never mistaken for another one.

use core::ffi::{CStr, c_void};
use core::ptr;
use core::sync::atomic::{AtomicPtr, Ordering};

use tranche_shim_core::MessagePart;

use crate::complain::refuse;
use crate::loader::Loader;
use crate::names::{self, Ours};

/// Bytes from one forwarding stub to the next: two instructions of five, aligned to four.
pub const STRIDE: usize = 12;

/// One of the driver's libraries, opened at the first use.
#[derive(Debug)]
pub struct Library {
    path: &'static CStr,
    /// A symbol that every version has, and the address of ours.
    witness: (&'static CStr, fn() -> Option<Ours>),
    handle: AtomicPtr<c_void>,
}

impl Library {
    /// The library at `path`. It is not ours if its `witness` has another address than our own.
    #[must_use]
    pub const fn new(path: &'static CStr, witness: (&'static CStr, fn() -> Option<Ours>)) -> Self {
        Self {
            path,
            witness,
            handle: AtomicPtr::new(ptr::null_mut()),
        }
    }

    /// Opens the library unless it is open; if that fails, says so on stderr.
    pub fn open(&self) -> bool {
        !self.handle().is_null()
    }

    fn handle(&self) -> *mut c_void {
        let handle = self.handle.load(Ordering::Acquire);
        if !handle.is_null() {
            return handle;
        }
        let Some(loader) = Loader::find() else {
            self.refuse(": this program's C library has no dynamic loader");
            return ptr::null_mut();
        };
        // SAFETY: `path` is a C string. Two threads that come here together get the same handle.
        let handle =
            unsafe { (loader.open)(self.path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            self.refuse_unopened(loader);
            return handle;
        }
        let (name, ours) = self.witness;
        // SAFETY: an open handle and a C string.
        let theirs = unsafe { (loader.symbol)(handle, name.as_ptr()) };
        if theirs.is_null() || ours().is_none_or(|ours| ptr::eq(theirs.cast(), ours.0)) {
            self.refuse(": not the driver's library");
            return ptr::null_mut();
        }
        self.handle.store(handle, Ordering::Release);
        handle
    }

    fn refuse_unopened(&self, loader: Loader) {
        // SAFETY: a C string, looked up in all that is loaded.
        let glibc =
            unsafe { (loader.symbol)(libc::RTLD_DEFAULT, c"gnu_get_libc_version".as_ptr()) };
        if glibc.is_null() {
            let path = self.path.to_str().unwrap_or("");
            let _ = refuse(&[&[
                MessagePart::Text(path),
                MessagePart::Text(
                    ": NVIDIA's driver needs the GNU C library, and this program has another (musl?); the GPU is \
                     not used: use an image with glibc, or install gcompat",
                ),
            ]]);
            return;
        }
        // SAFETY: the loader's text of its last failure in this thread, or null.
        let why = unsafe { (loader.error)() };
        if why.is_null() {
            return self.refuse(": the driver's library cannot be opened");
        }
        // SAFETY: not null, so a C string, which stays until the loader's next call in this thread.
        let why = unsafe { CStr::from_ptr(why) }.to_str().unwrap_or("");
        self.refuse_because(": the driver's library cannot be opened: ", why);
    }

    fn refuse(&self, why: &str) {
        self.refuse_because(why, "");
    }

    fn refuse_because(&self, why: &str, more: &str) {
        let remedy = "; the GPU is not used: see whether the node's NVIDIA driver is installed, then recreate the pod";
        let path = self.path.to_str().unwrap_or("");
        let _ = refuse(&[&[
            MessagePart::Text(path),
            MessagePart::Text(why),
            MessagePart::Text(more),
            MessagePart::Text(remedy),
        ]]);
    }

    /// The real function with the name of our symbol at `ours`, one of `exported`; null if this driver
    /// does not have it.
    ///
    /// # Errors
    ///
    /// The library cannot be opened.
    pub fn twin(&self, ours: Ours, exported: usize) -> Result<*mut c_void, Unavailable> {
        let handle = self.handle();
        let Some(loader) = Loader::find().filter(|_| !handle.is_null()) else {
            return Err(Unavailable);
        };
        let Some(name) = names::of(ours, exported) else {
            return Ok(ptr::null_mut());
        };
        // SAFETY: an open handle and a C string, which stays.
        Ok(unsafe { (loader.symbol)(handle, name) })
    }
}

/// The driver's library cannot be opened.
#[derive(Clone, Copy, Debug)]
pub struct Unavailable;

/// Our symbols that only forward: each has a stub that passes its index to `forward_to`.
#[macro_export]
macro_rules! forward {
    ($($index:literal $name:ident)*) => {$(
        #[unsafe(naked)]
        #[unsafe(no_mangle)]
        #[unsafe(link_section = ".text.forward")]
        pub extern "C" fn $name() {
            core::arch::naked_asm!(
                "mov eax, {index}",
                "jmp {to}",
                index = const $index,
                to = sym forward_to,
            )
        }
    )*};
}

/// Defines the module `symbols`: the build script's output for `symbols.txt`, the addresses of our own functions, the
/// table of the real ones, and the code that forwards through it.
///
/// Exported are the symbols of `symbols.txt`, and one for AddressSanitizer.
///
/// - `driver`: a `Library`;
/// - `first`: the first of the stubs;
/// - `missing`, `unavailable`: what is called instead of a function that this driver does not have,
///   or when there is no driver.
#[macro_export]
macro_rules! library {
    (driver: $driver:expr, first: $first:path, missing: $missing:path, unavailable: $unavailable:path $(,)?) => {
        mod symbols {
            #![allow(
                missing_docs,
                clippy::unreadable_literal,
                reason = "generated from symbols.txt"
            )]
            use super::forward_to;
            use $crate::forward;
            include!(concat!(env!("OUT_DIR"), "/symbols.rs"));
        }

        core::arch::global_asm!(include_str!(concat!(env!("OUT_DIR"), "/handled.s")));

        /// Exported, too: AddressSanitizer asks the first of the loaded libraries that has this function, so ours, for its
        /// options, before those of the environment. Its shared runtime would refuse to start behind a preloaded library,
        /// because that may have functions that the runtime must replace; ours have only the driver's.
        #[unsafe(no_mangle)]
        extern "C" fn __asan_default_options() -> *const core::ffi::c_char {
            c"verify_asan_link_order=0".as_ptr()
        }

        unsafe extern "C" {
            /// The distances in bytes from here to our symbols that do more than forward, in the order of their indices.
            #[link_name = "tranche_handled"]
            static DISTANCES: [i32; symbols::SYMBOLS - symbols::PASSING];
        }

        /// The address of the `nth` of our symbols that do more than forward.
        pub fn handled(nth: usize) -> Option<$crate::names::Ours> {
            // SAFETY: the table above, which the build script makes with so many entries, and which is never written to.
            let table = unsafe { &DISTANCES };
            let distance = isize::try_from(*table.get(nth)?).ok()?;
            let start = core::ptr::from_ref(table).cast::<()>();
            Some($crate::names::Ours(start.wrapping_byte_offset(distance)))
        }

        static TABLE: [core::sync::atomic::AtomicPtr<core::ffi::c_void>; symbols::SYMBOLS] =
            [const { core::sync::atomic::AtomicPtr::new(core::ptr::null_mut()) }; symbols::SYMBOLS];

        /// The address of the real function `index`, or of one with an error to return.
        #[inline]
        pub fn address(index: usize) -> *mut core::ffi::c_void {
            let known = TABLE[index].load(core::sync::atomic::Ordering::Acquire);
            if known.is_null() { resolve(index) } else { known }
        }

        #[cold]
        #[inline(never)]
        extern "C" fn resolve(index: usize) -> *mut core::ffi::c_void {
            let ours = match index.checked_sub(symbols::PASSING) {
                None => {
                    let first = $first as *const ();
                    $crate::names::Ours(first.wrapping_byte_add(index * $crate::library::STRIDE))
                }
                Some(nth) => match handled(nth) {
                    Some(ours) => ours,
                    None => return $missing as *mut core::ffi::c_void,
                },
            };
            let Ok(twin) = $driver.twin(ours, symbols::SYMBOLS + 1) else {
                // Not stored, because the driver may become available.
                return $unavailable as *mut core::ffi::c_void;
            };
            let twin = if twin.is_null() { $missing as *mut core::ffi::c_void } else { twin };
            if let Some(place) = TABLE.get(index) {
                place.store(twin, core::sync::atomic::Ordering::Release);
            }
            twin
        }

        /// Jumps to the real function of the stub that put its index into `eax`, with all
        /// registers and the stack as the caller left them.
        #[unsafe(naked)]
        extern "C" fn forward_to() {
            core::arch::naked_asm!(
                "lea r11, [rip + {table}]",
                "mov r11, [r11 + 8*rax]",
                "test r11, r11",
                "jz 2f",
                "jmp r11",
                // The first call: keep the registers in which the caller passed arguments, and align
                // the stack.
                "2:",
                "push rbp",
                "mov rbp, rsp",
                "and rsp, -16",
                "sub rsp, 176",
                "mov [rsp], rdi",
                "mov [rsp + 8], rsi",
                "mov [rsp + 16], rdx",
                "mov [rsp + 24], rcx",
                "mov [rsp + 32], r8",
                "mov [rsp + 40], r9",
                "movaps [rsp + 48], xmm0",
                "movaps [rsp + 64], xmm1",
                "movaps [rsp + 80], xmm2",
                "movaps [rsp + 96], xmm3",
                "movaps [rsp + 112], xmm4",
                "movaps [rsp + 128], xmm5",
                "movaps [rsp + 144], xmm6",
                "movaps [rsp + 160], xmm7",
                "mov edi, eax",
                "call {resolve}",
                "mov r11, rax",
                "mov rdi, [rsp]",
                "mov rsi, [rsp + 8]",
                "mov rdx, [rsp + 16]",
                "mov rcx, [rsp + 24]",
                "mov r8, [rsp + 32]",
                "mov r9, [rsp + 40]",
                "movaps xmm0, [rsp + 48]",
                "movaps xmm1, [rsp + 64]",
                "movaps xmm2, [rsp + 80]",
                "movaps xmm3, [rsp + 96]",
                "movaps xmm4, [rsp + 112]",
                "movaps xmm5, [rsp + 128]",
                "movaps xmm6, [rsp + 144]",
                "movaps xmm7, [rsp + 160]",
                "leave",
                "jmp r11",
                table = sym TABLE,
                resolve = sym resolve,
            )
        }
    };
}
