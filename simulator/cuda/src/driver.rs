//! `cuInit`: the machine, the GPUs that this process can see, and forks.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use tranche_simulator_machine::attach::request;
use tranche_simulator_machine::identity::uuid_text;
use tranche_simulator_machine::layout::{Habit, Shared};
use tranche_simulator_machine::timeline::now;
use tranche_simulator_machine::wire::Request;
use tranche_simulator_machine::{Access, AttachError, Attachment, DriverRoot};

use crate::code::Code;
use crate::device::Device;
use crate::export::{export, get, put};
use crate::heap::Blocks;

/// The initialised driver of this process.
#[derive(Debug)]
pub struct Driver {
    pub shared: &'static Shared,
    /// This process's slot in the page.
    pub slot: usize,
    /// The GPUs this process can see, by ordinal.
    pub devices: Vec<Device>,
    root: DriverRoot,
    // Its hang-up tells the daemon that this process is gone.
    _attachment: Attachment,
}

static DRIVER: OnceLock<Driver> = OnceLock::new();
/// Set in the child of a fork: CUDA is of no use there, as with the real driver.
static FORKED: AtomicBool = AtomicBool::new(false);

/// The driver, if this process has initialised it.
pub fn driver() -> Result<&'static Driver, Code> {
    match DRIVER.get() {
        Some(driver) if !FORKED.load(Ordering::Relaxed) => Ok(driver),
        _ => Err(Code::NOT_INITIALIZED),
    }
}

/// The GPU with this ordinal.
pub fn device(ordinal: i32) -> Result<&'static Device, Code> {
    let devices = &driver()?.devices;
    let device = usize::try_from(ordinal).ok().and_then(|o| devices.get(o));
    let device = device.ok_or(Code::INVALID_DEVICE)?;
    device.reach()?;
    Ok(device)
}

/// Whether the machine's driver does this as a real one.
pub fn has(habit: Habit) -> bool {
    driver().is_ok_and(|driver| driver.shared.header.has(habit))
}

/// Waits until this process has run as far as `mark` on a GPU. A machine that is gone waits for nobody.
pub fn wait(gpu: usize, mark: u64) {
    if let Ok(driver) = driver() {
        let _ = driver.shared.wait(driver.slot, gpu, mark);
    }
}

/// Whether this process has run as far as `mark` on a GPU.
pub fn reached(gpu: usize, mark: u64) -> bool {
    driver().map_or(true, |driver| {
        driver
            .shared
            .reached(driver.slot, gpu, mark, now())
            .unwrap_or(true)
    })
}

extern "C" fn after_fork() {
    FORKED.store(true, Ordering::Relaxed);
}

fn initialise() -> Result<(), Code> {
    static ONE: Mutex<()> = Mutex::new(());
    if FORKED.load(Ordering::Relaxed) {
        return Err(Code::NOT_INITIALIZED);
    }
    if DRIVER.get().is_some() {
        return Ok(());
    }
    let _one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
    if DRIVER.get().is_some() {
        return Ok(());
    }
    let opened = Driver::open()?;
    // SAFETY: the handler only stores to an atomic.
    unsafe { libc::pthread_atfork(None, None, Some(after_fork)) };
    let _ = DRIVER.set(opened);
    Ok(())
}

impl Driver {
    fn open() -> Result<Self, Code> {
        let root = DriverRoot::of_library(&FORKED);
        if !root.has_node("nvidiactl") {
            return Err(Code::NO_DEVICE);
        }
        let attachment = Attachment::new(&root, Access::Join).map_err(|error| match error {
            AttachError::Mismatch => Code::SYSTEM_DRIVER_MISMATCH,
            AttachError::Refused(_) => Code::OUT_OF_MEMORY,
            _ => Code::NO_DEVICE,
        })?;
        let shared = attachment.shared();
        let visible: Vec<usize> = (0..shared.gpus().len())
            .filter(|gpu| {
                let gpu = &shared.gpus[*gpu];
                // CUDA sees the partitions of a GPU in MIG mode, and this one has none.
                let is_there = !gpu.is_lost() && !gpu.is_partitioned();
                is_there && root.has_node(&format!("nvidia{}", gpu.minor))
            })
            .collect();
        let chosen = match std::env::var("CUDA_VISIBLE_DEVICES") {
            Ok(list) => choose(&list, &visible, |gpu| uuid_text(&shared.gpus[gpu].uuid)),
            Err(_) => visible,
        };
        if chosen.is_empty() {
            return Err(Code::NO_DEVICE);
        }
        // Without the memory module's node a context cannot be made; the real
        // driver finds out here.
        if !root.has_node("nvidia-uvm") {
            return Err(Code::UNKNOWN);
        }
        let blocks = Blocks::of(&shared.header);
        let devices = chosen
            .into_iter()
            .zip(0..)
            .map(|(gpu, ordinal)| Device::new(ordinal, gpu, &shared.gpus[gpu], blocks))
            .collect();
        Ok(Self {
            shared,
            slot: attachment.slot(),
            devices,
            root,
            _attachment: attachment,
        })
    }

