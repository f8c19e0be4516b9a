//! The daemon that owns the simulated machine.

fn main() {}
