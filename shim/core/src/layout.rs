//! The account page as bytes: the node writes the first content, and reads it for its metrics.
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 8 | magic `TRANCHEA` |
//! | 8 | 4 | layout version, [`ABI`] |
//! | 12 | 4 | number of slots, [`SLOTS`] |
//! | 128 | 8 | `used`: bytes of device memory reserved by all processes together, their spares included |
//! | 136 | 8 | `peak`: the most `used` ever was |
//! | 256 | 8 | `refused`: allocations refused to processes that have ended |
//! | 384 | 8 | `position`: the share's position in its grant of GPU time, in nanoseconds |
//! | 392 | 8 | `spent`: estimated nanoseconds of GPU time of its launches, with corrections |
//! | 400 | 8 | `carried`: nanoseconds of GPU time of debt beyond its position, repaid at half its rate |
//! | 448 | 8 | launches of processes that have ended |
//! | 456 | 8 | nanoseconds for which they were delayed |
//! | 464 | 8 | when the last of these launches was, `CLOCK_MONOTONIC` in nanoseconds; 0 for never |
//! | 512 | 128 | the slots that were taken and not reclaimed yet, one bit each |
//! | 640 | 8 | `spares`: which slots may have a spare, one bit for 32, or bit 32 if none has; above it a number of a collection |
//! | 4096 | 128 each | the slots |
//!
//! A slot belongs to one process from the moment it holds a write lock (an open file description lock,
//! `F_OFD_SETLK`) on the file's byte [`slot_lock`] until the kernel has dropped that lock, at the end of the
//! process, and the lock on the byte [`files_lock`], at the end of the last process that has its files:
//!
//! | offset | bytes | field |
//! |---|---|---|
//! | 0 | 8 | `begun`: changes of `charged` that were begun |
//! | 8 | 8 | `ended`: changes that were completed |
//! | 16 | 8 | `charge`: the process's part of `used` in the low 48 bits, in bytes; above them its spare, in 64 KiB |
//! | 24 | 8 | `refused`: allocations refused to it |
//! | 32 | 8 | its PID, in its own PID namespace; informative |
//! | 40 | 8 | its launches of kernels and graphs, counted in batches |
//! | 48 | 8 | nanoseconds for which its launches were delayed, summed over its threads |
//! | 56 | 8 | when its last launch was, `CLOCK_MONOTONIC` in nanoseconds; 0 for never |
//! | 64 | 64 | zero |
//!
//! A process's spare is the part of its charge that it does not use: what it freed and keeps for its next
//! allocation. Any process of the share may take it back, so it counts as free memory.
//!
//! Integers are little endian. The tenant can write all of it, so every value must be checked.

use crate::cap::{get_u32, get_u64};
use crate::error::PageError;

/// The layout's version.
pub const ABI: u32 = 1;

/// Processes that can hold one share at a time.
pub const SLOTS: usize = 1024;

/// Bytes before the first slot.
pub const HEADER_LEN: usize = 4096;

/// Bytes of a slot: two cache lines, so that neither neighbouring slots nor the adjacent-line
/// prefetcher cause contention between processes.
pub const SLOT_LEN: usize = 128;

/// Bytes of an account page.
pub const LEN: usize = HEADER_LEN + SLOTS * SLOT_LEN;

pub(crate) const MAGIC: [u8; 8] = *b"TRANCHEA";
pub(crate) const BITMAP_WORDS: usize = SLOTS / 64;

const AT_ABI: usize = 8;
const AT_SLOTS: usize = 12;
pub(crate) const USED: usize = 128;
pub(crate) const AT_PEAK: usize = 136;
pub(crate) const AT_REFUSED: usize = 256;
pub(crate) const AT_POSITION: usize = 384;
pub(crate) const AT_SPENT: usize = 392;
pub(crate) const AT_CARRIED: usize = 400;
pub(crate) const AT_PAST: usize = 448;
pub(crate) const AT_TAKEN: usize = 512;
pub(crate) const AT_SPARES: usize = 640;

/// The value of `spares` while no process has one.
pub(crate) const NO_SPARES: u64 = 1 << 32;

