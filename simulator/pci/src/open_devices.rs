//! Which devices programs have open.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;

/// Whether any process that this one may inspect has a device node or file open. Nodes are compared by their number, so
/// that nodes in containers count too.
#[must_use]
pub fn is_open(path: &Path) -> bool {
    let Ok(wanted) = fs::metadata(path) else {
        return false;
    };
    let is_same = |it: &fs::Metadata| match wanted.rdev() {
        0 => (it.dev(), it.ino()) == (wanted.dev(), wanted.ino()),
        number => it.rdev() == number,
    };
    // Processes and descriptors end while they are listed.
    let processes = fs::read_dir("/proc").into_iter().flatten().flatten();
    let mut open = processes
        .filter_map(|process| fs::read_dir(process.path().join("fd")).ok())
        .flat_map(|files| {
            files
                .flatten()
                .filter_map(|file| fs::metadata(file.path()).ok())
        });
    open.any(|it| is_same(&it))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_open_as_long_as_a_process_has_it_open() {
        let file = tempfile::NamedTempFile::new().unwrap();
        assert!(is_open(file.path()));
        let path = file.into_temp_path();
        assert!(!is_open(&path));
        assert!(!is_open(Path::new("/nowhere")));
    }
}
