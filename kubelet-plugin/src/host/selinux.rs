//! SELinux: containers may use the pages.
//!
//! The shim is in the kubelet's plugin folder, which the kubelet labels for containers
//! (`KubeletPluginsDirSELinuxLabel`). The folder of the pages is in `/run`, whose files containers
//! may neither read nor write. New files get the label of their folder, so the folder is labelled
//! before anything is made in it. Every container has access at the level `s0`, with any categories.

use std::io;
use std::path::Path;

use rustix::fs::XattrFlags;
use rustix::io::Errno;

use crate::host::fs::FsError;

const ATTRIBUTE: &str = "security.selinux";
/// The label that the kubelet uses for files that it shares with containers.
const CONTAINER_FILE: &[u8] = b"system_u:object_r:container_file_t:s0\0";

/// Labels a folder, so that containers may use files that are made in it. Does nothing without SELinux.
pub fn label_for_containers(folder: &Path) -> Result<(), FsError> {
    let failed = |source: Errno| FsError {
        action: "label for SELinux",
        path: folder.to_owned(),
        source: io::Error::from(source),
    };
    let mut label = [0; 256];
    let there = match rustix::fs::lgetxattr(folder, ATTRIBUTE, &mut label) {
        Ok(length) => &label[..length],
        Err(Errno::NODATA | Errno::OPNOTSUPP) => return Ok(()),
        Err(Errno::RANGE) => &[],
        Err(e) => return Err(failed(e)),
    };
    if without_zero(there) == without_zero(CONTAINER_FILE) {
        return Ok(());
    }
    rustix::fs::lsetxattr(folder, ATTRIBUTE, CONTAINER_FILE, XattrFlags::empty()).map_err(failed)
}

fn without_zero(label: &[u8]) -> &[u8] {
    label.strip_suffix(b"\0").unwrap_or(label)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn label(folder: &Path) -> Option<Vec<u8>> {
        let mut label = [0; 256];
        let length = rustix::fs::lgetxattr(folder, ATTRIBUTE, &mut label).ok()?;
        Some(label[..length].to_vec())
    }

    /// Without SELinux root can set the attribute too.
    #[test]
    fn a_folder_with_another_label_gets_that_of_containers() {
        let dir = tempfile::tempdir().unwrap();
        let labels: [&[u8]; 3] = [
            b"system_u:object_r:var_run_t:s0\0",
            b"system_u:object_r:container_file_t:s0:c1,c2\0",
            &CONTAINER_FILE[..CONTAINER_FILE.len() - 1],
        ];
        for there in labels {
            rustix::fs::lsetxattr(dir.path(), ATTRIBUTE, there, XattrFlags::empty()).unwrap();
            label_for_containers(dir.path()).unwrap();
            let now = label(dir.path()).unwrap();
            assert_eq!(without_zero(&now), without_zero(CONTAINER_FILE));
        }
    }

    #[test]
    fn without_selinux_nothing_is_done_and_a_missing_folder_fails() {
        let dir = tempfile::tempdir().unwrap();
        label_for_containers(dir.path()).unwrap();
        assert_eq!(label(dir.path()), None);
        let error = label_for_containers(&dir.path().join("gone")).unwrap_err();
        assert!(error.to_string().contains("gone"), "{error}");
    }
}
