//! The hooks for launches: they charge the share for the GPU time that a launch takes, and wait if the share has used
//! up its grant.
//!
//! ```text
//!  hook ─► price of its shape known, and left in this thread's batch ? ──yes──► the driver
//!               └──no──► launch: price ─► account of the share ─► wait ─► measure the launch
//! ```
//!
//! [`tranche_shim_core::compute`] describes how prices are learned and charged.

use core::ffi::{CStr, c_char};
use core::sync::atomic::{AtomicU64, Ordering};

use tranche_shim_core::Entry;
use tranche_shim_core::compute::batch::BATCH_NANOS;
use tranche_shim_core::compute::bucket::Wait;
use tranche_shim_core::compute::collective::is_collective;
use tranche_shim_core::compute::costs::key;
use tranche_shim_core::compute::{Batch, Price, Shape, WAIT_NANOS};
use tranche_shim_runtime::sys;

use crate::abi::{CUfunction, CUlaunchConfig, CUlaunchParams, CUresult, CUstream};
use crate::device::Device;
use crate::driver::Call;
use crate::keys;
use crate::launches::Launches;
use crate::local;
use crate::measure::Measurement;
use crate::process::{self, Process};
use crate::stream::{is_capturing, within_stream};

/// This bit marks a handle as a graph's. Handles are addresses of user space, which do not have it.
const GRAPH: CUfunction = 1 << 47;

/// A kernel and how it is launched.
#[derive(Clone, Copy)]
pub struct Kernel {
    /// The function's handle, or a graph's, with [`GRAPH`].
    pub handle: CUfunction,
    /// Blocks of the grid, threads of a block.
    pub grid: [u32; 3],
    pub block: [u32; 3],
}

impl Kernel {
    /// A kernel without its grid, if another call sets the grid, or if it does not matter.
    pub fn of(handle: CUfunction) -> Self {
        Self {
            handle,
            grid: [0; 3],
            block: [0; 3],
        }
    }

    /// A graph that can be launched.
    #[inline]
    pub fn graph(handle: CUfunction) -> Self {
        Self::of(handle | GRAPH)
    }

    fn is_graph(&self) -> bool {
        self.handle & GRAPH != 0
    }

    /// What `cuLaunchKernelEx` launches.
    #[inline]
    pub fn configured(config: *const CUlaunchConfig, handle: CUfunction) -> Self {
        // SAFETY: null, which the driver refuses, or the program's, for the driver to read.
        match unsafe { config.as_ref() } {
            Some(config) => Self {
                handle,
                grid: config.grid,
                block: config.block,
            },
            None => Self::of(handle),
        }
    }

    #[inline]
    fn numbers(&self) -> [u64; 3] {
        let two = |high: u32, low: u32| u64::from(high) << 32 | u64::from(low);
        [
            two(self.grid[0], self.grid[1]),
            two(self.grid[2], self.block[0]),
            two(self.block[1], self.block[2]),
        ]
    }

    fn shape(&self) -> Shape {
        let work = self.grid.iter().chain(&self.block).fold(1, |work, extent| {
            u64::saturating_mul(work, u64::from(*extent).max(1))
        });
        Shape {
            key: key(self.handle as u64, self.numbers()),
            kernel: self.family(),
            work,
        }
    }

    /// The key of the kernel without its grid.
    fn family(&self) -> u64 {
        key(self.handle as u64, [0; 3])
    }

    /// Pays for a launch from the thread's batch, if its price is known and the batch has it.
    #[inline]
    pub fn is_paid(&self) -> bool {
        let [one, two, three] = self.numbers();
        is_paid(self.handle, one, two, three)
    }
}

/// Takes numbers and not a `Kernel`, because numbers are passed in registers.
#[inline(never)]
fn is_paid(handle: CUfunction, one: u64, two: u64, three: u64) -> bool {
    let Some(process) = process::joined() else {
        return false;
    };
    match process.only_device() {
        Some(device) => is_paid_on(process, device, handle, [one, two, three]),
        None => is_paid_on_current(handle, one, two, three),
    }
}

/// A separate function: it calls the driver and so must save registers, which most processes need not do.
#[inline(never)]
fn is_paid_on_current(handle: CUfunction, one: u64, two: u64, three: u64) -> bool {
    process::joined().is_some_and(|process| {
        process
            .current_device()
            .is_ok_and(|device| is_paid_on(process, device, handle, [one, two, three]))
    })
}

