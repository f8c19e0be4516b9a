//! Modules, libraries and kernels.
//!
//! Nothing is compiled: an image is looked at for the names it defines. PTX says
//! them in its text, a cubin in its section names; a fat binary is not opened, and
//! any name is found in it.
//!
//! **How long a kernel takes.** A name that contains `sim_busy_<n>ns`, `…us` or
//! `…ms` takes that long (`sim_busy_0us` takes no time and no place in the queue);
//! other kernels take what the machine file says (`kernel_micros`). With `_per_block` behind that, it is what
//! each block of its grid takes, one after another.
//!
//! **How much local memory.** A name that contains `sim_local_<n>` has so many bytes of it per thread.
//!
//! **Managed memory.** A kernel whose name contains `sim_touch_managed` uses all managed memory of its context.
//!
//! **When code is loaded.** Where the driver loads lazily ([`Habit::LazyLoading`]), an image takes memory in a
//! context when the first of its kernels is launched there or the first of its variables asked for: its own
//! bytes for the code, and all its variables. Else code takes no memory, and a variable when it is asked for.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_void};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tranche_simulator_machine::layout::Habit;

use crate::code::Code;
use crate::context::{Context, current};
use crate::device::devices;
use crate::driver::{driver, has};
use crate::export::{export, get, put, put_wanted};
use crate::memory;
use crate::object::{Handle, Kept, Kind, Object};

/// A loaded image: CUDA's module or library.
#[derive(Debug)]
pub struct Module {
    names: Names,
    /// Sizes of global variables by name.
    globals: BTreeMap<String, u64>,
    /// Bytes of the image.
    bytes: u64,
    /// What is loaded, by the context's id.
    loaded: Mutex<BTreeMap<u64, Loaded>>,
    functions: Mutex<BTreeMap<String, &'static Object<Function>>>,
}

/// What of an image is in a context.
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

/// Which kernels an image has.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Names {
    Listed(Vec<String>),
    /// The image was not opened.
    Any,
}

/// A kernel: CUDA's function and kernel.
#[derive(Debug)]
pub struct Function {
    pub name: CString,
    module: Kept,
    /// Whether it uses all managed memory of its context.
    pub touches_managed: bool,
    /// What its name says; none for the machine's.
    nanos: Option<u64>,
    /// Whether that is for each block.
    per_block: bool,
    /// Bytes of local memory per thread.
    pub local: u64,
    dynamic_shared: AtomicI32,
    carveout: AtomicI32,
}

impl Kind for Function {
    const TAG: u64 = 0x464e_4300_0000_0001;
}

impl Function {
    /// Sees that its module is loaded in `context`.
    pub fn load(&self, context: &'static Object<Context>) -> Result<(), Code> {
        if !has(Habit::LazyLoading) {
            return Ok(());
        }
        // SAFETY: a module's handle, which was this library's; a destroyed one is found out.
        unsafe { Object::<Module>::find(self.module.0)? }.load(context)
    }

    /// Virtual nanoseconds on the GPU of `context`, with such a grid.
    pub fn nanos(&self, context: &Context, grid: [u32; 3]) -> u64 {
        let nanos = self.nanos.unwrap_or(context.device.state.kernel_nanos);
        let blocks = if self.per_block {
            grid.iter().map(|extent| u64::from(*extent)).product()
        } else {
            1
        };
        nanos.saturating_mul(blocks)
    }
}

/// The time that a kernel's name says.
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

/// The bytes of local memory that a kernel's name says.
fn local_of_name(name: &str) -> u64 {
    let digits = name.find("sim_local_").map_or("", |at| {
        let rest = &name[at + "sim_local_".len()..];
        let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
        &rest[..digits]
    });
    digits.parse().unwrap_or(0)
}

/// The names after `.entry` in PTX.
fn ptx_entries(text: &str) -> Vec<String> {
    text.split(".entry")
        .skip(1)
        .filter_map(|rest| {
            let name: String = rest
                .trim_start()
                .chars()
                .take_while(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '$' | '%'))
                .collect();
            (!name.is_empty()).then_some(name)
        })
        .collect()
}

