//! A simulated `libnvidia-ml.so.1`: NVML over the simulated machine's shared page.
//!
//! A real client calls an exported function; [`state`] finds the page and the GPU
//! behind the handle; the function reads the page and answers as driver 535 does.
//! Nothing is kept here but which GPUs this process can see.
//!
//! Functions that driver 535 exports and the simulator has no answer for say
//! `NVML_ERROR_NOT_SUPPORTED` ([`absent`]), which is what a GPU without the
//! feature says. Names and signatures are nvml.h's; see there for what they mean.
#![allow(non_snake_case, reason = "nvml.h spells these names")]

mod absent;
mod code;
mod events;
mod export;
mod fields;
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
