//! Images of device code: which kernels and global variables they define.
//!
//! Nothing is compiled. The names are read from the text of PTX and from the section names of a cubin. A fat binary is
//! not opened: every name is found in it.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_void};

use crate::code::Code;
use crate::export::get;

#[derive(Debug)]
pub struct Image {
    pub names: Names,
    /// Sizes of global variables by name, in bytes.
    pub globals: BTreeMap<String, u64>,
    pub bytes: u64,
}

/// The kernels of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Names {
    Listed(Vec<String>),
    /// Every name, for an image that is not opened.
    Any,
}

/// The names after `.entry` in PTX.
fn ptx_entries(text: &str) -> Vec<String> {
    text.split(".entry")
        .skip(1)
        .filter_map(|rest| {
            let name: String = rest
                .trim_start()
                .chars()
                .take_while(|c| c.is_ascii_alphanumeric() || matches!(c, '_' | '$' | '%'))
                .collect();
            (!name.is_empty()).then_some(name)
        })
        .collect()
}

/// Global variables in PTX, with their sizes: `.global .align 4 .b8 name[16];`
fn ptx_globals(text: &str) -> BTreeMap<String, u64> {
    let mut found = BTreeMap::new();
    for line in text.lines() {
        let Some((_, rest)) = line
            .split_once(".global ")
            .or_else(|| line.split_once(".const "))
        else {
            continue;
        };
        // An instruction (`ld.global …`) has no word for a type.
        let mut width = 0;
        for word in rest.split_ascii_whitespace() {
            if let Some(kind) = word.strip_prefix('.') {
                let bits = kind.trim_start_matches(|c: char| c.is_ascii_alphabetic());
                if kind != "align" && bits.len() < kind.len() {
                    width = bits.parse::<u64>().unwrap_or(0) / 8;
                }
            } else if width > 0 && !word.starts_with(|c: char| c.is_ascii_digit()) {
                let name = word.trim_end_matches(';');
                let (name, count) = match name.split_once('[') {
                    Some((name, count)) => (name, count.trim_end_matches(']').parse().unwrap_or(1)),
                    None => (name, 1),
                };
                found.insert(name.to_owned(), width * count);
                break;
            }
        }
    }
    found
}

/// The section table of an ELF file.
struct Sections {
    table: u64,
    /// Bytes of an entry.
    entry: u16,
    count: u16,
    /// The index of the section that has the sections' names.
    names: u16,
}

impl Sections {
    /// # Safety
    /// `image` is a whole 64-bit ELF file.
    unsafe fn read(image: *const u8) -> Self {
        // SAFETY: within the ELF header, which is 64 bytes.
        unsafe {
            Self {
                table: image.add(0x28).cast::<u64>().read_unaligned(),
                entry: image.add(0x3a).cast::<u16>().read_unaligned(),
                count: image.add(0x3c).cast::<u16>().read_unaligned(),
                names: image.add(0x3e).cast::<u16>().read_unaligned(),
            }
        }
    }

    /// The offset of an entry of the table.
    fn offset(&self, index: u16) -> Option<usize> {
        let table = usize::try_from(self.table).ok()?;
        Some(table + usize::from(index) * usize::from(self.entry))
    }

    /// The length of the file, which ends with its section table.
    fn file_bytes(&self) -> u64 {
        self.table
            .saturating_add(u64::from(self.entry) * u64::from(self.count))
    }

    /// Kernel names in a cubin: its sections `.text.<name>`.
    ///
    /// # Safety
    /// `image` is the whole file that this table is of.
    unsafe fn kernels(&self, image: *const u8) -> Option<Vec<String>> {
        if self.names >= self.count || self.entry < 64 {
            return None;
        }
        // SAFETY: the header says that the section table has `count` entries.
        let strings = unsafe {
            image
                .add(self.offset(self.names)? + 0x18)
                .cast::<u64>()
                .read_unaligned()
        };
        let mut found = Vec::new();
        for index in 0..self.count {
            // SAFETY: as above; names are zero-terminated in the string section.
            let name = unsafe {
                let offset = image
                    .add(self.offset(index)?)
                    .cast::<u32>()
                    .read_unaligned();
                CStr::from_ptr(
                    image
                        .add(usize::try_from(strings).ok()? + offset as usize)
                        .cast(),
                )
            };
            if let Some(kernel) = name.to_str().ok().and_then(|n| n.strip_prefix(".text.")) {
                found.push(kernel.to_owned());
            }
        }
        Some(found)
    }
}

/// The length of a fat binary. Its header has its own length (two bytes at 6) and that of the rest (eight bytes at 8).
///
/// # Safety
/// `image` is a whole fat binary.
unsafe fn fatbin_bytes(image: *const u8) -> u64 {
    // SAFETY: within the header, which is 16 bytes.
    unsafe {
        let header = image.add(6).cast::<u16>().read_unaligned();
        let rest = image.add(8).cast::<u64>().read_unaligned();
        rest.saturating_add(u64::from(header))
    }
}

const FATBIN: [u8; 4] = 0xba55_ed50u32.to_le_bytes();
/// The first bytes of nvcc's wrapper around a fat binary.
const FATBIN_WRAPPER: [u8; 4] = 0x466b_6463u32.to_le_bytes();

/// Reads an image.
///
/// # Safety
/// `image` is null, or PTX with its final zero, or a cubin, or a fat binary.
pub unsafe fn read(image: *const c_void) -> Result<Image, Code> {
    // SAFETY: every kind of image has four bytes.
    let start = unsafe { get(image.cast::<[u8; 4]>())? };
    let mut globals = BTreeMap::new();
    let bytes;
    let names = if start == *b"\x7fELF" {
        // SAFETY: an ELF image is whole by CUDA's contract.
        let sections = unsafe { Sections::read(image.cast()) };
        bytes = sections.file_bytes();
        // SAFETY: as above.
        unsafe { sections.kernels(image.cast()) }.map_or(Names::Any, Names::Listed)
    } else if start == FATBIN {
        // SAFETY: a fat binary is whole by CUDA's contract.
        bytes = unsafe { fatbin_bytes(image.cast()) };
        Names::Any
    } else if start == FATBIN_WRAPPER {
        // SAFETY: fatbinary_section.h: magic, version, then the address of the fat binary.
        bytes = unsafe { fatbin_bytes(image.cast::<*const u8>().add(1).read_unaligned()) };
        Names::Any
    } else {
        // SAFETY: every other image is text with its final zero.
        let text = unsafe { CStr::from_ptr(image.cast()) }.to_string_lossy();
        if !text.contains(".version") || !text.contains(".target") {
            return Err(Code::INVALID_IMAGE);
        }
        globals = ptx_globals(&text);
        bytes = text.len() as u64;
        Names::Listed(ptx_entries(&text))
    };
    Ok(Image {
        names,
        globals,
        bytes,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_and_globals_are_found_in_ptx() {
        let text = ".version 8.0\n.target sm_80\n.address_size 64\n\
            .visible .global .align 4 .b8 table[64];\n.global .u32 counter;\n\
            .visible .entry add(\n .param .u64 p\n)\n{ ld.global.u32 %r1, [p]; ret; }\n\
            .entry sim_busy_5us() { ret; }\n";
        assert_eq!(ptx_entries(text), ["add", "sim_busy_5us"]);
        let globals = ptx_globals(text);
        assert_eq!(globals.get("table"), Some(&64));
        assert_eq!(globals.get("counter"), Some(&4));
        assert_eq!(globals.len(), 2);
    }
}
