//! The hooks for launches: they charge the share for the GPU time that a launch takes, and wait if the share has used
//! up its grant.
//!
//! ```text
//!  hook ─► price of its shape known, and left in this thread's batch ? ──yes──► the driver
//!               └──no──► launch: price ─► account of the share ─► wait ─► measure the launch
//! ```
//!
//! [`tranche_shim_core::compute`] describes how prices are learned and charged.

use core::sync::atomic::Ordering;

use tranche_shim_core::compute::batch::Due;
use tranche_shim_core::compute::bucket::Wait;
use tranche_shim_core::compute::costs::key;
use tranche_shim_core::compute::{Price, Shape, WAIT_NANOS};
use tranche_shim_runtime::sys;

use crate::abi::{CUfunction, CUlaunchConfig, CUlaunchParams, CUresult, CUstream};
use crate::collective;
use crate::device::Device;
use crate::driver::Call;
use crate::kernel::Kernel;
use crate::launches::Launches;
use crate::local;
use crate::measure::Measurement;
use crate::process::{self, Process};
use crate::series::{OpenSeries, SHORT_NANOS};
use crate::stream::{Stream, is_capturing, within_stream};

impl Kernel {
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

#[inline(always)]
#[expect(
    clippy::inline_always,
    reason = "it is a launch's whole path, and has two callers"
)]
fn is_paid_on(
    process: &'static Process,
    device: &Device,
    handle: CUfunction,
    numbers: [u64; 3],
) -> bool {
    let launches = &process.launches;
    if launches.captures.any() || !process.fitting.knows(device, handle) {
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
    let launch = match find(kernel, stream) {
        Ok(Some(launch)) => launch,
        // The driver returns the error.
        Ok(None) => return driver.make(),
        Err(code) => return code,
    };
    let begun = launch.begin();
    let result = driver.make();
    begun.end(result);
    result
}

fn find(kernel: Kernel, stream: CUstream) -> Result<Option<Launch>, CUresult> {
    let process = process::current()?;
    let Ok(device) = process.current_device() else {
        return Ok(None);
    };
    fit(process, device, kernel)?;
    Ok(Some(Launch {
        process,
        device,
        shape: kernel.shape(),
        stream,
    }))
}

/// Charges a kernel's local memory before its first launch. For a graph's kernels this was done when they became part of
/// the graph.
fn fit(process: &'static Process, device: &'static Device, kernel: Kernel) -> Result<(), CUresult> {
    let fitting = &process.fitting;
    if fitting.knows(device, kernel.handle) {
        Ok(())
    } else if kernel.is_graph() {
        fitting.note(fitting.fit(device, kernel.handle));
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
struct Begun<'a> {
    paid: Option<(&'a Launch, u64)>,
    measurement: Option<Measurement>,
    series: Option<OpenSeries>,
}

impl Begun<'_> {
    fn end(self, result: CUresult) {
        if let Some(measurement) = self.measurement {
            measurement.end(result);
        }
        if let Some((launch, paid)) = self.paid {
            let left = self.series.map_or(0, |series| series.end_launch(result));
            launch.give_back(left + if result.is_ok() { 0 } else { paid });
        }
    }
}

/// How long to sleep before a measurement is read again, in nanoseconds.
const NAP_BETWEEN_CHECKS_NANOS: u64 = 100_000;

/// How long to sleep at most before the node's grant is read again, in nanoseconds.
const NAP_NANOS: u64 = 20_000_000;

/// Of the launches with a trusted price that read the share's grant, one in so many is measured, and one in so many begins a
/// series.
const SELDOM: u64 = 8;
const SERIES_SELDOM: u64 = 64;

impl Launch {
    fn begin(&self) -> Begun<'_> {
        let launches = &self.process.launches;
        if launches.captures.any() && is_capturing(self.stream) {
            // Work for a graph, which pays when it is launched.
            if launches.costs.is_exempt(self.shape.kernel)
                && let Some(graph) = Stream::legacy(self.stream).graph()
            {
                collective::mark_graph(self.process, graph);
            }
            return Begun::default();
        }
        if self.device.cores == 0 {
            self.note(0, 0);
            return Begun::default();
        }
        if let Some(begun) = self.continue_series() {
            return begun;
        }
        let price = self.pay();
        let begun = Begun {
            paid: Some((self, price.nanos())),
            ..Begun::default()
        };
        let chance = sys::now() / NAP_BETWEEN_CHECKS_NANOS;
        match price {
            Price::Trusted(nanos) if self.begins_series(nanos, chance) => Begun {
                series: self.begin_series(nanos),
                ..begun
            },
            Price::Trusted(_) if !chance.is_multiple_of(SELDOM) => begun,
            _ => {
                let measurement = launches.measuring.begin(self.stream, self.shape);
                if let Price::Provisional(nanos) = price
                    && measurement.is_none()
                {
                    launches.costs.note_unmeasured(&self.shape, nanos);
                }
                Begun {
                    measurement,
                    ..begun
                }
            }
        }
    }

    /// Whether to begin a series with a launch of `price`, by a number that any launch may have.
    fn begins_series(&self, price: u64, chance: u64) -> bool {
        let Launches { costs, .. } = &self.process.launches;
        let one_in = if costs.knows_overhead() {
            SERIES_SELDOM
        } else {
            SELDOM
        };
        price < SHORT_NANOS && chance % one_in == SELDOM / 2
    }

    fn begin_series(&self, price: u64) -> Option<OpenSeries> {
        let launches = &self.process.launches;
        if launches.captures.any() || launches.measuring.is_paused() {
            return None;
        }
        let batch = launches.batch(self.device);
        let Launches { measuring, .. } = launches;
        measuring
            .series
            .begin(self.stream, self.shape, price, batch)
    }

    /// Makes this a launch of the thread's series, if there is one. If it does not belong to it, the series ends.
    fn continue_series(&self) -> Option<Begun<'_>> {
        let Launches {
            costs,
            measuring,
            captures,
            ..
        } = &self.process.launches;
        if captures.any() {
            return None;
        }
        let series = measuring.series.resume(self.stream)?;
        if let Some(price) = costs.trusted(self.shape.key)
            && series.add(self.stream, &self.shape, price)
        {
            self.note(0, 0);
            return Some(Begun {
                paid: Some((self, price)),
                series: Some(series),
                ..Begun::default()
            });
        }
        let is_whole = series.is_in(self.stream);
        self.give_back(series.end(is_whole));
        None
    }

    /// Charges the share, and waits if the share is in debt.
    fn pay(&self) -> Price {
        let Launches { costs, .. } = &self.process.launches;
        let exempt = costs.is_exempt(self.shape.kernel);
        self.collect();
        let held = if exempt { 0 } else { self.hold() };
        let price = costs.price(&self.shape);
        let batch = self.process.launches.batch(self.device);
        let Due { rest, ahead } = batch.pay_part(price.nanos(), sys::now());
        let ahead = self.device.priority.ahead(ahead);
        let nanos = rest + ahead;
        let mut throttled = held + self.take(nanos, exempt);
        throttled += self
            .process
            .give_precedence(self.device, nanos, exempt, throttled);
        self.note(ahead, throttled);
        price
    }

    /// Gives back what was paid and is not needed, for example because the driver refused the launch: the next launches may
    /// use it.
    fn give_back(&self, paid: u64) {
        if paid == 0 {
            return;
        }
        let beyond = self.process.launches.batch(self.device).give(paid);
        if beyond > 0
            && let Some((share, bucket)) = self.process.bucket(self.device, sys::now())
        {
            let beyond = i64::try_from(beyond).unwrap_or(i64::MAX);
            bucket.correct(share.account(), -beyond);
        }
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
            if waited >= left() || !measuring.is_measuring(self.shape.kernel) {
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
        let may_rise = || {
            let bucket = self.process.bucket(self.device, sys::now());
            bucket.is_none_or(|(_, bucket)| bucket.prices_may_rise())
        };
        let more = measuring.collect(costs, may_rise);
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

/// Forgets an executable graph at its end, because another graph may get its handle.
pub fn end_graph(graph: usize, driver: Call<'_>) -> CUresult {
    forget_graph(graph);
    driver.make()
}

/// `cuGraphExecUpdate`: an executable graph becomes like `graph`.
pub fn update_graph(executable: usize, graph: usize, driver: Call<'_>) -> CUresult {
    let result = change_graph(executable, driver);
    if let Some(process) = process::joined() {
        collective::update(process, executable, graph);
    }
    result
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
