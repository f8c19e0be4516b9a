//! The GPU of a handle, and the processes that use this container's shares of it.

use core::ffi::{CStr, c_char, c_uint};

use tranche_shim_core::GpuUuid;
use tranche_shim_core::layout::SLOTS;
use tranche_shim_core::paths::MAX_SHARES;
use tranche_shim_runtime::complain::Refused;
use tranche_shim_runtime::{accounts, container_shares};

use crate::abi::{Device, Plain, Return};
use crate::buffer::Buffer;
use crate::driver::{index, typed};

/// The GPU of a handle, which the program may have from any call.
pub fn identify(device: Device) -> Option<GpuUuid> {
    let mut text = [0u8; 96];
    let real = typed::<unsafe extern "C" fn(Device, *mut c_char, c_uint) -> Return>(
        index::nvmlDeviceGetUUID,
    );
    // SAFETY: the driver refuses a handle that it does not know; `text` has that many bytes.
    let result = unsafe { real(device, text.as_mut_ptr().cast(), 96) };
    let text = CStr::from_bytes_until_nul(&text).ok()?;
    (result == Return::SUCCESS).then_some(())?;
    GpuUuid::parse(text.to_str().ok()?)
}

/// Refuses a GPU without a share. If the GPU is in MIG mode, the container may have a partition of it; then the driver too
/// refuses queries about the whole GPU, and no message is written.
pub fn refuse(device: Device, gpu: GpuUuid) -> Refused {
    let real = typed::<unsafe extern "C" fn(Device, *mut c_uint, *mut c_uint) -> Return>(
        index::nvmlDeviceGetMigMode,
    );
    let (mut current, mut pending) = (0, 0);
    // SAFETY: writes to the two locals.
    let result = unsafe { real(device, &raw mut current, &raw mut pending) };
    if result == Return::SUCCESS && current == 1 {
        return Refused;
    }
    container_shares::refuse_gpu(gpu)
}

/// One process of the container's shares.
#[derive(Clone, Copy)]
pub struct Process {
    /// The PID in its own namespace: usually the container's, in which the driver reports it too.
    pub pid: u32,
    /// Bytes that it is charged, of which programs see `size`.
    charged: u64,
    /// Its memory: one value for all lists. The sum of all is the memory that the shares use.
    pub size: u64,
}

// SAFETY: numbers.
unsafe impl Plain for Process {}

/// The users of this container's shares of a GPU.
pub struct Users {
    processes: Buffer<Process>,
    len: usize,
    /// The sum of the shares' cores in percent, 1 to 100.
    cores: u32,
}

impl Users {
    /// The users of a handle's GPU; `None` if its memory is not capped, so that there is no account.
    pub fn of(device: Device) -> Result<Option<Self>, Return> {
        let gpu = identify(device).ok_or(Return::NO_PERMISSION)?;
        let (mut known, mut capped, mut cores, mut context) = (false, true, 0u32, 0);
        let mut users = Self {
            processes: Buffer::new(SLOTS * MAX_SHARES)?,
            len: 0,
            cores: 0,
        };
        container_shares::each(&mut |share| {
            if share.gpu == gpu {
                known = true;
                capped &= share.limit.is_some();
                cores = cores.saturating_add(share.cores.map_or(100, u32::from));
                if share.limit.is_some() {
                    context = share.context.max(context);
                    accounts::processes(share, &mut |pid, charged| users.add(pid, charged))?;
                }
            }
            Ok(())
        })
        .map_err(|Refused| Return::NO_PERMISSION)?;
        if !known {
            let Refused = refuse(device, gpu);
            return Err(Return::NO_PERMISSION);
        }
        users.cores = cores.clamp(1, 100);
        users.hide(context);
        Ok(capped.then_some(users))
    }

    /// Adds a process, or its charge in another share of the GPU.
    fn add(&mut self, pid: u64, charged: u64) {
        let Ok(pid) = u32::try_from(pid) else {
            return;
        };
        let len = self.len;
        let entries = self.processes.first(len + 1);
        let (known, free) = entries.split_at_mut(len.min(entries.len()));
        if let Some(process) = known.iter_mut().find(|process| process.pid == pid) {
            process.charged = process.charged.saturating_add(charged);
        } else if let Some(place) = free.first_mut() {
            *place = Process {
                pid,
                charged,
                size: 0,
            };
            self.len += 1;
        }
    }

    /// Sets the sizes. One context is not part of the memory and is not shown to programs (`memory`): it is that of
    /// the first process.
    fn hide(&mut self, mut context: u64) {
        for process in self.processes.first(self.len) {
            let hidden = process.charged.min(context);
            process.size = process.charged - hidden;
            context -= hidden;
        }
    }

    /// The processes that hold memory of the GPU, as each process with a context does.
    pub fn holders(&self) -> impl Iterator<Item = Process> {
        self.processes
            .seen(self.len)
            .iter()
            .filter(|process| process.charged > 0)
            .copied()
    }

    /// Whether this process belongs to the shares.
    pub fn has(&self, pid: u32) -> bool {
        self.processes
            .seen(self.len)
            .iter()
            .any(|process| process.pid == pid)
    }

    /// Percent of the GPU as percent of the shares.
    pub fn scaled(&self, percent: u32) -> u32 {
        (percent.saturating_mul(100) / self.cores).min(100)
    }
}
