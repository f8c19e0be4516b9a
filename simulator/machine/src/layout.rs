//! The shared page: fields that the daemon writes once, and words that processes change.
//!
//! It has plain words and fixed arrays only, so that it is the same in every process. Fields that are not atomic are
//! written before any process gets the page, and never after.

use std::sync::atomic::{AtomicI32, AtomicU32, AtomicU64, Ordering};

use crate::description::{
    Description, GpuDescription, Habits, MAX_GPUS, MIB, PciAddress, Virtualization,
};
use crate::identity::{gpu_uuid, start_time};
use crate::mig::capability::GPU_INSTANCES;
use crate::mig::words::GpuInstance;
use crate::turns::{Lane, MAX_PROCESSES, Turns};

/// The pid in the slot of a process that has ended while another process has its files open.
pub const ORPHANED: i32 = -2;
/// The first word of the page.
pub const MAGIC: u64 = u64::from_le_bytes(*b"TRSIMPG\0");
/// The version of this module and of [`crate::wire`].
pub const ABI: u32 = 12;

/// A text of fixed size, padded with zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct Text<const N: usize>([u8; N]);

impl<const N: usize> Text<N> {
    /// `text`, cut so that a final zero fits.
    #[must_use]
    pub fn new(text: &str) -> Self {
        let mut bytes = [0; N];
        let mut length = text.len().min(N - 1);
        while !text.is_char_boundary(length) {
            length -= 1;
        }
        bytes[..length].copy_from_slice(&text.as_bytes()[..length]);
        Self(bytes)
    }

    /// The text without its padding.
    #[must_use]
    pub fn as_str(&self) -> &str {
        let end = self.0.iter().position(|b| *b == 0).unwrap_or(N);
        std::str::from_utf8(&self.0[..end]).unwrap_or("")
    }
}

/// The page's own fields, and those of the driver.
#[derive(Debug)]
#[repr(C)]
pub struct Header {
    pub magic: u64,
    pub abi: u32,
    /// The number of [`Shared::gpus`] that exist.
    pub gpu_count: u32,
    pub driver_version: Text<32>,
    /// The driver's CUDA version, 1000 × major + 10 × minor.
    pub cuda_version: u32,
    /// A hash of the machine file and the node that the page was made from.
    pub fingerprint: u64,
    /// The number of daemons that have served this page.
    pub generation: AtomicU32,
    /// The number of MIG instances that were ever created.
    pub instances: AtomicU64,
    /// The number of the next event; all before it are written.
    pub events_end: AtomicU64,
    /// The daemon's PID namespace, by inode.
    pub namespace: AtomicU64,
    /// Bits of [`Habit`].
    pub habits: u32,
    /// Time that a launch takes of the calling thread, in nanoseconds.
    pub launch_nanos: u32,
    /// Time for which a GPU is idle when it switches to another process, in nanoseconds.
    pub switch_nanos: u64,
}

/// A habit of real drivers that is on or off: the switches of [`Habits`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Habit {
    /// [`Habits::frees_wait`]
    FreesWait = 1,
    /// [`Habits::lazy_loading`]
    LazyLoading = 2,
    /// [`Habits::graph_memory_stays`]
    GraphMemoryStays = 4,
    /// [`Habits::managed_memory_occupies`]
    ManagedMemoryOccupies = 8,
    /// [`Habits::mixed_blocks`]
    MixedBlocks = 16,
    /// [`Habits::whole_maps`]
    WholeMaps = 32,
}

impl Header {
    /// Whether the machine file has this habit on.
    #[must_use]
    pub fn has(&self, habit: Habit) -> bool {
        self.habits & habit as u32 != 0
    }

    fn describe(&mut self, habits: &Habits) {
        let switches = [
            (Habit::FreesWait, habits.frees_wait),
            (Habit::LazyLoading, habits.lazy_loading),
            (Habit::GraphMemoryStays, habits.graph_memory_stays),
            (Habit::ManagedMemoryOccupies, habits.managed_memory_occupies),
            (Habit::MixedBlocks, habits.mixed_blocks),
            (Habit::WholeMaps, habits.whole_maps),
        ];
        let on = switches.iter().filter(|(_, is_on)| *is_on);
        self.habits = on.fold(0, |bits, (habit, _)| bits | *habit as u32);
        self.launch_nanos = habits.launch_nanos;
        self.switch_nanos = u64::from(habits.switch_micros) * 1000;
    }
}

