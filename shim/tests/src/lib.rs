//! A capped container without a cluster: the layout that the node plugin gives a container (see `docs/`),
//! made in a private mount namespace, and programs that run in it.
//!
//! The shim does not know that it is being tested: its paths are constants, so the tests create those
//! paths, which needs root. A [`World`] belongs to the thread that made it; its children see it.
#![allow(
    clippy::unwrap_used,
    clippy::missing_panics_doc,
    clippy::must_use_candidate,
    reason = "a test that cannot be set up fails"
)]

pub mod gpu_time;
mod mount;
mod node;
pub mod priority;
mod probe_client;
mod steps;

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

pub use node::{Gpu, Machine, Node, install};
pub use probe_client::{Answer, Probe};
pub use steps::Traced;
use tranche_cdi_hook::compat::DriverVersion;
use tranche_cdi_hook::cover::{Cover, CoverError, Covered, StandIn, cover};
use tranche_cdi_hook::libraries::Process;
use tranche_cdi_hook::rootfs::Rootfs;
use tranche_node::page::AccountFile;
use tranche_shim_core::compute::{Refill, refill};
use tranche_shim_core::paths::{LOAD, RESIDENT};
use tranche_shim_core::{AccountPage, AccountSnapshot, CapPage, ComputePolicy, Priority, layout};

/// Where a container's shares lie.
pub const SHARES: &str = tranche_shim_core::paths::SHARES;
/// The driver behind the shim: what loads it by this path has no shim before it.
pub const DRIVER: &str = "/usr/lib/tranche/driver/libcuda.so.1";
const CLAIM: &str = "5f0c2b9e-0000-4000-8000-000000000001";
const OURS: &str = "/usr/lib/tranche";
const PRELOAD: &str = "/etc/ld.so.preload";
const LIBRARIES: &str = "/usr/lib/x86_64-linux-gnu";

/// Folders with an overlay, so that a container can change them without changing the machine, and a name for each.
const OVERLAID: [(&str, &str); 3] = [
    ("/usr/lib", "lib"),
    ("/etc", "etc"),
    ("/usr/local", "local"),
];

/// A container's file system, in a mount namespace of the calling thread.
#[derive(Debug)]
pub struct World {
    folder: PathBuf,
    node: Option<Arc<Node>>,
}

/// The driver behind the shim.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Driver {
    /// `odd-driver.c` and `odd-nvml.c`, which tests can script.
    Odd,
    /// The real driver of a Debian release (`bookworm`, `trixie`), which finds no GPU.
    Real(&'static str),
    /// The simulator's realistic machine (`simulator/README.md`), with so many H100 of 80 GB.
    Simulator(u32),
    /// A simulated machine, with so many GPUs.
    Machine(Machine, u32),
    /// No driver.
    Missing,
}

/// The workspace's target folder.
#[must_use]
pub fn target() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target")
}

/// One of the shim's built libraries.
#[must_use]
pub fn built(library: &str) -> PathBuf {
    let path = target().join("shim").join(library);
    assert!(
        path.exists(),
        "{}: missing: run `make shim` first",
        path.display()
    );
    path.canonicalize().unwrap()
}

/// The project's cache folder, as its scripts define it.
#[must_use]
pub fn cache() -> PathBuf {
    let home = || PathBuf::from(std::env::var_os("HOME").expect("HOME is set")).join(".cache");
    std::env::var_os("XDG_CACHE_HOME")
        .map_or_else(home, PathBuf::from)
        .join("tranche")
}

/// The real drivers' libraries, brought from Debian at the first call.
#[must_use]
pub fn real_drivers() -> PathBuf {
    static FETCHED: std::sync::OnceLock<PathBuf> = std::sync::OnceLock::new();
    FETCHED
        .get_or_init(|| {
            let folder = cache().join("drivers");
            let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("fetch-drivers");
            let done = Command::new(script).arg(&folder).output().unwrap();
            assert!(
                done.status.success(),
                "fetch-drivers: {}",
                text(&done.stderr)
            );
            folder.canonicalize().unwrap()
        })
        .clone()
}

