//! The daemon's loop: answers libraries, and takes back what the dead held.
//!
//! A process is gone when its pidfd says so, and what it held is free when its
//! connection hangs up: at its end or its `exec`, unless a forked child keeps the
//! connection open. A driver, too, frees with the last of a process's files.

use std::fs;
use std::io::{ErrorKind, IoSlice};
use std::os::fd::{AsFd, BorrowedFd, FromRawFd as _, OwnedFd};
use std::os::unix::fs::PermissionsExt as _;
use std::sync::atomic::Ordering;

use anyhow::Context as _;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::{Errno, retry_on_intr};
use rustix::net::{
    RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags,
    accept_with, bind, listen, recv, sendmsg,
};
use rustix::process::{Pid, PidfdFlags, Resource, getrlimit, pidfd_open, setrlimit};
use tranche_simulator_machine::attach::new_socket;
use tranche_simulator_machine::layout::GpuState;
use tranche_simulator_machine::wire::{PACKET, Reply, Request, Setting};
use tranche_simulator_machine::{Description, DriverRoot, MAX_PROCESSES, identity};

use crate::nodes;
use crate::page::Page;
use crate::sampler::{PERIOD, Sampler};

/// A process with a slot.
#[derive(Debug)]
struct Client {
    slot: usize,
    /// None where the process is in a PID namespace that this one cannot see.
    process: Option<OwnedFd>,
    /// None for a process that a predecessor of this daemon served.
    connection: Option<OwnedFd>,
}

struct Daemon {
    page: Page,
    listener: OwnedFd,
    /// Connections that have not joined.
    visitors: Vec<OwnedFd>,
    clients: Vec<Client>,
    sampler: Sampler,
}

/// Serves the machine of `description` under `root` until the process is ended.
pub fn run(root: &DriverRoot, description: &Description) -> anyhow::Result<()> {
    allow_descriptors();
    let page = Page::open(root, description)?;
    page.shared
        .header
        .generation
        .fetch_add(1, Ordering::Relaxed);
    let own = identity::pid_namespace("self").unwrap_or(0);
    page.shared.header.namespace.store(own, Ordering::Relaxed);
    let count = page.shared.header.gpu_count;
    nodes::make(root.path(), count)?;
    let listener = match inherited_listener() {
        Some(listener) => listener,
        None => listen_on(root).with_context(|| format!("{}", root.socket().display()))?,
    };
    let mut daemon = Daemon {
        page,
        listener,
        visitors: Vec::new(),
        clients: Vec::new(),
        sampler: Sampler::default(),
    };
    daemon.adopt();
    daemon.page.shared.recover();
    eprintln!(
        "nvidia-sim-persistenced: {count} simulated GPUs at {}; {} processes taken over",
        root.socket().display(),
        daemon.clients.len()
    );
    loop {
        daemon.turn()?;
    }
}

/// Two descriptors for every process are more than the usual limit.
fn allow_descriptors() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    // As high as allowed is as good as it gets.
    let _ = setrlimit(Resource::Nofile, limit);
}

/// The socket that systemd opened for us: it stays the same over a restart, so
/// containers that have it mounted reach the next daemon too.
fn inherited_listener() -> Option<OwnedFd> {
    let pid: u32 = std::env::var("LISTEN_PID").ok()?.parse().ok()?;
    let count: u32 = std::env::var("LISTEN_FDS").ok()?.parse().ok()?;
    if pid != std::process::id() || count != 1 {
        return None;
    }
    // SAFETY: systemd's protocol (sd_listen_fds(3)) gives descriptor 3 to this
    // process alone, and nothing else here takes it.
    Some(unsafe { OwnedFd::from_raw_fd(3) })
}

