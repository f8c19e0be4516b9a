//! Carries out the steps of a plan, and undoes them. What comes between, the state of its GPUs, may take long and is no work for
//! the threads of these steps: [`crate::claim::preparer`] puts it there.
//!
//! ```text
//!  journal the plan ─► GPUs as wanted ─► step 1 ─► … ─► step n ─► audit: allocated
//!                                        any failure: undo n … 1, GPUs without the claim, remove the journal
//!  undo n … 1 ─► GPUs without the claim ─► remove the journal ─► audit: released
//! ```
//!
//! After a kill at any point the journal lists what to undo or repeat. Steps and inverses are
//! idempotent, so it need not record how far the plan got.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tracing::{info, warn};
use tranche_api::names::DRIVER;
use tranche_driver::audit::{Ended, HeldAtEnd, Pod};
use tranche_driver::cdi::CdiError;
use tranche_driver::claim_spec::claim_spec;
use tranche_driver::journal::ClaimRecord;
use tranche_driver::metadata;
use tranche_driver::preparation::{PAGES, PreparationPlan, PreparedDevice, Step, Undo};
use tranche_node::page::{AccountFile, ReadError, cap_page, read_cap};
use tranche_shim_core::cap;
use tranche_shim_core::error::PageError;
use tranche_shim_core::layout::{self, AccountPage};

use crate::claim::spec_file::{Announcement, ClaimSpecFile};
use crate::gpu::gpus::GpuError;
use crate::gpu::load_pages::LoadPages;
use crate::host::fs::{self, Durability, Fs, FsError, TmpfsSize};
use crate::host::layout::{Layout, SharePaths};
use crate::host::selinux::label_for_containers;
use crate::ledger::audit::Audit;
use crate::ledger::journal::{Journal, Loaded};

/// A step or an inverse that failed.
#[derive(Debug, thiserror::Error)]
pub enum StepError {
    #[error(transparent)]
    Fs(#[from] FsError),
    /// A GPU could not be reconciled with what claims need.
    #[error(transparent)]
    Gpu(#[from] GpuError),
    /// The spec cannot be made.
    #[error("CDI spec: {0}")]
    Cdi(#[from] CdiError),
    /// The cap page cannot be made.
    #[error("cap page of {key}: {source}")]
    Cap { key: String, source: PageError },
    /// The account page has invalid content.
    #[error(
        "account page {path}: {source}: its containers broke it; delete the pods that use the claim"
    )]
    Account { path: PathBuf, source: PageError },
    /// The pages are of another release and one is missing.
    #[error(
        "page {path} is missing, and it has version {pages}, which this release cannot make: delete the pods that use \
         the claim to have it prepared by this release"
    )]
    OtherVersion {
        path: PathBuf,
        /// The version of the claim's pages.
        pages: u32,
    },
    /// The account page's file cannot be read.
    #[error("account page {path}: {source}")]
    AccountFile { path: PathBuf, source: io::Error },
}

/// A plan that was not carried out.
#[derive(Debug, thiserror::Error)]
#[error("{error}{}", cleanup_text(cleanup))]
pub struct ExecuteError {
    pub error: StepError,
    /// The steps that could not be undone: their results still exist, and so does the journal.
    pub cleanup: Vec<StepError>,
}

fn cleanup_text(cleanup: &[StepError]) -> String {
    if cleanup.is_empty() {
        return String::new();
    }
    format!("; undoing it failed too: {}", joined(cleanup))
}

fn joined(errors: &[StepError]) -> String {
    let errors: Vec<_> = errors.iter().map(ToString::to_string).collect();
    errors.join("; ")
}

/// How many claims' files are written at a time: about as many fsyncs as a disk merges.
pub const TURNS: usize = 16;

/// The allocation unit of a tmpfs.
const PAGE: u64 = 4096;

