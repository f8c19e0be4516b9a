//! The daemons of a node: one task for each device, which starts its daemon, watches it, and starts it again when it has died.
//!
//! An order for one device does not wait for another device.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep_until};
use tracing::{info, warn};
use tranche_node::root::DriverRoot;

use crate::daemon::{
    DaemonError, DaemonRecord, Running, make_folders, remove_folders, shorten_log,
};
use crate::layout::{DeviceId, Files};
use crate::limits::{LimitError, Limits};
use crate::programs::{self, ProgramsError};
use crate::protocol::{Daemon, Health};

/// How often a daemon is asked whether it answers.
const CHECK: Duration = Duration::from_secs(10);
/// If a daemon dies sooner than this, the pauses before its next starts become longer.
const STABLE: Duration = Duration::from_secs(10);
/// The first pause before a daemon that died soon is started again; it doubles.
const FIRST_PAUSE: Duration = Duration::from_millis(500);
/// The longest such pause.
const LAST_PAUSE: Duration = Duration::from_secs(30);

/// Why an order was not executed.
#[derive(Debug, thiserror::Error)]
pub enum SupervisorError {
    #[error(transparent)]
    Limit(#[from] LimitError),
    /// The driver has no MPS.
    #[error(transparent)]
    Programs(#[from] ProgramsError),
    /// The daemon or its files.
    #[error(transparent)]
    Daemon(#[from] DaemonError),
    /// The task of the device has ended.
    #[error("the supervisor is stopping")]
    Stopping,
}

/// What the supervisor needs to know of its node.
#[derive(Clone, Debug)]
pub struct Node {
    /// The folder of all files.
    pub folder: PathBuf,
    pub host: DriverRoot,
    /// The driver's root on the host, if it is given.
    pub driver_root: Option<PathBuf>,
    /// Bytes of the memory that the clients of one daemon share with it, at most.
    pub shm_size: u64,
}

/// The daemons of a node.
#[derive(Clone, Debug)]
pub struct Supervisor {
    node: Arc<Node>,
    tasks: Arc<Mutex<BTreeMap<DeviceId, Task>>>,
}

#[derive(Clone, Debug)]
struct Task {
    orders: mpsc::Sender<Order>,
    state: watch::Receiver<Option<Daemon>>,
}

#[derive(Debug)]
enum Order {
    Ensure(Limits, oneshot::Sender<Result<Daemon, SupervisorError>>),
    End(oneshot::Sender<Result<(), SupervisorError>>),
}

impl Supervisor {
    /// Adopts the daemons of an earlier supervisor, and starts those that died meanwhile.
    pub fn start(node: Node) -> Result<Self, SupervisorError> {
        let supervisor = Self {
            node: Arc::new(node),
            tasks: Arc::default(),
        };
        for device in folders(&supervisor.node.folder)? {
            let files = Files::of(&supervisor.node.folder, &device);
            match DaemonRecord::read(&files) {
                Ok(Some(record)) => {
                    supervisor.task(&device, Some(record));
                }
                // The earlier supervisor was interrupted before it wrote the record, or after it removed it.
                Ok(None) => remove_folders(&files)?,
                Err(error) => {
                    warn!(%device, %error, "the daemon of an unreadable record is left alone");
                }
            }
        }
        Ok(supervisor)
    }

    /// Ensures that a daemon serves the device with these limits and answers.
    pub async fn ensure(
        &self,
        device: &DeviceId,
        limits: Limits,
    ) -> Result<Daemon, SupervisorError> {
        let limits = limits.check()?;
        let (answer, answered) = oneshot::channel();
        let task = self.task(device, None);
        let sent = task.orders.send(Order::Ensure(limits, answer)).await;
        sent.map_err(|_| SupervisorError::Stopping)?;
        answered.await.map_err(|_| SupervisorError::Stopping)?
    }

    /// Ensures that no daemon of ours serves the device, and removes its files.
    pub async fn end(&self, device: &DeviceId) -> Result<(), SupervisorError> {
        let (answer, answered) = oneshot::channel();
        let task = self.task(device, None);
        let sent = task.orders.send(Order::End(answer)).await;
        sent.map_err(|_| SupervisorError::Stopping)?;
        answered.await.map_err(|_| SupervisorError::Stopping)?
    }

    /// The daemons, as they were seen last.
    #[must_use]
    pub fn list(&self) -> Vec<Daemon> {
        let tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        let states = tasks.values().map(|task| task.state.borrow().clone());
        states.flatten().collect()
    }

    fn task(&self, device: &DeviceId, record: Option<DaemonRecord>) -> Task {
        let mut tasks = self.tasks.lock().unwrap_or_else(PoisonError::into_inner);
        let new = || {
            let (orders, incoming) = mpsc::channel(16);
            let (shown, state) = watch::channel(None);
            let keeper = Keeper {
                files: Files::of(&self.node.folder, device),
                node: self.node.clone(),
                device: device.clone(),
                shown,
                wanted: None,
                running: None,
                health: Health::Ready,
                restarts: 0,
                since: Instant::now(),
                pause: FIRST_PAUSE,
                next: Instant::now(),
            };
            tokio::spawn(keeper.run(record, incoming));
            Task { orders, state }
        };
        tasks.entry(device.clone()).or_insert_with(new).clone()
    }
}

/// The devices that have folders.
fn folders(folder: &Path) -> Result<Vec<DeviceId>, DaemonError> {
    let refuse = |source| DaemonError::File {
        path: folder.to_owned(),
        source,
    };
    let mut devices = Vec::new();
    for entry in std::fs::read_dir(folder).map_err(refuse)? {
        let name = entry.map_err(refuse)?.file_name();
        devices.extend(
            name.into_string()
                .ok()
                .and_then(|name| name.try_into().ok()),
        );
    }
    Ok(devices)
}

/// Keeps one device's daemon running.
#[derive(Debug)]
struct Keeper {
    node: Arc<Node>,
    device: DeviceId,
    files: Files,
    shown: watch::Sender<Option<Daemon>>,
    /// What was asked for.
    wanted: Option<Limits>,
    running: Option<Running>,
    health: Health,
    restarts: u32,
    /// When the daemon was started.
    since: Instant,
    /// How long to wait after the next attempt that fails.
    pause: Duration,
    /// When to start a daemon that does not run.
    next: Instant,
}

impl Keeper {
    async fn run(mut self, record: Option<DaemonRecord>, mut orders: mpsc::Receiver<Order>) {
        if let Some(record) = record {
            self.take_over(record);
        }
        let mut checks = interval(CHECK);
        checks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            self.show();
            let is_missing = self.wanted.is_some() && self.running.is_none();
            tokio::select! {
                order = orders.recv() => match order {
                    Some(Order::Ensure(limits, answer)) => {
                        // The sender of the order may be gone.
                        let _ = answer.send(self.ensure(limits).await);
                    }
                    Some(Order::End(answer)) => {
                        let _ = answer.send(self.end().await);
                    }
                    // The supervisor stops. The daemon and its clients live on.
                    None => return,
                },
                () = ended(self.running.as_ref()) => self.bury().await,
                () = sleep_until(self.next), if is_missing => self.restart().await,
                _ = checks.tick(), if self.running.is_some() => self.check().await,
            }
        }
    }

    /// Takes over from an earlier supervisor.
    fn take_over(&mut self, record: DaemonRecord) {
        self.wanted = Some(record.limits);
        self.running = record
            .process
            .and_then(|process| Running::adopt(&self.files, process));
        match &self.running {
            Some(daemon) => {
                info!(device = %self.device, pid = daemon.pid(), "MPS control daemon adopted");
            }
            None => self.health = Health::Dead("it ended while the supervisor was away".into()),
        }
    }

    async fn ensure(&mut self, limits: Limits) -> Result<Daemon, SupervisorError> {
        let known = self.wanted;
        if let Err(error) = self.reconcile(limits).await {
            if known.is_none() {
                // There was no daemon before, so its files are removed.
                let cleared = self.clear().await;
                if let Err(problem) = cleared {
                    warn!(device = %self.device, error = %problem, "files of a daemon that did not start are left");
                }
            } else {
                self.wanted = known;
            }
            return Err(error);
        }
        self.show();
        self.daemon().ok_or(SupervisorError::Stopping)
    }

    async fn reconcile(&mut self, limits: Limits) -> Result<(), SupervisorError> {
        self.end_if_outdated().await;
        if let Some(daemon) = &self.running {
            // The limits are set each time: this fails if the daemon does not answer, and then it cannot serve a new client.
            let limited = daemon.control().limit(limits).await;
            limited.map_err(|source| DaemonError::Control {
                device: self.device.clone(),
                source,
            })?;
            self.health = Health::Ready;
            if self.wanted != Some(limits) {
                self.wanted = Some(limits);
                self.write_record()?;
            }
            return Ok(());
        }
        self.wanted = Some(limits);
        self.start_daemon(limits).await
    }

    /// Ends the daemon if the driver was updated since its start: it would start servers from files that are gone. A daemon with
    /// clients is left alone; the driver's kernel module cannot be replaced before they have ended.
    async fn end_if_outdated(&mut self) {
        let found = programs::find(&self.node.host, self.node.driver_root.as_deref());
        let (Some(daemon), Ok(programs)) = (&self.running, found) else {
            return;
        };
        if daemon.is_of(&self.files, &programs)
            || !matches!(daemon.control().has_servers().await, Ok(false))
        {
            return;
        }
        info!(device = %self.device, "the driver was updated: its MPS control daemon is started anew");
        if let Some(daemon) = self.running.take() {
            daemon.end().await;
        }
    }

    async fn start_daemon(&mut self, limits: Limits) -> Result<(), SupervisorError> {
        make_folders(&self.files, self.node.shm_size)?;
        // The record comes before the process: if this supervisor is killed now, its successor knows of the daemon.
        self.write_record()?;
        let programs = programs::find(&self.node.host, self.node.driver_root.as_deref())?;
        let begun = Instant::now();
        let daemon = Running::start(&self.device, &self.files, &programs, limits).await?;
        info!(
            device = %self.device,
            pid = daemon.pid(),
            multi_user = daemon.process().multi_user,
            milliseconds = begun.elapsed().as_millis(),
            "MPS control daemon started"
        );
        self.running = Some(daemon);
        self.since = Instant::now();
        self.health = Health::Ready;
        self.write_record()?;
        Ok(())
    }

    async fn end(&mut self) -> Result<(), SupervisorError> {
        self.clear().await?;
        info!(device = %self.device, "MPS control daemon ended");
        Ok(())
    }

    /// Ends the daemon and removes its files.
    async fn clear(&mut self) -> Result<(), SupervisorError> {
        if let Some(daemon) = self.running.take() {
            daemon.end().await;
        }
        self.wanted = None;
        self.restarts = 0;
        self.pause = FIRST_PAUSE;
        Ok(remove_folders(&self.files)?)
    }

    /// Handles the end of the daemon's process that nobody asked for.
    async fn bury(&mut self) {
        let Some(daemon) = self.running.take() else {
            return;
        };
        let reason = format!("its process {} ended", daemon.pid());
        warn!(device = %self.device, pid = daemon.pid(), "the MPS control daemon died; its clients fail");
        // This ends the servers that are left, so that their clients fail at once and no second server takes the GPU beside them.
        daemon.kill().await;
        self.health = Health::Dead(reason);
        self.restarts += 1;
        if self.since.elapsed() > STABLE {
            self.pause = FIRST_PAUSE;
            self.next = Instant::now();
        } else {
            self.postpone();
        }
    }

    fn postpone(&mut self) {
        self.next = Instant::now() + self.pause;
        self.pause = (self.pause * 2).min(LAST_PAUSE);
    }

    async fn restart(&mut self) {
        let Some(limits) = self.wanted else {
            return;
        };
        if let Err(error) = self.start_daemon(limits).await {
            warn!(device = %self.device, %error, "the MPS control daemon cannot be started again");
            self.health = Health::Dead(error.to_string());
            self.postpone();
        }
    }

    async fn check(&mut self) {
        let Some(daemon) = &self.running else {
            return;
        };
        let health = match daemon.control().is_ready().await {
            Ok(()) => Health::Ready,
            Err(error) => Health::NotAnswering(error.to_string()),
        };
        if self.health != health {
            match &health {
                Health::Ready => info!(device = %self.device, "the MPS control daemon answers"),
                Health::NotAnswering(error) | Health::Dead(error) => {
                    warn!(device = %self.device, %error, "the MPS control daemon does not answer");
                }
            }
        }
        self.health = health;
        if let Err(error) = shorten_log(&self.files) {
            warn!(device = %self.device, %error, "the log of the MPS control daemon grows");
        }
    }

    fn write_record(&self) -> Result<(), DaemonError> {
        let Some(limits) = self.wanted else {
            return Ok(());
        };
        DaemonRecord {
            limits,
            process: self.running.as_ref().map(|daemon| daemon.process().clone()),
        }
        .write(&self.files)
    }

    fn daemon(&self) -> Option<Daemon> {
        let running = self.running.as_ref();
        Some(Daemon {
            device: self.device.clone(),
            health: self.health.clone(),
            pid: running.map(Running::pid),
            limits: self.wanted?,
            multi_user: running.is_some_and(|daemon| daemon.process().multi_user),
            restarts: self.restarts,
        })
    }

    fn show(&self) {
        self.shown.send_replace(self.daemon());
    }
}

async fn ended(daemon: Option<&Running>) {
    match daemon {
        Some(daemon) => daemon.ended().await,
        None => std::future::pending().await,
    }
}
