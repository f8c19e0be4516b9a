//! Streams: queues in virtual time.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};

use tranche_simulator_machine::timeline::now;

use crate::code::Code;
use crate::context::{Context, current};
use crate::driver::{self, driver};
use crate::graph::Capture;
use crate::host::{self, HostFunction};
use crate::object::{Handle, Kept, Kind, Object, PER_THREAD, Token};

/// `CU_STREAM_LEGACY`
const LEGACY: usize = 1;

/// Kernels that a stream queues before a launch waits, as in the real driver.
const DEPTH: usize = 1024;

/// A stream.
#[derive(Debug)]
pub struct Stream {
    pub context: &'static Object<Context>,
    /// Whether it and the null stream wait for each other.
    blocking: bool,
    null: bool,
    pub flags: u32,
    pub priority: i32,
    pub id: u64,
    /// The mark of the last work queued in it.
    ready: AtomicU64,
    /// Marks of the last kernels queued.
    queue: OnceLock<Box<[AtomicU64; DEPTH]>>,
    queued: AtomicU64,
    /// Marks of other GPUs that the next work waits for.
    foreign: Mutex<Vec<(usize, u64)>>,
    /// The number of the last host function queued in it.
    pub functions: AtomicU64,
    /// Fast answer to whether `capture` is something.
    pub capturing: AtomicBool,
    pub capture: Mutex<Option<Capture>>,
}

impl Kind for Stream {
    const TAG: u64 = 0x5354_5200_0000_0001;
}

impl Stream {
    fn new(context: &'static Object<Context>, null: bool, flags: u32, priority: i32) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self {
            context,
            blocking: flags & 1 == 0,
            null,
            flags,
            priority: priority.clamp(-5, 0),
            id: NEXT.fetch_add(1, Ordering::Relaxed),
            ready: AtomicU64::new(0),
            queue: OnceLock::new(),
            queued: AtomicU64::new(0),
            foreign: Mutex::default(),
            functions: AtomicU64::new(0),
            capturing: AtomicBool::new(false),
            capture: Mutex::new(None),
        }
    }

    /// The mark after which work queued now starts.
    pub fn earliest(&self) -> u64 {
        let mut earliest = self.ready.load(Ordering::Relaxed);
        if self.null {
            earliest = earliest.max(self.context.latest_blocking.load(Ordering::Relaxed));
        } else if self.blocking
            && let Ok(null) = null(self.context)
        {
            earliest = earliest.max(null.ready.load(Ordering::Relaxed));
        }
        earliest
    }

    /// Notes the mark of the last work queued.
    pub fn extend(&self, end: u64) {
        self.ready.fetch_max(end, Ordering::Relaxed);
        self.context.latest.fetch_max(end, Ordering::Relaxed);
        if self.blocking {
            self.context
                .latest_blocking
                .fetch_max(end, Ordering::Relaxed);
        }
    }

    /// Queues a kernel of `nanos`.
    pub fn run(&self, nanos: u64) -> Result<(), Code> {
        work_for(driver()?.shared.header.launch_nanos);
        if nanos == 0 {
            return Ok(());
        }
        let foreign =
            std::mem::take(&mut *self.foreign.lock().unwrap_or_else(PoisonError::into_inner));
        for (gpu, mark) in foreign {
            driver::wait(gpu, mark);
        }
        let driver = driver()?;
        let queue = self
            .queue
            .get_or_init(|| Box::new([const { AtomicU64::new(0) }; DEPTH]));
        let place = self.queued.fetch_add(1, Ordering::Relaxed);
        let place = &queue[usize::try_from(place).unwrap_or(0) % DEPTH];
        let gpu = self.context.device.gpu;
        driver::wait(gpu, place.load(Ordering::Relaxed));
        let mark = driver.shared.launch(driver.slot, gpu, nanos, now())?;
        place.store(mark, Ordering::Relaxed);
        self.extend(mark);
        Ok(())
    }

    /// Lets later work wait for a mark of any GPU. Another GPU's is waited for by whoever launches
    /// next: how the GPUs' times lie to each other is not known before.
    pub fn after(&self, gpu: usize, mark: u64) {
        if gpu == self.context.device.gpu {
            self.extend(mark);
        } else {
            let mut foreign = self.foreign.lock().unwrap_or_else(PoisonError::into_inner);
            foreign.push((gpu, mark));
        }
    }

    /// Has the host do `work` when the stream gets there.
    pub fn enqueue(&self, work: host::Work) {
        let number = host::enqueue((self.context.device.gpu, self.earliest()), work);
        self.functions.store(number, Ordering::Release);
    }

    /// Has the host call `function` when the stream gets there.
    pub fn enqueue_function(&self, function: HostFunction, data: Token) {
        self.enqueue(Box::new(move || {
            let data = data;
            // SAFETY: the program's function with the program's argument.
            unsafe { function(data.0) };
        }));
    }

    /// Waits for what is queued.
    pub fn synchronize(&self) {
        driver::wait(self.context.device.gpu, self.earliest());
        host::wait(self.functions.load(Ordering::Acquire));
    }

    /// Whether nothing is queued.
    pub fn idle(&self) -> bool {
        driver::reached(self.context.device.gpu, self.earliest())
            && host::done(self.functions.load(Ordering::Acquire))
    }
}