/// The size of a claim's pages.
fn pages_size(devices: u64, accounts: u64) -> TmpfsSize {
    let account = (layout::LEN as u64).next_multiple_of(PAGE);
    // A cap page and its replacement.
    let caps = 2 * PAGE;
    TmpfsSize {
        bytes: accounts * account + devices * caps,
        // The folder, three pages and a temporary one; since Linux 6.6 extended attributes count too.
        inodes: 8 + 8 * devices,
    }
}

/// The steps that could not be undone.
#[derive(Debug, thiserror::Error)]
#[error("{}", joined(.0))]
pub struct UndoError(pub Vec<StepError>);

/// Carries out plans on this node.
#[derive(Clone, Debug)]
pub struct Executor {
    fs: Arc<dyn Fs>,
    layout: Layout,
    journal: Journal,
    spec_file: Arc<ClaimSpecFile>,
    audit: Arc<Audit>,
}

impl Executor {
    /// Uses the paths of `layout`.
    pub fn new(fs: Arc<dyn Fs>, layout: Layout, audit: Arc<Audit>) -> Result<Self, FsError> {
        let journal = Journal::open(Arc::clone(&fs), layout.claims())?;
        fs.create_dir(&layout.shares)?;
        label_for_containers(&layout.shares)?;
        fs.create_dir(&layout.metadata())?;
        label_for_containers(&layout.metadata())?;
        fs.create_dir(&layout.cdi)?;
        let spec_file = ClaimSpecFile::open(Arc::clone(&fs), layout.claims_spec(), TURNS)?;
        Ok(Self {
            fs,
            layout,
            journal,
            spec_file: Arc::new(spec_file),
            audit,
        })
    }

    #[must_use]
    pub fn audit(&self) -> &Audit {
        &self.audit
    }

    #[must_use]
    pub fn journal(&self) -> &Journal {
        &self.journal
    }

    /// Carries out the steps of a journalled plan, again or for the first time: what exists stays, what a reboot
    /// or an administrator removed is restored. `prepared` is the plan with what became known when its GPUs were prepared, and
    /// `dev_root` the root of the device nodes, as the host sees it. If it fails, nothing is undone, because containers may use
    /// it. Returns the plan as it is journalled now.
    pub fn rebuild(
        &self,
        record: &ClaimRecord,
        prepared: PreparationPlan,
        pods: &BTreeSet<Pod>,
        load_pages: &LoadPages,
        dev_root: &Path,
    ) -> Result<PreparationPlan, StepError> {
        let is_changed = prepared != record.plan;
        let record = record.with_plan(prepared);
        if is_changed {
            self.journal.write(&record)?;
        }
        self.make_files(&record.plan, load_pages, dev_root)?;
        self.audit.held(&record, pods);
        Ok(record.plan)
    }

    /// Makes the files of a plan; what exists stays.
    pub fn make_files(
        &self,
        plan: &PreparationPlan,
        load_pages: &LoadPages,
        dev_root: &Path,
    ) -> Result<(), StepError> {
        if plan.pages == PAGES {
            self.mount_pages(plan)?;
        }
        load_pages.make(plan)?;
        for step in &plan.steps {
            self.step(plan, step, dev_root)?;
        }
        Ok(())
    }

    /// Says that a claim is about to be prepared or released.
    pub fn announce(&self, uid: &str) -> Announcement {
        self.spec_file.announce(uid)
    }

    /// Makes the folder of the CDI specs and the file of the claims' devices again, if somebody deleted them.
    pub fn restore_spec_file(&self) -> Result<(), FsError> {
        self.fs.create_dir(&self.layout.cdi)?;
        self.spec_file.restore()
    }

    /// The first file of a plan that does not exist.
    pub fn missing_file(&self, plan: &PreparationPlan) -> Result<Option<PathBuf>, FsError> {
        if !self.spec_file.has(&plan.allocation.uid) {
            return Ok(Some(self.spec_file.path().to_owned()));
        }
        self.first_missing(plan.steps.iter().flat_map(|step| self.files(plan, step)))
    }

