//! The supervisor: grants a share to a command, and maintains it until the command has ended.
//!
//! It is not the command's parent: the process that becomes the command starts it, and it detaches
//! into a session of its own. If it is killed, the command keeps its cap, and the next `tranche
//! run` of the user removes what is left.

use std::io::{self, Read as _, Write as _};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};
use tranche_api::gpu_node::Inventory;
use tranche_driver::cdi::{NodePaths, Shim, container_path, driver_spec};
use tranche_driver::claim_spec::claim_spec;
use tranche_driver::journal::ClaimRecord;
use tranche_driver::preparation::PAGES;
use tranche_node::discover::discover;
use tranche_node::inventory::inventory;
use tranche_node::nvml::search::InstalledDriver;
use tranche_node::nvml::{Description, Driver as _, Opened};
use tranche_shim_core::AccountPage;

use crate::admit::admit;
use crate::args::Supervise;
use crate::contexts::{self, Measuring};
use crate::driver::placed;
use crate::duties::Duties;
use crate::shares::{Membership, Shares};
use crate::wire::{Answer, Grant, Request};

const SHIM: [&str; 2] = ["libcuda.so.1", "libnvidia-ml.so.1"];
/// How long to wait for the end of a share whose commands have ended.
const PATIENCE: Duration = Duration::from_secs(2);
const PRELOAD: &str = "/etc/ld.so.preload";

/// The supervisor's process; writes its answer to stdout.
pub fn main(args: &Supervise) -> ExitCode {
    if !args.detached {
        return detach(args);
    }
    // The terminal's signals are for the command, and no folder may be kept busy.
    let _ = rustix::process::setsid();
    let _ = std::env::set_current_dir("/");
    match serve() {
        Ok(()) => ExitCode::SUCCESS,
        Err(_) => ExitCode::FAILURE,
    }
}

/// Starts the supervisor a second time and ends, because the command must not have an unexpected child.
fn detach(args: &Supervise) -> ExitCode {
    let started = Command::new("/proc/self/exe")
        .args(["supervise", "--detached", &args.share])
        .spawn();
    match started {
        Ok(_) => ExitCode::SUCCESS,
        Err(error) => {
            answer(&Err(format!("cannot start the supervisor: {error}")));
            ExitCode::FAILURE
        }
    }
}

fn answer(answer: &Answer) {
    let mut line = serde_json::to_vec(answer).unwrap_or_default();
    line.push(b'\n');
    // If it cannot be written, the reader is gone.
    let _ = io::stdout().write_all(&line);
    let _ = io::stdout().flush();
}

fn serve() -> io::Result<()> {
    let mut text = Vec::new();
    io::stdin().read_to_end(&mut text)?;
    let request: Request = serde_json::from_slice(&text)?;
    let command = match Pid::from_raw(request.pid) {
        Some(pid) => pidfd_open(pid, PidfdFlags::empty())?,
        None => return Err(io::ErrorKind::InvalidInput.into()),
    };
    match grant(&request) {
        Ok((grant, held)) => {
            answer(&Ok(grant));
            held.look_after(&command);
        }
        Err(error) => answer(&Err(error)),
    }
    Ok(())
}

#[derive(Debug)]
struct GrantedShare {
    shares: Shares,
    membership: Membership,
    duties: Duties,
}

fn grant(request: &Request) -> Result<(Grant, GrantedShare), String> {
    let text = |e: &dyn std::error::Error| e.to_string();
    let root = &request.driver_root;
    let (opened, description) = describe(root)?;
    let shares = Shares::of_user().map_err(|e| text(&e))?;
    let mut inventory = inventory(&description, Path::new("/sys"));
    contexts::describe(&mut inventory, shares.base());
    let uuids: Vec<_> = description
        .gpus
        .iter()
        .map(|gpu| gpu.uuid.clone())
        .collect();

    let (record, membership) = enter(request, &uuids, &inventory, &shares)?;
    let Some(device) = record.plan.devices.first() else {
        return Err(format!("the share {} has no device", request.share));
    };
    let account = membership
        .folder()
        .join(&device.key)
        .join(tranche_shim_core::paths::ACCOUNT);
    let hidden = description
        .gpus
        .iter()
        .filter(|gpu| gpu.uuid != device.gpu_uuid)
        .map(|gpu| format!("/dev/nvidia{}", gpu.minor).into())
        .collect();
    let grant = specs(
        request,
        &record,
        &opened,
        &description,
        &shares,
        &membership,
        hidden,
    )?;
    let measuring = Measuring::new(device, &inventory, shares.base());
    Ok((
        grant,
        GrantedShare {
            shares,
            membership,
            duties: Duties::new(account, opened.nvml, measuring),
        },
    ))
}

