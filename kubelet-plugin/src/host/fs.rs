//! The plugin's file system calls; each error names the path.
//!
//! [`Fs`] is injected, so that a test can make the n-th call fail, or simulate a crash there.

use std::ffi::CString;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, FallocateFlags, StatxAttributes, StatxFlags, fallocate, statx};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

/// A failed call with its path.
#[derive(Debug, thiserror::Error)]
#[error("cannot {action} {path}: {source}")]
pub struct FsError {
    /// The action, as a verb.
    pub action: &'static str,
    pub path: PathBuf,
    pub source: io::Error,
}

/// The file system calls that the plugin needs.
pub trait Fs: Send + Sync + std::fmt::Debug {
    /// Makes a folder and its parents, mode 0755; they may exist.
    fn create_dir(&self, path: &Path) -> Result<(), FsError>;
    /// Writes a whole file with exactly this mode; an existing file is replaced. Zeros at its end
    /// take no space.
    fn write(&self, path: &Path, content: &[u8], mode: u32) -> Result<(), FsError>;
    /// Replaces everything behind the first `at` bytes of an existing file by `content`, also what a killed writer left there.
    fn append(&self, path: &Path, at: u64, content: &[u8]) -> Result<(), FsError>;
    /// Reserves room on the disk for an existing file of so many bytes, without changing its length.
    fn reserve(&self, path: &Path, bytes: u64) -> Result<(), FsError>;
    /// Waits until a file's content or a folder's entries are on the disk.
    fn sync(&self, path: &Path) -> Result<(), FsError>;
    /// Renames within a folder, replacing.
    fn rename(&self, from: &Path, to: &Path) -> Result<(), FsError>;
    /// A file's content, `None` if there is no such file.
    fn read(&self, path: &Path) -> Result<Option<Vec<u8>>, FsError>;
    /// Opens a file for reading.
    fn open(&self, path: &Path) -> Result<File, FsError>;
    /// The names in a folder, sorted; none if there is no such folder.
    fn list(&self, path: &Path) -> Result<Vec<String>, FsError>;
    /// Removes a file or a link; it may be gone.
    fn remove_file(&self, path: &Path) -> Result<(), FsError>;
    /// Removes a folder if it is empty; it may be gone.
    fn remove_dir(&self, path: &Path) -> Result<(), FsError>;
    /// Permission bits of the file at a path, `None` if there is none.
    fn mode(&self, path: &Path) -> Result<Option<u32>, FsError>;
    /// Mounts an empty tmpfs on an existing folder. Does nothing if a file system is mounted there already
    /// or the folder is not empty.
    fn mount_tmpfs(&self, path: &Path, size: TmpfsSize) -> Result<(), FsError>;
    /// Unmounts the file system on a folder if it is empty; there may be none.
    fn unmount(&self, path: &Path) -> Result<(), FsError>;
}

/// The limits of a tmpfs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TmpfsSize {
    /// The most bytes of content.
    pub bytes: u64,
    /// The most files and folders, including the root.
    pub inodes: u64,
}

/// The machine's file system.
#[derive(Clone, Copy, Debug, Default)]
pub struct HostFs;

const ZEROS: [u8; 4096] = [0; 4096];

