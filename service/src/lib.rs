//! Code that the processes of the node plugin and of the controller share: the log, the stop on a signal, and the time
//! of day.
#![forbid(unsafe_code)]

pub mod clock;
pub mod log;
pub mod stop;

pub use clock::Clock;
pub use log::LogFormat;
