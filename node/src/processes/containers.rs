//! Which processes run in containers that have a claim's devices.
//!
//! Each such container has the device's cap page mounted, in every tier. The file's path within its
//! file system, the fourth field of `/proc/<pid>/mountinfo`, has the device's key as a component, and the
//! key carries the claim's UID. On the host itself the pages' file systems are mounted by their roots, so
//! no process of the host is mistaken for a container's.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::mem;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::mountinfo::keys_of;

/// Why the processes could not be listed.
#[derive(Debug, thiserror::Error)]
#[error("cannot read {path}: {source}")]
pub struct ScanError {
    /// The file.
    pub path: PathBuf,
    /// Why not.
    pub source: io::Error,
}

/// Searches for the processes of containers. Callers that wait at the same time share a search: it reads a file for each mount
/// namespace, which takes milliseconds, and the pods of a node often end together.
#[derive(Debug)]
pub struct Containers {
    proc: PathBuf,
    /// The keys for the next search.
    wanted: Mutex<BTreeSet<String>>,
    /// What searches found and nobody has taken yet. The thread that holds the lock searches.
    found: Mutex<Found>,
}

/// Processes by the keys of devices, ascending; empty for a key that no container has.
type Found = BTreeMap<String, Vec<u32>>;

impl Containers {
    /// Of the `/proc` that is mounted at `proc`.
    #[must_use]
    pub fn new(proc: PathBuf) -> Self {
        Self {
            proc,
            wanted: Mutex::default(),
            found: Mutex::default(),
        }
    }

