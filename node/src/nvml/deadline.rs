//! Calls of the driver, each with a deadline.
//!
//! A call that hangs in the kernel cannot be ended. So a thread makes it, one for each GPU and each session: the caller gives up
//! after a while, and the thread stays with the call until it returns.
//!
//! ```text
//!  caller ─► call ─► the GPU's thread ─► NVML          [`Hangs`]: which calls have taken longer than they may, in all sessions.
//!     ▲ gives up         │                             Until they return, no other thread calls the driver for that GPU: it
//!     └──── result ◄─────┘                             would hang, too.
//! ```

use std::collections::BTreeMap;
use std::fmt;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::NvmlError;

/// How long a thread without a call stays: longer than the pauses between the samples of a GPU.
const IDLE: Duration = Duration::from_secs(5);

/// What a call is, and how long it may take.
#[derive(Clone, Copy, Debug)]
pub(super) struct Call<'a> {
    /// The GPU's UUID or its index, or empty for calls that concern no GPU.
    pub object: &'a str,
    pub name: &'static str,
    /// The call hangs if it takes longer.
    pub limit: Duration,
}

/// A call that does not return.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Hang {
    /// The GPU's UUID, or `index N` if it has none yet; empty for calls that concern all GPUs.
    pub object: String,
    /// The NVML function.
    pub call: &'static str,
}

/// The calls in progress, of all sessions of the process. Clones are the same.
#[derive(Clone, Default)]
pub struct Hangs(Arc<Shared>);

#[derive(Default)]
struct Shared {
    state: Mutex<State>,
    /// Signals that a call has ended.
    ended: Condvar,
}

#[derive(Default)]
struct State {
    next: u64,
    /// By number.
    calls: BTreeMap<u64, InProgress>,
}

struct InProgress {
    object: String,
    name: &'static str,
    limit: Duration,
    /// The session.
    threads: u64,
    /// When the thread began it; it waits for an earlier call until then.
    begun: Option<Instant>,
    /// Counts as longer than its limit, whatever the clock says.
    #[cfg(any(test, feature = "testing"))]
    is_overdue: bool,
}

impl InProgress {
    /// Whether it takes longer than this.
    fn is_over(&self, limit: Duration) -> bool {
        #[cfg(any(test, feature = "testing"))]
        if self.is_overdue && self.begun.is_some() {
            return true;
        }
        self.begun.is_some_and(|begun| begun.elapsed() >= limit)
    }

    fn hang(&self) -> Hang {
        Hang {
            object: self.object.clone(),
            call: self.name,
        }
    }
}

impl fmt::Debug for Hangs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Hangs").field(&self.now()).finish()
    }
}

impl Hangs {
    /// The calls that hang now, the oldest first, one for each object.
    #[must_use]
    pub fn now(&self) -> Vec<Hang> {
        let state = self.state();
        let over = state.calls.values().filter(|call| call.is_over(call.limit));
        let mut hangs: Vec<Hang> = Vec::new();
        for call in over {
            if !hangs.iter().any(|it| it.object == call.object) {
                hangs.push(call.hang());
            }
        }
        hangs
    }

    /// Notes that the caller does something else for an object that may not return, until the result is dropped.
    #[must_use]
    pub fn enter(&self, object: &str, name: &'static str, limit: Duration) -> Entered {
        let call = Call {
            object,
            name,
            limit,
        };
        let number = self.state().add(0, &call);
        self.begin(number);
        Entered(self.clone(), number)
    }

