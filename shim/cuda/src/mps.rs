//! Concurrent shares: this process becomes a client of its GPU's MPS daemon, with the limits of its cap page.
//!
//! The driver reads its limits from the environment in `cuInit`. The node sets them in the container, but a program may
//! have changed or lost them. So they are set again here, in the process itself, from the page.
//!
//! A driver that finds no daemon silently continues without MPS. So the shim checks that the daemon serves before it calls
//! the driver.

use core::ffi::CStr;
use core::sync::atomic::{AtomicBool, Ordering};

use tranche_shim_core::{GpuUuid, MessagePart, paths};
use tranche_shim_runtime::complain::Refused;
use tranche_shim_runtime::container_shares::{self, Share, refuse_mps};
use tranche_shim_runtime::sys::{self, Errno};

use crate::abi::CUresult;

const PIPES: &CStr = c"CUDA_MPS_PIPE_DIRECTORY";
const THREADS: &CStr = c"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE";
const MEMORY: &CStr = c"CUDA_MPS_PINNED_DEVICE_MEM_LIMIT";
/// The variable that lets a program give each context its own percentage.
const BY_CONTEXT: &CStr = c"CUDA_MPS_ENABLE_PER_CTX_DEVICE_MULTIPROCESSOR_PARTITIONING";

/// Whether the limits were set in this process, or in the one from which it was forked.
static IS_CLIENT: AtomicBool = AtomicBool::new(false);

/// The concurrent shares of this container together: a container has one daemon, and a daemon has one GPU.
struct Client {
    gpu: GpuUuid,
    threads: u8,
    /// In bytes.
    memory: u64,
}

/// Must be called before the driver's `cuInit`. If this container has a concurrent share, checks that the daemon serves,
/// and sets the limits.
pub fn prepare() -> Result<(), CUresult> {
    // The node mounts the folder, so a container without it has no such share; `check` verifies that.
    if IS_CLIENT.load(Ordering::Relaxed) || !sys::exists(paths::MPS_PIPES) {
        return Ok(());
    }
    let refused = |Refused| CUresult::NOT_PERMITTED;
    let mut client = None;
    container_shares::each(&mut |share| add(&mut client, share)).map_err(refused)?;
    let Some(client) = client else {
        return Ok(());
    };
    sys::is_served(paths::MPS_CONTROL).map_err(|Errno(errno)| {
        let errno = MessagePart::Number(u64::from(errno.unsigned_abs()));
        let Refused = refuse_mps(&[
            MessagePart::Text("no daemon takes clients at /tmp/nvidia-mps/control (errno "),
            errno,
            MessagePart::Text(")"),
        ]);
        CUresult::MPS_CONNECTION_FAILED
    })?;
    client.set().map_err(refused)?;
    IS_CLIENT.store(true, Ordering::Relaxed);
    Ok(())
}

/// Refuses a concurrent share for whose daemon this process has no limits.
pub fn check(share: &Share) -> Result<(), Refused> {
    if share.mps_threads.is_none() || IS_CLIENT.load(Ordering::Relaxed) {
        return Ok(());
    }
    Err(refuse_mps(&[MessagePart::Text(
        "/tmp/nvidia-mps is missing in a container with a concurrent share",
    )]))
}

fn add(client: &mut Option<Client>, share: &Share) -> Result<(), Refused> {
    let (Some(threads), Some(memory)) = (share.mps_threads, share.limit) else {
        return Ok(());
    };
    match client {
        None => {
            *client = Some(Client {
                gpu: share.gpu,
                threads,
                // The server also counts the context, for which the share has room beside its memory.
                memory: memory.saturating_add(share.context),
            });
            Ok(())
        }
        Some(client) if client.gpu == share.gpu => {
            client.threads = client.threads.saturating_add(threads).min(100);
            client.memory = client.memory.saturating_add(memory);
            Ok(())
        }
        Some(_) => Err(refuse_mps(&[MessagePart::Text(
            "this container has concurrent shares of two GPUs, and a process can be the client of one daemon: give it shares of one \
             GPU",
        )])),
    }
}

impl Client {
    fn set(&self) -> Result<(), Refused> {
        let mut threads = Text::new();
        threads.number(u64::from(self.threads));
        let mut memory = Text::new();
        memory
            .text(b"0=")
            .number((self.memory >> 20).max(1))
            .text(b"M");
        for (name, value) in [
            (PIPES, Some(paths::MPS_PIPES)),
            (THREADS, Some(threads.end())),
            (MEMORY, Some(memory.end())),
            (BY_CONTEXT, None),
        ] {
            // If the node's variables are unchanged, nothing is written, because another thread may read them.
            if sys::environment_is(name, value) {
                continue;
            }
            sys::set_environment(name, value).map_err(|Errno(errno)| {
                refuse_mps(&[
                    MessagePart::Text("a limit cannot be set in the environment (errno "),
                    MessagePart::Number(u64::from(errno.unsigned_abs())),
                    MessagePart::Text(")"),
                ])
            })?;
        }
        Ok(())
    }
}

/// A variable's value.
struct Text {
    bytes: [u8; 32],
    len: usize,
}

impl Text {
    fn new() -> Self {
        Self {
            bytes: [0; 32],
            len: 0,
        }
    }

    fn text(&mut self, text: &[u8]) -> &mut Self {
        for &byte in text {
            // The last byte stays zero. The longest value has 25.
            if self.len < self.bytes.len() - 1
                && let Some(place) = self.bytes.get_mut(self.len)
            {
                *place = byte;
                self.len += 1;
            }
        }
        self
    }

    fn number(&mut self, mut number: u64) -> &mut Self {
        let mut digits = [0; 20];
        for at in (0..digits.len()).rev() {
            let digit = (number % 10) as u8;
            if let Some(place) = digits.get_mut(at) {
                *place = b'0' + digit;
            }
            number /= 10;
            if number == 0 {
                return self.text(digits.get(at..).unwrap_or(&[]));
            }
        }
        self
    }

    fn end(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.bytes).unwrap_or(c"")
    }
}
