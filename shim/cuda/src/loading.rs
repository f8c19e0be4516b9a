//! Charges devices with what modules and libraries need.

use tranche_shim_core::image::Needs;

use crate::abi::CUresult;
use crate::charge::lower_floors;
use crate::contexts::has_primary;
use crate::device::Device;
use crate::driver::Call;
use crate::driver_pools::State;
use crate::pool_allocator::PoolAllocator;
use crate::process::Process;

/// Charges the devices whose bits are set with what a module needs, and then calls the driver.
pub fn raise(process: &'static Process, needs: Needs, devices: u64, driver: Call<'_>) -> CUresult {
    let code = || raise_from(process, (State::Code, needs.code), devices, driver);
    let data = (State::Modules, needs.data);
    raise_from(process, data, devices, Call::of(&code))
}

/// The same for one of the two sums. Each call charges the first of the devices.
fn raise_from(
    process: &'static Process,
    sum: (State, u64),
    devices: u64,
    driver: Call<'_>,
) -> CUresult {
    let (state, bytes) = sum;
    let mut charged = process
        .devices()
        .filter(|device| bytes > 0 && device.is_capped() && devices & device.bit() != 0);
    let Some(device) = charged.next() else {
        return driver.make();
    };
    let rest = || raise_from(process, sum, devices & !device.bit(), driver);
    match PoolAllocator::of_device(state, process, device) {
        Ok(allocator) => allocator.raise_floor(bytes, Call::of(&rest)),
        Err(code) => code,
    }
}

/// Charges a device with all libraries, if they are not charged on it yet.
pub fn reach(process: &'static Process, device: &Device) -> Result<(), CUresult> {
    let bit = device.bit();
    while device.is_capped() {
        let (devices, needs) = process
            .libraries
            .with(|libraries| (libraries.devices, libraries.needs));
        if devices & bit != 0 {
            break;
        }
        let nothing = || CUresult::SUCCESS;
        let raised = raise(process, needs, bit, Call::of(&nothing));
        if !raised.is_ok() {
            return Err(raised);
        }
        let is_reached = process.libraries.with(|libraries| {
            let is_reached = libraries.devices & bit == 0 && libraries.needs == needs;
            if is_reached {
                libraries.devices |= bit;
            }
            is_reached
        });
        if is_reached {
            break;
        }
        // Another thread has reached it, loaded a library or unloaded one meanwhile.
        lower(process, needs, bit);
    }
    Ok(())
}

/// Gives back the charge of all libraries on a device whose last context has ended. While another one is loaded, they stay
/// charged.
#[inline(never)]
pub fn leave(process: &Process, device: &Device) {
    let bit = device.bit();
    // A call that makes a context has noted that before it looks here.
    let left = process.libraries.with(|libraries| {
        let is_left = libraries.loading == 0
            && libraries.devices & bit != 0
            && !process.fitting.has_contexts(device);
        libraries.devices &= !(bit * u64::from(is_left));
        is_left.then_some(libraries.needs)
    });
    if let Some(needs) = left {
        lower(process, needs, bit);
    }
}

/// Loads a library by a call that also charges the devices of some bits. `needs_on` is what it needs on a device.
pub fn load_library(
    process: &'static Process,
    needs_on: &dyn Fn(&Device) -> Needs,
    load: &dyn Fn(Needs, u64) -> CUresult,
) -> CUresult {
    let (mut needs, mut known) = (Needs::default(), None);
    let reached = process.libraries.with(|libraries| libraries.devices);
    for device in process.devices().filter(|device| device.is_capped()) {
        if known.replace(device.architecture) != Some(device.architecture) {
            needs = needs.larger(needs_on(device));
        }
        // The runtime may have made a primary context by functions that only it knows.
        if reached & device.bit() == 0
            && has_primary(device.handle)
            && let Err(code) = reach(process, device)
        {
            return code;
        }
    }
    // First added, so that a thread that reaches a further device charges it there.
    let devices = process.libraries.with(|libraries| {
        libraries.needs = libraries.needs.plus(needs);
        libraries.loading += 1;
        libraries.devices
    });
    let result = load(needs, devices);
    let more = process.libraries.with(|libraries| {
        libraries.loading -= 1;
        if result.is_ok() {
            return 0;
        }
        libraries.remove(State::Code, needs.code);
        libraries.remove(State::Modules, needs.data) & !devices
    });
    lower(process, needs, more);
    result
}

fn lower(process: &Process, needs: Needs, devices: u64) {
    lower_floors(process, State::Modules, needs.data, devices);
    lower_floors(process, State::Code, needs.code, devices);
}