    /// Has the daemon take back what the dead held.
    pub fn settle(&self) {
        // The only failure is that there is no daemon; then it stays taken.
        let _ = request(&self.root, Request::Settle);
    }
}

/// What `CUDA_VISIBLE_DEVICES` leaves of `visible`: indices or UUIDs, whole or
/// their beginnings, up to the first that is neither.
fn choose(list: &str, visible: &[usize], uuid: impl Fn(usize) -> String) -> Vec<usize> {
    let mut chosen = Vec::new();
    for entry in list.split(',').map(str::trim) {
        let gpu = if entry.starts_with("GPU-") {
            let mut matching = visible.iter().filter(|gpu| uuid(**gpu).starts_with(entry));
            match (matching.next(), matching.next()) {
                (Some(gpu), None) => Some(gpu),
                _ => None,
            }
        } else {
            entry
                .parse::<usize>()
                .ok()
                .and_then(|index| visible.get(index))
        };
        match gpu {
            Some(gpu) if !chosen.contains(gpu) => chosen.push(*gpu),
            // A GPU named twice leaves none, as in the real driver.
            Some(_) => return Vec::new(),
            None => break,
        }
    }
    chosen
}

/// CUDA's version word before cuInit, when the page's is not there yet. `install-root` writes the machine
/// file's into the library that it installs.
#[unsafe(no_mangle)]
pub static SIM_CUDA_VERSION: AtomicI32 = AtomicI32::new(12_020);

/// The CUDA version to say and to resolve symbols by.
pub fn cuda_version() -> i32 {
    DRIVER.get().map_or_else(
        || SIM_CUDA_VERSION.load(Ordering::Relaxed),
        |driver| driver.shared.header.cuda_version.cast_signed(),
    )
}

export! {
    fn cuInit(flags: u32) {
        if flags != 0 {
            return Err(Code::INVALID_VALUE);
        }
        initialise()
    }
    fn cuDriverGetVersion(version: *mut i32) { put(version, cuda_version()) }
    fn cuDeviceGetCount(count: *mut i32) {
        put(count, i32::try_from(driver()?.devices.len()).unwrap_or(0))
    }
    fn cuDeviceGet(to: *mut i32, ordinal: i32) {
        device(ordinal)?;
        put(to, ordinal)
    }
    fn cuGetExportTable(table: *mut *const c_void, id: *const [u8; 16]) {
        // NVIDIA's private interfaces; libcudart's check of them is not imitated.
        get(id)?;
        put(table, std::ptr::null())?;
        Err(Code::NOT_FOUND)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn visible_devices_are_chosen_as_the_driver_does() {
        let uuid = |gpu: usize| format!("GPU-{gpu}{gpu}abc");
        let choose = |list| choose(list, &[4, 5, 6], uuid);
        assert_eq!(choose("0,2"), [4, 6]);
        assert_eq!(choose("2,0,1"), [6, 4, 5]);
        assert_eq!(choose("1,9,0"), [5]);
        assert_eq!(choose("GPU-66, 0"), [6, 4]);
        assert_eq!(choose("GPU-"), [0usize; 0], "ambiguous");
        assert_eq!(choose("0,0"), [0usize; 0]);
        assert_eq!(choose(""), [0usize; 0]);
        assert_eq!(choose("NoDevFiles"), [0usize; 0]);
    }
}
