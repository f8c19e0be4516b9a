//! Reserving memory of a capped device, and noticing contexts that were made by functions which the shim does not see.
//!
//! NVIDIA's own libraries have functions in private tables (`cuGetExportTable`). One of them makes contexts
//! (`CTX_CREATE_BYPASS` in ZLUDA's `dark_api`). The one by which cudart gets a primary context's handle (`CUDART_INTERFACE`)
//! makes none: the context stays inactive until it is retained (ZLUDA's test `cudart_interface_fn2_creates_inactive_primary_ctx`,
//! which is also for NVIDIA's driver).
//!
//! A context that was made unseen is noticed when it is used: by a reservation on a device of which no context is known, and
//! before the first launch of each kernel. Then it is charged like any other, and if there is no room for it, the call is
//! refused. Its charge is given back when it ends by a function that the shim sees, or with the process.

use tranche_shim_core::Entry;
use tranche_shim_core::table::unstamped;

use crate::abi::CUresult;
use crate::contexts::{primary_handle, primary_key};
use crate::device::{Device, Residence};
use crate::exports;
use crate::keys::{Kind, key};
use crate::process::Process;
use crate::settle;
use crate::stream::current_context;

impl Process {
    /// Reserves `most` bytes on a capped device, or what is left of its caps if that is at least
    /// `least`; returns how much.
    #[inline]
    pub fn reserve(
        &self,
        device: &Device,
        residence: Residence,
        least: u64,
        most: u64,
    ) -> Result<u64, CUresult> {
        if let Some(only) = self.only_share(device) {
            if only.take_spare(residence, most) {
                return Ok(most);
            }
            if self.fitting.has_contexts(device)
                && let Some(granted) = only.reserve(residence, least, most)
            {
                return Ok(granted);
            }
        }
        self.reserve_slowly(device, residence, least, most)
    }

    /// Reserves from several shares, or from one that is full, or where no context is known yet.
    #[inline(never)]
    fn reserve_slowly(
        &self,
        device: &Device,
        residence: Residence,
        least: u64,
        most: u64,
    ) -> Result<u64, CUresult> {
        if least > self.limit(device, residence) {
            return Err(self.refuse(device));
        }
        let granted = self
            .reserve_what_is_free(device, residence, least, most)
            .or_else(|| self.reserve_by_trimming(device, residence, least, most));
        granted.ok_or_else(|| self.refuse(device))
    }

    /// Reserves what is left of the caps, after contexts were noticed. If that is not enough, first reclaims what dead processes left, waits for
    /// stream-ordered frees, and gives back what closed descriptors kept.
    pub fn reserve_what_is_free(
        &self,
        device: &Device,
        residence: Residence,
        least: u64,
        most: u64,
    ) -> Option<u64> {
        if !self.fitting.has_contexts(device) {
            self.notice_context(device).ok()?;
        }
        let reserve = || self.reserve_in_parts(device, residence, least, most);
        // Each step may have made room, or another process that did the same meanwhile.
        reserve()
            .or_else(|| self.reclaim(device).then(reserve)?)
            .or_else(|| settle::wait_for_frees(self).then(reserve)?)
            .or_else(|| exports::settle_all(self).then(reserve)?)
    }

    /// The same after this process's pools were trimmed.
    pub fn reserve_by_trimming(
        &self,
        device: &Device,
        residence: Residence,
        least: u64,
        most: u64,
    ) -> Option<u64> {
        let missing = most.saturating_sub(self.free(device, residence));
        let reserve = || self.reserve_in_parts(device, residence, least, most);
        settle::trim(self, device, missing).then(reserve)?
    }

    /// Notes that the cap refused an allocation.
    pub fn refuse(&self, device: &Device) -> CUresult {
        if let Some(share) = self.shares(device).next() {
            share.note_refusal();
        }
        CUresult::OUT_OF_MEMORY
    }

    /// Charges the calling thread's current context, if it is one of a device and was made unseen.
    #[cold]
    #[inline(never)]
    pub fn notice_context(&self, device: &Device) -> Result<(), CUresult> {
        let context = current_context();
        let number = key(Kind::Context, context as u64);
        let primary = primary_key(device.handle);
        let is_noted_primary = |noted: Entry| unstamped(noted.context) == context as u64;
        if device.context == 0
            || self.contexts.has_green()
            || self.pointers.get(number).is_some()
            || self.pointers.get(primary).is_some_and(is_noted_primary)
            || !self.is_current(device)
        {
            return Ok(());
        }
        let is_primary = primary_handle(device.handle) == Some(context);
        // Known from here on: the next step reserves memory, too.
        let (key, stamp) = if is_primary {
            self.fitting.add_primary(device);
            (primary, self.contexts.stamp(context))
        } else {
            self.fitting.add_context(device);
            (number, 0)
        };
        let charged = self.reserve(device, Residence::Gpu, device.context, device.context);
        let noted = charged.map(|bytes| {
            let entry = Entry {
                bytes,
                device: device.number,
                context: stamp,
            };
            // Not new if another thread has noticed it, too. If the table is full, it stays charged until the process ends.
            let is_new = !matches!(self.pointers.put(key, entry), Ok(Some(_)));
            // A call that ends it may not have found it.
            if is_new && self.is_current(device) {
                return true;
            }
            if !is_new || self.pointers.take(key).is_some() {
                self.release(device, bytes);
            }
            // The primary context is counted once, also if two threads notice it.
            !is_new && is_primary
        });
        if noted != Ok(true) {
            if is_primary {
                self.fitting.end_primary(device);
            } else {
                self.fitting.end_context(device);
            }
        }
        noted.map(drop)
    }

    /// Whether the calling thread's current context is one of a device, and not about to be made or to end.
    #[inline(never)]
    fn is_current(&self, device: &Device) -> bool {
        !self.contexts.changing.any()
            && !self.contexts.primary(device).any()
            && self
                .device_of_current_context()
                .is_ok_and(|of| of.number == device.number)
    }
}
