//! The few functions of libcuda that the check needs.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::ptr;

/// Why a GPU does not work.
#[derive(Debug)]
pub(crate) enum Problem {
    /// The library.
    Library(String),
    /// A call failed.
    Call { call: &'static str, code: c_int },
    /// The kernel wrote something else.
    Wrong { index: u32, word: u32 },
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Library(why) => f.write_str(why),
            Self::Call { call, code } => write!(f, "{call} returned error {code}"),
            Self::Wrong { index, word } => {
                write!(
                    f,
                    "a kernel wrote a wrong value: {word:#x} at index {index}"
                )
            }
        }
    }
}

/// cuda.h's cuLaunchKernel: function, grid, block, shared memory, stream, parameters, extra.
type Launch = unsafe extern "C" fn(
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
) -> c_int;

/// The driver's libcuda, which is never unloaded.
pub(crate) struct Cuda(*mut c_void);

/// A context, which is current in this thread and ends with the process.
pub(crate) struct Context(Cuda);

/// Memory of the GPU.
pub(crate) struct Memory {
    address: u64,
    bytes: usize,
}

impl Cuda {
    pub(crate) fn load(path: &str) -> Result<Self, Problem> {
        let why = || Problem::Library(format!("{path} cannot be loaded"));
        let text = CString::new(path).map_err(|_| why())?;
        // SAFETY: the text ends with a zero. The library's constructors are the driver's own.
        let library = unsafe { libc::dlopen(text.as_ptr(), libc::RTLD_NOW) };
        if library.is_null() {
            return Err(Problem::Library(
                last_error().unwrap_or_else(|| why().to_string()),
            ));
        }
        let cuda = Self(library);
        // SAFETY: cuda.h: CUresult cuInit(unsigned int).
        let init: unsafe extern "C" fn(c_uint) -> c_int = unsafe { cuda.function(c"cuInit")? };
        // SAFETY: as declared.
        done("cuInit", unsafe { init(0) })?;
        Ok(cuda)
    }

    /// Makes a context on the first GPU that is visible.
    pub(crate) fn context(self) -> Result<Context, Problem> {
        // SAFETY: cuda.h: CUresult cuDeviceGet(CUdevice *, int), with CUdevice an int.
        let device: unsafe extern "C" fn(*mut c_int, c_int) -> c_int =
            unsafe { self.function(c"cuDeviceGet")? };
        // SAFETY: cuda.h: CUresult cuCtxCreate_v2(CUcontext *, unsigned int, CUdevice).
        let create: unsafe extern "C" fn(*mut *mut c_void, c_uint, c_int) -> c_int =
            unsafe { self.function(c"cuCtxCreate_v2")? };
        let (mut first, mut context) = (0, ptr::null_mut());
        // SAFETY: both write one value, and the device is the driver's.
        done("cuDeviceGet", unsafe { device(&raw mut first, 0) })?;
        // SAFETY: as above.
        done("cuCtxCreate_v2", unsafe {
            create(&raw mut context, 0, first)
        })?;
        Ok(Context(self))
    }

    /// # Safety
    /// `F` is the function pointer's type that cuda.h declares for `name`.
    unsafe fn function<F: Copy>(&self, name: &CStr) -> Result<F, Problem> {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
        // SAFETY: the library is loaded, and the name ends with a zero.
        let found = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        if found.is_null() {
            let name = name.to_string_lossy();
            return Err(Problem::Library(format!("libcuda has no {name}")));
        }
        // SAFETY: the caller's contract; both have the same size.
        Ok(unsafe { std::mem::transmute_copy(&found) })
    }
}

impl Context {
    pub(crate) fn allocate(&self, bytes: usize) -> Result<Memory, Problem> {
        // SAFETY: cuda.h: CUresult cuMemAlloc_v2(CUdeviceptr *, size_t), with CUdeviceptr 64 bits.
        let allocate: unsafe extern "C" fn(*mut u64, usize) -> c_int =
            unsafe { self.0.function(c"cuMemAlloc_v2")? };
        let mut address = 0;
        // SAFETY: it writes one address.
        done("cuMemAlloc_v2", unsafe {
            allocate(&raw mut address, bytes)
        })?;
        Ok(Memory { address, bytes })
    }

