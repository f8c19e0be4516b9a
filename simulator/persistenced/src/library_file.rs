//! Adapts the simulated libraries to the machine file's driver: their version, and in libcuda the functions that `dlsym` finds
//! and the CUDA version before initialisation.
//!
//! The built libcuda has all functions up to the newest CUDA version that it knows. Functions that are newer than the driver's
//! CUDA version become local symbols, which loaders do not find. Their versions are in `shim/cuda/symbols.txt`, from which the
//! library's own table is made as well; `shim/symbols` takes them from real drivers and NVIDIA's headers.

use std::collections::BTreeMap;
use std::ops::Range;

use anyhow::{Context as _, bail};
use tranche_simulator_machine::version;

/// The functions of NVIDIA's drivers and headers.
const SYMBOLS: &str = include_str!("../../../shim/cuda/symbols.txt");
/// The variables in the libraries for the CUDA version and for the driver's version.
const CUDA_VERSION: &str = "SIM_CUDA_VERSION";
const DRIVER_VERSION: &str = "SIM_DRIVER_VERSION";

/// `SHT_DYNSYM`, the size of a section header and of a symbol.
const DYNSYM: u32 = 11;
const SECTION: usize = 64;
const SYMBOL: usize = 24;
/// `PT_LOAD`, and the size of a program header.
const LOAD: u32 = 1;
const SEGMENT: usize = 56;

/// The CUDA version that added each function; none for those that `cuGetProcAddress` does not know.
fn versions() -> BTreeMap<&'static str, u32> {
    let row = |line: &'static str| {
        let mut words = line.split(' ');
        let (name, since) = (words.next()?, words.nth(1)?);
        let (major, minor) = since.split_once('.')?;
        let number = 1000 * major.parse::<u32>().ok()? + 10 * minor.parse::<u32>().ok()?;
        Some((name, number))
    };
    SYMBOLS.lines().filter_map(row).collect()
}

/// Adapts the image of libcuda to a driver with `cuda_version` (1000 × major + 10 × minor).
pub fn set_api_level(image: &mut [u8], cuda_version: u32) -> anyhow::Result<()> {
    let versions = versions();
    for symbol in symbols(image)? {
        let since = versions.get(&*symbol.name);
        if since.is_some_and(|since| *since > cuda_version) {
            // The binding, in the upper half of `st_info`, becomes STB_LOCAL.
            image[symbol.at + 4] &= 0x0f;
        }
    }
    set_variable(image, CUDA_VERSION, &cuda_version.to_le_bytes())
}

/// Writes the driver's version into the image of either library.
pub fn set_driver_version(image: &mut [u8], version: &str) -> anyhow::Result<()> {
    let mut text = [0; version::BYTES];
    let place = text[..version::BYTES - 1].get_mut(..version.len());
    place
        .context("the driver's version is too long")?
        .copy_from_slice(version.as_bytes());
    set_variable(image, DRIVER_VERSION, &text)
}

fn set_variable(image: &mut [u8], name: &str, value: &[u8]) -> anyhow::Result<()> {
    let mut symbols = symbols(image)?.into_iter();
    let variable = symbols
        .find(|symbol| symbol.name == name)
        .with_context(|| format!("the file has no variable {name}"))?;
    let at = place(image, variable.address)?;
    let place = image.get_mut(at..at + value.len());
    place
        .context("the file is truncated")?
        .copy_from_slice(value);
    Ok(())
}

struct Symbol {
    /// Its offset in the file.
    at: usize,
    name: String,
    address: u64,
}

/// The dynamic symbols of a 64-bit ELF file.
fn symbols(image: &[u8]) -> anyhow::Result<Vec<Symbol>> {
    if !image.starts_with(b"\x7fELF\x02\x01") {
        bail!("the file is not a 64-bit ELF file");
    }
    let table = number(image, 0x28..0x30)?;
    let section = |index: usize| part(image, table + index * SECTION, SECTION);
    let count = number(image, 0x3c..0x3e)?;
    for index in 0..count {
        let header = section(index)?;
        if number(header, 4..8)? != DYNSYM as usize {
            continue;
        }
        let (at, bytes) = (number(header, 24..32)?, number(header, 32..40)?);
        let strings = section(number(header, 40..44)?)?;
        let strings = part(image, number(strings, 24..32)?, number(strings, 32..40)?)?;
        return (at..at + bytes)
            .step_by(SYMBOL)
            .map(|at| {
                let symbol = part(image, at, SYMBOL)?;
                let rest = strings.get(number(symbol, 0..4)?..).unwrap_or_default();
                let name = rest.split(|byte| *byte == 0).next().unwrap_or_default();
                Ok(Symbol {
                    at,
                    name: String::from_utf8_lossy(name).into_owned(),
                    address: number(symbol, 8..16)? as u64,
                })
            })
            .collect();
    }
    bail!("the file has no dynamic symbols")
}

/// The offset in the file of the data that is loaded at `address`.
fn place(image: &[u8], address: u64) -> anyhow::Result<usize> {
    let address = usize::try_from(address)?;
    let table = number(image, 0x20..0x28)?;
    for index in 0..number(image, 0x38..0x3a)? {
        let segment = part(image, table + index * SEGMENT, SEGMENT)?;
        let (offset, start) = (number(segment, 8..16)?, number(segment, 16..24)?);
        let bytes = number(segment, 32..40)?;
        let is_loaded = number(segment, 0..4)? == LOAD as usize;
        if is_loaded && (start..start + bytes).contains(&address) {
            return Ok(offset + (address - start));
        }
    }
    bail!("the file has no data at {address:#x}")
}