/// Global variables in PTX, with their sizes: `.global .align 4 .b8 name[16];`
fn ptx_globals(text: &str) -> BTreeMap<String, u64> {
    let mut found = BTreeMap::new();
    for line in text.lines() {
        let Some((_, rest)) = line
            .split_once(".global ")
            .or_else(|| line.split_once(".const "))
        else {
            continue;
        };
        // Instructions (ld.global …) have no type word of their own.
        let mut width = 0;
        for word in rest.split_ascii_whitespace() {
            if let Some(kind) = word.strip_prefix('.') {
                let bits = kind.trim_start_matches(|c: char| c.is_ascii_alphabetic());
                if kind != "align" && bits.len() < kind.len() {
                    width = bits.parse::<u64>().unwrap_or(0) / 8;
                }
            } else if width > 0 && !word.starts_with(|c: char| c.is_ascii_digit()) {
                let name = word.trim_end_matches(';');
                let (name, count) = match name.split_once('[') {
                    Some((name, count)) => (name, count.trim_end_matches(']').parse().unwrap_or(1)),
                    None => (name, 1),
                };
                found.insert(name.to_owned(), width * count);
                break;
            }
        }
    }
    found
}

/// Kernel names in a cubin: its sections `.text.<name>`.
///
/// # Safety
/// `image` is a whole 64-bit ELF file.
unsafe fn elf_kernels(image: *const u8) -> Option<Vec<String>> {
    // SAFETY: within the ELF header, which is 64 bytes.
    let (table, entry, count, names) = unsafe {
        (
            image.add(0x28).cast::<u64>().read_unaligned(),
            image.add(0x3a).cast::<u16>().read_unaligned(),
            image.add(0x3c).cast::<u16>().read_unaligned(),
            image.add(0x3e).cast::<u16>().read_unaligned(),
        )
    };
    let section = |index: u16| {
        usize::try_from(table)
            .ok()
            .map(|t| t + usize::from(index) * usize::from(entry))
    };
    if names >= count || entry < 64 {
        return None;
    }
    // SAFETY: the header says that the section table has `count` entries.
    let strings = unsafe {
        image
            .add(section(names)? + 0x18)
            .cast::<u64>()
            .read_unaligned()
    };
    let mut found = Vec::new();
    for index in 0..count {
        // SAFETY: as above; names are zero-terminated in the string section.
        let name = unsafe {
            let offset = image.add(section(index)?).cast::<u32>().read_unaligned();
            CStr::from_ptr(
                image
                    .add(usize::try_from(strings).ok()? + offset as usize)
                    .cast(),
            )
        };
        if let Some(kernel) = name.to_str().ok().and_then(|n| n.strip_prefix(".text.")) {
            found.push(kernel.to_owned());
        }
    }
    Some(found)
}

/// Bytes of an ELF file: its section table is at its end.
///
/// # Safety
/// `image` is a whole 64-bit ELF file.
unsafe fn elf_bytes(image: *const u8) -> u64 {
    // SAFETY: within the ELF header, which is 64 bytes.
    unsafe {
        let table = image.add(0x28).cast::<u64>().read_unaligned();
        let entry = image.add(0x3a).cast::<u16>().read_unaligned();
        let count = image.add(0x3c).cast::<u16>().read_unaligned();
        table.saturating_add(u64::from(entry) * u64::from(count))
    }
}

/// Bytes of a fat binary: a header that says its own length (two bytes at 6) and that of the rest (eight
/// bytes at 8).
///
/// # Safety
/// `image` is a whole fat binary.
unsafe fn fatbin_bytes(image: *const u8) -> u64 {
    // SAFETY: within the header, which is 16 bytes.
    unsafe {
        let header = image.add(6).cast::<u16>().read_unaligned();
        let rest = image.add(8).cast::<u64>().read_unaligned();
        rest.saturating_add(u64::from(header))
    }
}

const FATBIN: [u8; 4] = 0xba55_ed50u32.to_le_bytes();
/// What nvcc's wrapper around a fat binary begins with.
const FATBIN_WRAPPER: [u8; 4] = 0x466b_6463u32.to_le_bytes();

/// Loads an image.
///
/// # Safety
/// `image` is null, or PTX with its final zero, or a cubin, or a fat binary.
unsafe fn load(image: *const c_void) -> Result<&'static Object<Module>, Code> {
    // SAFETY: every kind of image has four bytes.
    let start = unsafe { get(image.cast::<[u8; 4]>())? };
    let mut globals = BTreeMap::new();
    let bytes;
    let names = if start == *b"\x7fELF" {
        // SAFETY: an ELF image is whole by CUDA's contract.
        let (length, kernels) = unsafe { (elf_bytes(image.cast()), elf_kernels(image.cast())) };
        bytes = length;
        kernels.map_or(Names::Any, Names::Listed)
    } else if start == FATBIN {
        // SAFETY: a fat binary is whole by CUDA's contract.
        bytes = unsafe { fatbin_bytes(image.cast()) };
        Names::Any
    } else if start == FATBIN_WRAPPER {
        // SAFETY: fatbinary_section.h: magic, version, then the address of the fat binary.
        bytes = unsafe { fatbin_bytes(image.cast::<*const u8>().add(1).read_unaligned()) };
        Names::Any
    } else {
        // SAFETY: what is none of the above is text with its final zero.
        let text = unsafe { CStr::from_ptr(image.cast()) }.to_string_lossy();
        if !text.contains(".version") || !text.contains(".target") {
            return Err(Code::INVALID_IMAGE);
        }
        globals = ptx_globals(&text);
        bytes = text.len() as u64;
        Names::Listed(ptx_entries(&text))
    };
    Ok(Object::create(Module {
        names,
        globals,
        bytes,
        loaded: Mutex::default(),
        functions: Mutex::new(BTreeMap::new()),
    }))
}

