//! The names of our own functions, from our symbol table.
//!
//! dladdr(3) finds them too, but it searches all libraries and takes ten times as long. A program with
//! libcudart looks up all functions with variants at its start, which would take a quarter of a
//! millisecond.

use core::ffi::c_char;

use libc::Elf64_Sym;

/// The address of one of our functions, which is compared and looked up, but never dereferenced.
#[derive(Clone, Copy, Debug)]
pub struct Ours(pub *const ());

// SAFETY: only an address.
unsafe impl Sync for Ours {}

/// `Elf64_Dyn` of elf(5).
#[repr(C)]
struct Entry {
    tag: isize,
    value: usize,
}

/// `DT_NULL`, `DT_STRTAB`, `DT_SYMTAB` and `DT_GNU_HASH` of elf.h.
const END: isize = 0;
const STRINGS: isize = 5;
const SYMBOLS: isize = 6;
const GNU_HASH: isize = 0x6fff_fef5;

unsafe extern "C" {
    /// Set by the linker: the addresses of our dynamic section and of our first byte.
    #[link_name = "_DYNAMIC"]
    static DYNAMIC: [Entry; 0];
    #[link_name = "__ehdr_start"]
    static START: [u8; 0];
}

/// The name, a C string, of the exported function at an address; `exported` is the number of functions that this
/// library exports, which `shim/build` checks.
#[must_use]
pub fn of(ours: Ours, exported: usize) -> Option<*const c_char> {
    let start = &raw const START as usize;
    let [strings, symbols, hashes] = tables(start);
    let (hashes, symbols) = (hashes as *const u32, symbols as *const Elf64_Sym);
    // SAFETY: a library that exports has these three tables. The hash table's second word is the
    // number of the first symbol that it has; it has the exported ones, which are the last.
    let exports = unsafe {
        let first = hashes.add(1).read() as usize;
        core::slice::from_raw_parts(symbols.add(first), exported)
    };
    let at = (ours.0 as usize).wrapping_sub(start);
    let symbol = exports.iter().find(|symbol| symbol.st_value == at as u64)?;
    Some((strings + symbol.st_name as usize) as *const c_char)
}

/// The addresses of the strings, the symbols and their hash table.
fn tables(start: usize) -> [usize; 3] {
    let mut tables = [0; 3];
    let mut entry = (&raw const DYNAMIC).cast::<Entry>();
    loop {
        // SAFETY: an entry of the dynamic section, which ends with `END`.
        let Entry { tag, value } = unsafe { entry.read() };
        let [strings, symbols, hashes] = &mut tables;
        let table = match tag {
            END => return tables,
            STRINGS => strings,
            SYMBOLS => symbols,
            GNU_HASH => hashes,
            _ => &mut 0,
        };
        // glibc's loader replaces the file's offsets by addresses; musl's does not.
        *table = if value < start { start + value } else { value };
        // SAFETY: not the last.
        entry = unsafe { entry.add(1) };
    }
}
