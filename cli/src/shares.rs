//! A user's shares on this machine: one folder each, below a folder of the user on tmpfs.
//!
//! ```text
//!  <base>/lock                     held while shares are created, joined and removed
//!  <base>/sampler                  locked by the supervisor that samples all shares
//!  <base>/contexts                 the sizes of CUDA contexts that supervisors measured
//!  <base>/<share>/record           its sizes and GPU
//!  <base>/<share>/members          locked, shared, by the supervisor of every command in it
//!  <base>/<share>/command-<pid>    a command in it
//!  <base>/<share>/<key>/cap        the pages, as in a claim's folder
//!  <base>/<share>/<key>/account
//!  <base>/<share>/lib/             our libraries and the preload list
//!  <base>/<share>/stage/           empty; commands build their mounts on it
//! ```
//!
//! A lock ends with its process. So a share is in use while a process holds its members' lock or a
//! slot of its account, and the next `tranche run` removes shares that are not in use.

use std::fs::{self, DirBuilder, File, TryLockError};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rustix::io::Errno;
use rustix::process::geteuid;
use tranche_driver::journal::ClaimRecord;
use tranche_node::page::AccountFile;

/// The files beside the shares' folders.
const LOCK: &str = "lock";
const SAMPLER: &str = "sampler";
pub const CONTEXTS: &str = "contexts";

/// Reserved names. A share called `sampler` would prevent the sampling of every share.
pub const TAKEN: [&str; 3] = [LOCK, SAMPLER, CONTEXTS];

/// The prefix of a command's file.
const COMMAND: &str = "command-";

/// File system magic of tmpfs, as statfs(2) has it.
const TMPFS: i64 = 0x0102_1994;

/// An error with a path.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    #[error("{path}: {source}")]
    Io { path: PathBuf, source: io::Error },
    #[error(
        "no folder for the pages of shares: none of {0} is on a tmpfs: set XDG_RUNTIME_DIR to a folder on a tmpfs"
    )]
    NoTmpfs(String),
    #[error(
        "{path}: it is not a private folder of user {user}: remove it, another user may have made it"
    )]
    NotOurs { path: PathBuf, user: u32 },
    #[error("{path}: {source}: remove the folder if no command of the share runs any more")]
    Record {
        path: PathBuf,
        source: tranche_driver::journal::JournalError,
    },
}

fn at(path: &Path) -> impl FnOnce(io::Error) -> StateError {
    let path = path.to_owned();
    move |source| StateError::Io { path, source }
}

/// All shares of the user.
#[derive(Debug)]
pub struct Shares {
    base: PathBuf,
}

/// The shares, locked so that no other process changes them.
#[derive(Debug)]
pub struct Locked<'a> {
    base: &'a Path,
    _lock: File,
}

/// A share that this process is a member of.
#[derive(Debug)]
pub struct Membership {
    folder: PathBuf,
    members: File,
    command: PathBuf,
}

/// A share in use.
#[derive(Debug)]
pub struct InUse {
    pub record: ClaimRecord,
    /// Whether its commands have ended, so that it ends soon unless they left processes behind.
    pub ended: bool,
}

impl Shares {
    /// The shares of the calling user.
    pub fn of_user() -> Result<Self, StateError> {
        let user = geteuid().as_raw();
        let candidates = candidates(user);
        for (parent, below) in &candidates {
            if is_tmpfs(parent) {
                return Self::below(parent, below);
            }
        }
        let tried: Vec<_> = candidates
            .iter()
            .map(|(parent, _)| parent.display().to_string())
            .collect();
        Err(StateError::NoTmpfs(tried.join(", ")))
    }

    /// The shares in a folder of the user below `parent`.
    fn below(parent: &Path, below: &[String]) -> Result<Self, StateError> {
        let mut base = parent.to_owned();
        for folder in below {
            base.push(folder);
            own_folder(&base)?;
        }
        Ok(Self { base })
    }

