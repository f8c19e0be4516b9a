//! GPUs as CUDA shows them.

use std::sync::atomic::Ordering;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use tranche_simulator_machine::description::MIB;
use tranche_simulator_machine::layout::GpuState;
use tranche_simulator_machine::partitions::ComputeInstanceView;

use crate::code::Code;
use crate::driver::driver;
use crate::fault;
use crate::graph_pool::GraphPool;
use crate::heap::{Blocks, Heap};

/// One GPU of this process.
#[derive(Debug)]
pub struct Device {
    pub ordinal: i32,
    /// The GPU's index in the page.
    pub gpu: usize,
    pub state: &'static GpuState,
    /// The MIG device that this is; `None` for a whole GPU.
    pub partition: Option<ComputeInstanceView>,
    pub heap: Mutex<Heap>,
    graph_pool: Mutex<GraphPool>,
}

/// The GPUs of this process, by ordinal.
pub fn devices() -> Result<&'static [Device], Code> {
    static DEVICES: OnceLock<Vec<Device>> = OnceLock::new();
    let driver = driver()?;
    Ok(DEVICES.get_or_init(|| {
        let blocks = Blocks::of(&driver.shared.header);
        let gpus = driver.gpus.iter().zip(0..);
        gpus.map(|(gpu, ordinal)| Device {
            ordinal,
            gpu: *gpu,
            state: &driver.shared.gpus[*gpu],
            partition: driver.partition,
            heap: Mutex::new(Heap::new(blocks)),
            graph_pool: Mutex::default(),
        })
        .collect()
    }))
}

/// The GPU with this ordinal.
pub fn device(ordinal: i32) -> Result<&'static Device, Code> {
    let devices = devices()?;
    let device = usize::try_from(ordinal)
        .ok()
        .and_then(|at| devices.get(at))
        .ok_or(Code::INVALID_DEVICE)?;
    device.check_present()?;
    Ok(device)
}

impl Device {
    /// The name. The name of a MIG device ends with its profile.
    pub fn name(&self) -> String {
        let gpu = self.state.name.as_str();
        match &self.partition {
            None => gpu.to_owned(),
            Some(it) => format!("{gpu} MIG {}", it.profile.name(it.gpu_instance.profile)),
        }
    }

    /// Bytes that all processes together can have.
    pub fn total(&self) -> u64 {
        match &self.partition {
            None => self.state.usable(),
            Some(it) => it.gpu_instance.profile.memory_mib * MIB,
        }
    }

    /// Free bytes that this process may take, within its MPS limit.
    pub fn free(&self) -> u64 {
        let free = self.unused();
        self.mps_room().map_or(free, |room| room.min(free))
    }

    /// Bytes that the MPS limit leaves to this process; `None` without a limit.
    fn mps_room(&self) -> Option<u64> {
        let driver = driver().ok()?;
        let ordinal = usize::try_from(self.ordinal).ok()?;
        let limit = driver.mps.as_ref()?.memory_limit(ordinal)?;
        let used = driver.shared.slots[driver.slot].used[self.gpu].load(Ordering::Relaxed);
        Some(limit.saturating_sub(used))
    }

    /// Takes GPU memory by `take`, if an MPS limit leaves `bytes`.
    pub fn within_mps_limit<T>(
        &self,
        bytes: u64,
        take: impl FnOnce() -> Result<T, Code>,
    ) -> Result<T, Code> {
        let Some(client) = &driver()?.mps else {
            return take();
        };
        client.check()?;
        let _one = client
            .charging
            .lock()
            .unwrap_or_else(PoisonError::into_inner);
        match self.mps_room() {
            Some(room) if bytes > room => Err(Code::OUT_OF_MEMORY),
            _ => take(),
        }
    }

    /// Free bytes.
    fn unused(&self) -> u64 {
        let Some(it) = &self.partition else {
            return self.state.free();
        };
        let now = self.state.gpu_instance(it.gpu_instance.id as usize);
        self.total().saturating_sub(now.map_or(0, |now| now.used))
    }

    /// Streaming multiprocessors.
    pub fn multiprocessors(&self) -> u32 {
        let of_partition = self.partition.map(|it| it.profile.multiprocessors);
        of_partition.unwrap_or(self.state.multiprocessors)
    }

    /// The multiprocessors that this process uses: an MPS client may have fewer.
    pub fn usable_multiprocessors(&self) -> u32 {
        let all = self.multiprocessors();
        let client = driver().ok().and_then(|driver| driver.mps.as_ref());
        client.map_or(all, |client| client.multiprocessors(all))
    }

    /// Whether its memory can be bound to multicast objects. NVIDIA's MIG User Guide: a MIG device has no NVLink.
    pub fn has_multicast(&self) -> bool {
        self.state.multicast != 0 && self.partition.is_none()
    }

    /// Bytes of level-2 cache; a GPU instance has a part of them.
    fn l2_cache_bytes(&self) -> u32 {
        let all = self.state.l2_cache_bytes;
        match (&self.partition, self.state.model()) {
            (Some(it), Some(model)) => all / model.whole().size * it.gpu_instance.profile.size,
            _ => all,
        }
    }

    /// Fails if the GPU has fallen off the bus.
    pub fn check_present(&self) -> Result<(), Code> {
        if self.state.is_lost() {
            Err(Code::UNKNOWN)
        } else {
            Ok(())
        }
    }

    pub fn compute_capability(&self) -> [u32; 2] {
        self.state.compute_capability
    }

    /// Fails if the GPU has fallen off the bus, or after a fault of a kernel.
    pub fn check(&self) -> Result<(), Code> {
        self.check_present()?;
        fault::check()
    }