pub(crate) const SLOT_BEGUN: usize = 0;
pub(crate) const SLOT_ENDED: usize = 8;
pub(crate) const SLOT_CHARGE: usize = 16;
const SLOT_REFUSED: usize = 24;
const SLOT_PID: usize = 32;
pub(crate) const SLOT_LAUNCHES: usize = 40;
pub(crate) const LAUNCHES_THROTTLED: usize = 8;
pub(crate) const LAUNCHES_LAST: usize = 16;

/// Spares are whole multiples of this, in bytes.
pub const SPARE_UNIT: u64 = 64 << 10;

/// The largest spare of a process, in bytes.
pub const MOST_SPARE: u64 = 16 << 20;

/// The largest charge of a process, in bytes.
pub const MOST_CHARGED: u64 = (1 << SPARE_SHIFT) - 1;

const SPARE_SHIFT: u32 = 48;

/// A slot's `charge`, of any content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Charge(pub(crate) u64);

impl Charge {
    /// Bytes charged, the spare included.
    pub(crate) const fn bytes(self) -> u64 {
        self.0 & MOST_CHARGED
    }

    /// Bytes of the spare, at most [`bytes`](Self::bytes).
    pub(crate) const fn spare(self) -> u64 {
        let (spare, bytes) = ((self.0 >> SPARE_SHIFT) * SPARE_UNIT, self.bytes());
        if spare < bytes { spare } else { bytes }
    }

    /// Bytes charged without the spare.
    pub(crate) const fn used(self) -> u64 {
        self.bytes() - self.spare()
    }

    /// The charge without `bytes` of its used part; at most [`used`](Self::used).
    pub(crate) const fn without(self, bytes: u64) -> Self {
        Self(self.0 - bytes)
    }

    /// The same without the spare.
    pub(crate) const fn without_spare(self) -> Self {
        Self(self.used())
    }

    /// The charge after `bytes` of its used part became spare; `None` if the spare cannot hold them.
    pub(crate) const fn give(self, bytes: u64) -> Option<Self> {
        let units = (self.0 >> SPARE_SHIFT) + bytes / SPARE_UNIT;
        if units <= MOST_SPARE / SPARE_UNIT && bytes.is_multiple_of(SPARE_UNIT) {
            Some(Self(units << SPARE_SHIFT | self.bytes()))
        } else {
            None
        }
    }

    /// The charge after `bytes` of the spare became used; `None` if the spare is smaller.
    pub(crate) const fn take(self, bytes: u64) -> Option<Self> {
        let has = self.0 >> SPARE_SHIFT >= bytes / SPARE_UNIT;
        if has && bytes.is_multiple_of(SPARE_UNIT) {
            Some(Self(self.0 - ((bytes / SPARE_UNIT) << SPARE_SHIFT)))
        } else {
            None
        }
    }
}

/// The byte of the account file that the owner of slot `slot` (0 to [`SLOTS`] − 1) holds locked.
/// It is beyond the end of the page: a lock needs no content, and there it cannot be mistaken for a lock of
/// the content.
#[must_use]
pub const fn slot_lock(slot: usize) -> u64 {
    (LEN + slot) as u64
}

/// The byte of the account file that stays locked while any process has the descriptor that the owner of slot
/// `slot` (0 to [`SLOTS`] − 1) opened for it. Forked children inherit it and the driver's files, and the driver
/// frees a process's memory when the last of those is closed.
#[must_use]
pub const fn files_lock(slot: usize) -> u64 {
    REPAIR_LOCK + 1 + slot as u64
}

/// The slots whose mark is set in a page's first [`HEADER_LEN`] bytes: those of living processes,
/// and of dead ones whose slot was not reclaimed yet. None for fewer bytes.
pub fn taken_slots(header: &[u8]) -> impl Iterator<Item = usize> + use<'_> {
    let whole = header.len() >= HEADER_LEN;
    (0..if whole { SLOTS } else { 0 })
        .filter(move |slot| get_u64(header, AT_TAKEN + slot / 64 * 8) >> (slot % 64) & 1 == 1)
}

