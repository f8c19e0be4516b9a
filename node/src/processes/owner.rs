//! Finds the owner of a process by what the kubelet and the container runtime made: its cgroup names its
//! pod, its mounts name the devices of its container. Neither depends on what its programs load, open or
//! write.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use super::mountinfo::mounted;

/// The most bytes that are read of a file whose length the tenant controls.
const MOST_BYTES: u64 = 4 << 20;

/// A process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct ProcessId {
    /// In the host's PID namespace.
    pub pid: u32,
    /// When it started, in clock ticks since the boot: field 22 of `/proc/<pid>/stat`. Together with the PID
    /// it names one process.
    pub started: u64,
}

/// What `/proc` shows of a process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The process.
    pub id: ProcessId,
    /// Its PID in its own PID namespace.
    pub inner_pid: Option<u64>,
    /// The UID of its pod, if it is in one.
    pub pod: Option<String>,
    /// The name of its container, if the kubelet's mounts in it name it.
    pub container: Option<String>,
    /// The requested keys of devices that its container has.
    pub keys: Vec<String>,
}

/// The host's `/proc`.
#[derive(Clone, Debug)]
pub struct Proc {
    path: PathBuf,
}

impl Proc {
    /// The `/proc` that is mounted at `path`.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into() }
    }

    /// Whether this process is in the PID namespace of the `/proc`'s first process, the host's. In another
    /// one NVML leaves out most processes, and PIDs differ.
    #[must_use]
    pub fn is_own_namespace(&self) -> bool {
        let own = fs::read_link("/proc/self/ns/pid");
        let hosts = fs::read_link(self.path.join("1/ns/pid"));
        matches!((own, hosts), (Ok(own), Ok(hosts)) if own == hosts)
    }

    /// Identifies process `pid`; `None` if it has ended. `is_key` is true for the requested keys.
    #[must_use]
    pub fn identify(&self, pid: u32, is_key: impl Fn(&str) -> bool) -> Option<Identity> {
        let folder = self.path.join(pid.to_string());
        let started = started(&read(&folder.join("stat")).ok()?)?;
        let status = read(&folder.join("status")).ok()?;
        let cgroup = read(&folder.join("cgroup")).ok();
        let mounted = mounted(&folder.join("mountinfo"), is_key).unwrap_or_default();
        // It may have ended meanwhile, and another process may have its PID.
        let again = started_at(&folder)?;
        let pod = cgroup.and_then(|cgroup| pod_of(&cgroup));
        let of_pod = |(uid, name)| (Some(uid) == pod).then_some(name);
        (again == started).then_some(Identity {
            id: ProcessId { pid, started },
            inner_pid: inner_pid(&status),
            container: mounted.container.and_then(of_pod),
            pod,
            keys: mounted.keys.into_iter().collect(),
        })
    }

    /// When process `pid` started; `None` if it has ended.
    #[must_use]
    pub fn started(&self, pid: u32) -> Option<u64> {
        started_at(&self.path.join(pid.to_string()))
    }
}

fn started_at(folder: &Path) -> Option<u64> {
    started(&read(&folder.join("stat")).ok()?)
}

