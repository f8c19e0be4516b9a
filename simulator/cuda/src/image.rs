//! Images of device code: which kernels and global variables they define, and for which GPUs.
//!
//! Nothing is compiled. The names are read from the text of PTX and from the section names of a cubin. Of a fat binary, a
//! GPU gets one entry, as CUDA's documents say: machine code for its compute capability, or for an earlier one with the
//! same major number, and PTX for its own or an earlier one if there is none. A compressed entry is not opened: every name
//! is found in it.

use std::collections::BTreeMap;
use std::ffi::{CStr, c_void};

use crate::code::Code;
use crate::export::get;

/// What a GPU can get of an image. Only a fat binary has several.
#[derive(Debug)]
pub struct Image {
    entries: Vec<Entry>,
}

/// A translation of an image.
#[derive(Debug)]
pub struct Entry {
    target: Target,
    pub names: Names,
    /// Sizes of global variables by name, in bytes.
    pub globals: BTreeMap<String, u64>,
    /// Bytes that it takes when it is loaded, beside these variables.
    pub bytes: u64,
}

/// The kernels of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Names {
    Listed(Vec<String>),
    /// Every name, for an image that is not opened.
    Any,
}

/// The GPUs for which an entry is. The order is that of preference.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Target {
    /// An image that is no fat binary is not checked.
    Every,
    /// PTX, by compute capability.
    Text([u32; 2], Reach),
    MachineCode([u32; 2], Reach),
}

/// The suffix of an architecture's name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Reach {
    /// `sm_90`
    Later,
    /// `sm_100f`
    Family,
    /// `sm_90a`
    Only,
}

impl Target {
    fn includes(self, gpu: [u32; 2]) -> bool {
        match self {
            Self::Every => true,
            Self::Text(of, Reach::Only) | Self::MachineCode(of, Reach::Only) => gpu == of,
            Self::Text(of, Reach::Later) => gpu >= of,
            Self::Text(of, Reach::Family) | Self::MachineCode(of, _) => {
                gpu[0] == of[0] && gpu[1] >= of[1]
            }
        }
    }
}

impl Image {
    /// What a GPU of a compute capability gets.
    pub fn entry(&self, gpu: [u32; 2]) -> Result<&Entry, Code> {
        let fitting = self.entries.iter().filter(|it| it.target.includes(gpu));
        fitting
            .max_by_key(|it| it.target)
            .ok_or(Code::NO_BINARY_FOR_GPU)
    }

    /// Whether a kernel is in any entry.
    pub fn has_kernel(&self, name: &str) -> bool {
        self.entries.iter().any(|entry| match &entry.names {
            Names::Listed(names) => names.iter().any(|it| it == name),
            Names::Any => true,
        })
    }

    /// The names of its kernels; none for an image that was not opened.
    pub fn kernels(&self) -> Vec<String> {
        let listed = |entry: &Entry| match &entry.names {
            Names::Listed(names) => Some(names.clone()),
            Names::Any => None,
        };
        self.entries.iter().find_map(listed).unwrap_or_default()
    }
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

