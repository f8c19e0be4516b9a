//! The graph pools of GPUs.

use crate::code::Code;
use crate::device::device;
use crate::export::{export, get, put};

export! {
    fn cuDeviceGetGraphMemAttribute(of: i32, which: u32, value: *mut u64) {
        put(value, device(of)?.graph_pool().attribute(which)?)
    }
    fn cuDeviceSetGraphMemAttribute(of: i32, which: u32, value: *const u64) {
        let device = device(of)?;
        // The high-water marks can only be reset.
        if !matches!(which, 1 | 3) || get(value)? != 0 {
            return Err(Code::INVALID_VALUE);
        }
        device.graph_pool().reset_high(which);
        Ok(())
    }
    fn cuDeviceGraphMemTrim(of: i32) {
        let device = device(of)?;
        // Locked until the GPU has it back, so that no query sees a smaller pool before that.
        let mut pool = device.graph_pool();
        device.release(pool.trim());
        Ok(())
    }
}