    /// The processes in whose mount namespace a page of one of the devices `keys` is mounted, ascending, by a search
    /// that begins after the call. Each key has one caller at a time, who takes what was found for it.
    pub fn processes_with(&self, keys: &[&str]) -> Result<Vec<u32>, ScanError> {
        let mine = || keys.iter().map(|key| (*key).to_owned());
        lock(&self.wanted).extend(mine());
        let mut found = lock(&self.found);
        // If `found` has all keys, a search that began after the call has found them. A failed search leaves nothing.
        if keys.iter().any(|key| !found.contains_key(*key)) {
            let mut wanted = mem::take(&mut *lock(&self.wanted));
            wanted.extend(mine());
            found.extend(search(&self.proc, &wanted)?);
        }
        let processes = keys.iter().filter_map(|key| found.remove(*key)).flatten();
        Ok(processes.collect::<BTreeSet<_>>().into_iter().collect())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Each change is one call.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Reads one file for each mount namespace.
fn search(proc: &Path, keys: &BTreeSet<String>) -> Result<Found, ScanError> {
    let failed = |path: &Path| {
        let path = path.to_owned();
        move |source| ScanError { path, source }
    };
    let mut namespaces = BTreeMap::<PathBuf, BTreeSet<String>>::new();
    let mut found: Found = keys.iter().map(|key| (key.clone(), Vec::new())).collect();
    for entry in fs::read_dir(proc).map_err(failed(proc))? {
        let name = entry.map_err(failed(proc))?.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse().ok()) else {
            continue;
        };
        let folder = proc.join(&name);
        let Some(namespace) =
            ended(fs::read_link(folder.join("ns/mnt"))).map_err(failed(&folder))?
        else {
            continue;
        };
        if !namespaces.contains_key(&namespace) {
            let mounts = folder.join("mountinfo");
            let Some(mounted) = ended(keys_of(&mounts, keys)).map_err(failed(&mounts))? else {
                continue;
            };
            namespaces.insert(namespace.clone(), mounted);
        }
        for key in &namespaces[&namespace] {
            found.entry(key.clone()).or_default().push(pid);
        }
    }
    for processes in found.values_mut() {
        processes.sort_unstable();
    }
    Ok(found)
}

/// `None` if the process has ended meanwhile or is a zombie.
fn ended<T>(result: io::Result<T>) -> io::Result<Option<T>> {
    use rustix::io::Errno;
    match result {
        Err(e)
            if [Errno::NOENT, Errno::SRCH, Errno::INVAL]
                .map(|errno| Some(errno.raw_os_error()))
                .contains(&e.raw_os_error()) =>
        {
            Ok(None)
        }
        other => other.map(Some),
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::os::unix::fs::symlink;
    use std::sync::{Arc, mpsc};
    use std::time::Duration;

    use super::*;

    const HOST: &str = "24 1 0:22 / /run rw shared:2 - tmpfs tmpfs rw\n\
        90 24 0:50 / /run/tranche/shares/uid rw shared:9 - tmpfs tmpfs rw\n";

    fn processes_with(proc: &Path, keys: &[&str]) -> Result<Vec<u32>, ScanError> {
        Containers::new(proc.to_owned()).processes_with(keys)
    }

    fn process(proc: &Path, pid: u32, namespace: &str, mounts: &[u8]) {
        let folder = proc.join(pid.to_string());
        fs::create_dir_all(folder.join("ns")).unwrap();
        symlink(namespace, folder.join("ns/mnt")).unwrap();
        fs::write(folder.join("mountinfo"), mounts).unwrap();
    }

    #[test]
    fn a_process_is_found_by_the_pages_mounted_in_its_container() {
        let folder = tempfile::tempdir().unwrap();
        let proc = folder.path();
        let old = b"700 600 0:22 /tranche/shares/uid/uid-gpu-0/cap /etc/tranche/0/cap ro - tmpfs tmpfs rw\n";
        let new = b"1 2 0:9 / /\xff rw - tmpfs tmpfs rw\n\
            3 2 0:50 /uid-gpu-0/cap//deleted /etc/tranche/0/cap ro - tmpfs tmpfs rw\n";
        process(proc, 1, "mnt:[1]", HOST.as_bytes());
        process(proc, 20, "mnt:[2]", old);
        process(proc, 21, "mnt:[2]", old);
        process(proc, 30, "mnt:[3]", new);
        process(proc, 31, "mnt:[3]", b"unread: the namespace is known");
        process(
            proc,
            40,
            "mnt:[4]",
            b"5 2 0:50 /uid-gpu-01/cap /x ro - tmpfs tmpfs rw\n",
        );
        fs::create_dir(proc.join("50")).unwrap();
        fs::create_dir(proc.join("sys")).unwrap();
        assert_eq!(
            processes_with(proc, &["other", "uid-gpu-0"]).unwrap(),
            [20, 21, 30, 31]
        );
        assert_eq!(processes_with(proc, &["uid"]).unwrap(), [20, 21]);
        assert_eq!(processes_with(proc, &["shares-gpu"]).unwrap(), [0; 0]);
    }

    #[test]
    fn a_tenant_with_many_mounts_hides_no_device_from_a_search() {
        let proc = tempfile::tempdir().unwrap();
        // More than 16 MiB, with one mount point that is very long.
        let line = b"1 2 0:9 / /x rw - tmpfs tmpfs rw\n";
        let mut mounts = line.repeat((17 << 20) / line.len());
        mounts.extend(format!("1 2 0:9 / /{} rw\n", "x".repeat(1 << 20)).into_bytes());
        process(proc.path(), 1, "mnt:[1]", &mounts);
        process(proc.path(), 2, "mnt:[2]", HOST.as_bytes());
        assert_eq!(processes_with(proc.path(), &["key"]).unwrap(), [0; 0]);
        mounts.extend(b"1 2 0:9 /uid/key/cap /x ro - tmpfs tmpfs rw\n");
        fs::write(proc.path().join("1/mountinfo"), mounts).unwrap();
        assert_eq!(processes_with(proc.path(), &["key"]).unwrap(), [1]);
    }

    #[test]
    fn what_cannot_be_read_is_an_error_and_not_nothing() {
        let nowhere = Path::new("/nowhere/proc");
        processes_with(nowhere, &["uid"]).unwrap_err();
        let proc = tempfile::tempdir().unwrap();
        process(proc.path(), 7, "mnt:[7]", b"");
        fs::remove_file(proc.path().join("7/mountinfo")).unwrap();
        fs::create_dir(proc.path().join("7/mountinfo")).unwrap();
        let error = processes_with(proc.path(), &["uid"]).unwrap_err();
        assert!(error.to_string().contains("7/mountinfo"), "{error}");
    }

    #[test]
    fn a_real_processs_mounts_can_be_read() {
        let own = Path::new("/proc/self/mountinfo");
        // Some mount is of a whole file system, whose path is a single slash.
        let keys = ["no-such-key", ""].map(str::to_owned).into();
        assert_eq!(keys_of(own, &keys).unwrap(), [String::new()].into());
    }

    #[test]
    fn a_search_serves_only_those_who_waited_when_it_began() {
        let proc = tempfile::tempdir().unwrap();
        process(proc.path(), 7, "mnt:[7]", b"");
        let mountinfo = proc.path().join("7/mountinfo");
        fs::remove_file(&mountinfo).unwrap();
        // A reader of it waits for a writer.
        let (mode, pipe) = (rustix::fs::Mode::RUSR, rustix::fs::FileType::Fifo);
        rustix::fs::mknodat(rustix::fs::CWD, &mountinfo, pipe, mode, 0).unwrap();
        let containers = Arc::new(Containers::new(proc.path().to_owned()));
        let waiting = || lock(&containers.wanted).len();
        let search = |key| {
            let (containers, (tell, told)) = (Arc::clone(&containers), mpsc::channel());
            std::thread::spawn(move || tell.send(containers.processes_with(&[key]).unwrap()));
            move || told.recv_timeout(Duration::from_secs(30)).unwrap()
        };
        let first = search("first");
        // It can be opened when the first search reads it.
        let mut writer = fs::OpenOptions::new().write(true).open(&mountinfo).unwrap();
        assert_eq!(waiting(), 0);
        let (second, third) = (search("second"), search("third"));
        while waiting() != 2 {
            std::thread::yield_now();
        }
        // It reads to the end, because it does not find what it looks for.
        let mounts = b"1 2 0:9 /second/cap /x rw\n";
        writer.write_all(mounts).unwrap();
        drop(writer);
        assert_eq!(first(), [0; 0]);
        // One more search, for both: a third one would wait for a writer.
        fs::write(&mountinfo, "1 2 0:9 /third/cap /x rw\n").unwrap();
        assert_eq!((second(), third()), (vec![], vec![7]));
        assert!(lock(&containers.found).is_empty() && waiting() == 0);
    }
}
