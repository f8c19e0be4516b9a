//! Finds the devices of a container among its mounts.
//!
//! Each container that has a device has pages of that device mounted. The path of such a mount within its
//! file system, the fourth field of a line of `/proc/<pid>/mountinfo` (proc_pid_mountinfo(5)), has the
//! device's key as a component.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, BufRead as _, BufReader, Read as _};
use std::path::Path;

/// The most bytes that are read: the lines of as many mounts as the kernel allows in a mount namespace by
/// default (`fs.mount-max`, 100,000). A tenant that may mount controls the length.
pub(crate) const MOST_BYTES: u64 = 16 << 20;

/// The devices that were found.
pub(crate) struct Mounted {
    /// Their keys.
    pub(crate) keys: BTreeSet<String>,
    /// Whether the file was read to its end.
    pub(crate) is_complete: bool,
}

/// The keys, of those for which `is_key` is true, that the mounts in the file `mountinfo` contain.
pub(crate) fn mounted(mountinfo: &Path, is_key: impl Fn(&str) -> bool) -> io::Result<Mounted> {
    let mut mounts = BufReader::new(File::open(mountinfo)?.take(MOST_BYTES));
    let mut keys = BTreeSet::new();
    // Mount points are named by tenants and need not be UTF-8.
    let mut line = Vec::new();
    while mounts.read_until(b'\n', &mut line)? > 0 {
        let root = line.split(|byte| *byte == b' ').nth(3).unwrap_or_default();
        let components = root.split(|byte| *byte == b'/');
        let names = components.filter_map(|component| str::from_utf8(component).ok());
        keys.extend(names.filter(|name| is_key(name)).map(str::to_owned));
        line.clear();
    }
    Ok(Mounted {
        keys,
        is_complete: mounts.into_inner().limit() > 0,
    })
}
