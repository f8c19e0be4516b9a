//! Device addresses, and the GPU memory that they take.
//!
//! As in the driver, GPU memory is charged in blocks of 2 MiB. Small allocations share blocks in one of two ways
//! ([`Blocks`]); larger ones have whole blocks of their own. A block returns to the GPU when its last allocation is freed.

use std::collections::BTreeMap;

use rustix::mm::{Advice, MapFlags, ProtFlags};
use tranche_simulator_machine::layout::{Habit, Header};

use crate::code::Code;

/// The unit in which GPU memory is charged, in bytes.
pub const BLOCK: u64 = 2 << 20;
/// Addresses are multiples of this.
const ALIGNMENT: u64 = 512;
/// The largest allocation that shares a block with others of its size class.
const SMALL: u64 = 1 << 20;
/// Size classes: 512 B to 1 MiB.
const CLASSES: usize = 12;

/// Which allocations share a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Blocks {
    /// Allocations of up to 1 MiB share blocks with others of their size class (powers of two from 512 bytes).
    BySize,
    /// Allocations smaller than a block share blocks, whatever their sizes: each is in the first gap that fits.
    Mixed,
}

impl Blocks {
    /// The rule of the machine's driver.
    pub fn of(header: &Header) -> Self {
        if header.has(Habit::MixedBlocks) {
            Self::Mixed
        } else {
            Self::BySize
        }
    }
}

/// Address space of one GPU.
#[derive(Debug)]
pub struct Heap {
    blocks: Blocks,
    /// The address and length of its mapping.
    mapping: Option<(u64, u64)>,
    /// Free stretches: lengths in whole blocks, by address.
    free: BTreeMap<u64, u64>,
    /// Shared blocks by address.
    shared: BTreeMap<u64, Slab>,
    /// Shared blocks with free places, by class.
    room: [Vec<u64>; CLASSES],
    /// Blocks with allocations of any size, by address.
    mixed: BTreeMap<u64, MixedBlock>,
}

/// A block with allocations of any size.
#[derive(Debug)]
struct MixedBlock {
    /// Gaps: lengths by offset.
    gaps: BTreeMap<u64, u64>,
    live: u32,
    /// Whether a freed allocation had been written.
    touched: bool,
}

impl MixedBlock {
    fn new() -> Self {
        Self {
            gaps: BTreeMap::from([(0, BLOCK)]),
            live: 0,
            touched: false,
        }
    }

    /// Takes `length` bytes from the first gap that is large enough; returns their offset.
    fn take(&mut self, length: u64) -> Option<u64> {
        let offset = take_first(&mut self.gaps, length)?;
        self.live += 1;
        Some(offset)
    }
}

/// A block that small allocations share.
#[derive(Debug, Default)]
struct Slab {
    /// Places that were freed.
    free: Vec<u16>,
    /// The first place that was never used; those after it were not used either.
    next: u16,
    live: u16,
    /// Whether a freed allocation had been written.
    touched: bool,
}

impl Slab {
    fn take(&mut self) -> u16 {
        self.live += 1;
        self.free.pop().unwrap_or_else(|| {
            self.next += 1;
            self.next - 1
        })
    }

    fn is_full(&self, class: usize) -> bool {
        self.free.is_empty() && u64::from(self.next) == BLOCK / size(class)
    }
}

/// The memory that an allocation takes: a place of a shared block (its class), a part of a mixed block or whole blocks (bytes).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fit {
    Shared(usize),
    Mixed(u64),
    Whole(u64),
}

fn fit(blocks: Blocks, bytes: u64) -> Option<Fit> {
    if blocks == Blocks::Mixed && bytes < BLOCK {
        // A size that rounds up to a whole block takes one.
        Some(Fit::Mixed(bytes.next_multiple_of(ALIGNMENT)))
    } else if blocks == Blocks::BySize && bytes <= SMALL {
        let size = bytes.max(ALIGNMENT).next_power_of_two();
        Some(Fit::Shared((size / ALIGNMENT).trailing_zeros() as usize))
    } else {
        Some(Fit::Whole(bytes.checked_next_multiple_of(BLOCK)?))
    }
}

