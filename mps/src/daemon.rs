//! One control daemon: its files, its process.

use std::fs::{self, File, Permissions};
use std::io::{self, ErrorKind};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use rustix::process::{
    Pid, PidfdFlags, Signal, WaitId, WaitIdOptions, kill_process_group, pidfd_open, waitid,
};
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout};

use crate::control::{Control, ControlError};
use crate::layout::{DeviceId, Files, PIPES_IN_CONTAINER};
use crate::limits::Limits;
use crate::programs::{CONTROL, LIBCUDA, Programs, SERVER};

/// A daemon is ready after some tens of milliseconds.
const START: Duration = Duration::from_secs(5);
/// The pause between two checks whether it is ready.
const LOOK: Duration = Duration::from_millis(5);
/// How long the daemon may take to end its servers, which get one second.
const END: Duration = Duration::from_secs(4);
/// Bytes of the log that an error names.
const LOG_TAIL: usize = 400;
/// The log is on a tmpfs, and the daemon writes a few lines for each question.
const LONGEST_LOG: u64 = 1 << 20;

/// Why a daemon does not run.
#[derive(Debug, thiserror::Error)]
pub enum DaemonError {
    /// One of its files.
    #[error("{path}: {source}")]
    File { path: PathBuf, source: io::Error },
    /// It ended while it was started.
    #[error("the MPS control daemon of {device} ended at its start: {log}")]
    Ended {
        device: DeviceId,
        /// The end of its log.
        log: String,
    },
    /// It does not answer.
    #[error("the MPS control daemon of {device}: {source}")]
    Control {
        device: DeviceId,
        source: ControlError,
    },
}

fn at<T>(path: &Path, result: io::Result<T>) -> Result<T, DaemonError> {
    result.map_err(|source| DaemonError::File {
        path: path.to_owned(),
        source,
    })
}

/// What a restarted supervisor knows of a daemon. It is written before the process is started.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct DaemonRecord {
    pub limits: Limits,
    /// Its process, once there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub process: Option<Process>,
}

/// A process; its start identifies it even if its number is used again.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Process {
    /// Its number, and that of its process group.
    pub pid: i32,
    /// When it started, in clock ticks since the boot.
    pub started: u64,
    /// Whether it serves several users at a time.
    pub multi_user: bool,
    /// The program that asks it.
    pub control: PathBuf,
}

impl DaemonRecord {
    /// Reads the record; `None` if there is none.
    pub fn read(files: &Files) -> Result<Option<Self>, DaemonError> {
        let path = files.record();
        match fs::read(&path) {
            Ok(bytes) => at(&path, serde_json::from_slice(&bytes).map_err(Into::into)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
            Err(source) => Err(DaemonError::File { path, source }),
        }
    }

    /// Writes the record as a whole or not at all.
    pub fn write(&self, files: &Files) -> Result<(), DaemonError> {
        let path = files.record();
        let new = path.with_extension("new");
        let bytes = at(&path, serde_json::to_vec(self).map_err(Into::into))?;
        at(&new, fs::write(&new, bytes))?;
        at(&path, fs::rename(&new, &path))
    }
}

/// A daemon that runs.
#[derive(Debug)]
pub struct Running {
    process: Process,
    pid: Pid,
    /// A descriptor of its process, which stays valid if the number is used again.
    handle: Arc<OwnedFd>,
    /// Closed when the process ends.
    alive: watch::Receiver<()>,
    control: Control,
}

impl Running {
    /// The daemon that an earlier supervisor started; `None` if it has ended.
    #[must_use]
    pub fn adopt(files: &Files, process: Process) -> Option<Self> {
        let pid = Pid::from_raw(process.pid)?;
        let descriptor = pidfd_open(pid, PidfdFlags::empty()).ok()?;
        // Read after the descriptor is open, so that both are of one process.
        if started(pid)? != process.started {
            return None;
        }
        let handle = Arc::new(descriptor);
        Some(Self {
            pid,
            alive: watch(&handle),
            handle,
            control: Control {
                program: process.control.clone(),
                pipes: files.pipes(),
            },
            process,
        })
    }