/// A counter of NVLinks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NvLinkCounter {
    /// KiB of data that the GPU sent.
    Sent = 0,
    /// KiB of data that the GPU received.
    Received = 1,
    /// CRC errors of flow control digits.
    FlitErrors = 2,
    /// CRC errors of data.
    DataErrors = 3,
    /// Packets that were sent again.
    Replays = 4,
    /// Recoveries of a link.
    Recoveries = 5,
}

impl NvLinkCounter {
    /// All of them, by their numbers.
    pub const ALL: [Self; 6] = [
        Self::Sent,
        Self::Received,
        Self::FlitErrors,
        Self::DataErrors,
        Self::Replays,
        Self::Recoveries,
    ];
}

#[derive(Debug)]
#[repr(C, align(128))]
pub struct GpuState {
    /// Product name.
    pub name: Text<64>,
    pub uuid: [u8; 16],
    /// Board serial number.
    pub serial: Text<32>,
    /// Minor number of the device node.
    pub minor: u32,
    /// `NVML_DEVICE_ARCH_*`.
    pub architecture: u32,
    pub compute_capability: [u32; 2],
    /// `nvmlBrandType_t`.
    pub brand: u32,
    /// PCI address.
    pub pci_domain: u32,
    pub pci_bus: u32,
    pub pci_device: u32,
    /// PCI device id (upper half) and vendor id (lower half).
    pub pci_device_id: u32,
    pub pci_subsystem_id: u32,
    /// PCI express generation and lanes.
    pub pcie: [u32; 2],
    pub numa_node: i32,
    /// [`crate::mig::ModelName`]; 0 if the GPU has no MIG modes.
    pub mig_model: u32,
    /// 1 if a change of the MIG mode needs a reset.
    pub mig_needs_reset: u32,
    /// `nvmlGpuVirtualizationMode_t`.
    pub virtualization: u32,
    /// 1 if `dma-buf`s can be made of its memory.
    pub dma_buf: u32,
    /// 1 if it can be in a multicast object's team.
    pub multicast: u32,
    /// NVLinks of the board.
    pub nvlinks: u32,
    /// Total memory in bytes, with the driver's reserve.
    pub memory_total: u64,
    /// The driver's reserve in bytes.
    pub memory_reserved: u64,
    /// Memory of one context in bytes.
    pub context_bytes: u64,
    /// BAR1 aperture in bytes.
    pub bar1_bytes: u64,
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Resident threads of one multiprocessor.
    pub threads_per_multiprocessor: u32,
    /// Shared memory of one multiprocessor in bytes.
    pub shared_memory_bytes: u32,
    /// Level-2 cache in bytes.
    pub l2_cache_bytes: u32,
    /// Memory bus width in bits.
    pub memory_bus_bits: u32,
    /// Highest SM clock in MHz.
    pub sm_clock_mhz: u32,
    /// Memory clock in MHz.
    pub memory_clock_mhz: u32,
    /// Highest board power in milliwatts.
    pub power_limit_milliwatts: u32,
    /// Idle board power in milliwatts.
    pub idle_milliwatts: u32,
    /// Virtual time of a kernel whose name contains no time, in nanoseconds.
    pub kernel_nanos: u64,

    /// The holder of the lock on the fields that change: 0 for none, a slot's index + 1, or the daemon.
    pub lock: AtomicU32,
    /// 1 when persistence mode is on.
    pub persistence: AtomicU32,
    /// `nvmlComputeMode_t`.
    pub compute_mode: AtomicU32,
    /// The length of time slices, see [`crate::wire::Setting::TimeSlice`].
    pub time_slice: AtomicU32,
    /// 1 when the GPU has fallen off the bus.
    pub lost: AtomicU32,
    /// `nvmlDeviceGpuRecoveryAction_t`.
    pub recovery_action: AtomicU32,
    /// 1 while a row of the memory waits for a reset to be remapped.
    pub remap_pending: AtomicU32,
    /// 1 when a row of the memory could not be remapped.
    pub remap_failed: AtomicU32,
    /// 1 while the GPU has another kernel driver, or none.
    pub unbound: AtomicU32,
    /// 1 when MIG mode is on.
    pub mig_mode: AtomicU32,
    /// The value that [`Self::mig_mode`] will have when no process uses the GPU.
    pub mig_pending: AtomicU32,
    /// Percent of the last second in which a kernel ran, as sampled by the daemon.
    pub utilization: AtomicU32,
    /// NVML's counters for all NVLinks together, by [`NvLinkCounter`].
    pub nvlink: [AtomicU64; NvLinkCounter::ALL.len()],
    /// Bytes that processes hold.
    pub used: AtomicU64,
    /// The highest value that [`Self::used`] has had.
    pub peak: AtomicU64,
    /// How often memory was charged.
    pub charges: AtomicU64,
    /// The order in which processes outside of partitions run.
    pub turns: Turns,
    /// MIG's GPU instances, by id.
    pub instances: [GpuInstance; GPU_INSTANCES],
}

