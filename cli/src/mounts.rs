//! A mount namespace for the command, laid out as planned.
//!
//! It is made as root, or in a new user namespace in which the user keeps their user ID. Nothing
//! outside of the namespace changes, and it ends with its last process.

use std::ffi::CStr;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::{DirBuilderExt as _, symlink};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, StatVfsMountFlags};
use rustix::io::Errno;
use rustix::mount::{
    MountFlags, MountPropagationFlags, mount, mount_bind, mount_bind_recursive, mount_change,
    mount_move, mount_remount,
};
use rustix::process::{getegid, geteuid};
use rustix::thread::UnshareFlags;

use crate::layout::{Bind, Layout};

/// A step that failed.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    #[error(
        "this user may have no mount namespace ({0}): run as root, or allow user namespaces \
         (sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone, \
         kernel.apparmor_restrict_unprivileged_userns)"
    )]
    Namespace(Errno),
    #[error("cannot {action} {path}: {source}")]
    Step {
        action: &'static str,
        path: PathBuf,
        source: io::Error,
    },
}

fn failed<E: Into<io::Error>>(action: &'static str, path: &Path) -> impl FnOnce(E) -> MountError {
    move |source| MountError::Step {
        action,
        path: path.to_owned(),
        source: source.into(),
    }
}

/// Gives the calling process, which must have one thread, its own mount namespace.
pub fn enter_namespace() -> Result<(), MountError> {
    let (user, group) = (geteuid().as_raw(), getegid().as_raw());
    match unshare(UnshareFlags::NEWNS) {
        Ok(()) => {}
        Err(Errno::PERM) => {
            unshare(UnshareFlags::NEWNS | UnshareFlags::NEWUSER).map_err(MountError::Namespace)?;
            for (path, content) in [
                ("/proc/self/setgroups", "deny".to_owned()),
                ("/proc/self/uid_map", format!("{user} {user} 1")),
                ("/proc/self/gid_map", format!("{group} {group} 1")),
            ] {
                fs::write(path, content).map_err(failed("write", Path::new(path)))?;
            }
        }
        Err(error) => return Err(MountError::Namespace(error)),
    }
    // Later mounts of the host appear here too; mounts made here do not appear on the host.
    let propagation = MountPropagationFlags::REC | MountPropagationFlags::DOWNSTREAM;
    let root = Path::new("/");
    mount_change(root, propagation).map_err(failed("make a slave of", root))
}

#[expect(
    deprecated,
    reason = "unsafe is only CLONE_FILES, which neither caller has"
)]
fn unshare(flags: UnshareFlags) -> Result<(), Errno> {
    rustix::thread::unshare(flags)
}

/// Makes the mounts, with the empty folder `stage`.
pub fn lay_out(layout: &Layout, stage: &Path) -> Result<(), MountError> {
    // The sources are opened before anything is covered.
    let sources = layout
        .binds
        .iter()
        .map(|bind| open(&bind.from))
        .collect::<Result<Vec<_>, _>>()?;
    for folder in &layout.mirrors {
        mirror(folder, stage)?;
    }
    make_folder(&layout.own)?;
    tmpfs(&layout.own)?;
    for (bind, source) in layout.binds.iter().zip(&sources) {
        show(bind, source)?;
    }
    for link in &layout.links {
        let _ = fs::remove_file(&link.path);
        symlink(&link.target, &link.path).map_err(failed("make link", &link.path))?;
    }
    for node in &layout.hidden {
        mount_bind(node, node).map_err(failed("bind", node))?;
        remount(node, MountFlags::NODEV)?;
    }
    for folder in layout.mirrors.iter().chain([&layout.own]) {
        remount(folder, MountFlags::RDONLY)?;
    }
    // The current folder may have been mirrored.
    if let Ok(here) = std::env::current_dir() {
        let _ = std::env::set_current_dir(here);
    }
    Ok(())
}

fn open(path: &Path) -> Result<OwnedFd, MountError> {
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    rustix::fs::open(path, flags, Mode::empty()).map_err(failed("open", path))
}

/// Covers a folder with a tmpfs that has the same entries.
fn mirror(folder: &Path, stage: &Path) -> Result<(), MountError> {
    let looking = |source| failed("mirror", folder)(source);
    tmpfs(stage)?;
    let mode = fs::metadata(folder).map_err(looking)?.permissions();
    fs::set_permissions(stage, mode).map_err(failed("set the mode of", stage))?;
    for entry in fs::read_dir(folder).map_err(failed("mirror", folder))? {
        let entry = entry.map_err(failed("mirror", folder))?;
        let (from, to) = (entry.path(), stage.join(entry.file_name()));
        let copied = entry.file_type().and_then(|kind| {
            if kind.is_symlink() {
                return symlink(fs::read_link(&from)?, &to);
            }
            if kind.is_dir() {
                fs::create_dir(&to)?;
            } else {
                File::create(&to)?;
            }
            Ok(mount_bind_recursive(&from, &to)?)
        });
        match copied {
            // It was removed meanwhile.
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            other => other.map_err(failed("mirror", &from))?,
        }
    }
    mount_move(stage, folder).map_err(failed("move the mirror to", folder))
}

fn tmpfs(on: &Path) -> Result<(), MountError> {
    let flags = MountFlags::NOSUID | MountFlags::NODEV;
    let options: &CStr = c"mode=0755";
    mount("tranche", on, "tmpfs", flags, options).map_err(failed("mount a tmpfs on", on))
}

/// Makes a folder that is missing, in a mirror.
fn make_folder(path: &Path) -> Result<(), MountError> {
    let made = DirBuilder::new().recursive(true).mode(0o755).create(path);
    made.map_err(failed("make folder", path))
}

fn show(bind: &Bind, source: &OwnedFd) -> Result<(), MountError> {
    let to = &bind.to;
    if !to.exists() {
        if let Some(folder) = to.parent() {
            make_folder(folder)?;
        }
        // It may be a dangling link.
        let _ = fs::remove_file(to);
        File::create(to).map_err(failed("make", to))?;
    }
    let from = format!("/proc/self/fd/{}", source.as_raw_fd());
    mount_bind(from, to).map_err(failed("mount a file at", to))?;
    if bind.read_only {
        remount(to, MountFlags::RDONLY)?;
    }
    Ok(())
}

/// Adds a flag to a mount. In a user namespace no flag may be removed.
fn remount(path: &Path, flag: MountFlags) -> Result<(), MountError> {
    let found = rustix::fs::statvfs(path).map_err(failed("look at", path))?;
    let mut flags = MountFlags::BIND | flag;
    for (has, keep) in [
        (StatVfsMountFlags::RDONLY, MountFlags::RDONLY),
        (StatVfsMountFlags::NOSUID, MountFlags::NOSUID),
        (StatVfsMountFlags::NODEV, MountFlags::NODEV),
        (StatVfsMountFlags::NOEXEC, MountFlags::NOEXEC),
    ] {
        if found.f_flag.contains(has) {
            flags |= keep;
        }
    }
    mount_remount(path, flags, c"").map_err(failed("remount", path))
}
