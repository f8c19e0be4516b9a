//! Lists of processes: only the share's, from its account.
//!
//! The driver knows every process on the GPU. In a container a new driver lists only those of the
//! caller's PID namespace; an old one lists all, with PIDs of the host. The account has exactly the
//! processes of the share, with the size of each, so the list is made from it; the driver is called
//! only for its errors.

use core::ffi::c_uint;
use core::ptr;

use crate::abi::{
    AccountingStatsV2, Device, ProcessDetail, ProcessDetails, ProcessV1, ProcessV2, Return,
};
use crate::buffer::Buffer;
use crate::driver::typed;
use crate::users::{Process, Users};

/// The partition of a process in a list, which means none.
const NO_INSTANCE: c_uint = c_uint::MAX;

impl From<Process> for ProcessV1 {
    fn from(process: Process) -> Self {
        Self {
            pid: process.pid,
            memory: process.size,
        }
    }
}

impl From<Process> for ProcessV2 {
    fn from(process: Process) -> Self {
        Self {
            pid: process.pid,
            memory: process.size,
            gpu_instance: NO_INSTANCE,
            compute_instance: NO_INSTANCE,
        }
    }
}

impl From<Process> for ProcessDetail {
    fn from(process: Process) -> Self {
        Self {
            pid: process.pid,
            memory: process.size,
            gpu_instance: NO_INSTANCE,
            compute_instance: NO_INSTANCE,
            protected: 0,
        }
    }
}

/// The kind of a list.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Compute: every process of a share.
    Compute,
    /// Graphics, and clients of an MPS server: no process of a share.
    Other,
}

/// `nvmlDeviceGet…RunningProcesses`, in all its versions.
///
/// # Safety
///
/// `count` is null or valid, and `to` null or valid for `*count` entries.
pub unsafe fn list<T: From<Process>>(
    index: usize,
    kind: Kind,
    device: Device,
    (count, to): (*mut c_uint, *mut T),
    driver: impl FnOnce() -> Return,
) -> Return {
    if count.is_null() {
        return driver();
    }
    let real = typed::<unsafe extern "C" fn(Device, *mut c_uint, *mut T) -> Return>(index);
    let mut none = 0;
    // SAFETY: asks how many there are, with no room for any.
    let result = unsafe { real(device, &raw mut none, ptr::null_mut()) };
    if !matches!(result, Return::SUCCESS | Return::INSUFFICIENT_SIZE) {
        return result;
    }
    match Users::of(device) {
        Ok(None) => driver(),
        // SAFETY: the caller's promise.
        Ok(Some(users)) => unsafe { put(count, to, || of_kind(&users, kind)) },
        Err(code) => code,
    }
}

/// `nvmlDeviceGetRunningProcessDetailList`.
///
/// # Safety
///
/// `list` is null or valid, and its `to` null or valid for its `count` entries.
pub unsafe fn details(
    index: usize,
    device: Device,
    list: *mut ProcessDetails,
    driver: impl FnOnce() -> Return,
) -> Return {
    if list.is_null() {
        return driver();
    }
    let real = typed::<unsafe extern "C" fn(Device, *mut ProcessDetails) -> Return>(index);
    // SAFETY: not null, so valid by the caller's promise. Its first word is its version in all versions,
    // and the driver refuses all but the first.
    let mut none = unsafe { list.read() };
    (none.count, none.to) = (0, ptr::null_mut());
    // SAFETY: asks how many there are, with no room for any.
    let result = unsafe { real(device, &raw mut none) };
    if !matches!(result, Return::SUCCESS | Return::INSUFFICIENT_SIZE) {
        return result;
    }
    let kind = if none.mode == 0 {
        Kind::Compute
    } else {
        Kind::Other
    };
    match Users::of(device) {
        Ok(None) => driver(),
        // SAFETY: the caller's promise.
        Ok(Some(users)) => unsafe {
            put(&raw mut (*list).count, (*list).to, || of_kind(&users, kind))
        },
        Err(code) => code,
    }
}

fn of_kind(users: &Users, kind: Kind) -> impl Iterator<Item = Process> {
    users.holders().filter(move |_| kind == Kind::Compute)
}

/// Returns a list as NVML does: the caller says how much room there is, and gets the length; too
/// little room is refused. `list` returns the same entries each time.
///
/// # Safety
///
/// `count` is valid, and `to` null or valid for `*count` entries.
pub unsafe fn put<T: From<F>, F, I: Iterator<Item = F>>(
    count: *mut c_uint,
    to: *mut T,
    mut list: impl FnMut() -> I,
) -> Return {
    // SAFETY: the caller's promise.
    let room = unsafe { count.read() } as usize;
    let len = list().count();
    // SAFETY: as above.
    unsafe { count.write(c_uint::try_from(len).unwrap_or(c_uint::MAX)) };
    if len > room || (to.is_null() && len > 0) {
        return Return::INSUFFICIENT_SIZE;
    }
    for (nth, entry) in list().take(room).enumerate() {
        // SAFETY: `to` is valid for `room` entries, more than `nth`.
        unsafe { to.add(nth).write(entry.into()) };
    }
    Return::SUCCESS
}

/// `nvmlDeviceGetAccountingPids`: those of the share.
///
/// # Safety
///
/// `count` is null or valid, and `pids` null or valid for `*count` entries.
pub unsafe fn accounting_pids(
    index: usize,
    device: Device,
    (count, pids): (*mut c_uint, *mut c_uint),
    driver: impl FnOnce() -> Return,
) -> Return {
    if count.is_null() {
        return driver();
    }
    let users = match Users::of(device) {
        Ok(Some(users)) => users,
        Ok(None) => return driver(),
        Err(code) => return code,
    };
    let real = typed::<unsafe extern "C" fn(Device, *mut c_uint, *mut c_uint) -> Return>(index);
    let ask = |room: &mut Buffer<u32>, mut len: c_uint| {
        // SAFETY: the room is for `len` entries.
        let result = unsafe { real(device, &raw mut len, room.room()) };
        (result, len)
    };
    // The driver's buffer has a few thousand places.
    let most = 1 << 16;
    let mut theirs = match Buffer::new(most) {
        Ok(theirs) => theirs,
        Err(code) => return code,
    };
    let (result, len) = ask(&mut theirs, 1 << 16);
    if result != Return::SUCCESS {
        return result;
    }
    let mut ours = 0;
    let theirs = theirs.first(len as usize);
    for at in 0..theirs.len() {
        if users.has(theirs[at]) {
            theirs[ours] = theirs[at];
            ours += 1;
        }
    }
    // SAFETY: the caller's promise.
    unsafe { put(count, pids, || theirs[..ours].iter().copied()) }
}

/// `nvmlDeviceGetAccountingStats`: of a process of the share; others are not found.
pub fn accounting_stats(device: Device, pid: c_uint, driver: impl FnOnce() -> Return) -> Return {
    match Users::of(device) {
        Ok(Some(users)) if !users.has(pid) => Return::NOT_FOUND,
        Ok(_) => driver(),
        Err(code) => code,
    }
}

/// The same in its second version.
///
/// # Safety
///
/// `stats` is null or valid.
pub unsafe fn accounting_stats_v2(
    device: Device,
    stats: *mut AccountingStatsV2,
    driver: impl FnOnce() -> Return,
) -> Return {
    // SAFETY: the caller's promise.
    match unsafe { stats.as_ref() } {
        Some(stats) => accounting_stats(device, stats.pid, driver),
        None => driver(),
    }
}
