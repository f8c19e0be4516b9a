//! The CUDA program that the suite's pods run.

fn main() {}