trait At<T> {
    fn at(self, action: &'static str, path: &Path) -> Result<T, FsError>;
    fn at_if_there(self, action: &'static str, path: &Path) -> Result<Option<T>, FsError>;
}

impl<T> At<T> for io::Result<T> {
    fn at(self, action: &'static str, path: &Path) -> Result<T, FsError> {
        self.map_err(|source| FsError {
            action,
            path: path.to_owned(),
            source,
        })
    }

    fn at_if_there(self, action: &'static str, path: &Path) -> Result<Option<T>, FsError> {
        match self {
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(None),
            other => other.at(action, path).map(Some),
        }
    }
}

impl Fs for HostFs {
    fn create_dir(&self, path: &Path) -> Result<(), FsError> {
        std::fs::DirBuilder::new()
            .recursive(true)
            .mode(0o755)
            .create(path)
            .at("create folder", path)
    }

    fn write(&self, path: &Path, content: &[u8], mode: u32) -> Result<(), FsError> {
        let write = || {
            let mut file = OpenOptions::new()
                .write(true)
                .create(true)
                .truncate(true)
                .mode(mode)
                .open(path)?;
            // The umask may have reduced it, and the file may exist already. A change of an inode may wait for the disk,
            // so the mode is set only if it differs.
            if file.metadata()?.mode() & 0o7777 != mode {
                file.set_permissions(std::fs::Permissions::from_mode(mode))?;
            }
            // Block by block, because byte by byte takes longer than the write.
            let is_zero = |block: &&[u8]| **block == ZEROS[..block.len()];
            let zeros = content.rchunks(ZEROS.len()).take_while(is_zero);
            let zeros: usize = zeros.map(<[u8]>::len).sum();
            file.write_all(&content[..content.len() - zeros])?;
            if zeros > 0 {
                file.set_len(content.len() as u64)?;
            }
            Ok(())
        };
        write().at("write", path)
    }

    fn append(&self, path: &Path, at: u64, content: &[u8]) -> Result<(), FsError> {
        let append = || {
            let file = OpenOptions::new().write(true).open(path)?;
            // Even a change to the same length would give back reserved room.
            if file.metadata()?.len() != at {
                file.set_len(at)?;
            }
            file.write_all_at(content, at)
        };
        append().at("append to", path)
    }

    fn reserve(&self, path: &Path, bytes: u64) -> Result<(), FsError> {
        let reserve = || {
            let file = OpenOptions::new().write(true).open(path)?;
            fallocate(file, FallocateFlags::KEEP_SIZE, 0, bytes).map_err(io::Error::from)
        };
        reserve().at("reserve room for", path)
    }

    fn sync(&self, path: &Path) -> Result<(), FsError> {
        File::open(path)
            .and_then(|file| file.sync_all())
            .at("sync", path)
    }

    fn rename(&self, from: &Path, to: &Path) -> Result<(), FsError> {
        std::fs::rename(from, to).at("rename to", to)
    }

    fn read(&self, path: &Path) -> Result<Option<Vec<u8>>, FsError> {
        std::fs::read(path).at_if_there("read", path)
    }

    fn open(&self, path: &Path) -> Result<File, FsError> {
        File::open(path).at("open", path)
    }

    fn list(&self, path: &Path) -> Result<Vec<String>, FsError> {
        let Some(entries) = std::fs::read_dir(path).at_if_there("list", path)? else {
            return Ok(Vec::new());
        };
        let mut names = Vec::new();
        for entry in entries {
            // Our names are ASCII; a name that is not UTF-8 is not ours.
            if let Ok(name) = entry.at("list", path)?.file_name().into_string() {
                names.push(name);
            }
        }
        names.sort_unstable();
        Ok(names)
    }

    fn remove_file(&self, path: &Path) -> Result<(), FsError> {
        std::fs::remove_file(path)
            .at_if_there("remove", path)
            .map(drop)
    }

    fn remove_dir(&self, path: &Path) -> Result<(), FsError> {
        match std::fs::remove_dir(path) {
            Err(e) if e.kind() == io::ErrorKind::DirectoryNotEmpty => Ok(()),
            other => other.at_if_there("remove folder", path).map(drop),
        }
    }

    fn mode(&self, path: &Path) -> Result<Option<u32>, FsError> {
        let meta = std::fs::metadata(path).at_if_there("look at", path)?;
        Ok(meta.map(|meta| meta.mode() & 0o7777))
    }

    fn mount_tmpfs(&self, path: &Path, size: TmpfsSize) -> Result<(), FsError> {
        if is_mounted(path)? == Some(true) || !self.list(path)?.is_empty() {
            return Ok(());
        }
        let TmpfsSize { bytes, inodes } = size;
        let options = CString::new(format!("size={bytes},nr_inodes={inodes},mode=755"))
            .map_err(io::Error::from)
            .at("mount a tmpfs on", path)?;
        let flags = MountFlags::NOEXEC | MountFlags::NOSUID | MountFlags::NODEV;
        mount("tranche", path, "tmpfs", flags, options.as_c_str())
            .map_err(io::Error::from)
            .at("mount a tmpfs on", path)
    }

    fn unmount(&self, path: &Path) -> Result<(), FsError> {
        if is_mounted(path)? != Some(true) || !self.list(path)?.is_empty() {
            return Ok(());
        }
        // It succeeds also while containers have a file of it mounted.
        unmount(path, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW)
            .map_err(io::Error::from)
            .at("unmount", path)
    }
}

/// Whether a path is the root of a mount, `None` if it does not exist.
fn is_mounted(path: &Path) -> Result<Option<bool>, FsError> {
    let found = statx(CWD, path, AtFlags::SYMLINK_NOFOLLOW, StatxFlags::TYPE)
        .map_err(io::Error::from)
        .at_if_there("look at", path)?;
    Ok(found.map(|found| found.stx_attributes.contains(StatxAttributes::MOUNT_ROOT)))
}

/// What is left of a file after a power failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// The file has its old content or its new one, whole: the content is synced before the rename, the rename is not. A file
    /// that was removed does not come back.
    Disk,
    /// It is rebuilt from the journal, or is on a tmpfs.
    Rebuilt,
}

/// The suffix of a file that is being written. Runtimes read only `*.json` in the CDI folder. The
/// temporary name is derived from the name, so that a leftover is overwritten or removed.
const TEMPORARY: &str = ".tmp";

fn temporary(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(TEMPORARY);
    name.into()
}

/// Removes what interrupted writes of files whose names begin with `prefix` left in a folder.
pub fn remove_temporaries(fs: &dyn Fs, folder: &Path, prefix: &str) -> Result<(), FsError> {
    for name in fs.list(folder)? {
        if name.starts_with(prefix) && name.ends_with(TEMPORARY) {
            fs.remove_file(&folder.join(name))?;
        }
    }
    Ok(())
}

/// Writes a file so that a reader sees the old content or the new one, never a part.
///
/// One writer per path at a time: the temporary name is derived from the path.
pub fn replace(
    fs: &dyn Fs,
    path: &Path,
    content: &[u8],
    mode: u32,
    durability: Durability,
) -> Result<(), FsError> {
    let tmp = temporary(path);
    let write = || {
        fs.write(&tmp, content, mode)?;
        if durability == Durability::Disk {
            fs.sync(&tmp)?;
        }
        fs.rename(&tmp, path)
    };
    if let Err(e) = write() {
        // If this fails too, `remove` or the next start removes the leftover.
        let _ = fs.remove_file(&tmp);
        return Err(e);
    }
    Ok(())
}

/// Like [`replace`], but does not write a file that is already correct.
pub fn ensure(fs: &dyn Fs, path: &Path, content: &[u8], mode: u32) -> Result<(), FsError> {
    if is_intact(fs, path, content, mode)? {
        return Ok(());
    }
    replace(fs, path, content, mode, Durability::Rebuilt)
}

/// Whether a file exists with exactly this content and mode.
pub fn is_intact(fs: &dyn Fs, path: &Path, content: &[u8], mode: u32) -> Result<bool, FsError> {
    Ok(fs.mode(path)? == Some(mode) && fs.read(path)?.is_some_and(|there| there == content))
}

/// Removes a file and what an interrupted [`replace`] of it may have left.
pub fn remove(fs: &dyn Fs, path: &Path, durability: Durability) -> Result<(), FsError> {
    fs.remove_file(path)?;
    fs.remove_file(&temporary(path))?;
    match (durability, path.parent()) {
        (Durability::Disk, Some(folder)) => fs.sync(folder),
        _ => Ok(()),
    }
}

#[cfg(test)]
pub(crate) mod testing {
    //! A file system that fails or crashes at a chosen call, or that holds writers back until they
    //! are concurrent.

    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::sync::{Condvar, Mutex};
    use std::time::Duration;

