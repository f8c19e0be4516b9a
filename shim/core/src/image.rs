//! How much device memory a module needs, as far as its image shows it.
//!
//! An image is PTX, an ELF file for one architecture, or a fat binary of several of either, of which the
//! driver loads one. It contains the sizes of its variables and its code, but not how the driver lays them
//! out. Code is loaded at its first use, unless the program loads everything at once
//! (`CUDA_MODULE_LOADING`), so the size of the code is an upper bound. The driver compiles PTX: an
//! instruction of 16 bytes has a longer text. Compressed entries of a fat binary show only their total size.

/// The needs of an image, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// Variables and constants: allocated with the module.
    pub data: u64,
    /// An upper bound of code, and of parts that cannot be read: allocated at its first use.
    pub code: u64,
}

impl Needs {
    /// The larger of each.
    #[must_use]
    pub fn larger(self, other: Self) -> Self {
        Self {
            data: self.data.max(other.data),
            code: self.code.max(other.code),
        }
    }

    /// The sum of each.
    #[must_use]
    pub const fn plus(self, other: Self) -> Self {
        Self {
            data: self.data.saturating_add(other.data),
            code: self.code.saturating_add(other.code),
        }
    }
}

/// Bytes that must be readable to recognize the kind of an image.
pub const START: usize = 16;

/// The kind of an image by its first bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// An ELF file: its header is [`ELF_HEADER`] bytes.
    Elf,
    /// A fat binary of so many bytes.
    Fat(usize),
    /// A wrapper around a fat binary, at this address.
    Wrapper(u64),
    /// Text that ends with a zero.
    Text,
}

/// Whether an image with this beginning is binary.
#[must_use]
pub fn is_binary(magic: [u8; 4]) -> bool {
    let mut start = [0; START];
    start[..4].copy_from_slice(&magic);
    kind(&start) != Kind::Text
}

/// The needs of an image in a file, on a device of an [architecture](of_fat_binary).
#[must_use]
pub fn of_file(image: &[u8], device: u64) -> Needs {
    match image.first_chunk().map(kind) {
        Some(Kind::Elf) => of_elf(image).unwrap_or_default(),
        Some(Kind::Fat(_)) => of_fat_binary(image, device),
        Some(Kind::Wrapper(_)) => Needs::default(),
        Some(Kind::Text) | None => of_text(image),
    }
}

/// Bytes of an ELF header.
pub const ELF_HEADER: usize = 64;

/// The kind of an image.
#[must_use]
pub fn kind(start: &[u8; START]) -> Kind {
    match start {
        [0x7f, b'E', b'L', b'F', ..] => Kind::Elf,
        [0x50, 0xed, 0x55, 0xba, ..] => {
            let (header, content) = (word(start, 6, 2), word(start, 8, 8));
            Kind::Fat(usize::try_from(header.saturating_add(content)).unwrap_or(0))
        }
        [0xb1, 0x43, 0x62, 0x46, ..] => Kind::Wrapper(word(start, 8, 8)),
        _ => Kind::Text,
    }
}

/// Where an ELF file's section table is: its offset and its length in bytes.
#[must_use]
pub fn section_table(header: &[u8]) -> (usize, usize) {
    let (at, each, count) = (
        word(header, 0x28, 8),
        word(header, 0x3a, 2),
        word(header, 0x3c, 2),
    );
    if each != SECTION as u64 {
        return (0, 0);
    }
    let length = usize::try_from(each * count).unwrap_or(0);
    (usize::try_from(at).unwrap_or(0), length)
}

/// Bytes of an entry in the section table.
const SECTION: usize = 64;

/// The needs of an ELF file, by its section table.
#[must_use]
pub fn of_sections(table: &[u8]) -> Needs {
    const ALLOCATED: u64 = 2;
    const CODE: u64 = 4;
    let mut needs = Needs::default();
    for section in table.chunks_exact(SECTION) {
        let (flags, size) = (word(section, 8, 8), word(section, 0x20, 8));
        let sum = match (flags & ALLOCATED, flags & CODE) {
            (0, _) => continue,
            (_, 0) => &mut needs.data,
            _ => &mut needs.code,
        };
        *sum = sum.saturating_add(size);
    }
    needs
}

