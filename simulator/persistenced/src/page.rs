//! The machine's state: a file on tmpfs that outlives the daemon.
//!
//! A restarted daemon opens the file, frees the memory of processes that have ended since, and continues. Running programs
//! are not affected. A file of another machine or of another build is replaced, unless a program still uses it.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, bail};
use rustix::fs::{FlockOperation, flock};
use rustix::mm::{MapFlags, ProtFlags};
use tranche_simulator_machine::layout::{PAGE_BYTES, Shared};
use tranche_simulator_machine::root::PAGE_FILE;
use tranche_simulator_machine::{Description, DriverRoot, identity};

/// The opened state, with the lock that keeps a second daemon away.
#[derive(Debug)]
pub struct Page {
    pub shared: &'static Shared,
    /// The file for processes that write.
    pub writable: File,
    /// The same file for processes that only read.
    pub readable: File,
    _lock: File,
}

impl Page {
    /// Opens or makes the state of the machine below `root`.
    pub fn open(root: &DriverRoot, description: &Description) -> anyhow::Result<Self> {
        let path = root.path().join(PAGE_FILE);
        let folder = path.parent().unwrap_or(Path::new("/"));
        fs::create_dir_all(folder).with_context(|| format!("{}", folder.display()))?;
        let lock = lock(&path)?;
        let identity = node_identity();
        let fingerprint = fingerprint(description, &identity);
        if let Some(page) = Self::adopt(&path, fingerprint, &lock)? {
            return Ok(page);
        }
        Self::create(&path, description, &identity, fingerprint, lock)
    }

    /// The state that an earlier daemon left, if it is of this machine.
    fn adopt(path: &Path, fingerprint: u64, lock: &File) -> anyhow::Result<Option<Self>> {
        let Ok(writable) = OpenOptions::new().read(true).write(true).open(path) else {
            return Ok(None);
        };
        if writable.metadata()?.len() != PAGE_BYTES as u64 {
            return Ok(None);
        }
        // SAFETY: see `map`. Before the checks below, only atomics of it are written.
        let shared: &'static Shared = unsafe { &*map(&writable)? };
        if !shared.is_ours() {
            return Ok(None);
        }
        if shared.header.fingerprint != fingerprint {
            let users = shared.slots.iter().filter(|slot| slot.is_alive()).count();
            if users > 0 {
                bail!(
                    "{}: the machine file has changed, but {users} processes still use the old machine; end them, or restore the file",
                    path.display()
                );
            }
            return Ok(None);
        }
        Ok(Some(Self {
            shared,
            writable,
            readable: File::open(path)?,
            _lock: lock.try_clone()?,
        }))
    }

    fn create(
        path: &Path,
        description: &Description,
        identity: &[u8],
        fingerprint: u64,
        lock: File,
    ) -> anyhow::Result<Self> {
        // A new file, so that readers of the old state keep what they have mapped.
        let fresh = path.with_extension("new");
        let make = || -> anyhow::Result<(File, File)> {
            let writable = OpenOptions::new()
                .read(true)
                .write(true)
                .create(true)
                .truncate(true)
                .mode(0o600)
                .open(&fresh)?;
            writable.set_len(PAGE_BYTES as u64)?;
            Ok((writable, File::open(&fresh)?))
        };
        let (writable, readable) = make().with_context(|| format!("{}", fresh.display()))?;
        let address = map(&writable)?;
        // SAFETY: a new mapping of a zeroed file that no other process knows: the reference is unique until the rename below.
        let shared = unsafe { &mut *address };
        shared.header.fingerprint = fingerprint;
        shared.describe(description, identity);
        fs::rename(&fresh, path).with_context(|| format!("{}", path.display()))?;
        Ok(Self {
            shared,
            writable,
            readable,
            _lock: lock,
        })
    }
}

/// Keeps a second daemon of this root away.
fn lock(page: &Path) -> anyhow::Result<File> {
    let path: PathBuf = page.with_extension("lock");
    let file = OpenOptions::new()
        .create(true)
        .truncate(false)
        .write(true)
        .mode(0o600)
        .open(&path)
        .with_context(|| format!("{}", path.display()))?;
    if flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
        bail!(
            "{}: another nvidia-sim-persistenced serves this root",
            path.display()
        );
    }
    Ok(file)
}

fn map(file: &File) -> anyhow::Result<*mut Shared> {
    // SAFETY: a new mapping at an address of the kernel's choice, of a file that is PAGE_BYTES long and is never shortened.
    // It is never unmapped.
    let address = unsafe {
        rustix::mm::mmap(
            std::ptr::null_mut(),
            PAGE_BYTES,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::SHARED,
            file,
            0,
        )
    }
    .context("mapping the machine's state")?;
    Ok(address.cast())
}

fn node_identity() -> Vec<u8> {
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    identity::node_identity(&read("/etc/machine-id"), &read("/proc/sys/kernel/hostname"))
}

/// A hash of the description and the node, which differs for another machine.
fn fingerprint(description: &Description, node: &[u8]) -> u64 {
    use std::hash::{DefaultHasher, Hasher as _};
    let mut hasher = DefaultHasher::new();
    hasher.write(format!("{description:?}").as_bytes());
    hasher.write(node);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering;

    fn machine(gpus: u32) -> Description {
        let text =
            include_str!("../../machines/T4.toml").replace("count = 1", &format!("count = {gpus}"));
        Description::parse(&text, "test").unwrap()
    }

    #[test]
    fn a_second_daemon_of_a_root_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let root = DriverRoot::new(folder.path());
        let first = Page::open(&root, &machine(1)).unwrap();
        let refusal = Page::open(&root, &machine(1)).unwrap_err().to_string();
        assert!(
            refusal.contains("another nvidia-sim-persistenced"),
            "{refusal}"
        );
        drop(first);
        Page::open(&root, &machine(1)).unwrap();
    }

    #[test]
    fn the_state_outlives_the_daemon_and_a_new_machine_replaces_it() {
        let folder = tempfile::tempdir().unwrap();
        let root = DriverRoot::new(folder.path());
        let first = Page::open(&root, &machine(1)).unwrap();
        first.shared.gpus[0]
            .compute_mode
            .store(3, Ordering::Relaxed);
        drop(first);
        let second = Page::open(&root, &machine(1)).unwrap();
        assert_eq!(
            second.shared.gpus[0].compute_mode.load(Ordering::Relaxed),
            3
        );
        let own = i32::try_from(std::process::id()).unwrap();
        second.shared.slots[0]
            .started
            .store(identity::start_time(own).unwrap(), Ordering::Relaxed);
        second.shared.slots[0].pid.store(own, Ordering::Relaxed);
        let shared = second.shared;
        drop(second);
        let refusal = Page::open(&root, &machine(2)).unwrap_err().to_string();
        assert!(refusal.contains("1 processes still use"), "{refusal}");
        shared.slots[0].pid.store(0, Ordering::Relaxed);
        let third = Page::open(&root, &machine(2)).unwrap();
        assert_eq!(third.shared.gpus().len(), 2);
    }
}