    use super::*;

    /// What happens at the chosen call.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    pub enum Fault {
        /// This call fails, the next ones succeed: a full disk, for example.
        Once,
        /// This call and all later ones fail, a write after half its bytes: SIGKILL.
        Death,
    }

    /// [`HostFs`] with a fault, and a record of every call that changes something.
    #[derive(Debug)]
    pub struct FaultyFs {
        at: usize,
        fault: Fault,
        count: AtomicUsize,
        calls: Mutex<Vec<String>>,
        meeting: Option<Meeting>,
    }

    /// Blocks every sync of a file until so many are concurrent.
    #[derive(Debug)]
    struct Meeting {
        wanted: usize,
        present: Mutex<usize>,
        all: Condvar,
    }

    impl Meeting {
        fn attend(&self) -> bool {
            let mut present = self.present.lock().unwrap();
            *present += 1;
            self.all.notify_all();
            let missing = |present: &mut usize| *present < self.wanted;
            let patience = Duration::from_secs(5);
            let waited = self.all.wait_timeout_while(present, patience, missing);
            !waited.unwrap().1.timed_out()
        }
    }

    impl FaultyFs {
        /// Fails at the `at`-th changing call, counted from 0.
        pub fn new(at: usize, fault: Fault) -> Self {
            Self {
                at,
                fault,
                count: AtomicUsize::new(0),
                calls: Mutex::default(),
                meeting: None,
            }
        }

