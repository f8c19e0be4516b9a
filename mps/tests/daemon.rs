//! The supervisor with NVIDIA's own control daemon, of Debian's driver 535. As root, without a GPU: the daemon takes limits and
//! clients; its servers end, because there is no device.
//!
//! Each test has a folder of its own, so that they run side by side, and beside other daemons of the machine.
#![forbid(unsafe_code)]
#![allow(clippy::unwrap_used, reason = "what fails here fails the test")]

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use tempfile::TempDir;
use tranche_mps::client::{Client, ClientError};
use tranche_mps::control::Control;
use tranche_mps::layout::{DeviceId, Files};
use tranche_mps::limits::Limits;
use tranche_mps::protocol::Health;

const DEVICE: &str = "GPU-00112233-4455-6677-8899-aabbccddeeff";
const OTHER: &str = "GPU-ffeeddcc-bbaa-9988-7766-554433221100";
const LIMITS: Limits = Limits {
    thread_percentage: 100,
    memory_mib: Some(4607),
};
/// How long a test waits for another process.
const PATIENCE: Duration = Duration::from_secs(30);

fn device(uuid: &str) -> DeviceId {
    uuid.to_owned().try_into().unwrap()
}

/// The folder of a package of Debian's driver.
fn package(name: &str) -> PathBuf {
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../simulator/debian-driver");
    let output = Command::new(script).arg(name).output().unwrap();
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap().trim().into()
}

/// A driver root with MPS and libcuda, as Debian lays them out.
fn driver() -> &'static Path {
    static DRIVER: OnceLock<TempDir> = OnceLock::new();
    let root = DRIVER.get_or_init(|| {
        let root = tempfile::tempdir().unwrap();
        for name in ["nvidia-cuda-mps", "libcuda1"] {
            let mut source = package(name).into_os_string();
            source.push("/.");
            let mut copy = Command::new("cp");
            copy.arg("-a").arg(source).arg(root.path());
            assert!(copy.status().unwrap().success());
        }
        fs::set_permissions(root.path(), fs::Permissions::from_mode(0o755)).unwrap();
        root
    });
    root.path()
}

/// A supervisor, which ends with the test; so do its daemons.
struct Supervisor {
    folder: TempDir,
    process: Child,
}

impl Supervisor {
    async fn start() -> Self {
        let folder = tempfile::tempdir().unwrap();
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
        let process = spawn(folder.path(), driver());
        let supervisor = Self { folder, process };
        supervisor.answers().await;
        supervisor
    }

    async fn answers(&self) {
        eventually("the supervisor answers", async || {
            self.client().list().is_ok()
        })
        .await;
    }

    fn client(&self) -> Client {
        Client::new(self.folder.path())
    }

    fn files(&self, uuid: &str) -> Files {
        Files::of(self.folder.path(), &device(uuid))
    }

    /// A control that asks a daemon directly, without the supervisor.
    fn control(&self, uuid: &str) -> Control {
        Control {
            program: driver().join("usr/bin/nvidia-cuda-mps-control"),
            pipes: self.files(uuid).pipes(),
        }
    }

    fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    async fn restart(&mut self) {
        self.kill();
        // A process that it was about to start has the lock until it executes its program.
        eventually("nobody holds the lock", async || {
            let lock = fs::File::open(self.folder.path().join("lock")).unwrap();
            lock.try_lock().is_ok()
        })
        .await;
        self.process = spawn(self.folder.path(), driver());
        self.answers().await;
    }
}

impl Drop for Supervisor {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
        for uuid in [DEVICE, OTHER] {
            let files = self.files(uuid);
            for pid in processes_of(&files) {
                signal(pid, "KILL");
            }
            let _ = tranche_mps::daemon::remove_folders(&files);
        }
    }
}

fn spawn(folder: &Path, driver: &Path) -> Child {
    Command::new(env!("CARGO_BIN_EXE_tranche-mps"))
        .args(["run", "--shm-size=1048576", "--folder"])
        .arg(folder)
        .arg("--driver-root")
        .arg(driver)
        .stdin(Stdio::null())
        .spawn()
        .unwrap()
}

/// The daemons of a device, by their name.
fn processes_of(files: &Files) -> Vec<u32> {
    let name = files.driver().join("nvidia-cuda-mps-control");
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
        let first = line.split(|&byte| byte == 0).next().unwrap_or_default();
        if first == name.as_os_str().as_encoded_bytes() {
            found.extend(
                entry
                    .file_name()
                    .to_str()
                    .and_then(|pid| pid.parse::<u32>().ok()),
            );
        }
    }
    found
}

fn signal(pid: u32, name: &str) {
    let _ = Command::new("kill")
        .args([format!("-{name}"), pid.to_string()])
        .status();
}

