//! The keys in the table of pointers for things that are not pointers.

/// The kind of thing for which a key stands. Device addresses and the driver's handles are addresses
/// of user space, whose highest byte is 0.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(u64)]
pub enum Kind {
    Pool = 1,
    Array,
    Context,
    Primary,
    Graph,
    Executable,
    Tile,
    Module,
    Code,
    Limit,
    Local,
    Kernel,
    Import,
    CollectiveGraph,
}

/// The key in the table of pointers under which a handle is noted.
pub fn key(kind: Kind, handle: u64) -> u64 {
    handle ^ (kind as u64) << 56
}

/// Whether a key stands for a handle of this kind.
pub const fn is_of(key: u64, kind: Kind) -> bool {
    key >> 56 == kind as u64
}
