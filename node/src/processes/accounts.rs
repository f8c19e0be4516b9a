//! Finds the shares of processes. NVML reports PIDs of the host; a share's processes are those that
//! have its account mapped, which the shim does from a process's first use of CUDA to its end.
//!
//! `/proc/<pid>/maps` shows that by device and inode, in any namespaces and cgroups. It is read once
//! for each process, and again at intervals for processes that have no account mapped yet. A tenant
//! controls its text: it may be of any length, with names that are not UTF-8.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, BufRead as _, BufReader, Read as _};
use std::os::unix::fs::MetadataExt as _;
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
    /// The ID of the file at `path`.
    pub fn of(path: &Path) -> std::io::Result<Self> {
        Ok(Self::from(&fs::metadata(path)?))
    }
}

impl From<&fs::Metadata> for FileId {
    fn from(metadata: &fs::Metadata) -> Self {
        Self {
            device: metadata.dev(),
            inode: metadata.ino(),
        }
    }
}

/// For how many nanoseconds a process without a share is not read again.
const CHECK_NANOS: u64 = 1_000_000_000;

/// The same for a process whose maps are too long to be read to their end, because reading them
/// takes long.
const LONG_NANOS: u64 = 60 * CHECK_NANOS;

/// A process that nobody asks about for this many nanoseconds has ended: a working process has a sample every second.
const ENDED_NANOS: u64 = 2 * CHECK_NANOS;

/// The most bytes that are read of a process's maps: as many lines as the kernel allows by default,
/// at twice their usual length.
const MOST_BYTES: u64 = 16 << 20;

/// How much of a line is parsed: the part before the name is shorter.
const LINE: u64 = 256;

/// The host's processes.
#[derive(Debug)]
pub struct Processes {
    proc: PathBuf,
    known: BTreeMap<u32, KnownProcess>,
}

#[derive(Clone, Debug)]
struct KnownProcess {
    accounts: Vec<FileId>,
    /// When it is read again, if it has none.
    again: u64,
    /// When somebody last asked about it.
    asked: u64,
}

impl Processes {
    /// The processes of the `/proc` that is mounted at `proc`.
    pub fn new(proc: impl Into<PathBuf>) -> Self {
        Self {
            proc: proc.into(),
            known: BTreeMap::new(),
        }
    }

    /// Forgets the processes that nobody has asked about in the last [`ENDED_NANOS`]: they have ended, and their PIDs
    /// may be reused.
    pub fn forget_ended(&mut self, now: u64) {
        self.known
            .retain(|_, known| now.saturating_sub(known.asked) < ENDED_NANOS);
    }

    /// Which of `accounts` process `pid` has mapped; empty also if its maps cannot be read because it belongs to
    /// another user. `None` if it has ended, or this `/proc` is not the host's.
    pub fn accounts_of(&mut self, pid: u32, now: u64, accounts: &[FileId]) -> Option<Vec<FileId>> {
        if let Some(known) = self.known.get_mut(&pid) {
            known.asked = now;
            let held: Vec<_> = known
                .accounts
                .iter()
                .copied()
                .filter(|held| accounts.contains(held))
                .collect();
            if !held.is_empty() || now < known.again {
                return Some(held);
            }
        }
        let maps = self.proc.join(pid.to_string()).join("maps");
        let mut found = Vec::new();
        let wait = match find(&maps, accounts, &mut found) {
            Ok(Read::TooLong) => LONG_NANOS,
            Err(error) if has_ended(&error) => return None,
            Ok(Read::All) | Err(_) => CHECK_NANOS,
        };
        let known = KnownProcess {
            accounts: found.clone(),
            again: now.saturating_add(wait),
            asked: now,
        };
        self.known.insert(pid, known);
        Some(found)
    }
}

/// Whether reading a process's maps failed because it has ended.
fn has_ended(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound
        || error.raw_os_error() == Some(rustix::io::Errno::SRCH.raw_os_error())
}

enum Read {
    All,
    TooLong,
}