    /// Makes the calls in progress for an object count as longer than their limit.
    #[cfg(any(test, feature = "testing"))]
    pub fn let_time_pass(&self, object: &str) {
        let mut state = self.state();
        let calls = state.calls.values_mut();
        calls
            .filter(|call| call.object == object)
            .for_each(|call| call.is_overdue = true);
        drop(state);
        self.0.ended.notify_all();
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives a call its number; an error if one for the same object hangs, or keeps the thread for longer than the caller waits.
    fn add(&self, threads: u64, call: &Call<'_>, patience: Duration) -> Result<u64, NvmlError> {
        let mut state = self.state();
        let mut others = state.calls.values().filter(|it| it.object == call.object);
        let in_the_way =
            others.find(|it| it.is_over(it.limit) || it.threads == threads && it.is_over(patience));
        if let Some(hanging) = in_the_way {
            return Err(hangs(&hanging.object, hanging.name));
        }
        Ok(state.add(threads, call))
    }

    /// Whether somebody still waits for the call, which begins now.
    fn begin(&self, number: u64) -> bool {
        let mut state = self.state();
        let call = state.calls.get_mut(&number);
        call.map(|call| call.begun = Some(Instant::now())).is_some()
    }

    /// Waits until a call has ended, but not longer than `patience`. One that did not begin until then never does.
    fn wait(&self, number: u64, patience: Duration) {
        let is_going_on = |state: &mut State| {
            let call = state.calls.get(&number);
            call.is_some_and(|call| !call.is_over(call.limit))
        };
        let waited = self
            .0
            .ended
            .wait_timeout_while(self.state(), patience, is_going_on);
        let (mut state, _) = waited.unwrap_or_else(PoisonError::into_inner);
        if state
            .calls
            .get(&number)
            .is_some_and(|it| it.begun.is_none())
        {
            state.calls.remove(&number);
        }
    }
}

impl State {
    fn add(&mut self, threads: u64, call: &Call<'_>) -> u64 {
        self.next += 1;
        let new = InProgress {
            object: call.object.to_owned(),
            name: call.name,
            limit: call.limit,
            threads,
            begun: None,
            #[cfg(any(test, feature = "testing"))]
            is_overdue: false,
        };
        self.calls.insert(self.next, new);
        self.next
    }
}

/// A call in progress, until it is dropped.
#[derive(Debug)]
pub struct Entered(Hangs, u64);

impl Drop for Entered {
    fn drop(&mut self) {
        self.0.state().calls.remove(&self.1);
        self.0.0.ended.notify_all();
    }
}

impl From<Hang> for NvmlError {
    fn from(hang: Hang) -> Self {
        hangs(&hang.object, hang.call)
    }
}

fn hangs(object: &str, call: &'static str) -> NvmlError {
    NvmlError::Hangs {
        call,
        object: object.to_owned(),
    }
}

type Job = Box<dyn FnOnce() + Send>;

/// The threads of a session, by object. Clones are the same.
#[derive(Clone)]
pub(super) struct Threads {
    hangs: Hangs,
    number: u64,
    queues: Arc<Mutex<BTreeMap<String, Sender<Job>>>>,
}

impl fmt::Debug for Threads {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Threads").field(&self.hangs).finish()
    }
}

/// The result of a call that has been begun.
#[derive(Debug)]
pub(super) struct Pending<T> {
    hangs: Hangs,
    number: u64,
    result: Arc<Mutex<Option<T>>>,
    error: NvmlError,
    until: Instant,
}

impl<T> Pending<T> {
    /// Waits for the result; an error if the caller's patience ends before. A result that comes later is dropped.
    pub(super) fn wait(self) -> Result<T, NvmlError> {
        let patience = self.until.saturating_duration_since(Instant::now());
        self.hangs.wait(self.number, patience);
        let mut result = self.result.lock().unwrap_or_else(PoisonError::into_inner);
        result.take().ok_or(self.error)
    }
}

impl Threads {
    /// None yet. `hangs` gets their calls.
    pub(super) fn new(hangs: Hangs) -> Self {
        let number = {
            let mut state = hangs.state();
            state.next += 1;
            state.next
        };
        Self {
            hangs,
            number,
            queues: Arc::default(),
        }
    }

    /// Begins a call, whose result the caller awaits for `patience` at most.
    pub(super) fn begin<T: Send + 'static>(
        &self,
        call: Call<'_>,
        patience: Duration,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<Pending<T>, NvmlError> {
        let number = self.hangs.add(self.number, &call, patience)?;
        self.run(number, call, patience, work)
    }

    /// The same for a call that must be made, also after another one that hangs: on a thread that may hang.
    pub(super) fn post(
        &self,
        call: Call<'_>,
        patience: Duration,
        work: impl FnOnce() + Send + 'static,
    ) -> Result<Pending<()>, NvmlError> {
        let number = self.hangs.state().add(self.number, &call);
        self.run(number, call, patience, work)
    }

    fn run<T: Send + 'static>(
        &self,
        number: u64,
        call: Call<'_>,
        patience: Duration,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<Pending<T>, NvmlError> {
        let result = Arc::new(Mutex::new(None));
        let (hangs, to) = (self.hangs.clone(), Arc::clone(&result));
        let job: Job = Box::new(move || {
            // What nobody waits for is not done; dropping the work may call the driver, too.
            if hangs.begin(number) {
                let _ends = Entered(hangs, number);
                let done = work();
                *to.lock().unwrap_or_else(PoisonError::into_inner) = Some(done);
            }
        });
        let pending = Pending {
            hangs: self.hangs.clone(),
            number,
            result,
            error: self::hangs(call.object, call.name),
            until: Instant::now() + patience,
        };
        self.send(call.object, job).map_err(|error| {
            drop(Entered(self.hangs.clone(), number));
            NvmlError::Root(format!("no thread can call NVML: {error}"))
        })?;
        Ok(pending)
    }

