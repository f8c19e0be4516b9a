//! Modules and libraries. Their variables take device memory when they are loaded, their code at the
//! latest when it is used.
//!
//! The driver does not say how much, so the sizes in the image (`tranche_shim_core::image`) are charged when
//! the module is loaded: its variables, and all of its code. Most drivers load a kernel's code at its first
//! use, in any of many calls, when there may be no room any more. The variables of all modules share blocks,
//! and so does their code; so each of the two sums is rounded up. A library is charged on the devices that
//! have a context ([`crate::libraries`]).

use core::ffi::{CStr, c_char};

use tranche_shim_core::Entry;
use tranche_shim_core::image::{self, ELF_HEADER, Needs, START};
use tranche_shim_runtime::sys::{self, File};

use crate::abi::CUresult;
use crate::charge::{self, EVERY_DEVICE, note, return_charge};
use crate::device::Device;
use crate::driver::Call;
use crate::keys::{Kind, key};
use crate::loading::{self, raise};
use crate::process::{self, Process};

/// What a handle belongs to.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Within {
    /// A module ends with its context.
    Context,
    /// A library belongs to no context.
    Process,
}

/// The options for the driver's compiler: where they are, and how many.
pub type Options = (*const u32, u32);

pub const NO_OPTIONS: Options = (core::ptr::null(), 0);

/// Whether options say for which architecture the driver loads, or from what.
fn decide_what_is_loaded(options: Options) -> bool {
    const TARGET: u32 = 9;
    const FALLBACK_STRATEGY: u32 = 10;
    let (first, count) = options;
    let is_choice = |nth| {
        // SAFETY: the driver reads as many options next.
        let option = unsafe { first.add(nth).read() };
        matches!(option, TARGET | FALLBACK_STRATEGY)
    };
    !first.is_null() && (0..count as usize).any(is_choice)
}

/// Loads an image from the program's memory.
pub fn load(
    module: *mut usize,
    image: *const u8,
    within: Within,
    options: Options,
    driver: Call<'_>,
) -> CUresult {
    if module.is_null() || image.is_null() {
        return driver.make();
    }
    // SAFETY: not null, and an image that the driver reads next.
    let needs = |device| unsafe { needs_of(image, device) };
    charge(module, &needs, within, options, driver)
}

/// The same with an image in a file.
pub fn load_file(
    module: *mut usize,
    path: *const c_char,
    within: Within,
    options: Options,
    driver: Call<'_>,
) -> CUresult {
    if module.is_null() || path.is_null() {
        return driver.make();
    }
    // SAFETY: not null, and a C string, which the driver reads next.
    let path = unsafe { CStr::from_ptr(path) };
    let needs = |device| needs_of_file(path, device).unwrap_or_default();
    charge(module, &needs, within, options, driver)
}

/// `needs` is what the image needs on a device of an architecture.
fn charge(
    module: *mut usize,
    needs: &dyn Fn(u64) -> Needs,
    within: Within,
    options: Options,
    driver: Call<'_>,
) -> CUresult {
    let process = match process::current() {
        Ok(process) => process,
        Err(code) => return code,
    };
    let is_known = !decide_what_is_loaded(options);
    let needs_on = |device: &Device| needs(if is_known { device.architecture } else { 0 });
    if within == Within::Process {
        return loading::load_library(process, &needs_on, &|needs, devices| {
            let entry = Entry {
                bytes: 0,
                device: EVERY_DEVICE,
                context: 0,
            };
            charge_on(process, module, needs, devices, entry, driver)
        });
    }
    match process.current_capped() {
        Ok(Some(device)) => {
            let entry = Entry {
                bytes: 0,
                device: device.number,
                context: process.contexts.current(),
            };
            charge_on(
                process,
                module,
                needs_on(device),
                device.bit(),
                entry,
                driver,
            )
        }
        // If there is no context, the driver returns the error.
        Ok(None) | Err(CUresult::INVALID_CONTEXT) => driver.make(),
        Err(code) => code,
    }
}

/// Charges the devices whose bits are set, and loads. `entry` is how the charge is noted.
fn charge_on(
    process: &'static Process,
    module: *mut usize,
    needs: Needs,
    devices: u64,
    entry: Entry,
    driver: Call<'_>,
) -> CUresult {
    let result = raise(process, needs, devices, driver);
    if result.is_ok() {
        // SAFETY: not null, and the driver has just written to it.
        let module = unsafe { module.read() };
        for (kind, bytes) in [(Kind::Module, needs.data), (Kind::Code, needs.code)] {
            if bytes > 0 {
                note(process, key(kind, module as u64), Entry { bytes, ..entry });
            }
        }
    }
    result
}

/// Unloads a module or a library.
pub fn unload(module: usize, driver: Call<'_>) -> CUresult {
    let Some(process) = process::joined() else {
        return driver.make();
    };
    charge::end(
        process,
        [Kind::Module, Kind::Code].map(|kind| key(kind, module as u64)),
        || {
            let result = driver.make();
            // Another kernel may get the handle of one of its kernels.
            process.fitting.forget();
            result
        },
        |key, entry| return_charge(process, key, entry),
    )
}

/// The needs of an image on a device of an architecture.
///
/// # Safety
///
/// An image for the driver.
unsafe fn needs_of(image: *const u8, device: u64) -> Needs {
    let mut magic = [0; 4];
    for (at, place) in magic.iter_mut().enumerate() {
        // SAFETY: every image is longer, except for a text that ends before.
        *place = unsafe { image.add(at).read() };
        if *place == 0 {
            break;
        }
    }
    if !image::is_binary(magic) {
        // SAFETY: an image of no other kind is text that ends with a zero.
        return image::of_text(unsafe { CStr::from_ptr(image.cast()) }.to_bytes());
    }
    // SAFETY: all of these are longer.
    let start = |image: *const u8| image::kind(&unsafe { image.cast::<[u8; START]>().read() });
    let (image, kind) = match start(image) {
        // A wrapper holds the address of a fat binary.
        image::Kind::Wrapper(at) if at != 0 => (at as *const u8, start(at as *const u8)),
        kind => (image, kind),
    };
    match kind {
        // SAFETY: an ELF file is whole, its section table included.
        image::Kind::Elf => unsafe {
            let header = core::slice::from_raw_parts(image, ELF_HEADER);
            let (at, length) = image::section_table(header);
            image::of_sections(core::slice::from_raw_parts(image.add(at), length))
        },
        // SAFETY: a fat binary is as long as it says.
        image::Kind::Fat(length) => unsafe {
            image::of_fat_binary(core::slice::from_raw_parts(image, length), device)
        },
        image::Kind::Wrapper(_) | image::Kind::Text => Needs::default(),
    }
}

/// `None` for a file that cannot be read: the driver returns the error.
fn needs_of_file(path: &CStr, device: u64) -> Option<Needs> {
    let file = File::open_anywhere(path).ok()?;
    let length = file.size().ok()?;
    let mapping = file.map_readable(length).ok()?;
    // SAFETY: a mapping of so many bytes.
    let bytes: &[u8] =
        unsafe { core::slice::from_raw_parts(mapping.start.as_ptr().cast(), length) };
    let needs = image::of_file(bytes, device);
    // SAFETY: this function's own, and `needs` is not borrowed from it.
    unsafe { sys::unmap(mapping) };
    Some(needs)
}