/// One process that has initialised CUDA.
#[derive(Debug)]
#[repr(C, align(128))]
pub struct ProcessSlot {
    /// Its pid in the daemon's PID namespace, which is the host's; 0 for a free slot, -1 for a process outside that
    /// namespace, or [`ORPHANED`].
    pub pid: AtomicI32,
    /// When it started, in clock ticks since boot: a reused pid has another time.
    pub started: AtomicU64,
    /// Its own PID namespace, by inode; 0 if that is unknown.
    pub namespace: AtomicU64,
    /// Its pid in that namespace.
    pub inner_pid: AtomicI32,
    /// The MIG partition that it uses, see [`ProcessSlot::partition`]; 0 for none.
    pub partition: AtomicU32,
    /// The error that each of its calls returns after a kernel's fault; 0 for none.
    pub fault: AtomicU32,
    /// The identity of its MPS daemon; 0 if it is not a client of one.
    pub mps_daemon: AtomicU64,
    /// Bytes that it holds on each GPU, with its context.
    pub used: [AtomicU64; MAX_GPUS],
    /// The part of those bytes that is managed memory. NVML counts it for the GPU and for no process.
    pub managed: [AtomicU64; MAX_GPUS],
    /// Percent of the last sampling period that its kernels ran on each GPU.
    pub utilization: [AtomicU32; MAX_GPUS],
    /// When [`Self::utilization`] was taken, microseconds since 1970.
    pub sampled: AtomicU64,
}

impl ProcessSlot {
    /// Whether its process still runs. For a caller in the daemon's PID namespace.
    #[must_use]
    pub fn is_alive(&self) -> bool {
        let pid = self.pid.load(Ordering::Acquire);
        match pid {
            0 | ORPHANED => false,
            // Outside the PID namespace: only its connection shows its end.
            ..0 => true,
            _ => start_time(pid) == Some(self.started.load(Ordering::Relaxed)),
        }
    }
}

/// The number of events that are kept for NVML's event sets.
pub const EVENT_RING: usize = 64;

/// One event: a GPU, its NVML type and its data (the Xid).
#[derive(Debug)]
#[repr(C)]
pub struct Event {
    /// Index of the GPU.
    pub gpu: AtomicU64,
    /// `nvmlEventType*` bit.
    pub kind: AtomicU64,
    /// The Xid number for `nvmlEventTypeXidCriticalError`.
    pub data: AtomicU64,
}

#[derive(Debug)]
#[repr(C)]
pub struct Shared {
    /// Identity.
    pub header: Header,
    /// GPUs; the first `header.gpu_count` exist.
    pub gpus: [GpuState; MAX_GPUS],
    /// The last [`EVENT_RING`] events.
    pub events: [Event; EVENT_RING],
    pub slots: [ProcessSlot; MAX_PROCESSES],
    /// The kernels of each process on each GPU. Most lanes are never written, and take no memory.
    pub lanes: [[Lane; MAX_GPUS]; MAX_PROCESSES],
}

/// Length of the page's file in bytes.
pub const PAGE_BYTES: usize = size_of::<Shared>();

impl Shared {
    /// The GPUs that exist.
    #[must_use]
    pub fn gpus(&self) -> &[GpuState] {
        &self.gpus[..(self.header.gpu_count as usize).min(MAX_GPUS)]
    }

    /// Whether the page is of this build's version.
    #[must_use]
    pub fn is_ours(&self) -> bool {
        self.header.magic == MAGIC && self.header.abi == ABI
    }

    /// Publishes an event to every waiting event set. One writer: the daemon.
    pub fn publish_event(&self, gpu: usize, kind: u64, data: u64) {
        let end = self.header.events_end.load(Ordering::Relaxed);
        let event = &self.events[usize::try_from(end).unwrap_or(0) % EVENT_RING];
        event.gpu.store(gpu as u64, Ordering::Relaxed);
        event.kind.store(kind, Ordering::Relaxed);
        event.data.store(data, Ordering::Relaxed);
        self.header.events_end.store(end + 1, Ordering::Release);
    }

