//! The load pages of GPUs and MIG devices: `/run/tranche/load/<UUID>/load`.
//!
//! Shares of high priority write into their GPU's page until when they have work, and shares of low priority read it
//! ([`tranche_shim_core::load`]). The page belongs to the GPU and not to a claim: the first claim with a priority makes
//! it, and the last one's release removes it. Each page has a tmpfs of its own, which it fills: a tenant that makes it
//! longer takes memory from nobody.
//!
//! A claim's journal exists before its page is made, and until it is removed. So after a crash a page without a claim
//! has no user: [`LoadPages::open`] removes it.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tranche_driver::preparation::PreparationPlan;
use tranche_shim_core::{load, paths};

use crate::host::fs::{self, Durability, Fs, FsError, TmpfsSize};
use crate::host::selinux::label_for_containers;
use crate::ledger::Ledger;

/// A page, and inodes for its folder and for extended attributes, which count since Linux 6.6.
const SIZE: TmpfsSize = TmpfsSize {
    bytes: 4096,
    inodes: 8,
};

/// What a new page has in each place: a time that has passed. It is not 0, because zeros would take no memory, and a tenant
/// could take the file system's only block for another part of the file.
const PAST: u64 = 1;

#[derive(Debug)]
pub struct LoadPages {
    fs: Arc<dyn Fs>,
    folder: PathBuf,
    ledger: Arc<Ledger>,
    /// Held while it is decided whether a page is needed, and while it is made or removed.
    lock: Mutex<()>,
}

impl LoadPages {
    /// The pages in `folder`. Removes those that no claim of `ledger` needs, which has just been loaded.
    pub fn open(fs: Arc<dyn Fs>, folder: PathBuf, ledger: Arc<Ledger>) -> Result<Self, FsError> {
        let pages = Self {
            fs,
            folder,
            ledger,
            lock: Mutex::default(),
        };
        // A claim with an unreadable journal may have a page.
        if pages.ledger.refused().is_empty() {
            let held = pages.ledger.held();
            let devices = held.iter().flat_map(|record| &record.plan.devices);
            let needed: Vec<&str> = devices.filter_map(|device| device.load_page()).collect();
            for uuid in pages.fs.list(&pages.folder)? {
                if !needed.contains(&&*uuid) {
                    pages.remove(&uuid)?;
                }
            }
        }
        Ok(pages)
    }

    /// Makes the pages that a plan's shares need, unless they are there: running containers have them mounted.
    pub fn make(&self, plan: &PreparationPlan) -> Result<(), FsError> {
        let _lock = self.locked();
        for uuid in plan.devices.iter().filter_map(|device| device.load_page()) {
            let folder = self.folder.join(uuid);
            let page = folder.join(paths::LOAD);
            if self.fs.mode(&page)?.is_none() {
                self.fs.create_dir(&folder)?;
                self.fs.mount_tmpfs(&folder, SIZE)?;
                // A new file system does not have the label of the folder that it covers.
                label_for_containers(&folder)?;
                let places = PAST.to_le_bytes().repeat(load::PLACES);
                fs::replace(&*self.fs, &page, &places, 0o666, Durability::Rebuilt)?;
            }
        }
        Ok(())
    }

    /// Removes the pages that only this plan's shares needed.
    pub fn release(&self, plan: &PreparationPlan) -> Result<(), FsError> {
        if plan.devices.iter().all(|it| it.load_page().is_none()) {
            return Ok(());
        }
        let _lock = self.locked();
        self.ledger.begin_release(&plan.allocation.uid);
        for device in &plan.devices {
            if let Some(uuid) = device.load_page()
                && !self.ledger.needs_load_page(device)
            {
                self.remove(uuid)?;
            }
        }
        Ok(())
    }

    fn remove(&self, uuid: &str) -> Result<(), FsError> {
        let folder = self.folder.join(uuid);
        fs::remove(&*self.fs, &folder.join(paths::LOAD), Durability::Rebuilt)?;
        self.fs.unmount(&folder)?;
        self.fs.remove_dir(&folder)
    }

    fn locked(&self) -> MutexGuard<'_, ()> {
        self.lock.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests;
