//! Reclaims what dead processes held of their shares, and truncates pages that a tenant made
//! longer.
//!
//! A process owns its slot in the account while the kernel holds its lock; when it is dead, anyone may reclaim the
//! slot's charge. The programs of a share do so when they join, ask how much is free, or would be refused; otherwise
//! the node does it within a second.
//!
//! ```text
//!  every second, per share: copy of the header ─► marked slots ─► a lock on each?
//!                                                    all held: nothing to do
//!                                                    one is not: a process of its own maps the page and reclaims
//! ```
//!
//! Reclaiming needs atomic operations on a mapping of the page, and a tenant can end a process that maps the page by
//! truncating the file (SIGBUS). So a child process does it, one for each share: this program, started again to run
//! [`reclaim`]. A check costs a read and a lock query per process; a child is started only if a process died, or if a
//! tenant forged that.

use std::ffi::OsString;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crate::page::{AccountFile, ReadError, c_path, from_errno, truncate_page};

/// From one sweep to the next.
pub const INTERVAL: Duration = Duration::from_secs(1);

/// The time limit of a child, whose work takes microseconds.
const CHILD_DEADLINE: Duration = Duration::from_secs(5);

/// Why a share's dead slots were not reclaimed.
#[derive(Debug, thiserror::Error)]
pub enum SweepError {
    /// The page.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// The child.
    #[error("account page {path}: cannot reclaim dead processes' slots: {source}")]
    Child {
        /// The page.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
}

/// The result of a sweep.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Swept {
    /// The number of reclaimed slots.
    pub dead: usize,
    /// The length of the page in bytes before, if it was too long.
    pub cut: Option<u64>,
}

/// Sweeps accounts.
#[derive(Clone, Debug)]
pub struct Sweeper {
    program: PathBuf,
    arguments: Vec<OsString>,
}

impl Sweeper {
    /// A sweeper that starts `program` with `arguments` and the path of an account page, which calls
    /// [`reclaim`].
    pub fn new(
        program: impl Into<PathBuf>,
        arguments: impl IntoIterator<Item = impl Into<OsString>>,
    ) -> Self {
        Self {
            program: program.into(),
            arguments: arguments.into_iter().map(Into::into).collect(),
        }
    }

    /// Checks one account, truncates it to its proper length and reclaims what dead processes hold. Blocks while a
    /// child runs.
    pub fn sweep(&self, account: &Path) -> Result<Swept, SweepError> {
        let cut = truncate_page(account)?;
        let dead = AccountFile::open(account)?.dead_slots()?;
        if dead > 0 {
            self.reclaim_by_child(account)
                .map_err(|source| SweepError::Child {
                    path: account.to_owned(),
                    source,
                })?;
        }
        Ok(Swept { dead, cut })
    }

    fn reclaim_by_child(&self, account: &Path) -> io::Result<()> {
        let child = Command::new(&self.program)
            .args(&self.arguments)
            .arg(account)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        end_of(child)
    }
}