async fn eventually(what: &str, mut holds: impl AsyncFnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds().await {
        assert!(Instant::now() < deadline, "not so: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

#[tokio::test]
async fn a_daemon_has_its_limits_when_it_is_reported_ready() {
    let supervisor = Supervisor::start().await;
    let limits = Limits {
        thread_percentage: 30,
        memory_mib: Some(900),
    };
    let daemon = supervisor.client().ensure(device(DEVICE), limits).unwrap();
    assert_eq!(daemon.health, Health::Ready);
    assert_eq!(
        processes_of(&supervisor.files(DEVICE)),
        [daemon.pid.unwrap()]
    );
    let control = supervisor.control(DEVICE);
    for (question, answer) in [
        ("get_default_active_thread_percentage", "30.0"),
        ("get_default_device_pinned_mem_limit 0", "900M"),
    ] {
        assert_eq!(control.ask(question).await.unwrap(), answer);
    }
}

/// The daemon turns the others away, some with an empty answer.
#[tokio::test]
async fn one_of_many_that_ask_at_once_gets_the_answer_or_an_error() {
    let supervisor = Supervisor::start().await;
    supervisor.client().ensure(device(DEVICE), LIMITS).unwrap();
    let askers = std::array::from_fn::<_, 8, _>(|_| {
        let control = supervisor.control(DEVICE);
        tokio::spawn(async move {
            let mut answered = 0;
            for _ in 0..100 {
                if let Ok(answer) = control.ask("get_default_device_pinned_mem_limit 0").await {
                    assert_eq!(answer, "4G");
                    answered += 1;
                }
            }
            answered
        })
    });
    for asker in askers {
        assert_ne!(asker.await.unwrap(), 0);
    }
}

#[tokio::test]
async fn asking_again_changes_the_limits_and_not_the_daemon() {
    let supervisor = Supervisor::start().await;
    let client = supervisor.client();
    let first = client.ensure(device(DEVICE), LIMITS).unwrap();
    let limits = Limits {
        memory_mib: None,
        ..LIMITS
    };
    let second = client.ensure(device(DEVICE), limits).unwrap();
    assert_eq!(first.pid, second.pid);
    let control = supervisor.control(DEVICE);
    let asked = control.ask("get_default_device_pinned_mem_limit 0").await;
    assert_eq!(asked.unwrap(), "");
}

/// Why limits are set by index: NVIDIA's own stack has set them by UUID. If this fails with a later driver, they may be set by UUID
/// there.
#[tokio::test]
async fn by_uuid_the_daemon_sets_no_limit_and_says_nothing() {
    let supervisor = Supervisor::start().await;
    supervisor.client().ensure(device(DEVICE), LIMITS).unwrap();
    let control = supervisor.control(DEVICE);
    let ask = async |command: &str| control.ask(command).await.unwrap();
    assert_eq!(ask("get_default_device_pinned_mem_limit 0").await, "4G");
    assert_eq!(
        ask(&format!("set_default_device_pinned_mem_limit {DEVICE} 3G")).await,
        ""
    );
    assert_eq!(ask("get_default_device_pinned_mem_limit 0").await, "");
}

#[tokio::test]
async fn a_daemon_that_was_killed_comes_back_with_its_limits() {
    let supervisor = Supervisor::start().await;
    let client = supervisor.client();
    let first = client.ensure(device(DEVICE), LIMITS).unwrap();
    let other = client.ensure(device(OTHER), LIMITS).unwrap();
    signal(first.pid.unwrap(), "KILL");
    eventually("another daemon is ready", async || {
        let daemons = client.list().unwrap();
        daemons.iter().any(|daemon| {
            daemon.device == first.device
                && daemon.health == Health::Ready
                && daemon.pid.is_some_and(|pid| Some(pid) != first.pid)
                && daemon.restarts == 1
        })
    })
    .await;
    let control = supervisor.control(DEVICE);
    let asked = control.ask("get_default_device_pinned_mem_limit 0").await;
    assert_eq!(asked.unwrap(), "4G");
    assert_eq!(processes_of(&supervisor.files(OTHER)), [other.pid.unwrap()]);
}

#[tokio::test]
async fn a_daemon_lives_on_while_its_supervisor_is_replaced() {
    let mut supervisor = Supervisor::start().await;
    let first = supervisor.client().ensure(device(DEVICE), LIMITS).unwrap();
    supervisor.restart().await;
    eventually("the daemon is adopted", async || {
        let daemons = supervisor.client().list().unwrap();
        daemons
            .iter()
            .any(|daemon| daemon.pid == first.pid && daemon.health == Health::Ready)
    })
    .await;
    // It is watched and ended as one's own.
    signal(first.pid.unwrap(), "KILL");
    eventually("another daemon is ready", async || {
        let daemons = supervisor.client().list().unwrap();
        daemons
            .iter()
            .any(|daemon| daemon.pid.is_some_and(|pid| Some(pid) != first.pid))
    })
    .await;
    supervisor.client().end(device(DEVICE)).unwrap();
    assert_eq!(processes_of(&supervisor.files(DEVICE)), [0_u32; 0]);
}

#[tokio::test]
async fn a_daemon_that_died_without_a_supervisor_is_started_again() {
    let mut supervisor = Supervisor::start().await;
    let first = supervisor.client().ensure(device(DEVICE), LIMITS).unwrap();
    supervisor.kill();
    signal(first.pid.unwrap(), "KILL");
    supervisor.restart().await;
    eventually("another daemon is ready", async || {
        let daemons = supervisor.client().list().unwrap();
        daemons
            .iter()
            .any(|daemon| daemon.health == Health::Ready && daemon.pid.is_some())
    })
    .await;
}

/// The supervisor was killed after it had started a daemon, and before it had noted which.
#[tokio::test]
async fn a_daemon_that_no_record_names_is_replaced() {
    let mut supervisor = Supervisor::start().await;
    let first = supervisor.client().ensure(device(DEVICE), LIMITS).unwrap();
    supervisor.kill();
    let record = supervisor.files(DEVICE).record();
    fs::write(&record, r#"{"limits":{"threadPercentage":100}}"#).unwrap();
    supervisor.restart().await;
    let second = supervisor.client().ensure(device(DEVICE), LIMITS).unwrap();
    assert_ne!(first.pid, second.pid);
    assert_eq!(
        processes_of(&supervisor.files(DEVICE)),
        [second.pid.unwrap()]
    );
}

/// After a supervisor's absence the number may belong to another process.
#[tokio::test]
async fn a_process_that_reuses_a_recorded_pid_is_not_touched() {
    let mut supervisor = Supervisor::start().await;
    supervisor.client().ensure(device(DEVICE), LIMITS).unwrap();
    supervisor.kill();
    // Ends with this test, however that ends.
    let mut foreign = Command::new("cat")
        .stdin(Stdio::piped())
        .process_group(0)
        .spawn()
        .unwrap();
    let record = supervisor.files(DEVICE).record();
    let mut content: serde_json::Value =
        serde_json::from_slice(&fs::read(&record).unwrap()).unwrap();
    content["process"]["pid"] = foreign.id().into();
    fs::write(&record, content.to_string()).unwrap();
    supervisor.restart().await;
    let daemon = supervisor.client().ensure(device(DEVICE), LIMITS).unwrap();
    assert_ne!(daemon.pid, Some(foreign.id()));
    supervisor.client().end(device(DEVICE)).unwrap();
    assert_eq!(foreign.try_wait().unwrap(), None);
    foreign.kill().unwrap();
    foreign.wait().unwrap();
}

#[tokio::test]
async fn an_ended_daemon_leaves_nothing() {
    let supervisor = Supervisor::start().await;
    let client = supervisor.client();
    client.ensure(device(DEVICE), LIMITS).unwrap();
    let files = supervisor.files(DEVICE);
    for _ in 0..2 {
        client.end(device(DEVICE)).unwrap();
        assert_eq!(processes_of(&files), [0_u32; 0]);
        assert!(!files.folder.exists());
        let mounts = fs::read_to_string("/proc/self/mounts").unwrap();
        assert!(!mounts.contains(files.folder.to_str().unwrap()), "{mounts}");
        assert_eq!(client.list().unwrap(), []);
    }
}

/// One that an administrator or NVIDIA's stack started.
#[tokio::test]
async fn a_daemon_of_somebody_else_is_not_touched() {
    let supervisor = Supervisor::start().await;
    let foreign = tempfile::tempdir().unwrap();
    let mut daemon = Command::new(driver().join("usr/bin/nvidia-cuda-mps-control"))
        .arg("-f")
        .env("CUDA_MPS_PIPE_DIRECTORY", foreign.path())
        .env("CUDA_MPS_LOG_DIRECTORY", foreign.path())
        .stdout(Stdio::null())
        .spawn()
        .unwrap();
    let client = supervisor.client();
    client.ensure(device(DEVICE), LIMITS).unwrap();
    client.end(device(DEVICE)).unwrap();
    assert_eq!(daemon.try_wait().unwrap(), None);
    daemon.kill().unwrap();
    daemon.wait().unwrap();
}

/// NVIDIA's libcuda as a client, of any user, in a container's view: it finds the daemon without any variable.
#[tokio::test]
async fn a_client_without_root_reaches_the_daemon() {
    let supervisor = Supervisor::start().await;
    supervisor.client().ensure(device(DEVICE), LIMITS).unwrap();
    let files = supervisor.files(DEVICE);
    let libcuda = driver().join("usr/lib/x86_64-linux-gnu/nvidia/current/libcuda.so.1");
    let program = format!(
        "import ctypes; print(ctypes.CDLL('{}').cuInit(0))",
        libcuda.display()
    );
    let in_container = format!(
        "mkdir -p /tmp/nvidia-mps && mount --bind {} /tmp/nvidia-mps && exec setpriv --reuid 1000 --regid 1000 --clear-groups \
         env -i /usr/bin/python3 -c \"{program}\"",
        files.pipes().display()
    );
    let client = Command::new("unshare")
        .args(["--mount", "sh", "-c", &in_container])
        .process_group(0)
        .output()
        .unwrap();
    // CUDA_ERROR_MPS_CONNECTION_FAILED: without a device the daemon's server ends.
    assert_eq!(
        String::from_utf8_lossy(&client.stdout),
        "805\n",
        "{client:?}"
    );
    let log = fs::read_to_string(files.log()).unwrap();
    assert!(log.contains("from user 1000"), "{log}");
}

/// A connection of a hostile client stops the daemon in the same way.
#[tokio::test]
async fn new_claims_are_refused_while_a_daemon_does_not_answer() {
    let supervisor = Supervisor::start().await;
    let client = supervisor.client();
    let first = client.ensure(device(DEVICE), LIMITS).unwrap();
    let pid = first.pid.unwrap();
    signal(pid, "STOP");
    let error = client.ensure(device(DEVICE), LIMITS).unwrap_err();
    signal(pid, "CONT");
    assert!(
        matches!(&error, ClientError::Refused(why) if why.contains("has not answered")),
        "{error}"
    );
    let second = client.ensure(device(DEVICE), LIMITS).unwrap();
    assert_eq!(second.pid, first.pid);
}

/// Without clients the daemon is replaced, so that no file of the former driver is used.
#[tokio::test]
async fn after_an_update_of_the_driver_the_daemon_is_the_new_ones() {
    let folder = tempfile::tempdir().unwrap();
    let root = tempfile::tempdir().unwrap();
    let bin = root.path().join("usr/bin");
    let lib = root.path().join("usr/lib/x86_64-linux-gnu");
    fs::create_dir_all(&bin).unwrap();
    fs::create_dir_all(&lib).unwrap();
    for (name, from) in [
        ("nvidia-cuda-mps-control", "usr/bin"),
        ("nvidia-cuda-mps-server", "usr/sbin"),
    ] {
        fs::copy(driver().join(from).join(name), bin.join(name)).unwrap();
    }
    let install = |version: &str| {
        let link = lib.join("libcuda.so.1");
        let _ = fs::remove_file(&link);
        fs::write(lib.join(version), version).unwrap();
        std::os::unix::fs::symlink(version, &link).unwrap();
    };
    install("libcuda.so.535.1");
    let mut supervisor = Supervisor {
        process: spawn(folder.path(), root.path()),
        folder,
    };
    supervisor.answers().await;
    let client = supervisor.client();
    let first = client.ensure(device(DEVICE), LIMITS).unwrap();
    let same = client.ensure(device(DEVICE), LIMITS).unwrap();
    assert_eq!(same.pid, first.pid);
    install("libcuda.so.550.1");
    let second = client.ensure(device(DEVICE), LIMITS).unwrap();
    assert_ne!(second.pid, first.pid);
    let files = supervisor.files(DEVICE);
    assert_eq!(processes_of(&files), [second.pid.unwrap()]);
    let libcuda = fs::read_link(files.driver().join("libcuda.so.1")).unwrap();
    assert!(libcuda.ends_with("libcuda.so.550.1"), "{libcuda:?}");
    client.end(device(DEVICE)).unwrap();
    supervisor.kill();
}

#[tokio::test]
async fn a_driver_without_mps_is_an_error_that_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let root = tempfile::tempdir().unwrap();
    let mut process = spawn(folder.path(), root.path());
    let client = Client::new(folder.path());
    eventually("the supervisor answers", async || client.list().is_ok()).await;
    let error = client.ensure(device(DEVICE), LIMITS).unwrap_err();
    let text = error.to_string();
    for named in [
        "nvidia-cuda-mps-control",
        "libcuda.so.1",
        root.path().to_str().unwrap(),
    ] {
        assert!(text.contains(named), "{text}");
    }
    assert!(!Files::of(folder.path(), &device(DEVICE)).folder.exists());
    assert_eq!(client.list().unwrap(), []);
    process.kill().unwrap();
    process.wait().unwrap();
}

#[tokio::test]
async fn only_one_supervisor_runs_in_a_folder() {
    let supervisor = Supervisor::start().await;
    let second = spawn(supervisor.folder.path(), driver()).wait().unwrap();
    assert!(!second.success());
    supervisor.answers().await;
}
