//! `update-ldcache`: makes the container's loader find the driver's libraries.
//!
//! The folders are written into the loader's configuration, so that a later ldconfig in the
//! container (of a package, for example) finds them too. The driver's libraries are added to the image's
//! own cache. An image with neither a cache nor a configuration gets a cache of these alone, because its loader searches
//! its default folders after the cache. Where the image has a cache that is not known, another library of such a name,
//! or a configuration without a cache, ldconfig makes the cache from the configuration. The program is the host's, linked
//! statically; it first calls `chroot` into the container's root, so that it reads and writes only there. A musl image
//! does not use the cache and is not harmed by it.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use tranche_cdi_hook::rootfs::{Rootfs, RootfsError};

use crate::args::CachedLibrary;
use crate::loader_cache::LoaderCache;

const CONFIGURATION: &str = "/etc/ld.so.conf";
const FOLDERS: &str = "/etc/ld.so.conf.d/00-tranche.conf";
/// Sorted before our other file, because the loader uses the first library of a name.
const COMPAT: &str = "/etc/ld.so.conf.d/00-compat-tranche.conf";
/// The folder of our files.
const INCLUDED: &str = "/etc/ld.so.conf.d";
const CACHE: &str = "/etc/ld.so.cache";
/// The configuration for an image without one.
const INCLUDE: &[u8] = b"include /etc/ld.so.conf.d/*.conf\n";

