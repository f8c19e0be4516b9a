//! A GPU's graph pool: the memory that graphs use and keep.

use std::collections::BTreeMap;

use crate::code::Code;

/// A GPU's graph pool, in bytes.
#[derive(Debug, Default)]
pub struct GraphPool {
    /// Bytes of each allocation that has memory, by its id.
    attached: BTreeMap<u64, u64>,
    used: u64,
    used_high: u64,
    /// Charged to the GPU.
    reserved: u64,
    reserved_high: u64,
}

impl GraphPool {
    /// Gives memory to the allocation `id`, if it has none. `charge` charges what the pool lacks to the GPU.
    pub fn attach(
        &mut self,
        id: u64,
        bytes: u64,
        charge: impl FnOnce(u64) -> Result<(), Code>,
    ) -> Result<(), Code> {
        if self.attached.contains_key(&id) {
            return Ok(());
        }
        let more = (self.used + bytes).saturating_sub(self.reserved);
        charge(more)?;
        self.attached.insert(id, bytes);
        self.reserved += more;
        self.used += bytes;
        self.reserved_high = self.reserved_high.max(self.reserved);
        self.used_high = self.used_high.max(self.used);
        Ok(())
    }

    /// Removes an allocation. Its memory stays in the pool.
    pub fn detach(&mut self, id: u64) {
        self.used -= self.attached.remove(&id).unwrap_or(0);
    }

    /// Removes all memory that no graph uses from the pool; returns its bytes, which the caller returns to the GPU.
    pub fn trim(&mut self) -> u64 {
        let unused = self.reserved - self.used;
        self.reserved = self.used;
        unused
    }

    /// A `CUgraphMem_attribute`'s value.
    pub fn attribute(&self, which: u32) -> Result<u64, Code> {
        Ok(match which {
            0 => self.used,
            1 => self.used_high,
            2 => self.reserved,
            3 => self.reserved_high,
            _ => return Err(Code::INVALID_VALUE),
        })
    }

    /// Resets a high-water mark (attribute 1 or 3) to the present value.
    pub fn reset_high(&mut self, which: u32) {
        if which == 1 {
            self.used_high = self.used;
        } else {
            self.reserved_high = self.reserved;
        }
    }
}
