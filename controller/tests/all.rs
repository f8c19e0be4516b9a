//! The integration tests of this crate: one program, because linking one for each file takes longer than they do.

mod election;
mod model;
mod pending;
mod publishing;
mod support;
