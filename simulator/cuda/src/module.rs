//! Modules, libraries and kernels.
//!
//! **Time.** A kernel whose name contains `sim_busy_<n>ns`, `…us` or `…ms` takes that time (`sim_busy_0us` takes no time
//! and no place in the queue). Other kernels take the time of the machine file (`kernel_micros`). If the name also
//! contains `_per_block`, each block of the grid takes that time, one after another.
//!
//! **Local memory.** A kernel whose name contains `sim_local_<n>` has `n` bytes of it per thread.
//!
//! **Managed memory.** A kernel whose name contains `sim_touch_managed` uses all managed memory of its context.
//!
//! **Results.** A kernel whose name contains `sim_hash` has the parameters `u32 *to, u32 seed`; its thread `i` writes
//! `i * 2654435761 ^ seed` to `to[i]`. No other kernel writes anything.
//!
//! **Faults.** A kernel whose name contains `sim_illegal_address` accesses memory that is not allocated, at its end.
//!
//! **Loading.** With [`Habit::LazyLoading`] an image takes memory in a context when the first of its kernels is launched
//! there or the address of the first of its variables is asked for: what the GPU's entry of the image takes, and all its
//! variables. Without that habit code takes no memory, and a variable takes memory when its address is asked for.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_void};
use std::sync::atomic::AtomicI32;
use std::sync::{Mutex, MutexGuard, PoisonError};

use tranche_simulator_machine::layout::Habit;

use crate::code::Code;
use crate::context::{Context, current};
use crate::device::{Device, devices};
use crate::driver::{driver, has};
use crate::export::{get, put, put_wanted};
use crate::image::{self, Image};
use crate::memory;
use crate::object::{Handle, Kind, Object, StoredHandle};

/// A loaded image: CUDA's module or library.
#[derive(Debug)]
pub struct Module {
    image: Image,
    /// The loaded parts, by the context's id.
    loaded: Mutex<BTreeMap<u64, Loaded>>,
    functions: Mutex<BTreeMap<String, &'static Object<Function>>>,
}

/// The part of an image that is loaded in a context.
#[derive(Debug)]
struct Loaded {
    context: &'static Object<Context>,
    /// Bytes of code.
    code: u64,
    /// Addresses of variables, and their allocations' ids.
    variables: BTreeMap<String, (u64, u64)>,
}

impl Kind for Module {
    const TAG: u64 = 0x4d4f_4400_0000_0001;
}

/// A kernel: CUDA's function and kernel.
#[derive(Debug)]
#[expect(clippy::struct_excessive_bools, reason = "each is a word in its name")]
pub struct Function {
    pub name: CString,
    pub module: StoredHandle,
    /// Whether it uses all managed memory of its context.
    pub touches_managed: bool,
    /// Whether it accesses memory that is not allocated.
    pub faults: bool,
    /// Whether it writes hashes to its first parameter, see the module's documentation.
    pub hashes: bool,
    /// Nanoseconds of the kernel; `None` for the machine file's value.
    nanos: Option<u64>,
    /// Whether each block takes that time.
    per_block: bool,
    /// Bytes of local memory per thread.
    pub local: u64,
    pub dynamic_shared: AtomicI32,
    pub carveout: AtomicI32,
}

impl Kind for Function {
    const TAG: u64 = 0x464e_4300_0000_0001;
}

impl Function {
    /// Loads its module into `context`, if it is not loaded there.
    pub fn load(&self, context: &'static Object<Context>) -> Result<(), Code> {
        if !has(Habit::LazyLoading) {
            return Ok(());
        }
        // SAFETY: a handle that this library made. `find` refuses a destroyed module.
        unsafe { Object::<Module>::find(self.module.0)? }.load(context)
    }

    /// Virtual nanoseconds on the GPU of `context`, for a grid.
    pub fn nanos(&self, context: &Context, grid: [u32; 3]) -> u64 {
        let nanos = self.nanos.unwrap_or(context.device.state.kernel_nanos);
        let blocks = if self.per_block {
            grid.iter().map(|extent| u64::from(*extent)).product()
        } else {
            1
        };
        let device = context.device;
        let (all, usable) = (device.multiprocessors(), device.usable_multiprocessors());
        // A kernel on half of the multiprocessors takes twice as long.
        nanos.saturating_mul(blocks).saturating_mul(all.into()) / u64::from(usable)
    }
}

/// The nanoseconds in a kernel's name.
fn nanos_of_name(name: &str) -> Option<u64> {
    let rest = &name[name.find("sim_busy_")? + "sim_busy_".len()..];
    let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
    let number: u64 = rest[..digits].parse().ok()?;
    let unit = match rest[digits..].get(..2)? {
        "ns" => 1,
        "us" => 1_000,
        "ms" => 1_000_000,
        _ => return None,
    };
    number.checked_mul(unit)
}