/// Why the cache could not be made.
#[derive(Debug, thiserror::Error)]
pub enum LdcacheError {
    #[error(transparent)]
    Rootfs(#[from] RootfsError),
    /// The program could not be started.
    #[error("cannot run {path}: {source}: restart the node's plugin pod to install it again")]
    Run {
        path: PathBuf,
        source: std::io::Error,
    },
    #[error("{path} failed in the container's root ({status}): {stderr}")]
    Failed {
        path: PathBuf,
        /// How it ended.
        status: std::process::ExitStatus,
        stderr: String,
    },
}

/// Makes the cache.
pub fn update(
    root: &Rootfs,
    folders: &[PathBuf],
    libraries: &[CachedLibrary],
    ldconfig: &Path,
) -> Result<(), LdcacheError> {
    match configure(root, folders).and_then(|own| add(root, libraries, own)) {
        Ok(true) => Ok(()),
        Ok(false) => run(root, ldconfig),
        // The container starts anyway, and finds libraries in the loader's default folders.
        Err(e) if e.is_read_only() => {
            eprintln!("tranche-cdi-hook: {e}: the image's file system is read-only, continuing");
            Ok(())
        }
        Err(e) => Err(e.into()),
    }
}

/// Makes the loader search the folder of this library first, from the next `update` on.
pub fn prefer_folder_of(root: &Rootfs, library: &Path) -> Result<(), RootfsError> {
    let folder = library.parent().unwrap_or(Path::new("/"));
    let line = [folder.as_os_str().as_encoded_bytes(), b"\n"].concat();
    match root.write(Path::new(COMPAT), &line) {
        Err(e) if e.is_read_only() => {
            eprintln!("tranche-cdi-hook: {e}: the image's file system is read-only, continuing");
            Ok(())
        }
        done => done,
    }
}

/// Whether an image has a configuration of its own for the loader.
#[derive(Clone, Copy, PartialEq, Eq)]
enum OwnConfiguration {
    Present,
    Absent,
}

/// Writes the folders into the loader's configuration.
fn configure(root: &Rootfs, folders: &[PathBuf]) -> Result<OwnConfiguration, RootfsError> {
    let names = root.list(Path::new(INCLUDED))?;
    let is_ours = |name: &OsString| Path::new(FOLDERS).file_name() == Some(name);
    let mut lines = Vec::new();
    for folder in folders {
        lines.extend_from_slice(folder.as_os_str().as_encoded_bytes());
        lines.push(b'\n');
    }
    if root.read(Path::new(FOLDERS))?.as_deref() != Some(&lines) {
        root.write(Path::new(FOLDERS), &lines)?;
    }
    let stored = root.read(Path::new(CONFIGURATION))?;
    let own = if stored.is_none() && names.iter().all(is_ours) {
        OwnConfiguration::Absent
    } else {
        OwnConfiguration::Present
    };
    let configuration = stored.unwrap_or_default();
    if !includes_folders(&configuration) {
        let both = [INCLUDE, &configuration].concat();
        root.write(Path::new(CONFIGURATION), &both)?;
    }
    Ok(own)
}

/// Adds the libraries to the image's own cache, or to an empty one where the image has nothing for the loader.
/// Returns whether that could be done.
fn add(
    root: &Rootfs,
    libraries: &[CachedLibrary],
    own: OwnConfiguration,
) -> Result<bool, RootfsError> {
    if root.read(Path::new(COMPAT))?.is_some() {
        // An image's own libcuda comes before the driver's.
        return Ok(false);
    }
    let cache = match (root.read(Path::new(CACHE))?, own) {
        (Some(bytes), _) => LoaderCache::parse(&bytes),
        (None, OwnConfiguration::Absent) => Some(LoaderCache::default()),
        (None, OwnConfiguration::Present) => None,
    };
    let Some(mut cache) = cache else {
        return Ok(false);
    };
    for library in libraries {
        // It is missing where the container does not have its capability.
        if root.find(&library.path)?.is_some() {
            let path = library.path.as_os_str().as_encoded_bytes();
            if cache.add(library.name.as_bytes(), path).is_err() {
                return Ok(false);
            }
        }
    }
    if cache.is_empty() {
        return Ok(false);
    }
    let Some(bytes) = cache.encode() else {
        return Ok(false);
    };
    root.write(Path::new(CACHE), &bytes)?;
    Ok(true)
}

/// Whether the configuration includes ours: distributions write it with and without `/etc`.
fn includes_folders(configuration: &[u8]) -> bool {
    String::from_utf8_lossy(configuration).lines().any(|line| {
        let mut words = line.split_whitespace();
        words.next() == Some("include")
            && words.any(|word| {
                let word = word.strip_prefix("/etc/").unwrap_or(word);
                word == "ld.so.conf.d/*.conf"
            })
    })
}

fn run(root: &Rootfs, ldconfig: &Path) -> Result<(), LdcacheError> {
    let output = Command::new(ldconfig)
        .env_clear()
        .stdin(Stdio::null())
        .arg("-r")
        .arg(root.path())
        // `-X` makes no links: create-links makes them, and the image's own stay unchanged.
        .args(["-X", "-f", CONFIGURATION, "-C", CACHE])
        .output()
        .map_err(|source| LdcacheError::Run {
            path: ldconfig.to_owned(),
            source,
        })?;
    if output.status.success() {
        return Ok(());
    }
    Err(LdcacheError::Failed {
        path: ldconfig.to_owned(),
        status: output.status,
        stderr: String::from_utf8_lossy(&output.stderr).trim().to_owned(),
    })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    const LDCONFIG: &str = "/sbin/ldconfig";

    /// A root with a real shared library in a folder that no loader searches, and its name in
    /// `lib`.
    fn image() -> (tempfile::TempDir, Rootfs) {
        let dir = tempfile::tempdir().unwrap();
        let lib = dir.path().join("opt/driver/lib");
        std::fs::create_dir_all(&lib).unwrap();
        std::fs::copy(libc(), lib.join("libtranche-test.so.6")).unwrap();
        let root = Rootfs::open(dir.path()).unwrap();
        (dir, root)
    }

    /// The C library of this machine, as a library to be found.
    fn libc() -> PathBuf {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let line = maps
            .lines()
            .find(|l| l.contains("/libc.so.6") || l.contains("/libc-"))
            .unwrap();
        line.split_whitespace().last().unwrap().into()
    }

    fn cached(root: &Path) -> String {
        let cache = root.join("etc/ld.so.cache");
        assert!(cache.symlink_metadata().unwrap().is_file());
        String::from_utf8_lossy(&std::fs::read(cache).unwrap()).into_owned()
    }

    fn folders() -> [PathBuf; 1] {
        ["/opt/driver/lib".into()]
    }

    #[test]
    fn an_image_with_nothing_gets_a_cache_that_names_the_library() {
        let (dir, root) = image();
        for _ in 0..2 {
            update(&root, &folders(), &[], Path::new(LDCONFIG)).unwrap();
            assert!(
                cached(dir.path()).contains("/opt/driver/lib/"),
                "{}",
                cached(dir.path())
            );
        }
        let configuration = std::fs::read(dir.path().join("etc/ld.so.conf")).unwrap();
        assert_eq!(configuration, INCLUDE);
    }

    #[test]
    fn an_images_configuration_stays_and_is_made_to_include_ours() {
        for (before, after) in [
            (
                "include ld.so.conf.d/*.conf\n",
                "include ld.so.conf.d/*.conf\n",
            ),
            (
                "include /etc/ld.so.conf.d/*.conf\n/own\n",
                "include /etc/ld.so.conf.d/*.conf\n/own\n",
            ),
            ("/own\n", "include /etc/ld.so.conf.d/*.conf\n/own\n"),
            (
                "# include ld.so.conf.d/*.conf\n",
                "include /etc/ld.so.conf.d/*.conf\n# include ld.so.conf.d/*.conf\n",
            ),
        ] {
            let (dir, root) = image();
            std::fs::create_dir_all(dir.path().join("etc")).unwrap();
            std::fs::write(dir.path().join("etc/ld.so.conf"), before).unwrap();
            update(&root, &folders(), &[], Path::new(LDCONFIG)).unwrap();
            let now = std::fs::read_to_string(dir.path().join("etc/ld.so.conf")).unwrap();
            assert_eq!(now, after);
            assert!(cached(dir.path()).contains("/opt/driver/lib/"));
        }
    }

    #[test]
    fn hostile_links_do_not_make_it_write_outside() {
        let outside = tempfile::tempdir().unwrap();
        let precious = outside.path().join("precious");
        std::fs::write(&precious, "precious").unwrap();
        for name in ["ld.so.cache", "ld.so.cache~", "ld.so.conf", "ld.so.conf.d"] {
            let (dir, root) = image();
            let etc = dir.path().join("etc");
            std::fs::create_dir_all(&etc).unwrap();
            symlink(&precious, etc.join(name)).unwrap();
            // It may fail or replace the link; the host is not changed.
            let _ = update(&root, &folders(), &[], Path::new(LDCONFIG));
            assert_eq!(std::fs::read(&precious).unwrap(), b"precious", "{name}");
        }
        let (dir, root) = image();
        symlink(outside.path(), dir.path().join("etc")).unwrap();
        let _ = update(&root, &folders(), &[], Path::new(LDCONFIG));
        let names: Vec<_> = std::fs::read_dir(outside.path()).unwrap().collect();
        assert_eq!(names.len(), 1, "{names:?}");
    }

    /// No program: if ldconfig would have to run, the error says so.
    const NOWHERE: &str = "/nowhere/ldconfig";

    fn library() -> [CachedLibrary; 1] {
        [CachedLibrary {
            name: "libtranche-test.so.6".into(),
            path: "/opt/driver/lib/libtranche-test.so.6".into(),
        }]
    }

    #[test]
    fn a_cache_that_is_known_is_added_to_without_ldconfig() {
        let (dir, root) = image();
        let has_it = || cached(dir.path()).contains("/opt/driver/lib/libtranche-test.so.6");
        let without = Path::new(NOWHERE);
        std::fs::create_dir(dir.path().join("etc")).unwrap();
        let ran = Command::new(LDCONFIG)
            .arg("-r")
            .arg(dir.path())
            .args(["-X", "-f", "/nothing"])
            .status();
        assert!(ran.unwrap().success() && !has_it());
        let absent = CachedLibrary {
            name: "libabsent.so.1".into(),
            path: "/opt/driver/lib/libabsent.so.1".into(),
        };
        let libraries = [&library()[..], &[absent]].concat();
        // The second device of a container does it once more.
        for _ in 0..2 {
            update(&root, &folders(), &libraries, without).unwrap();
            assert!(has_it() && !cached(dir.path()).contains("libabsent"));
        }
    }

    #[test]
    fn an_image_with_nothing_for_the_loader_needs_no_ldconfig() {
        let (dir, root) = image();
        // The second device of a container does it once more.
        for _ in 0..2 {
            update(&root, &folders(), &library(), Path::new(NOWHERE)).unwrap();
            assert!(cached(dir.path()).contains("/opt/driver/lib/libtranche-test.so.6"));
        }
        // A later ldconfig in the container finds them too.
        std::fs::remove_file(dir.path().join("etc/ld.so.cache")).unwrap();
        update(&root, &folders(), &[], Path::new(LDCONFIG)).unwrap();
        assert!(cached(dir.path()).contains("/opt/driver/lib/"));
    }

    #[test]
    fn folders_of_the_images_configuration_are_left_to_ldconfig() {
        for path in ["etc/ld.so.conf", "etc/ld.so.conf.d/own.conf"] {
            let (dir, root) = image();
            let path = dir.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, "/own\n").unwrap();
            let done = update(&root, &folders(), &library(), Path::new(NOWHERE));
            assert!(matches!(done, Err(LdcacheError::Run { .. })), "{done:?}");
        }
    }