fn part(image: &[u8], at: usize, bytes: usize) -> anyhow::Result<&[u8]> {
    let end = at
        .checked_add(bytes)
        .context("a length in the file is too large")?;
    image.get(at..end).context("the file is truncated")
}

fn number(image: &[u8], at: Range<usize>) -> anyhow::Result<usize> {
    let mut bytes = [0; 8];
    let found = image.get(at).context("the file is truncated")?;
    bytes[..found.len()].copy_from_slice(found);
    Ok(usize::try_from(u64::from_le_bytes(bytes))?)
}

#[cfg(test)]
pub mod tests {
    use super::*;

    /// Bytes of each symbol's data.
    const DATA: usize = version::BYTES;

    /// An ELF file with these dynamic symbols, which are global functions. Their data is at the end of the file.
    pub fn library(names: &[&str]) -> Vec<u8> {
        let mut strings = vec![0];
        let mut symbols = Vec::new();
        for name in names {
            let mut symbol = [0; SYMBOL];
            symbol[..4].copy_from_slice(&u32::try_from(strings.len()).unwrap().to_le_bytes());
            symbol[4] = 0x12;
            symbols.push(symbol);
            strings.extend(name.bytes().chain([0]));
        }
        let sections_at = 64 + SEGMENT;
        let symbols_at = sections_at + 3 * SECTION;
        let strings_at = symbols_at + names.len() * SYMBOL;
        let data_at = strings_at + strings.len();
        for (nth, symbol) in symbols.iter_mut().enumerate() {
            let address = data_at + nth * DATA;
            symbol[8..16].copy_from_slice(&(address as u64).to_le_bytes());
        }
        let mut image = vec![0; sections_at];
        image[..6].copy_from_slice(b"\x7fELF\x02\x01");
        let mut put = |at: usize, value: usize| {
            image[at..at + 8].copy_from_slice(&(value as u64).to_le_bytes());
        };
        put(0x20, 64);
        put(0x28, sections_at);
        put(64, LOAD as usize);
        put(64 + 32, data_at + names.len() * DATA);
        image[0x38] = 1;
        image[0x3c] = 3;
        for [kind, at, bytes, link] in [
            [0; 4],
            [DYNSYM as usize, symbols_at, names.len() * SYMBOL, 2],
            [3, strings_at, strings.len(), 0],
        ] {
            let mut section = [0; SECTION];
            section[4] = u8::try_from(kind).unwrap();
            section[24..32].copy_from_slice(&(at as u64).to_le_bytes());
            section[32..40].copy_from_slice(&(bytes as u64).to_le_bytes());
            section[40] = u8::try_from(link).unwrap();
            image.extend(section);
        }
        image.extend(symbols.concat());
        image.extend(strings);
        image.extend(vec![0; names.len() * DATA]);
        image
    }

    /// The data of a symbol.
    pub fn data<'a>(image: &'a [u8], name: &str) -> &'a [u8] {
        let symbols = symbols(image).unwrap();
        let found = symbols.iter().find(|symbol| symbol.name == name).unwrap();
        part(image, place(image, found.address).unwrap(), DATA).unwrap()
    }

    #[test]
    fn newer_functions_become_local_and_the_version_is_the_drivers() {
        // Functions of CUDA 2.0, of 12.4, and without a version.
        let names = [
            "cuMemAlloc",
            "cuGreenCtxCreate",
            "cuGetExportTable",
            CUDA_VERSION,
        ];
        for (version, green) in [(12_020, 0x02), (12_040, 0x12), (13_000, 0x12)] {
            let mut image = library(&names);
            set_api_level(&mut image, version).unwrap();
            let found: Vec<u8> = symbols(&image)
                .unwrap()
                .iter()
                .map(|s| image[s.at + 4])
                .collect();
            assert_eq!(found, [0x12, green, 0x12, 0x12], "{version}");
            assert!(data(&image, CUDA_VERSION).starts_with(&version.to_le_bytes()));
        }
    }

    #[test]
    fn the_drivers_version_is_written_with_a_final_zero() {
        let mut image = library(&["nvmlInit_v2", DRIVER_VERSION]);
        set_driver_version(&mut image, "535.261.03").unwrap();
        assert!(data(&image, DRIVER_VERSION).starts_with(b"535.261.03\0"));
        assert!(set_driver_version(&mut image, &"5".repeat(DATA)).is_err());
        set_driver_version(&mut image, &"5".repeat(DATA - 1)).unwrap();
        assert!(set_driver_version(&mut library(&["nvmlInit_v2"]), "535").is_err());
    }

    #[test]
    fn files_that_are_no_library_are_refused() {
        for image in [&b""[..], b"\x7fELF\x02\x01", b"libcuda.so.1"] {
            assert!(set_api_level(&mut image.to_vec(), 12_020).is_err());
        }
        let whole = library(&["cuMemAlloc", CUDA_VERSION]);
        for length in 0..whole.len() - DATA + 4 {
            assert!(
                set_api_level(&mut whole[..length].to_vec(), 12_020).is_err(),
                "{length}"
            );
        }
        let refusal = set_api_level(&mut library(&["cuMemAlloc"]), 12_020).unwrap_err();
        assert!(refusal.to_string().contains(CUDA_VERSION), "{refusal}");
    }
}
