//! The private table of nvidia-smi.
//!
//! `nvmlInternalGetExportTable` returns a table of unnamed functions. Their meaning was found by watching which slots
//! nvidia-smi 535 calls in each of its views. It agrees with the records for 580 in NVIDIA's own mock (k8s-test-infra).
//! Slots that are not listed here return "not supported", as the table's functions do on GPUs without the feature.

use std::ffi::{c_char, c_void};
use std::sync::OnceLock;
use std::sync::atomic::Ordering;

use nvml_wrapper_sys::bindings::nvmlDevice_t;
use tranche_simulator_machine::wire::Setting;

use crate::code::Code;
use crate::export::{export, get, get_text, put};
use crate::identity::{by_pci, handle_by_index};
use crate::modes;
use crate::processes::processes;
use crate::state::{any_device, device, device_of_any};
use crate::system::process_name;

/// The 16 bytes of the table's name.
const TABLE: [u8; 16] = [
    0xc4, 0xfe, 0x3e, 0x6c, 0xc9, 0x8f, 0x6c, 0x4e, 0xa3, 0x27, 0xee, 0x69, 0x6e, 0x12, 0xf7, 0xc4,
];
/// The number of words in driver 535's table. The first word is the table's size in bytes.
const WORDS: usize = 245;

/// One process in the table's lists: NVML's entry, followed by the name.
#[repr(C)]
struct Entry {
    pid: u32,
    memory: u64,
    gpu_instance: u32,
    compute_instance: u32,
    protected_memory: u64,
    name: [c_char; 4096],
}

type Slot = unsafe extern "C" fn(*mut c_void, *mut c_void, *mut c_void, *mut c_void) -> u32;

unsafe extern "C" fn unsupported(
    _: *mut c_void,
    _: *mut c_void,
    _: *mut c_void,
    _: *mut c_void,
) -> u32 {
    Code::NOT_SUPPORTED.0
}

unsafe extern "C" fn device_by_index(
    index: *mut c_void,
    to: *mut c_void,
    _: *mut c_void,
    _: *mut c_void,
) -> u32 {
    let Ok(index) = u32::try_from(index as usize) else {
        return Code::INVALID_ARGUMENT.0;
    };
    handle_by_index(index, to.cast()).map_or_else(|code| code.0, |()| 0)
}

unsafe extern "C" fn compute_processes(
    of: *mut c_void,
    count: *mut c_void,
    to: *mut c_void,
    _: *mut c_void,
) -> u32 {
    // SAFETY: nvidia-smi passes a count and that many entries.
    unsafe { list(of.cast(), count.cast(), to.cast()) }.map_or_else(|code| code.0, |()| 0)
}

unsafe extern "C" fn no_processes(
    of: *mut c_void,
    count: *mut c_void,
    _: *mut c_void,
    _: *mut c_void,
) -> u32 {
    if let Err(code) = device_of_any(of.cast()) {
        return code.0;
    }
    // SAFETY: nvidia-smi passes a count.
    unsafe { put(count.cast::<u32>(), 0) }.map_or_else(|code| code.0, |()| 0)
}

unsafe extern "C" fn host_link_generation(
    of: *mut c_void,
    to: *mut c_void,
    _: *mut c_void,
    _: *mut c_void,
) -> u32 {
    let call = || {
        let generation = device(of.cast())?.state.pcie[0];
        // SAFETY: nvidia-smi passes the address of a number.
        unsafe { put(to.cast::<u32>(), generation) }
    };
    call().map_or_else(|code: Code| code.0, |()| 0)
}

/// The distance of two GPUs, by their bus ids, in this table's own scale.
unsafe extern "C" fn common_ancestor(
    first: *mut c_void,
    second: *mut c_void,
    to: *mut c_void,
    _: *mut c_void,
) -> u32 {
    /// The same NUMA node, and the same machine.
    const NODE: u32 = 3;
    const SYSTEM: u32 = 4;
    let call = || {
        // SAFETY: nvidia-smi passes two bus ids and the address of a number.
        unsafe {
            let first = device(by_pci(get_text(first.cast())?)?)?;
            let second = device(by_pci(get_text(second.cast())?)?)?;
            let near = first.state.numa_node == second.state.numa_node;
            put(to.cast::<u32>(), if near { NODE } else { SYSTEM })
        }
    };
    call().map_or_else(|code: Code| code.0, |()| 0)
}

