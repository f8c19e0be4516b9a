//! Finds the devices of a container among its mounts.
//!
//! Each container that has a device has pages of that device mounted. The path of such a mount within its
//! file system, the fourth field of a line of `/proc/<pid>/mountinfo` (proc_pid_mountinfo(5)), has the
//! device's key as a component.
//!
//! A tenant that may mount controls how long the file and each of its lines are. So no more than a component is kept in
//! memory.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Read};
use std::ops::ControlFlow;
use std::path::Path;

/// The most bytes that the watchdog reads, because it checks other processes every second, too: the lines of as many
/// mounts as the kernel allows in a mount namespace by default (`fs.mount-max`, 100,000).
const MOST_BYTES: u64 = 16 << 20;

/// The field of a line that has the path within the file system, counted from 0.
const ROOT: u32 = 3;

/// The longest name of a file, in bytes (`NAME_MAX`). A longer component has escaped characters, and no key has any.
const LONGEST_NAME: usize = 255;

/// What the mounts of a container say.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Mounted {
    /// The requested keys.
    pub keys: BTreeSet<String>,
    /// The UID of a pod and the name of a container of it: the kubelet mounts a file of the folder
    /// `pods/<UID>/containers/<name>` in each container, at its `terminationMessagePath` (`makeMounts` of the kubelet).
    pub container: Option<(String, String)>,
}

/// The keys, of those for which `is_key` is true, that the mounts in the file `mountinfo` contain, and the container that they
/// name. Mounts behind the first 16 MiB are left out.
pub(crate) fn mounted(mountinfo: &Path, is_key: impl Fn(&str) -> bool) -> io::Result<Mounted> {
    let mut found = Mounted::default();
    // The components before: `pods`, the UID, `containers`.
    let mut before: [String; 3] = Default::default();
    scan(File::open(mountinfo)?.take(MOST_BYTES), |name| {
        if is_key(name) {
            found.keys.insert(name.to_owned());
        }
        if found.container.is_none() && before[0] == "pods" && before[2] == "containers" {
            found.container = Some((before[1].clone(), name.to_owned()));
        }
        before.rotate_left(1);
        before[2].clear();
        before[2].push_str(name);
        ControlFlow::Continue(())
    })?;
    Ok(found)
}

/// Which of `keys` the mounts in the file `mountinfo` contain. However long the file is, it is read to its end or until all are
/// found, because the answer decides whether a device is free.
pub(crate) fn keys_of(mountinfo: &Path, keys: &BTreeSet<String>) -> io::Result<BTreeSet<String>> {
    let mut found = BTreeSet::new();
    scan(File::open(mountinfo)?, |name| {
        if keys.contains(name) && found.insert(name.to_owned()) && found.len() == keys.len() {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    })?;
    Ok(found)
}

/// Passes each component of the mounts' paths to `visit`.
fn scan(mut mounts: impl Read, mut visit: impl FnMut(&str) -> ControlFlow<()>) -> io::Result<()> {
    let mut chunk = [0; 8 << 10];
    let mut field = 0;
    let mut name = Vec::with_capacity(LONGEST_NAME + 1);
    loop {
        let length = match mounts.read(&mut chunk) {
            Ok(length) => length,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) => return Err(error),
        };
        // The end of the file ends the last line.
        let bytes = if length == 0 { b"\n" } else { &chunk[..length] };
        for byte in bytes {
            if !matches!(byte, b'/' | b' ' | b'\n') {
                // One byte more than the longest name is enough to know that it is too long.
                if field == ROOT && name.len() <= LONGEST_NAME {
                    name.push(*byte);
                }
                continue;
            }
            // Mount points are named by tenants and need not be UTF-8.
            if field == ROOT
                && name.len() <= LONGEST_NAME
                && let Ok(name) = str::from_utf8(&name)
                && visit(name).is_break()
            {
                return Ok(());
            }
            name.clear();
            match byte {
                b' ' => field = field.saturating_add(1),
                b'\n' => field = 0,
                _ => {}
            }
        }
        if length == 0 {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    /// A file that is read in pieces of these lengths.
    struct Pieces<'a>(&'a [u8], std::iter::Cycle<std::slice::Iter<'a, usize>>);

    impl Read for Pieces<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            let most = *self.1.next().expect("a length");
            let length = most.min(buffer.len());
            self.0.read(&mut buffer[..length])
        }
    }

    fn names(file: impl Read) -> Vec<String> {
        let mut names = Vec::new();
        scan(file, |name| {
            names.push(name.to_owned());
            ControlFlow::Continue(())
        })
        .expect("no error");
        names
    }

    /// The same as [`scan`], with the whole file in memory.
    fn expected(file: &[u8]) -> Vec<String> {
        let lines = file.split(|byte| *byte == b'\n');
        let roots = lines.filter_map(|line| line.split(|byte| *byte == b' ').nth(3));
        let components = roots.flat_map(|root| root.split(|byte| *byte == b'/'));
        components
            .filter(|name| name.len() <= LONGEST_NAME)
            .filter_map(|name| String::from_utf8(name.to_vec()).ok())
            .collect()
    }

    proptest! {
        #[test]
        fn the_pieces_in_which_a_file_is_read_make_no_difference(
            file in vec(prop_oneof![Just(b' '), Just(b'/'), Just(b'\n'), Just(b'a'), Just(0xff)], 0..300),
            pieces in vec(1_usize..9, 1..9),
        ) {
            prop_assert_eq!(names(Pieces(&file, pieces.iter().cycle())), expected(&file));
        }
    }

    #[test]
    fn a_long_name_is_no_key_and_takes_no_memory() {
        for (length, is_found) in [
            (LONGEST_NAME, true),
            (LONGEST_NAME + 1, false),
            (9 << 20, false),
        ] {
            let name = "k".repeat(length);
            let line = format!("1 2 0:9 /uid/{name}/cap /x rw\n");
            let found = names(line.as_bytes()).contains(&name);
            assert_eq!(found, is_found, "{length}");
        }
    }
}
