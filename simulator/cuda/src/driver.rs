//! The initialised driver: this process's part of the simulated machine, and the GPUs that it can see.

use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use tranche_simulator_machine::attach::request;
use tranche_simulator_machine::identity::{mig_uuid_text, uuid_text};
use tranche_simulator_machine::layout::{Habit, Shared};
use tranche_simulator_machine::mig::capability::Rights;
use tranche_simulator_machine::partitions::{ComputeInstanceView, Partition};
use tranche_simulator_machine::timeline::now;
use tranche_simulator_machine::wire::Request;
use tranche_simulator_machine::{Access, AttachError, Attachment, DriverRoot, LibraryVersion};

use crate::code::Code;
use crate::mps::Client;

/// The initialised driver of this process.
#[derive(Debug)]
pub struct Driver {
    pub shared: &'static Shared,
    /// This process's slot in the page.
    pub slot: usize,
    /// The GPUs that this process can see, by ordinal: their indices in the page.
    pub gpus: Vec<usize>,
    /// The MIG device that replaces the only entry of [`Self::gpus`].
    pub partition: Option<ComputeInstanceView>,
    /// The connection to an MPS control daemon, if one listens.
    pub mps: Option<Client>,
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

/// Whether the machine file switches this habit of real drivers on.
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
        let visible = visible(&root, shared);
        let chosen = match std::env::var("CUDA_VISIBLE_DEVICES") {
            Ok(list) => choose(&list, &visible, |it| it.names(shared)),
            Err(_) => enumerated(&visible),
        };
        let first = *chosen.first().ok_or(Code::NO_DEVICE)?;
        if let Some(it) = first.partition {
            let place = Partition {
                gpu: first.gpu,
                instance: it.gpu_instance.id as usize,
                compute: it.id as usize,
            };
            // It fails if the instance was destroyed meanwhile.
            let entered = shared.enter_partition(attachment.slot(), place, it.serial);
            entered.map_err(|_| Code::NO_DEVICE)?;
        }
        // Without the node of nvidia-uvm no context can be created; the real driver fails here too.
        if !root.has_node("nvidia-uvm") {
            return Err(Code::UNKNOWN);
        }
        let mps = Client::connect()?;
        if let Some(client) = &mps {
            shared.join_mps(attachment.slot(), client.daemon);
        }
        Ok(Self {
            shared,
            slot: attachment.slot(),
            gpus: chosen.iter().map(|it| it.gpu).collect(),
            partition: first.partition,
            mps,
            root,
            _attachment: attachment,
        })
    }

    /// Makes the daemon free the memory of processes that have ended.
    pub fn reclaim(&self) {
        // It fails only if no daemon runs; then the memory stays allocated.
        let _ = request(&self.root, Request::Reclaim);
    }
}

/// A device that this process may use: a GPU, or a MIG device of a GPU in MIG mode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Visible {
    /// The GPU's index in the page.
    gpu: usize,
    partition: Option<ComputeInstanceView>,
}

impl Visible {
    /// Its names in `CUDA_VISIBLE_DEVICES`. Drivers before 470 use the second name of a MIG device.
    fn names(&self, shared: &Shared) -> Vec<String> {
        let gpu = uuid_text(&shared.gpus[self.gpu].uuid);
        match self.partition {
            None => vec![gpu],
            Some(it) => vec![
                mig_uuid_text(&it.uuid),
                format!("MIG-{gpu}/{}/{}", it.gpu_instance.id, it.id),
            ],
        }
    }
}

/// The devices whose nodes this process can open: for a MIG device those of its GPU and of its two capabilities.
fn visible(root: &DriverRoot, shared: &Shared) -> Vec<Visible> {
    let rights = Rights::of_this_process(root);
    let mut all = Vec::new();
    for (gpu, state) in shared.gpus().iter().enumerate() {
        if state.is_lost() || !state.is_bound() || !root.has_node(&format!("nvidia{}", state.minor))
        {
            continue;
        }
        if !state.is_partitioned() {
            all.push(Visible {
                gpu,
                partition: None,
            });
            continue;
        }
        let devices = state.mig_devices().into_iter();
        let usable = devices.filter(|it| rights.can_use(state.minor, it.gpu_instance.id, it.id));
        all.extend(usable.map(|it| Visible {
            gpu,
            partition: Some(it),
        }));
    }
    all
}