#[inline]
fn is_paid_on(
    process: &'static Process,
    device: &Device,
    handle: CUfunction,
    numbers: [u64; 3],
) -> bool {
    let launches = &process.launches;
    if launches.captures.load(Ordering::Relaxed) != 0 || !process.fitting.knows(device, handle) {
        return false;
    }
    if device.cores == 0 {
        return launches.batch(device).count();
    }
    let price = launches.costs.trusted(key(handle as u64, numbers));
    price.is_some_and(|price| launches.batch(device).pay(price))
}

/// The stream of a `cuLaunchKernelEx`.
#[inline]
pub fn configured_stream(config: *const CUlaunchConfig) -> CUstream {
    // SAFETY: as in `Kernel::configured`.
    unsafe { config.as_ref() }.map_or(0, |config| config.stream)
}

/// A launch in a stream that was not paid from a batch.
#[cold]
#[inline(never)]
pub fn launch(kernel: Kernel, stream: CUstream, driver: Call<'_>) -> CUresult {
    let begun = match begin(kernel, stream) {
        Ok(begun) => begun,
        Err(code) => return code,
    };
    let result = driver.make();
    begun.end(result);
    result
}

fn begin(kernel: Kernel, stream: CUstream) -> Result<Begun, CUresult> {
    let process = process::current()?;
    let Ok(device) = process.current_device() else {
        // The driver returns the error.
        return Ok(Begun::default());
    };
    fit(process, device, kernel)?;
    let launch = Launch {
        process,
        device,
        shape: kernel.shape(),
        stream,
    };
    Ok(launch.begin())
}

/// Charges a kernel's local memory before its first launch. For a graph's kernels this was done when they became part of
/// the graph.
fn fit(process: &'static Process, device: &'static Device, kernel: Kernel) -> Result<(), CUresult> {
    let fitting = &process.fitting;
    if fitting.knows(device, kernel.handle) {
        Ok(())
    } else if kernel.is_graph() {
        fitting.note(device, kernel.handle);
        Ok(())
    } else {
        local::ensure(process, device, kernel.handle)
    }
}

/// `cuLaunchCooperativeKernelMultiDevice`: a kernel in each of several streams, each on its own device. Each launch is
/// charged as much as the first one.
pub fn launch_on_each(list: *const CUlaunchParams, count: u32, driver: Call<'_>) -> CUresult {
    if list.is_null() || count == 0 {
        return driver.make();
    }
    let process = match process::current() {
        Ok(process) => process,
        Err(code) => return code,
    };
    // SAFETY: not null, and the program's, for the driver to read.
    let list = unsafe { core::slice::from_raw_parts(list, count as usize) };
    let launch = |params: &CUlaunchParams| {
        let kernel = Kernel {
            handle: params.function,
            grid: params.grid,
            block: params.block,
        };
        Some(Launch {
            process,
            device: process.device_of_stream(params.stream).ok()?,
            shape: kernel.shape(),
            stream: params.stream,
        })
    };
    for params in list {
        let fits = process
            .device_of_stream(params.stream)
            .map_or(Ok(()), |device| {
                within_stream(params.stream, || {
                    fit(process, device, Kernel::of(params.function))
                })
            });
        if let Err(code) = fits {
            return code;
        }
    }
    let [first, others @ ..] = list else {
        return driver.make();
    };
    let Some(first) = launch(first) else {
        return driver.make();
    };
    for other in others.iter().filter_map(launch) {
        Launch {
            shape: first.shape,
            ..other
        }
        .pay();
    }
    let begun = first.begin();
    let result = driver.make();
    begun.end(result);
    result
}

/// A launch that cannot be paid from a batch.
struct Launch {
    process: &'static Process,
    device: &'static Device,
    shape: Shape,
    stream: CUstream,
}

