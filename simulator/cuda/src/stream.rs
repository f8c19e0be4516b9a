//! Streams: queues of work in virtual time.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use tranche_simulator_machine::timeline::now;

use crate::capture::{Capture, CaptureMark};
use crate::code::Code;
use crate::context::{Context, current};
use crate::driver::{self, driver};
use crate::graph::Graph;
use crate::host::{self, HostFunction};
use crate::object::{Handle, Kind, Object, PER_THREAD, StoredHandle, Token};

/// `CU_STREAM_LEGACY`
const LEGACY: usize = 1;

/// The number of kernels in a stream's queue at which a launch waits, as in the real driver.
const DEPTH: usize = 1024;

#[derive(Debug)]
pub struct Stream {
    pub context: &'static Object<Context>,
    /// Whether it and the null stream wait for each other.
    is_blocking: bool,
    is_null: bool,
    pub flags: u32,
    pub priority: i32,
    pub id: u64,
    /// The mark of the last work queued in it.
    ready: AtomicU64,
    /// Marks of the last kernels queued, as a ring.
    queue: OnceLock<Box<[AtomicU64; DEPTH]>>,
    queued: AtomicU64,
    /// Marks of other GPUs that the next work waits for.
    foreign: Mutex<Vec<(usize, u64)>>,
    /// The number of the last host function queued in it.
    pub functions: AtomicU64,
    /// Whether `capture` is `Some`, to be read without its lock.
    capturing: AtomicBool,
    capture: Mutex<Option<Capture>>,
}

impl Kind for Stream {
    const TAG: u64 = 0x5354_5200_0000_0001;
}

impl Stream {
    fn new(context: &'static Object<Context>, is_null: bool, flags: u32, priority: i32) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(1);
        Self {
            context,
            is_blocking: flags & 1 == 0,
            is_null,
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
        if self.is_null {
            earliest = earliest.max(self.context.latest_blocking.load(Ordering::Relaxed));
        } else if self.is_blocking
            && let Ok(null) = null(self.context)
        {
            earliest = earliest.max(null.ready.load(Ordering::Relaxed));
        }
        earliest
    }

    /// Records the mark of the last work queued.
    pub fn record_queued(&self, end: u64) {
        self.ready.fetch_max(end, Ordering::Relaxed);
        self.context.latest.fetch_max(end, Ordering::Relaxed);
        if self.is_blocking {
            self.context
                .latest_blocking
                .fetch_max(end, Ordering::Relaxed);
        }
    }

    /// Queues a kernel of `nanos`.
    pub fn run(&self, nanos: u64) -> Result<(), Code> {
        spin_for(driver()?.shared.header.launch_nanos);
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
        self.record_queued(mark);
        Ok(())
    }

    /// Makes later work wait for a mark of any GPU. For a mark of another GPU, the thread that launches next waits,
    /// because the times of two GPUs cannot be compared before.
    pub fn wait_for(&self, gpu: usize, mark: u64) {
        if gpu == self.context.device.gpu {
            self.record_queued(mark);
        } else {
            let mut foreign = self.foreign.lock().unwrap_or_else(PoisonError::into_inner);
            foreign.push((gpu, mark));
        }
    }

    /// Calls `work` with the stream's capture; `None` if the stream does not capture.
    pub fn with_capture<T>(&self, work: impl FnOnce(&mut Capture) -> T) -> Option<T> {
        if !self.is_capturing() {
            return None;
        }
        self.capture().as_mut().map(work)
    }

    /// Whether the stream captures.
    pub fn is_capturing(&self) -> bool {
        self.capturing.load(Ordering::Acquire)
    }

    pub fn capture(&self) -> MutexGuard<'_, Option<Capture>> {
        self.capture.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn leave_capture(&self) {
        *self.capture() = None;
        self.capturing.store(false, Ordering::Release);
    }

    /// Does `work` in the stream's order. That is now, unless host functions are queued, because nothing else in a queue
    /// changes bytes.
    pub fn in_order(&self, work: impl FnOnce() + Send + 'static) {
        if host::is_done(self.functions.load(Ordering::Acquire)) {
            work();
        } else {
            self.enqueue(Box::new(work));
        }
    }

    /// Lets the host do `work` when the stream reaches it.
    pub fn enqueue(&self, work: host::Work) {
        let number = host::enqueue((self.context.device.gpu, self.earliest()), work);
        self.functions.store(number, Ordering::Release);
    }

    /// Lets the host call `function` when the stream reaches it.
    pub fn enqueue_function(&self, function: HostFunction, data: Token) {
        self.enqueue(Box::new(move || {
            let data = data;
            // SAFETY: the program's function with the program's argument.
            unsafe { function(data.0) };
        }));
    }

    /// Waits for all that is queued.
    pub fn synchronize(&self) {
        driver::wait(self.context.device.gpu, self.earliest());
        host::wait(self.functions.load(Ordering::Acquire));
    }

    /// Whether nothing is queued.
    pub fn is_idle(&self) -> bool {
        driver::has_reached(self.context.device.gpu, self.earliest())
            && host::is_done(self.functions.load(Ordering::Acquire))
    }
}

impl Object<Stream> {
    /// Begins a capture into `graph`.
    pub fn begin_capture(&self, graph: &'static Object<Graph>) -> Result<(), Code> {
        let mut capture = self.capture();
        if capture.is_some() {
            return Err(Code::ILLEGAL_STATE);
        }
        *capture = Some(Capture::new(graph, std::ptr::from_ref(self) as usize));
        self.capturing.store(true, Ordering::Release);
        Ok(())
    }

    /// Makes the stream take part in a capture; false if that has ended or the stream takes part in another one.
    pub fn join_capture(&self, mark: &CaptureMark) -> bool {
        let CaptureMark(joined) = mark;
        if joined.has_ended() {
            return false;
        }
        let mut capture = self.capture();
        if let Some(present) = capture.as_ref() {
            return present.id == joined.id;
        }
        *capture = Some(joined.clone());
        self.capturing.store(true, Ordering::Release);
        joined.members().push(std::ptr::from_ref(self) as usize);
        true
    }

    /// Ends the capture that this stream began; its graph.
    pub fn end_capture(&self) -> Result<&'static Object<Graph>, Code> {
        let capture = {
            let mut place = self.capture();
            let capture = place.take().ok_or(Code::ILLEGAL_STATE)?;
            if capture.origin != std::ptr::from_ref(self) as usize {
                *place = Some(capture);
                // CUDA_ERROR_STREAM_CAPTURE_UNMATCHED
                return Err(Code(903));
            }
            self.capturing.store(false, Ordering::Release);
            capture
        };
        capture.end();
        let members = std::mem::take(&mut *capture.members());
        for member in members {
            // SAFETY: the handle of a stream that joined. Should the program have destroyed it since, quarantine keeps it
            // readable.
            if let Ok(member) = unsafe { Object::<Stream>::find(member as Handle) } {
                member.leave_capture();
            }
        }
        Ok(capture.graph)
    }
}

/// Keeps the calling thread busy for `nanos` nanoseconds.
fn spin_for(nanos: u32) {
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
        .get_or_init(|| StoredHandle(Object::create(Stream::new(context, true, 0, 0)).handle()));
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
            stream.context.device.check()?;
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