/// `CUmoduleLoadingMode`
const EAGER: u32 = 1;
const LAZY: u32 = 2;

/// Whether the program wants its modules loaded at once, where the driver would do so later.
fn is_eager() -> bool {
    std::env::var("CUDA_MODULE_LOADING").is_ok_and(|mode| mode == "EAGER")
}

/// Loads an image into the calling thread's context.
///
/// # Safety
/// As [`load`].
unsafe fn load_here(image: *const c_void) -> Result<Handle, Code> {
    let context = current()?;
    // SAFETY: the caller's contract.
    let module = unsafe { load(image)? };
    settle_in(module, context)
}

/// What a context gets of a module that has just been loaded.
fn settle_in(
    module: &'static Object<Module>,
    context: &'static Object<Context>,
) -> Result<Handle, Code> {
    if has(Habit::LazyLoading) && is_eager() {
        module.load(context).inspect_err(|_| module.unload())?;
    }
    Ok(module.handle())
}

/// # Safety
/// `path` is null or a C string.
unsafe fn load_file(path: *const c_char) -> Result<&'static Object<Module>, Code> {
    use std::os::unix::ffi::OsStrExt as _;
    // SAFETY: the caller's contract.
    let path = unsafe {
        get(path)?;
        CStr::from_ptr(path)
    };
    let mut image = std::fs::read(std::ffi::OsStr::from_bytes(path.to_bytes()))
        .map_err(|_| Code::FILE_NOT_FOUND)?;
    image.extend([0; 8]);
    // SAFETY: the whole file, with zeros behind it.
    unsafe { load(image.as_ptr().cast()) }
}