/// The needs of a whole ELF file; `None` if it ends before its section table does.
fn of_elf(file: &[u8]) -> Option<Needs> {
    let (at, length) = section_table(file);
    let table = file.get(at..)?.get(..length)?;
    (length > 0).then(|| of_sections(table))
}

/// The needs of a fat binary on a device of compute capability 9.0 (`device` is 90): those of the entry that the driver
/// loads there. They are those of its largest entry if the device is unknown (0), if an entry is not as compilers write
/// it, or if none is for the device.
#[must_use]
pub fn of_fat_binary(image: &[u8], device: u64) -> Needs {
    let header = usize::try_from(word(image, 6, 2)).unwrap_or(0);
    let mut rest = image.get(header..).unwrap_or(&[]);
    let mut is_known = device > 0
        && word(image, 4, 2) == 1
        && header == START
        && word(image, 8, 8) == rest.len() as u64;
    let mut largest = Needs::default();
    let (mut machine_code, mut text) = (None, None);
    while rest.len() >= LEAST_ENTRY {
        let (entry, after) = FatEntry::read(rest);
        largest = largest.larger(entry.needs);
        is_known &= entry.is_known && after.is_some();
        if entry.runs_on(device) {
            let best = if entry.kind == ELF {
                &mut machine_code
            } else {
                &mut text
            };
            *best = Some(entry.or_better(*best));
        }
        rest = after.unwrap_or(&[]);
    }
    match machine_code.or(text) {
        Some(chosen) if is_known && rest.is_empty() => Needs {
            // A compressed entry does not show its variables; the others have the same.
            data: if chosen.is_compressed {
                largest.data
            } else {
                chosen.needs.data
            },
            code: chosen.needs.code,
        },
        _ => largest,
    }
}

/// Bytes of the shortest header of an entry.
const LEAST_ENTRY: usize = 64;

/// The kinds of entries: PTX, and machine code in an ELF file.
const TEXT: u64 = 1;
const ELF: u64 = 2;

/// An entry of a fat binary.
#[derive(Clone, Copy)]
struct FatEntry {
    kind: u64,
    /// 90 for compute capability 9.0.
    architecture: u64,
    flags: u64,
    is_compressed: bool,
    needs: Needs,
    /// Whether it is as compilers write it.
    is_known: bool,
}

impl FatEntry {
    /// Compressed by LZ4 or by zstd.
    const COMPRESSED: u64 = 0x2000 | 0x8000;
    /// For devices of exactly its architecture: `sm_90a`, `compute_90a`.
    const SPECIFIC: u64 = 0x10_0000;
    /// For devices of its family: `sm_100f`, `compute_100f`.
    const FAMILY: u64 = 0x20_0000;
    /// 64 bits, debug, Linux, and the form of ELF files since architecture 100.
    const OTHERS: u64 = 0x1 | 0x2 | 0x10 | 0x100_0000;

    /// The first entry of `bytes`, which has at least [`LEAST_ENTRY`], and what follows it, if it is whole.
    fn read(bytes: &[u8]) -> (Self, Option<&[u8]>) {
        let length = |at, length| usize::try_from(word(bytes, at, length)).unwrap_or(usize::MAX);
        let (kind, flags, unpacked) = (word(bytes, 0, 2), word(bytes, 40, 8), word(bytes, 56, 8));
        let header = length(4, 4);
        let end = header.saturating_add(length(8, 8));
        let content = bytes.get(header..end.min(bytes.len())).unwrap_or(&[]);
        let is_compressed = flags & Self::COMPRESSED != 0;
        let read = match kind {
            TEXT | ELF if is_compressed => (unpacked > 0).then(Needs::default),
            ELF => of_elf(content),
            TEXT => Some(of_text(content)),
            _ => None,
        };
        let known = Self::COMPRESSED | Self::SPECIFIC | Self::FAMILY | Self::OTHERS;
        let unpacked = Needs {
            data: 0,
            code: unpacked,
        };
        let entry = Self {
            kind,
            architecture: word(bytes, 28, 4),
            flags,
            is_compressed,
            needs: read.unwrap_or_default().larger(unpacked),
            is_known: read.is_some()
                && word(bytes, 2, 2) == 0x101
                && header >= LEAST_ENTRY
                && flags & !known == 0,
        };
        (entry, bytes.get(end..).filter(|_| end > 0))
    }