    #[test]
    fn what_has_an_order_is_left_to_ldconfig() {
        // Another library of that name; an image's libcuda that comes first; a file that is no cache.
        type Harm = fn(&Rootfs);
        let harms: [Harm; 3] = [
            |root| {
                let mut cache =
                    LoaderCache::parse(&root.read(Path::new(CACHE)).unwrap().unwrap()).unwrap();
                cache
                    .add(b"libtranche-test.so.6", b"/other/libtranche-test.so.6")
                    .unwrap();
                root.write(Path::new(CACHE), &cache.encode().unwrap())
                    .unwrap();
            },
            |root| prefer_folder_of(root, Path::new("/compat/libcuda.so.1")).unwrap(),
            |root| root.write(Path::new(CACHE), b"ld.so-1.7.0").unwrap(),
        ];
        for harm in harms {
            let (_dir, root) = image();
            update(&root, &folders(), &[], Path::new(LDCONFIG)).unwrap();
            harm(&root);
            let done = update(&root, &folders(), &library(), Path::new(NOWHERE));
            assert!(matches!(done, Err(LdcacheError::Run { .. })), "{done:?}");
        }
    }

    #[test]
    fn a_missing_program_is_named_with_the_way_out() {
        let (_dir, root) = image();
        let error = update(&root, &folders(), &[], Path::new(NOWHERE))
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("/nowhere/ldconfig") && error.contains("restart"),
            "{error}"
        );
    }
}