/// Bytes as text, for messages.
#[must_use]
pub fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

impl World {
    /// A container with the shim in front of `driver`, preloaded and over the driver's own names,
    /// and no share.
    #[must_use]
    pub fn new(driver: Driver) -> Self {
        let folder = new_folder();
        let simulated = match driver {
            Driver::Simulator(gpus) => Some((Machine::Realistic, gpus)),
            Driver::Machine(machine, gpus) => Some((machine, gpus)),
            _ => None,
        };
        let node = simulated.map(|(machine, gpus)| {
            let root = folder.with_extension("node");
            Arc::new(Node::start(root, machine, gpus))
        });
        Self::with(driver, node, folder)
    }

    /// A container on a node with other containers. Each is in its own thread, which was started before any of
    /// them was made.
    #[must_use]
    pub fn on(node: &Arc<Node>) -> Self {
        Self::with(Driver::Simulator(0), Some(Arc::clone(node)), new_folder())
    }

    fn with(driver: Driver, node: Option<Arc<Node>>, folder: PathBuf) -> Self {
        mount::private_namespace();
        mount::tmpfs(&folder);
        for (over, name) in OVERLAID {
            let (upper, work) = (folder.join(name), folder.join(format!("{name}.work")));
            fs::create_dir(&upper).unwrap();
            fs::create_dir(&work).unwrap();
            mount::overlay(Path::new(over), &upper, &work);
        }
        let world = Self { folder, node };
        fs::create_dir_all(format!("{OURS}/driver")).unwrap();
        fs::create_dir_all(SHARES).unwrap();
        for library in ["libcuda.so.1", "libnvidia-ml.so.1"] {
            fs::copy(built(library), format!("{OURS}/{library}")).unwrap();
            let _ = fs::remove_file(format!("{LIBRARIES}/{library}"));
            fs::copy(built(library), format!("{LIBRARIES}/{library}")).unwrap();
        }
        world.install(driver);
        world.with_preload();
        world
    }

    fn install(&self, driver: Driver) {
        let real = |library: &str| format!("{OURS}/driver/{library}");
        self.devices();
        match driver {
            Driver::Missing => {}
            Driver::Simulator(_) | Driver::Machine(..) => {
                let node = self.node();
                for library in ["libcuda.so.1", "libnvidia-ml.so.1"] {
                    fs::copy(
                        node.root().join(&LIBRARIES[1..]).join(library),
                        real(library),
                    )
                    .unwrap();
                }
                self.daemon(node);
            }
            Driver::Real(release) => {
                for library in ["libcuda.so.1", "libnvidia-ml.so.1"] {
                    fs::copy(real_drivers().join(release).join(library), real(library)).unwrap();
                }
            }
            Driver::Odd => {
                for (library, source) in [
                    ("libcuda.so.1", "odd-driver.c"),
                    ("libnvidia-ml.so.1", "odd-nvml.c"),
                ] {
                    let soname = format!("-Wl,-soname,{library}");
                    compile(
                        source,
                        real(library),
                        &["-shared", "-fPIC", "-ldl", &soname],
                    );
                }
            }
        }
    }

    /// Mounts the world's own /dev, with the node's GPUs if it has some: a real driver makes its nodes there itself.
    fn devices(&self) {
        let dev = self.folder.join("dev");
        fs::create_dir_all(&dev).unwrap();
        let ours = ["null", "zero", "urandom"].map(|name| Path::new("/dev").join(name));
        let theirs = self.node.iter().flat_map(|node| {
            fs::read_dir(node.root().join("dev"))
                .unwrap()
                .map(|entry| entry.unwrap().path())
        });
        for device in ours
            .into_iter()
            .chain(theirs.filter(|path| path.is_file() || !path.is_dir()))
        {
            let to = dev.join(device.file_name().unwrap());
            File::create(&to).unwrap();
            mount::bind(&device, &to, false);
        }
        mount::move_over(&dev, Path::new("/dev"));
    }

