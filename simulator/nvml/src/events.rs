//! Event sets: they wait for events that the daemon publishes in the page.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use nvml_wrapper_sys::bindings::{nvmlDevice_t, nvmlEventData_t, nvmlEventSet_t};
use tranche_simulator_machine::layout::EVENT_RING;

use crate::code::Code;
use crate::export::{export, put};
use crate::processes::NO_INSTANCE;
use crate::state::{device, handle, library};

/// Single and double bit ECC, performance state, Xid, and clock changes.
const SUPPORTED: u64 = 0x1f;
/// How often a waiting set reads the page. Events are rare, and a short delay does no harm.
const POLL: Duration = Duration::from_millis(10);

#[derive(Debug, Default)]
struct Set {
    /// The registered events (`nvmlEventType*` bits) of each GPU.
    registered: BTreeMap<usize, u64>,
    /// The number of the next event to read.
    next: u64,
}

static SETS: Mutex<BTreeMap<usize, Set>> = Mutex::new(BTreeMap::new());
static NEXT: AtomicUsize = AtomicUsize::new(1);

fn sets() -> std::sync::MutexGuard<'static, BTreeMap<usize, Set>> {
    SETS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The next event that is registered in set `id`, if there is one.
fn take(id: usize) -> Result<Option<nvmlEventData_t>, Code> {
    let shared = library()?.shared;
    let mut sets = sets();
    let set = sets.get_mut(&id).ok_or(Code::INVALID_ARGUMENT)?;
    let end = shared.header.events_end.load(Ordering::Acquire);
    // Events that the ring no longer has are skipped.
    set.next = set.next.max(end.saturating_sub(EVENT_RING as u64));
    while set.next < end {
        let event = &shared.events[usize::try_from(set.next).unwrap_or(0) % EVENT_RING];
        set.next += 1;
        let gpu = usize::try_from(event.gpu.load(Ordering::Relaxed)).unwrap_or(usize::MAX);
        let kind = event.kind.load(Ordering::Relaxed);
        if set
            .registered
            .get(&gpu)
            .is_some_and(|registered| registered & kind != 0)
        {
            return Ok(Some(nvmlEventData_t {
                device: handle(gpu),
                eventType: kind,
                eventData: event.data.load(Ordering::Relaxed),
                gpuInstanceId: NO_INSTANCE,
                computeInstanceId: NO_INSTANCE,
            }));
        }
    }
    Ok(None)
}

/// Waits for up to `timeout` milliseconds.
///
/// # Safety
/// `data` is null or valid for a write.
unsafe fn wait(set: nvmlEventSet_t, data: *mut nvmlEventData_t, timeout: u32) -> Result<(), Code> {
    if data.is_null() {
        return Err(Code::INVALID_ARGUMENT);
    }
    let end = Instant::now() + Duration::from_millis(u64::from(timeout));
    loop {
        if let Some(event) = take(set as usize)? {
            // SAFETY: the caller's contract.
            return unsafe { put(data, event) };
        }
        let left = end.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(Code::TIMEOUT);
        }
        std::thread::sleep(left.min(POLL));
    }
}

export! {
    fn nvmlDeviceGetSupportedEventTypes(of: nvmlDevice_t, kinds: *mut u64) {
        device(of)?;
        put(kinds, SUPPORTED)
    }
    fn nvmlEventSetCreate(set: *mut nvmlEventSet_t) {
        library()?;
        let id = NEXT.fetch_add(1, Ordering::Relaxed);
        put(set, id as nvmlEventSet_t)?;
        sets().insert(id, Set::default());
        Ok(())
    }
    fn nvmlEventSetFree(set: nvmlEventSet_t) {
        sets().remove(&(set as usize)).map(drop).ok_or(Code::INVALID_ARGUMENT)
    }
    fn nvmlDeviceRegisterEvents(of: nvmlDevice_t, kinds: u64, set: nvmlEventSet_t) {
        let device = device(of)?;
        if kinds & !SUPPORTED != 0 {
            return Err(Code::NOT_SUPPORTED);
        }
        let mut sets = sets();
        let set = sets.get_mut(&(set as usize)).ok_or(Code::INVALID_ARGUMENT)?;
        if set.registered.is_empty() {
            set.next = device.shared.header.events_end.load(Ordering::Acquire);
        }
        *set.registered.entry(device.gpu).or_default() |= kinds;
        Ok(())
    }
    fn nvmlEventSetWait(set: nvmlEventSet_t, data: *mut nvmlEventData_t, timeout: u32) {
        wait(set, data, timeout)
    }
    fn nvmlEventSetWait_v2(set: nvmlEventSet_t, data: *mut nvmlEventData_t, timeout: u32) {
        wait(set, data, timeout)
    }
}
