//! The few functions of the CUDA driver API that the probe calls, found as every program finds them:
//! by `dlopen("libcuda.so.1")` and `dlsym`.
#![allow(unsafe_code)]

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::mem::transmute_copy;
use std::ptr::null_mut;

use anyhow::{bail, ensure};

/// `CUdeviceptr`, or a handle.
pub type Pointer = u64;
type Result = c_int;
const SUCCESS: Result = 0;
const OUT_OF_MEMORY: Result = 2;
/// The version of the API in requests for addresses.
const VERSION: c_int = 12_000;

/// A kernel whose name makes the simulator run it in no time; a GPU compiles and runs it.
const PTX: &CStr = c".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry sim_busy_0us()\n{\n\tret;\n}\n";
const KERNEL: &CStr = c"sim_busy_0us";

#[derive(Debug)]
pub struct Cuda {
    init: extern "C" fn(c_uint) -> Result,
    device_get_count: unsafe extern "C" fn(*mut c_int) -> Result,
    device_get_uuid: unsafe extern "C" fn(*mut [u8; 16], c_int) -> Result,
    primary_ctx_retain: unsafe extern "C" fn(*mut *mut c_void, c_int) -> Result,
    ctx_synchronize: extern "C" fn() -> Result,
    ctx_set_current: unsafe extern "C" fn(*mut c_void) -> Result,
    mem_alloc: unsafe extern "C" fn(*mut Pointer, usize) -> Result,
    mem_free: unsafe extern "C" fn(Pointer) -> Result,
    mem_get_info: unsafe extern "C" fn(*mut usize, *mut usize) -> Result,
    get_proc_address:
        unsafe extern "C" fn(*const c_char, *mut *mut c_void, c_int, u64, *mut c_int) -> Result,
    module_load_data: unsafe extern "C" fn(*mut *mut c_void, *const c_void) -> Result,
    module_get_function:
        unsafe extern "C" fn(*mut *mut c_void, *mut c_void, *const c_char) -> Result,
    launch_kernel: unsafe extern "C" fn(
        *mut c_void,
        c_uint,
        c_uint,
        c_uint,
        c_uint,
        c_uint,
        c_uint,
        c_uint,
        *mut c_void,
        *mut *mut c_void,
        *mut *mut c_void,
    ) -> Result,
}

fn check(function: &str, result: Result) -> anyhow::Result<()> {
    if result == SUCCESS {
        return Ok(());
    }
    bail!("{function}: CUresult {result}")
}

