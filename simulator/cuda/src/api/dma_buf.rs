//! Handles of address ranges.

use std::os::fd::IntoRawFd as _;

use crate::code::Code;
use crate::dma_buf;
use crate::driver::driver;
use crate::export::{export, put};

/// `CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD`
const DMA_BUF_FD: u32 = 1;

export! {
    fn cuMemGetHandleForAddressRange(to: *mut i32, start: u64, bytes: usize, kind: u32, flags: u64) {
        driver()?;
        if kind != DMA_BUF_FD || flags != 0 || to.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        put(to, dma_buf::make(start, bytes as u64)?.into_raw_fd())
    }
}
