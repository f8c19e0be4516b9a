//! The createContainer hook.

fn main() {}
