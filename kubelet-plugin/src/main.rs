//! ResourceClaim to ready device.

fn main() {}
