//! The daemon's loop: it answers libraries and frees the memory of processes that have ended.
//!
//! The pidfd of a process shows its end. Its memory is freed at the end of its connection: when the process ends or calls
//! `exec`, unless a forked child keeps the connection open. A real driver also frees memory when the last of a process's
//! files is closed.

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
use tranche_simulator_machine::description::Architecture;
use tranche_simulator_machine::layout::{GpuState, NvLinkCounter};
use tranche_simulator_machine::partitions::InstanceError;
use tranche_simulator_machine::wire::{PACKET, Reply, Request, Setting};
use tranche_simulator_machine::{Description, DriverRoot, MAX_PROCESSES, identity};

use crate::capabilities;
use crate::nodes;
use crate::page::Page;
use crate::sampler::{PERIOD, Sampler};

/// A process with a slot.
#[derive(Debug)]
struct Client {
    slot: usize,
    /// `None` for a process outside this PID namespace.
    process: Option<OwnedFd>,
    /// `None` for a process that joined with an earlier daemon.
    connection: Option<OwnedFd>,
}

struct Daemon {
    root: DriverRoot,
    page: Page,
    listener: OwnedFd,
    /// Connections that have not joined.
    unjoined: Vec<OwnedFd>,
    clients: Vec<Client>,
    sampler: Sampler,
    /// The nodes of the GPUs in persistence mode, which nvidia-persistenced keeps open.
    kept_open: Vec<Option<OwnedFd>>,
}

/// Serves the machine of `description` below `root` until the process ends.
pub fn run(root: &DriverRoot, description: &Description) -> anyhow::Result<()> {
    raise_descriptor_limit();
    take_name();
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
    capabilities::update(root, page.shared)?;
    let mut daemon = Daemon {
        root: root.clone(),
        page,
        listener,
        unjoined: Vec::new(),
        clients: Vec::new(),
        sampler: Sampler::default(),
        kept_open: Vec::new(),
    };
    daemon.keep_open();
    daemon.adopt();
    daemon.page.shared.recover();
    eprintln!(
        "nvidia-sim-persistenced: {count} simulated GPUs at {}; {} processes taken over",
        root.socket().display(),
        daemon.clients.len()
    );
    loop {
        daemon.serve_once()?;
    }
}

/// Takes the name of NVIDIA's daemon (the kernel keeps 15 bytes), for programs that list the processes with an open GPU.
fn take_name() {
    // A failure only changes such a list.
    let _ = fs::write("/proc/self/comm", "nvidia-persistenced");
}

/// Raises the limit of descriptors: the daemon needs two for every process.
fn raise_descriptor_limit() {
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    // After a failure the daemon serves fewer processes.
    let _ = setrlimit(Resource::Nofile, limit);
}

/// The socket that systemd has opened. It stays the same over a restart, so containers that have it mounted reach the next
/// daemon.
fn inherited_listener() -> Option<OwnedFd> {
    let pid: u32 = std::env::var("LISTEN_PID").ok()?.parse().ok()?;
    let count: u32 = std::env::var("LISTEN_FDS").ok()?.parse().ok()?;
    if pid != std::process::id() || count != 1 {
        return None;
    }
    // SAFETY: by systemd's protocol (sd_listen_fds(3)) descriptor 3 is this process's, and nothing else here takes it.
    Some(unsafe { OwnedFd::from_raw_fd(3) })
}

