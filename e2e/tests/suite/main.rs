//! The end-to-end suite, one file per subject. `tranche_e2e` describes what it needs.
#![allow(missing_docs)]

mod audit;
mod cap;
mod capabilities;
mod clients;
mod compute;
mod concurrent;
mod controller;
mod driver;
mod eight_gpus;
mod examples;
mod exclusive;
mod image;
mod isolation;
mod kubectl;
mod kubelet;
mod many;
mod metrics;
mod nodes;
mod oversubscribed;
mod partition;
mod passthrough;
mod plugin;
mod pods;
mod published;
mod refused;
mod release;
mod rights;
mod runtimes;
mod scheduling;
mod shared_partition;
mod shares;
mod upgrade;
mod watchdog;
mod who_has_what;
mod withheld;
