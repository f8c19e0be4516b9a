//! Device addresses, and how much of the GPU they take.
//!
//! As the driver does, memory is taken from the GPU in blocks of 2 MiB. Small allocations share blocks, in
//! one of two ways ([`Blocks`]); larger ones have whole blocks of their own. A block goes back to the GPU
//! when its last allocation is freed.

use std::collections::BTreeMap;

use rustix::mm::{Advice, MapFlags, ProtFlags};
use tranche_simulator_machine::layout::{Habit, Header};

use crate::code::Code;

/// What memory is taken in.
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
    /// Those of up to 1 MiB, with others of their size class (powers of two from 512 bytes).
    BySize,
    /// Those smaller than a block, whatever their sizes: each in the first gap that fits.
    Mixed,
}

impl Blocks {
    /// What the machine's driver does.
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
    /// Where its mapping begins, and its length.
    mapping: Option<(u64, u64)>,
    /// Free stretches by address: lengths, multiples of a block.
    free: BTreeMap<u64, u64>,
    /// Shared blocks by address.
    shared: BTreeMap<u64, Slab>,
    /// Shared blocks with room, by class.
    room: [Vec<u64>; CLASSES],
    /// Blocks with allocations of any size, by address.
    mixed: BTreeMap<u64, MixedBlock>,
}

/// A block with allocations of any size.
#[derive(Debug)]
struct MixedBlock {
    /// Lengths of the gaps by their offsets.
    gaps: BTreeMap<u64, u64>,
    live: u32,
    /// Whether one that was freed had been written to.
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

    /// The offset of the first gap of `length`, which is a gap no more.
    fn take(&mut self, length: u64) -> Option<u64> {
        let offset = take_first(&mut self.gaps, length)?;
        self.live += 1;
        Some(offset)
    }
}

/// A block that small allocations share.
#[derive(Debug, Default)]
struct Slab {
    /// Places given back.
    free: Vec<u16>,
    /// Places never given out: this one and those after it.
    next: u16,
    live: u16,
    /// Whether one that was freed had been written to.
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

    fn full(&self, class: usize) -> bool {
        self.free.is_empty() && u64::from(self.next) == BLOCK / size(class)
    }
}

/// What an allocation of some size takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fit {
    Shared(usize),
    Mixed(u64),
    Whole(u64),
}

fn fit(blocks: Blocks, bytes: u64) -> Option<Fit> {
    if blocks == Blocks::Mixed && bytes < BLOCK {
        // What rounds up to a whole block has one.
        Some(Fit::Mixed(bytes.next_multiple_of(ALIGNMENT)))
    } else if blocks == Blocks::BySize && bytes <= SMALL {
        let size = bytes.max(ALIGNMENT).next_power_of_two();
        Some(Fit::Shared((size / ALIGNMENT).trailing_zeros() as usize))
    } else {
        Some(Fit::Whole(bytes.checked_next_multiple_of(BLOCK)?))
    }
}

impl Heap {
    /// An address space that nothing is mapped for yet.
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

    /// Gives an address for `bytes`; `charge` takes whole blocks from the GPU.
    /// `total` is the GPU's memory, which the address space must outgrow.
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
                if slab.full(class) {
                    self.room[class].pop();
                }
                Ok(block + u64::from(place) * size(class))
            }
        }
    }

    /// Addresses, and the GPU's memory for them: both or neither.
    fn take_charged(
        &mut self,
        length: u64,
        charge: impl FnOnce(u64) -> Result<(), Code>,
    ) -> Result<u64, Code> {
        // Addresses run out only where a program frees in a pattern made for it.
        let address = take_first(&mut self.free, length).ok_or(Code::OUT_OF_MEMORY)?;
        charge(length).inspect_err(|_| give(&mut self.free, address, length))?;
        Ok(address)
    }

    /// Takes an address back; returns the bytes of whole blocks that it frees.
    pub fn release(&mut self, address: u64, bytes: u64, touched: bool) -> u64 {
        match fit(self.blocks, bytes) {
            None => 0,
            Some(Fit::Mixed(length)) => {
                let block = address & !(BLOCK - 1);
                let Some(mixed) = self.mixed.get_mut(&block) else {
                    return 0;
                };
                give(&mut mixed.gaps, address - block, length);
                mixed.touched |= touched;
                mixed.live -= 1;
                if mixed.live > 0 {
                    return 0;
                }
                let touched = mixed.touched;
                self.mixed.remove(&block);
                if touched {
                    forget(block, BLOCK);
                }
                give(&mut self.free, block, BLOCK);
                BLOCK
            }
            Some(Fit::Whole(length)) => {
                if touched {
                    forget(address, length);
                }
                give(&mut self.free, address, length);
                length
            }
            Some(Fit::Shared(class)) => {
                let block = address & !(BLOCK - 1);
                let Some(slab) = self.shared.get_mut(&block) else {
                    return 0;
                };
                if slab.full(class) {
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
                if touched {
                    forget(block, BLOCK);
                }
                give(&mut self.free, block, BLOCK);
                BLOCK
            }
        }
    }

    /// Maps the address space at its first use.
    fn reserve(&mut self, total: u64) -> Result<(), Code> {
        if self.mapping.is_some() {
            return Ok(());
        }
        // Room for any order of frees; nothing of it is memory yet.
        let length = (total * 4).next_multiple_of(BLOCK) + BLOCK;
        let start = map_private(length)?;
        self.mapping = Some((start, length));
        self.free
            .insert(start.next_multiple_of(BLOCK), length - BLOCK);
        Ok(())
    }

    /// Gives its addresses back.
    ///
    /// # Safety
    /// Nothing of it is allocated any more.
    pub unsafe fn unmap(&mut self) {
        let blocks = self.blocks;
        if let Some((start, length)) = std::mem::replace(self, Self::new(blocks)).mapping {
            let length = usize::try_from(length).unwrap_or(0);
            // SAFETY: the mapping is ours and the program's no more, by the contract above.
            let _ = unsafe { rustix::mm::munmap(start as *mut _, length) };
        }
    }
}

