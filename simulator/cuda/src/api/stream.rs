//! Streams.

use crate::code::Code;
use crate::driver::driver;
use crate::export::{export, put, put_wanted};
use crate::memory;
use crate::object::{Handle, Object};
use crate::stream::{self, Stream};

export! {
    fn cuStreamCreate(to: *mut Handle, flags: u32) { put(to, stream::create(flags, 0)?) }
    fn cuStreamCreateWithPriority(to: *mut Handle, flags: u32, priority: i32) {
        put(to, stream::create(flags, priority)?)
    }
    fn cuStreamDestroy(stream: Handle) {
        driver()?;
        Object::<Stream>::find(stream)?.destroy();
        Ok(())
    }
    fn cuStreamDestroy_v2(stream: Handle) {
        driver()?;
        Object::<Stream>::find(stream)?.destroy();
        Ok(())
    }
    fn cuStreamSynchronize, cuStreamSynchronize_ptsz [stream] (stream: Handle) {
        let stream = stream::find(stream)?;
        if stream.is_capturing() {
            return Err(Code::STREAM_CAPTURE_UNSUPPORTED);
        }
        stream.synchronize();
        memory::trim_pools_after_wait(stream.context.device);
        stream.context.device.check()
    }
    fn cuStreamQuery, cuStreamQuery_ptsz [stream] (stream: Handle) {
        if stream::find(stream)?.is_idle() { Ok(()) } else { Err(Code::NOT_READY) }
    }
    fn cuStreamGetPriority, cuStreamGetPriority_ptsz [stream] (stream: Handle, priority: *mut i32) {
        put(priority, stream::find(stream)?.priority)
    }
    fn cuStreamGetFlags, cuStreamGetFlags_ptsz [stream] (stream: Handle, flags: *mut u32) {
        put(flags, stream::find(stream)?.flags)
    }
    fn cuStreamGetId, cuStreamGetId_ptsz [stream] (stream: Handle, id: *mut u64) {
        put(id, stream::find(stream)?.id)
    }
    fn cuStreamGetCtx, cuStreamGetCtx_ptsz [stream] (stream: Handle, to: *mut Handle) {
        put(to, stream::find(stream)?.context.handle())
    }
    fn cuStreamGetCtx_v2, cuStreamGetCtx_v2_ptsz [stream] (stream: Handle, to: *mut Handle, green: *mut Handle) {
        put(to, stream::find(stream)?.context.handle())?;
        put_wanted(green, std::ptr::null_mut());
        Ok(())
    }
    fn cuStreamGetDevice, cuStreamGetDevice_ptsz [stream] (stream: Handle, to: *mut i32) {
        put(to, stream::find(stream)?.context.device.ordinal)
    }
    fn cuStreamAttachMemAsync, cuStreamAttachMemAsync_ptsz [stream] (stream: Handle, _address: u64, _bytes: usize, _flags: u32) {
        stream::find(stream).map(drop)
    }
    fn cuStreamCopyAttributes, cuStreamCopyAttributes_ptsz [to] (to: Handle, from: Handle) {
        stream::find(to)?;
        stream::find(from).map(drop)
    }
    fn cuStreamGetAttribute, cuStreamGetAttribute_ptsz [stream] (stream: Handle, _which: u32, value: *mut [u8; 64]) {
        stream::find(stream)?;
        put(value, [0; 64])
    }
    fn cuStreamSetAttribute, cuStreamSetAttribute_ptsz [stream] (stream: Handle, _which: u32, _value: *const [u8; 64]) {
        stream::find(stream).map(drop)
    }
}