/// The bytes of local memory per thread in a kernel's name; 0 if it contains none.
fn local_of_name(name: &str) -> u64 {
    let digits = name.find("sim_local_").map_or("", |at| {
        let rest = &name[at + "sim_local_".len()..];
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        &rest[..digits]
    });
    digits.parse().unwrap_or(0)
}

/// Whether the program has chosen eager loading of modules.
pub fn is_eager() -> bool {
    std::env::var("CUDA_MODULE_LOADING").is_ok_and(|mode| mode == "EAGER")
}

/// Makes a module from an image that is for at least one of the GPUs.
///
/// # Safety
/// As [`image::read`].
pub unsafe fn create(image: *const c_void) -> Result<&'static Object<Module>, Code> {
    // SAFETY: the caller's contract.
    let image = unsafe { image::read(image)? };
    let fits = |device: &Device| image.entry(device.compute_capability()).is_ok();
    if !devices()?.iter().any(fits) {
        return Err(Code::NO_BINARY_FOR_GPU);
    }
    Ok(Object::create(Module {
        image,
        loaded: Mutex::default(),
        functions: Mutex::default(),
    }))
}

/// Loads an image into the calling thread's context.
///
/// # Safety
/// As [`image::read`].
pub unsafe fn load_here(image: *const c_void) -> Result<Handle, Code> {
    let context = current()?;
    // SAFETY: the caller's contract.
    let module = unsafe { create(image)? };
    load_if_eager(module, context)
}

/// Loads a new module into a context, if the program has chosen eager loading; its handle.
pub fn load_if_eager(
    module: &'static Object<Module>,
    context: &'static Object<Context>,
) -> Result<Handle, Code> {
    let gpu = context.device.compute_capability();
    if let Err(code) = module.image.entry(gpu) {
        module.unload();
        return Err(code);
    }
    if has(Habit::LazyLoading) && is_eager() {
        module.load(context).inspect_err(|_| {
            module.unload();
        })?;
    }
    Ok(module.handle())
}

/// Makes a module from the image in a file.
///
/// # Safety
/// `path` is null or a C string.
pub unsafe fn create_from_file(path: *const c_char) -> Result<&'static Object<Module>, Code> {
    use std::os::unix::ffi::OsStrExt as _;
    // SAFETY: the caller's contract.
    let path = unsafe {
        get(path)?;
        CStr::from_ptr(path)
    };
    let mut image = std::fs::read(std::ffi::OsStr::from_bytes(path.to_bytes()))
        .map_err(|_| Code::FILE_NOT_FOUND)?;
    image.extend([0; 8]);
    // SAFETY: the whole file, followed by zeros.
    unsafe { create(image.as_ptr().cast()) }
}

impl Loaded {
    /// The part that is loaded in `context`.
    fn of<'a>(
        loaded: &'a mut BTreeMap<u64, Self>,
        context: &'static Object<Context>,
    ) -> &'a mut Self {
        loaded.entry(context.id).or_insert_with(|| Self {
            context,
            code: 0,
            variables: BTreeMap::new(),
        })
    }
}

