//! Primary contexts.

use crate::code::Code;
use crate::device::device;
use crate::export::{export, put};
use crate::lifecycle::{
    primary, release_primary, reset_primary, retain_primary, set_primary_flags,
};
use crate::object::Handle;

export! {
    fn cuDevicePrimaryCtxRetain(to: *mut Handle, of: i32) {
        let device = device(of)?;
        if to.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        put(to, retain_primary(device)?.handle())
    }
    fn cuDevicePrimaryCtxRelease(of: i32) { release_primary(device(of)?) }
    fn cuDevicePrimaryCtxRelease_v2(of: i32) { release_primary(device(of)?) }
    fn cuDevicePrimaryCtxReset(of: i32) { reset_primary(device(of)?) }
    fn cuDevicePrimaryCtxReset_v2(of: i32) { reset_primary(device(of)?) }
    fn cuDevicePrimaryCtxSetFlags(of: i32, flags: u32) { set_primary_flags(device(of)?, flags) }
    fn cuDevicePrimaryCtxSetFlags_v2(of: i32, flags: u32) { set_primary_flags(device(of)?, flags) }
    fn cuDevicePrimaryCtxGetState(of: i32, flags: *mut u32, active: *mut i32) {
        let primary = primary(device(of)?)?;
        put(flags, primary.flags)?;
        put(active, i32::from(primary.context.is_some()))
    }
}
