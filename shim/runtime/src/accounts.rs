//! A share's account as live memory.

use core::ffi::CStr;

use tranche_shim_core::{Account, paths};

use crate::complain::Refused;
use crate::container_shares::{Name, Share};
use crate::sys::{self, Errno, File, Mapping, NotMapped};

/// A mapped account.
#[derive(Clone, Copy, Debug)]
pub struct Live {
    /// Its memory.
    pub account: &'static Account,
    mapping: Mapping,
}

impl Live {
    /// Maps an account of a share, by its file name. The mapping keeps the open file description after the file is closed.
    pub fn map(name: &Name, account: &str) -> Result<(File, Self), Refused> {
        let file = name.open_account(account, true)?;
        let live = Self::of(&file).map_err(|why| name.refuse_unmapped(account, why))?;
        Ok((file, live))
    }

    /// Maps a file that was checked to be an account.
    fn of(file: &File) -> Result<Self, NotMapped> {
        let mapping = file.map_shared(size_of::<Account>())?;
        // SAFETY: the mapping is an account page, checked when it was opened, as long as an
        // `Account`, page-aligned, and unmapped by `unmap` alone. Others write to it, through atomics
        // too; what they could write is valid for every field.
        let account: &Account = unsafe { mapping.start.cast().as_ref() };
        Ok(Self { account, mapping })
    }

    /// Reclaims what dead processes left. Takes some microseconds.
    pub fn reclaim(&self, name: &Name, account: &str) {
        // Needs a separate description, because our own slot would look free to the description that
        // holds its lock. If it cannot be opened (in a sandbox), the node or another process must
        // reclaim.
        if let Ok(file) = name.reopen_account(account, true) {
            self.reclaim_by(&file);
        }
    }

    /// The same, by a description that holds no slot's first lock.
    pub fn reclaim_by(&self, file: &File) {
        self.account.reclaim(file);
        self.account.repair(file);
    }

    /// Unmaps the account, which drops the description's locks.
    ///
    /// # Safety
    ///
    /// Nothing uses `account` any more.
    pub unsafe fn unmap(self) {
        // SAFETY: the caller's promise.
        unsafe { sys::unmap(self.mapping) };
    }
}

/// Bytes that a share's living processes hold together, including contexts.
pub fn used(share: &Share) -> Result<u64, Refused> {
    with_account(&share.name, Account::used)
}

/// Calls `visit` with the living processes of a share: PID, in the process's own namespace, and
/// bytes charged.
pub fn processes(share: &Share, visit: &mut dyn FnMut(u64, u64)) -> Result<(), Refused> {
    with_account(&share.name, |account| {
        for (pid, charged) in account.processes() {
            visit(pid, charged);
        }
    })
}

fn with_account<T>(name: &Name, at: impl FnOnce(&Account) -> T) -> Result<T, Refused> {
    let (file, live) = Live::map(name, paths::ACCOUNT)?;
    live.reclaim_by(&file);
    let seen = at(live.account);
    // SAFETY: `live` was this function's own, and `seen` is not borrowed from it.
    unsafe { live.unmap() };
    Ok(seen)
}

/// For the node: reclaims what dead processes left in the account at `path`; returns the number of
/// reclaimed slots.
///
/// The file must have been checked to be an account. Its tenant may truncate it at any moment, and
/// then the kernel ends the calling process with SIGBUS: call this only in a process that may end.
pub fn reclaim(path: &CStr) -> Result<usize, Errno> {
    let file = File::open_at_once(path, true)?;
    let live = Live::of(&file).map_err(NotMapped::errno)?;
    let reclaimed = live.account.reclaim(&file);
    live.account.repair(&file);
    // SAFETY: `live` was this function's own.
    unsafe { live.unmap() };
    Ok(reclaimed)
}