/// What a process sees of `devices` by NVIDIA's MIG User Guide, "CUDA Device Enumeration": one MIG device at most, and no GPU
/// beside a MIG device.
fn enumerated(devices: &[Visible]) -> Vec<Visible> {
    match devices.iter().find(|it| it.partition.is_some()) {
        Some(first) => vec![*first],
        None => devices.to_vec(),
    }
}

/// The devices that `CUDA_VISIBLE_DEVICES` selects: by index, UUID or the beginning of a UUID, up to the first entry that is
/// none of these.
fn choose(
    list: &str,
    visible: &[Visible],
    names: impl Fn(&Visible) -> Vec<String>,
) -> Vec<Visible> {
    let mut chosen = Vec::new();
    let indexed = enumerated(visible);
    for entry in list.split(',').map(str::trim) {
        let device = if entry.starts_with("GPU-") || entry.starts_with("MIG-") {
            let is_it = |it: &&Visible| names(it).iter().any(|name| name.starts_with(entry));
            let mut matching = visible.iter().filter(is_it);
            match (matching.next(), matching.next()) {
                (Some(device), None) => Some(device),
                _ => None,
            }
        } else {
            entry
                .parse::<usize>()
                .ok()
                .and_then(|index| indexed.get(index))
        };
        match device {
            Some(device) if !chosen.contains(device) => chosen.push(*device),
            // As in the real driver, a device that is named twice hides all devices.
            Some(_) => return Vec::new(),
            None => break,
        }
    }
    enumerated(&chosen)
}

/// The CUDA version before cuInit, when this process has no page yet. `install-root` writes the machine file's version
/// into the library that it installs.
#[unsafe(no_mangle)]
pub static SIM_CUDA_VERSION: AtomicI32 = AtomicI32::new(12_020);

/// The driver's version, which `install-root` writes into the library that it installs. It is in `.data`, because a file
/// has no bytes for `.bss`.
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
    use tranche_simulator_machine::mig::{Model, ModelName};
    use tranche_simulator_machine::partitions::GpuInstanceView;

    use super::*;

    fn whole(gpu: usize) -> Visible {
        Visible {
            gpu,
            partition: None,
        }
    }

    fn mig(gpu: usize, id: u32) -> Visible {
        let model = Model::of(ModelName::H100);
        let profile = &model.profiles[0];
        let gpu_instance = GpuInstanceView {
            id,
            serial: u64::from(id),
            profile,
            start: 0,
            used: 0,
        };
        Visible {
            gpu,
            partition: Some(ComputeInstanceView {
                gpu_instance,
                id: 0,
                serial: u64::from(id),
                profile: model.compute_profiles(profile)[0],
                start: 0,
                uuid: [0; 16],
            }),
        }
    }

    fn names(of: &Visible) -> Vec<String> {
        match of.partition {
            None => vec![format!("GPU-{0}{0}abc", of.gpu)],
            Some(it) => vec![format!("MIG-{0}{0}abc", it.gpu_instance.id)],
        }
    }

    #[test]
    fn visible_devices_are_chosen_as_the_driver_does() {
        let choose = |list| -> Vec<usize> {
            let chosen = choose(list, &[whole(4), whole(5), whole(6)], names);
            chosen.iter().map(|it| it.gpu).collect()
        };
        assert_eq!(choose("0,2"), [4, 6]);
        assert_eq!(choose("2,0,1"), [6, 4, 5]);
        assert_eq!(choose("1,9,0"), [5]);
        assert_eq!(choose("GPU-66, 0"), [6, 4]);
        assert_eq!(choose("GPU-"), [0usize; 0], "ambiguous");
        assert_eq!(choose("0,0"), [0usize; 0]);
        assert_eq!(choose(""), [0usize; 0]);
        assert_eq!(choose("NoDevFiles"), [0usize; 0]);
    }

    #[test]
    fn a_process_sees_one_mig_device_at_most() {
        let all = [whole(0), mig(1, 7), mig(1, 8)];
        assert_eq!(enumerated(&all), [mig(1, 7)]);
        let choose = |list| choose(list, &all, names);
        assert_eq!(choose("0"), [mig(1, 7)]);
        assert_eq!(choose("0,1"), [mig(1, 7)]);
        assert_eq!(choose("MIG-88abc"), [mig(1, 8)]);
        assert_eq!(choose("MIG-88abc,MIG-77abc"), [mig(1, 8)]);
        assert_eq!(choose("GPU-00abc"), [whole(0)]);
        assert_eq!(choose("GPU-00abc,MIG-77abc"), [mig(1, 7)]);
        assert_eq!(choose("MIG-99"), []);
    }
}
