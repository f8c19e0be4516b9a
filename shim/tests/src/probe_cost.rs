//! The time of calls of any driver, in nanoseconds: `cost LIVE` in wall time, `cpu-cost LIVE REFUSED` in CPU time of the
//! thread, where an allocation of `REFUSED` bytes must be refused.
//!
//! The kernel comes from PTX, launches never fill the driver's queue, and it takes no more memory than `LIVE` small blocks
//! and what four pools take for a small allocation each. Calls with pools are timed only where the driver has pools.

use std::ffi::c_void;

/// Calls in a round.
const CALLS: u32 = 200;
const ROUNDS: usize = 30;
/// Bytes of one allocation.
const BLOCK: u64 = 4096;
/// More than any GPU has: refused without a look at the driver's own books.
pub const TOO_MUCH: u64 = 1 << 50;

/// Pools that have memory when calls with pools are timed: the default pool, and further ones.
const POOLS: usize = 4;

type Alloc = unsafe extern "C" fn(*mut u64, u64) -> u32;
type Free = unsafe extern "C" fn(u64) -> u32;
type Info = unsafe extern "C" fn(*mut u64, *mut u64) -> u32;
type Launch = unsafe extern "C" fn(u64, u32, u32, u32, u32, u32, u32, u32, u64, u64, u64) -> u32;
type Synchronize = unsafe extern "C" fn() -> u32;
type AllocAsync = unsafe extern "C" fn(*mut u64, u64, u64) -> u32;
type AllocFromPool = unsafe extern "C" fn(*mut u64, u64, u64, u64) -> u32;
type FreeAsync = unsafe extern "C" fn(u64, u64) -> u32;
type SynchronizeStream = unsafe extern "C" fn(u64) -> u32;
type CreatePool = unsafe extern "C" fn(*mut u64, *const PoolProperties) -> u32;
type Ask = unsafe extern "C" fn(*const libc::c_char, *mut *mut c_void, i32, u64, *mut i32) -> u32;

/// The functions that are timed.
struct Calls {
    alloc: Alloc,
    free: Free,
    info: Info,
    launch: Launch,
    synchronize: Synchronize,
    alloc_async: AllocAsync,
    alloc_from_pool: AllocFromPool,
    free_async: FreeAsync,
    synchronize_stream: SynchronizeStream,
    create_pool: CreatePool,
    ask: Ask,
    kernel: u64,
    clock: libc::clockid_t,
}

/// `CUmemPoolProps`: pinned memory of the first device.
#[repr(C)]
struct PoolProperties {
    kind: u32,
    handles: u32,
    location: [u32; 2],
    rest: [u64; 9],
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
            info: std::mem::transmute::<*mut c_void, Info>(find("cuMemGetInfo_v2")),
            launch: std::mem::transmute::<*mut c_void, Launch>(find("cuLaunchKernel")),
            synchronize: std::mem::transmute::<*mut c_void, Synchronize>(find("cuCtxSynchronize")),
            alloc_async: std::mem::transmute::<*mut c_void, AllocAsync>(find("cuMemAllocAsync")),
            alloc_from_pool: std::mem::transmute::<*mut c_void, AllocFromPool>(find(
                "cuMemAllocFromPoolAsync",
            )),
            free_async: std::mem::transmute::<*mut c_void, FreeAsync>(find("cuMemFreeAsync")),
            synchronize_stream: std::mem::transmute::<*mut c_void, SynchronizeStream>(find(
                "cuStreamSynchronize",
            )),
            create_pool: std::mem::transmute::<*mut c_void, CreatePool>(find("cuMemPoolCreate")),
            ask: std::mem::transmute::<*mut c_void, Ask>(find("cuGetProcAddress_v2")),
            kernel,
            clock,
        }
    };
    let mut found = vec![
        ("alloc-free", calls.median(|| calls.alloc_and_free())),
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
    if calls.make_pools() {
        found.push((
            "alloc-free-async",
            calls.median(|| calls.alloc_and_free_async()),
        ));
        found.push(("sync-pools", calls.median(|| calls.synchronize())));
        // As before the first time: takes the spares, which every query of the free memory adds up.
        calls.refused(refused);
        found.push(("mem-info-pools", calls.median(|| calls.mem_info())));
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

    /// Allocates a block from each pool; false if the driver has no pools.
    fn make_pools(&self) -> bool {
        let mut pointer = 0;
        // SAFETY: a place for a pointer; the default stream.
        let has_pools = unsafe { (self.alloc_async)(&raw mut pointer, BLOCK, 0) } == 0;
        for _ in 1..POOLS {
            let (mut pool, properties) = (
                0,
                PoolProperties {
                    kind: 1,
                    handles: 0,
                    location: [1, 0],
                    rest: [0; 9],
                },
            );
            // SAFETY: places for a handle and a pointer, properties as cuda.h has them, and the pool that was just made.
            let code = unsafe {
                if !has_pools {
                    break;
                }
                (self.create_pool)(&raw mut pool, &raw const properties)
                    + (self.alloc_from_pool)(&raw mut pointer, BLOCK, pool, 0)
            };
            assert_eq!(code, 0, "a pool");
        }
        has_pools
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

    fn synchronize(&self) {
        // SAFETY: the default stream.
        let code = unsafe { (self.synchronize_stream)(0) };
        assert_eq!(code, 0, "cuStreamSynchronize");
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
