//! The built libraries, in the layout of a capped container. Needs root, `make shim simulator`, a C compiler
//! and Debian's archive (for the real drivers).

mod cap;
mod closed;
mod loading;
mod real;
mod simulated;