/// Adds each of `accounts` that is in the file `maps` to `found`, once.
fn find(maps: &Path, accounts: &[FileId], found: &mut Vec<FileId>) -> io::Result<Read> {
    let mut maps = BufReader::new(File::open(maps)?.take(MOST_BYTES));
    let mut line = Vec::new();
    loop {
        line.clear();
        maps.by_ref().take(LINE).read_until(b'\n', &mut line)?;
        if line.is_empty() {
            let all = maps.get_ref().limit() > 0;
            return Ok(if all { Read::All } else { Read::TooLong });
        }
        if let Some(file) = mapped(&line).filter(|file| accounts.contains(file))
            && !found.contains(&file)
        {
            found.push(file);
        }
        if !line.ends_with(b"\n") {
            maps.skip_until(b'\n')?;
        }
    }
}

/// The file of a line of `maps`: `start-end rights offset major:minor inode path`.
fn mapped(line: &[u8]) -> Option<FileId> {
    let mut fields = line
        .split(u8::is_ascii_whitespace)
        .filter(|field| !field.is_empty())
        .skip(3);
    let mut field = || str::from_utf8(fields.next()?).ok();
    let (major, minor) = field()?.split_once(':')?;
    let number = |hex| u32::from_str_radix(hex, 16).ok();
    Some(FileId {
        device: rustix::fs::makedev(number(major)?, number(minor)?),
        inode: field()?.parse().ok().filter(|inode| *inode != 0)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_maps_names_its_file() {
        let line = b"7f0000000000-7f0000021000 rw-s 00000000 00:2f 4711       /usr/lib/tranche/shares/gpu-0/account";
        let device = rustix::fs::makedev(0, 0x2f);
        assert_eq!(
            mapped(line),
            Some(FileId {
                device,
                inode: 4711
            })
        );
        for other in ["7f00-7f01 rw-p 00000000 00:00 0 [heap]", "", "a b c d e"] {
            assert_eq!(mapped(other.as_bytes()), None, "{other}");
        }
    }

    #[test]
    fn a_process_has_what_it_has_mapped() {
        // This test's own executable is always mapped.
        let program = FileId::of(Path::new("/proc/self/exe")).unwrap();
        let other = FileId {
            device: 1,
            inode: 1,
        };
        let mut processes = Processes::new("/proc");
        let me = std::process::id();
        assert_eq!(processes.accounts_of(me, 0, &[other]), Some(vec![]));
        // Not read again at once; read again later.
        assert_eq!(processes.accounts_of(me, 1, &[program]), Some(vec![]));
        let found = processes.accounts_of(me, CHECK_NANOS, &[other, program]);
        assert_eq!(found, Some(vec![program]));
        let again = processes.accounts_of(me, 0, &[program]);
        assert_eq!(again, Some(vec![program]));
        processes.forget_ended(ENDED_NANOS - 1);
        assert!(!processes.known.is_empty());
        processes.forget_ended(ENDED_NANOS);
        assert!(processes.known.is_empty());
        let mut elsewhere = Processes::new("/nowhere");
        assert_eq!(elsewhere.accounts_of(me, 0, &[program]), None);
    }

    #[test]
    fn maps_of_any_text_and_length_are_survived() {
        let account = FileId {
            device: rustix::fs::makedev(0, 0x2f),
            inode: 4711,
        };
        let line = b"7f00-7f02 rw-s 00000000 00:2f 4711 /usr/lib/tranche/shares/gpu-0/account\n";
        let not_text = b"7f00-7f02 r--p 00000000 00:2f 12 /tmp/\xff\xfe\n";
        // A name that would look like a line of its own if it were cut there.
        let mut long = b"7f00-7f02 r--p 00000000 00:2f 12 ".to_vec();
        long.extend(b"/tmp/ 7f00-7f02 rw-s 00000000 00:2f 4711 ".repeat(100));
        long.push(b'\n');
        let endless = long.repeat(20 << 20 >> 12);
        assert!(endless.len() as u64 > MOST_BYTES);
        let proc = tempfile::tempdir().unwrap();
        let folder = proc.path().join("7");
        fs::create_dir(&folder).unwrap();
        for (before, found) in [
            (&not_text[..], vec![account]),
            (&long, vec![account]),
            (&endless, vec![]),
        ] {
            fs::write(folder.join("maps"), [before, line].concat()).unwrap();
            let mut processes = Processes::new(proc.path());
            let found = Some(found);
            assert_eq!(processes.accounts_of(7, 0, &[account]), found);
            // Long maps are not read every second.
            fs::write(folder.join("maps"), line).unwrap();
            assert_eq!(processes.accounts_of(7, CHECK_NANOS, &[account]), found);
        }
    }
}