impl Loaded {
    /// What is loaded in `context`.
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
    fn function(&'static self, name: &CStr) -> Result<&'static Object<Function>, Code> {
        let text = name.to_str().map_err(|_| Code::NOT_FOUND)?;
        if let Names::Listed(names) = &self.names
            && !names.iter().any(|n| n == text)
        {
            return Err(Code::NOT_FOUND);
        }
        let mut functions = self
            .functions
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        Ok(functions.entry(text.to_owned()).or_insert_with(|| {
            Object::create(Function {
                name: name.to_owned(),
                module: Kept(self.handle()),
                nanos: nanos_of_name(text),
                touches_managed: text.contains("sim_touch_managed"),
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

    /// Loads the code and all variables into `context`, if they are not there.
    fn load(&self, context: &'static Object<Context>) -> Result<(), Code> {
        let mut loaded = self.loaded();
        if loaded
            .get(&context.id)
            .is_some_and(|loaded| loaded.code > 0)
        {
            return Ok(());
        }
        for name in self.globals.keys() {
            self.variable(&mut loaded, context, name)?;
        }
        // No image is empty.
        let code = self.bytes.max(1);
        context.load_code(code)?;
        Loaded::of(&mut loaded, context).code = code;
        Ok(())
    }

    /// The address and size of a variable in `context`, where it has memory from now on.
    fn variable(
        &self,
        loaded: &mut BTreeMap<u64, Loaded>,
        context: &'static Object<Context>,
        name: &str,
    ) -> Result<(u64, u64), Code> {
        let bytes = *self.globals.get(name).ok_or(Code::NOT_FOUND)?;
        let variables = &mut Loaded::of(loaded, context).variables;
        if let Some((address, _)) = variables.get(name) {
            return Ok((*address, bytes));
        }
        let address = memory::allocate(context, bytes.max(1))?;
        variables.insert(name.to_owned(), (address, memory::id_of(address)));
        Ok((address, bytes))
    }

    fn global(&self, name: &CStr) -> Result<(u64, u64), Code> {
        let text = name.to_str().map_err(|_| Code::NOT_FOUND)?;
        if !self.globals.contains_key(text) {
            return Err(Code::NOT_FOUND);
        }
        let context = current()?;
        if has(Habit::LazyLoading) {
            self.load(context)?;
        }
        self.variable(&mut self.loaded(), context, text)
    }

    fn unload(&'static self) {
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
            if loaded.context.alive() {
                loaded.context.unload_code(loaded.code);
            }
        }
        self.destroy();
    }

    fn names(&self) -> Vec<String> {
        match &self.names {
            Names::Listed(names) => names.clone(),
            Names::Any => Vec::new(),
        }
    }
}

/// # Safety
/// As [`Object::find`] and a C string.
unsafe fn function_of(module: Handle, name: *const c_char) -> Result<Handle, Code> {
    driver()?;
    // SAFETY: the caller's contract.
    unsafe {
        get(name)?;
        Ok(Object::<Module>::find(module)?
            .function(CStr::from_ptr(name))?
            .handle())
    }
}

/// # Safety
/// As [`Object::find`] and a C string.
unsafe fn global_of(
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

fn function_attribute(function: &Function, which: u32) -> Result<i32, Code> {
    Ok(match which {
        0 => 1024,
        3 => i32::try_from(function.local).unwrap_or(i32::MAX),
        1 | 2 | 7 | 10..=15 => 0,
        4 => 32,
        // PTX and binary version, as 10 × major + minor.
        5 | 6 => {
            let [major, minor] = devices()?[0].state.compute_capability;
            i32::try_from(major * 10 + minor).unwrap_or(0)
        }
        8 => function.dynamic_shared.load(Ordering::Relaxed),
        9 => function.carveout.load(Ordering::Relaxed),
        _ => return Err(Code::INVALID_VALUE),
    })
}

fn set_function_attribute(function: &Function, which: u32, value: i32) -> Result<(), Code> {
    match which {
        8 => function.dynamic_shared.store(value, Ordering::Relaxed),
        9 => function.carveout.store(value, Ordering::Relaxed),
        10..=15 => {}
        _ => return Err(Code::INVALID_VALUE),
    }
    Ok(())
}

/// # Safety
/// `to` has room for `room` handles.
unsafe fn enumerate(
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

export! {
    fn cuModuleLoadData(to: *mut Handle, image: *const c_void) {
        put(to, load_here(image)?)
    }
    fn cuModuleLoadDataEx(to: *mut Handle, image: *const c_void, _count: u32, _options: *mut u32, _values: *mut *mut c_void) {
        put(to, load_here(image)?)
    }
    fn cuModuleLoadFatBinary(to: *mut Handle, image: *const c_void) {
        put(to, load_here(image)?)
    }
    fn cuModuleLoad(to: *mut Handle, path: *const c_char) {
        put(to, settle_in(load_file(path)?, current()?)?)
    }
    fn cuModuleUnload(module: Handle) {
        driver()?;
        Object::<Module>::find(module)?.unload();
        Ok(())
    }
    fn cuModuleGetFunction(to: *mut Handle, module: Handle, name: *const c_char) {
        put(to, function_of(module, name)?)
    }
    fn cuModuleGetGlobal_v2(to: *mut u64, bytes: *mut usize, module: Handle, name: *const c_char) {
        global_of(module, name, to, bytes)
    }
    fn cuModuleGetLoadingMode(mode: *mut u32) {
        put(mode, if has(Habit::LazyLoading) && !is_eager() { LAZY } else { EAGER })
    }
    fn cuModuleGetFunctionCount(count: *mut u32, module: Handle) {
        driver()?;
        put(count, u32::try_from(Object::<Module>::find(module)?.names().len()).unwrap_or(0))
    }
    fn cuModuleEnumerateFunctions(to: *mut Handle, room: u32, module: Handle) {
        driver()?;
        enumerate(Object::<Module>::find(module)?, to, room)
    }

    fn cuLibraryLoadData(to: *mut Handle, image: *const c_void, _jit: *mut u32, _jit_values: *mut *mut c_void, _jit_count: u32, _options: *mut u32, _values: *mut *mut c_void, _count: u32) {
        driver()?;
        put(to, load(image)?.handle())
    }
    fn cuLibraryLoadFromFile(to: *mut Handle, path: *const c_char, _jit: *mut u32, _jit_values: *mut *mut c_void, _jit_count: u32, _options: *mut u32, _values: *mut *mut c_void, _count: u32) {
        driver()?;
        put(to, load_file(path)?.handle())
    }
    fn cuLibraryUnload(library: Handle) {
        driver()?;
        Object::<Module>::find(library)?.unload();
        Ok(())
    }
    fn cuLibraryGetModule(to: *mut Handle, library: Handle) {
        driver()?;
        put(to, Object::<Module>::find(library)?.handle())
    }
    fn cuLibraryGetKernel(to: *mut Handle, library: Handle, name: *const c_char) {
        put(to, function_of(library, name)?)
    }
    fn cuLibraryGetGlobal(to: *mut u64, bytes: *mut usize, library: Handle, name: *const c_char) {
        global_of(library, name, to, bytes)
    }
    fn cuLibraryGetManaged(to: *mut u64, bytes: *mut usize, library: Handle, name: *const c_char) {
        global_of(library, name, to, bytes)
    }
    fn cuLibraryGetKernelCount(count: *mut u32, library: Handle) {
        driver()?;
        put(count, u32::try_from(Object::<Module>::find(library)?.names().len()).unwrap_or(0))
    }
    fn cuLibraryEnumerateKernels(to: *mut Handle, room: u32, library: Handle) {
        driver()?;
        enumerate(Object::<Module>::find(library)?, to, room)
    }
    fn cuKernelGetFunction(to: *mut Handle, kernel: Handle) {
        current()?;
        put(to, Object::<Function>::find(kernel)?.handle())
    }
    fn cuKernelGetLibrary(to: *mut Handle, kernel: Handle) {
        driver()?;
        put(to, Object::<Function>::find(kernel)?.module.0)
    }
    fn cuKernelGetName(to: *mut *const c_char, kernel: Handle) {
        driver()?;
        put(to, Object::<Function>::find(kernel)?.name.as_ptr())
    }
    fn cuKernelGetAttribute(value: *mut i32, which: u32, kernel: Handle, _device: i32) {
        driver()?;
        put(value, function_attribute(Object::<Function>::find(kernel)?, which)?)
    }
    fn cuKernelSetAttribute(which: u32, value: i32, kernel: Handle, _device: i32) {
        driver()?;
        set_function_attribute(Object::<Function>::find(kernel)?, which, value)
    }
    fn cuKernelSetCacheConfig(kernel: Handle, _config: u32, _device: i32) {
        driver()?;
        Object::<Function>::find(kernel).map(drop)
    }
    fn cuFuncGetModule(to: *mut Handle, function: Handle) {
        driver()?;
        put(to, Object::<Function>::find(function)?.module.0)
    }
    fn cuFuncGetName(to: *mut *const c_char, function: Handle) {
        driver()?;
        put(to, Object::<Function>::find(function)?.name.as_ptr())
    }
    fn cuFuncGetAttribute(value: *mut i32, which: u32, function: Handle) {
        driver()?;
        put(value, function_attribute(Object::<Function>::find(function)?, which)?)
    }
    fn cuFuncSetAttribute(function: Handle, which: u32, value: i32) {
        driver()?;
        set_function_attribute(Object::<Function>::find(function)?, which, value)
    }
    fn cuFuncSetCacheConfig(function: Handle, _config: u32) {
        driver()?;
        Object::<Function>::find(function).map(drop)
    }
    fn cuFuncSetSharedMemConfig(function: Handle, _config: u32) {
        driver()?;
        Object::<Function>::find(function).map(drop)
    }
    fn cuFuncIsLoaded(state: *mut u32, function: Handle) {
        let context = current()?;
        let function = Object::<Function>::find(function)?;
        let module = Object::<Module>::find(function.module.0)?;
        let is_loaded = module.loaded().get(&context.id).is_some_and(|loaded| loaded.code > 0);
        put(state, u32::from(is_loaded || !has(Habit::LazyLoading)))
    }
    fn cuFuncLoad(function: Handle) {
        let context = current()?;
        Object::<Function>::find(function)?.load(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernels_name_can_say_how_long_it_takes() {
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

    #[test]
    fn ptx_says_its_kernels_and_globals() {
        let text = ".version 8.0\n.target sm_80\n.address_size 64\n\
            .visible .global .align 4 .b8 table[64];\n.global .u32 counter;\n\
            .visible .entry add(\n .param .u64 p\n)\n{ ld.global.u32 %r1, [p]; ret; }\n\
            .entry sim_busy_5us() { ret; }\n";
        assert_eq!(ptx_entries(text), ["add", "sim_busy_5us"]);
        let globals = ptx_globals(text);
        assert_eq!(globals.get("table"), Some(&64));
        assert_eq!(globals.get("counter"), Some(&4));
        assert_eq!(globals.len(), 2);
    }
}