/// Waits for a child; kills it after its time limit.
fn end_of(mut child: Child) -> io::Result<()> {
    let start = Instant::now();
    loop {
        if let Some(status) = child.try_wait()? {
            return if status.success() {
                Ok(())
            } else {
                Err(io::Error::other(format!("its child: {status}")))
            };
        }
        if start.elapsed() > CHILD_DEADLINE {
            child.kill()?;
            child.wait()?;
            return Err(io::Error::from(io::ErrorKind::TimedOut));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// The child's part: maps the account and reclaims what dead processes hold. The page's tenant can
/// end the process that calls this.
pub fn reclaim(account: &Path) -> Result<usize, SweepError> {
    AccountFile::open(account)?;
    c_path(account)
        .and_then(|path| tranche_shim_runtime::accounts::reclaim(&path).map_err(from_errno))
        .map_err(|source| SweepError::Child {
            path: account.to_owned(),
            source,
        })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use tranche_shim_core::{AccountPage, Locks as _, layout};
    use tranche_shim_runtime::sys::File;

    use super::*;

    const USED: usize = 128;
    const TAKEN: usize = 512;
    const CHARGED: usize = 16;

    /// A page with the slot of a dead process that held `charged` bytes.
    fn with_a_dead(slot: usize, charged: u64) -> (tempfile::TempDir, PathBuf) {
        let mut page = AccountPage::initial().to_vec();
        let at = layout::HEADER_LEN + slot * layout::SLOT_LEN + CHARGED;
        page[USED..USED + 8].copy_from_slice(&(charged + 7).to_le_bytes());
        page[TAKEN + slot / 8] |= 1 << (slot % 8);
        page[at..at + 8].copy_from_slice(&charged.to_le_bytes());
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("account");
        fs::write(&path, page).unwrap();
        (folder, path)
    }

    #[test]
    fn what_a_dead_process_held_is_given_back() {
        let (_folder, path) = with_a_dead(900, 5 << 30);
        let account = AccountFile::open(&path).unwrap();
        assert_eq!(account.dead_slots().unwrap(), 1);
        assert_eq!(reclaim(&path).unwrap(), 1);
        assert_eq!(account.dead_slots().unwrap(), 0);
        // Also the charge that it left between its two steps.
        assert_eq!(account.copy().unwrap().snapshot().used(), 0);
    }

    #[test]
    fn what_a_living_process_holds_stays() {
        let (_folder, path) = with_a_dead(900, 5 << 30);
        let owner = File::open(&c_path(&path).unwrap(), true).unwrap();
        assert!(owner.try_lock(layout::slot_lock(900)));
        let account = AccountFile::open(&path).unwrap();
        assert_eq!(account.dead_slots().unwrap(), 0);
        assert!(account.is_in_use().unwrap());
        assert_eq!(reclaim(&path).unwrap(), 0);
        drop(owner);
        // A process that another test starts has the descriptor until it executes its program.
        let dropped = Instant::now();
        while account.is_in_use().unwrap() {
            assert!(dropped.elapsed() < Duration::from_secs(20));
        }
        assert_eq!(reclaim(&path).unwrap(), 1);
    }

    #[test]
    fn a_child_is_started_only_for_the_dead() {
        let none = Sweeper::new("/nowhere/child", ["reclaim"]);
        let (_folder, path) = with_a_dead(0, 1);
        let error = none.sweep(&path).unwrap_err().to_string();
        assert!(error.contains(path.to_str().unwrap()), "{error}");
        reclaim(&path).unwrap();
        assert_eq!(none.sweep(&path).unwrap(), Swept::default());
    }

    #[test]
    fn a_page_that_its_tenant_made_longer_is_truncated() {
        let (_folder, path) = with_a_dead(900, 5 << 30);
        let before = fs::read(&path).unwrap();
        let file = fs::File::options().write(true).open(&path).unwrap();
        let sweeper = Sweeper::new("true", [""; 0]);
        file.set_len(1 << 40).unwrap();
        let swept = Swept {
            dead: 1,
            cut: Some(1 << 40),
        };
        assert_eq!(sweeper.sweep(&path).unwrap(), swept);
        assert_eq!(fs::read(&path).unwrap(), before);
        assert_eq!(sweeper.sweep(&path).unwrap().cut, None);
        // A page that is too short cannot be repaired.
        file.set_len(100).unwrap();
        sweeper.sweep(&path).unwrap_err();
        assert_eq!(fs::read(&path).unwrap().len(), 100);
    }

    #[test]
    fn a_child_that_ends_badly_or_never_is_an_error() {
        let (_folder, path) = with_a_dead(0, 1);
        let ended = Sweeper::new("sh", ["-c", "kill -BUS $$"]).sweep(&path);
        let error = ended.unwrap_err().to_string();
        assert!(error.contains("signal: 7"), "{error}");
    }
}
