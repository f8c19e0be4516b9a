//! The pages of a share: the cap page, which the node writes, and the account page, which the node only reads by copies
//! and never maps.
//!
//! The tenant can write the account. It may write any content, truncate the file or make it huge: then a read returns
//! an error, while an access to a mapping would end the process (SIGBUS). It may hold a lease on either page: then an
//! open fails at once, and succeeds later, when the lease is broken.

use std::ffi::CString;
use std::io;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::OFlags;
use tranche_api::share_config::ComputeMode;
use tranche_driver::preparation::{self, Cap, PAGES};
use tranche_shim_core::{
    AccountPage, AccountSnapshot, CapPage, ComputePolicy, PageError, Priority, cap, layout,
};
use tranche_shim_runtime::sys::{Errno, File};

/// A plan has one version number for both pages.
const _: () = assert!(cap::ABI == PAGES && layout::ABI == PAGES);

/// The cap page of the device `key` of the claim `uid`.
pub fn cap_page(
    uid: &str,
    key: &str,
    gpu_uuid: &str,
    cap: Cap,
) -> Result<[u8; cap::LEN], PageError> {
    let (memory, resident, cores, policy, context_memory, mps) = match cap {
        Cap::None {} => (None, None, None, ComputePolicy::Strict, 0, false),
        Cap::Share {
            memory,
            resident,
            cores,
            mode,
            context_memory,
            mps,
            priority: _,
        } => {
            let policy = match mode {
                ComputeMode::Strict => ComputePolicy::Strict,
                ComputeMode::WorkConserving => ComputePolicy::WorkConserving,
            };
            let memory = Some(memory);
            (memory, resident, Some(cores), policy, context_memory, mps)
        }
    };
    // MPS divides the GPU's threads, not its time.
    let (cores, mps_threads) = if mps { (None, cores) } else { (cores, None) };
    let priority = match cap.priority() {
        preparation::Priority::Normal => Priority::Normal,
        preparation::Priority::High => Priority::High,
        preparation::Priority::Low { floor } => Priority::Low { floor },
    };
    let page = CapPage {
        gpu_uuid,
        memory_limit: memory,
        resident_limit: resident,
        context_memory,
        cores,
        mps_threads,
        compute_policy: policy,
        priority,
        claim_uid: uid,
        device_key: key,
    };
    page.encode()
}

/// Opens a page that containers can open, without waiting for the end of a lease on it.
pub(crate) fn open_page(path: &Path, writable: bool) -> io::Result<std::fs::File> {
    let flags = OFlags::NONBLOCK | OFlags::NOFOLLOW;
    std::fs::File::options()
        .read(true)
        .write(writable)
        .custom_flags(flags.bits().cast_signed())
        .open(path)
}

/// The content of the cap page at `path`; `None` if there is no page of the right length.
pub fn read_cap(path: &Path) -> io::Result<Option<[u8; cap::LEN]>> {
    let file = match open_page(path, false) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        other => other?,
    };
    if file.metadata()?.len() != cap::LEN as u64 {
        return Ok(None);
    }
    let mut page = [0; cap::LEN];
    file.read_exact_at(&mut page, 0)?;
    Ok(Some(page))
}

/// Why an account page cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum ReadError {
    /// The file.
    #[error("account page {path}: {source}")]
    File {
        /// The page.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// Its content is invalid.
    #[error("account page {path}: {source}: its programs broke it; end them")]
    Page {
        /// The page.
        path: PathBuf,
        /// Why.
        source: PageError,
    },
}

/// Truncates an account page that its tenant made longer to its proper length, without an effect on mappings of the
/// page. Returns the old length if it was too long.
///
/// The file is on a tmpfs: a longer file uses the node's memory.
pub fn truncate_page(path: &Path) -> Result<Option<u64>, ReadError> {
    let cut = || {
        let file = open_page(path, true)?;
        let found = file.metadata()?.len();
        if found <= layout::LEN as u64 {
            return Ok(None);
        }
        file.set_len(layout::LEN as u64)?;
        Ok(Some(found))
    };
    cut().map_err(|source| failed(path, source))
}

/// An open account page.
#[derive(Debug)]
pub struct AccountFile {
    path: PathBuf,
    file: File,
}