impl Heap {
    /// An empty heap, without a mapping.
    pub fn new(blocks: Blocks) -> Self {
        Self {
            blocks,
            mapping: None,
            free: BTreeMap::new(),
            shared: BTreeMap::new(),
            room: [const { Vec::new() }; CLASSES],
            mixed: BTreeMap::new(),
        }
    }

    /// Allocates `bytes`; returns the address. `charge` charges whole blocks to the GPU. `total` is the GPU's memory; the
    /// address space is a multiple of it.
    pub fn allocate(
        &mut self,
        bytes: u64,
        total: u64,
        charge: impl FnOnce(u64) -> Result<(), Code>,
    ) -> Result<u64, Code> {
        self.reserve(total)?;
        match fit(self.blocks, bytes).ok_or(Code::OUT_OF_MEMORY)? {
            Fit::Whole(length) => self.take_charged(length, charge),
            Fit::Mixed(length) => {
                let found = self
                    .mixed
                    .iter_mut()
                    .find_map(|(block, mixed)| Some(block + mixed.take(length)?));
                if let Some(address) = found {
                    return Ok(address);
                }
                let block = self.take_charged(BLOCK, charge)?;
                let mut mixed = MixedBlock::new();
                // The whole block is one gap.
                let offset = mixed.take(length).unwrap_or(0);
                self.mixed.insert(block, mixed);
                Ok(block + offset)
            }
            Fit::Shared(class) => {
                let block = if let Some(block) = self.room[class].last() {
                    *block
                } else {
                    let block = self.take_charged(BLOCK, charge)?;
                    self.shared.insert(block, Slab::default());
                    self.room[class].push(block);
                    block
                };
                let slab = self.shared.get_mut(&block).ok_or(Code::UNKNOWN)?;
                let place = slab.take();
                if slab.is_full(class) {
                    self.room[class].pop();
                }
                Ok(block + u64::from(place) * size(class))
            }
        }
    }

    /// Takes addresses and charges GPU memory for them: both or neither.
    fn take_charged(
        &mut self,
        length: u64,
        charge: impl FnOnce(u64) -> Result<(), Code>,
    ) -> Result<u64, Code> {
        // Only a pattern of frees that is made for it exhausts the addresses.
        let address = take_first(&mut self.free, length).ok_or(Code::OUT_OF_MEMORY)?;
        charge(length).inspect_err(|_| insert_free(&mut self.free, address, length))?;
        Ok(address)
    }

    /// Frees an address; returns the bytes of whole blocks that this frees.
    pub fn release(&mut self, address: u64, bytes: u64, touched: bool) -> u64 {
        match fit(self.blocks, bytes) {
            None => 0,
            Some(Fit::Mixed(length)) => {
                let block = address & !(BLOCK - 1);
                let Some(mixed) = self.mixed.get_mut(&block) else {
                    return 0;
                };
                insert_free(&mut mixed.gaps, address - block, length);
                mixed.touched |= touched;
                mixed.live -= 1;
                if mixed.live > 0 {
                    return 0;
                }
                let touched = mixed.touched;
                self.mixed.remove(&block);
                self.free_blocks(block, BLOCK, touched)
            }
            Some(Fit::Whole(length)) => self.free_blocks(address, length, touched),
            Some(Fit::Shared(class)) => {
                let block = address & !(BLOCK - 1);
                let Some(slab) = self.shared.get_mut(&block) else {
                    return 0;
                };
                if slab.is_full(class) {
                    self.room[class].push(block);
                }
                slab.touched |= touched;
                slab.free
                    .push(u16::try_from((address - block) / size(class)).unwrap_or(0));
                slab.live -= 1;
                if slab.live > 0 {
                    return 0;
                }
                let touched = slab.touched;
                self.shared.remove(&block);
                self.room[class].retain(|b| *b != block);
                self.free_blocks(block, BLOCK, touched)
            }
        }
    }