    /// The socket of the node's daemon.
    fn daemon(&self, node: &Node) {
        let run = self.folder.join("run");
        let socket = run.join("nvidia-persistenced");
        fs::create_dir_all(&socket).unwrap();
        mount::bind(&node.root().join("run/nvidia-persistenced"), &socket, false);
        mount::move_over(&run, Path::new("/run"));
    }

    /// The node, if there is one.
    #[must_use]
    pub fn node(&self) -> &Node {
        self.node.as_ref().expect("the simulator's")
    }

    /// Preloads both libraries into every program, as at the start.
    pub fn with_preload(&self) {
        let list = format!("{OURS}/libcuda.so.1\n{OURS}/libnvidia-ml.so.1\n");
        fs::write(PRELOAD, list).unwrap();
    }

    /// Removes the preload list: only the files with the driver's names are the shim's.
    pub fn without_preload(&self) {
        fs::remove_file(PRELOAD).unwrap();
    }

    /// Does what the container's hook does with the image's own copies of the driver's libraries, for a
    /// process that starts with `env`, on a node with the driver `node`.
    pub fn cover_libraries(&self, env: &[&str], node: &str) -> Result<Covered, CoverError> {
        let shims = ["libcuda.so", "libnvidia-ml.so"].map(|stem| StandIn {
            stem: stem.to_owned(),
            path: format!("{OURS}/{stem}.1").into(),
        });
        let real_cuda = PathBuf::from(format!("{OURS}/driver/libcuda.so.1"));
        // A container runtime has mounted them.
        for shim in shims.iter().map(|shim| &shim.path).chain([&real_cuda]) {
            mount::bind(shim, shim, true);
        }
        let process = Process {
            cwd: "/".into(),
            env: env.iter().map(ToString::to_string).collect(),
        };
        let what = Cover {
            shims: shims.into(),
            companions: Vec::new(),
            real_cuda,
            node: DriverVersion::parse(node),
        };
        cover(&Rootfs::open(Path::new("/")).unwrap(), &process, &what)
    }

    /// Adds a share of `limit` bytes (`None`: a GPU without a cap) on a GPU whose contexts take
    /// nothing.
    pub fn share(&self, key: &str, gpu_uuid: &str, limit: Option<u64>) -> Share {
        self.share_of_time(key, gpu_uuid, limit, None, ComputePolicy::Strict)
    }

    /// Adds a share of `limit` bytes and `cores` percent of the GPU's time.
    pub fn share_of_time(
        &self,
        key: &str,
        gpu_uuid: &str,
        limit: Option<u64>,
        cores: Option<u8>,
        compute_policy: ComputePolicy,
    ) -> Share {
        self.share_of(&CapPage {
            cores,
            compute_policy,
            ..uncapped(key, gpu_uuid, limit)
        })
    }

    /// Adds a share of half of the GPU's time and a priority. `load` is the load page of the GPU, on the node.
    pub fn share_of_priority(
        &self,
        key: &str,
        gpu_uuid: &str,
        limit: u64,
        priority: Priority,
        load: &Path,
    ) -> Share {
        let share = self.share_of(&CapPage {
            cores: Some(50),
            priority,
            ..uncapped(key, gpu_uuid, Some(limit))
        });
        let mounted = share.mounted.join(LOAD);
        match priority {
            Priority::Normal => {}
            Priority::High | Priority::Low { .. } => {
                File::create(&mounted).unwrap();
                mount::bind(load, &mounted, priority != Priority::High);
            }
        }
        share
    }

    /// Adds a share of `limit` bytes on a GPU where a context takes `context` bytes.
    pub fn share_beside(
        &self,
        key: &str,
        gpu_uuid: &str,
        limit: Option<u64>,
        context_memory: u64,
    ) -> Share {
        self.share_of(&CapPage {
            context_memory,
            ..uncapped(key, gpu_uuid, limit)
        })
    }

    /// Adds a concurrent share of `limit` bytes, whose processes have `threads` percent of the GPU each.
    pub fn share_by_mps(&self, key: &str, gpu_uuid: &str, limit: u64, threads: u8) -> Share {
        self.share_of(&CapPage {
            mps_threads: Some(threads),
            ..uncapped(key, gpu_uuid, Some(limit))
        })
    }