    /// Fills a zeroed page from `description` for the node `identity`.
    pub fn describe(&mut self, description: &Description, identity: &[u8]) {
        self.header.abi = ABI;
        self.header.driver_version = Text::new(&description.driver_version);
        self.header.cuda_version = description.cuda_version;
        self.header.describe(&description.habits);
        let units = description
            .gpus
            .iter()
            .flat_map(|gpu| (0..gpu.count as usize).map(move |unit| (gpu, unit)));
        let mut count = 0;
        for ((gpu, unit), (index, state)) in units.zip((0u32..).zip(&mut self.gpus)) {
            let minor = description.minors.get(index as usize).copied();
            state.describe(gpu, unit, index, identity);
            state.minor = minor.unwrap_or(index);
            count = index + 1;
        }
        self.header.gpu_count = count;
        // Written last, because it marks the page as complete.
        self.header.magic = MAGIC;
    }
}

impl GpuState {
    fn describe(&mut self, gpu: &GpuDescription, unit: usize, index: u32, identity: &[u8]) {
        let pci = gpu
            .pci_bus_ids
            .get(unit)
            .and_then(|id| PciAddress::parse(id))
            .unwrap_or_else(|| PciAddress::spread(index));
        self.name = Text::new(&gpu.name);
        self.uuid = gpu_uuid(identity, index);
        // Real serial numbers have digits only.
        let number = u32::from_be_bytes([self.uuid[0], self.uuid[1], self.uuid[2], self.uuid[3]]);
        self.serial = Text::new(&format!("SIM{number:010}"));
        self.architecture = gpu.architecture as u32;
        self.compute_capability = gpu.compute_capability;
        self.brand = gpu.brand;
        self.pci_domain = pci.domain;
        self.pci_bus = pci.bus;
        self.pci_device = pci.device;
        self.pci_device_id = gpu.pci_device_id;
        self.pci_subsystem_id = gpu.pci_subsystem_id;
        self.pcie = gpu.pcie;
        self.numa_node = gpu.numa_nodes.get(unit).copied().unwrap_or(0);
        let is_vgpu = gpu.virtualization == Virtualization::Vgpu;
        let mig = gpu.mig.filter(|_| !is_vgpu);
        self.mig_model = mig.map_or(0, |name| name as u32);
        self.virtualization = gpu.virtualization as u32;
        self.mig_needs_reset = u32::from(gpu.mig_needs_reset);
        self.dma_buf = u32::from(gpu.dma_buf);
        self.multicast = u32::from(gpu.multicast);
        self.nvlinks = gpu.nvlinks;
        self.memory_total = gpu.memory_mib * MIB;
        self.memory_reserved = gpu.reserved_mib * MIB;
        self.context_bytes = gpu.context_mib * MIB;
        self.bar1_bytes = gpu.bar1_mib * MIB;
        self.multiprocessors = gpu.multiprocessors;
        self.threads_per_multiprocessor = gpu.threads_per_multiprocessor;
        self.shared_memory_bytes = gpu.shared_memory_kib << 10;
        self.l2_cache_bytes = gpu.l2_cache_kib << 10;
        self.memory_bus_bits = gpu.memory_bus_bits;
        self.sm_clock_mhz = gpu.sm_clock_mhz;
        self.memory_clock_mhz = gpu.memory_clock_mhz;
        self.power_limit_milliwatts = gpu.power_limit_watts * 1000;
        self.idle_milliwatts = gpu.idle_watts * 1000;
        self.kernel_nanos = u64::from(gpu.kernel_micros) * 1000;
        // The daemon takes the place of nvidia-persistenced, which turns the mode on.
        self.persistence = AtomicU32::new(1);
    }

    /// Whether the kernel driver reports recovery actions, as drivers since 565 do.
    #[must_use]
    pub fn reports_recovery(driver_version: &str) -> bool {
        let major = driver_version.split('.').next().unwrap_or_default();
        major.parse::<u32>().is_ok_and(|major| major >= 565)
    }

    /// The value of a counter for all NVLinks; `None` for a board without NVLink.
    #[must_use]
    pub fn nvlink(&self, counter: NvLinkCounter) -> Option<u64> {
        let count = self.nvlink[counter as usize].load(Ordering::Relaxed);
        (self.nvlinks > 0).then_some(count)
    }