/// Joins the share or creates it. Waits for blocking shares that end soon: a command that follows
/// another in a script must not be refused because of that one's share.
fn enter(
    request: &Request,
    gpus: &[String],
    inventory: &Inventory,
    shares: &Shares,
) -> Result<(ClaimRecord, Membership), String> {
    let text = |e: &dyn std::error::Error| e.to_string();
    let start = Instant::now();
    loop {
        let locked = shares.lock().map_err(|e| text(&e))?;
        let in_use = locked.in_use().map_err(|e| text(&e))?;
        let about_to_go = in_use.iter().any(|share| share.ended);
        let (existing, others): (Vec<_>, Vec<_>) = in_use
            .into_iter()
            .map(|share| share.record)
            .partition(|record| record.plan.allocation.uid == request.share);
        let existing = existing.first();
        if existing.is_some() && !request.joinable {
            let name = &request.share;
            return Err(format!(
                "the share {name} exists: join it by --share {name}"
            ));
        }
        let record = match admit(request, gpus, inventory, existing, &others) {
            Err(refusal) if refusal.may_pass() && about_to_go && start.elapsed() < PATIENCE => {
                drop(locked);
                std::thread::sleep(Duration::from_millis(5));
                continue;
            }
            other => other.map_err(|e| text(&e))?,
        };
        let membership = if existing.is_some() {
            locked.join(&request.share, request.pid)
        } else {
            let files = files(request, &record)?;
            locked.create(&request.share, request.pid, &record, &files)
        };
        return Ok((record, membership.map_err(|e| text(&e))?));
    }
}

/// The driver as NVML describes it.
fn describe(root: &Path) -> Result<(Opened, Description), String> {
    let driver = InstalledDriver::new(Path::new("/"), Some(root));
    let wrong = |e| format!("--driver-root {}: {e}", root.display());
    let opened = driver.open().map_err(wrong)?;
    let description = opened.nvml.describe().map_err(wrong)?;
    Ok((opened, description))
}

/// The two specs that a pod's container would get.
fn specs(
    request: &Request,
    record: &ClaimRecord,
    driver: &Opened,
    description: &Description,
    shares: &Shares,
    membership: &Membership,
    hidden: Vec<PathBuf>,
) -> Result<Grant, String> {
    let gpu_uuid = record.plan.devices.first().map_or("", |d| &d.gpu_uuid);
    let root = &request.driver_root;
    let wrong = |e: &dyn std::error::Error| format!("--driver-root {}: {e}", root.display());
    let found = discover(&driver.root, &description.driver_version).map_err(|e| wrong(&e))?;
    let (files, links) = placed(found.driver_files(root, driver.nodes.control()), root);
    let own_nodes = root.join("dev/nvidiactl").exists();
    let libraries = membership.folder().join("lib");
    let shim = Shim {
        pages: PAGES,
        folder: libraries.to_string_lossy().into_owned(),
    };
    let paths = NodePaths {
        metadata: None,
        // No share of the command line is concurrent.
        mps: "/run/tranche/mps".to_owned(),
        // None has a priority.
        load: "/run/tranche/load".to_owned(),
        shares: shares.base().to_string_lossy().into_owned(),
        // No container runtime runs the hooks.
        hooks: libraries.to_string_lossy().into_owned(),
        dev_root: if own_nodes {
            root.as_path()
        } else {
            Path::new("/")
        }
        .to_string_lossy()
        .into_owned(),
    };
    Ok(Grant {
        gpu_uuid: gpu_uuid.to_owned(),
        stage: membership.folder().join("stage"),
        driver: driver_spec(&files, &paths, &[shim]).map_err(|e| wrong(&e))?,
        share: claim_spec(&record.plan, &paths).map_err(|e| wrong(&e))?,
        links,
        hidden,
    })
}

/// The files of a new share: its pages, our libraries, and the host's preload list after ours.
fn files(request: &Request, record: &ClaimRecord) -> Result<Vec<(PathBuf, Vec<u8>, u32)>, String> {
    let mut files = Vec::new();
    for device in &record.plan.devices {
        let page = |name: &str| Path::new(&device.key).join(name);
        let cap = tranche_node::page::cap_page(
            &record.plan.allocation.uid,
            &device.key,
            &device.gpu_uuid,
            device.cap,
        )
        .map_err(|e| format!("cap page: {e}"))?;
        // The command sees it through a read-only mount; the sampler writes it without root.
        files.push((page(tranche_shim_core::paths::CAP), cap.to_vec(), 0o644));
        let account = AccountPage::initial().to_vec();
        files.push((page(tranche_shim_core::paths::ACCOUNT), account, 0o666));
    }
    let mut preload = String::new();
    for name in SHIM {
        let path = request.shim.join(name);
        let content =
            std::fs::read(&path).map_err(|e| format!("--shim: {}: {e}", path.display()))?;
        files.push((Path::new("lib").join(name), content, 0o644));
        preload += &[container_path::ROOT, "/", name, "\n"].concat();
    }
    preload += &std::fs::read_to_string(PRELOAD).unwrap_or_default();
    files.push(("lib/ld.so.preload".into(), preload.into_bytes(), 0o644));
    Ok(files)
}

impl GrantedShare {
    /// Maintains the share until the command and its remaining processes have ended, or other
    /// members of the share do so.
    fn look_after(mut self, command: &OwnedFd) {
        while !ends_within(command, self.duties.turn(&self.shares)) {}
        let mut membership = self.membership;
        while let Ok(Ok(Some(still))) = self.shares.lock().map(|locked| locked.leave(membership)) {
            membership = still;
            std::thread::sleep(self.duties.turn(&self.shares));
        }
    }
}

/// Whether the process ends before the time is over.
fn ends_within(process: &OwnedFd, time: Duration) -> bool {
    let timeout = Timespec::try_from(time).ok();
    let mut fds = [PollFd::new(process, PollFlags::IN)];
    matches!(poll(&mut fds, timeout.as_ref()), Ok(ready) if ready > 0)
}