/// `position` and `spent` from a page's first [`HEADER_LEN`] bytes. Zeros for fewer bytes.
#[must_use]
pub fn compute_words(header: &[u8]) -> (u64, u64) {
    if header.len() < HEADER_LEN {
        return (0, 0);
    }
    (get_u64(header, AT_POSITION), get_u64(header, AT_SPENT))
}

/// The byte of the account file that a process locks to correct `used`.
pub const REPAIR_LOCK: u64 = (LEN + SLOTS) as u64;

/// The byte of the account file that a process locks while it reclaims.
pub const RECLAIM_LOCK: u64 = files_lock(SLOTS);

/// An account page as bytes.
#[derive(Debug)]
pub struct AccountPage;

static INITIAL: [u8; LEN] = {
    let mut page = [0; LEN];
    let mut at = 0;
    while at < MAGIC.len() {
        page[at] = MAGIC[at];
        at += 1;
    }
    let abi = ABI.to_le_bytes();
    #[expect(clippy::cast_possible_truncation, reason = "1024")]
    let slots = (SLOTS as u32).to_le_bytes();
    at = 0;
    while at < 4 {
        page[AT_ABI + at] = abi[at];
        page[AT_SLOTS + at] = slots[at];
        at += 1;
    }
    let spares = NO_SPARES.to_le_bytes();
    at = 0;
    while at < 8 {
        page[AT_SPARES + at] = spares[at];
        at += 1;
    }
    page
};

impl AccountPage {
    /// The page of a new share. From [`HEADER_LEN`] on it is zero, so a writer
    /// may leave the rest of the file sparse, but the file has exactly [`LEN`] bytes.
    #[must_use]
    pub fn initial() -> &'static [u8; LEN] {
        &INITIAL
    }

    /// Checks that bytes are an account page of this version.
    pub fn check(page: &[u8]) -> Result<(), PageError> {
        if page.len() != LEN {
            return Err(PageError::Length {
                expected: LEN,
                found: page.len(),
            });
        }
        Self::check_header(page)
    }

    /// Checks the first bytes of a page, at least 16, of a file whose length is checked already.
    pub fn check_header(page: &[u8]) -> Result<(), PageError> {
        if page.len() < AT_SLOTS + 4 {
            return Err(PageError::Length {
                expected: LEN,
                found: page.len(),
            });
        }
        if page[..MAGIC.len()] != MAGIC {
            return Err(PageError::Magic);
        }
        let found = get_u32(page, AT_ABI);
        if found != ABI || usize::try_from(get_u32(page, AT_SLOTS)) != Ok(SLOTS) {
            return Err(PageError::Abi {
                supported: ABI,
                found,
            });
        }
        Ok(())
    }

    /// Reads a copy of a page, for metrics. The copy need not be consistent: the processes of the
    /// share run meanwhile.
    pub fn snapshot(page: &[u8]) -> Result<AccountSnapshot<'_>, PageError> {
        Self::check(page)?;
        Ok(AccountSnapshot { page })
    }
}

/// The content of a copy of an account page. The tenant can write it.
#[derive(Clone, Copy, Debug)]
pub struct AccountSnapshot<'a> {
    page: &'a [u8],
}

impl<'a> AccountSnapshot<'a> {
    /// Bytes of device memory that the share's processes hold or have reserved.
    #[must_use]
    pub fn used(&self) -> u64 {
        let spare = |sum: u64, process: ProcessUsage| sum.saturating_add(process.spare);
        self.reserved()
            .saturating_sub(self.processes().fold(0, spare))
    }

    /// The same with the processes' spares: at every instant at least the sum of what is charged to them.
    #[must_use]
    pub fn reserved(&self) -> u64 {
        get_u64(self.page, USED)
    }

    /// The largest [`reserved`](Self::reserved) in the page's life, in bytes.
    #[must_use]
    pub fn peak(&self) -> u64 {
        get_u64(self.page, AT_PEAK)
    }

    /// Allocations that the cap refused in the page's life.
    #[must_use]
    pub fn refused(&self) -> u64 {
        self.processes()
            .fold(get_u64(self.page, AT_REFUSED), |sum, process| {
                sum.saturating_add(process.refused)
            })
    }

