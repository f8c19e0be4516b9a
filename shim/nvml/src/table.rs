//! The private table from which nvidia-smi gets its lists of processes.
//!
//! `nvmlInternalGetExportTable` returns a table of functions without names; its first word is its size in bytes.
//! Newer drivers only append to it: the lists' places and entries are the same in 535, in 550 and, by NVIDIA's own
//! mock of NVML (k8s-test-infra), in 580. A program gets a copy of the driver's table, with our lists at these places.
//! nvidia-smi needs the other functions: it gets the GPUs' handles from them.

use core::ffi::{c_char, c_uint, c_void};
use core::mem::ManuallyDrop;
use core::ptr;
use core::sync::atomic::{AtomicPtr, Ordering};

use crate::abi::{Device, ProcessDetail, Return};
use crate::buffer::Buffer;
use crate::driver::{index, typed};
use crate::processes::{self, Kind};
use crate::users::Process;

/// The name of a table.
pub type Name = [u8; 16];

/// The name of the table with the lists.
const LISTS: Name = [
    0xc4, 0xfe, 0x3e, 0x6c, 0xc9, 0x8f, 0x6c, 0x4e, 0xa3, 0x27, 0xee, 0x69, 0x6e, 0x12, 0xf7, 0xc4,
];
/// The places of the lists: of compute, graphics, and MPS.
const COMPUTE: usize = 213;
const GRAPHICS: usize = 214;
const MPS: usize = 215;
/// The most words of a table: driver 550's has 251.
const MOST: usize = 1 << 12;

/// The driver's table, and our copy of it, which stays to the process's end, because programs keep its address.
static REAL: AtomicPtr<usize> = AtomicPtr::new(ptr::null_mut());
static COPY: AtomicPtr<usize> = AtomicPtr::new(ptr::null_mut());

/// One entry of the table's lists.
#[repr(C)]
struct NamedProcess {
    process: ProcessDetail,
    name: [u8; 4096],
}

impl From<Process> for NamedProcess {
    fn from(process: Process) -> Self {
        let mut entry = Self {
            process: process.into(),
            name: [0; 4096],
        };
        let name = &mut entry.name;
        let real = typed::<unsafe extern "C" fn(c_uint, *mut c_char, c_uint) -> Return>(
            index::nvmlSystemGetProcessName,
        );
        // SAFETY: `name` has that many bytes.
        let result = unsafe { real(process.pid, name.as_mut_ptr().cast(), 4096) };
        if result != Return::SUCCESS {
            // nvidia-smi does not show a process without a name. This is its own text for it.
            const UNKNOWN: &[u8] = b"[Not Found]\0";
            name[..UNKNOWN.len()].copy_from_slice(UNKNOWN);
        }
        entry
    }
}

type List = unsafe extern "C" fn(Device, *mut c_uint, *mut NamedProcess) -> Return;

/// `nvmlInternalGetExportTable`.
///
/// # Safety
///
/// `to` and `name` are null or valid.
pub unsafe fn get(
    to: *mut *const c_void,
    name: *const Name,
    driver: impl FnOnce() -> Return,
) -> Return {
    let result = driver();
    // SAFETY: the caller's promise.
    let (to, name) = unsafe { (to.as_mut(), name.as_ref()) };
    if let (Return::SUCCESS, Some(to), Some(&LISTS)) = (result, to, name) {
        // SAFETY: the driver has just written its table's address.
        match unsafe { copy(to.cast_mut().cast()) } {
            Ok(copy) => *to = copy.cast(),
            Err(code) => {
                *to = ptr::null();
                return code;
            }
        }
    }
    result
}

/// A copy of the driver's table, with our lists.
///
/// # Safety
///
/// `real` is the driver's table.
unsafe fn copy(real: *mut usize) -> Result<*const usize, Return> {
    let known = COPY.load(Ordering::Acquire);
    if !known.is_null() {
        return Ok(known);
    }
    // SAFETY: the first word, which is the table's size; nobody writes to the table.
    let words = unsafe { real.read() } / size_of::<usize>();
    if !(MPS + 1..=MOST).contains(&words) {
        return Err(Return::NOT_SUPPORTED);
    }
    let mut buffer = Buffer::<usize>::new(words)?;
    // SAFETY: the table has that many words.
    let theirs = unsafe { core::slice::from_raw_parts(real, words) };
    let ours = buffer.first(words);
    ours.copy_from_slice(theirs);
    let lists: [(usize, List); 3] = [(COMPUTE, compute), (GRAPHICS, graphics), (MPS, mps)];
    for (place, list) in lists {
        ours[place] = list as usize;
    }
    REAL.store(real, Ordering::Release);
    let ours = buffer.room();
    match COPY.compare_exchange(ptr::null_mut(), ours, Ordering::AcqRel, Ordering::Acquire) {
        Ok(_) => {
            let _ = ManuallyDrop::new(buffer);
            Ok(ours)
        }
        // Another thread was first.
        Err(theirs) => Ok(theirs),
    }
}

unsafe extern "C" fn compute(device: Device, count: *mut c_uint, to: *mut NamedProcess) -> Return {
    // SAFETY: the caller owes what it owes the driver's function: a valid count and as many entries.
    unsafe { list(COMPUTE, Kind::Compute, device, (count, to)) }
}

unsafe extern "C" fn graphics(device: Device, count: *mut c_uint, to: *mut NamedProcess) -> Return {
    // SAFETY: as above.
    unsafe { list(GRAPHICS, Kind::Other, device, (count, to)) }
}

unsafe extern "C" fn mps(device: Device, count: *mut c_uint, to: *mut NamedProcess) -> Return {
    // SAFETY: as above.
    unsafe { list(MPS, Kind::Other, device, (count, to)) }
}

/// The list at a place of the table.
///
/// # Safety
///
/// As of `processes::list`.
unsafe fn list(
    place: usize,
    kind: Kind,
    device: Device,
    (count, to): (*mut c_uint, *mut NamedProcess),
) -> Return {
    let driver = || {
        let real = REAL.load(Ordering::Acquire);
        // SAFETY: our lists are called through a copy of this table only, which has the place; the type is that
        // of the driver's function there.
        unsafe {
            let list = core::mem::transmute::<usize, List>(real.add(place).read());
            list(device, count, to)
        }
    };
    // It is asked for its errors only, and public; what it would write has no room.
    let public = index::nvmlDeviceGetComputeRunningProcesses_v3;
    // SAFETY: the caller's promise.
    unsafe { processes::list(public, kind, device, (count, to), driver) }
}
