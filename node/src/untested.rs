//! Finds functions of the driver that the shim does not know.
//!
//! The shim has a row for every function of the drivers that it was made for. A newer driver may export
//! more functions, and memory that they allocate would not be counted. So the functions of the node's
//! libcuda are compared with the rows, and unknown ones are reported to the cluster.

use std::fs::File;
use std::path::PathBuf;

use object::read::elf::ElfFile64;
use object::{Endianness, Object as _, ObjectSymbol as _, ReadCache, SymbolKind};
use tranche_shim_coverage::{Coverage, CoverageError};

use crate::discover::Found;
use crate::root::DriverRoot;

/// Why the driver's functions are not known.
#[derive(Debug, thiserror::Error)]
pub enum UntestedError {
    /// The library is missing or cannot be read.
    #[error("{path}: {source}: is the driver installed completely?")]
    Unreadable {
        /// The library as this process sees it.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// It is not a library.
    #[error("{path}: {source}: not a shared library: is the driver installed completely?")]
    NoLibrary {
        /// The library as this process sees it.
        path: PathBuf,
        /// Why not.
        source: object::Error,
    },
    /// The rows could not be read. The build of the shim's libraries reads them, too.
    #[error(transparent)]
    Coverage(#[from] CoverageError),
}

/// The functions that this driver's libcuda exports and the shim has no row for, sorted.
pub fn unknown_functions(root: &DriverRoot, found: &Found) -> Result<Vec<String>, UntestedError> {
    let coverage = Coverage::cuda()?;
    // `discover` found one.
    let Some(library) = found.libraries.iter().find(|path| {
        path.file_name()
            .is_some_and(|name| name.to_string_lossy().starts_with("libcuda.so."))
    }) else {
        return Ok(Vec::new());
    };
    let path = root.here(library);
    let file = File::open(&path).map_err(|source| UntestedError::Unreadable {
        path: path.clone(),
        source,
    })?;
    let cache = ReadCache::new(file);
    let elf = ElfFile64::<Endianness, _>::parse(&cache)
        .map_err(|source| UntestedError::NoLibrary { path, source })?;
    let mut unknown: Vec<String> = elf
        .dynamic_symbols()
        .filter(|symbol| symbol.is_definition() && symbol.kind() == SymbolKind::Text)
        .filter_map(|symbol| symbol.name().ok())
        .filter(|name| name.starts_with("cu") && !coverage.knows(name))
        .map(str::to_owned)
        .collect();
    unknown.sort();
    unknown.dedup();
    Ok(unknown)
}

#[cfg(any(test, feature = "testing"))]
#[allow(
    clippy::unwrap_used,
    clippy::missing_panics_doc,
    reason = "a test that cannot be set up fails"
)]
pub mod testing {
    //! The file of a driver's library, for tests.

    /// A shared library that exports these functions and has nothing else.
    #[must_use]
    pub fn library(functions: &[&str]) -> Vec<u8> {
        const HEADER: usize = 64;
        let (mut symbols, mut strings) = (vec![0; 24], vec![0]);
        for name in functions {
            symbols.extend(u32::try_from(strings.len()).unwrap().to_le_bytes());
            // A global function of the section behind the null one, at its start, one byte long.
            symbols.extend([0x12, 0, 1, 0]);
            symbols.extend(0_u64.to_le_bytes());
            symbols.extend(1_u64.to_le_bytes());
            strings.extend(name.bytes().chain([0]));
        }
        let section = |kind: u32, at: usize, len: usize, link: u32, info: u32, entry: u64| {
            let mut bytes = vec![0; 4];
            bytes.extend(kind.to_le_bytes());
            bytes.extend([0; 16]);
            bytes.extend((at as u64).to_le_bytes());
            bytes.extend((len as u64).to_le_bytes());
            bytes.extend(link.to_le_bytes());
            bytes.extend(info.to_le_bytes());
            bytes.extend(1_u64.to_le_bytes());
            bytes.extend(entry.to_le_bytes());
            bytes
        };
        let (at_strings, at_sections) = (
            HEADER + symbols.len(),
            HEADER + symbols.len() + strings.len(),
        );
        let sections = [
            vec![0; 64],
            section(11, HEADER, symbols.len(), 2, 1, 24),
            section(3, at_strings, strings.len(), 0, 0, 0),
        ];
        let mut file = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
        // A shared library for x86_64.
        file.extend([3, 0, 62, 0, 1, 0, 0, 0]);
        file.extend([0; 16]);
        file.extend((at_sections as u64).to_le_bytes());
        file.extend([0; 4]);
        // The sizes of this header, of no program header, and of three section headers.
        file.extend([64, 0, 56, 0, 0, 0, 64, 0, 3, 0, 2, 0]);
        assert_eq!(file.len(), HEADER);
        file.extend(symbols);
        file.extend(strings);
        file.extend(sections.concat());
        file
    }
}

#[cfg(test)]
mod tests {
    use super::testing::library;
    use super::*;
    use crate::discover::discover;
    use crate::testing::{DEBIAN_535, lay_out};

    const LIBCUDA: &str = "usr/lib/x86_64-linux-gnu/nvidia/current/libcuda.so.535.261.03";

    fn unknown(libcuda: &[u8]) -> Result<Vec<String>, UntestedError> {
        let dir = tempfile::tempdir().unwrap();
        lay_out(dir.path(), DEBIAN_535);
        std::fs::write(dir.path().join(LIBCUDA), libcuda).unwrap();
        let root = DriverRoot::open(dir.path()).unwrap();
        let found = discover(&root, "535.261.03").unwrap();
        unknown_functions(&root, &found)
    }

    #[test]
    fn a_driver_with_known_functions_is_a_tested_one() {
        let known = library(&["cuInit", "cuMemAlloc_v2", "nvSomething"]);
        assert_eq!(unknown(&known).unwrap(), Vec::<String>::new());
    }

    #[test]
    fn what_no_row_knows_is_named() {
        let newer = library(&["cuMemAlloc_v9", "cuInit", "cuAskTheFuture"]);
        assert_eq!(
            unknown(&newer).unwrap(),
            ["cuAskTheFuture", "cuMemAlloc_v9"]
        );
    }

    #[test]
    fn a_file_that_is_not_a_library_is_refused() {
        for broken in [&b""[..], b"#!/bin/sh\n", &library(&["cuInit"])[..100]] {
            let error = unknown(broken).unwrap_err().to_string();
            assert!(
                error.contains(LIBCUDA) && error.contains("installed completely"),
                "{error}"
            );
        }
    }
}