    /// Bytes of the sections that the driver loads: code, variables and constants.
    ///
    /// # Safety
    /// `image` is the whole file that this table is of.
    unsafe fn loaded_bytes(&self, image: *const u8) -> u64 {
        const ALLOCATED: u64 = 2;
        let mut sum = 0u64;
        for at in (0..self.count).filter_map(|index| self.offset(index)) {
            // SAFETY: the header says that the section table has `count` entries.
            let [flags, bytes] = unsafe {
                [0x08, 0x20].map(|field| image.add(at + field).cast::<u64>().read_unaligned())
            };
            if flags & ALLOCATED != 0 {
                sum = sum.saturating_add(bytes);
            }
        }
        sum
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

const FATBIN: [u8; 4] = 0xba55_ed50u32.to_le_bytes();
/// The first bytes of nvcc's wrapper around a fat binary (`FATBINC_MAGIC` of `fatbinary_section.h`).
const FATBIN_WRAPPER: [u8; 4] = 0x4662_43b1u32.to_le_bytes();

/// The header of a fat binary, before its entries.
#[repr(C)]
#[derive(Clone, Copy)]
struct FatHeader {
    magic: u32,
    version: u16,
    /// Its own bytes.
    header: u16,
    /// Bytes of all entries.
    entries: u64,
}

/// The header of an entry of a fat binary. It can be longer: options follow.
#[repr(C)]
#[derive(Clone, Copy)]
struct EntryHeader {
    kind: u16,
    version: u16,
    /// Its own bytes, with the options.
    header: u32,
    /// Bytes of the content, with padding.
    content: u64,
    compressed: u32,
    options: u32,
    code_version: [u16; 2],
    /// 90 for compute capability 9.0.
    architecture: u32,
    name: [u32; 2],
    flags: u64,
    reserved: u64,
    /// Bytes of the content before it was compressed.
    uncompressed: u64,
}

/// Values of [`EntryHeader::kind`].
const TEXT: u16 = 1;
const CUBIN: u16 = 2;
/// Bits of [`EntryHeader::flags`].
const IS_COMPRESSED: u64 = 1 << 13 | 1 << 15;
const IS_SPECIFIC: u64 = 1 << 20;
const IS_FAMILY: u64 = 1 << 21;

/// The entries of a fat binary.
///
/// # Safety
/// `image` is a whole fat binary.
unsafe fn fat_entries(image: *const u8) -> Result<Vec<Entry>, Code> {
    // SAFETY: the header is there.
    let header = unsafe { image.cast::<FatHeader>().read_unaligned() };
    if header.magic.to_le_bytes() != FATBIN || header.version != 1 {
        return Err(Code::INVALID_IMAGE);
    }
    let length = usize::try_from(header.entries).map_err(|_| Code::INVALID_IMAGE)?;
    // SAFETY: it says how long it is.
    let mut rest =
        unsafe { std::slice::from_raw_parts(image.add(usize::from(header.header)), length) };
    let mut entries = Vec::new();
    while !rest.is_empty() {
        if rest.len() < size_of::<EntryHeader>() {
            return Err(Code::INVALID_IMAGE);
        }
        // SAFETY: so many bytes are there, and every bit pattern is valid.
        let header = unsafe { rest.as_ptr().cast::<EntryHeader>().read_unaligned() };
        let length = usize::try_from(header.content).map_err(|_| Code::INVALID_IMAGE)?;
        let (content, after) = rest
            .split_at_checked(header.header as usize)
            .filter(|(header, _)| header.len() >= size_of::<EntryHeader>())
            .and_then(|(_, content)| content.split_at_checked(length))
            .ok_or(Code::INVALID_IMAGE)?;
        entries.push(Entry::of_content(header, content)?);
        rest = after;
    }
    Ok(entries)
}

impl Entry {
    /// An entry of a fat binary.
    fn of_content(header: EntryHeader, content: &[u8]) -> Result<Self, Code> {
        let of = [header.architecture / 10, header.architecture % 10];
        let reach = match header.flags {
            flags if flags & IS_SPECIFIC != 0 => Reach::Only,
            flags if flags & IS_FAMILY != 0 => Reach::Family,
            _ => Reach::Later,
        };
        let is_compressed = header.flags & IS_COMPRESSED != 0;
        let (target, opened) = match header.kind {
            TEXT if is_compressed => (Target::Text(of, reach), None),
            CUBIN if is_compressed => (Target::MachineCode(of, reach), None),
            TEXT => {
                let text = content.split(|byte| *byte == 0).next().unwrap_or(content);
                let text = String::from_utf8_lossy(text);
                (Target::Text(of, reach), Some(Self::of_text(&text)?))
            }
            CUBIN if content.starts_with(b"\x7fELF") => {
                // SAFETY: an entry is a whole ELF file by CUDA's contract.
                let cubin = unsafe { Self::of_cubin(content.as_ptr()) };
                (Target::MachineCode(of, reach), Some(cubin))
            }
            _ => return Err(Code::INVALID_IMAGE),
        };
        let entry = opened.unwrap_or(Self {
            target,
            names: Names::Any,
            globals: BTreeMap::new(),
            bytes: header.uncompressed,
        });
        Ok(Self { target, ..entry })
    }

    /// # Safety
    /// `image` is a whole 64-bit ELF file.
    unsafe fn of_cubin(image: *const u8) -> Self {
        // SAFETY: the caller's contract.
        let (names, bytes) = unsafe {
            let sections = Sections::read(image);
            (sections.kernels(image), sections.loaded_bytes(image))
        };
        Self {
            target: Target::Every,
            names: names.map_or(Names::Any, Names::Listed),
            globals: BTreeMap::new(),
            bytes,
        }
    }

    fn of_text(text: &str) -> Result<Self, Code> {
        if !text.contains(".version") || !text.contains(".target") {
            return Err(Code::INVALID_IMAGE);
        }
        Ok(Self {
            target: Target::Every,
            names: Names::Listed(ptx_entries(text)),
            globals: ptx_globals(text),
            bytes: text.len() as u64,
        })
    }
}

/// Reads an image.
///
/// # Safety
/// `image` is null, or PTX with its final zero, or a cubin, or a fat binary, or nvcc's wrapper around one.
pub unsafe fn read(image: *const c_void) -> Result<Image, Code> {
    // SAFETY: every kind of image has four bytes.
    let start = unsafe { get(image.cast::<[u8; 4]>())? };
    let entries = if start == *b"\x7fELF" {
        // SAFETY: an ELF image is whole by CUDA's contract.
        vec![unsafe { Entry::of_cubin(image.cast()) }]
    } else if start == FATBIN {
        // SAFETY: a fat binary is whole by CUDA's contract.
        unsafe { fat_entries(image.cast())? }
    } else if start == FATBIN_WRAPPER {
        // SAFETY: fatbinary_section.h: magic, version, then the address of the fat binary.
        unsafe {
            let inner = image.cast::<*const u8>().add(1).read_unaligned();
            get(inner)?;
            fat_entries(inner)?
        }
    } else {
        // SAFETY: every other image is text with its final zero.
        let text = unsafe { CStr::from_ptr(image.cast()) }.to_string_lossy();
        vec![Entry::of_text(&text)?]
    };
    Ok(Image { entries })
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

    /// An entry as NVIDIA's `fatbinary` writes it.
    fn entry(
        kind: u16,
        architecture: u32,
        flags: u64,
        content: &[u8],
        uncompressed: u64,
    ) -> Vec<u8> {
        let mut entry = [kind.to_le_bytes(), 0x101u16.to_le_bytes()].concat();
        entry.extend(64u32.to_le_bytes());
        entry.extend((content.len() as u64).to_le_bytes());
        entry.extend([0; 12]);
        entry.extend(architecture.to_le_bytes());
        entry.extend([0; 8]);
        entry.extend((flags | 0x11).to_le_bytes());
        entry.extend([0; 8]);
        entry.extend(uncompressed.to_le_bytes());
        entry.extend(content);
        entry
    }

    fn fat(entries: &[Vec<u8>]) -> Vec<u8> {
        let content = entries.concat();
        let mut image = FATBIN.to_vec();
        image.extend([1, 0, 16, 0]);
        image.extend((content.len() as u64).to_le_bytes());
        image.extend(content);
        image
    }

    const TEXT_75: &[u8] =
        b".version 8.0\n.target sm_75\n.global .u32 counter;\n.entry add() { ret; }\0";

    fn packed(architecture: u32, flags: u64, bytes: u64) -> Vec<u8> {
        entry(CUBIN, architecture, flags | 1 << 15, &[0; 8], bytes)
    }

    #[test]
    fn a_gpu_gets_the_entry_that_is_for_it() {
        let image = fat(&[
            entry(TEXT, 75, 0, TEXT_75, 0),
            packed(80, 0, 80),
            packed(90, IS_SPECIFIC, 90),
            packed(100, IS_FAMILY, 100),
            packed(103, IS_SPECIFIC, 103),
            entry(TEXT, 120, 1 << 13, &[0; 8], 120),
        ]);
        // SAFETY: a whole fat binary.
        let image = unsafe { read(image.as_ptr().cast()) }.unwrap();
        let text = TEXT_75.len() as u64 - 1;
        for (gpu, bytes) in [
            ([7, 5], text),
            ([8, 0], 80),
            ([8, 9], 80),
            ([9, 0], 90),
            ([10, 0], 100),
            ([10, 1], 100),
            ([10, 3], 103),
            ([11, 0], text),
            ([12, 1], 120),
        ] {
            assert_eq!(image.entry(gpu).unwrap().bytes, bytes, "{gpu:?}");
        }
        assert_eq!(image.entry([7, 0]).unwrap_err(), Code::NO_BINARY_FOR_GPU);
        assert_eq!(
            image.entry([7, 5]).unwrap().globals.get("counter"),
            Some(&4)
        );
        assert!(image.has_kernel("any"), "not opened");
    }

    #[test]
    fn nvccs_wrapper_is_the_fat_binary_in_it() {
        let image = fat(&[packed(90, 0, 90)]);
        let wrapper = [
            u64::from(u32::from_le_bytes(FATBIN_WRAPPER)) | 1 << 32,
            image.as_ptr() as u64,
            0,
        ];
        assert_eq!(wrapper[0].to_le_bytes()[..4], [0xb1, 0x43, 0x62, 0x46]);
        // SAFETY: a wrapper around a whole fat binary.
        let read = unsafe { read(wrapper.as_ptr().cast()) }.unwrap();
        assert_eq!(read.entry([9, 0]).unwrap().bytes, 90);
    }

    #[test]
    fn a_damaged_fat_binary_is_no_image() {
        let whole = fat(&[packed(80, 0, 80), packed(90, 0, 90)]);
        for (at, byte) in [(4, 2), (8, 1), (16, 3), (20, 63), (24, 200)] {
            let mut image = whole.clone();
            image[at] = byte;
            // SAFETY: not longer than it was.
            let read = unsafe { read(image.as_ptr().cast()) };
            assert_eq!(read.unwrap_err(), Code::INVALID_IMAGE, "{at}");
        }
    }
}