    /// Machine code is for later devices of the same major architecture, too, and PTX for all later ones.
    fn runs_on(&self, device: u64) -> bool {
        let is_major = self.architecture / 10 == device / 10;
        if self.flags & Self::SPECIFIC != 0 {
            self.architecture == device
        } else if self.kind == ELF || self.flags & Self::FAMILY != 0 {
            is_major && self.architecture <= device
        } else {
            self.architecture <= device
        }
    }

    /// This entry, or another one that is for a later architecture. It is unknown which one the driver prefers of those
    /// for the same, so their needs are the larger.
    fn or_better(self, other: Option<Self>) -> Self {
        match other {
            Some(other) if other.architecture > self.architecture => other,
            Some(other) if other.architecture == self.architecture => Self {
                is_compressed: self.is_compressed || other.is_compressed,
                needs: self.needs.larger(other.needs),
                ..self
            },
            _ => self,
        }
    }
}

/// The needs of PTX: its length as code, and its variables, `.global .align 4 .v2 .b8 name[16];`. A size that is not a
/// plain number, which compilers do not write, counts as the largest number.
#[must_use]
pub fn of_text(text: &[u8]) -> Needs {
    let mut data = 0u64;
    let mut words = text.split(|byte| !matches!(byte, b'.' | b'_' | b'$' | b'%' | b'[' | b']' | b'*' | b'+' | b'-' | b'<' | b'(' | b'0'..=b'9' | b'a'..=b'z' | b'A'..=b'Z' | b';' | b'=')).filter(|word| !word.is_empty());
    while let Some(word) = words.next() {
        if word == b".global" || word == b".const" {
            let (mut bytes, mut lanes, mut open) = (0u64, 1, false);
            // To the end of the declaration, or to the beginning of its value.
            for word in words.by_ref() {
                if let Some(width) = width(word) {
                    bytes = width.saturating_mul(lanes);
                } else if let [b'.', b'v', count @ (b'2' | b'4' | b'8')] = word {
                    lanes = u64::from(count - b'0');
                } else {
                    // A size may be in one word or in several: `name[16]`, `name [ 16 ]`.
                    for part in word.split_inclusive(|byte| matches!(byte, b'[' | b']')) {
                        let size = part.strip_suffix(b"]").unwrap_or(part);
                        if open && !matches!(size, [] | [b'[']) {
                            bytes = bytes.saturating_mul(number(size));
                        }
                        open = match part.last() {
                            Some(b'[') => true,
                            Some(b']') => false,
                            _ => open,
                        };
                    }
                }
                if word.contains(&b';') || word.contains(&b'=') {
                    break;
                }
            }
            data = data.saturating_add(bytes);
        }
    }
    let code = text.len() as u64;
    Needs { data, code }
}

/// Bytes of a type: `.b8`, `.u32`, `.f64` and so on.
fn width(word: &[u8]) -> Option<u64> {
    let [b'.', b'b' | b'u' | b's' | b'f', bits @ ..] = word else {
        return None;
    };
    match number(bits) {
        bits @ (8 | 16 | 32 | 64 | 128) => Some(bits / 8),
        _ => None,
    }
}

