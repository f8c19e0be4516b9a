//! TLS, authorization, the log, the stop on a signal and the time of day, for each of our processes that serves
//! something.
//!
//! ```text
//!  a reader ─► tls ─► connections ─► server ─► access ─► the metrics' text
//!              (each costs little)              └─ TokenReview, SubjectAccessReview ─► API server
//! ```
//!
//! [`client`] reads what another of our processes serves. [`log`], [`stop`] and [`clock`] are for the process itself.
#![forbid(unsafe_code)]

pub mod access;
pub mod client;
pub mod clock;
mod connections;
mod listen;
pub mod log;
pub mod server;
pub mod stop;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod tls;

pub use clock::Clock;
pub use listen::listen;
pub use log::LogFormat;
