//! Reads the nodes' usage from their plugins, for `usage-api`, which shows it, and for the controller's idle claims,
//! which act on it.
//!
//! [`plugins`] follows where the plugins are, [`reader`] asks them.
#![forbid(unsafe_code)]

pub mod plugins;
pub mod reader;

pub use plugins::Plugins;
pub use reader::Reader;
