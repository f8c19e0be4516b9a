//! The tests that need an API server and a scheduler and no node, one file per subject. `e2e/api/run` runs them.
#![allow(missing_docs)]

mod admission;
mod controller;
mod cordon;
mod examples;
mod explain;
mod kubectl;
mod published;
mod rights;
mod scheduling;
mod support;