    /// Adds an oversubscribed share of `limit` bytes, with `resident` bytes for memory that cannot move, on a GPU where a
    /// context takes `context` bytes.
    pub fn share_oversubscribed(
        &self,
        key: &str,
        gpu_uuid: &str,
        (limit, resident): (u64, u64),
        context_memory: u64,
    ) -> Share {
        let share = self.share_of(&CapPage {
            resident_limit: Some(resident),
            context_memory,
            ..uncapped(key, gpu_uuid, Some(limit))
        });
        Self::add_page(&share, RESIDENT, AccountPage::initial(), false);
        share
    }

    /// Mounts a folder of the machine at a path of the container, which must be there.
    pub fn mount(&self, folder: &Path, at: &Path) {
        mount::bind(folder, at, false);
    }

    /// Removes the mount.
    pub fn unmount(&self, at: &Path) {
        mount::detach(at);
    }

    fn share_of(&self, page: &CapPage<'_>) -> Share {
        let key = page.device_key;
        self.share_with(key, &page.encode().unwrap(), AccountPage::initial())
    }

    /// Adds a share with any content.
    pub fn share_with(&self, key: &str, cap: &[u8], account: &[u8]) -> Share {
        let share = Share {
            pages: self.folder.join("pages").join(key),
            mounted: Path::new(SHARES).join(key),
        };
        fs::create_dir_all(&share.pages).unwrap();
        fs::create_dir_all(&share.mounted).unwrap();
        Self::add_page(&share, "cap", cap, true);
        Self::add_page(&share, "account", account, false);
        share
    }

    fn add_page(share: &Share, page: &str, content: &[u8], read_only: bool) {
        let (on_node, mounted) = (share.pages.join(page), share.mounted.join(page));
        write(&on_node, content, if read_only { 0o444 } else { 0o666 });
        File::create(&mounted).unwrap();
        mount::bind(&on_node, &mounted, read_only);
    }

    /// Removes one of a share's pages.
    pub fn remove_page(&self, share: &Share, page: &str) {
        let mounted = share.mounted.join(page);
        mount::detach(&mounted);
        fs::remove_file(mounted).unwrap();
    }

    /// Removes a share.
    pub fn remove(&self, share: &Share) {
        for page in fs::read_dir(&share.mounted).unwrap() {
            mount::detach(&page.unwrap().path());
        }
        fs::remove_dir_all(&share.mounted).unwrap();
    }

    /// Mounts a share's cap page again, writable.
    pub fn make_writable(&self, share: &Share) {
        mount::detach(&share.mounted.join("cap"));
        mount::bind(&share.pages.join("cap"), &share.mounted.join("cap"), false);
    }

    /// A program of this container.
    #[must_use]
    pub fn command(&self, program: impl AsRef<OsStr>) -> Command {
        let mut command = Command::new(program);
        // The caller's own variables, for tools such as stdbuf.
        command.env_remove("LD_PRELOAD");
        command
    }

    /// Runs a program to its end.
    #[must_use]
    pub fn run(&self, program: impl AsRef<OsStr>, arguments: &[&str]) -> Output {
        self.command(program).args(arguments).output().unwrap()
    }

    /// Starts the probe. `load` is how it loads the driver: see `probe.rs`.
    #[must_use]
    pub fn probe(&self, load: &str) -> Probe {
        Probe::start(self.command(probe_path()).arg(load))
    }

    /// A folder for the test's own files.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }
}

/// Compiles a C file of this folder.
pub fn compile(source: &str, to: impl AsRef<OsStr>, arguments: &[&str]) {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(source);
    let done = Command::new("cc")
        .args(["-O1", "-w", "-o"])
        .arg(to)
        .arg(source)
        .args(arguments)
        .output()
        .unwrap();
    assert!(done.status.success(), "{}", text(&done.stderr));
}