        /// Syncs no file before `wanted` writers sync concurrently; fails if they do not.
        pub fn meeting(wanted: usize) -> Self {
            Self {
                meeting: Some(Meeting {
                    wanted,
                    present: Mutex::new(0),
                    all: Condvar::new(),
                }),
                ..Self::recording()
            }
        }

        /// Never fails.
        pub fn recording() -> Self {
            Self::new(usize::MAX, Fault::Once)
        }

        /// Whether the fault happened.
        pub fn struck(&self) -> bool {
            self.count.load(Ordering::SeqCst) > self.at
        }

        /// The changing calls so far, as `verb path`.
        pub fn calls(&self) -> Vec<String> {
            self.calls.lock().unwrap().clone()
        }

        fn pass(&self, action: &'static str, path: &Path) -> Result<(), FsError> {
            let n = self.count.fetch_add(1, Ordering::SeqCst);
            let strikes = match self.fault {
                Fault::Once => n == self.at,
                Fault::Death => n >= self.at,
            };
            if strikes {
                return Err(FsError {
                    action,
                    path: path.to_owned(),
                    source: io::Error::other("injected fault"),
                });
            }
            let call = format!("{action} {}", path.display());
            self.calls.lock().unwrap().push(call);
            Ok(())
        }
    }

    impl Fs for FaultyFs {
        fn create_dir(&self, path: &Path) -> Result<(), FsError> {
            self.pass("create folder", path)?;
            HostFs.create_dir(path)
        }

        fn write(&self, path: &Path, content: &[u8], mode: u32) -> Result<(), FsError> {
            let passed = self.pass("write", path);
            if passed.is_err() && self.count.load(Ordering::SeqCst) == self.at + 1 {
                HostFs.write(path, &content[..content.len() / 2], mode)?;
            }
            passed?;
            HostFs.write(path, content, mode)
        }

        fn append(&self, path: &Path, at: u64, content: &[u8]) -> Result<(), FsError> {
            let passed = self.pass("append to", path);
            if passed.is_err() && self.count.load(Ordering::SeqCst) == self.at + 1 {
                HostFs.append(path, at, &content[..content.len() / 2])?;
            }
            passed?;
            HostFs.append(path, at, content)
        }

        fn reserve(&self, path: &Path, bytes: u64) -> Result<(), FsError> {
            // No step: nothing depends on it.
            HostFs.reserve(path, bytes)
        }

        fn sync(&self, path: &Path) -> Result<(), FsError> {
            self.pass("sync", path)?;
            let meeting = self.meeting.as_ref().filter(|_| path.is_file());
            if meeting.is_some_and(|meeting| !meeting.attend()) {
                return Err(FsError {
                    action: "sync alone",
                    path: path.to_owned(),
                    source: io::ErrorKind::TimedOut.into(),
                });
            }
            HostFs.sync(path)
        }