    /// Launches of kernels and graphs in the page's life.
    #[must_use]
    pub fn launches(&self) -> u64 {
        self.processes()
            .fold(get_u64(self.page, AT_PAST), |sum, process| {
                sum.saturating_add(process.launches)
            })
    }

    /// Nanoseconds for which launches were delayed in the page's life, summed over threads.
    #[must_use]
    pub fn throttled_nanos(&self) -> u64 {
        let past = get_u64(self.page, AT_PAST + LAUNCHES_THROTTLED);
        self.processes().fold(past, |sum, process| {
            sum.saturating_add(process.throttled_nanos)
        })
    }

    /// When the last launch was, `CLOCK_MONOTONIC` in nanoseconds; `None` before the first.
    #[must_use]
    pub fn last_launch(&self) -> Option<u64> {
        let past = noted(get_u64(self.page, AT_PAST + LAUNCHES_LAST));
        self.processes()
            .fold(past, |last, process| last.max(process.last_launch))
    }

    /// The estimated GPU time of the share's launches, in nanoseconds.
    #[must_use]
    pub fn spent_nanos(&self) -> u64 {
        get_u64(self.page, AT_SPENT)
    }

    /// The share's position in its grant of GPU time, in nanoseconds.
    #[must_use]
    pub fn position(&self) -> u64 {
        get_u64(self.page, AT_POSITION)
    }

    /// The processes in the account: living ones, and dead ones whose slot was not reclaimed yet.
    pub fn processes(&self) -> impl Iterator<Item = ProcessUsage> + use<'a> {
        let page = self.page;
        taken_slots(page).map(move |slot| {
            let at = HEADER_LEN + slot * SLOT_LEN;
            let charge = Charge(get_u64(page, at + SLOT_CHARGE));
            ProcessUsage {
                slot,
                pid: get_u64(page, at + SLOT_PID),
                begun: get_u64(page, at + SLOT_BEGUN),
                ended: get_u64(page, at + SLOT_ENDED),
                charged: charge.bytes(),
                spare: charge.spare(),
                refused: get_u64(page, at + SLOT_REFUSED),
                launches: get_u64(page, at + SLOT_LAUNCHES),
                throttled_nanos: get_u64(page, at + SLOT_LAUNCHES + LAUNCHES_THROTTLED),
                last_launch: noted(get_u64(page, at + SLOT_LAUNCHES + LAUNCHES_LAST)),
            }
        })
    }
}

/// A time; 0 means none.
fn noted(moment: u64) -> Option<u64> {
    (moment != 0).then_some(moment)
}