    /// The first account page of a plan that does not exist.
    pub fn missing_account(&self, plan: &PreparationPlan) -> Result<Option<PathBuf>, FsError> {
        let is_account = |step: &&Step| matches!(step, Step::CreateAccountPage { .. });
        let steps = plan.steps.iter().filter(is_account);
        self.first_missing(steps.flat_map(|step| self.files(plan, step)))
    }

    fn first_missing(
        &self,
        files: impl Iterator<Item = PathBuf>,
    ) -> Result<Option<PathBuf>, FsError> {
        for file in files {
            if self.fs.mode(&file)?.is_none() {
                return Ok(Some(file));
            }
        }
        Ok(None)
    }

    /// The files that a step makes and that only this claim has.
    fn files(&self, plan: &PreparationPlan, step: &Step) -> Vec<PathBuf> {
        let uid = &plan.allocation.uid;
        match step {
            Step::WriteCapPage { key, .. } => vec![self.layout.share(uid, key).cap],
            Step::CreateAccountPage { key, account } => {
                vec![self.layout.share(uid, key).page_of(*account).clone()]
            }
            Step::WriteCdiSpec {} => {
                let folder = self.layout.metadata().join(uid);
                let requests = metadata::requests(plan).into_iter();
                let metadata = requests.map(|request| folder.join(format!("{request}.json")));
                metadata.collect()
            }
        }
    }

    /// Undoes the steps of a plan as far as it got. After a failure the other steps are still undone. `unowned` says how many
    /// bytes of a GPU, by UUID, no process holds, as far as it is known. Returns what failed.
    pub fn undo(
        &self,
        record: &ClaimRecord,
        load_pages: &LoadPages,
        unowned: &dyn Fn(&str) -> Option<u64>,
    ) -> Vec<StepError> {
        let plan = &record.plan;
        let uid = &plan.allocation.uid;
        self.audit
            .release_begins(record, || self.held_at_end(plan, unowned));
        let mut failed: Vec<_> = plan
            .undo()
            .iter()
            .filter_map(|undo| self.undo_step(uid, undo).err())
            .collect();
        failed.extend(self.remove_folder(uid).err().map(StepError::from));
        let load_pages = load_pages.release(plan);
        failed.extend(load_pages.err().map(StepError::from));
        failed
    }

    /// Removes the journal of a plan that was undone; it is kept if something `failed`.
    pub fn forget(
        &self,
        record: &ClaimRecord,
        how: Ended,
        mut failed: Vec<StepError>,
    ) -> Result<(), UndoError> {
        if failed.is_empty() {
            let removed = self.journal.remove(&record.plan.allocation.uid);
            failed.extend(removed.err().map(StepError::from));
        }
        if failed.is_empty() {
            self.audit.released(record, how);
            Ok(())
        } else {
            Err(UndoError(failed))
        }
    }

    /// How much memory a claim still has in use, by the keys of its devices.
    fn held_at_end(
        &self,
        plan: &PreparationPlan,
        unowned: &dyn Fn(&str) -> Option<u64>,
    ) -> BTreeMap<String, HeldAtEnd> {
        let at_end = |device: &PreparedDevice| {
            let path = self.layout.share(&plan.allocation.uid, &device.key).account;
            let has_account = device.cap.is_share() && plan.pages == PAGES;
            let held = HeldAtEnd {
                account_bytes: has_account.then(|| charged(&path)).flatten(),
                unowned_bytes: unowned(&device.gpu_uuid),
            };
            (device.key.clone(), held)
        };
        plan.devices.iter().map(at_end).collect()
    }