    /// Starts a daemon. When this returns, it has answered and its limits are set.
    pub async fn start(
        device: &DeviceId,
        files: &Files,
        programs: &Programs,
        limits: Limits,
    ) -> Result<Self, DaemonError> {
        kill_strays(files).await;
        // Drivers without multi-user servers take the unknown argument for a question to a daemon, and end at once.
        let mut last = None;
        for multi_user in [true, false] {
            clear_pipes(files)?;
            let daemon = Self::spawn(device, files, programs, multi_user)?;
            match daemon.become_ready(device, files, limits).await {
                Ok(()) => return Ok(daemon),
                Err(error) => {
                    daemon.kill().await;
                    let ended = matches!(error, DaemonError::Ended { .. });
                    last = Some(error);
                    if !ended {
                        break;
                    }
                }
            }
        }
        Err(last.unwrap_or_else(|| DaemonError::Ended {
            device: device.clone(),
            log: String::new(),
        }))
    }

    fn spawn(
        device: &DeviceId,
        files: &Files,
        programs: &Programs,
        multi_user: bool,
    ) -> Result<Self, DaemonError> {
        link(files, programs)?;
        let log = files.log();
        let output = at(&log, File::options().create(true).append(true).open(&log))?;
        let errors = at(&log, output.try_clone())?;
        let own = at(Path::new("/proc/self/exe"), std::env::current_exe())?;
        let mut command = Command::new(&own);
        command
            .arg("enter")
            .arg("--pipes")
            .arg(files.pipes())
            .arg("--shm")
            .arg(files.shm())
            .arg("--")
            .arg(files.driver().join(CONTROL))
            .args(multi_user.then_some("-M"))
            .arg("-f")
            .env_clear()
            // Here it finds its server, and the server finds libcuda. They find nothing else of the driver's folders, above all no C
            // library.
            .env("PATH", files.driver())
            .env("LD_LIBRARY_PATH", files.driver())
            .env("CUDA_VISIBLE_DEVICES", device.as_str())
            .env("CUDA_MPS_PIPE_DIRECTORY", PIPES_IN_CONTAINER)
            .env("CUDA_MPS_LOG_DIRECTORY", files.logs())
            .stdin(Stdio::null())
            .stdout(output)
            .stderr(errors)
            .current_dir("/")
            // The daemon lives on if the supervisor ends, and its servers are ended with it.
            .process_group(0);
        let child = at(&own, command.spawn())?;
        let failed = || io::Error::from(ErrorKind::NotFound);
        let raw = i32::try_from(child.id()).unwrap_or_default();
        let pid = at(&own, Pid::from_raw(raw).ok_or_else(failed))?;
        // A child keeps its number until it is waited for, and that needs the descriptor.
        let descriptor = pidfd_open(pid, PidfdFlags::empty()).map_err(Into::into);
        let handle = Arc::new(at(&own, descriptor)?);
        Ok(Self {
            process: Process {
                pid: raw,
                started: started(pid).unwrap_or_default(),
                multi_user,
                control: programs.control.clone(),
            },
            pid,
            alive: watch(&handle),
            handle,
            control: Control {
                program: programs.control.clone(),
                pipes: files.pipes(),
            },
        })
    }

    async fn become_ready(
        &self,
        device: &DeviceId,
        files: &Files,
        limits: Limits,
    ) -> Result<(), DaemonError> {
        let refuse = |source| DaemonError::Control {
            device: device.clone(),
            source,
        };
        let socket = files.pipes().join("control_privileged");
        let deadline = Instant::now() + START;
        loop {
            let last = if socket.exists() {
                match self.control.is_ready().await {
                    Ok(()) => break,
                    Err(error) => Some(error),
                }
            } else {
                None
            };
            if timeout(LOOK, self.ended()).await.is_ok() {
                return Err(DaemonError::Ended {
                    device: device.clone(),
                    log: log_tail(&files.log()),
                });
            }
            if Instant::now() > deadline {
                return Err(refuse(last.unwrap_or_else(|| ControlError::TimedOut {
                    command: "get_server_list".into(),
                })));
            }
        }
        self.control.limit(limits).await.map_err(refuse)
    }