fn listen_on(root: &DriverRoot) -> anyhow::Result<OwnedFd> {
    let path = root.socket();
    let socket = new_socket()?;
    // It has another name until it listens, so that a socket with the right name can always be connected to. This daemon
    // holds the page's lock, so a file of either name is an earlier daemon's.
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
    /// Takes over the slots of an earlier daemon.
    fn adopt(&mut self) {
        for slot in 0..MAX_PROCESSES {
            let state = &self.page.shared.slots[slot];
            if state.pid.load(Ordering::Acquire) == 0 {
                continue;
            }
            let process = open_process(state.pid.load(Ordering::Acquire));
            // Opened before the check, so that a later reuse of the pid is harmless.
            if process.is_some() && state.is_alive() {
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

    /// Waits until a client needs something, or for a sampling period, and serves it.
    fn serve_once(&mut self) -> anyhow::Result<()> {
        let mut watched: Vec<PollFd<'_>> = Vec::with_capacity(2 * self.clients.len() + 8);
        watched.push(PollFd::new(&self.listener, PollFlags::IN));
        for connection in &self.unjoined {
            watched.push(PollFd::new(connection, PollFlags::IN));
        }
        self.watch_clients(&mut watched);
        let timeout = Timespec {
            tv_sec: 0,
            tv_nsec: i64::from(PERIOD.subsec_nanos()),
        };
        // Without clients there is nothing to sample.
        let timeout = (!self.clients.is_empty()).then_some(&timeout);
        match poll(&mut watched, timeout) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(error) => return Err(error).context("waiting for clients"),
        }
        let ready = ready(&watched);
        drop(watched);
        let unjoined = self.unjoined.len();
        self.free_ended(&ready[1 + unjoined..]);
        self.answer_unjoined(&ready[1..=unjoined])?;
        if ready[0] {
            self.accept()?;
        }
        if !self.clients.is_empty() {
            let slots: Vec<usize> = self.clients.iter().map(|c| c.slot).collect();
            self.sampler.sample(self.page.shared, &slots);
        }
        Ok(())
    }

    /// Adds two entries for each client. If a client lacks one, the entry is the listener, polled for no event.
    fn watch_clients<'a>(&'a self, watched: &mut Vec<PollFd<'a>>) {
        for client in &self.clients {
            for watched_fd in [&client.process, &client.connection] {
                watched.push(match watched_fd {
                    Some(fd) => PollFd::new(fd, PollFlags::IN),
                    None => PollFd::new(&self.listener, PollFlags::empty()),
                });
            }
        }
    }

    /// Frees at once the memory of processes that have ended.
    fn reclaim(&mut self) -> anyhow::Result<()> {
        let mut watched = Vec::with_capacity(2 * self.clients.len());
        self.watch_clients(&mut watched);
        retry_on_intr(|| poll(&mut watched, Some(&Timespec::default())))
            .context("finding clients that have ended")?;
        let ready = ready(&watched);
        drop(watched);
        self.free_ended(&ready);
        Ok(())
    }

    /// Frees the memory of the processes that have ended. `ready` has the state of two descriptors per client.
    fn free_ended(&mut self, ready: &[bool]) {
        let shared = self.page.shared;
        let mut ends = ready.chunks_exact(2);
        self.clients.retain_mut(|client| {
            let [process, connection] = ends.next().unwrap_or(&[false, false]) else {
                return true;
            };
            let closed = match &client.connection {
                Some(open) => *connection && has_ended(open),
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
        self.switch_idle_gpus();
        if self.clients.is_empty() {
            for gpu in shared.gpus() {
                gpu.utilization.store(0, Ordering::Relaxed);
            }
        }
    }

    /// Applies pending MIG modes of GPUs that nothing uses any more.
    fn switch_idle_gpus(&self) {
        let shared = self.page.shared;
        for (index, gpu) in shared.gpus().iter().enumerate() {
            if gpu.switches_mig_mode_when_idle() {
                shared.apply_idle_mig_mode(index);
            }
        }
    }

    /// Answers the connections that have sent a request.
    fn answer_unjoined(&mut self, ready: &[bool]) -> anyhow::Result<()> {
        let unjoined = std::mem::take(&mut self.unjoined);
        for (index, connection) in unjoined.into_iter().enumerate() {
            if !ready.get(index).copied().unwrap_or(false) {
                self.unjoined.push(connection);
                continue;
            }
            let mut packet = [0; PACKET];
            match recv(&connection, &mut packet, RecvFlags::DONTWAIT) {
                Ok((length, _)) if length > 0 => self.answer(connection, &packet[..length])?,
                Err(Errno::AGAIN | Errno::INTR) => self.unjoined.push(connection),
                // The connection has ended or failed.
                _ => {}
            }
        }
        Ok(())
    }

    fn accept(&mut self) -> anyhow::Result<()> {
        match accept_with(&self.listener, SocketFlags::CLOEXEC) {
            Ok(connection) => self.unjoined.push(connection),
            Err(Errno::AGAIN | Errno::INTR | Errno::CONNABORTED) => {}
            // Out of descriptors: closes the oldest connection that has not joined.
            Err(Errno::MFILE | Errno::NFILE) if !self.unjoined.is_empty() => {
                self.unjoined.remove(0);
            }
            Err(error) => return Err(error).context("accepting a client"),
        }
        Ok(())
    }

    fn answer(&mut self, connection: OwnedFd, packet: &[u8]) -> anyhow::Result<()> {
        let Some(request) = Request::decode(packet) else {
            reply(&connection, Reply::Mismatch, None);
            return Ok(());
        };
        match request {
            Request::Observe => {
                reply(
                    &connection,
                    Reply::Granted { slot: 0 },
                    Some(self.page.readable.as_fd()),
                );
            }
            Request::Join => self.join(connection),
            Request::Reclaim => {
                self.reclaim()?;
                reply(&connection, Reply::Granted { slot: 0 }, None);
            }
            Request::Set {
                gpu,
                setting,
                value,
            } => {
                let answer = if peer(&connection).is_some_and(|p| p.uid == 0) {
                    self.set(gpu, setting, value)
                } else {
                    Reply::Forbidden
                };
                reply(&connection, answer, None);
            }
            Request::Event { gpu, kind, data } => {
                let answer = if peer(&connection).is_none_or(|p| p.uid != 0) {
                    Reply::Forbidden
                } else if gpu as usize >= self.page.shared.gpus().len() {
                    Reply::Invalid
                } else {
                    let (index, kind, data) = (gpu as usize, u64::from(kind), u64::from(data));
                    if kind == XID_EVENT {
                        self.publish_xid(index, data);
                    } else {
                        self.page.shared.publish_event(index, kind, data);
                    }
                    Reply::Granted { slot: 0 }
                };
                reply(&connection, answer, None);
            }
            Request::CountNvLink {
                gpu,
                counter,
                amount,
            } => {
                let answer = if peer(&connection).is_none_or(|p| p.uid != 0) {
                    Reply::Forbidden
                } else {
                    self.count_nvlink(gpu, counter, amount)
                };
                reply(&connection, answer, None);
            }
            Request::CreateGpuInstance { .. }
            | Request::DestroyGpuInstance { .. }
            | Request::CreateComputeInstance { .. }
            | Request::DestroyComputeInstance { .. } => {
                let answer = self.change_instances(request);
                self.switch_idle_gpus();
                // The library reads the files after the answer, so they must exist before it.
                self.update_capabilities();
                reply(&connection, answer, None);
            }
        }
        Ok(())
    }

    fn count_nvlink(&self, gpu: u32, counter: NvLinkCounter, amount: u32) -> Reply {
        match self.page.shared.gpus().get(gpu as usize) {
            None => Reply::Invalid,
            Some(state) if state.nvlinks == 0 => Reply::NotSupported,
            Some(state) => {
                state.nvlink[counter as usize].fetch_add(amount.into(), Ordering::Relaxed);
                Reply::Granted { slot: 0 }
            }
        }
    }

    /// Creates or destroys a MIG instance. The library checks the permission.
    fn change_instances(&self, request: Request) -> Reply {
        let shared = self.page.shared;
        let index = |gpu: u32| gpu as usize;
        let done = match request {
            Request::CreateGpuInstance { gpu, kind, start } => {
                shared.create_gpu_instance(index(gpu), kind, start)
            }
            Request::DestroyGpuInstance { gpu, instance } => shared
                .destroy_gpu_instance(index(gpu), instance)
                .map(|()| 0),
            Request::CreateComputeInstance {
                gpu,
                instance,
                kind,
                start,
            } => shared.create_compute_instance(index(gpu), instance, kind, start),
            Request::DestroyComputeInstance {
                gpu,
                instance,
                compute,
            } => shared
                .destroy_compute_instance(index(gpu), instance, compute)
                .map(|()| 0),
            _ => return Reply::Invalid,
        };
        done.map_or_else(refusal, |slot| Reply::Granted { slot })
    }

    fn set(&mut self, gpu: u32, setting: Setting, value: u32) -> Reply {
        let reply = self.change(gpu, setting, value);
        self.keep_open();
        reply
    }

    fn keep_open(&mut self) {
        let gpus = self.page.shared.gpus();
        self.kept_open.resize_with(gpus.len(), || None);
        for (gpu, kept) in gpus.iter().zip(&mut self.kept_open) {
            if gpu.persistence.load(Ordering::Relaxed) == 0 {
                *kept = None;
            } else if kept.is_none() {
                *kept = self.root.open_node(&format!("nvidia{}", gpu.minor));
            }
        }
    }

    fn change(&self, gpu: u32, setting: Setting, value: u32) -> Reply {
        let index = gpu as usize;
        let Some(gpu) = self.page.shared.gpus().get(index) else {
            return Reply::Invalid;
        };
        let (word, most) = match setting {
            Setting::Persistence => (&gpu.persistence, 1),
            Setting::ComputeMode => (&gpu.compute_mode, 3),
            Setting::TimeSlice => (&gpu.time_slice, 3),
            Setting::MigMode => (&gpu.mig_pending, 1),
            Setting::Lost => (&gpu.lost, 1),
            Setting::Reset => return self.reset(index),
            Setting::Driver if gpu.is_bound() == (value != 0) => return Reply::Granted { slot: 0 },
            Setting::Driver => {
                gpu.persistence.store(0, Ordering::Relaxed);
                gpu.unbound.store(u32::from(value == 0), Ordering::Relaxed);
                return self.reset(index);
            }
        };
        if value > most || (setting == Setting::MigMode && gpu.model().is_none()) {
            return Reply::Invalid;
        }
        word.store(value, Ordering::Relaxed);
        match setting {
            Setting::MigMode => self.page.shared.apply_idle_mig_mode(index),
            Setting::Lost if value == 1 => self.publish_xid(index, FELL_OFF_THE_BUS),
            Setting::Lost => gpu.recovery_action.store(0, Ordering::Relaxed),
            _ => {}
        }
        Reply::Granted { slot: 0 }
    }

    /// Publishes an Xid with what the driver says after it: the state of row remapping and the recovery action, whose changes
    /// are Xids, too.
    fn publish_xid(&self, index: usize, xid: u64) {
        let shared = self.page.shared;
        shared.publish_event(index, XID_EVENT, xid);
        let Some(gpu) = shared.gpus().get(index) else {
            return;
        };
        if gpu.architecture >= Architecture::Ampere as u32 {
            match xid {
                63 => gpu.remap_pending.store(1, Ordering::Relaxed),
                64 => gpu.remap_failed.store(1, Ordering::Relaxed),
                _ => {}
            }
        }
        let action = match xid {
            79 => NODE_REBOOT,
            46 | 48 | 62 | 95 | 109 | 110 | 119 | 120 | 140 | 143 | 158 => GPU_RESET,
            _ => return,
        };
        if GpuState::reports_recovery(shared.header.driver_version.as_str()) {
            let before = gpu.recovery_action.fetch_max(action, Ordering::Relaxed);
            if before < action {
                shared.publish_event(index, XID_EVENT, RECOVERY_ACTION_CHANGED);
            }
        }
    }

    fn reset(&self, gpu: usize) -> Reply {
        match self.page.shared.reset_gpu(gpu) {
            Ok(()) => {
                self.update_capabilities();
                Reply::Granted { slot: 0 }
            }
            Err(error) => refusal(error),
        }
    }

    fn update_capabilities(&self) {
        // Without them only an administrator can use the instances; programs that run are not affected.
        if let Err(error) = capabilities::update(&self.root, self.page.shared) {
            eprintln!("nvidia-sim-persistenced: MIG capabilities: {error:#}");
        }
    }

    fn join(&mut self, connection: OwnedFd) {
        let shared = self.page.shared;
        let free = shared
            .slots
            .iter()
            .position(|s| s.pid.load(Ordering::Acquire) == 0);
        let Some(slot) = free else {
            reply(&connection, Reply::Full, None);
            return;
        };
        // A peer outside this PID namespace has pid 0. Only its connection shows its end, and its slot has pid -1.
        let pid = peer(&connection).map_or(0, |p| p.pid);
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
            &connection,
            Reply::Granted { slot: index },
            Some(self.page.writable.as_fd()),
        );
        self.clients.push(Client {
            slot,
            process,
            connection: Some(connection),
        });
    }
}

/// NVML's `nvmlEventTypeXidCriticalError`.
pub const XID_EVENT: u64 = 0x8;
/// The Xid of a change of the recovery action.
const RECOVERY_ACTION_CHANGED: u64 = 154;
/// `NVML_GPU_RECOVERY_ACTION_GPU_RESET`.
const GPU_RESET: u32 = 1;
/// `NVML_GPU_RECOVERY_ACTION_NODE_REBOOT`.
const NODE_REBOOT: u32 = 2;
/// The Xid of a GPU that has fallen off the bus.
const FELL_OFF_THE_BUS: u64 = 79;

fn refusal(error: InstanceError) -> Reply {
    match error {
        InstanceError::NotSupported => Reply::NotSupported,
        InstanceError::NotFound => Reply::NotFound,
        InstanceError::Invalid => Reply::Invalid,
        InstanceError::InsufficientResources => Reply::InsufficientResources,
        InstanceError::InUse | InstanceError::Stuck => Reply::InUse,
    }
}

/// Which of the polled descriptors have an event.
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
    // A client that has ended needs no answer.
    let _ = sendmsg(
        to,
        &[IoSlice::new(&reply.encode())],
        &mut ancillary,
        SendFlags::NOSIGNAL | SendFlags::DONTWAIT,
    );
}

/// Whether a connection that has an event has ended.
fn has_ended(connection: &OwnedFd) -> bool {
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

/// The process at the other end. rustix's function is not used: its pid cannot be 0, which the kernel returns for a process
/// outside this PID namespace.
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