        fn rename(&self, from: &Path, to: &Path) -> Result<(), FsError> {
            self.pass("rename to", to)?;
            HostFs.rename(from, to)
        }

        fn read(&self, path: &Path) -> Result<Option<Vec<u8>>, FsError> {
            HostFs.read(path)
        }

        fn open(&self, path: &Path) -> Result<File, FsError> {
            HostFs.open(path)
        }

        fn list(&self, path: &Path) -> Result<Vec<String>, FsError> {
            HostFs.list(path)
        }

        fn remove_file(&self, path: &Path) -> Result<(), FsError> {
            self.pass("remove", path)?;
            HostFs.remove_file(path)
        }

        fn remove_dir(&self, path: &Path) -> Result<(), FsError> {
            self.pass("remove folder", path)?;
            HostFs.remove_dir(path)
        }

        fn mode(&self, path: &Path) -> Result<Option<u32>, FsError> {
            HostFs.mode(path)
        }

        fn mount_tmpfs(&self, path: &Path, size: TmpfsSize) -> Result<(), FsError> {
            self.pass("mount a tmpfs on", path)?;
            HostFs.mount_tmpfs(path, size)
        }

        fn unmount(&self, path: &Path) -> Result<(), FsError> {
            self.pass("unmount", path)?;
            HostFs.unmount(path)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::testing::{Fault, FaultyFs};
    use super::*;

    #[test]
    fn a_reader_sees_a_whole_file_wherever_the_writer_dies() {
        for at in 0.. {
            let dir = tempfile::tempdir().unwrap();
            let path = dir.path().join("x.json");
            replace(&HostFs, &path, b"old", 0o644, Durability::Disk).unwrap();
            let fs = FaultyFs::new(at, Fault::Death);
            let written = replace(&fs, &path, b"new!", 0o600, Durability::Disk);
            let seen = std::fs::read(&path).unwrap();
            assert!(seen == b"old" || seen == b"new!", "{at}: {seen:?}");
            if !fs.struck() {
                written.unwrap();
                assert_eq!(seen, b"new!");
                assert_eq!(HostFs.mode(&path).unwrap(), Some(0o600));
                return;
            }
            written.unwrap_err();
            remove(&HostFs, &path, Durability::Disk).unwrap();
            assert_eq!(HostFs.list(dir.path()).unwrap(), Vec::<String>::new());
        }
    }

    #[test]
    fn a_file_is_synced_before_its_name_and_its_removal_lasts() {
        let dir = tempfile::tempdir().unwrap();
        let (fs, path) = (FaultyFs::recording(), dir.path().join("a"));
        replace(&fs, &path, b"x", 0o644, Durability::Disk).unwrap();
        remove(&fs, &path, Durability::Disk).unwrap();
        let calls = fs.calls();
        let verbs = calls.iter().map(|call| call.split(" /").next().unwrap());
        let expected = ["write", "sync", "rename to", "remove", "remove", "sync"];
        assert_eq!(verbs.collect::<Vec<_>>(), expected);
    }

    #[test]
    fn zeros_at_the_end_are_there_and_take_no_room() {
        use std::os::unix::fs::MetadataExt;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("page");
        let mut content = vec![0; 1 << 20];
        content[0] = 1;
        HostFs.write(&path, &content, 0o666).unwrap();
        assert_eq!(HostFs.read(&path).unwrap(), Some(content));
        assert!(std::fs::metadata(&path).unwrap().blocks() * 512 <= 64 << 10);
    }

    #[test]
    fn a_correct_file_is_not_written_again() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        ensure(&HostFs, &path, b"x", 0o444).unwrap();
        let fs = FaultyFs::recording();
        ensure(&fs, &path, b"x", 0o444).unwrap();
        assert_eq!(fs.calls(), Vec::<String>::new());
        ensure(&fs, &path, b"y", 0o444).unwrap();
        ensure(&HostFs, &path, b"y", 0o755).unwrap();
        assert!(is_intact(&HostFs, &path, b"y", 0o755).unwrap());
    }
}
