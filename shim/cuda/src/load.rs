//! The priority of a process's shares: launches of low priority wait for the work of shares with high priority, which
//! these note in the load page of the GPU.
//!
//! The page is opened for each access, about once in a millisecond: a descriptor that stays open could be another file
//! after the program has closed it. A page that cannot be opened or read says that there is no work.

use core::ptr;

use tranche_shim_core::Priority;
use tranche_shim_core::compute::priority::Spent;
use tranche_shim_core::compute::{PERCENT, WAIT_NANOS};
use tranche_shim_core::load::{LEN, PLACE_LEN, PLACES, busy_until};
use tranche_shim_runtime::sys;

use crate::device::{Device, JoinedShare};
use crate::process::Process;

/// How long to sleep at most before the load page is read again, in nanoseconds.
const NAP_NANOS: u64 = 5_000_000;

impl Process {
    /// Called just before a launch for which `nanos` were paid. Notes work of high priority; a launch of low priority
    /// waits, unless it is `exempt`. Returns for how long; together with `waited` nanoseconds before no longer than
    /// [`WAIT_NANOS`].
    #[inline(never)]
    pub fn give_precedence(&self, device: &Device, nanos: u64, exempt: bool, waited: u64) -> u64 {
        match device.priority {
            Priority::Normal => 0,
            Priority::High => {
                self.note_work(device, nanos);
                0
            }
            Priority::Low { floor } => {
                let most = if exempt {
                    0
                } else {
                    WAIT_NANOS.saturating_sub(waited)
                };
                self.wait_for_others(device, nanos, floor, most)
            }
        }
    }

    fn note_work(&self, device: &Device, nanos: u64) {
        let now = sys::now();
        let Some(share) = self.share_with_load(device) else {
            return;
        };
        let nanos = share.bucket(now).scaled(nanos);
        let Some(until) = self.launches.load(device).work.add(now, nanos) else {
            return;
        };
        let Ok(page) = share.name.open_load(true) else {
            return;
        };
        // Another process may have the same place: the later time stays.
        let at = self.place() * PLACE_LEN;
        let mut other = [0; PLACE_LEN];
        let read = page.read_at(&mut other, at);
        if read != Ok(PLACE_LEN) || busy_until(&other, now).is_none_or(|other| other < until) {
            let _ = page.write_at(&until.to_le_bytes(), at);
        }
    }

    fn wait_for_others(&self, device: &Device, nanos: u64, floor: u8, most: u64) -> u64 {
        let Some(share) = self.share_with_load(device) else {
            return 0;
        };
        let queue = &self.launches.load(device).queue;
        let floor = u64::from(device.cores) * u64::from(floor) * PERCENT / 100;
        let start = sys::now();
        let mut now = start;
        loop {
            let bucket = share.bucket(now);
            let launch = bucket.scaled(nanos);
            let waited = now.saturating_sub(start);
            if waited < most {
                let paid = self.shares(device).fold(0u64, |sum, share| {
                    sum.saturating_add(share.account().compute().1)
                });
                let spent = Spent {
                    before: bucket.scaled(paid.saturating_sub(nanos)),
                    launch,
                };
                let wait = queue.wait(now, spent, read_load(share, now), floor);
                if wait > 0 {
                    sys::sleep(wait.min(NAP_NANOS));
                    now = sys::now();
                    continue;
                }
            }
            queue.add(now, launch);
            return waited;
        }
    }

    /// A share of the device whose priority is the device's: it has the load page, with the access that is needed.
    fn share_with_load(&self, device: &Device) -> Option<&JoinedShare> {
        let is_high = |priority| priority == Priority::High;
        self.shares(device)
            .find(|share| is_high(share.priority) == is_high(device.priority))
    }

    /// This process's place in load pages: its state lies at a random address, and a child has another PID.
    fn place(&self) -> usize {
        let address = ptr::from_ref(self).addr() / 4096;
        #[expect(clippy::cast_possible_truncation, reason = "spreads the places")]
        let pid = sys::pid() as usize;
        address.wrapping_add(pid) % PLACES
    }
}

/// Until when shares of high priority have work.
fn read_load(share: &JoinedShare, now: u64) -> Option<u64> {
    let mut places = [0; LEN];
    let page = share.name.open_load(false).ok()?;
    let read = page.read_at(&mut places, 0).ok()?;
    busy_until(places.get(..read)?, now)
}
