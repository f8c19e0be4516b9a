//! A claim's way from the kubelet's call to ready devices, and back.

pub mod dra;
pub mod executor;
pub mod orphans;
pub mod preparer;
pub mod reporter;
pub mod restorer;
pub mod spec_file;
