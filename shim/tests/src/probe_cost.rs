//! The time of calls of any driver, in nanoseconds: `cost LIVE` in wall time, `cpu-cost LIVE REFUSED` in CPU time of the
//! thread, where an allocation of `REFUSED` bytes must be refused.
//!
//! The kernel comes from PTX, launches never fill the driver's queue, and it takes no more memory than `LIVE` small blocks.

use std::ffi::c_void;

/// Calls in a round.
const CALLS: u32 = 200;
const ROUNDS: usize = 30;
/// Bytes of one allocation.
const BLOCK: u64 = 4096;
/// More than any GPU has: refused without a look at the driver's own books.
pub const TOO_MUCH: u64 = 1 << 50;

type Alloc = unsafe extern "C" fn(*mut u64, u64) -> u32;
type Free = unsafe extern "C" fn(u64) -> u32;
type Info = unsafe extern "C" fn(*mut u64, *mut u64) -> u32;
type AllocAsync = unsafe extern "C" fn(*mut u64, u64, u64) -> u32;
type FreeAsync = unsafe extern "C" fn(u64, u64) -> u32;
type Launch = unsafe extern "C" fn(u64, u32, u32, u32, u32, u32, u32, u32, u64, u64, u64) -> u32;
type Synchronize = unsafe extern "C" fn() -> u32;
type Ask = unsafe extern "C" fn(*const libc::c_char, *mut *mut c_void, i32, u64, *mut i32) -> u32;

/// The functions that are timed.
struct Calls {
    alloc: Alloc,
    free: Free,
    alloc_async: AllocAsync,
    free_async: FreeAsync,
    info: Info,
    launch: Launch,
    synchronize: Synchronize,
    ask: Ask,
    kernel: u64,
    clock: libc::clockid_t,
}

/// Times each call, with `live` allocations live for one of them. Answers with pairs of a call's name and
/// the median of its rounds, in nanoseconds of `clock`.
pub fn cost(
    find: impl Fn(&str) -> *mut c_void,
    kernel: u64,
    live: u64,
    clock: libc::clockid_t,
    refused: u64,
) -> String {
    // SAFETY: cuda.h's types of these functions.
    let calls = unsafe {
        Calls {
            alloc: std::mem::transmute::<*mut c_void, Alloc>(find("cuMemAlloc_v2")),
            free: std::mem::transmute::<*mut c_void, Free>(find("cuMemFree_v2")),
            alloc_async: std::mem::transmute::<*mut c_void, AllocAsync>(find("cuMemAllocAsync")),
            free_async: std::mem::transmute::<*mut c_void, FreeAsync>(find("cuMemFreeAsync")),
            info: std::mem::transmute::<*mut c_void, Info>(find("cuMemGetInfo_v2")),
            launch: std::mem::transmute::<*mut c_void, Launch>(find("cuLaunchKernel")),
            synchronize: std::mem::transmute::<*mut c_void, Synchronize>(find("cuCtxSynchronize")),
            ask: std::mem::transmute::<*mut c_void, Ask>(find("cuGetProcAddress_v2")),
            kernel,
            clock,
        }
    };
    let mut found = vec![
        ("alloc-free", calls.median(|| calls.alloc_and_free())),
        (
            "alloc-free-async",
            calls.median(|| calls.alloc_and_free_async()),
        ),
        ("refusal", calls.median(|| calls.refused(refused))),
        ("mem-info", calls.median(|| calls.mem_info())),
        ("proc-address", calls.median(|| calls.proc_address())),
        ("launch", calls.median(|| calls.launch())),
    ];
    let kept: Vec<u64> = (0..live).map(|_| calls.one_block()).collect();
    found.push(("alloc-free-live", calls.median(|| calls.alloc_and_free())));
    for pointer in kept {
        // SAFETY: allocated above, freed once.
        unsafe { (calls.free)(pointer) };
    }
    let words = found
        .iter()
        .map(|(name, nanoseconds)| format!(" {name} {nanoseconds:.1}"));
    format!("0{}", words.collect::<String>())
}

impl Calls {
    /// The median of the rounds. Launches are waited for between rounds, outside of the measured time.
    fn median(&self, once: impl Fn()) -> f64 {
        let round = || {
            let start = self.now();
            for _ in 0..CALLS {
                once();
            }
            let taken = (self.now() - start) / f64::from(CALLS);
            // SAFETY: takes no arguments.
            assert_eq!(unsafe { (self.synchronize)() }, 0, "cuCtxSynchronize");
            taken
        };
        // The first one finds its code and its data.
        round();
        let mut rounds: Vec<f64> = (0..ROUNDS).map(|_| round()).collect();
        rounds.sort_by(f64::total_cmp);
        rounds[ROUNDS / 2]
    }

    /// The clock, in nanoseconds.
    fn now(&self) -> f64 {
        let mut time = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // SAFETY: a clock of time.h and a place for its time.
        unsafe { libc::clock_gettime(self.clock, &raw mut time) };
        #[expect(clippy::cast_precision_loss, reason = "exact for a hundred days")]
        let nanos = (time.tv_sec * 1_000_000_000 + time.tv_nsec) as f64;
        nanos
    }

    fn one_block(&self) -> u64 {
        let mut pointer = 0;
        // SAFETY: a place for a pointer.
        let code = unsafe { (self.alloc)(&raw mut pointer, BLOCK) };
        assert_eq!(code, 0, "cuMemAlloc of {BLOCK} bytes");
        pointer
    }

    fn alloc_and_free(&self) {
        let pointer = self.one_block();
        // SAFETY: allocated just now.
        assert_eq!(unsafe { (self.free)(pointer) }, 0, "cuMemFree");
    }

    fn alloc_and_free_async(&self) {
        let mut pointer = 0;
        // SAFETY: a place for a pointer, and the default stream.
        let code = unsafe { (self.alloc_async)(&raw mut pointer, BLOCK, 0) };
        assert_eq!(code, 0, "cuMemAllocAsync of {BLOCK} bytes");
        // SAFETY: allocated just now.
        let code = unsafe { (self.free_async)(pointer, 0) };
        assert_eq!(code, 0, "cuMemFreeAsync");
    }

    fn refused(&self, bytes: u64) {
        let mut pointer = 0;
        // SAFETY: a place for a pointer.
        let code = unsafe { (self.alloc)(&raw mut pointer, bytes) };
        assert_eq!(code, 2, "cuMemAlloc of {bytes} bytes");
    }

    fn mem_info(&self) {
        let (mut free, mut total) = (0, 0);
        // SAFETY: places for two sizes.
        let code = unsafe { (self.info)(&raw mut free, &raw mut total) };
        assert_eq!(code, 0, "cuMemGetInfo");
    }

    fn proc_address(&self) {
        let (mut address, mut status) = (std::ptr::null_mut(), 0);
        // SAFETY: a C string, and places for a pointer and an int.
        let code = unsafe {
            (self.ask)(
                c"cuMemAlloc".as_ptr(),
                &raw mut address,
                12000,
                0,
                &raw mut status,
            )
        };
        assert_eq!(code, 0, "cuGetProcAddress");
    }

    fn launch(&self) {
        // SAFETY: a function of a loaded module that takes no arguments.
        let code = unsafe { (self.launch)(self.kernel, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0) };
        assert_eq!(code, 0, "cuLaunchKernel");
    }
}