    /// Locks the shares; waits while another process has locked them.
    pub fn lock(&self) -> Result<Locked<'_>, StateError> {
        let path = self.base.join(LOCK);
        let lock = open(&path)?;
        lock.lock().map_err(at(&path))?;
        Ok(Locked {
            base: &self.base,
            _lock: lock,
        })
    }

    /// Takes the lock of the process that samples all shares, if it is free.
    pub fn try_lock_sampler(&self) -> Option<File> {
        let lock = open(&self.base.join(SAMPLER)).ok()?;
        lock.try_lock().ok().map(|()| lock)
    }

    /// The common folder of the shares, which corresponds to a claim's folder.
    pub fn base(&self) -> &Path {
        &self.base
    }
}

/// Possible places of the shares: a folder that should be on a tmpfs, and the user's folder below
/// it.
fn candidates(user: u32) -> Vec<(PathBuf, Vec<String>)> {
    let ours = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect();
    let mut candidates = Vec::new();
    if user == 0 {
        candidates.push(("/run".into(), ours(&["tranche", "run"])));
    } else {
        let runtime = std::env::var_os("XDG_RUNTIME_DIR")
            .map_or_else(|| format!("/run/user/{user}").into(), PathBuf::from);
        candidates.push((runtime, ours(&["tranche", "run"])));
    }
    // Without a login session, as in many batch jobs, or if /run is not a tmpfs.
    candidates.push(("/dev/shm".into(), vec![format!("tranche-run-{user}")]));
    candidates
}

fn is_tmpfs(path: &Path) -> bool {
    rustix::fs::statfs(path).is_ok_and(|found| found.f_type == TMPFS)
}

/// Makes a private folder of the user, or checks an existing one.
fn own_folder(path: &Path) -> Result<(), StateError> {
    match DirBuilder::new().mode(0o711).create(path) {
        Err(e) if e.kind() != io::ErrorKind::AlreadyExists => return Err(at(path)(e)),
        _ => {}
    }
    let found = fs::symlink_metadata(path).map_err(at(path))?;
    let user = geteuid().as_raw();
    if found.is_dir() && found.uid() == user && found.mode() & 0o022 == 0 {
        return Ok(());
    }
    Err(StateError::NotOurs {
        path: path.to_owned(),
        user,
    })
}

fn open(path: &Path) -> Result<File, StateError> {
    File::options()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(path)
        .map_err(at(path))
}

