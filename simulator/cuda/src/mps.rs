//! This process as a client of an MPS control daemon.
//!
//! By NVIDIA's MPS documentation: the driver connects to the socket `control` in `CUDA_MPS_PIPE_DIRECTORY`, by default
//! `/tmp/nvidia-mps`. If no daemon listens there, the program runs without MPS. The daemon is NVIDIA's own, which greets new
//! connections. Its server is private code of libcuda and does not exist here. This process enforces the server's limits on itself
//! while the daemon lives, which holds a lock on `control_lock` in that folder.
//!
//! | variable | effect |
//! |---|---|
//! | `CUDA_MPS_PINNED_DEVICE_MEM_LIMIT` (`0=1G,1=512M`) | the device memory of this process, its context included; free memory in `cuMemGetInfo` is what is left of it, as measured on a T4 |
//! | `CUDA_MPS_ACTIVE_THREAD_PERCENTAGE` | fewer multiprocessors; kernels take longer in proportion |
//!
//! A daemon's default limits do not reach clients here.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd as _, FromRawFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::code::Code;

const DEFAULT_FOLDER: &str = "/tmp/nvidia-mps";

/// The connection to a daemon.
#[derive(Debug)]
pub struct Client {
    /// The identity of the daemon: the device and inode of its lock, never 0.
    pub daemon: u64,
    lock: File,
    memory: Vec<(usize, u64)>,
    percentage: f64,
    /// One allocation at a time is compared with the limit.
    pub charging: Mutex<()>,
    is_lost: AtomicBool,
}

impl Client {
    /// Connects, if a daemon listens.
    pub fn connect() -> Result<Option<Self>, Code> {
        let folder = std::env::var_os("CUDA_MPS_PIPE_DIRECTORY")
            .filter(|value| !value.is_empty())
            .map_or_else(|| PathBuf::from(DEFAULT_FOLDER), PathBuf::from);
        if !is_greeted(&folder.join("control")) {
            return Ok(None);
        }
        let failed = |_| Code::MPS_CONNECTION_FAILED;
        let lock = File::open(folder.join("control_lock")).map_err(failed)?;
        let of_lock = lock.metadata().map_err(failed)?;
        let text = |name| std::env::var(name).unwrap_or_default();
        Ok(Some(Self {
            daemon: of_lock.dev().rotate_left(32) ^ of_lock.ino(),
            lock,
            memory: limits(&text("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT")),
            percentage: percentage(&text("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE")),
            charging: Mutex::default(),
            is_lost: AtomicBool::new(false),
        }))
    }

    /// Fails after the daemon has ended.
    pub fn check(&self) -> Result<(), Code> {
        if !self.is_lost.load(Ordering::Relaxed) && is_locked(&self.lock) {
            return Ok(());
        }
        self.is_lost.store(true, Ordering::Relaxed);
        Err(Code::MPS_RPC_FAILURE)
    }

    /// The most bytes that this process may have of the device with this ordinal.
    pub fn memory_limit(&self, ordinal: usize) -> Option<u64> {
        let mut limits = self.memory.iter().rev();
        limits.find_map(|(device, bytes)| (*device == ordinal).then_some(*bytes))
    }

    /// The multiprocessors of `all` that this process uses: at least one.
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "between 1 and all"
    )]
    pub fn multiprocessors(&self, all: u32) -> u32 {
        let part = (f64::from(all) * self.percentage / 100.0).ceil() as u32;
        part.clamp(1, all.max(1))
    }
}

/// Whether a daemon answers at this socket.
fn is_greeted(socket: &Path) -> bool {
    let path = socket.as_os_str().as_bytes();
    // SAFETY: zeros are a valid address.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    if path.len() >= address.sun_path.len() {
        return false;
    }
    address.sun_family = 1; // AF_UNIX
    for (to, from) in address.sun_path.iter_mut().zip(path) {
        *to = from.cast_signed();
    }
    // SAFETY: plain arguments.
    let raw = unsafe { libc::socket(libc::AF_UNIX, libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC, 0) };
    if raw < 0 {
        return false;
    }
    // SAFETY: a new descriptor without another owner.
    let connection = unsafe { OwnedFd::from_raw_fd(raw) };
    #[expect(
        clippy::cast_possible_truncation,
        reason = "the size of a small struct"
    )]
    let length = size_of_val(&address) as libc::socklen_t;
    // SAFETY: a valid address of this length.
    if unsafe { libc::connect(raw, (&raw const address).cast(), length) } != 0 {
        return false;
    }
    let mut greeting = [0_u8; 16];
    // SAFETY: the buffer is writable for its length.
    let read = unsafe {
        libc::recv(
            connection.as_raw_fd(),
            greeting.as_mut_ptr().cast(),
            greeting.len(),
            0,
        )
    };
    read > 0
}

/// Whether another process has a lock on the file.
fn is_locked(file: &File) -> bool {
    // SAFETY: zeros are a valid request: from the start to the end of the file.
    let mut request: libc::flock = unsafe { std::mem::zeroed() };
    request.l_type = 1; // F_WRLCK
    loop {
        // SAFETY: `request` is writable; the call does not wait.
        let result = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_OFD_GETLK, &raw mut request) };
        if result == 0 {
            return i32::from(request.l_type) != libc::F_UNLCK;
        }
        if io::Error::last_os_error().kind() != io::ErrorKind::Interrupted {
            return false;
        }
    }
}

/// Bytes by ordinal. An entry that cannot be parsed sets no limit.
fn limits(text: &str) -> Vec<(usize, u64)> {
    let one = |entry: &str| {
        let (device, amount) = entry.split_once('=')?;
        let end = amount.find(|c: char| !c.is_ascii_digit())?;
        let unit = match amount.as_bytes().get(end)? {
            b'G' => 1 << 30,
            b'M' => 1 << 20,
            _ => return None,
        };
        let count: u64 = amount[..end].parse().ok()?;
        Some((device.trim().parse().ok()?, count.checked_mul(unit)?))
    };
    text.split(',').filter_map(one).collect()
}

/// More than 0 and at most 100; anything else is 100.
fn percentage(text: &str) -> f64 {
    let found = text.trim().parse().ok();
    found
        .filter(|percent| *percent > 0.0 && *percent <= 100.0)
        .unwrap_or(100.0)
}

#[cfg(test)]
mod tests {
    use super::{limits, percentage};

    #[test]
    fn limits_are_written_as_in_nvidias_documentation() {
        assert_eq!(limits("0=1G,1=512MB"), [(0, 1 << 30), (1, 512 << 20)]);
        assert_eq!(limits("0=4607M"), [(0, 4607 << 20)]);
        assert_eq!(limits(""), []);
        assert_eq!(limits("1G"), []);
        assert_eq!(limits("0=1"), []);
    }

    #[test]
    fn a_percentage_out_of_range_limits_nothing() {
        for (text, percent) in [
            ("30", 30.0),
            ("33.5", 33.5),
            ("0", 100.0),
            ("101", 100.0),
            ("", 100.0),
        ] {
            assert!((percentage(text) - percent).abs() < f64::EPSILON, "{text}");
        }
    }
}
