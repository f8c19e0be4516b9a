//! A kernel that keeps the GPU busy for a known time, and every way to launch it.
#![allow(unsafe_code)]

use std::ffi::CString;
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, bail};
use clap::ValueEnum;
use cudarc::driver::result::{self, DriverError};
use cudarc::driver::{CudaEvent, CudaGraph, CudaStream, sys};
use serde::Serialize;

use crate::gpu::{Gpu, named};

/// The driver's call that launches a kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Launch {
    /// `cuLaunchKernel`
    Plain,
    /// `cuLaunchCooperativeKernel`
    Cooperative,
    /// `cuLaunchKernelEx`
    Ex,
    /// `cuGraphLaunch`, of a graph of [`GRAPH_NODES`] kernels
    Graph,
}

/// Kernels in a graph.
pub const GRAPH_NODES: u64 = 10;

/// A kernel with a way to launch it.
pub struct Kernel {
    stream: Arc<CudaStream>,
    launch: Launch,
    function: sys::CUfunction,
    graph: Option<CudaGraph>,
}

/// A kernel's name and its code in PTX.
struct Source {
    name: String,
    code: String,
}

/// One thread of one block looks at the GPU's clock until the time is over.
fn busy(nanos: u128) -> Source {
    Source {
        name: format!("sim_busy_{nanos}ns"),
        code: format!(
            ".reg .u64 %now, %end; .reg .pred %busy;\n\
             mov.u64 %now, %globaltimer; add.u64 %end, %now, {nanos};\n\
             again: mov.u64 %now, %globaltimer; setp.lt.u64 %busy, %now, %end; @%busy bra again;\n"
        ),
    }
}

/// One thread of one block writes to address 16, which no allocation has.
fn illegal() -> Source {
    Source {
        name: "sim_illegal_address".to_owned(),
        code: ".reg .u64 %at; .reg .u32 %one;\n\
             mov.u64 %at, 16; mov.u32 %one, 1; st.global.u32 [%at], %one;\n"
            .to_owned(),
    }
}

impl Kernel {
    /// A kernel that takes `time`, on its own stream.
    pub fn new(gpu: &Gpu, time: Duration, launch: Launch) -> anyhow::Result<Self> {
        Self::of(gpu, busy(time.as_nanos()), launch)
    }

    /// A kernel that accesses memory which is not allocated.
    pub fn faulty(gpu: &Gpu) -> anyhow::Result<Self> {
        Self::of(gpu, illegal(), Launch::Plain)
    }

    fn of(gpu: &Gpu, source: Source, launch: Launch) -> anyhow::Result<Self> {
        let stream = gpu.new_stream()?;
        let Source { name, code } = source;
        let code = format!(
            ".version 8.0\n.target sm_70\n.address_size 64\n.visible .entry {name}() {{\n{code}ret;\n}}\n"
        );
        let text = |s: String| CString::new(s).unwrap_or_default();
        let (name, code) = (text(name), text(code));
        // SAFETY: a context is current, and the text ends with a zero; the module is never unloaded.
        let function = unsafe {
            result::module::load_data(code.as_ptr().cast())
                .and_then(|module| result::module::get_function(module, name))
        }
        .map_err(named)
        .context("loading the kernel")?;
        let mut kernel = Self {
            stream,
            launch,
            function,
            graph: None,
        };
        if launch == Launch::Graph {
            kernel.graph = Some(kernel.capture().map_err(named).context("the graph")?);
        }
        Ok(kernel)
    }

    fn capture(&self) -> Result<CudaGraph, DriverError> {
        let mode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        self.stream.begin_capture(mode)?;
        for _ in 0..GRAPH_NODES {
            self.launch_plain()?;
        }
        let flags = sys::CUgraphInstantiate_flags::CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH;
        let graph = self.stream.end_capture(flags)?;
        graph.ok_or(DriverError(
            sys::CUresult::CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
        ))
    }

    /// Launches it once. Returns how many kernels will run.
    pub fn launch(&self) -> anyhow::Result<u64> {
        let launched = match (&self.graph, self.launch) {
            (Some(graph), _) => graph.launch(),
            (None, Launch::Cooperative) => self.launch_cooperative(),
            (None, Launch::Ex) => self.launch_ex(),
            (None, Launch::Plain | Launch::Graph) => self.launch_plain(),
        };
        launched.map_err(named).context("launching")?;
        Ok(if self.graph.is_some() { GRAPH_NODES } else { 1 })
    }

    fn launch_plain(&self) -> Result<(), DriverError> {
        let stream = self.stream.cu_stream();
        // SAFETY: the function is loaded and takes no parameters; its context is the stream's.
        unsafe { result::launch_kernel(self.function, (1, 1, 1), (1, 1, 1), 0, stream, &mut []) }
    }

    fn launch_cooperative(&self) -> Result<(), DriverError> {
        let (stream, one) = (self.stream.cu_stream(), (1, 1, 1));
        // SAFETY: as above.
        unsafe { result::launch_cooperative_kernel(self.function, one, one, 0, stream, &mut []) }
    }

    fn launch_ex(&self) -> Result<(), DriverError> {
        let config = sys::CUlaunchConfig {
            gridDimX: 1,
            gridDimY: 1,
            gridDimZ: 1,
            blockDimX: 1,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: 0,
            hStream: self.stream.cu_stream(),
            attrs: ptr::null_mut(),
            numAttrs: 0,
        };
        // SAFETY: as above; the configuration has no attributes.
        unsafe {
            sys::cuLaunchKernelEx(
                &raw const config,
                self.function,
                ptr::null_mut(),
                ptr::null_mut(),
            )
            .result()
        }
    }

    /// An event after everything that was launched before.
    pub fn mark(&self) -> anyhow::Result<CudaEvent> {
        let event = self.stream.record_event(None);
        event.map_err(named).context("cuEventRecord")
    }
}

/// Waits for a mark.
pub fn pass(mark: &CudaEvent) -> anyhow::Result<()> {
    mark.synchronize()
        .map_err(named)
        .context("cuEventSynchronize")
}

/// A time as people write it: `10us`, `1ms`, `2s`.
pub fn duration(text: &str) -> anyhow::Result<Duration> {
    let digits = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    let (number, unit) = text.split_at(digits);
    let nanos = match unit {
        "ns" => 1,
        "us" => 1_000,
        "ms" => 1_000_000,
        "s" => 1_000_000_000,
        _ => bail!("a time is a whole number with ns, us, ms or s: 10us"),
    };
    let number: u64 = number
        .parse()
        .context("a time begins with a whole number")?;
    let nanos = number
        .checked_mul(nanos)
        .context("a time of some centuries")?;
    Ok(Duration::from_nanos(nanos))
}