impl Locked<'_> {
    /// The records of all shares in use, by name. Shares that are not in use are removed.
    pub fn in_use(&self) -> Result<Vec<InUse>, StateError> {
        let mut records = Vec::new();
        for entry in fs::read_dir(self.base).map_err(at(self.base))? {
            let folder = entry.map_err(at(self.base))?.path();
            if !folder.is_dir() {
                continue;
            }
            if is_in_use(&folder)? {
                let path = folder.join("record");
                let bytes = fs::read(&path).map_err(at(&path))?;
                let record = ClaimRecord::decode(&bytes)
                    .map_err(|source| StateError::Record { path, source })?;
                let ended = commands(&folder).all(|pid| !is_alive(pid));
                records.push(InUse { record, ended });
            } else {
                fs::remove_dir_all(&folder).map_err(at(&folder))?;
            }
        }
        Ok(records)
    }

    /// Makes the folder of a new share with `files`, and becomes its first member.
    pub fn create(
        &self,
        name: &str,
        pid: i32,
        record: &ClaimRecord,
        files: &[(PathBuf, Vec<u8>, u32)],
    ) -> Result<Membership, StateError> {
        let folder = self.base.join(name);
        let made = || {
            own_folder(&folder)?;
            own_folder(&folder.join("stage"))?;
            let membership = self.join(name, pid)?;
            for (path, content, mode) in files {
                let path = folder.join(path);
                if let Some(parent) = path.parent() {
                    let mut builder = DirBuilder::new();
                    builder.recursive(true).mode(0o711);
                    builder.create(parent).map_err(at(parent))?;
                }
                write(&path, content, *mode)?;
            }
            // Written last: it makes the share complete.
            write(&folder.join("record"), &record.encode(), 0o600)?;
            Ok(membership)
        };
        made().inspect_err(|_| {
            let _ = fs::remove_dir_all(&folder);
        })
    }

    /// Becomes a member of a share that exists, for the command `pid`.
    pub fn join(&self, name: &str, pid: i32) -> Result<Membership, StateError> {
        let folder = self.base.join(name);
        let path = folder.join("members");
        let members = open(&path)?;
        members.lock_shared().map_err(at(&path))?;
        let command = folder.join(format!("{COMMAND}{pid}"));
        write(&command, &[], 0o600)?;
        Ok(Membership {
            folder,
            members,
            command,
        })
    }

    /// Ends a membership, and with the last one the share. The last member gets its membership back
    /// while processes of the share live, because it must maintain the share for them.
    #[expect(clippy::unused_self, reason = "the shares are locked meanwhile")]
    pub fn leave(&self, membership: Membership) -> Result<Option<Membership>, StateError> {
        let folder = &membership.folder;
        // It does not exist at a second call.
        let _ = fs::remove_file(&membership.command);
        membership.members.unlock().map_err(at(folder))?;
        if membership.members.try_lock().is_err() {
            return Ok(None);
        }
        if account(folder).is_some_and(|path| has_processes(&path)) {
            membership.members.lock_shared().map_err(at(folder))?;
            return Ok(Some(membership));
        }
        fs::remove_dir_all(folder).map_err(at(folder))?;
        Ok(None)
    }
}

fn write(path: &Path, content: &[u8], mode: u32) -> Result<(), StateError> {
    fs::write(path, content).map_err(at(path))?;
    let mode = std::os::unix::fs::PermissionsExt::from_mode(mode);
    fs::set_permissions(path, mode).map_err(at(path))
}

/// Whether the share has a member or a process with a slot in its account: a command whose
/// supervisor was killed, or a child that outlived both.
fn is_in_use(folder: &Path) -> Result<bool, StateError> {
    let path = folder.join("members");
    let members = open(&path)?;
    match members.try_lock() {
        Ok(()) => Ok(account(folder).is_some_and(|path| has_processes(&path))),
        Err(TryLockError::WouldBlock) => Ok(true),
        Err(TryLockError::Error(source)) => Err(StateError::Io { path, source }),
    }
}

/// Whether a living process has a slot of this account.
pub fn has_processes(account: &Path) -> bool {
    AccountFile::open(account).is_ok_and(|account| account.is_in_use().unwrap_or(false))
}

/// The commands in a share.
fn commands(folder: &Path) -> impl Iterator<Item = i32> {
    let entries = fs::read_dir(folder).ok().into_iter().flatten().flatten();
    entries.filter_map(|entry| {
        let name = entry.file_name();
        name.to_str()?.strip_prefix(COMMAND)?.parse().ok()
    })
}

fn is_alive(pid: i32) -> bool {
    rustix::process::Pid::from_raw(pid)
        .is_some_and(|pid| rustix::process::test_kill_process(pid) != Err(Errno::SRCH))
}

/// The account page in a share's folder.
fn account(folder: &Path) -> Option<PathBuf> {
    fs::read_dir(folder)
        .ok()?
        .filter_map(|entry| Some(entry.ok()?.path().join(tranche_shim_core::paths::ACCOUNT)))
        .find(|path| path.exists())
}