/// Keeps the calling thread busy for so many nanoseconds.
fn work_for(nanos: u32) {
    if nanos == 0 {
        return;
    }
    let end = now() + u64::from(nanos);
    while now() < end {
        std::hint::spin_loop();
    }
}

thread_local! {
    /// This thread's default stream in each context.
    static THREAD: RefCell<BTreeMap<u64, &'static Object<Stream>>> = const { RefCell::new(BTreeMap::new()) };
}

fn thread_stream() -> Result<&'static Object<Stream>, Code> {
    let context = current()?;
    THREAD
        .try_with(|streams| {
            *streams
                .borrow_mut()
                .entry(context.id)
                .or_insert_with(|| Object::create(Stream::new(context, false, 0, 0)))
        })
        .map_err(|_| Code::INVALID_CONTEXT)
}

/// Makes the null stream of a new context.
pub fn create_null(context: &'static Object<Context>) {
    context
        .null_stream
        .get_or_init(|| Kept(Object::create(Stream::new(context, true, 0, 0)).handle()));
}

/// The null stream of a context.
pub fn null(context: &Context) -> Result<&'static Object<Stream>, Code> {
    let handle = context.null_stream.get().ok_or(Code::INVALID_CONTEXT)?;
    // SAFETY: a handle that `create_null` made.
    unsafe { Object::find(handle.0) }
}

/// The stream behind a handle, special ones included.
///
/// # Safety
/// As [`Object::find`].
pub unsafe fn find(handle: Handle) -> Result<&'static Object<Stream>, Code> {
    match handle as usize {
        0 | LEGACY => null(current()?),
        PER_THREAD => thread_stream(),
        _ => {
            driver()?;
            // SAFETY: the caller's contract.
            let stream = unsafe { Object::<Stream>::find(handle)? };
            stream.context.device.check_present()?;
            Ok(stream)
        }
    }
}

/// Creates a stream of the calling thread's context.
pub fn create(flags: u32, priority: i32) -> Result<Handle, Code> {
    let context = current()?;
    if flags > 1 {
        return Err(Code::INVALID_VALUE);
    }
    Ok(Object::create(Stream::new(context, false, flags, priority)).handle())
}

/// Takes the capture out of a stream that captures.
pub fn captured<T>(stream: &Stream, call: impl FnOnce(&mut Capture) -> T) -> Option<T> {
    if !stream.capturing.load(Ordering::Relaxed) {
        return None;
    }
    let mut capture = stream
        .capture
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    capture.as_mut().map(call)
}
