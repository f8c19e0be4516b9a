//! Host functions and callbacks of streams.

use std::ffi::c_void;

use crate::code::Code;
use crate::export::export;
use crate::graph::Node;
use crate::host::HostFunction;
use crate::object::{Handle, Token};
use crate::stream;
use crate::work;

type Callback = unsafe extern "C" fn(Handle, u32, *mut c_void);

export! {
    fn cuLaunchHostFunc, cuLaunchHostFunc_ptsz [stream] (stream: Handle, function: Option<HostFunction>, data: *mut c_void) {
        let stream = stream::find(stream)?;
        let function = function.ok_or(Code::INVALID_VALUE)?;
        let node = Node::Host { function, data: Token(data) };
        work::submit(&node, stream)
    }
    fn cuStreamAddCallback, cuStreamAddCallback_ptsz [stream] (stream: Handle, function: Option<Callback>, data: *mut c_void, _flags: u32) {
        let given = Token(stream);
        let stream = stream::find(stream)?;
        let function = function.ok_or(Code::INVALID_VALUE)?;
        let data = Token(data);
        stream.enqueue(Box::new(move || {
            let (given, data) = (given, data);
            // SAFETY: the program's function with the program's arguments.
            unsafe { function(given.0, 0, data.0) };
        }));
        Ok(())
    }
}