/// A number in PTX: decimal, `0x`, `0b` or octal, possibly with a `U`. Any other text is the largest
/// number.
fn number(word: &[u8]) -> u64 {
    let word = word.strip_suffix(b"U").unwrap_or(word);
    let (radix, digits) = match word {
        [b'0', b'x' | b'X', digits @ ..] => (16, digits),
        [b'0', b'b' | b'B', digits @ ..] => (2, digits),
        [b'0', digits @ ..] if !digits.is_empty() => (8, digits),
        digits => (10, digits),
    };
    let value = core::str::from_utf8(digits)
        .ok()
        .filter(|digits| !digits.starts_with('+'))
        .and_then(|digits| u64::from_str_radix(digits, radix).ok());
    value.unwrap_or(u64::MAX)
}

/// A little-endian number; 0 if the bytes end before it.
fn word(bytes: &[u8], at: usize, length: usize) -> u64 {
    let found = bytes.get(at..at + length).unwrap_or(&[]);
    found
        .iter()
        .rev()
        .fold(0, |sum, &byte| sum << 8 | u64::from(byte))
}

#[cfg(test)]
mod tests {
    use std::vec::Vec;

    use proptest::prelude::*;

    use super::{
        ELF_HEADER, Kind, Needs, START, is_binary, kind, of_fat_binary, of_file, of_sections,
        of_text, section_table,
    };

    fn section(flags: u64, size: u64) -> Vec<u8> {
        let mut section = std::vec![0; 64];
        section[8..16].copy_from_slice(&flags.to_le_bytes());
        section[0x20..0x28].copy_from_slice(&size.to_le_bytes());
        section
    }

    fn elf() -> Vec<u8> {
        let mut file = std::vec![0; ELF_HEADER];
        file[..4].copy_from_slice(b"\x7fELF");
        file[0x28] = 64;
        file[0x3a] = 64;
        file[0x3c] = 3;
        // Variables, code, and a table of names that is not loaded.
        for (flags, size) in [(3, 8 << 30), (6, 4096), (0, 1 << 40)] {
            file.extend(section(flags, size));
        }
        file
    }

    const NEEDS: Needs = Needs {
        data: 8 << 30,
        code: 4096,
    };

    #[test]
    fn an_elf_file_needs_what_is_loaded_of_it() {
        let file = elf();
        assert_eq!(kind(file[..START].try_into().unwrap()), Kind::Elf);
        let (at, length) = section_table(&file[..ELF_HEADER]);
        assert_eq!(of_sections(&file[at..at + length]), NEEDS);
        assert_eq!(of_file(&file, 0), NEEDS);
    }

    #[test]
    fn text_needs_its_variables() {
        let text = b".version 8.0\n.target sm_80\n.address_size 64\n\
            .visible .global .align 4 .b8 table[64];\n.global .u32 counter;\n\
            .const .align 8 .f64 grid[3][5] = {0f1, 2};\n.global .b8 big[8589934592];\n\
            .visible .entry add(\n .param .u64 p\n)\n{ ld.global.u32 %r1, [p]; st.global.f32 [p], %f1; ret; }\n";
        let expected = 64 + 4 + 8 * 15 + 8_589_934_592;
        assert_eq!(
            of_text(text),
            Needs {
                data: expected,
                code: text.len() as u64
            }
        );
        assert_eq!(kind(text[..START].try_into().unwrap()), Kind::Text);
    }

    #[test]
    fn sizes_in_every_notation() {
        for (text, bytes) in [
            (".global .b8 a[0x200000000];", 0x2_0000_0000),
            (".global .b8 a[0b101U];", 5),
            (".global .b16 a[010];", 16),
            (".global .v4 .f32 a[3];", 48),
            (".global .b8 a [ 7 ] [2];", 14),
            (".extern .global .b8 a[];", 1),
            // An expression counts as the largest number.
            (".global .b8 a[1024*1024];", u64::MAX),
            (".global .b8 a[ 2 * 3 ];", u64::MAX),
            (".global .b8 a[99999999999999999999999];", u64::MAX),
        ] {
            assert_eq!(of_text(text.as_bytes()).data, bytes, "{text}");
        }
    }

