//! Libraries. They belong to no context: the driver loads them into each context that uses them, also into later ones.
//! So they are charged on the devices on which the process has made a context, once on each: those that it has when a
//! library is loaded, and each further one before its first context is made. With the last context of a device the driver
//! unloads them there.

use tranche_shim_core::image::Needs;

use crate::driver_pools::State;

/// The libraries of a process. All zeros means none.
pub struct Libraries {
    /// What they need together on each device.
    pub needs: Needs,
    /// A bit for each device on which they are charged.
    pub devices: u64,
    /// Calls in progress that load one.
    pub loading: u32,
}

impl Libraries {
    /// Takes a library's variables or code out of the sum; returns the devices on which they are charged.
    pub fn remove(&mut self, state: State, bytes: u64) -> u64 {
        let sum = match state {
            State::Code => &mut self.needs.code,
            _ => &mut self.needs.data,
        };
        *sum = sum.saturating_sub(bytes);
        self.devices
    }
}
