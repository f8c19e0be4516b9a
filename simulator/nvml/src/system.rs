//! The driver and the system.

use std::ffi::c_char;

use crate::code::Code;
use crate::export::{export, put, put_text};
use crate::state::library;

/// Writes the driver's CUDA version.
fn cuda_version(version: *mut i32) -> Result<(), Code> {
    let value = library()?.shared.header.cuda_version;
    // SAFETY: the caller's contract, passed on by the exported functions.
    unsafe { put(version, value.cast_signed()) }
}

export! {
    fn nvmlSystemGetDriverVersion(version: *mut c_char, length: u32) {
        put_text(version, length, library()?.shared.header.driver_version.as_str())
    }
    fn nvmlSystemGetNVMLVersion(version: *mut c_char, length: u32) {
        // NVML's version is CUDA's major version followed by the driver's version.
        let header = &library()?.shared.header;
        let text = format!("{}.{}", header.cuda_version / 1000, header.driver_version.as_str());
        put_text(version, length, &text)
    }
    fn nvmlSystemGetCudaDriverVersion(version: *mut i32) { cuda_version(version) }
    fn nvmlSystemGetCudaDriverVersion_v2(version: *mut i32) { cuda_version(version) }
    fn nvmlSystemGetProcessName(pid: u32, name: *mut c_char, length: u32) {
        library()?;
        let text = process_name(pid).ok_or(Code::NOT_FOUND)?;
        // Unlike other functions, this one cuts a text that does not fit.
        let mut end = text.len().min((length as usize).saturating_sub(1));
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        put_text(name, length, &text[..end])
    }
    fn nvmlUnitGetCount(count: *mut u32) {
        library()?;
        put(count, 0)
    }
    fn nvmlGetExcludedDeviceCount(count: *mut u32) { put(count, 0) }
    fn nvmlSystemGetConfComputeState(state: *mut [u32; 3]) {
        library()?;
        // Environment, feature and tools mode: all off.
        put(state, [0; 3])
    }
    fn nvmlSystemGetNvlinkBwMode(mode: *mut u32) {
        library()?;
        put(mode, 0)
    }
}

/// The program of a process, if this PID namespace has it.
pub fn process_name(pid: u32) -> Option<String> {
    let line = std::fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let program = line.split(|b| *b == 0).next()?;
    (!program.is_empty()).then(|| String::from_utf8_lossy(program).into_owned())
}