    /// The flags of compressed entries, of `sm_90a` and of `sm_100f`.
    const LZ4: u64 = 0x2000;
    const ZSTD: u64 = 0x8000;
    const SPECIFIC: u64 = 0x10_0000;
    const FAMILY: u64 = 0x20_0000;

    /// An entry as NVIDIA's `fatbinary` of CUDA 13.0 writes it.
    fn entry(kind: u8, architecture: u32, flags: u64, content: &[u8], unpacked: u64) -> Vec<u8> {
        let mut entry = std::vec![0; 64];
        (entry[0], entry[2], entry[3], entry[4]) = (kind, 1, 1, 64);
        entry[8..16].copy_from_slice(&(content.len() as u64).to_le_bytes());
        entry[28..32].copy_from_slice(&architecture.to_le_bytes());
        entry[40..48].copy_from_slice(&(flags | 0x11).to_le_bytes());
        entry[56..].copy_from_slice(&unpacked.to_le_bytes());
        entry.extend(content);
        entry
    }

    fn fat(entries: &[Vec<u8>]) -> Vec<u8> {
        let content = entries.concat();
        let mut image = std::vec![0x50, 0xed, 0x55, 0xba, 1, 0, 16, 0];
        image.extend((content.len() as u64).to_le_bytes());
        image.extend(content);
        image
    }

    /// Compressed machine code of so many bytes.
    fn packed(architecture: u32, flags: u64, unpacked: u64) -> Vec<u8> {
        entry(2, architecture, flags | ZSTD, &[1; 8], unpacked)
    }

    fn text(architecture: u32, flags: u64, unpacked: u64) -> Vec<u8> {
        entry(1, architecture, flags | LZ4, &[1; 8], unpacked)
    }

    #[test]
    fn a_fat_binary_needs_the_entry_that_the_driver_loads() {
        let image = fat(&[
            text(75, 0, 7_500),
            packed(80, 0, 80),
            packed(86, 0, 86),
            packed(90, 0, 90),
            text(90, SPECIFIC, 9_000),
            packed(100, FAMILY, 100),
            packed(103, SPECIFIC, 103),
            text(110, FAMILY, 11_000),
            text(120, 0, 12_000),
        ]);
        for (device, code) in [
            (75, 7_500),
            (80, 80),
            (86, 86),
            // Machine code for an earlier device of the same major architecture before PTX, also before PTX for a later one.
            (89, 86),
            (90, 90),
            (100, 100),
            (103, 103),
            (104, 100),
            // The family's PTX is for no other major architecture.
            (110, 11_000),
            (115, 11_000),
            (120, 12_000),
            (121, 12_000),
            (130, 12_000),
            // Nothing is for it, or it is unknown.
            (70, 12_000),
            (0, 12_000),
        ] {
            assert_eq!(of_fat_binary(&image, device).code, code, "{device}");
        }
        assert_eq!(of_file(&image, 90).code, 90);
    }

    #[test]
    fn entries_for_the_same_architecture_count_as_the_larger() {
        let [both, reversed] = [[90, 95], [95, 90]].map(|[plain, specific]| {
            fat(&[
                packed(90, 0, plain),
                packed(90, SPECIFIC, specific),
                packed(80, 0, 100),
            ])
        });
        assert_eq!(of_fat_binary(&both, 90).code, 95);
        assert_eq!(of_fat_binary(&reversed, 90).code, 95);
    }

    /// The variables that a compressed entry does not show, another entry may show.
    #[test]
    fn variables_of_a_compressed_entry_are_those_of_the_others() {
        let small = b".global .b8 small[100];\0";
        let image = fat(&[
            entry(1, 75, 0, small, 0),
            packed(90, 0, 4096),
            entry(2, 80, 0, &elf(), 0),
        ]);
        let of_compressed = Needs {
            data: NEEDS.data,
            code: 4096,
        };
        assert_eq!(of_fat_binary(&image, 90), of_compressed);
        assert_eq!(of_fat_binary(&image, 86), NEEDS);
        let of_text = Needs {
            data: 100,
            code: small.len() as u64,
        };
        assert_eq!(of_fat_binary(&image, 75), of_text);
    }

