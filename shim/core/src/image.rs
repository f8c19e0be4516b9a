//! How much device memory a module needs, as far as its image shows it.
//!
//! An image is PTX, an ELF file for one architecture, or a fat binary of several of either. It
//! contains the sizes of its variables and its code, but not how the driver lays them out. Code is
//! loaded at its first use, unless the program loads everything at once (`CUDA_MODULE_LOADING`), so the
//! size of the code is an upper bound. The driver compiles PTX: an instruction of 16 bytes has a longer
//! text. Compressed entries of a fat binary show only their total size.

/// The needs of an image, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Needs {
    /// Variables and constants: allocated with the module.
    pub data: u64,
    /// An upper bound of code, and of parts that cannot be read: allocated at its first use.
    pub code: u64,
}

impl Needs {
    fn larger(self, other: Self) -> Self {
        Self {
            data: self.data.max(other.data),
            code: self.code.max(other.code),
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

/// The needs of an image in a file.
#[must_use]
pub fn of_file(image: &[u8]) -> Needs {
    match image.first_chunk().map(kind) {
        Some(Kind::Elf) => {
            let (at, length) = section_table(image);
            let table = image.get(at..).unwrap_or(&[]);
            of_sections(table.get(..length).unwrap_or(&[]))
        }
        Some(Kind::Fat(_)) => of_fat_binary(image),
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

/// The needs of a fat binary: those of its largest entry, because one entry is loaded.
#[must_use]
pub fn of_fat_binary(image: &[u8]) -> Needs {
    const TEXT: u64 = 1;
    const ELF: u64 = 2;
    let mut needs = Needs::default();
    let mut at = usize::try_from(word(image, 6, 2)).unwrap_or(0);
    while let Some(entry) = image.get(at..).filter(|entry| entry.len() >= 64) {
        let (kind, header, size) = (word(entry, 0, 2), word(entry, 4, 4), word(entry, 8, 8));
        let (header, size) = (
            usize::try_from(header).unwrap_or(usize::MAX),
            usize::try_from(size).unwrap_or(usize::MAX),
        );
        let Some(end) = header.checked_add(size).filter(|end| *end > 0) else {
            break;
        };
        let content = entry.get(header..end.min(entry.len())).unwrap_or(&[]);
        let unpacked = word(entry, 56, 8);
        needs = needs.larger(match kind {
            _ if unpacked != 0 => Needs {
                data: 0,
                code: unpacked,
            },
            ELF => {
                let (table, length) = section_table(content);
                let table = content.get(table..).unwrap_or(&[]);
                of_sections(table.get(..length).unwrap_or(&[]))
            }
            TEXT => of_text(content),
            _ => Needs::default(),
        });
        let Some(next) = at.checked_add(end) else {
            break;
        };
        at = next;
    }
    needs
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
        assert_eq!(of_file(&file), NEEDS);
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

    #[test]
    fn a_fat_binary_needs_its_largest_entry() {
        let text = b".global .b8 small[100];\0".to_vec();
        let entry = |kind: u8, content: &[u8], unpacked: u64| {
            let mut entry = std::vec![0; 64];
            (entry[0], entry[4]) = (kind, 64);
            entry[8..16].copy_from_slice(&(content.len() as u64).to_le_bytes());
            entry[56..].copy_from_slice(&unpacked.to_le_bytes());
            entry.extend(content);
            entry
        };
        let content = [
            entry(1, &text, 0),
            entry(2, &elf(), 0),
            entry(2, &[1; 8], 1 << 20),
        ]
        .concat();
        let mut image = std::vec![0x50, 0xed, 0x55, 0xba, 1, 0, 16, 0];
        image.extend((content.len() as u64).to_le_bytes());
        image.extend(content);
        assert_eq!(
            kind(image[..START].try_into().unwrap()),
            Kind::Fat(image.len())
        );
        let expected = Needs {
            code: 1 << 20,
            ..NEEDS
        };
        assert_eq!(of_fat_binary(&image), expected);
        let mut wrapper = [0; START];
        wrapper[..4].copy_from_slice(&0x4662_43b1u32.to_le_bytes());
        wrapper[8] = 7;
        assert_eq!(kind(&wrapper), Kind::Wrapper(7));
    }

    proptest! {
        #[test]
        fn any_bytes_are_read(bytes: Vec<u8>, start: [u8; START]) {
            let _ = (is_binary([start[0]; 4]), of_file(&bytes), kind(&start), section_table(&bytes), of_sections(&bytes), of_fat_binary(&bytes), of_text(&bytes));
        }
    }
}
