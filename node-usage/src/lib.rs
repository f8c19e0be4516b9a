//! Reads the nodes' usage from their plugins, for those who show it (`usage-api`) and those who act on it (the controller's idle
//! claims).
//!
//! [`plugins`] follows where the plugins are, [`reader`] asks them.
#![forbid(unsafe_code)]

pub mod plugins;
pub mod reader;

pub use plugins::Plugins;
pub use reader::Reader;