impl Membership {
    pub fn folder(&self) -> &Path {
        &self.folder
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use tranche_driver::claim::Allocation;
    use tranche_driver::preparation::{PAGES, PreparationPlan};

    use super::*;

    const OUR_PID: i32 = 1;

    fn record(name: &str) -> ClaimRecord {
        let plan = PreparationPlan {
            pages: PAGES,
            allocation: Allocation {
                uid: name.into(),
                namespace: "run".into(),
                name: name.into(),
                pod_claim_name: None,
                devices: Vec::new(),
            },
            devices: Vec::new(),
            steps: Vec::new(),
        };
        ClaimRecord::new(plan, None)
    }

    fn shares() -> (tempfile::TempDir, Shares) {
        let folder = tempfile::tempdir().unwrap();
        let shares = Shares::below(folder.path(), &["x".to_owned(), "run".to_owned()]).unwrap();
        (folder, shares)
    }

    fn names(shares: &Shares) -> Vec<String> {
        let used = shares.lock().unwrap().in_use().unwrap();
        used.iter()
            .map(|r| r.record.plan.allocation.uid.clone())
            .collect()
    }

    #[test]
    fn the_last_to_leave_removes_the_share() {
        let (_folder, shares) = shares();
        let files = [("key/cap".into(), vec![1], 0o444)];
        let first = shares
            .lock()
            .unwrap()
            .create("a", OUR_PID, &record("a"), &files)
            .unwrap();
        let folder = first.folder().to_owned();
        assert_eq!(fs::read(folder.join("key/cap")).unwrap(), [1]);
        let second = shares.lock().unwrap().join("a", OUR_PID).unwrap();
        assert!(shares.lock().unwrap().leave(first).unwrap().is_none());
        assert_eq!(names(&shares), ["a"]);
        assert!(shares.lock().unwrap().leave(second).unwrap().is_none());
        assert!(!folder.exists());
    }

    #[test]
    fn the_next_run_removes_the_share_of_a_killed_supervisor() {
        let (_folder, shares) = shares();
        let member = shares
            .lock()
            .unwrap()
            .create("a", OUR_PID, &record("a"), &[])
            .unwrap();
        // Its locks end with it, but its folder stays.
        let folder = member.folder().to_owned();
        drop(member);
        assert!(folder.exists());
        // A process that another test starts has the locks until it executes its program.
        let dropped = Instant::now();
        while !names(&shares).is_empty() {
            assert!(dropped.elapsed() < Duration::from_secs(20));
        }
        assert!(!folder.exists());
    }

    #[test]
    fn a_share_whose_commands_have_ended_is_marked_as_ending() {
        let (_folder, shares) = shares();
        let mut command = std::process::Command::new("true").spawn().unwrap();
        let pid = i32::try_from(command.id()).unwrap();
        let create = |locked: Locked<'_>| locked.create("a", pid, &record("a"), &[]).unwrap();
        let member = create(shares.lock().unwrap());
        let ended = || shares.lock().unwrap().in_use().unwrap()[0].ended;
        assert!(!ended(), "a zombie has not been waited for");
        command.wait().unwrap();
        assert!(ended());
        drop(member);
    }

    #[test]
    fn a_share_that_cannot_be_created_whole_is_removed() {
        let (_folder, shares) = shares();
        let blocked = [("members/x".into(), vec![], 0o444)];
        let error = shares
            .lock()
            .unwrap()
            .create("a", OUR_PID, &record("a"), &blocked)
            .unwrap_err();
        assert!(error.to_string().contains("a/members"), "{error}");
        assert!(!shares.base().join("a").exists());
    }

    #[test]
    fn a_folder_that_others_could_change_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("open");
        fs::create_dir(&path).unwrap();
        let mode = std::os::unix::fs::PermissionsExt::from_mode(0o777);
        fs::set_permissions(&path, mode).unwrap();
        let error = Shares::below(folder.path(), &["open".to_owned()]).unwrap_err();
        assert!(error.to_string().contains("private folder"), "{error}");
        std::os::unix::fs::symlink("/tmp", folder.path().join("link")).unwrap();
        Shares::below(folder.path(), &["link".to_owned()]).unwrap_err();
    }
}
