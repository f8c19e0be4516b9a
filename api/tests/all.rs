//! The integration tests of this crate: one program, because linking one for each file takes longer than they do.

mod chart;
mod generated;
