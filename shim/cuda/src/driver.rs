//! The real driver, and our symbols that only forward to it.

use core::ffi::c_void;
use core::marker::PhantomData;

use tranche_shim_core::paths;
use tranche_shim_runtime::library::Library;

use crate::abi::CUresult;

pub use symbols::{PASSING, PASSING_NAMES, SYMBOLS, index};

/// The driver's library.
pub static DRIVER: Library = Library::new(
    paths::REAL_CUDA,
    (c"cuInit", || handled(index::cuInit - PASSING)),
);

tranche_shim_runtime::library! {
    driver: DRIVER,
    first: symbols::cuArray3DGetDescriptor,
    missing: missing,
    unavailable: unavailable,
}

/// The address of the real function `index`, if this driver has it.
pub fn real_if_any(index: usize) -> Option<*mut c_void> {
    let address = address(index);
    let substitutes = [missing as *mut c_void, unavailable as *mut c_void];
    (!substitutes.contains(&address)).then_some(address)
}

/// The result of a function that this driver does not have, because it is too old or too new.
extern "C" fn missing() -> CUresult {
    CUresult::NOT_FOUND
}

/// The result of every function without a driver.
extern "C" fn unavailable() -> CUresult {
    CUresult::SHARED_OBJECT_INIT_FAILED
}

/// The real function of a name, with the type that cuda.h gives it:
/// `real!(cuCtxGetDevice: fn(*mut CUdevice))`.
macro_rules! real {
    ($name:ident: fn($($argument:ty),*)) => {
        $crate::driver::typed::<unsafe extern "C" fn($($argument),*) -> $crate::abi::CUresult>(
            $crate::driver::index::$name,
        )
    };
}
pub(crate) use real;

/// For `real!` alone: the function `index` as an `F`, the type of a C function.
#[inline]
pub fn typed<F: Copy>(index: usize) -> F {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
    let address = address(index);
    // SAFETY: `real!` makes `F` the type of a function pointer. The address is that of the driver's
    // function of this name, whose type in cuda.h that is, or of one of ours, which takes no
    // arguments and returns a result: in this ABI the caller clears what it passed.
    unsafe { core::mem::transmute_copy(&address) }
}

/// A call of the driver that is still to be made, in two words: its arguments, and a function that makes it. It is
/// not a generic parameter, because there are a hundred such calls and the code around them is mostly the same.
#[derive(Clone, Copy)]
pub struct Call<'a> {
    run: fn(*const ()) -> CUresult,
    closure: *const (),
    arguments: PhantomData<&'a ()>,
}

impl<'a> Call<'a> {
    /// The call that a closure makes.
    #[inline]
    pub fn of<F: Fn() -> CUresult>(closure: &'a F) -> Self {
        fn run<F: Fn() -> CUresult>(closure: *const ()) -> CUresult {
            // SAFETY: `of` made it from an `F` that is borrowed as long as the `Call` lives.
            let closure = unsafe { &*closure.cast::<F>() };
            closure()
        }
        Self {
            run: run::<F>,
            closure: core::ptr::from_ref(closure).cast(),
            arguments: PhantomData,
        }
    }

    /// Makes the call.
    #[inline]
    pub fn make(self) -> CUresult {
        (self.run)(self.closure)
    }
}