    /// Charges `bytes` of this GPU's memory to this process.
    pub fn charge(&self, bytes: u64) -> Result<(), Code> {
        let driver = driver()?;
        let reclaim = || driver.reclaim();
        self.within_mps_limit(bytes, || {
            Ok(driver
                .shared
                .charge(driver.slot, self.gpu, bytes, reclaim)?)
        })
    }

    /// Returns `bytes` of this GPU's memory.
    pub fn release(&self, bytes: u64) {
        if let Ok(driver) = driver() {
            // It fails only if a lock stays taken and no daemon runs. A daemon that starts recomputes the sums.
            let _ = driver.shared.release(driver.slot, self.gpu, bytes);
        }
    }

    /// Charges `bytes` of managed memory that moves to this GPU.
    pub fn charge_managed(&self, bytes: u64) -> Result<(), Code> {
        let driver = driver()?;
        let reclaim = || driver.reclaim();
        self.within_mps_limit(bytes, || {
            Ok(driver
                .shared
                .charge_managed(driver.slot, self.gpu, bytes, reclaim)?)
        })
    }

    /// Returns `bytes` of managed memory, or the part that is still on this GPU.
    pub fn release_managed(&self, bytes: u64) {
        if let Ok(driver) = driver() {
            // As above.
            let _ = driver.shared.release_managed(driver.slot, self.gpu, bytes);
        }
    }

    /// Bytes of this process's managed memory that are on this GPU.
    pub fn managed(&self) -> u64 {
        driver().map_or(0, |driver| {
            driver.shared.slots[driver.slot].managed[self.gpu].load(Ordering::Relaxed)
        })
    }

    /// The GPU's graph pool.
    pub fn graph_pool(&self) -> MutexGuard<'_, GraphPool> {
        self.graph_pool
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
    }
}

/// Shared memory of a block that does not opt in to more: 48 KiB on all GPUs.
pub const SHARED_MEMORY_PER_BLOCK: i32 = 48 << 10;
/// Resident blocks of one multiprocessor.
fn blocks_per_multiprocessor(gpu: &GpuState) -> i32 {
    match gpu.compute_capability {
        [7, 5] => 16,
        [8, 9] => 24,
        [8, minor] if minor >= 6 => 16,
        _ => 32,
    }
}

/// `value` as CUDA's `int`, at most its largest value.
pub fn int(value: u32) -> i32 {
    i32::try_from(value).unwrap_or(i32::MAX)
}

/// The value of a `CUdevice_attribute`.
pub fn attribute(device: &Device, attribute: u32) -> Result<i32, Code> {
    let gpu = device.state;
    let [major, minor] = gpu.compute_capability;
    Ok(match attribute {
        1..=3 => [1024, 1024, 1024][attribute as usize - 1],
        4 => 64,
        6 | 7 => 65_535,
        8 => SHARED_MEMORY_PER_BLOCK,
        9 | 12 | 82 => 65_536,
        10 => 32,
        5 | 11 => i32::MAX,
        13 => int(gpu.sm_clock_mhz * 1000),
        16 => int(device.usable_multiprocessors()),
        20 => int(gpu.compute_mode.load(Ordering::Relaxed)),
        24 | 25 | 26 | 47 | 48 | 49 => 16_384,
        29 | 43 | 54 | 62 | 65 | 68 => 2048,
        33 => int(gpu.pci_bus),
        34 => int(gpu.pci_device),
        50 => int(gpu.pci_domain),
        36 => int(gpu.memory_clock_mhz * 1000),
        37 => int(gpu.memory_bus_bits),
        38 => int(device.l2_cache_bytes()),
        39 => int(gpu.threads_per_multiprocessor),
        40 => 3,
        14 | 30 | 51 => 512,
        21..=23
        | 27
        | 28
        | 42
        | 45
        | 46
        | 52
        | 53
        | 55..=61
        | 63
        | 64
        | 66
        | 67
        | 70
        | 71
        | 73
        | 74
        | 77 => 32_768,
        69 => 1 << 28,
        72 => 2_097_120,
        75 => int(major),
        76 => int(minor),
        81 => int(gpu.shared_memory_bytes),
        // A block can opt in to all but 1 KiB, which the driver uses.
        97 => int(gpu.shared_memory_bytes) - 1024,
        87 => 2,
        106 => blocks_per_multiprocessor(gpu),
        108 => int(device.l2_cache_bytes() / 4 * 3),
        109 => 128 << 20,
        111 => 1024,
        126 => {
            if major >= 9 {
                4
            } else {
                1
            }
        }
        // Supported: copies beside kernels, mapped host memory, concurrent kernels, ECC, unified addressing, stream
        // priorities, caches, managed memory, preemption, registered memory, cooperative launches, virtual memory
        // management and its file descriptors, pools.
        15 | 19 | 31 | 32 | 41 | 44 | 78 | 79 | 80 | 83 | 89 | 90 | 91 | 95 | 99 | 102 | 103
        | 113 | 115 | 119 => 1,
        124 => int(gpu.dma_buf),
        132 => i32::from(device.has_multicast()),
        // Clusters exist since Hopper.
        120 => i32::from(major >= 9),
        131 | 134 => gpu.numa_node,
        139 => (gpu.pci_device_id).cast_signed(),
        140 => (gpu.pci_subsystem_id).cast_signed(),
        // Not supported: all other attributes of cuda.h.
        17
        | 18
        | 35
        | 84
        | 85
        | 86
        | 88
        | 92..=94
        | 96
        | 98
        | 100
        | 101
        | 104
        | 105
        | 107
        | 110
        | 112
        | 114
        | 116..=118
        | 121..=123
        | 125
        | 127..=130
        | 133
        | 135..=138
        | 141..=150 => 0,
        _ => return Err(Code::INVALID_VALUE),
    })
}
