//! Installs our files for containers: copies them from the image into the plugin folder, from which
//! the runtime can mount them, and verifies them before a claim needs them.
//!
//! A copy is replaced by rename, so a container that has the old file mounted keeps it. The shim's folder is named
//! after the version of the pages that it reads: the shim of another version stays for the claims that have such pages.

use std::collections::BTreeSet;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use rustix::fs::StatVfsMountFlags;
use tracing::info;
use tranche_driver::cdi::Shim;
use tranche_driver::preparation::PAGES;

use crate::host::fs::{self, Fs, FsError};

/// Files of the image, with their modes: the programs of every container's hooks.
const HOOK_FILES: [(&str, u32); 2] = [("tranche-cdi-hook", 0o755), ("ldconfig", 0o755)];
/// The shim: files of the image, and the preload list.
const SHIM_FILES: [&str; 3] = ["libcuda.so.1", "libnvidia-ml.so.1", PRELOAD];
const SHIM_MODE: u32 = 0o644;
const PRELOAD: &str = "ld.so.preload";
/// The preload list of a capped container's loader.
const PRELOAD_CONTENT: &[u8] =
    b"/usr/lib/tranche/libcuda.so.1\n/usr/lib/tranche/libnvidia-ml.so.1\n";

/// Why a file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum InstallError {
    #[error(transparent)]
    Fs(#[from] FsError),
    /// It is missing in the image.
    #[error(
        "{path} is missing in the image: build it with `make image`, or point --image-lib-dir at it"
    )]
    NotInImage { path: PathBuf },
    /// It was installed and has changed.
    #[error(
        "{path} is missing or changed since it was installed; without it a cap would not hold: \
         restart the node's plugin pod to install it anew"
    )]
    NotIntact { path: PathBuf },
    /// The shim of the release that prepared the claim is gone.
    #[error(
        "{path} is missing or changed, and the claim's pages have version {pages}, which this release cannot make: \
         delete the pods that use the claim to have it prepared by this release"
    )]
    OtherVersion {
        path: PathBuf,
        /// The version of the claim's pages.
        pages: u32,
    },
}

/// The files that a claim's containers need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Needs {
    /// Hooks only.
    Hooks,
    /// Hooks, and the shim for pages of a version.
    Shim { pages: u32 },
}

#[derive(Debug)]
pub struct Installation {
    fs: Arc<dyn Fs>,
    libraries: PathBuf,
    /// The hooks' files with their modes. They are large, so their content is not kept.
    hooks: Vec<(PathBuf, u32)>,
    /// The shim's files with their contents.
    shim: Vec<(PathBuf, Vec<u8>)>,
    /// All tenants have the shim's files mounted. If no other process had them open, a tenant could
    /// take a lease on one (`F_SETLEASE`), and every start of a process of its neighbours would block
    /// for 45 s.
    _open: Vec<File>,
}

impl Installation {
    /// Installs the image's files, the shim into a folder in `libraries` and the hooks into `hook_dir`; files with
    /// the same content are not written again.
    pub fn install(
        fs: Arc<dyn Fs>,
        image: &Path,
        libraries: &Path,
        hook_dir: &Path,
    ) -> Result<Self, InstallError> {
        let target = &folder_of(libraries, PAGES);
        for folder in [target, hook_dir] {
            fs.create_dir(folder)?;
            fs::remove_temporaries(&*fs, folder, "")?;
        }
        let read = |name: &str| {
            let path = image.join(name);
            fs.read(&path)?.ok_or(InstallError::NotInImage { path })
        };
        let mut hooks = Vec::new();
        for (name, mode) in HOOK_FILES {
            let path = hook_dir.join(name);
            fs::ensure(&*fs, &path, &read(name)?, mode)?;
            hooks.push((path, mode));
        }
        let mut shim = Vec::new();
        for name in SHIM_FILES {
            let content = match name {
                PRELOAD => PRELOAD_CONTENT.to_vec(),
                _ => read(name)?,
            };
            let path = target.join(name);
            fs::ensure(&*fs, &path, &content, SHIM_MODE)?;
            shim.push((path, content));
        }
        let mut open = Vec::new();
        for pages in versions(&*fs, libraries)? {
            for path in shim_files(libraries, pages) {
                if fs.mode(&path)?.is_some() {
                    open.push(fs.open(&path)?);
                }
            }
        }
        Ok(Self {
            fs,
            libraries: libraries.to_owned(),
            hooks,
            shim,
            _open: open,
        })
    }

