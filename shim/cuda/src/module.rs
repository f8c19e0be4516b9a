//! Modules and libraries. Their variables take device memory when they are loaded, their code at the
//! latest when it is used.
//!
//! The driver does not say how much, so the sizes in the image (`tranche_shim_core::image`) are charged when
//! the module is loaded: its variables, and all of its code. Most drivers load a kernel's code at its first
//! use, in any of many calls, when there may be no room any more. The variables of all modules share blocks,
//! and so does their code; so each of the two sums is rounded up.

use core::ffi::{CStr, c_char};

use tranche_shim_core::Entry;
use tranche_shim_core::image::{self, ELF_HEADER, Needs, START};
use tranche_shim_runtime::sys::{self, File};

use crate::abi::CUresult;
use crate::charge::{self, EVERY_DEVICE, note, return_charge};
use crate::device::Device;
use crate::driver::Call;
use crate::driver_pools::State;
use crate::keys::{Kind, key};
use crate::pool_allocator::PoolAllocator;
use crate::process::{self, Process};

/// Loads an image from the program's memory into the current context, or into all contexts (a library).
pub fn load(module: *mut usize, image: *const u8, within: Within, driver: Call<'_>) -> CUresult {
    if module.is_null() || image.is_null() {
        return driver.make();
    }
    // SAFETY: not null, and an image that the driver reads next.
    charge(module, unsafe { needs_of(image) }, within, driver)
}

/// The same with an image in a file.
pub fn load_file(
    module: *mut usize,
    path: *const c_char,
    within: Within,
    driver: Call<'_>,
) -> CUresult {
    if module.is_null() || path.is_null() {
        return driver.make();
    }
    // SAFETY: not null, and a C string, which the driver reads next.
    let needs = needs_of_file(unsafe { CStr::from_ptr(path) }).unwrap_or_default();
    charge(module, needs, within, driver)
}

/// What a handle belongs to.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Within {
    /// A module ends with its context.
    Context,
    /// A library belongs to no context.
    Process,
}

fn charge(module: *mut usize, needs: Needs, within: Within, driver: Call<'_>) -> CUresult {
    let process = match process::current() {
        Ok(process) => process,
        Err(code) => return code,
    };
    if needs == Needs::default() {
        return driver.make();
    }
    let (device, context) = match within {
        Within::Process => (EVERY_DEVICE, 0),
        Within::Context => match process.current_device() {
            Ok(device) => (device.number, process.contexts.current()),
            // There is no context: the driver returns the error.
            Err(CUresult::INVALID_CONTEXT) => return driver.make(),
            Err(code) => return code,
        },
    };
    let charges = [
        (State::Modules, Kind::Module, needs.data),
        (State::Code, Kind::Code, needs.code),
    ];
    let [of_data, of_code] = charges.map(|(state, _, bytes)| Floor {
        state,
        entry: device,
        bytes,
    });
    let with_code = || raise(process, of_code, 0, driver);
    let result = raise(process, of_data, 0, Call::of(&with_code));
    if result.is_ok() {
        // SAFETY: not null, and the driver has just written to it.
        let module = unsafe { module.read() };
        for (_, kind, bytes) in charges.into_iter().filter(|(_, _, bytes)| *bytes > 0) {
            let entry = Entry {
                bytes,
                device,
                context,
            };
            note(process, key(kind, module as u64), entry);
        }
    }
    result
}

/// What a module needs on each of some devices.
#[derive(Clone, Copy)]
struct Floor {
    state: State,
    /// A device's number, or [`EVERY_DEVICE`].
    entry: u8,
    bytes: u64,
}

impl Floor {
    /// Whether this is for a device, and the device has a cap.
    fn is_of(&self, device: &Device) -> bool {
        device.is_capped() && (self.entry == EVERY_DEVICE || self.entry == device.number)
    }
}

/// Charges the devices from number `from` on, and then loads the module.
fn raise(process: &'static Process, floor: Floor, from: u8, driver: Call<'_>) -> CUresult {
    let mut charged = process
        .devices()
        .filter(|device| floor.bytes > 0 && device.number >= from && floor.is_of(device));
    let Some(device) = charged.next() else {
        return driver.make();
    };
    let rest = || raise(process, floor, device.number + 1, driver);
    match PoolAllocator::of_device(floor.state, process, device) {
        Ok(allocator) => allocator.raise_floor(floor.bytes, Call::of(&rest)),
        Err(code) => code,
    }
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

/// # Safety
///
/// An image for the driver.
unsafe fn needs_of(image: *const u8) -> Needs {
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
    let start = unsafe { image.cast::<[u8; START]>().read() };
    match image::kind(&start) {
        // SAFETY: an ELF file is whole, its section table included.
        image::Kind::Elf => unsafe {
            let header = core::slice::from_raw_parts(image, ELF_HEADER);
            let (at, length) = image::section_table(header);
            image::of_sections(core::slice::from_raw_parts(image.add(at), length))
        },
        // SAFETY: a fat binary is as long as it says.
        image::Kind::Fat(length) => unsafe {
            image::of_fat_binary(core::slice::from_raw_parts(image, length))
        },
        // SAFETY: a wrapper holds the address of a fat binary.
        image::Kind::Wrapper(at) if at != 0 => unsafe {
            let inner = at as *const u8;
            match image::kind(&inner.cast::<[u8; START]>().read()) {
                image::Kind::Fat(length) => {
                    image::of_fat_binary(core::slice::from_raw_parts(inner, length))
                }
                _ => Needs::default(),
            }
        },
        image::Kind::Wrapper(_) | image::Kind::Text => Needs::default(),
    }
}

/// `None` for a file that cannot be read: the driver returns the error.
fn needs_of_file(path: &CStr) -> Option<Needs> {
    let file = File::open_anywhere(path).ok()?;
    let length = file.size().ok()?;
    let mapping = file.map_readable(length).ok()?;
    // SAFETY: a mapping of so many bytes.
    let bytes: &[u8] =
        unsafe { core::slice::from_raw_parts(mapping.start.as_ptr().cast(), length) };
    let needs = image::of_file(bytes);
    // SAFETY: this function's own, and `needs` is not borrowed from it.
    unsafe { sys::unmap(mapping) };
    Some(needs)
}