/// The state between the steps before and after the driver's call.
#[derive(Default)]
struct Begun {
    paid: Option<(&'static Batch, u64)>,
    measurement: Option<Measurement>,
}

impl Begun {
    fn end(self, result: CUresult) {
        if let Some(measurement) = self.measurement {
            measurement.end(result);
        }
        if let Some((batch, paid)) = self.paid
            && !result.is_ok()
        {
            // Nothing runs, so the next launch may use what was paid.
            batch.give(paid);
        }
    }
}

/// How long to sleep before a measurement is read again, in nanoseconds.
const NAP_BETWEEN_CHECKS_NANOS: u64 = 100_000;

/// How long to sleep at most before the node's grant is read again, in nanoseconds.
const NAP_NANOS: u64 = 20_000_000;

/// Of the launches with a trusted price that read the share's grant, one in so many is measured.
const SELDOM: u64 = 8;

impl Launch {
    fn begin(&self) -> Begun {
        let launches = &self.process.launches;
        if launches.captures.load(Ordering::Relaxed) != 0 && is_capturing(self.stream) {
            // Work for a graph, which pays when it is launched.
            return Begun::default();
        }
        if self.device.cores == 0 {
            self.note(0, 0);
            return Begun::default();
        }
        let price = self.pay();
        let measured = match price {
            Price::Trusted(_) => (sys::now() / NAP_BETWEEN_CHECKS_NANOS).is_multiple_of(SELDOM),
            Price::Measured(_) | Price::Provisional(_) => true,
        };
        let measurement = if measured {
            launches.measuring.begin(self.stream, self.shape)
        } else {
            None
        };
        Begun {
            paid: Some((launches.batch(self.device), price.nanos())),
            measurement,
        }
    }

    /// Charges the share, and waits if the share is in debt.
    fn pay(&self) -> Price {
        let Launches { costs, .. } = &self.process.launches;
        let exempt = costs.is_exempt(self.shape.kernel);
        self.collect();
        let held = if exempt { 0 } else { self.hold() };
        let price = costs.price(&self.shape);
        let batch = self.process.launches.batch(self.device);
        let more = price.nanos() - batch.take(price.nanos());
        // Varies, because otherwise always the same launch of a loop would be measured.
        let ahead = if more < BATCH_NANOS {
            BATCH_NANOS / 2 + sys::now() % (BATCH_NANOS / 2)
        } else {
            0
        };
        let throttled = held + self.take(more + ahead, exempt);
        self.note(ahead, throttled);
        price
    }

    /// Takes `nanos` from the share as soon as it has no debt; returns how long that took. A launch never waits longer
    /// than [`WAIT_NANOS`], even if measurements add to the debt meanwhile.
    fn take(&self, nanos: u64, exempt: bool) -> u64 {
        let begun = &self.process.launches.begun;
        let start = sys::now();
        let mut now = start;
        loop {
            let Some((share, bucket)) = self.process.bucket(self.device, now) else {
                return 0;
            };
            let waited = now.saturating_sub(start.max(begun.load(Ordering::Relaxed)));
            if exempt || waited >= WAIT_NANOS {
                bucket.charge(share.account(), nanos);
            } else if let Err(Wait(wait)) = bucket.take(share.account(), nanos) {
                sys::sleep(wait.min(NAP_NANOS));
                self.collect();
                now = sys::now();
                continue;
            }
            if !exempt {
                begun.store(now, Ordering::Relaxed);
            }
            return now - start;
        }
    }

    /// Waits while enough launches of a kernel without a known price are in progress; returns how long that took. A
    /// kernel that is still running is charged for the time so far, and later launches of it wait for that.
    fn hold(&self) -> u64 {
        let Launches {
            costs, measuring, ..
        } = &self.process.launches;
        let left = || costs.hold(&self.shape);
        if left() == 0 {
            return 0;
        }
        let start = sys::now();
        loop {
            let waited = sys::now().saturating_sub(start);
            if waited >= left() || !measuring.is_measuring(&self.shape) {
                costs.note_hold(&self.shape, waited);
                return waited;
            }
            sys::sleep(NAP_BETWEEN_CHECKS_NANOS);
            self.collect();
        }
    }

    /// Reads the measurements that are done.
    fn collect(&self) {
        let Launches {
            costs, measuring, ..
        } = &self.process.launches;
        let more = measuring.collect(costs);
        if more != 0
            && let Some((share, bucket)) = self.process.bucket(self.device, sys::now())
        {
            bucket.correct(share.account(), more);
        }
    }

