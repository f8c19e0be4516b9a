//! Reserves memory and GPU time from the shares of a device, without calling the driver.

use tranche_shim_core::compute::Bucket;
use tranche_shim_core::{Freed, Physical};

use crate::device::{Device, JoinedShare, Residence, VisibleMemory};
use crate::process::Process;

impl Process {
    /// Reserves from the device's shares in turn until it is enough; if it is not, reserves nothing.
    pub fn reserve_in_parts(
        &self,
        device: &Device,
        residence: Residence,
        least: u64,
        most: u64,
    ) -> Option<u64> {
        if let Some(only) = self.only_share(device) {
            return only.reserve(residence, least, most);
        }
        // If it reserved a part and gave it back, another process could be refused meanwhile.
        if self.free(device, residence) < least {
            return None;
        }
        let granted = self.dividing.with(|()| {
            let mut granted = 0;
            for share in self.shares(device) {
                granted += share.reserve(residence, 0, most - granted).unwrap_or(0);
                if granted == most {
                    break;
                }
            }
            granted
        });
        if granted >= least {
            return Some(granted);
        }
        self.release_as(device, residence, granted);
        None
    }

    /// Bytes that the shares of a device have left.
    pub fn free(&self, device: &Device, residence: Residence) -> u64 {
        self.shares(device)
            .fold(0u64, |sum, share| sum.saturating_add(share.free(residence)))
    }

    /// Bytes that the processes of the shares of a device may hold.
    #[inline]
    pub fn limit(&self, device: &Device, residence: Residence) -> u64 {
        if let Some(only) = self.only_share(device) {
            return only.limit(residence);
        }
        self.shares(device).fold(0u64, |sum, share| {
            sum.saturating_add(share.limit(residence))
        })
    }

    /// Reclaims what dead processes left in the shares of a device; returns whether it searched for any.
    pub fn reclaim(&self, device: &Device) -> bool {
        let mut looked = false;
        for share in self.shares(device) {
            looked |= share.reclaim();
        }
        looked
    }

    /// Gives `bytes` of memory on the GPU back.
    pub fn release(&self, device: &Device, bytes: u64) {
        self.release_as(device, Residence::Gpu, bytes);
    }

    /// Gives `bytes` back to any of the device's shares: only the sum of the shares limits the process.
    #[inline(never)]
    pub fn release_as(&self, device: &Device, residence: Residence, bytes: u64) {
        if let Some(only) = self.only_share(device) {
            if bytes > 0 {
                only.release(residence, bytes);
            }
            return;
        }
        self.release_in_parts(device, residence, bytes);
    }

    #[cold]
    #[inline(never)]
    fn release_in_parts(&self, device: &Device, residence: Residence, bytes: u64) {
        self.dividing.with(|()| {
            let mut left = bytes;
            for share in self.shares(device) {
                left -= share.release(residence, left.min(share.charged(residence)));
            }
        });
    }

    /// Changes the process's list of physical memory, and gives back the charge of memory without a use.
    pub fn note_physical<R>(
        &self,
        note: impl FnOnce(&mut Physical, &mut dyn FnMut(Freed)) -> R,
    ) -> R {
        self.physical.with(|physical| {
            note(physical, &mut |freed| {
                if let Some(device) = self.device_numbered(freed.device) {
                    self.release(device, freed.bytes);
                }
            })
        })
    }

    /// The share of a device with the most GPU time left at `now`; `None` if the device has no capped
    /// share.
    pub fn bucket(&self, device: &Device, now: u64) -> Option<(&JoinedShare, Bucket)> {
        self.shares(device)
            .map(|share| (share, share.bucket(now)))
            .max_by_key(|(share, bucket)| bucket.left(share.account()))
    }

    /// The sum of the device's caps, and what is left of them.
    pub fn cap(&self, device: &Device) -> VisibleMemory {
        if let Some((_, share)) = self.sole() {
            share.reclaim();
            return share.visible();
        }
        let mut cap = VisibleMemory { total: 0, free: 0 };
        for share in self.shares(device) {
            share.reclaim();
            let visible = share.visible();
            cap.total = cap.total.saturating_add(visible.total);
            cap.free = cap.free.saturating_add(visible.free);
        }
        cap
    }
}
