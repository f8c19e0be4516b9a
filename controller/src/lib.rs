//! GpuNode and SharingPolicy to ResourceSlices.
//!
//! ```text
//!  watches ──► feed ──► index ──► queue ──► reconcile ──► step ──► apply ──► API server
//!                         ▲                    │ pure:                          │
//!                         │                    │ phase, plan, difference        │
//!                         └────────────────────┴────── the watches deliver ◄────┘
//! ```
//!
//! * [`feed`] watches GpuNodes, SharingPolicies, Nodes and our driver's ResourceSlices.
//! * [`known`] says what is kept of each object, [`index`] holds it by node, and [`queue`] says which node is next.
//! * [`reconcile`] decides one step for one node from everything that is known, with [`pool`] for the
//!   difference between slices and [`withdrawn`] for devices that may not disappear yet.
//! * [`apply`] executes the step; [`controller`] is the loop around all of it.
//! * [`idle`] runs beside this: it reports claims that do nothing, and evicts their pods where a policy says so.
//! * [`pending`] counts the pods that wait for claims of our classes, where that is asked for.
//! * [`leader`] lets one replica write. The others follow with a warm index.
//!
//! In a steady state nothing is written: a step follows only from a difference between values.
#![forbid(unsafe_code)]
#![allow(missing_docs, reason = "only its own program and tests import it")]

pub mod apply;
pub mod args;
pub mod controller;
pub mod feed;
pub mod http;
pub mod idle;
pub mod index;
pub mod known;
pub mod leader;
pub mod metrics;
pub mod mirror;
pub mod offered;
pub mod pending;
pub mod pool;
pub mod queue;
pub mod reconcile;
pub mod withdrawn;