    /// Fails if a file that a claim needs has changed since it was installed.
    pub fn verify(&self, needs: Needs) -> Result<(), InstallError> {
        let not_intact = |path: &Path| InstallError::NotIntact {
            path: path.to_owned(),
        };
        for (path, mode) in &self.hooks {
            if self.fs.mode(path)? != Some(*mode) {
                return Err(not_intact(path));
            }
        }
        match needs {
            Needs::Hooks => {}
            Needs::Shim { pages: PAGES } => {
                for (path, content) in &self.shim {
                    if !fs::is_intact(&*self.fs, path, content, SHIM_MODE)? {
                        return Err(not_intact(path));
                    }
                }
            }
            // Another release installed it: its content is not known here.
            Needs::Shim { pages } => {
                for path in shim_files(&self.libraries, pages) {
                    if self.fs.mode(&path)? != Some(SHIM_MODE) {
                        return Err(InstallError::OtherVersion { path, pages });
                    }
                }
            }
        }
        Ok(())
    }
}

/// The shims that are installed in `libraries`, for the driver's spec.
pub fn shims(fs: &dyn Fs, libraries: &Path) -> Result<Vec<Shim>, FsError> {
    let mut pages = versions(fs, libraries)?;
    pages.insert(PAGES);
    let shim = |pages| Shim {
        pages,
        folder: folder_of(libraries, pages).to_string_lossy().into_owned(),
    };
    Ok(pages.into_iter().map(shim).collect())
}

/// Removes the shims of other versions from `libraries` that are not `in_use`.
pub fn remove_unused(fs: &dyn Fs, libraries: &Path, in_use: &BTreeSet<u32>) -> Result<(), FsError> {
    for pages in versions(fs, libraries)? {
        if pages == PAGES || in_use.contains(&pages) {
            continue;
        }
        let folder = folder_of(libraries, pages);
        for name in fs.list(&folder)? {
            fs.remove_file(&folder.join(name))?;
        }
        fs.remove_dir(&folder)?;
        info!(
            pages,
            "removed the shim of another release, which no claim uses"
        );
    }
    Ok(())
}

fn folder_of(libraries: &Path, pages: u32) -> PathBuf {
    libraries.join(pages.to_string())
}

/// The files of the shim for pages of a version.
fn shim_files(libraries: &Path, pages: u32) -> impl Iterator<Item = PathBuf> {
    let folder = folder_of(libraries, pages);
    SHIM_FILES.into_iter().map(move |name| folder.join(name))
}

/// The versions that have a folder. The hooks may be in the same folder.
fn versions(fs: &dyn Fs, libraries: &Path) -> Result<BTreeSet<u32>, FsError> {
    let names = fs.list(libraries)?;
    Ok(names.iter().filter_map(|name| name.parse().ok()).collect())
}

/// Whether a folder's file system is mounted `noexec`, as `/var` is on some container hosts.
pub fn is_noexec(folder: &Path) -> std::io::Result<bool> {
    let found = rustix::fs::statvfs(folder)?;
    Ok(found.f_flag.contains(StatVfsMountFlags::NOEXEC))
}

#[cfg(test)]
pub(crate) mod testing {
    use super::*;