    /// Gives a job to the object's thread, and starts the thread if there is none.
    fn send(&self, object: &str, job: Job) -> std::io::Result<()> {
        let mut queues = self.queues.lock().unwrap_or_else(PoisonError::into_inner);
        let job = match queues.get(object) {
            Some(queue) => match queue.send(job) {
                Ok(()) => return Ok(()),
                // Its thread has panicked.
                Err(unsent) => unsent.0,
            },
            None => job,
        };
        let (queue, jobs) = channel();
        let (all, of) = (Arc::downgrade(&self.queues), object.to_owned());
        let thread = std::thread::Builder::new().name("nvml".into());
        thread.spawn(move || {
            serve(&jobs, || {
                let Some(queues) = all.upgrade() else {
                    return true;
                };
                let mut queues = queues.lock().unwrap_or_else(PoisonError::into_inner);
                // Nobody sends while this is locked.
                if let Ok(job) = jobs.try_recv() {
                    drop(queues);
                    job();
                    return false;
                }
                queues.remove(&of);
                true
            });
        })?;
        let _ = queue.send(job);
        queues.insert(object.to_owned(), queue);
        Ok(())
    }
}

/// Does jobs until there has been none for a while and the thread may end.
fn serve(jobs: &Receiver<Job>, may_end: impl Fn() -> bool) {
    loop {
        match jobs.recv_timeout(IDLE) {
            Ok(job) => job(),
            Err(_) => {
                if may_end() {
                    return;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::sync_channel;

    use super::*;

    const LONG: Duration = Duration::from_mins(1);

    fn call(object: &str) -> Call<'_> {
        Call {
            object,
            name: "nvmlTest",
            limit: LONG,
        }
    }

    fn ask(threads: &Threads, object: &str) -> Result<u32, NvmlError> {
        threads.begin(call(object), LONG, || 7)?.wait()
    }

    #[test]
    fn a_call_that_hangs_is_given_up_and_concerns_no_other_object() {
        let hangs = Hangs::default();
        let threads = Threads::new(hangs.clone());
        let (go_on, told) = channel::<()>();
        let (starts, started) = sync_channel(1);
        let hanging = threads.begin(call("a"), LONG, move || {
            starts.send(()).unwrap();
            told.recv().unwrap_or_default();
        });
        started.recv().unwrap();
        assert_eq!((ask(&threads, "b"), hangs.now()), (Ok(7), vec![]));
        // One more waits for the thread, and never begins.
        let second = threads.begin(call("a"), LONG, || 7).unwrap();
        hangs.let_time_pass("a");
        let is_hang = |error| matches!(error, NvmlError::Hangs { object, .. } if object == "a");
        assert!(is_hang(hanging.unwrap().wait().unwrap_err()));
        let waits = Pending {
            until: Instant::now(),
            ..second
        };
        assert!(is_hang(waits.wait().unwrap_err()));
        let objects = |hangs: Vec<Hang>| hangs.into_iter().map(|it| it.object).collect::<Vec<_>>();
        assert_eq!(objects(hangs.now()), ["a"]);
        // No other session tries it either.
        let other = Threads::new(hangs.clone());
        assert!(is_hang(ask(&other, "a").unwrap_err()));
        assert_eq!(ask(&other, "b"), Ok(7));
        drop(go_on);
        while !hangs.now().is_empty() {
            std::thread::yield_now();
        }
        assert_eq!((ask(&threads, "a"), ask(&other, "a")), (Ok(7), Ok(7)));
    }

    #[test]
    fn a_caller_with_less_patience_does_not_wait_for_another_callers_call() {
        let hangs = Hangs::default();
        let threads = Threads::new(hangs.clone());
        let (go_on, told) = channel::<()>();
        let (starts, started) = sync_channel(1);
        let slow = threads.begin(call("a"), LONG, move || {
            starts.send(()).unwrap();
            told.recv().unwrap_or_default();
        });
        started.recv().unwrap();
        let refused = threads.begin(call("a"), Duration::ZERO, || 7);
        assert!(matches!(refused, Err(NvmlError::Hangs { .. })));
        assert_eq!(hangs.now(), [], "it takes no longer than it may");
        drop(go_on);
        slow.unwrap().wait().unwrap();
    }
}