    pub(crate) fn fill_zero(&self, memory: &Memory) -> Result<(), Problem> {
        // SAFETY: cuda.h: CUresult cuMemsetD8_v2(CUdeviceptr, unsigned char, size_t).
        let fill: unsafe extern "C" fn(u64, u8, usize) -> c_int =
            unsafe { self.0.function(c"cuMemsetD8_v2")? };
        // SAFETY: the memory is that of `allocate`.
        done("cuMemsetD8_v2", unsafe {
            fill(memory.address, 0, memory.bytes)
        })?;
        self.wait()
    }

    /// Runs a kernel with the parameters `memory` and `seed`, and waits for its end.
    pub(crate) fn launch(
        &self,
        code: &str,
        name: &str,
        [blocks, threads]: [u32; 2],
        memory: &Memory,
        seed: u32,
    ) -> Result<(), Problem> {
        let text = |text: &str| CString::new(text).unwrap_or_default();
        let (code, name) = (text(code), text(name));
        // SAFETY: cuda.h: CUresult cuModuleLoadData(CUmodule *, const void *).
        let load: unsafe extern "C" fn(*mut *mut c_void, *const c_void) -> c_int =
            unsafe { self.0.function(c"cuModuleLoadData")? };
        // SAFETY: cuda.h: CUresult cuModuleGetFunction(CUfunction *, CUmodule, const char *).
        let find: unsafe extern "C" fn(*mut *mut c_void, *mut c_void, *const c_char) -> c_int =
            unsafe { self.0.function(c"cuModuleGetFunction")? };
        // SAFETY: as cuda.h declares it.
        let launch: Launch = unsafe { self.0.function(c"cuLaunchKernel")? };
        let (mut module, mut function) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the code is PTX that ends with a zero.
        done("cuModuleLoadData", unsafe {
            load(&raw mut module, code.as_ptr().cast())
        })?;
        // SAFETY: the module is loaded, and the name ends with a zero.
        done("cuModuleGetFunction", unsafe {
            find(&raw mut function, module, name.as_ptr())
        })?;
        let (mut address, mut seed) = (memory.address, seed);
        let mut parameters = [(&raw mut address).cast(), (&raw mut seed).cast::<c_void>()];
        // SAFETY: the parameters are those of the kernel, which writes one word for each thread: all of the memory.
        let launched = unsafe {
            launch(
                function,
                blocks,
                1,
                1,
                threads,
                1,
                1,
                0,
                ptr::null_mut(),
                parameters.as_mut_ptr(),
                ptr::null_mut(),
            )
        };
        done("cuLaunchKernel", launched)?;
        self.wait()
    }

    pub(crate) fn read(&self, memory: &Memory) -> Result<Vec<u32>, Problem> {
        // SAFETY: cuda.h: CUresult cuMemcpyDtoH_v2(void *, CUdeviceptr, size_t).
        let copy: unsafe extern "C" fn(*mut c_void, u64, usize) -> c_int =
            unsafe { self.0.function(c"cuMemcpyDtoH_v2")? };
        let mut words = vec![0_u32; memory.bytes / 4];
        // SAFETY: both have as many bytes.
        let copied = unsafe { copy(words.as_mut_ptr().cast(), memory.address, memory.bytes) };
        done("cuMemcpyDtoH_v2", copied)?;
        Ok(words)
    }

    fn wait(&self) -> Result<(), Problem> {
        // SAFETY: cuda.h: CUresult cuCtxSynchronize(void).
        let wait: unsafe extern "C" fn() -> c_int =
            unsafe { self.0.function(c"cuCtxSynchronize")? };
        // SAFETY: as declared.
        done("cuCtxSynchronize", unsafe { wait() })
    }
}

fn done(call: &'static str, code: c_int) -> Result<(), Problem> {
    match code {
        0 => Ok(()),
        code => Err(Problem::Call { call, code }),
    }
}

/// The loader's last error.
fn last_error() -> Option<String> {
    // SAFETY: it returns null or text that is valid until the next call of the loader.
    unsafe {
        let text = libc::dlerror();
        (!text.is_null()).then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
    }
}