fn listen_on(root: &DriverRoot) -> anyhow::Result<OwnedFd> {
    let path = root.socket();
    let socket = new_socket()?;
    // Under another name until it listens: whoever finds a socket here can connect to it.
    // The page's lock is held, so what lies under either name is a dead daemon's.
    let unready = path.with_extension("unready");
    match fs::remove_file(&unready) {
        Err(error) if error.kind() != ErrorKind::NotFound => return Err(error.into()),
        _ => {}
    }
    bind(&socket, &SocketAddrUnix::new(&unready)?)?;
    fs::set_permissions(&unready, fs::Permissions::from_mode(0o666))?;
    listen(&socket, 4096)?;
    fs::rename(&unready, &path)?;
    Ok(socket)
}

impl Daemon {
    /// Takes over the slots that a predecessor gave out.
    fn adopt(&mut self) {
        for slot in 0..MAX_PROCESSES {
            let state = &self.page.shared.slots[slot];
            if state.pid.load(Ordering::Acquire) == 0 {
                continue;
            }
            let process = open_process(state.pid.load(Ordering::Acquire));
            // Opened before the check: a pid reused after it does not matter.
            if process.is_some() && identity::alive(state) {
                self.clients.push(Client {
                    slot,
                    process,
                    connection: None,
                });
            } else {
                self.page.shared.reclaim(slot);
            }
        }
    }