    /// Whether NVIDIA's kernel driver has the GPU.
    #[must_use]
    pub fn is_bound(&self) -> bool {
        self.unbound.load(Ordering::Relaxed) == 0
    }

    /// Whether the GPU has fallen off the bus.
    #[must_use]
    pub fn is_lost(&self) -> bool {
        self.lost.load(Ordering::Relaxed) != 0
    }

    /// Whether MIG mode is on.
    #[must_use]
    pub fn is_partitioned(&self) -> bool {
        self.mig_mode.load(Ordering::Relaxed) != 0
    }

    /// Bytes that processes together can have: CUDA's total.
    #[must_use]
    pub fn usable(&self) -> u64 {
        self.memory_total - self.memory_reserved
    }

    /// Free bytes.
    #[must_use]
    pub fn free(&self) -> u64 {
        self.usable()
            .saturating_sub(self.used.load(Ordering::Relaxed))
    }
}

/// A new page, mapped for the rest of the process.
#[cfg(test)]
pub(crate) fn test_page(machine: &str) -> &'static Shared {
    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous};
    let access = ProtFlags::READ | ProtFlags::WRITE;
    let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
    // SAFETY: a new mapping at the kernel's choice, page-aligned, large enough and never unmapped.
    // Every field of Shared is an integer, an atomic integer or an array of them, for which all bytes
    // zero is a value. The reference is the only one until it is returned.
    let page = unsafe {
        &mut *mmap_anonymous(std::ptr::null_mut(), PAGE_BYTES, access, flags)
            .unwrap()
            .cast::<Shared>()
    };
    page.describe(&Description::parse(machine, "test").unwrap(), b"node");
    page
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_has_the_gpus_of_the_file() {
        let text = include_str!("../../machines/H100-80.toml").replace("count = 1", "count = 2");
        let page = test_page(&text);
        assert!(page.is_ours());
        assert_eq!(page.gpus().len(), 2);
        let [first, second] = page.gpus() else {
            unreachable!()
        };
        assert_eq!(first.memory_total, 81559 * MIB);
        assert_eq!(first.usable() + first.memory_reserved, first.memory_total);
        assert_ne!(first.uuid, second.uuid);
        assert_ne!(first.pci_bus, second.pci_bus);
        assert_eq!((first.minor, second.minor), (0, 1));
    }

    #[test]
    fn the_page_has_the_habits_of_the_file() {
        let text = include_str!("../../machines/T4.toml");
        let simple = test_page(text);
        let file = format!(
            "{text}[habits]\nlazy_loading = true\nmixed_blocks = true\nswitch_micros = 7\n"
        );
        let habits = test_page(&file);
        for (habit, is_on) in [
            (Habit::FreesWait, false),
            (Habit::LazyLoading, true),
            (Habit::GraphMemoryStays, false),
            (Habit::ManagedMemoryOccupies, false),
            (Habit::MixedBlocks, true),
            (Habit::WholeMaps, false),
        ] {
            assert_eq!(habits.header.has(habit), is_on, "{habit:?}");
            assert!(!simple.header.has(habit));
        }
        assert_eq!(
            (habits.header.switch_nanos, simple.header.switch_nanos),
            (7000, 0)
        );
    }

    #[test]
    fn another_probe_order_changes_minor_numbers_only() {
        let text = include_str!("../../machines/H100-80.toml").replace("count = 1", "count = 3");
        let usual = test_page(&text);
        let other = test_page(&format!("minors = [2, 0, 1]\n{text}"));
        let minors: Vec<_> = other.gpus().iter().map(|gpu| gpu.minor).collect();
        assert_eq!(minors, [2, 0, 1]);
        for (one, other) in usual.gpus().iter().zip(other.gpus()) {
            assert_eq!((one.uuid, one.pci_bus), (other.uuid, other.pci_bus));
        }
        for wrong in ["[0, 1]", "[0, 1, 1]", "[1, 2, 3]"] {
            let error = Description::parse(&format!("minors = {wrong}\n{text}"), "test")
                .unwrap_err()
                .to_string();
            assert!(error.contains("must be the numbers 0 to 2"), "{error}");
        }
    }

    #[test]
    fn texts_are_cut_before_their_final_zero() {
        assert_eq!(Text::<4>::new("abcdef").as_str(), "abc");
        assert_eq!(Text::<4>::new("aé€").as_str(), "aé");
        assert_eq!(Text::<4>::new("").as_str(), "");
    }
}