    #[test]
    fn a_fat_binary_that_is_not_understood_needs_its_largest_entry() {
        let entries = [packed(75, 0, 1 << 20), packed(90, 0, 4096)];
        let image = fat(&entries);
        assert_eq!(of_fat_binary(&image, 90).code, 4096);
        let with = |at: usize, byte: u8| {
            let mut image = image.clone();
            image[at] = byte;
            image
        };
        let first = START;
        for (what, image) in [
            ("its version", with(4, 2)),
            ("its header", with(6, 17)),
            ("its length", with(8, 0)),
            ("a kind", with(first, 16)),
            ("an entry's version", with(first + 2, 2)),
            ("an entry's header", with(first + 4, 63)),
            ("a flag", with(first + 40, 0x31)),
            ("an entry beyond the end", with(first + 64 + 8 + 8, 9)),
            (
                "bytes after the last entry",
                fat(&[entries.concat(), std::vec![0; 8]]),
            ),
            (
                "an ELF file without sections",
                fat(&[entries.concat(), entry(2, 90, 0, &[0; 64], 0)]),
            ),
        ] {
            let needs = of_fat_binary(&image, 90);
            assert_eq!(needs, of_fat_binary(&image, 0), "{what}");
            assert!(needs.code >= 4096, "{what}: {needs:?}");
        }
        // A size beside content that is not compressed does not make it smaller.
        let lie = fat(&[entry(2, 90, 0, &elf(), 1)]);
        assert_eq!(of_fat_binary(&lie, 90), NEEDS);
    }

    #[test]
    fn a_wrapper_is_recognized() {
        let image = fat(&[]);
        assert_eq!(
            kind(image[..START].try_into().unwrap()),
            Kind::Fat(image.len())
        );
        let mut wrapper = [0; START];
        wrapper[..4].copy_from_slice(&0x4662_43b1u32.to_le_bytes());
        wrapper[8] = 7;
        assert_eq!(kind(&wrapper), Kind::Wrapper(7));
    }

    prop_compose! {
        fn any_entry()(
            kind in 0..4u8,
            architecture in 70..130u32,
            flags in prop::sample::select(std::vec![0, SPECIFIC, FAMILY, LZ4, ZSTD, 0x4000]),
            content in prop_oneof![Just(elf()), Just(b".global .u32 a;".to_vec()), any::<Vec<u8>>()],
            unpacked in prop_oneof![Just(0), any::<u64>()],
        ) -> Vec<u8> {
            entry(kind, architecture, flags, &content, unpacked)
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_read(bytes: Vec<u8>, start: [u8; START], device in 0..200u64) {
            let _ = (is_binary([start[0]; 4]), of_file(&bytes, device), kind(&start), section_table(&bytes), of_sections(&bytes), of_fat_binary(&bytes, device), of_text(&bytes));
        }

        /// Whatever is changed in a fat binary, or cut off: it needs no more than its largest entry, and as much as an
        /// entry, or all that there is.
        #[test]
        fn no_fat_binary_needs_more_than_its_largest_entry_or_less_than_its_smallest(
            entries in prop::collection::vec(any_entry(), 0..5),
            changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
            length in any::<prop::sample::Index>(),
            is_cut: bool,
            device in 0..200u64,
        ) {
            let mut image = fat(&entries);
            for (at, byte) in changes {
                let at = at.index(image.len());
                image[at] = byte;
            }
            if is_cut {
                image.truncate(length.index(image.len()));
            }
            let (needs, largest) = (of_fat_binary(&image, device), of_fat_binary(&image, 0));
            prop_assert_eq!(needs.larger(largest), largest);
            let alone = |nth: usize| of_fat_binary(&fat(&entries[nth..=nth]), 0).code;
            if let Some(least) = (0..entries.len()).map(alone).min()
                && image == fat(&entries)
            {
                prop_assert!(needs.code >= least);
            }
        }
    }
}
