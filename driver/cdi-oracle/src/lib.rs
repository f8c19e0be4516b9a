//! Only tests, in `tests/`:
//!
//! ```console
//! cargo test --manifest-path driver/cdi-oracle/Cargo.toml --target-dir target/cdi-oracle
//! ```
//!
//! They judge the specs in `driver/testdata`, which the unit tests of tranche-driver hold to what it
//! writes.
#![forbid(unsafe_code)]