    /// An image's folder with placeholders for the built files.
    pub fn lay_out_image(folder: &Path) {
        std::fs::create_dir_all(folder).unwrap();
        let hooks = HOOK_FILES.iter().map(|(name, _)| name);
        for name in hooks.chain(&SHIM_FILES).filter(|name| **name != PRELOAD) {
            std::fs::write(folder.join(name), format!("content of {name}")).unwrap();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::testing::lay_out_image;
    use super::*;
    use crate::host::fs::HostFs;
    use crate::host::fs::testing::FaultyFs;

    const OWN: Needs = Needs::Shim { pages: PAGES };

    fn install(root: &Path) -> Result<Installation, InstallError> {
        let (image, lib, hooks) = (root.join("image"), root.join("lib"), root.join("hooks"));
        Installation::install(Arc::new(HostFs), &image, &lib, &hooks)
    }

    #[test]
    fn a_second_start_writes_nothing() {
        let dir = tempfile::tempdir().unwrap();
        lay_out_image(&dir.path().join("image"));
        install(dir.path()).unwrap();
        let fs = Arc::new(FaultyFs::recording());
        let image = dir.path().join("image");
        let (lib, hooks) = (dir.path().join("lib"), dir.path().join("hooks"));
        let again = Installation::install(Arc::clone(&fs) as _, &image, &lib, &hooks);
        again.unwrap().verify(OWN).unwrap();
        let writes: Vec<_> = fs.calls();
        assert!(
            writes.iter().all(|c| c.starts_with("create folder")),
            "{writes:?}"
        );
    }

    #[test]
    fn a_shim_that_was_removed_changed_or_made_writable_is_refused() {
        use std::os::unix::fs::PermissionsExt;
        type Harm = fn(&Path);
        let harms: [Harm; 3] = [
            |path| std::fs::remove_file(path).unwrap(),
            |path| std::fs::write(path, "other").unwrap(),
            |path| std::fs::set_permissions(path, PermissionsExt::from_mode(0o666)).unwrap(),
        ];
        for name in SHIM_FILES {
            for harm in harms {
                let dir = tempfile::tempdir().unwrap();
                lay_out_image(&dir.path().join("image"));
                let installation = install(dir.path()).unwrap();
                harm(&folder_of(&dir.path().join("lib"), PAGES).join(name));
                installation.verify(Needs::Hooks).unwrap();
                let error = installation.verify(OWN).unwrap_err().to_string();
                assert!(error.contains(name) && error.contains("restart"), "{error}");
                install(dir.path()).unwrap().verify(OWN).unwrap();
            }
        }
    }

    #[test]
    fn no_tenant_gets_a_lease_on_the_shim() {
        const F_SETLEASE: &str =
            "open(my $file, '<', $ARGV[0]) or die; exit !fcntl($file, 1024, 1)";
        let dir = tempfile::tempdir().unwrap();
        lay_out_image(&dir.path().join("image"));
        let installation = install(dir.path()).unwrap();
        let leases = |name: &str| {
            let status = std::process::Command::new("perl")
                .args(["-e", F_SETLEASE])
                .arg(dir.path().join(name))
                .status();
            status.unwrap().success()
        };
        for name in SHIM_FILES {
            assert!(!leases(&format!("lib/{PAGES}/{name}")), "{name}");
        }
        assert!(leases("image/libcuda.so.1"), "a file that nobody has open");
        drop(installation);
    }

    #[test]
    fn a_hook_that_is_gone_stops_every_claim() {
        let dir = tempfile::tempdir().unwrap();
        lay_out_image(&dir.path().join("image"));
        let installation = install(dir.path()).unwrap();
        std::fs::remove_file(dir.path().join("hooks/tranche-cdi-hook")).unwrap();
        installation.verify(Needs::Hooks).unwrap_err();
    }

    #[test]
    fn an_image_without_the_shim_is_named() {
        let dir = tempfile::tempdir().unwrap();
        lay_out_image(&dir.path().join("image"));
        std::fs::remove_file(dir.path().join("image/libcuda.so.1")).unwrap();
        let error = install(dir.path()).unwrap_err().to_string();
        assert!(error.contains("image/libcuda.so.1"), "{error}");
    }

    /// The shim as a release with other pages installed it.
    fn other_release(libraries: &Path, pages: u32) {
        use std::os::unix::fs::PermissionsExt;
        let folder = folder_of(libraries, pages);
        std::fs::create_dir_all(&folder).unwrap();
        for (path, name) in shim_files(libraries, pages).zip(SHIM_FILES) {
            std::fs::write(&path, format!("another {name}")).unwrap();
            std::fs::set_permissions(&path, PermissionsExt::from_mode(SHIM_MODE)).unwrap();
        }
    }

    #[test]
    fn the_shim_of_another_release_stays_while_a_claim_uses_it() {
        let dir = tempfile::tempdir().unwrap();
        lay_out_image(&dir.path().join("image"));
        let libraries = dir.path().join("lib");
        let (later, unused) = (PAGES + 1, PAGES + 2);
        other_release(&libraries, later);
        other_release(&libraries, unused);
        remove_unused(&HostFs, &libraries, &BTreeSet::from([PAGES, later])).unwrap();
        let installation = install(dir.path()).unwrap();

        installation.verify(Needs::Shim { pages: later }).unwrap();
        let found = shims(&HostFs, &libraries).unwrap();
        let pages: Vec<_> = found.iter().map(|shim| shim.pages).collect();
        assert_eq!(pages, [PAGES, later]);
        let content = std::fs::read(folder_of(&libraries, later).join("libcuda.so.1")).unwrap();
        assert_eq!(content, b"another libcuda.so.1");
        let refused = installation.verify(Needs::Shim { pages: unused });
        let error = refused.unwrap_err().to_string();
        assert!(error.contains("delete the pods"), "{error}");
    }
}