    /// Adds `nanos` to the batch, and counts its launches and this one.
    fn note(&self, nanos: u64, throttled: u64) {
        let launches = self.process.launches.batch(self.device).fill(nanos) + 1;
        if let Some(share) = self.process.shares(self.device).next() {
            share.note_launches(launches, throttled);
        }
    }
}

/// `cuStreamBeginCapture` in all its forms. The capture is counted before it begins.
pub fn begin_capture(driver: Call<'_>) -> CUresult {
    let captures = process::joined().map(|process| &process.launches.captures);
    if let Some(captures) = captures {
        captures.fetch_add(1, Ordering::Relaxed);
    }
    let result = driver.make();
    if let Some(captures) = captures
        && !result.is_ok()
    {
        one_less(captures);
    }
    result
}

/// `cuStreamEndCapture`. The capture is counted as ended after the call, even if it had become invalid.
pub fn end_capture(driver: Call<'_>) -> CUresult {
    let result = driver.make();
    if (result.is_ok() || result == CUresult::STREAM_CAPTURE_INVALIDATED)
        && let Some(process) = process::joined()
    {
        one_less(&process.launches.captures);
    }
    result
}

fn one_less(captures: &AtomicU64) {
    let _ = captures.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |count| {
        count.checked_sub(1)
    });
}

/// Forgets an executable graph at its end, because another graph may get its handle.
pub fn end_graph(graph: usize, driver: Call<'_>) -> CUresult {
    forget_graph(graph);
    driver.make()
}

/// Forgets the price of an executable graph that was changed, because it may take another time.
pub fn change_graph(graph: usize, driver: Call<'_>) -> CUresult {
    let result = driver.make();
    forget_graph(graph);
    result
}

fn forget_graph(graph: usize) {
    if let Some(process) = process::joined() {
        let (launches, shape) = (&process.launches, Kernel::graph(graph).shape());
        launches.measuring.discard(shape.key);
        launches.costs.forget(&shape);
    }
}

/// A look-up of a kernel by `name`, whose handle the driver writes to `handle`. NCCL's kernels on several GPUs wait for
/// each other: if one is delayed, the others occupy their GPUs meanwhile.
pub fn find_kernel(handle: *mut CUfunction, name: *const c_char, driver: Call<'_>) -> CUresult {
    let result = driver.make();
    if result.is_ok() && !handle.is_null() && !name.is_null() {
        // SAFETY: the driver found a kernel by this C string.
        if is_collective(unsafe { CStr::from_ptr(name) }.to_bytes()) {
            // SAFETY: not null, and the driver has just written to it.
            exempt(unsafe { handle.read() });
        }
    }
    result
}

/// The same in a library, whose kernels belong to no particular context.
pub fn find_library_kernel(
    handle: *mut CUfunction,
    name: *const c_char,
    driver: Call<'_>,
) -> CUresult {
    let result = find_kernel(handle, name, driver);
    if result.is_ok() && !handle.is_null() {
        // SAFETY: not null, and the driver has just written to it.
        note_kernels(unsafe { core::slice::from_raw_parts(handle, 1) });
    }
    result
}

/// `cuLibraryEnumerateKernels`.
pub fn list_kernels(handles: *mut CUfunction, count: u32, driver: Call<'_>) -> CUresult {
    let result = driver.make();
    if result.is_ok() && !handles.is_null() {
        // SAFETY: not null, with room for so many. If the library has fewer, the rest is the program's data; noting that is
        // harmless.
        note_kernels(unsafe { core::slice::from_raw_parts(handles, count as usize) });
    }
    result
}

fn note_kernels(handles: &[CUfunction]) {
    let Some(process) = process::joined() else {
        return;
    };
    for &handle in handles.iter().filter(|handle| **handle != 0) {
        let entry = Entry {
            bytes: 0,
            device: u8::MAX,
            context: 0,
        };
        // The table is full: the kernel is treated like an ordinary one.
        let _ = process
            .pointers
            .put(keys::key(keys::Kind::Kernel, handle as u64), entry);
    }
}

/// `cuKernelGetFunction`: another handle of the same kernel.
pub fn find_function(function: *mut CUfunction, kernel: CUfunction, driver: Call<'_>) -> CUresult {
    let result = driver.make();
    let is_exempt = process::joined().is_some_and(|process| {
        process
            .launches
            .costs
            .is_exempt(Kernel::of(kernel).family())
    });
    if result.is_ok() && !function.is_null() && is_exempt {
        // SAFETY: not null, and the driver has just written to it.
        exempt(unsafe { function.read() });
    }
    result
}

fn exempt(handle: CUfunction) {
    if let Some(process) = process::joined() {
        process.launches.costs.exempt(Kernel::of(handle).family());
    }
}
