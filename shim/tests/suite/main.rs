//! The built libraries, in the layout of a capped container. Needs root, `make shim simulator`, a C compiler
//! and Debian's archive (for the real drivers).
#![allow(clippy::unwrap_used, reason = "a test that cannot be set up fails")]

mod callbacks;
mod cap;
mod closed;
mod code;
mod compute;
mod counted;
mod dma_buf;
mod escape;
mod families;
mod habits;
mod image;
mod layers;
mod lifecycle;
mod loading;
mod local;
mod managed;
mod monitors;
mod mps;
mod multicast;
mod nvml;
mod pools;
mod priority;
mod programs;
mod real;
mod runtimes;
mod sanitizers;
mod simulated;
mod spares;
mod storm;