/// The page of a share with no limit but that of its memory.
fn uncapped<'a>(key: &'a str, gpu_uuid: &'a str, memory_limit: Option<u64>) -> CapPage<'a> {
    CapPage {
        gpu_uuid,
        memory_limit,
        resident_limit: None,
        context_memory: 0,
        cores: None,
        mps_threads: None,
        compute_policy: ComputePolicy::Strict,
        priority: Priority::Normal,
        claim_uid: CLAIM,
        device_key: key,
    }
}

fn new_folder() -> PathBuf {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let folder = std::env::temp_dir().join(format!("tranche-shim-{}-{number}", std::process::id()));
    fs::create_dir(&folder).unwrap();
    folder
}

/// The probe's executable, of this program's profile.
#[must_use]
pub fn probe_path() -> PathBuf {
    // Cargo puts programs into its target folder, and tests into CARGO_BUILD_BUILD_DIR.
    let target = std::env::var_os("CARGO_TARGET_DIR").map(PathBuf::from);
    let target =
        target.unwrap_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../target"));
    let profile = if cfg!(debug_assertions) {
        "debug"
    } else {
        "release"
    };
    target.join(profile).join("tranche-shim-probe")
}

impl Drop for World {
    fn drop(&mut self) {
        // The mounts of the pages end with their folder.
        mount::detach("/dev".as_ref());
        if self.node.is_some() {
            mount::detach("/run".as_ref());
        }
        for (mounted, _) in OVERLAID {
            mount::detach(mounted.as_ref());
        }
        mount::detach(&self.folder);
        let _ = fs::remove_dir(&self.folder);
    }
}

/// A share's pages, as the node sees them.
#[derive(Debug)]
pub struct Share {
    pages: PathBuf,
    mounted: PathBuf,
}

impl Share {
    /// A copy of the account page.
    #[must_use]
    pub fn account(&self) -> Vec<u8> {
        fs::read(self.pages.join("account")).unwrap()
    }

    /// The account page, as the node opens it.
    #[must_use]
    pub fn account_file(&self) -> AccountFile {
        AccountFile::open(&self.pages.join("account")).unwrap()
    }

    /// Bytes that the account says are used.
    #[must_use]
    pub fn used(&self) -> u64 {
        self.read(|account| account.used())
    }

    /// Bytes of memory that cannot move, from the second account of an oversubscribed share.
    #[must_use]
    pub fn resident(&self) -> u64 {
        let page = fs::read(self.pages.join(RESIDENT)).unwrap();
        AccountPage::snapshot(&page).unwrap().used()
    }

    /// Reads the account.
    pub fn read<T>(&self, at: impl FnOnce(AccountSnapshot<'_>) -> T) -> T {
        at(AccountPage::snapshot(&self.account()).unwrap())
    }

    /// Grants it `rate` millionths of the GPU's time without an end, as the node does.
    pub fn grant(&self, rate: u64) {
        let refill = Refill {
            rate,
            until: u64::MAX,
            ..Refill::default()
        };
        let cap = File::options()
            .write(true)
            .open(self.pages.join("cap"))
            .unwrap();
        let at = refill::OFFSET as u64;
        cap.write_all_at(&refill.encode(), at + refill::offset_of_turn(1) as u64)
            .unwrap();
        cap.write_all_at(&1u64.to_le_bytes(), at).unwrap();
    }

    /// The folder of its pages, for a thread with other mounts, while this thread lives.
    #[must_use]
    pub fn pages_from_outside(&self) -> PathBuf {
        // SAFETY: always succeeds.
        let thread = unsafe { libc::gettid() };
        let root = format!("/proc/self/task/{thread}/root");
        Path::new(&root).join(self.pages.strip_prefix("/").unwrap())
    }

    /// Its folder in the container.
    #[must_use]
    pub fn mounted(&self) -> &Path {
        &self.mounted
    }

    /// The length that the account file must have.
    pub const ACCOUNT_LEN: usize = layout::LEN;
}

fn write(path: &Path, content: &[u8], mode: u32) {
    let mut file = File::create(path).unwrap();
    file.write_all(content).unwrap();
    file.set_permissions(fs::Permissions::from_mode(mode))
        .unwrap();
}
