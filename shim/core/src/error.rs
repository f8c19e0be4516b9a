//! Why a page is not usable.

use core::fmt;

/// Why bytes are not a page that this build can use, or why a value does not fit into one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PageError {
    /// The bytes have a wrong length.
    Length {
        /// The length that this build reads and writes, in bytes.
        expected: usize,
        /// The length that was given, in bytes.
        found: usize,
    },
    /// The first eight bytes are not the magic of this kind of page.
    Magic,
    /// The page was written for another version of the layout.
    Abi {
        /// The version this build knows.
        supported: u32,
        /// The version in the page.
        found: u32,
    },
    /// The page's checksum does not match its content: it was truncated or changed.
    Checksum,
    /// A text field is too long, empty where it must not be, or not UTF-8 padded with zeros.
    Text {
        /// The field.
        field: &'static str,
        /// The most bytes it can hold.
        capacity: usize,
    },
    /// The GPU's name is not a `GPU-…` or `MIG-…` UUID.
    Uuid,
    /// The memory limit is 0, which no share has.
    MemoryLimit,
    /// The limit of memory that cannot move is 0, or larger than the memory limit, or there is no memory limit.
    ResidentLimit,
    /// Cores are a percentage, 1 to 100.
    Cores {
        /// The value found.
        found: u32,
    },
    /// The part of the GPU's threads is a percentage, 1 to 100.
    MpsThreads {
        /// The value found.
        found: u32,
    },
    /// A compute policy this build does not know.
    ComputePolicy {
        /// The value found.
        found: u32,
    },
    /// A priority this build does not know, or one with a wrong floor.
    Priority {
        /// The priority found.
        found: u32,
        /// The floor found.
        floor: u32,
    },
}

/// A piece of a message. The shim composes messages without `core::fmt`, which would be a tenth of its
/// size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MessagePart<'a> {
    /// Words.
    Text(&'a str),
    /// A decimal number.
    Number(u64),
}

impl PageError {
    /// The message, piece by piece.
    #[must_use]
    pub fn parts(&self) -> [MessagePart<'static>; 5] {
        use MessagePart::{Number, Text};

        let number = |number: u32| Number(u64::from(number));
        let words = |words| [Text(words), Text(""), Text(""), Text(""), Text("")];
        match *self {
            Self::Length { expected, found } => [
                Text("the page has "),
                Number(found as u64),
                Text(" bytes, not "),
                Number(expected as u64),
                Text(""),
            ],
            Self::Magic => words("the file is not a page of Tranche"),
            Self::Abi { supported, found } => [
                Text("the page has layout version "),
                number(found),
                Text(", this build reads "),
                number(supported),
                Text(": run the same release on the node and in the container"),
            ],
            Self::Checksum => words("the page's checksum is wrong: it is incomplete or changed"),
            Self::Text { field, capacity } => [
                Text(field),
                Text(" must be UTF-8 of 1 to "),
                Number(capacity as u64),
                Text(" bytes"),
                Text(""),
            ],
            Self::Uuid => {
                words("the GPU's UUID must read GPU- or MIG- and 32 hex digits in five groups")
            }
            Self::MemoryLimit => words("the memory limit must be at least 1 byte"),
            Self::ResidentLimit => {
                words("the limit of resident memory must be 1 byte to the memory limit")
            }
            Self::Cores { found } => [
                Text("cores must be 1 to 100 percent, not "),
                number(found),
                Text(""),
                Text(""),
                Text(""),
            ],
            Self::MpsThreads { found } => [
                Text("the threads of MPS clients must be 1 to 100 percent, not "),
                number(found),
                Text(""),
                Text(""),
                Text(""),
            ],
            Self::ComputePolicy { found } => [
                Text("compute policy "),
                number(found),
                Text(" is unknown"),
                Text(""),
                Text(""),
            ],
            Self::Priority { found, floor } => [
                Text("unknown priority "),
                number(found),
                Text(" with floor "),
                number(floor),
                Text(""),
            ],
        }
    }
}

impl fmt::Display for PageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.parts().iter().try_for_each(|part| match part {
            MessagePart::Text(text) => f.write_str(text),
            MessagePart::Number(number) => write!(f, "{number}"),
        })
    }
}

impl core::error::Error for PageError {}