/// Takes `length` from the start of the first stretch that has as much.
fn take_first(stretches: &mut BTreeMap<u64, u64>, length: u64) -> Option<u64> {
    let (start, has) = stretches.iter().find(|(_, has)| **has >= length)?;
    let (start, has) = (*start, *has);
    stretches.remove(&start);
    if has > length {
        stretches.insert(start + length, has - length);
    }
    Some(start)
}

/// Adds a stretch, one with its neighbours.
fn give(stretches: &mut BTreeMap<u64, u64>, mut start: u64, mut length: u64) {
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

/// Maps `length` bytes that take memory only where they are written, are not
/// inherited by a forked child and are not dumped.
pub fn map_private(length: u64) -> Result<u64, Code> {
    let length = usize::try_from(length).map_err(|_| Code::OUT_OF_MEMORY)?;
    // SAFETY: a new mapping at a place of the kernel's choice.
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
        // SAFETY: the mapping just made; none of these changes its content.
        let _ = unsafe { rustix::mm::madvise(address, length, advice) };
    }
    Ok(address as u64)
}

/// Gives the host memory behind whole pages back; they read as zeros again.
pub fn forget(address: u64, length: u64) {
    // SAFETY: only called on stretches of `map_private`'s mappings that no
    // allocation of the program covers.
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
    fn whatever_is_smaller_than_a_mixed_block_shares_it() {
        let mut heap = Heap::new(Blocks::Mixed);
        let mut charged = 0;
        let large = allocate(&mut heap, 3 * BLOCK / 4, &mut charged);
        let small = allocate(&mut heap, 1, &mut charged);
        assert_eq!(small, large + 3 * BLOCK / 4, "behind it, in its block");
        let other = allocate(&mut heap, BLOCK / 2, &mut charged);
        let whole = allocate(&mut heap, BLOCK + 1, &mut charged);
        assert_eq!((other % BLOCK, whole % BLOCK), (0, 0));
        assert_eq!(charged, 4 * BLOCK);
        // The gap that the first leaves is the next one's, and the block stays as long as the small one.
        assert_eq!(heap.release(large, 3 * BLOCK / 4, true), 0);
        assert_eq!(heap.allocate(BLOCK / 2, TOTAL, |_| panic!()), Ok(large));
        assert_eq!(heap.release(large, BLOCK / 2, true), 0);
        assert_eq!(heap.release(small, 1, true), BLOCK);
    }

    #[test]
    fn small_ones_share_a_block_and_big_ones_have_their_own() {
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
        assert_eq!(heap.free.len(), 1, "the address space is whole again");
        let refused = heap.allocate(SMALL + 1, TOTAL, |_| Err(Code::OUT_OF_MEMORY));
        assert_eq!(refused, Err(Code::OUT_OF_MEMORY));
        assert_eq!(heap.free.len(), 1, "a refusal takes nothing");
    }

    #[test]
    fn sizes_near_the_end_of_the_number_line_are_refused() {
        let mut heap = Heap::new(Blocks::BySize);
        for bytes in [u64::MAX, u64::MAX - BLOCK, 5 * TOTAL] {
            let refused = heap.allocate(bytes, TOTAL, |_| Ok(()));
            assert_eq!(refused, Err(Code::OUT_OF_MEMORY));
        }
    }

    proptest! {
        #[test]
        fn allocations_never_overlap_and_everything_comes_back(
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