    /// Frees whole blocks, which were `touched` if any byte of them was written; returns their length.
    fn free_blocks(&mut self, address: u64, length: u64, touched: bool) -> u64 {
        if touched {
            return_pages(address, length);
        }
        insert_free(&mut self.free, address, length);
        length
    }

    /// Maps the address space at its first use.
    fn reserve(&mut self, total: u64) -> Result<(), Code> {
        if self.mapping.is_some() {
            return Ok(());
        }
        // Large enough for any usual order of frees. It takes no memory yet.
        let length = (total * 4).next_multiple_of(BLOCK) + BLOCK;
        let start = map_private(length)?;
        self.mapping = Some((start, length));
        self.free
            .insert(start.next_multiple_of(BLOCK), length - BLOCK);
        Ok(())
    }

    /// Removes the mapping.
    ///
    /// # Safety
    /// The heap has no allocation.
    pub unsafe fn unmap(&mut self) {
        let blocks = self.blocks;
        if let Some((start, length)) = std::mem::replace(self, Self::new(blocks)).mapping {
            let length = usize::try_from(length).unwrap_or(0);
            // SAFETY: the mapping is ours, and the program no longer uses it, by the contract above.
            let _ = unsafe { rustix::mm::munmap(start as *mut _, length) };
        }
    }
}

/// Takes `length` bytes from the start of the first stretch that is long enough.
fn take_first(stretches: &mut BTreeMap<u64, u64>, length: u64) -> Option<u64> {
    let (start, has) = stretches.iter().find(|(_, has)| **has >= length)?;
    let (start, has) = (*start, *has);
    stretches.remove(&start);
    if has > length {
        stretches.insert(start + length, has - length);
    }
    Some(start)
}

/// Adds a free stretch and joins it with its neighbours.
fn insert_free(stretches: &mut BTreeMap<u64, u64>, mut start: u64, mut length: u64) {
    if let Some(after) = stretches.remove(&(start + length)) {
        length += after;
    }
    if let Some((before, has)) = stretches.range(..start).next_back() {
        let (before, has) = (*before, *has);
        if before + has == start {
            stretches.remove(&before);
            start = before;
            length += has;
        }
    }
    stretches.insert(start, length);
}

fn size(class: usize) -> u64 {
    ALIGNMENT << class
}

/// Maps `length` bytes, which take host memory only when they are written. A forked child does not inherit them, and core
/// dumps do not contain them.
pub fn map_private(length: u64) -> Result<u64, Code> {
    let length = usize::try_from(length).map_err(|_| Code::OUT_OF_MEMORY)?;
    // SAFETY: a new mapping at an address of the kernel's choice.
    let address = unsafe {
        rustix::mm::mmap_anonymous(
            std::ptr::null_mut(),
            length,
            ProtFlags::READ | ProtFlags::WRITE,
            MapFlags::PRIVATE | MapFlags::NORESERVE,
        )
    }
    .map_err(|_| Code::OUT_OF_MEMORY)?;
    for advice in [
        Advice::LinuxDontFork,
        Advice::LinuxDontDump,
        Advice::LinuxNoHugepage,
    ] {
        // SAFETY: the new mapping. None of these changes its content.
        let _ = unsafe { rustix::mm::madvise(address, length, advice) };
    }
    Ok(address as u64)
}