    /// Its number, in this process's PID namespace.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.process.pid.unsigned_abs()
    }

    /// What a later supervisor needs to adopt it.
    #[must_use]
    pub fn process(&self) -> &Process {
        &self.process
    }

    /// Whether it was started with these files of the driver.
    #[must_use]
    pub fn is_of(&self, files: &Files, programs: &Programs) -> bool {
        self.process.control == programs.control
            && fs::read_link(files.driver().join(LIBCUDA)).is_ok_and(|it| it == programs.libcuda)
    }

    /// Its control, which gives it commands.
    #[must_use]
    pub fn control(&self) -> &Control {
        &self.control
    }

    /// Returns when its process has ended.
    pub async fn ended(&self) {
        // Nothing is ever sent: the sender is dropped when the process has ended.
        let _ = self.alive.clone().changed().await;
    }

    /// Ends it and its servers. Its clients have ended, or fail.
    pub async fn end(self) {
        if let Err(error) = self.control.quit().await {
            tracing::warn!(pid = self.pid(), %error, "the MPS control daemon is ended by force");
        }
        if timeout(END, self.ended()).await.is_err() {
            tracing::warn!(pid = self.pid(), "the MPS control daemon is ended by force");
        }
        self.kill().await;
    }

    /// Ends the daemon and its servers by force: a server without its daemon takes no clients, and a new daemon does not know it.
    pub async fn kill(self) {
        // The number is still its own, because nobody has waited for the process.
        let _ = kill_process_group(self.pid, Signal::KILL);
        self.ended().await;
        // This fails for a process that another supervisor started: it is not our child.
        let _ = waitid(WaitId::PidFd(self.handle.as_fd()), WaitIdOptions::EXITED);
        end_group(self.pid).await;
    }
}

/// A receiver that is closed when the process has ended.
fn watch(process: &Arc<OwnedFd>) -> watch::Receiver<()> {
    let (sender, alive) = watch::channel(());
    let process = process.clone();
    // The thread ends with the process. tokio could watch the descriptor only with unsafe code.
    thread::spawn(move || {
        let mut descriptors = [PollFd::new(&*process, PollFlags::IN)];
        while poll(&mut descriptors, None) == Err(Errno::INTR) {}
        drop(sender);
    });
    alive
}

/// Ends daemons of the device that no record names: an earlier supervisor was killed just after it had started one.
async fn kill_strays(files: &Files) {
    let program = files.driver().join(CONTROL);
    let Ok(processes) = fs::read_dir("/proc") else {
        return;
    };
    for entry in processes.flatten() {
        let number = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse().ok());
        let Some(pid) = number.and_then(Pid::from_raw) else {
            continue;
        };
        // The path is one of its arguments before it becomes the daemon, and its name afterwards.
        let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let is_stray = line
            .split(|&byte| byte == 0)
            .any(|argument| argument == program.as_os_str().as_bytes());
        if is_stray {
            tracing::warn!(
                pid = pid.as_raw_nonzero(),
                "an MPS control daemon without a record is ended"
            );
            end_group(pid).await;
        }
    }
}

/// Ends a process group, and waits until it is gone.
async fn end_group(group: Pid) {
    let _ = kill_process_group(group, Signal::KILL);
    while rustix::process::test_kill_process_group(group).is_ok() {
        // Init reaps them.
        sleep(LOOK).await;
    }
}

