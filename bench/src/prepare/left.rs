//! Finds files that claims left on the node after their release.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use anyhow::Context;

/// The folders in which a prepared claim has files.
#[derive(Debug)]
pub struct Folders {
    /// The folder of journals.
    pub journal: PathBuf,
    /// The folder of share pages.
    pub shares: PathBuf,
    /// The folder of CDI specs.
    pub cdi: PathBuf,
}

impl Folders {
    /// All files whose name contains one of the UIDs, temporary files included.
    pub fn left<'a>(&self, uids: impl Iterator<Item = &'a str>) -> anyhow::Result<Vec<PathBuf>> {
        let uids: Vec<_> = uids.collect();
        let mut left = Vec::new();
        for folder in [&self.journal, &self.shares, &self.cdi] {
            for name in names(folder).with_context(|| format!("{}", folder.display()))? {
                if uids.iter().any(|uid| name.contains(uid)) {
                    left.push(folder.join(name));
                }
            }
        }
        Ok(left)
    }
}

fn names(folder: &Path) -> std::io::Result<Vec<String>> {
    let entries = match std::fs::read_dir(folder) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        other => other?,
    };
    entries
        .map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_bears_a_uid_counts_temporary_files_included() {
        let dir = tempfile::tempdir().unwrap();
        let at = |name: &str| dir.path().join(name);
        let folders = Folders {
            journal: at("claims"),
            shares: at("shares"),
            cdi: at("missing"),
        };
        std::fs::create_dir_all(at("shares/uid-1")).unwrap();
        std::fs::create_dir_all(at("claims")).unwrap();
        std::fs::write(at("claims/uid-1.json.tmp"), "").unwrap();
        std::fs::write(at("claims/uid-2.json"), "").unwrap();
        let left = folders.left(["uid-1", "uid-3"].into_iter()).unwrap();
        assert_eq!(left, [at("claims/uid-1.json.tmp"), at("shares/uid-1")]);
        assert!(folders.left(["uid-3"].into_iter()).unwrap().is_empty());
    }
}
