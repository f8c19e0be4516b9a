//! The driver's version in the libraries' files.
//!
//! Each of a real driver's libraries is built for one version. NVML works only with the kernel driver of that version,
//! libcuda also with an older one (forward compatibility). Both rules matter if a node's driver is updated while containers
//! have the old files.

use std::cmp::Ordering;
use std::sync::atomic::{AtomicU8, Ordering::Relaxed};

/// Bytes of a version's text, with a final zero.
pub const BYTES: usize = 32;

/// The version in a library's file, where `install-root` writes it. It is empty in a library as it was built, which works
/// with every kernel driver.
#[derive(Debug)]
#[repr(transparent)]
pub struct LibraryVersion([AtomicU8; BYTES]);

impl LibraryVersion {
    /// The version of a library that was not installed yet: empty.
    #[must_use]
    #[expect(clippy::new_without_default, reason = "for statics only")]
    pub const fn new() -> Self {
        Self([const { AtomicU8::new(0) }; BYTES])
    }

    /// Compares this version with the kernel driver's.
    #[must_use]
    pub fn compared_with(&self, kernel: &str) -> Ordering {
        let bytes: Vec<u8> = self.0.iter().map(|byte| byte.load(Relaxed)).collect();
        let text = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
        match std::str::from_utf8(text) {
            Ok("") | Err(_) => Ordering::Equal,
            Ok(version) => numbers(version).cmp(numbers(kernel)),
        }
    }
}

fn numbers(version: &str) -> impl Iterator<Item = u32> {
    version
        .split('.')
        .map(|number| number.parse().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_compared_by_their_numbers() {
        let library = LibraryVersion::new();
        assert_eq!(library.compared_with("535.261.03"), Ordering::Equal);
        for (place, byte) in library.0.iter().zip("535.261.03".bytes()) {
            place.store(byte, Relaxed);
        }
        for (kernel, order) in [
            ("535.261.03", Ordering::Equal),
            ("535.54.14", Ordering::Greater),
            ("535.261.4", Ordering::Less),
            ("550.54.15", Ordering::Less),
        ] {
            assert_eq!(library.compared_with(kernel), order, "{kernel}");
        }
    }
}
