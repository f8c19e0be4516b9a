//! Whose process is it? NVML counts processes by their PID on the host; a share's processes are those
//! that have its account mapped, as the shim keeps it from a process's first use of CUDA to its end.
//!
//! `/proc/<pid>/maps` says so by device and inode, whatever namespaces and cgroups the process is in.
//! It is read once for each process, and again now and then for those that have none mapped yet.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// A file's device and inode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct FileId {
    /// `st_dev`.
    pub device: u64,
    /// `st_ino`.
    pub inode: u64,
}

impl FileId {
    /// That of the file at `path`.
    pub fn of(path: &Path) -> std::io::Result<Self> {
        use std::os::unix::fs::MetadataExt as _;
        let metadata = fs::metadata(path)?;
        Ok(Self {
            device: metadata.dev(),
            inode: metadata.ino(),
        })
    }
}

/// How long a process without a share is taken to have none, in nanoseconds.
const LOOK_NANOS: u64 = 1_000_000_000;

/// The host's processes.
#[derive(Debug)]
pub struct Processes {
    proc: PathBuf,
    known: BTreeMap<u32, Known>,
}

#[derive(Clone, Copy, Debug)]
struct Known {
    account: Option<FileId>,
    /// When it was looked at.
    at: u64,
}

impl Processes {
    /// Those of the `/proc` that is mounted at `proc`.
    pub fn new(proc: impl Into<PathBuf>) -> Self {
        Self {
            proc: proc.into(),
            known: BTreeMap::new(),
        }
    }

    /// Forgets all but these: a PID may be another process's when it comes back.
    pub fn keep(&mut self, pids: &[u32]) {
        self.known.retain(|pid, _| pids.contains(pid));
    }

    /// Which of `accounts` process `pid` has mapped, if any; `Err` where there is no such process here,
    /// as where this `/proc` is not the host's.
    pub fn account_of(
        &mut self,
        pid: u32,
        now: u64,
        accounts: &[FileId],
    ) -> std::io::Result<Option<FileId>> {
        if let Some(known) = self.known.get(&pid) {
            let holds = known
                .account
                .is_some_and(|account| accounts.contains(&account));
            if holds || now.saturating_sub(known.at) < LOOK_NANOS {
                return Ok(known.account.filter(|_| holds));
            }
        }
        let maps = fs::read_to_string(self.proc.join(pid.to_string()).join("maps"))?;
        let account = maps
            .lines()
            .filter_map(mapped)
            .find(|file| accounts.contains(file));
        self.known.insert(pid, Known { account, at: now });
        Ok(account)
    }
}

/// The file of a line of `maps`: `start-end rights offset major:minor inode path`.
fn mapped(line: &str) -> Option<FileId> {
    let mut fields = line.split_ascii_whitespace().skip(3);
    let (major, minor) = fields.next()?.split_once(':')?;
    let number = |hex| u32::from_str_radix(hex, 16).ok();
    Some(FileId {
        device: rustix::fs::makedev(number(major)?, number(minor)?),
        inode: fields.next()?.parse().ok().filter(|inode| *inode != 0)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_maps_names_its_file() {
        let line = "7f0000000000-7f0000021000 rw-s 00000000 00:2f 4711       /usr/lib/tranche/shares/gpu-0/account";
        let device = rustix::fs::makedev(0, 0x2f);
        assert_eq!(
            mapped(line),
            Some(FileId {
                device,
                inode: 4711
            })
        );
        for other in ["7f00-7f01 rw-p 00000000 00:00 0 [heap]", "", "a b c d e"] {
            assert_eq!(mapped(other), None, "{other}");
        }
    }

    #[test]
    fn a_process_has_what_it_has_mapped() {
        // This test's own executable is mapped for sure.
        let program = FileId::of(Path::new("/proc/self/exe")).unwrap();
        let other = FileId {
            device: 1,
            inode: 1,
        };
        let mut processes = Processes::new("/proc");
        let me = std::process::id();
        assert_eq!(processes.account_of(me, 0, &[other]).unwrap(), None);
        // Looked at just now; then again.
        assert_eq!(processes.account_of(me, 1, &[program]).unwrap(), None);
        let found = processes.account_of(me, LOOK_NANOS, &[other, program]);
        assert_eq!(found.unwrap(), Some(program));
        assert_eq!(
            processes.account_of(me, 0, &[program]).unwrap(),
            Some(program)
        );
        processes.keep(&[]);
        assert!(processes.known.is_empty());
        Processes::new("/nowhere")
            .account_of(me, 0, &[program])
            .unwrap_err();
    }
}
