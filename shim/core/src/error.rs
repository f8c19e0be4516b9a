//! Why a page is not usable.

use core::fmt;

/// Why bytes are not a page this build can use, or a value does not fit into one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PageError {
    /// The bytes have another length than the layout's.
    Length {
        /// What this build reads and writes, in bytes.
        expected: usize,
        /// What was given, in bytes.
        found: usize,
    },
    /// The first eight bytes name no page of this kind.
    Magic,
    /// The page was written for another version of the layout.
    Abi {
        /// The version this build knows.
        supported: u32,
        /// The version in the page.
        found: u32,
    },
    /// The page's checksum is not that of its content: it was cut off or changed.
    Checksum,
    /// A text field is too long, empty where it must not be, or not UTF-8 padded with zeros.
    Text {
        /// The field.
        field: &'static str,
        /// The most bytes it can hold.
        capacity: usize,
    },
    /// The GPU's name is no `GPU-…` or `MIG-…` UUID.
    Uuid,
    /// The memory limit is 0, which no share has.
    MemoryLimit,
    /// Cores are a percentage, 1 to 100.
    Cores {
        /// The value found.
        found: u32,
    },
    /// A compute policy this build does not know.
    ComputePolicy {
        /// The value found.
        found: u32,
    },
}

impl fmt::Display for PageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Length { expected, found } => {
                write!(f, "the page has {found} bytes, not {expected}")
            }
            Self::Magic => f.write_str("the file is no page of Tranche"),
            Self::Abi { supported, found } => write!(
                f,
                "the page has layout version {found}, this build reads {supported}: \
                 run the same release on the node and in the container"
            ),
            Self::Checksum => {
                f.write_str("the page's checksum is wrong: it is incomplete or changed")
            }
            Self::Text { field, capacity } => {
                write!(f, "{field} must be UTF-8 of 1 to {capacity} bytes")
            }
            Self::Uuid => f.write_str(
                "the GPU's UUID must read GPU- or MIG- and 32 hex digits in five groups",
            ),
            Self::MemoryLimit => f.write_str("the memory limit must be at least 1 byte"),
            Self::Cores { found } => write!(f, "cores must be 1 to 100 percent, not {found}"),
            Self::ComputePolicy { found } => write!(f, "compute policy {found} is unknown"),
        }
    }
}

impl core::error::Error for PageError {}
