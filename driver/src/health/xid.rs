//! The Xids of NVIDIA's driver that say something about the GPU, and what they mean for it.
//!
//! The source is NVIDIA's catalogue (docs.nvidia.com/deploy/xid-errors, "Analyzing Xid Errors with the Xid Catalog"), column
//! "Immediate Action". An Xid that is not listed changes nothing: most of those are errors of programs, and a driver that
//! reports recovery actions (565 and later) says itself when the GPU needs one.

use super::Severity;

/// A row of the catalogue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Xid {
    /// The number.
    pub number: u32,
    /// What happened.
    pub meaning: &'static str,
    /// The catalogue's immediate action.
    pub action: &'static str,
    /// What it means for the GPU.
    pub severity: Severity,
}

/// The rows, by number.
pub const TABLE: &[Xid] = &[
    row(
        13,
        "graphics engine exception",
        "RESTART_APP",
        Severity::None,
    ),
    row(31, "GPU memory page fault", "RESTART_APP", Severity::None),
    row(43, "GPU stopped processing", "IGNORE", Severity::None),
    row(
        45,
        "preemptive removal of a channel, after an earlier error",
        "WORKFLOW_XID_45",
        Severity::None,
    ),
    row(46, "GPU timeout", "RESET_GPU", Severity::Broken),
    row(
        48,
        "double-bit ECC error",
        "WORKFLOW_XID_48: RESET_GPU",
        Severity::Broken,
    ),
    row(
        62,
        "the internal microcontroller halted",
        "RESET_GPU",
        Severity::Broken,
    ),
    // The remapping itself waits for a reset: NVML reports that as pending.
    row(63, "row remapping recorded", "IGNORE", Severity::None),
    row(64, "row remapping failed", "RESET_GPU", Severity::Degraded),
    row(
        74,
        "NVLink error",
        "WORKFLOW_NVLINK_ERR",
        Severity::Degraded,
    ),
    row(
        79,
        "the GPU has fallen off the bus",
        "RESTART_BM",
        Severity::Broken,
    ),
    row(
        92,
        "high rate of single-bit ECC errors",
        "IGNORE",
        Severity::None,
    ),
    row(94, "contained memory error", "RESTART_APP", Severity::None),
    row(
        95,
        "uncontained memory error",
        "RESET_GPU",
        Severity::Broken,
    ),
    // A reset is advised for drivers since 570, which report the recovery action.
    row(109, "context switch timeout", "RESET_GPU", Severity::None),
    row(110, "security fault", "RESET_GPU", Severity::Broken),
    row(
        119,
        "timeout of a call of the GPU's system processor (GSP)",
        "RESET_GPU",
        Severity::Broken,
    ),
    row(
        120,
        "error of the GPU's system processor (GSP)",
        "RESET_GPU",
        Severity::Broken,
    ),
    row(
        136,
        "NVLink training failed",
        "RESET_GPU",
        Severity::Degraded,
    ),
    row(140, "unrecovered ECC error", "RESET_GPU", Severity::Broken),
    row(
        143,
        "GPU initialization failed",
        "RESET_GPU",
        Severity::Broken,
    ),
    // The action is read from NVML.
    row(
        154,
        "the recovery action changed",
        "XID_154",
        Severity::None,
    ),
    row(
        155,
        "NVLink error that software defines",
        "RESET_GPU",
        Severity::Degraded,
    ),
    row(
        156,
        "a resource was retired",
        "RESET_GPU",
        Severity::Degraded,
    ),
    row(158, "fatal timeout", "RESET_GPU", Severity::Broken),
];

const fn row(number: u32, meaning: &'static str, action: &'static str, severity: Severity) -> Xid {
    Xid {
        number,
        meaning,
        action,
        severity,
    }
}

/// The row of an Xid.
#[must_use]
pub fn find(number: u32) -> Option<&'static Xid> {
    let found = TABLE.binary_search_by_key(&number, |row| row.number);
    found.ok().and_then(|index| TABLE.get(index))
}