impl Cuda {
    /// Loads the driver.
    pub fn load() -> anyhow::Result<Self> {
        // SAFETY: a C string and a flag of dlfcn.h; the library is the driver's, or stands for it.
        let library = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) };
        ensure!(
            !library.is_null(),
            "libcuda.so.1 cannot be loaded: is there a driver at / ?"
        );
        // SAFETY: each field's type is cuda.h's of the symbol's name.
        unsafe {
            Ok(Self {
                init: find(library, c"cuInit")?,
                device_get_count: find(library, c"cuDeviceGetCount")?,
                device_get_uuid: find(library, c"cuDeviceGetUuid")?,
                primary_ctx_retain: find(library, c"cuDevicePrimaryCtxRetain")?,
                ctx_synchronize: find(library, c"cuCtxSynchronize")?,
                ctx_set_current: find(library, c"cuCtxSetCurrent")?,
                mem_alloc: find(library, c"cuMemAlloc_v2")?,
                mem_free: find(library, c"cuMemFree_v2")?,
                mem_get_info: find(library, c"cuMemGetInfo_v2")?,
                get_proc_address: find(library, c"cuGetProcAddress_v2")?,
                module_load_data: find(library, c"cuModuleLoadData")?,
                module_get_function: find(library, c"cuModuleGetFunction")?,
                launch_kernel: find(library, c"cuLaunchKernel")?,
            })
        }
    }

    /// A kernel that works for about `micros` microseconds. The simulator takes the time from its name.
    pub fn kernel_that_works(&self, micros: u64) -> anyhow::Result<Pointer> {
        let name = format!("sim_busy_{micros}us");
        // A GPU does about a thousand and a half cycles in a microsecond.
        let ptx = format!(
            ".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry {name}()\n{{\n\
             .reg .u64 %rd<4>;\n.reg .pred %p<2>;\nmov.u64 %rd1, %clock64;\n\
             AGAIN:\nmov.u64 %rd2, %clock64;\nsub.u64 %rd3, %rd2, %rd1;\n\
             setp.lt.u64 %p1, %rd3, {};\n@%p1 bra AGAIN;\nret;\n}}\n",
            micros * 1500
        );
        self.kernel(&CString::new(ptx)?, &CString::new(name)?)
    }

    /// `cuInit`.
    pub fn init(&self) -> anyhow::Result<()> {
        check("cuInit", (self.init)(0))
    }

    /// The number of GPUs.
    pub fn device_count(&self) -> anyhow::Result<c_int> {
        let mut count = 0;
        // SAFETY: a place for an int.
        check("cuDeviceGetCount", unsafe {
            (self.device_get_count)(&raw mut count)
        })?;
        Ok(count)
    }

    /// A GPU's UUID in the form that NVML prints.
    pub fn device_uuid(&self, ordinal: c_int) -> anyhow::Result<String> {
        let mut bytes = [0; 16];
        // SAFETY: a place for 16 bytes; a device's handle is its ordinal.
        check("cuDeviceGetUuid", unsafe {
            (self.device_get_uuid)(&raw mut bytes, ordinal)
        })?;
        Ok(format!("GPU-{}", uuid::Uuid::from_bytes(bytes)))
    }

    /// Makes the first GPU's primary context current.
    pub fn use_first_device(&self) -> anyhow::Result<()> {
        let mut context = null_mut();
        // SAFETY: a place for a handle, then that handle.
        unsafe {
            check(
                "cuDevicePrimaryCtxRetain",
                (self.primary_ctx_retain)(&raw mut context, 0),
            )?;
            check("cuCtxSetCurrent", (self.ctx_set_current)(context))
        }
    }

    pub fn alloc(&self, bytes: usize) -> anyhow::Result<Pointer> {
        let mut pointer = 0;
        // SAFETY: a place for a pointer.
        check("cuMemAlloc", unsafe {
            (self.mem_alloc)(&raw mut pointer, bytes)
        })?;
        Ok(pointer)
    }

    /// Makes an allocation that must be refused as out of memory.
    pub fn refused(&self, bytes: usize) -> anyhow::Result<()> {
        let mut pointer = 0;
        // SAFETY: a place for a pointer.
        let result = unsafe { (self.mem_alloc)(&raw mut pointer, bytes) };
        ensure!(
            result == OUT_OF_MEMORY,
            "cuMemAlloc of {bytes} bytes: CUresult {result}"
        );
        Ok(())
    }

    pub fn free(&self, pointer: Pointer) -> anyhow::Result<()> {
        // SAFETY: callers pass what `alloc` gave them, and never use its memory.
        check("cuMemFree", unsafe { (self.mem_free)(pointer) })
    }

    /// Free and total bytes.
    pub fn mem_info(&self) -> anyhow::Result<(usize, usize)> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: places for two sizes.
        check("cuMemGetInfo", unsafe {
            (self.mem_get_info)(&raw mut free, &raw mut total)
        })?;
        Ok((free, total))
    }

    /// Asks for a function's address.
    pub fn proc_address(&self, name: &CStr) -> anyhow::Result<()> {
        let (mut address, mut status) = (null_mut(), 0);
        // SAFETY: a C string, and places for a pointer and an int.
        check("cuGetProcAddress", unsafe {
            (self.get_proc_address)(name.as_ptr(), &raw mut address, VERSION, 0, &raw mut status)
        })
    }

    /// A kernel for [`launch`](Self::launch).
    pub fn kernel_that_does_nothing(&self) -> anyhow::Result<Pointer> {
        self.kernel(PTX, KERNEL)
    }

    fn kernel(&self, ptx: &CStr, name: &CStr) -> anyhow::Result<Pointer> {
        let (mut module, mut function) = (null_mut(), null_mut());
        // SAFETY: a C string of PTX, a place for a handle, then that handle and a C string.
        unsafe {
            check(
                "cuModuleLoadData",
                (self.module_load_data)(&raw mut module, ptx.as_ptr().cast()),
            )?;
            check(
                "cuModuleGetFunction",
                (self.module_get_function)(&raw mut function, module, name.as_ptr()),
            )?;
        }
        Ok(function as Pointer)
    }

    /// Waits for all launches.
    pub fn synchronize(&self) -> anyhow::Result<()> {
        check("cuCtxSynchronize", (self.ctx_synchronize)())
    }

    /// Launches a kernel on the default stream with one thread.
    pub fn launch(&self, kernel: Pointer) -> anyhow::Result<()> {
        let kernel = kernel as *mut c_void;
        // SAFETY: a function of a loaded module, which takes no arguments.
        check("cuLaunchKernel", unsafe {
            (self.launch_kernel)(
                kernel,
                1,
                1,
                1,
                1,
                1,
                1,
                0,
                null_mut(),
                null_mut(),
                null_mut(),
            )
        })
    }
}

/// # Safety
///
/// `F` is the type of the function of that name.
unsafe fn find<F: Copy>(library: *mut c_void, name: &CStr) -> anyhow::Result<F> {
    const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
    // SAFETY: a handle of dlopen and a C string.
    let address: *const c_void = unsafe { libc::dlsym(library, name.as_ptr()) };
    ensure!(
        !address.is_null(),
        "libcuda.so.1 has no {}",
        name.to_string_lossy()
    );
    // SAFETY: the caller's promise; both have the size of a pointer.
    Ok(unsafe { transmute_copy(&address) })
}