fn read(path: &Path) -> io::Result<String> {
    use std::io::Read as _;
    let mut bytes = Vec::new();
    fs::File::open(path)?
        .take(MOST_BYTES)
        .read_to_end(&mut bytes)?;
    // A tenant chooses a program's name, which need not be UTF-8.
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

/// Field 22 of `stat`. The second one is the program's name in parentheses, which may be anything. `None`
/// for a zombie.
fn started(stat: &str) -> Option<u64> {
    let mut fields = stat.rsplit_once(')')?.1.split_ascii_whitespace();
    let state = fields.next()?;
    let started = fields.nth(18)?.parse().ok();
    started.filter(|_| !matches!(state, "Z" | "X"))
}

/// The last of `NSpid` of `status`.
fn inner_pid(status: &str) -> Option<u64> {
    let mut lines = status.lines();
    let pids = lines.find_map(|line| line.strip_prefix("NSpid:"))?;
    pids.split_ascii_whitespace().next_back()?.parse().ok()
}

/// The UID of the pod whose cgroup is named in `/proc/<pid>/cgroup`, in any of the forms in which kubelets
/// name them (`pkg/kubelet/cm/cgroup_manager_linux.go`, `pod_container_manager_linux.go`):
///
/// | driver | |
/// |---|---|
/// | systemd | `…/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod<uid, dashes as _>.slice/cri-containerd-<id>.scope` |
/// | cgroupfs | `…/kubepods/burstable/pod<uid>/<id>` |
///
/// CRI-O's containers are `crio-<id>.scope`, sometimes with a folder `container` below; everything below the pod's
/// cgroup is ignored. With cgroups v1 there is a line for each controller; hybrid mode, and a reader in another cgroup
/// namespace (`/../..` first), make no difference. The outermost pod is used, because everything below belongs to it.
fn pod_of(cgroups: &str) -> Option<String> {
    // In `id:controllers:path` only the path may contain colons.
    let mut paths = cgroups
        .lines()
        .filter_map(|line| line.splitn(3, ':').nth(2));
    paths.find_map(pod_of_path)
}

fn pod_of_path(path: &str) -> Option<String> {
    path.split('/').find_map(|component| {
        let name = match component.strip_suffix(".slice") {
            Some(name) => name.rsplit_once("-pod")?.1,
            None => component.strip_prefix("pod")?,
        };
        let uid = name.replace('_', "-");
        let is_uid = |c: char| c.is_ascii_hexdigit() || c == '-';
        (uid.len() >= 32 && uid.chars().all(is_uid)).then_some(uid)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const UID: &str = "6b1d9c5e-3f5c-4a2b-9a5b-0d5e6f7a8b9c";
    const SYSTEMD: &str = "6b1d9c5e_3f5c_4a2b_9a5b_0d5e6f7a8b9c";
    const ID: &str = "5f0c9b8f1a2b3c4d5e6f708192a3b4c5d6e7f8091a2b3c4d5e6f708192a3b4c5";

    #[test]
    fn a_cgroup_names_its_pod_whoever_made_it() {
        for path in [
            // containerd, systemd driver; guaranteed pods have no folder for their class.
            format!(
                "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod{SYSTEMD}.slice/cri-containerd-{ID}.scope"
            ),
            format!("/kubepods.slice/kubepods-pod{SYSTEMD}.slice/cri-containerd-{ID}.scope"),
            // CRI-O.
            format!(
                "/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod{SYSTEMD}.slice/crio-{ID}.scope/container"
            ),
            // cgroupfs driver.
            format!("/kubepods/burstable/pod{UID}/{ID}"),
            format!("/kubepods/pod{UID}/crio-{ID}"),
            // kind, and any kubelet with a cgroup root.
            format!(
                "/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-burstable.slice/kubelet-kubepods-burstable-pod{SYSTEMD}.slice/cri-containerd-{ID}.scope"
            ),
            format!("/system.slice/docker-{ID}.scope/kubelet/kubepods/besteffort/pod{UID}/{ID}"),
            // Seen from another container's cgroup namespace.
            format!("/../../kubepods-burstable-pod{SYSTEMD}.slice/cri-containerd-{ID}.scope"),
            // A cgroup that a program made below its own.
            format!("/kubepods/burstable/pod{UID}/{ID}/podfeedfeed-0000-0000-0000-000000000000/x"),
        ] {
            for lines in [
                format!("0::{path}\n"),
                format!("12:pids:{path}\n11:cpu,cpuacct:{path}\n1:name=systemd:{path}\n0::/\n"),
            ] {
                assert_eq!(pod_of(&lines).as_deref(), Some(UID), "{lines}");
            }
        }
    }

    #[test]
    fn other_cgroups_are_of_no_pod() {
        for path in [
            "/",
            "/user.slice/user-1000.slice/session-1.scope",
            "/system.slice/kubelet.service",
            "/system.slice/podman-6b1d9c5e.scope",
            "/kubepods.slice/kubepods-burstable.slice",
            "/machine.slice/libpod-5f0c9b8f1a2b3c4d5e6f708192a3b4c5d6e7f8091a2b3c4d5e6f708192a3b4c5.scope",
            "/podcast/pod",
        ] {
            assert_eq!(pod_of(&format!("0::{path}\n")), None, "{path}");
        }
        assert_eq!(pod_of(""), None);
        assert_eq!(pod_of("no colons"), None);
    }

    #[test]
    fn a_process_is_its_number_and_its_start() {
        let tail = "1 1 1 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 4711 0 0";
        assert_eq!(started(&format!("7 (a) S {tail}")), Some(4711));
        assert_eq!(started(&format!("7 (a) b) (c d) R {tail}")), Some(4711));
        assert_eq!(started(&format!("7 (a) Z {tail}")), None);
        assert_eq!(started("7 (a) S 1"), None);
        assert_eq!(started(""), None);
        assert_eq!(inner_pid("Name:\tx\nNSpid:\t7000\t12\t3\n"), Some(3));
        assert_eq!(inner_pid("Name:\tx\n"), None);
    }

    fn process(proc: &Path, pid: u32, mountinfo: &[u8]) {
        let folder = proc.join(pid.to_string());
        fs::create_dir(&folder).unwrap();
        let tail = "1 1 1 0 -1 4194560 1 0 0 0 0 0 0 0 20 0 1 0 4711 0 0";
        fs::write(folder.join("stat"), format!("{pid} (x) S {tail}")).unwrap();
        fs::write(folder.join("status"), format!("NSpid:\t{pid}\t1\n")).unwrap();
        let cgroup = format!("0::/kubepods/burstable/pod{UID}/{ID}\n");
        fs::write(folder.join("cgroup"), cgroup).unwrap();
        fs::write(folder.join("mountinfo"), mountinfo).unwrap();
    }

    #[test]
    fn the_mounts_of_a_container_name_its_devices() {
        let proc = tempfile::tempdir().unwrap();
        let mounts = b"1 2 0:9 / /\xff rw - tmpfs tmpfs rw\n\
            700 600 0:22 /tranche/shares/u/u-gpu-0/cap /a ro - tmpfs tmpfs rw\n\
            701 600 0:22 /tranche/shares/u/u-gpu-0/account /b rw - tmpfs tmpfs rw\n\
            702 600 0:23 /u-gpu-1/cap /u-gpu-2 ro - tmpfs tmpfs rw\n\
            703 600 8:1 /var/lib/kubelet/pods/6b1d9c5e-3f5c-4a2b-9a5b-0d5e6f7a8b9c/containers/main/0a1b2c3d /dev/termination-log rw - ext4 /dev/sda1 rw\n";
        process(proc.path(), 7, mounts);
        let known = ["u-gpu-0", "u-gpu-1", "u-gpu-2"];
        let found = Proc::new(proc.path())
            .identify(7, |key| known.contains(&key))
            .unwrap();
        assert_eq!(found.keys, ["u-gpu-0", "u-gpu-1"]);
        assert_eq!(found.pod.as_deref(), Some(UID));
        assert_eq!(found.container.as_deref(), Some("main"));
        assert_eq!(found.inner_pid, Some(1));
        assert_eq!(
            found.id,
            ProcessId {
                pid: 7,
                started: 4711
            }
        );
        assert_eq!(Proc::new(proc.path()).identify(8, |_| true), None);

        // A folder of another pod, which the tenant has mounted.
        let mounts = b"703 600 8:1 /pods/another/containers/main/0a /x rw - ext4 /dev/sda1 rw\n";
        process(proc.path(), 9, mounts);
        let found = Proc::new(proc.path()).identify(9, |_| false);
        assert_eq!(found.unwrap().container, None);
    }

    #[test]
    fn this_process_is_in_its_own_namespace_and_nowhere_is_not() {
        let me = Proc::new("/proc")
            .identify(std::process::id(), |_| false)
            .unwrap();
        assert_eq!(me.inner_pid, Some(std::process::id().into()));
        assert_eq!(Proc::new("/proc").started(me.id.pid), Some(me.id.started));
        assert!(!Proc::new("/nowhere").is_own_namespace());
    }
}