/// Returns whole pages to the host. They read as zeros afterwards.
pub fn return_pages(address: u64, length: u64) {
    // SAFETY: the pages are in a mapping of `map_private`, and the program no longer needs their content.
    let _ = unsafe {
        rustix::mm::madvise(
            address as *mut _,
            usize::try_from(length).unwrap_or(0),
            Advice::LinuxDontNeed,
        )
    };
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TOTAL: u64 = 1 << 30;

    /// Allocates, and adds what the heap charges to `charged`.
    fn allocate(heap: &mut Heap, bytes: u64, charged: &mut u64) -> u64 {
        let charge = |bytes| {
            *charged += bytes;
            Ok(())
        };
        heap.allocate(bytes, TOTAL, charge).unwrap()
    }

    #[test]
    fn allocations_smaller_than_a_block_share_mixed_blocks() {
        let mut heap = Heap::new(Blocks::Mixed);
        let mut charged = 0;
        let large = allocate(&mut heap, 3 * BLOCK / 4, &mut charged);
        let small = allocate(&mut heap, 1, &mut charged);
        assert_eq!(
            small,
            large + 3 * BLOCK / 4,
            "in the same block, behind the first"
        );
        let other = allocate(&mut heap, BLOCK / 2, &mut charged);
        let whole = allocate(&mut heap, BLOCK + 1, &mut charged);
        assert_eq!((other % BLOCK, whole % BLOCK), (0, 0));
        assert_eq!(charged, 4 * BLOCK);
        // The next allocation gets the first one's gap. The block stays allocated until the small one is freed.
        assert_eq!(heap.release(large, 3 * BLOCK / 4, true), 0);
        assert_eq!(heap.allocate(BLOCK / 2, TOTAL, |_| panic!()), Ok(large));
        assert_eq!(heap.release(large, BLOCK / 2, true), 0);
        assert_eq!(heap.release(small, 1, true), BLOCK);
    }

    #[test]
    fn small_allocations_share_blocks_and_large_ones_do_not() {
        let mut heap = Heap::new(Blocks::BySize);
        let mut charged = 0;
        let first = allocate(&mut heap, 1, &mut charged);
        let second = allocate(&mut heap, 512, &mut charged);
        assert_eq!(first + 512, second);
        let big = allocate(&mut heap, SMALL + 1, &mut charged);
        assert_eq!(big % BLOCK, 0);
        assert_eq!(charged, 2 * BLOCK);
        assert_eq!(heap.release(first, 1, true), 0);
        assert_eq!(heap.release(second, 512, true), BLOCK);
        assert_eq!(heap.release(big, SMALL + 1, true), BLOCK);
        assert_eq!(heap.free.len(), 1, "the free stretches are joined again");
        let refused = heap.allocate(SMALL + 1, TOTAL, |_| Err(Code::OUT_OF_MEMORY));
        assert_eq!(refused, Err(Code::OUT_OF_MEMORY));
        assert_eq!(
            heap.free.len(),
            1,
            "a refused allocation takes no addresses"
        );
    }

    #[test]
    fn sizes_near_the_largest_number_are_refused() {
        let mut heap = Heap::new(Blocks::BySize);
        for bytes in [u64::MAX, u64::MAX - BLOCK, 5 * TOTAL] {
            let refused = heap.allocate(bytes, TOTAL, |_| Ok(()));
            assert_eq!(refused, Err(Code::OUT_OF_MEMORY));
        }
    }

    proptest! {
        #[test]
        fn allocations_never_overlap_and_all_blocks_are_freed(
            blocks in prop_oneof![Just(Blocks::BySize), Just(Blocks::Mixed)],
            steps in proptest::collection::vec((1u64..6_000_000, any::<bool>(), any::<u16>()), 1..300)
        ) {
            let mut heap = Heap::new(blocks);
            let mut charged = 0;
            let mut live: BTreeMap<u64, u64> = BTreeMap::new();
            for (bytes, free, pick) in steps {
                if free && !live.is_empty() {
                    let index = usize::from(pick) % live.len();
                    let (address, bytes) = live.iter().nth(index).map(|(a, b)| (*a, *b)).unwrap();
                    live.remove(&address);
                    charged -= heap.release(address, bytes, false);
                } else {
                    let address = heap.allocate(bytes, 4 * TOTAL, |c| { charged += c; Ok(()) }).unwrap();
                    prop_assert_eq!(address % ALIGNMENT, 0);
                    if let Some((before, length)) = live.range(..=address).next_back() {
                        prop_assert!(before + length <= address);
                    }
                    if let Some((after, _)) = live.range(address..).next() {
                        prop_assert!(address + bytes <= *after);
                    }
                    live.insert(address, bytes);
                }
                prop_assert!(charged >= live.values().sum::<u64>());
            }
            for (address, bytes) in live {
                charged -= heap.release(address, bytes, false);
            }
            prop_assert_eq!(charged, 0);
            prop_assert_eq!(heap.free.len(), 1);
        }
    }
}