    /// Waits for something to happen and deals with it.
    fn turn(&mut self) -> anyhow::Result<()> {
        let mut watched: Vec<PollFd<'_>> = Vec::with_capacity(2 * self.clients.len() + 8);
        watched.push(PollFd::new(&self.listener, PollFlags::IN));
        for visitor in &self.visitors {
            watched.push(PollFd::new(visitor, PollFlags::IN));
        }
        self.watch_clients(&mut watched);
        let timeout = Timespec {
            tv_sec: 0,
            tv_nsec: i64::from(PERIOD.subsec_nanos()),
        };
        // Quiet when nobody uses a GPU.
        let timeout = (!self.clients.is_empty()).then_some(&timeout);
        match poll(&mut watched, timeout) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error).context("waiting for clients"),
        }
        let ready = ready(&watched);
        drop(watched);
        let visitors = self.visitors.len();
        self.bury(&ready[1 + visitors..]);
        self.hear(&ready[1..=visitors])?;
        if ready[0] {
            self.welcome()?;
        }
        if !self.clients.is_empty() {
            let slots: Vec<usize> = self.clients.iter().map(|c| c.slot).collect();
            self.sampler.sample(self.page.shared, &slots);
        }
        Ok(())
    }

    /// Two entries for each client; the listener stands in where one is missing and is
    /// asked for nothing.
    fn watch_clients<'a>(&'a self, watched: &mut Vec<PollFd<'a>>) {
        for client in &self.clients {
            for end in [&client.process, &client.connection] {
                watched.push(match end {
                    Some(fd) => PollFd::new(fd, PollFlags::IN),
                    None => PollFd::new(&self.listener, PollFlags::empty()),
                });
            }
        }
    }

    /// Looks for the dead now.
    fn settle(&mut self) -> anyhow::Result<()> {
        let mut watched = Vec::with_capacity(2 * self.clients.len());
        self.watch_clients(&mut watched);
        retry_on_intr(|| poll(&mut watched, Some(&Timespec::default())))
            .context("looking for clients that ended")?;
        let ready = ready(&watched);
        drop(watched);
        self.bury(&ready);
        Ok(())
    }

    /// Frees what processes had that ended.
    fn bury(&mut self, ready: &[bool]) {
        let shared = self.page.shared;
        let mut ends = ready.chunks_exact(2);
        self.clients.retain_mut(|client| {
            let [process, connection] = ends.next().unwrap_or(&[false, false]) else {
                return true;
            };
            let closed = match &client.connection {
                Some(open) => *connection && hung_up(open),
                None => *process,
            };
            if closed {
                shared.reclaim(client.slot);
            } else if *process {
                shared.orphan(client.slot);
                client.process = None;
            }
            !closed
        });
        for gpu in shared.gpus() {
            apply_mig_mode(gpu);
            if self.clients.is_empty() {
                gpu.utilization.store(0, Ordering::Relaxed);
            }
        }
    }

    /// Answers those who asked.
    fn hear(&mut self, ready: &[bool]) -> anyhow::Result<()> {
        let visitors = std::mem::take(&mut self.visitors);
        for (index, visitor) in visitors.into_iter().enumerate() {
            if !ready.get(index).copied().unwrap_or(false) {
                self.visitors.push(visitor);
                continue;
            }
            let mut packet = [0; PACKET];
            match recv(&visitor, &mut packet, RecvFlags::DONTWAIT) {
                Ok((length, _)) if length > 0 => self.answer(visitor, &packet[..length])?,
                Err(Errno::AGAIN | Errno::INTR) => self.visitors.push(visitor),
                // Hung up, or worse: either way it is over.
                _ => {}
            }
        }
        Ok(())
    }

    fn welcome(&mut self) -> anyhow::Result<()> {
        match accept_with(&self.listener, SocketFlags::CLOEXEC) {
            Ok(visitor) => self.visitors.push(visitor),
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => {}
            // Out of descriptors: those who connected and said nothing go first.
            Err(Errno::MFILE | Errno::NFILE) if !self.visitors.is_empty() => {
                self.visitors.remove(0);
            }
            Err(error) => return Err(error).context("accepting a client"),
        }
        Ok(())
    }

    fn answer(&mut self, visitor: OwnedFd, packet: &[u8]) -> anyhow::Result<()> {
        let Some(request) = Request::decode(packet) else {
            reply(&visitor, Reply::Mismatch, None);
            return Ok(());
        };
        match request {
            Request::Observe => {
                reply(
                    &visitor,
                    Reply::Granted { slot: 0 },
                    Some(self.page.readable.as_fd()),
                );
            }
            Request::Join => self.join(visitor),
            Request::Settle => {
                self.settle()?;
                reply(&visitor, Reply::Granted { slot: 0 }, None);
            }
            Request::Set {
                gpu,
                setting,
                value,
            } => {
                let answer = if peer(&visitor).is_some_and(|p| p.uid == 0) {
                    self.set(gpu, setting, value)
                } else {
                    Reply::Forbidden
                };
                reply(&visitor, answer, None);
            }
            Request::Event { gpu, kind, data } => {
                let answer = if peer(&visitor).is_none_or(|p| p.uid != 0) {
                    Reply::Forbidden
                } else if gpu as usize >= self.page.shared.gpus().len() {
                    Reply::Invalid
                } else {
                    self.page
                        .shared
                        .publish_event(gpu as usize, u64::from(kind), u64::from(data));
                    Reply::Granted { slot: 0 }
                };
                reply(&visitor, answer, None);
            }
        }
        Ok(())
    }

    fn set(&self, gpu: u32, setting: Setting, value: u32) -> Reply {
        let index = gpu as usize;
        let Some(gpu) = self.page.shared.gpus().get(index) else {
            return Reply::Invalid;
        };
        let (word, most) = match setting {
            Setting::Persistence => (&gpu.persistence, 1),
            Setting::ComputeMode => (&gpu.compute_mode, 3),
            Setting::MigMode => (&gpu.mig_pending, u32::from(gpu.mig_capable != 0)),
            Setting::Lost => (&gpu.lost, 1),
        };
        if value > most || (setting == Setting::MigMode && gpu.mig_capable == 0) {
            return Reply::Invalid;
        }
        word.store(value, Ordering::Relaxed);
        match setting {
            Setting::MigMode => apply_mig_mode(gpu),
            Setting::Lost if value == 1 => {
                let xid = FELL_OFF_THE_BUS;
                self.page.shared.publish_event(index, XID_EVENT, xid);
            }
            _ => {}
        }
        Reply::Granted { slot: 0 }
    }

    fn join(&mut self, visitor: OwnedFd) {
        let shared = self.page.shared;
        let free = shared
            .slots
            .iter()
            .position(|s| s.pid.load(Ordering::Acquire) == 0);
        let Some(slot) = free else {
            reply(&visitor, Reply::Full, None);
            return;
        };
        // A peer outside this PID namespace has pid 0 here: only its connection
        // tells of its end, and NVML shows it as -1.
        let pid = peer(&visitor).map_or(0, |p| p.pid);
        let process = open_process(pid);
        if pid != 0 && process.is_none() {
            return;
        }
        let state = &shared.slots[slot];
        state
            .started
            .store(identity::start_time(pid).unwrap_or(0), Ordering::Relaxed);
        let namespace = identity::pid_namespace(&pid.to_string()).unwrap_or(0);
        state.namespace.store(namespace, Ordering::Relaxed);
        state
            .inner_pid
            .store(identity::inner_pid(pid).unwrap_or(0), Ordering::Relaxed);
        state
            .pid
            .store(if pid == 0 { -1 } else { pid }, Ordering::Release);
        let index = u32::try_from(slot).unwrap_or(u32::MAX);
        reply(
            &visitor,
            Reply::Granted { slot: index },
            Some(self.page.writable.as_fd()),
        );
        self.clients.push(Client {
            slot,
            process,
            connection: Some(visitor),
        });
    }
}