/// One process's line in an account.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessUsage {
    /// Its slot, 0 to [`SLOTS`] − 1.
    pub slot: usize,
    /// Its PID in its own PID namespace, written by itself.
    pub pid: u64,
    /// Changes of `charged` that it began. A change of `spare` alone is not counted.
    pub begun: u64,
    /// Changes of `charged` that it completed; equal to the ones it began if none is in progress.
    pub ended: u64,
    /// Bytes charged to it, less than 2⁴⁸: at every instant at least what it holds.
    pub charged: u64,
    /// Bytes of the charge that it does not use and keeps for its next allocation. Any process of the
    /// share may take them back.
    pub spare: u64,
    /// Allocations refused to it.
    pub refused: u64,
    /// Its launches of kernels and graphs.
    pub launches: u64,
    /// Nanoseconds for which its launches were delayed, summed over its threads.
    pub throttled_nanos: u64,
    /// When its last launch was, `CLOCK_MONOTONIC` in nanoseconds.
    pub last_launch: Option<u64>,
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use proptest::prelude::*;

    use super::{
        ABI, AT_ABI, AT_PAST, AT_TAKEN, AccountPage, HEADER_LEN, LEN, ProcessUsage, SLOT_LEN, USED,
    };
    use crate::error::PageError;

    #[test]
    fn a_fresh_page_is_empty() {
        let snapshot = AccountPage::snapshot(AccountPage::initial()).unwrap();
        assert_eq!(
            (snapshot.used(), snapshot.peak(), snapshot.refused()),
            (0, 0, 0)
        );
        assert_eq!(
            (
                snapshot.launches(),
                snapshot.spent_nanos(),
                snapshot.last_launch()
            ),
            (0, 0, None)
        );
        assert_eq!(snapshot.processes().count(), 0);
        assert!(
            AccountPage::initial()[HEADER_LEN..]
                .iter()
                .all(|&byte| byte == 0)
        );
    }

    #[test]
    fn a_spare_is_free_memory() {
        let mut page = Vec::from(*AccountPage::initial());
        page[USED + 2] = 8; // 512 KiB
        page[AT_TAKEN] = 0b1;
        page[HEADER_LEN + 18] = 6; // charged 384 KiB
        page[HEADER_LEN + 22] = 2; // of which 128 KiB are spare
        let read = |page: &[u8]| {
            let snapshot = AccountPage::snapshot(page).unwrap();
            let process = snapshot.processes().next().unwrap();
            (
                snapshot.used() >> 10,
                process.charged >> 10,
                process.spare >> 10,
            )
        };
        assert_eq!(read(&page), (384, 384, 128));
        // A spare that is larger than the charge, and than what is used.
        page[HEADER_LEN + 23] = 0xff;
        assert_eq!(read(&page), (128, 384, 384));
        page[USED + 2] = 1;
        assert_eq!(read(&page).0, 0);
    }

    #[test]
    fn only_taken_slots_are_listed() {
        let mut page = Vec::from(*AccountPage::initial());
        page[USED] = 7;
        page[AT_TAKEN + 8] = 0b10; // slot 65
        let at = HEADER_LEN + 65 * SLOT_LEN;
        page[at] = 2;
        page[at + 8] = 1;
        page[at + 16] = 7;
        page[at + 24] = 3;
        page[at + 32] = 42;
        page[at + 40] = 9;
        page[at + 48] = 5;
        page[at + 56] = 8;
        page[AT_PAST] = 1;
        page[AT_PAST + 8] = 2;
        page[AT_PAST + 16] = 3;
        let snapshot = AccountPage::snapshot(&page).unwrap();
        assert_eq!(snapshot.used(), 7);
        assert_eq!(snapshot.refused(), 3);
        assert_eq!((snapshot.launches(), snapshot.throttled_nanos()), (10, 7));
        assert_eq!(snapshot.last_launch(), Some(8));
        let processes: Vec<_> = snapshot.processes().collect();
        assert_eq!(
            processes,
            [ProcessUsage {
                slot: 65,
                pid: 42,
                begun: 2,
                ended: 1,
                charged: 7,
                spare: 0,
                refused: 3,
                launches: 9,
                throttled_nanos: 5,
                last_launch: Some(8),
            }]
        );
    }

    #[test]
    fn other_pages_are_refused() {
        let mut page = Vec::from(*AccountPage::initial());
        page[AT_ABI] = 9;
        assert_eq!(
            AccountPage::check(&page),
            Err(PageError::Abi {
                supported: ABI,
                found: 9
            })
        );
        page[0] = 0;
        assert_eq!(AccountPage::check(&page), Err(PageError::Magic));
        page.pop();
        assert_eq!(
            AccountPage::check(&page),
            Err(PageError::Length {
                expected: LEN,
                found: LEN - 1
            })
        );
        assert!(AccountPage::check_header(&[]).is_err());
    }

    proptest! {
        /// For any content the reader neither panics nor overflows.
        #[test]
        fn any_content_is_read(content: Vec<u8>, seed: u8) {
            let mut page: Vec<u8> = Vec::from(*AccountPage::initial());
            for (byte, value) in page[16..].iter_mut().zip(content.iter().chain(core::iter::repeat(&seed))) {
                *byte = *value;
            }
            let snapshot = AccountPage::snapshot(&page).unwrap();
            let _ = (snapshot.used(), snapshot.peak(), snapshot.refused(), snapshot.launches(), snapshot.throttled_nanos(), snapshot.last_launch(), snapshot.processes().count());
        }
    }
}