    /// Removes what a claim without a journal may have left. A UID that is not a valid file name has
    /// no files.
    pub fn sweep(&self, uid: &str) -> Result<(), StepError> {
        if uid.is_empty() || !uid.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-') {
            return Ok(());
        }
        self.spec_file.remove(uid);
        self.remove_metadata(uid)?;
        let claim = self.layout.share(uid, "").claim;
        for key in self.fs.list(&claim)? {
            let share = self.layout.share(uid, &key);
            for page in self.fs.list(&share.device)? {
                self.fs.remove_file(&share.device.join(page))?;
            }
            self.fs.remove_dir(&share.device)?;
        }
        Ok(self.remove_folder(uid)?)
    }

    fn write_metadata(&self, plan: &PreparationPlan) -> Result<(), FsError> {
        let folder = self.layout.metadata().join(&plan.allocation.uid);
        self.fs.create_dir(&folder)?;
        for request in metadata::requests(plan) {
            let path = folder.join(format!("{request}.json"));
            fs::ensure(&*self.fs, &path, &metadata::file(plan, request), 0o444)?;
        }
        Ok(())
    }

    fn remove_metadata(&self, uid: &str) -> Result<(), FsError> {
        let folder = self.layout.metadata().join(uid);
        for name in self.fs.list(&folder)? {
            self.fs.remove_file(&folder.join(name))?;
        }
        self.fs.remove_dir(&folder)
    }

    /// A claim with accounts gets a small tmpfs of its own for its pages, so that a tenant that makes an
    /// account page longer fills only this tmpfs. Pages that an earlier release made in the plain folder
    /// stay there, because containers have them mounted.
    fn mount_pages(&self, plan: &PreparationPlan) -> Result<(), FsError> {
        let accounts = plan
            .steps
            .iter()
            .filter(|step| matches!(step, Step::CreateAccountPage { .. }))
            .count() as u64;
        if accounts == 0 {
            return Ok(());
        }
        let folder = self.layout.share(&plan.allocation.uid, "").claim;
        self.fs.create_dir(&folder)?;
        let devices = plan.devices.len() as u64;
        self.fs
            .mount_tmpfs(&folder, pages_size(devices, accounts))?;
        // A new file system does not have the label of the folder that it covers.
        label_for_containers(&folder)
    }

    /// Removes a claim's folder if it is empty.
    fn remove_folder(&self, uid: &str) -> Result<(), FsError> {
        let folder = self.layout.share(uid, "").claim;
        self.fs.unmount(&folder)?;
        self.fs.remove_dir(&folder)
    }

    /// Loads the journals, completes the audit trail, and removes what an earlier run left without a journal.
    pub fn recover(&self) -> Result<Loaded, FsError> {
        let loaded = self.journal.load_all()?;
        let mut leftovers: BTreeSet<_> = self.fs.list(&self.layout.shares)?.into_iter().collect();
        leftovers.extend(self.fs.list(&self.layout.metadata())?);
        fs::remove_temporaries(&*self.fs, &self.layout.cdi, DRIVER)?;
        let held = loaded.records.iter().map(|it| &*it.plan.allocation.uid);
        let refused = loaded.refused.iter().map(|(uid, _)| &**uid);
        self.spec_file.keep(held.chain(refused));
        for record in &loaded.records {
            leftovers.remove(&record.plan.allocation.uid);
        }
        for (uid, _) in &loaded.refused {
            leftovers.remove(uid);
        }
        self.audit.started(&loaded);
        for uid in &leftovers {
            match self.sweep(uid) {
                Ok(()) => info!(uid, "removed files of a claim without a journal"),
                Err(error) => {
                    warn!(%error, uid, "cannot remove files of a claim without a journal");
                }
            }
        }
        Ok(loaded)
    }

    fn step(&self, plan: &PreparationPlan, step: &Step, dev_root: &Path) -> Result<(), StepError> {
        let uid = &plan.allocation.uid;
        match step {
            // Only the release that made the pages can write them.
            Step::WriteCapPage { key, .. } if plan.pages != PAGES => {
                self.require(plan, self.layout.share(uid, key).cap)?;
            }
            Step::CreateAccountPage { key, account } if plan.pages != PAGES => {
                let page = self.layout.share(uid, key).page_of(*account).clone();
                self.require(plan, page)?;
            }
            Step::WriteCapPage { key, gpu_uuid, cap } => {
                let device = plan.device_uuid(key).unwrap_or(gpu_uuid);
                let page = cap_page(uid, key, device, *cap).map_err(|source| StepError::Cap {
                    key: key.clone(),
                    source,
                })?;
                let share = self.layout.share(uid, key);
                self.fs.create_dir(&share.device)?;
                if !self.has_cap(&share.cap, &page)? {
                    fs::replace(&*self.fs, &share.cap, &page, 0o444, Durability::Rebuilt)?;
                }
            }
            Step::CreateAccountPage { key, account } => {
                let share = self.layout.share(uid, key);
                let path = share.page_of(*account);
                // Its tenant may have made it very long: only the header is read.
                match AccountFile::open(path) {
                    Ok(_) => {}
                    Err(ReadError::File { source, .. })
                        if source.kind() == io::ErrorKind::NotFound =>
                    {
                        let page = AccountPage::initial();
                        fs::replace(&*self.fs, path, page, 0o666, Durability::Rebuilt)?;
                    }
                    Err(ReadError::File { path, source }) => {
                        return Err(StepError::AccountFile { path, source });
                    }
                    Err(ReadError::Page { path, source }) => {
                        return Err(StepError::Account { path, source });
                    }
                }
            }
            Step::WriteCdiSpec {} => {
                self.write_metadata(plan)?;
                let spec = claim_spec(plan, &self.layout.node_paths(dev_root))?;
                self.spec_file.put(uid, spec)?;
            }
        }
        Ok(())
    }

    /// Whether any page of a claim exists.
    pub fn has_pages(&self, plan: &PreparationPlan) -> Result<bool, StepError> {
        let folder = self.layout.share(&plan.allocation.uid, "").claim;
        Ok(!self.fs.list(&folder)?.is_empty())
    }

    fn require(&self, plan: &PreparationPlan, path: PathBuf) -> Result<(), StepError> {
        match self.fs.mode(&path)? {
            Some(_) => Ok(()),
            None => Err(StepError::OtherVersion {
                path,
                pages: plan.pages,
            }),
        }
    }

    /// Whether a cap page with the limits of `page` exists. The part behind the limits belongs to
    /// the sampler, and containers have the file mounted, so the file must not be replaced.
    fn has_cap(&self, path: &Path, page: &[u8; cap::LEN]) -> Result<bool, FsError> {
        let there = read_cap(path).map_err(|source| FsError {
            action: "read",
            path: path.to_owned(),
            source,
        })?;
        let limits = ..cap::LIMITS_LEN;
        Ok(self.fs.mode(path)? == Some(0o444)
            && there.is_some_and(|there| there[limits] == page[limits]))
    }

    fn undo_step(&self, uid: &str, undo: &Undo) -> Result<(), StepError> {
        let remove = |share: &SharePaths, page: &Path| {
            fs::remove(&*self.fs, page, Durability::Rebuilt)?;
            self.fs.remove_dir(&share.device)
        };
        match undo {
            Undo::RemoveCapPage { key } => {
                let share = self.layout.share(uid, key);
                remove(&share, &share.cap)?;
            }
            Undo::RemoveAccountPage { key, account } => {
                let share = self.layout.share(uid, key);
                remove(&share, share.page_of(*account))?;
            }
            Undo::RemoveCdiSpec => {
                self.spec_file.remove(uid);
                self.remove_metadata(uid)?;
            }
        }
        Ok(())
    }
}

/// The bytes that an account counts for living processes. The charges of dead ones are reclaimed within a second.
fn charged(account: &Path) -> Option<u64> {
    let file = AccountFile::open(account).ok()?;
    if file.is_in_use().ok()? {
        Some(file.copy().ok()?.snapshot().used())
    } else {
        Some(0)
    }
}

#[cfg(test)]
mod tests;
