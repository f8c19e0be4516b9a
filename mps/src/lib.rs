//! NVIDIA's MPS control daemon, one for each GPU with concurrent shares.
//!
//! ```text
//!  node plugin ── client ──► protocol (a socket) ──► server ──► supervisor ──► daemon ──► enter ──► nvidia-cuda-mps-control
//!                                                                               ├──► programs: where the driver has it
//!                                                                               └──► control: asks it, sets its limits
//! ```
//!
//! The supervisor is a process and a DaemonSet of its own, so that daemons and their clients live on while the node plugin
//! is updated (ADR 0032). It runs the driver's own programs and nothing in their place.
#![forbid(unsafe_code)]

pub mod client;
pub mod control;
pub mod daemon;
pub mod enter;
pub mod layout;
pub mod limits;
pub mod programs;
pub mod protocol;
pub mod server;
pub mod supervisor;