impl AccountFile {
    /// Opens a page and checks its length and version.
    pub fn open(path: &Path) -> Result<Self, ReadError> {
        let file = c_path(path)
            .and_then(|name| File::open_at_once(&name, true).map_err(from_errno))
            .map_err(|source| failed(path, source))?;
        let page = Self {
            path: path.to_owned(),
            file,
        };
        page.header()?;
        Ok(page)
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A copy of the page.
    pub fn copy(&self) -> Result<AccountCopy, ReadError> {
        self.check_length()?;
        let mut bytes = vec![0; layout::LEN];
        self.read(&mut bytes)?;
        AccountPage::check(&bytes).map_err(|source| self.wrong(source))?;
        Ok(AccountCopy(bytes))
    }

    /// How far the share has used its grant of GPU time, and the estimated GPU time of its launches,
    /// both in nanoseconds. The tenant writes them.
    pub fn compute(&self) -> Result<(u64, u64), ReadError> {
        Ok(layout::compute_words(&self.header()?))
    }

    /// The number of slots that are marked as taken and that no process holds: their owners are dead, and so are all
    /// processes that had their files. The tenant can forge such marks; reclaiming such a slot harms nobody else.
    pub fn dead_slots(&self) -> Result<usize, ReadError> {
        self.count_slots(|held| !held)
    }

    /// Whether a living process holds a slot.
    pub fn is_in_use(&self) -> Result<bool, ReadError> {
        Ok(self.count_slots(|held| held)? > 0)
    }

    fn count_slots(&self, wanted: impl Fn(bool) -> bool) -> Result<usize, ReadError> {
        let header = self.header()?;
        let mut count = 0;
        for slot in layout::taken_slots(&header) {
            let is_locked = |at| self.file.is_locked(at).map_err(|e| self.failed(e));
            let held = is_locked(layout::slot_lock(slot))? || is_locked(layout::files_lock(slot))?;
            count += usize::from(wanted(held));
        }
        Ok(count)
    }

    fn check_length(&self) -> Result<(), ReadError> {
        let found = self.file.size().map_err(|e| self.failed(e))?;
        if found == layout::LEN {
            return Ok(());
        }
        Err(self.wrong(PageError::Length {
            expected: layout::LEN,
            found,
        }))
    }

    fn header(&self) -> Result<Vec<u8>, ReadError> {
        self.check_length()?;
        let mut header = vec![0; layout::HEADER_LEN];
        self.read(&mut header)?;
        AccountPage::check_header(&header).map_err(|source| self.wrong(source))?;
        Ok(header)
    }

    fn read(&self, buffer: &mut [u8]) -> Result<(), ReadError> {
        let found = self
            .file
            .read_at(buffer, 0)
            .map_err(|errno| self.failed(errno))?;
        if found == buffer.len() {
            Ok(())
        } else {
            Err(self.wrong(PageError::Length {
                expected: layout::LEN,
                found,
            }))
        }
    }

    fn failed(&self, errno: Errno) -> ReadError {
        failed(&self.path, from_errno(errno))
    }

    fn wrong(&self, source: PageError) -> ReadError {
        ReadError::Page {
            path: self.path.clone(),
            source,
        }
    }
}

/// A copy of an account page, which was checked.
#[derive(Clone, Debug)]
pub struct AccountCopy(Vec<u8>);

impl AccountCopy {
    /// Its content. The tenant writes it.
    ///
    /// # Panics
    ///
    /// Never: it was checked when it was made.
    #[must_use]
    pub fn snapshot(&self) -> AccountSnapshot<'_> {
        AccountPage::snapshot(&self.0).expect("a copy is checked when it is made")
    }
}

fn failed(path: &Path, source: io::Error) -> ReadError {
    ReadError::File {
        path: path.to_owned(),
        source,
    }
}

pub(crate) fn from_errno(Errno(errno): Errno) -> io::Error {
    io::Error::from_raw_os_error(errno)
}

pub(crate) fn c_path(path: &Path) -> io::Result<CString> {
    CString::new(path.as_os_str().as_bytes()).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use proptest::prelude::*;

    use super::*;

    fn page(content: &[u8]) -> (tempfile::TempDir, PathBuf) {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("account");
        fs::write(&path, content).unwrap();
        (folder, path)
    }

    #[test]
    fn a_fresh_page_is_read_and_nobody_uses_it() {
        let (_folder, path) = page(AccountPage::initial());
        let file = AccountFile::open(&path).unwrap();
        assert_eq!(file.copy().unwrap().snapshot().used(), 0);
        assert_eq!(file.dead_slots().unwrap(), 0);
        assert!(!file.is_in_use().unwrap());
    }

    #[test]
    fn a_page_that_its_tenant_truncated_or_made_longer_is_named() {
        let (_folder, path) = page(AccountPage::initial());
        let file = AccountFile::open(&path).unwrap();
        for length in [0, 100, 4096, layout::LEN as u64 - 1, 1 << 40] {
            fs::File::options()
                .write(true)
                .open(&path)
                .unwrap()
                .set_len(length)
                .unwrap();
            for error in [file.copy().err(), file.dead_slots().err()] {
                let error = error.unwrap().to_string();
                assert!(
                    error.contains("account") && error.contains("bytes"),
                    "{error}"
                );
            }
            AccountFile::open(&path).unwrap_err();
        }
    }

    #[test]
    fn a_file_that_is_not_a_page_is_refused() {
        let (folder, path) = page(&vec![0; layout::LEN]);
        AccountFile::open(&path).unwrap_err();
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        AccountFile::open(&link).unwrap_err();
        let error = AccountFile::open(Path::new("/nowhere")).unwrap_err();
        assert!(error.to_string().contains("/nowhere"), "{error}");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        /// Any content that a tenant writes is either read or refused.
        #[test]
        fn any_content_is_survived(content: Vec<u8>, at in 0..layout::LEN, seed: u8) {
            let mut bytes = AccountPage::initial().to_vec();
            bytes[at..].fill(seed);
            for (byte, value) in bytes[at..].iter_mut().zip(&content) {
                *byte = *value;
            }
            let (_folder, path) = page(&bytes);
            if let Ok(file) = AccountFile::open(&path) {
                let copy = file.copy().unwrap();
                let snapshot = copy.snapshot();
                let _ = (snapshot.used(), snapshot.refused(), snapshot.launches(), snapshot.processes().count());
                prop_assert!(file.dead_slots().unwrap() <= layout::SLOTS);
                prop_assert!(!file.is_in_use().unwrap());
            }
        }
    }
}