/// NVML's `nvmlEventTypeXidCriticalError`.
pub const XID_EVENT: u64 = 0x8;
/// The Xid of a GPU that has fallen off the bus.
const FELL_OFF_THE_BUS: u64 = 79;

/// Switches a GPU to the MIG mode that is pending, if no process has it.
fn apply_mig_mode(gpu: &GpuState) {
    if gpu.used.load(Ordering::Relaxed) == 0 {
        let pending = gpu.mig_pending.load(Ordering::Relaxed);
        gpu.mig_mode.store(pending, Ordering::Relaxed);
    }
}

/// Which of those that were watched have something to tell.
fn ready(watched: &[PollFd<'_>]) -> Vec<bool> {
    watched.iter().map(|fd| !fd.revents().is_empty()).collect()
}

fn reply(to: &OwnedFd, reply: Reply, file: Option<BorrowedFd<'_>>) {
    let mut space = [std::mem::MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    let files = file.map(|file| [file]);
    if let Some(files) = &files {
        ancillary.push(SendAncillaryMessage::ScmRights(files));
    }
    // A client that is gone does not need its answer; its end is seen elsewhere.
    let _ = sendmsg(
        to,
        &[IoSlice::new(&reply.encode())],
        &mut ancillary,
        SendFlags::NOSIGNAL | SendFlags::DONTWAIT,
    );
}

/// Whether a connection that has something to tell tells its end.
fn hung_up(connection: &OwnedFd) -> bool {
    let mut packet = [0; PACKET];
    match recv(connection, &mut packet, RecvFlags::DONTWAIT) {
        Ok((0, _)) => true,
        Ok(_) | Err(Errno::AGAIN | Errno::INTR) => false,
        Err(_) => true,
    }
}

fn open_process(pid: i32) -> Option<OwnedFd> {
    pidfd_open(Pid::from_raw(pid).filter(|_| pid > 0)?, PidfdFlags::empty()).ok()
}

/// Who is at the other end. Not rustix's, whose pid cannot be 0, which the kernel
/// gives for a process of a namespace out of sight.
fn peer(connection: &OwnedFd) -> Option<libc::ucred> {
    use std::os::fd::AsRawFd as _;
    let mut credentials = libc::ucred {
        pid: 0,
        uid: 0,
        gid: 0,
    };
    let mut length = libc::socklen_t::try_from(size_of::<libc::ucred>()).ok()?;
    // SAFETY: the option's value is a ucred; pointer and length describe ours.
    let status = unsafe {
        libc::getsockopt(
            connection.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut credentials).cast(),
            &raw mut length,
        )
    };
    (status == 0).then_some(credentials)
}
