//! A simulated `libnvidia-ml.so.1`: NVML over the simulated machine's shared page.
//!
//! A client calls an exported function. [`state`] finds the page and the GPU of the handle. The function reads the page and
//! answers as driver 535 does. The only state here is which GPUs this process can see, and the
//! handles of MIG instances ([`handles`]).
//!
//! Functions of driver 535 that are not simulated return `NVML_ERROR_NOT_SUPPORTED` ([`absent`]), as for a GPU without the
//! feature. Names and signatures are those of nvml.h, where they are documented.
#![allow(non_snake_case, reason = "nvml.h spells these names")]

mod absent;
mod code;
mod events;
mod export;
mod fields;
mod gpm;
mod handles;
mod identity;
mod internal;
mod memory;
mod mig;
mod modes;
mod processes;
mod sensors;
mod state;
mod system;
mod topology;
