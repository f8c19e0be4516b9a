//! Functions of cuda.h that are not simulated; `build.rs` makes the list.

use tranche_simulator_machine::absent;

use crate::code::Code;

include!(concat!(env!("OUT_DIR"), "/absent.rs"));
