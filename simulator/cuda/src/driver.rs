//! The initialised driver: this process's part of the simulated machine, and the GPUs that it can see.

use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use tranche_simulator_machine::attach::request;
use tranche_simulator_machine::identity::uuid_text;
use tranche_simulator_machine::layout::{Habit, Shared};
use tranche_simulator_machine::timeline::now;
use tranche_simulator_machine::wire::Request;
use tranche_simulator_machine::{Access, AttachError, Attachment, DriverRoot, LibraryVersion};

use crate::code::Code;

/// The initialised driver of this process.
#[derive(Debug)]
pub struct Driver {
    pub shared: &'static Shared,
    /// This process's slot in the page.
    pub slot: usize,
    /// The GPUs that this process can see, by ordinal: their indices in the page.
    pub gpus: Vec<usize>,
    root: DriverRoot,
    // When it closes, the daemon knows that this process has ended.
    _attachment: Attachment,
}

static DRIVER: OnceLock<Driver> = OnceLock::new();
/// Set in the child of a fork, where CUDA does not work, as with the real driver.
static FORKED: AtomicBool = AtomicBool::new(false);

/// The driver, if this process has initialised it.
pub fn driver() -> Result<&'static Driver, Code> {
    match DRIVER.get() {
        Some(driver) if !FORKED.load(Ordering::Relaxed) => Ok(driver),
        _ => Err(Code::NOT_INITIALIZED),
    }
}

/// Whether the machine file has this habit of real drivers on.
pub fn has(habit: Habit) -> bool {
    driver().is_ok_and(|driver| driver.shared.header.has(habit))
}

/// Waits until this process's work on a GPU has reached `mark`. Returns at once without an initialised driver.
pub fn wait(gpu: usize, mark: u64) {
    if let Ok(driver) = driver() {
        let _ = driver.shared.wait(driver.slot, gpu, mark);
    }
}

/// Whether this process's work on a GPU has reached `mark`.
pub fn has_reached(gpu: usize, mark: u64) -> bool {
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

/// Initialises the driver for this process, once.
pub fn initialise() -> Result<(), Code> {
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
        // An older kernel driver is CUDA's forward compatibility.
        let kernel = shared.header.driver_version.as_str();
        if SIM_DRIVER_VERSION.compared_with(kernel).is_lt() {
            return Err(Code::SYSTEM_DRIVER_MISMATCH);
        }
        let visible: Vec<usize> = (0..shared.gpus().len())
            .filter(|gpu| {
                let gpu = &shared.gpus[*gpu];
                // Of a GPU in MIG mode CUDA sees the partitions, and simulated GPUs have none.
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
        // Without the node of nvidia-uvm no context can be created; the real driver fails here too.
        if !root.has_node("nvidia-uvm") {
            return Err(Code::UNKNOWN);
        }
        Ok(Self {
            shared,
            slot: attachment.slot(),
            gpus: chosen,
            root,
            _attachment: attachment,
        })
    }

    /// Has the daemon free the memory of processes that have ended.
    pub fn reclaim(&self) {
        // It fails only where no daemon runs; then the memory stays allocated.
        let _ = request(&self.root, Request::Reclaim);
    }
}

/// The GPUs of `visible` that `CUDA_VISIBLE_DEVICES` selects: by index, UUID or the beginning of a UUID, up to the
/// first entry that is none of these.
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
            // As in the real driver, a GPU that is named twice hides all GPUs.
            Some(_) => return Vec::new(),
            None => break,
        }
    }
    chosen
}

/// The CUDA version before cuInit, when this process has no page yet. `install-root` writes the machine file's version
/// into the library that it installs.
#[unsafe(no_mangle)]
pub static SIM_CUDA_VERSION: AtomicI32 = AtomicI32::new(12_020);

/// The driver's version, which `install-root` writes into the library that it installs. In `.data`, because the file has no
/// place for what is zero.
#[unsafe(no_mangle)]
#[unsafe(link_section = ".data")]
pub static SIM_DRIVER_VERSION: LibraryVersion = LibraryVersion::new();

/// The driver's CUDA version, 1000 × major + 10 × minor.
pub fn cuda_version() -> i32 {
    DRIVER.get().map_or_else(
        || SIM_CUDA_VERSION.load(Ordering::Relaxed),
        |driver| driver.shared.header.cuda_version.cast_signed(),
    )
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
