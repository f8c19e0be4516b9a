//! Where SPECIFICATION.md's numbers come from.

fn main() {}
