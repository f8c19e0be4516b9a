//! GpuNode and SharingPolicy to ResourceSlices.

fn main() {}