/// The start of a process, in clock ticks since the boot: field 22 of `/proc/<pid>/stat`.
fn started(pid: Pid) -> Option<u64> {
    let stat = fs::read_to_string(format!("/proc/{}/stat", pid.as_raw_nonzero())).ok()?;
    // The name, in parentheses, may have anything in it.
    let (_, after_name) = stat.rsplit_once(')')?;
    after_name.split_ascii_whitespace().nth(19)?.parse().ok()
}

/// Makes a device's folders, which are mounted into containers; existing ones are kept.
pub fn make_folders(files: &Files, shm_size: u64) -> Result<(), DaemonError> {
    for (folder, mode) in [
        // Servers run as their clients' users, and reach the daemon by its path.
        (files.folder.clone(), 0o755),
        (files.pipes(), 0o755),
        (files.logs(), 0o755),
        (files.driver(), 0o755),
        (files.shm(), 0o1777),
    ] {
        at(&folder, fs::create_dir_all(&folder))?;
        if folder == files.shm() && !is_mount(&folder)? {
            let text = std::ffi::CString::new(format!("size={shm_size},mode=1777"));
            let options = at(&folder, text.map_err(Into::into))?;
            let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
            let mounted = mount("shm", &folder, "tmpfs", flags, options.as_c_str());
            at(&folder, mounted.map_err(Into::into))?;
        }
        at(
            &folder,
            fs::set_permissions(&folder, Permissions::from_mode(mode)),
        )?;
    }
    Ok(())
}

/// Whether the folder is on another file system than its parent.
fn is_mount(folder: &Path) -> Result<bool, DaemonError> {
    let device = |path: &Path| at(path, fs::metadata(path)).map(|metadata| metadata.dev());
    let parent = folder.parent().unwrap_or(folder);
    Ok(device(folder)? != device(parent)?)
}

/// Removes all of a device's files; succeeds if there are none.
pub fn remove_folders(files: &Files) -> Result<(), DaemonError> {
    let shm = files.shm();
    if shm.exists() && is_mount(&shm)? {
        let unmounted = unmount(&shm, UnmountFlags::DETACH);
        at(&shm, unmounted.map_err(Into::into))?;
    }
    match fs::remove_dir_all(&files.folder) {
        Err(error) if error.kind() != ErrorKind::NotFound => at(&files.folder, Err(error)),
        _ => Ok(()),
    }
}

/// Removes what a dead daemon left in the folder that containers have mounted: a client that still locks the old lock file must not
/// keep a new daemon from starting.
fn clear_pipes(files: &Files) -> Result<(), DaemonError> {
    let pipes = files.pipes();
    for entry in at(&pipes, fs::read_dir(&pipes))? {
        let path = at(&pipes, entry)?.path();
        at(&path, fs::remove_file(&path))?;
    }
    Ok(())
}

/// Links to the driver's present files.
fn link(files: &Files, programs: &Programs) -> Result<(), DaemonError> {
    for (name, target) in [
        (CONTROL, &programs.control),
        (SERVER, &programs.server),
        (LIBCUDA, &programs.libcuda),
    ] {
        let link = files.driver().join(name);
        match fs::remove_file(&link) {
            Err(error) if error.kind() != ErrorKind::NotFound => at(&link, Err(error))?,
            _ => {}
        }
        at(&link, symlink(target, &link))?;
    }
    Ok(())
}

/// Empties a log that has become long.
pub fn shorten_log(files: &Files) -> Result<(), DaemonError> {
    let log = files.log();
    let file = at(&log, File::options().write(true).open(&log))?;
    if at(&log, file.metadata())?.len() > LONGEST_LOG {
        // The daemon appends, so it continues at the new end.
        at(&log, file.set_len(0))?;
    }
    Ok(())
}

fn log_tail(log: &Path) -> String {
    let text = fs::read(log).unwrap_or_default();
    let start = text.len().saturating_sub(LOG_TAIL);
    let tail = String::from_utf8_lossy(&text[start..]);
    tail.trim().replace('\n', " | ")
}