impl Object<Module> {
    /// A kernel by its name.
    pub fn function(&'static self, name: &CStr) -> Result<&'static Object<Function>, Code> {
        let text = name.to_str().map_err(|_| Code::NOT_FOUND)?;
        if !self.image.has_kernel(text) {
            return Err(Code::NOT_FOUND);
        }
        let mut functions = self
            .functions
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        Ok(functions.entry(text.to_owned()).or_insert_with(|| {
            Object::create(Function {
                name: name.to_owned(),
                module: StoredHandle(self.handle()),
                nanos: nanos_of_name(text),
                touches_managed: text.contains("sim_touch_managed"),
                faults: text.contains("sim_illegal_address"),
                hashes: text.contains("sim_hash"),
                per_block: text.contains("_per_block"),
                local: local_of_name(text),
                dynamic_shared: AtomicI32::new(0),
                carveout: AtomicI32::new(-1),
            })
        }))
    }

    fn loaded(&self) -> MutexGuard<'_, BTreeMap<u64, Loaded>> {
        self.loaded.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether its code takes memory in a context.
    pub fn is_loaded(&self, context: &Context) -> bool {
        let loaded = self.loaded();
        loaded
            .get(&context.id)
            .is_some_and(|loaded| loaded.code > 0)
    }

    /// Loads the code and all variables into `context`, if they are not there.
    fn load(&self, context: &'static Object<Context>) -> Result<(), Code> {
        let mut loaded = self.loaded();
        if loaded
            .get(&context.id)
            .is_some_and(|loaded| loaded.code > 0)
        {
            return Ok(());
        }
        let entry = self.image.entry(context.device.compute_capability())?;
        for name in entry.globals.keys() {
            self.variable(&mut loaded, context, name)?;
        }
        let code = entry.bytes.max(1);
        context.load_code(code)?;
        Loaded::of(&mut loaded, context).code = code;
        Ok(())
    }

    /// The address and size of a variable in `context`. Allocates its memory there, if it has none.
    fn variable(
        &self,
        loaded: &mut BTreeMap<u64, Loaded>,
        context: &'static Object<Context>,
        name: &str,
    ) -> Result<(u64, u64), Code> {
        let entry = self.image.entry(context.device.compute_capability())?;
        let bytes = *entry.globals.get(name).ok_or(Code::NOT_FOUND)?;
        let variables = &mut Loaded::of(loaded, context).variables;
        if let Some((address, _)) = variables.get(name) {
            return Ok((*address, bytes));
        }
        let address = memory::allocate(context, bytes.max(1))?;
        variables.insert(name.to_owned(), (address, memory::id_of(address)));
        Ok((address, bytes))
    }

    /// The address and size of a variable in the calling thread's context.
    pub fn global(&self, name: &CStr) -> Result<(u64, u64), Code> {
        let text = name.to_str().map_err(|_| Code::NOT_FOUND)?;
        let context = current()?;
        let entry = self.image.entry(context.device.compute_capability())?;
        if !entry.globals.contains_key(text) {
            return Err(Code::NOT_FOUND);
        }
        if has(Habit::LazyLoading) {
            self.load(context)?;
        }
        self.variable(&mut self.loaded(), context, text)
    }

    /// Unloads the module from all contexts and ends it; false if another call has done so.
    pub fn unload(&'static self) -> bool {
        if !self.end_handle() {
            return false;
        }
        let functions = std::mem::take(
            &mut *self
                .functions
                .lock()
                .unwrap_or_else(PoisonError::into_inner),
        );
        for function in functions.values() {
            function.destroy();
        }
        for loaded in std::mem::take(&mut *self.loaded()).into_values() {
            for (address, id) in loaded.variables.into_values() {
                memory::free_exactly(address, id);
            }
            if loaded.context.is_alive() {
                loaded.context.unload_code(loaded.code);
            }
        }
        // SAFETY: only the call that ended the handle gets here.
        unsafe { self.quarantine() };
        true
    }

    /// The names of its kernels; none for an image that was not opened.
    pub fn names(&self) -> Vec<String> {
        self.image.kernels()
    }
}

/// The handle of a module's kernel, by name.
///
/// # Safety
/// As [`Object::find`]; `name` is null or a C string.
pub unsafe fn function_of(module: Handle, name: *const c_char) -> Result<Handle, Code> {
    driver()?;
    // SAFETY: the caller's contract.
    unsafe {
        get(name)?;
        Ok(Object::<Module>::find(module)?
            .function(CStr::from_ptr(name))?
            .handle())
    }
}

/// Writes the address and size of a module's variable, by name.
///
/// # Safety
/// As [`Object::find`]; `name` is null or a C string; `to` and `bytes` are null or valid.
pub unsafe fn global_of(
    module: Handle,
    name: *const c_char,
    to: *mut u64,
    bytes: *mut usize,
) -> Result<(), Code> {
    driver()?;
    // SAFETY: the caller's contract.
    unsafe {
        get(name)?;
        let (address, length) = Object::<Module>::find(module)?.global(CStr::from_ptr(name))?;
        put_wanted(to, address);
        put_wanted(bytes, usize::try_from(length).unwrap_or(0));
    }
    Ok(())
}

/// Writes the handles of a module's kernels, at most `room`.
///
/// # Safety
/// `to` has room for `room` handles.
pub unsafe fn enumerate(
    module: &'static Object<Module>,
    to: *mut Handle,
    room: u32,
) -> Result<(), Code> {
    for (index, name) in module.names().iter().take(room as usize).enumerate() {
        let name = CString::new(name.as_str()).map_err(|_| Code::UNKNOWN)?;
        // SAFETY: the caller's contract.
        unsafe { put(to.wrapping_add(index), module.function(&name)?.handle())? };
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernels_name_can_contain_its_time() {
        assert_eq!(nanos_of_name("sim_busy_250us"), Some(250_000));
        assert_eq!(nanos_of_name("_Z13sim_busy_3msPf"), Some(3_000_000));
        assert_eq!(nanos_of_name("sim_busy_0ns"), Some(0));
        for name in [
            "add",
            "sim_busy_",
            "sim_busy_5",
            "sim_busy_us",
            "sim_busy_5s",
            "sim_busy_99999999999999999999ms",
        ] {
            assert_eq!(nanos_of_name(name), None, "{name}");
        }
    }
}
