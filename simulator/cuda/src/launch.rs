//! Kernel launches.

use std::ffi::c_void;

use crate::code::Code;
use crate::context::Context;
use crate::managed;
use crate::module::Function;
use crate::object::Object;
use crate::space::check as check_memory;

/// The most threads of a block.
const MAX_THREADS: u64 = 1024;

/// Checks a launch's shape as the driver does.
pub fn check(grid: [u32; 3], block: [u32; 3]) -> Result<(), Code> {
    let threads: u64 = block.iter().map(|n| u64::from(*n)).product();
    if grid.contains(&0) || threads == 0 || threads > MAX_THREADS || block[2] > 64 {
        return Err(Code::INVALID_VALUE);
    }
    Ok(())
}

/// A launch of a kernel.
#[derive(Debug, Clone, Copy)]
pub struct Launch {
    function: &'static Object<Function>,
    /// Virtual time on the GPU.
    pub nanos: u64,
}

impl Launch {
    pub fn new(function: &'static Object<Function>, context: &Context, grid: [u32; 3]) -> Self {
        Self {
            function,
            nanos: function.nanos(context, grid),
        }
    }

    /// Whether it accesses memory that is not allocated.
    pub fn faults(self) -> bool {
        self.function.faults
    }

    /// Writes what a kernel with results writes, to checked memory. The caller has waited for earlier work.
    ///
    /// # Safety
    /// `parameters` has what the kernel's parameters need, as cuLaunchKernel asks for.
    pub unsafe fn write_results(
        self,
        threads: u64,
        parameters: *const *const c_void,
    ) -> Result<(), Code> {
        if !self.function.hashes || parameters.is_null() {
            return Ok(());
        }
        // SAFETY: the caller's contract.
        let (to, seed) = unsafe {
            (
                *(*parameters).cast::<u64>(),
                *(*parameters.add(1)).cast::<u32>(),
            )
        };
        check_memory(to, threads * 4, true)?;
        // SAFETY: it was checked to be device memory, which is aligned to more than four bytes.
        let to = unsafe {
            std::slice::from_raw_parts_mut(to as *mut u32, usize::try_from(threads).unwrap_or(0))
        };
        for (index, word) in (0_u32..).zip(to) {
            *word = index.wrapping_mul(2_654_435_761) ^ seed;
        }
        Ok(())
    }

    /// Loads the kernel's code and takes the memory that it uses.
    pub fn prepare(self, context: &'static Object<Context>) -> Result<(), Code> {
        if self.function.is_alive() {
            self.function.load(context)?;
        }
        context.grow_local(self.function.local)?;
        if self.function.touches_managed {
            managed::touch_all(context);
        }
        Ok(())
    }
}
