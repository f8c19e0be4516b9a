//! How a library gets the shared page.

use std::io::IoSliceMut;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};

use rustix::mm::{MapFlags, ProtFlags};
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendFlags, SocketAddrUnix,
    SocketFlags, SocketType, connect, recvmsg, send, socket_with,
};

use crate::layout::{PAGE_BYTES, Shared};
use crate::root::DriverRoot;
use crate::turns::MAX_PROCESSES;
use crate::wire::{PACKET, Reply, Request};

/// How a library uses the page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// It reads the page (NVML).
    Observe,
    /// It takes memory and time of GPUs (CUDA).
    Join,
}

/// Why a library gets no page.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// No daemon listens.
    #[error("{path}: {source}; nvidia-sim-persistenced does not run or its socket is not mounted")]
    NoDaemon {
        path: PathBuf,
        source: std::io::Error,
    },
    /// The connection to the daemon failed.
    #[error("nvidia-sim-persistenced: {0}")]
    Connection(#[from] std::io::Error),
    /// The daemon is of another version of the simulator.
    #[error("nvidia-sim-persistenced speaks another version; install both from one build")]
    Mismatch,
    #[error("nvidia-sim-persistenced refuses: {0:?}")]
    Refused(Reply),
}

/// The files that are mapped for reading, by device and inode. Mappings stay, so no other file gets the inode.
static MAPPED: Mutex<Vec<((u64, u64), &'static Shared)>> = Mutex::new(Vec::new());

/// A mapped page, and this process's place in it.
#[derive(Debug)]
pub struct Attachment {
    shared: &'static Shared,
    slot: usize,
    // When it closes, the daemon frees the slot.
    _connection: Option<OwnedFd>,
}

impl Attachment {
    /// Asks the daemon of `root` for the page and maps it for the rest of the process.
    pub fn new(root: &DriverRoot, access: Access) -> Result<Self, AttachError> {
        let connection = connect_to(root)?;
        let request = match access {
            Access::Observe => Request::Observe,
            Access::Join => Request::Join,
        };
        let (reply, page) = ask(&connection, request)?;
        let slot = match reply {
            Reply::Granted { slot } => slot as usize,
            Reply::Mismatch => return Err(AttachError::Mismatch),
            other => return Err(AttachError::Refused(other)),
        };
        let page = page.ok_or(AttachError::Mismatch)?;
        let file = rustix::fs::fstat(&page).map_err(std::io::Error::from)?;
        if usize::try_from(file.st_size) != Ok(PAGE_BYTES) || slot >= MAX_PROCESSES {
            return Err(AttachError::Mismatch);
        }
        // A program that initialises NVML repeatedly maps the page once.
        let mut mapped = MAPPED.lock().unwrap_or_else(PoisonError::into_inner);
        let key = (file.st_dev, file.st_ino);
        let known = mapped.iter().find(|(known, _)| *known == key);
        if let (Access::Observe, Some((_, shared))) = (access, known) {
            return Ok(Self {
                shared,
                slot,
                _connection: None,
            });
        }
        let protection = match access {
            Access::Observe => ProtFlags::READ,
            Access::Join => ProtFlags::READ | ProtFlags::WRITE,
        };
        // SAFETY: a new mapping at an address of the kernel's choice. The file is as long as the mapping (checked above) and
        // the daemon never shortens it.
        let address = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                PAGE_BYTES,
                protection,
                MapFlags::SHARED,
                &page,
                0,
            )
        }
        .map_err(std::io::Error::from)?;
        // SAFETY: mapped above with the size of Shared, page-aligned, never unmapped. All bit patterns are values of its
        // fields. Those that change after the daemon has published the page are atomics.
        let shared = unsafe { &*address.cast::<Shared>() };
        if !shared.is_ours() {
            return Err(AttachError::Mismatch);
        }
        if access == Access::Observe {
            mapped.push((key, shared));
        }
        Ok(Self {
            shared,
            slot,
            _connection: (access == Access::Join).then_some(connection),
        })
    }

    #[must_use]
    pub fn shared(&self) -> &'static Shared {
        self.shared
    }

    /// This process's slot; meaningless for an observer.
    #[must_use]
    pub fn slot(&self) -> usize {
        self.slot
    }
}

/// Sends a request whose answer has no page.
pub fn request(root: &DriverRoot, request: Request) -> Result<Reply, AttachError> {
    Ok(ask(&connect_to(root)?, request)?.0)
}

/// A socket of the handshake, neither bound nor connected.
pub fn new_socket() -> rustix::io::Result<OwnedFd> {
    let (kind, flags) = (SocketType::SEQPACKET, SocketFlags::CLOEXEC);
    socket_with(AddressFamily::UNIX, kind, flags, None)
}

/// Connects to the daemon of `root`.
fn connect_to(root: &DriverRoot) -> Result<OwnedFd, AttachError> {
    let path = root.socket();
    let connected = || -> rustix::io::Result<OwnedFd> {
        let address = SocketAddrUnix::new(&path)?;
        let socket = new_socket()?;
        rustix::io::retry_on_intr(|| connect(&socket, &address))?;
        Ok(socket)
    };
    connected().map_err(|source| AttachError::NoDaemon {
        path: path.clone(),
        source: source.into(),
    })
}

/// Sends a request; the answer, and the file that came with it.
fn ask(connection: &OwnedFd, request: Request) -> Result<(Reply, Option<OwnedFd>), AttachError> {
    let packet = request.encode();
    rustix::io::retry_on_intr(|| send(connection, &packet, SendFlags::NOSIGNAL))
        .map_err(std::io::Error::from)?;
    let mut answer = [0; PACKET];
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = RecvAncillaryBuffer::new(&mut space);
    let received = rustix::io::retry_on_intr(|| {
        recvmsg(
            connection,
            &mut [IoSliceMut::new(&mut answer)],
            &mut ancillary,
            RecvFlags::CMSG_CLOEXEC,
        )
    })
    .map_err(std::io::Error::from)?;
    let page = ancillary.drain().find_map(|message| match message {
        RecvAncillaryMessage::ScmRights(mut files) => files.next(),
        _ => None,
    });
    let reply = Reply::decode(&answer[..received.bytes]).ok_or(AttachError::Mismatch)?;
    Ok((reply, page))
}