/// Whether a GPU can be monitored. `dmon` and `pmon` call it first.
unsafe extern "C" fn monitoring(
    of: *mut c_void,
    _: *mut c_void,
    _: *mut c_void,
    _: *mut c_void,
) -> u32 {
    device(of.cast()).map_or_else(|code| code.0, |_| 0)
}

#[repr(C)]
#[derive(Clone, Copy)]
struct ComputePolicy {
    kind: u32,
    value: u32,
}

/// The kind of the length of time slices; nvidia-smi 535 knows no other.
const TIME_SLICE: u32 = 0;

unsafe extern "C" fn set_compute_policy(
    of: *mut c_void,
    policy: *mut c_void,
    _: *mut c_void,
    _: *mut c_void,
) -> u32 {
    let call = || {
        // SAFETY: nvidia-smi passes a policy.
        let ComputePolicy { kind, value } = unsafe { get(policy.cast()) }?;
        match kind {
            TIME_SLICE => modes::set(of.cast(), Setting::TimeSlice, value),
            _ => Err(Code::INVALID_ARGUMENT),
        }
    };
    call().map_or_else(|code: Code| code.0, |()| 0)
}

/// Writes the number of policies, followed by the policies. The caller has room for 31.
unsafe extern "C" fn compute_policies(
    of: *mut c_void,
    to: *mut c_void,
    _: *mut c_void,
    _: *mut c_void,
) -> u32 {
    let call = || {
        let policy = ComputePolicy {
            kind: TIME_SLICE,
            value: device(of.cast())?.state.time_slice.load(Ordering::Relaxed),
        };
        let count = to.cast::<u32>();
        // SAFETY: nvidia-smi passes the address of a number, followed by room for policies.
        unsafe {
            put(count, 1)?;
            put(count.wrapping_add(1).cast(), policy)
        }
    };
    call().map_or_else(|code: Code| code.0, |()| 0)
}

/// # Safety
/// `count` is null or valid, `to` is null or valid for `*count` entries.
unsafe fn list(of: nvmlDevice_t, count: *mut u32, to: *mut Entry) -> Result<(), Code> {
    let found = processes(any_device(of)?);
    // SAFETY: the caller's contract.
    let room = unsafe { get(count) }? as usize;
    // SAFETY: as above.
    unsafe { put(count, u32::try_from(found.len().min(room)).unwrap_or(0)) }?;
    for (index, process) in found.iter().take(room).enumerate() {
        // Without /proc in the namespace, the process has no name.
        let name = process_name(process.pid).unwrap_or_default();
        let entry = Entry {
            pid: process.pid,
            memory: process.memory,
            gpu_instance: process.instances[0],
            compute_instance: process.instances[1],
            protected_memory: 0,
            name: crate::export::characters(&name),
        };
        // SAFETY: `index` is below the room that the caller has.
        unsafe { put(to.wrapping_add(index), entry) }?;
    }
    Ok(())
}

fn table() -> &'static [usize; WORDS] {
    static BUILT: OnceLock<[usize; WORDS]> = OnceLock::new();
    BUILT.get_or_init(|| {
        let mut words = [unsupported as Slot as usize; WORDS];
        words[0] = size_of_val(&words);
        let known: [(usize, Slot); 9] = [
            (23, common_ancestor),
            (72, monitoring),
            (81, device_by_index),
            (192, set_compute_policy),
            (193, compute_policies),
            (213, compute_processes),
            (214, no_processes),
            (215, no_processes),
            (230, host_link_generation),
        ];
        for (slot, function) in known {
            words[slot] = function as usize;
        }
        words
    })
}

export! {
    fn nvmlInternalGetExportTable(to: *mut *const c_void, name: *const [u8; 16]) {
        if get(name)? != TABLE {
            return Err(Code::NOT_SUPPORTED);
        }
        put(to, std::ptr::from_ref(table()).cast())
    }
}
