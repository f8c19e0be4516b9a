//! Threads that allocate and free device memory at random, in every way.

use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};

const BLOCK: u64 = 2 << 20;
/// Bytes of an element of the arrays made here.
const ELEMENT: u64 = 16;

type Call = unsafe extern "C" fn(u64, u64, u64, u64, u64, u64) -> u32;

/// The driver, and counters of the calls so far.
pub struct Storm<F> {
    find: F,
    taken: AtomicU64,
    refused: AtomicU64,
    failed: AtomicU64,
}

/// Memory that a thread holds.
enum LiveMemory {
    Pointer(u64),
    Handle(u64),
    Mapped { at: u64, bytes: u64 },
    Array(u64),
    Mipmap(u64),
    Pool { pool: u64, pointers: Vec<u64> },
    Graph { graph: u64, executable: u64 },
}

struct Random(u64);

impl Random {
    fn below(&mut self, most: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % most.max(1)
    }
}

impl<F: Fn(&str) -> *mut c_void + Sync> Storm<F> {
    pub fn new(find: F) -> Self {
        Self {
            find,
            taken: AtomicU64::new(0),
            refused: AtomicU64::new(0),
            failed: AtomicU64::new(0),
        }
    }

    /// `count` threads, `operations` each, with up to `most` bytes at once. Answers with how many
    /// took memory, how many were refused, and how many failed otherwise; then all is freed.
    pub fn run(&self, count: u64, operations: u64, most: u64) -> String {
        let mut context = [0u64];
        self.call(
            "cuCtxGetCurrent",
            [context.as_mut_ptr() as u64, 0, 0, 0, 0, 0],
        );
        let [context] = context;
        std::thread::scope(|scope| {
            for thread in 0..count {
                scope.spawn(move || {
                    self.call("cuCtxSetCurrent", [context, 0, 0, 0, 0, 0]);
                    let seed = (u64::from(std::process::id()) << 20) + thread + 1;
                    self.thread(&mut Random(seed), operations, most);
                });
            }
        });
        let [taken, refused, failed] =
            [&self.taken, &self.refused, &self.failed].map(|count| count.load(Ordering::Relaxed));
        format!("0 {taken} {refused} {failed}")
    }

    fn thread(&self, random: &mut Random, operations: u64, most: u64) {
        let mut held = Vec::new();
        for _ in 0..operations {
            if held.is_empty() || random.below(5) > 1 {
                held.extend(self.take(random, most));
            } else {
                let nth = usize::try_from(random.below(held.len() as u64)).unwrap();
                let one = held.swap_remove(nth);
                self.free_again(random, one);
            }
        }
        for one in held {
            self.free_again(random, one);
        }
    }

    fn call(&self, name: &str, [x0, x1, x2, x3, x4, x5]: [u64; 6]) -> u32 {
        // SAFETY: in this ABI integers and pointers of any width pass in words, and those that a
        // function does not take do no harm; the callers here pass what cuda.h says.
        unsafe {
            std::mem::transmute::<*mut c_void, Call>((self.find)(name))(x0, x1, x2, x3, x4, x5)
        }
    }

    /// Makes a call that takes memory; returns what it wrote to its first argument.
    fn ask(&self, name: &str, rest: [u64; 5]) -> Option<u64> {
        let mut out = [0u64];
        let [x1, x2, x3, x4, x5] = rest;
        match self.call(name, [out.as_mut_ptr() as u64, x1, x2, x3, x4, x5]) {
            0 => {
                self.taken.fetch_add(1, Ordering::Relaxed);
                Some(out[0])
            }
            2 => {
                self.refused.fetch_add(1, Ordering::Relaxed);
                None
            }
            code => {
                eprintln!("{name}: {code}");
                self.failed.fetch_add(1, Ordering::Relaxed);
                None
            }
        }
    }

    /// A call that must succeed.
    fn must(&self, name: &str, arguments: [u64; 6]) {
        let code = self.call(name, arguments);
        if code != 0 {
            eprintln!("{name}: {code}");
            self.failed.fetch_add(1, Ordering::Relaxed);
        }
    }

    fn take(&self, random: &mut Random, most: u64) -> Option<LiveMemory> {
        let bytes = 1 + random.below(most);
        let blocks = bytes.next_multiple_of(BLOCK);
        match random.below(12) {
            0 | 1 => self
                .ask("cuMemAlloc_v2", [bytes, 0, 0, 0, 0])
                .map(LiveMemory::Pointer),
            2 | 3 => {
                let bytes = 1 + random.below(1 << 20);
                self.ask("cuMemAlloc_v2", [bytes, 0, 0, 0, 0])
                    .map(LiveMemory::Pointer)
            }
            4 => self
                .ask("cuMemAllocAsync", [bytes, 0, 0, 0, 0])
                .map(LiveMemory::Pointer),
            5 => {
                let bytes = 1 + random.below(1 << 20);
                self.ask("cuMemAllocAsync_ptsz", [bytes, 0, 0, 0, 0])
                    .map(LiveMemory::Pointer)
            }
            6 => {
                let mut pitch = 0u64;
                let rows = 1 + bytes / 4096;
                self.ask(
                    "cuMemAllocPitch_v2",
                    [(&raw mut pitch) as u64, 4000, rows, 4, 0],
                )
                .map(LiveMemory::Pointer)
            }
            7 => {
                // Pinned memory of device 0, which can be exported.
                let properties = [1u64 | 1 << 32, 1, 0, 0];
                let handle =
                    self.ask("cuMemCreate", [blocks, properties.as_ptr() as u64, 0, 0, 0])?;
                if random.below(4) == 0 {
                    self.pass_on(handle);
                }
                Some(if random.below(2) == 0 {
                    LiveMemory::Handle(handle)
                } else {
                    self.map(random, handle, blocks)
                })
            }
            8 => self.array(random, bytes),
            9 => Some(self.pool(random, bytes)),
            10 => Some(self.graph(bytes)),
            _ => {
                self.must("cuCtxSynchronize", [0; 6]);
                let (mut free, mut total) = (0u64, 0u64);
                self.must(
                    "cuMemGetInfo_v2",
                    [(&raw mut free) as u64, (&raw mut total) as u64, 0, 0, 0, 0],
                );
                None
            }
        }
    }

    /// Exports a handle, imports the memory again, and closes the descriptor.
    fn pass_on(&self, handle: u64) {
        let mut descriptor = [0u32];
        self.must(
            "cuMemExportToShareableHandle",
            [descriptor.as_mut_ptr() as u64, handle, 1, 0, 0, 0],
        );
        let [descriptor] = descriptor;
        let import = [u64::from(descriptor), 1, 0, 0, 0];
        if let Some(imported) = self.ask("cuMemImportFromShareableHandle", import) {
            self.must("cuMemRelease", [imported, 0, 0, 0, 0, 0]);
        }
        // SAFETY: what the driver has just opened for this thread.
        unsafe { libc::close(descriptor.cast_signed()) };
    }

    /// Maps a handle, and releases the handle now, or keeps it for another mapping.
    fn map(&self, random: &mut Random, handle: u64, bytes: u64) -> LiveMemory {
        let mut at = 0u64;
        self.must(
            "cuMemAddressReserve",
            [(&raw mut at) as u64, bytes, 0, 0, 0, 0],
        );
        self.must("cuMemMap", [at, bytes, 0, handle, 0, 0]);
        if random.below(2) == 0 {
            let mut again = 0u64;
            self.must(
                "cuMemRetainAllocationHandle",
                [(&raw mut again) as u64, at, 0, 0, 0, 0],
            );
            self.must("cuMemRelease", [again, 0, 0, 0, 0, 0]);
        }
        self.must("cuMemRelease", [handle, 0, 0, 0, 0, 0]);
        LiveMemory::Mapped { at, bytes }
    }

    fn array(&self, random: &mut Random, bytes: u64) -> Option<LiveMemory> {
        let width = 1 + random.below(4096);
        let height = 1 + bytes / (width * ELEMENT).max(1) % 16_384;
        // Four floats.
        let shape = [width, height, 0, 0x20 | 4 << 32, 0];
        if random.below(2) == 0 {
            self.ask(
                "cuArrayCreate_v2",
                [[width, height, 0x20 | 4 << 32].as_ptr() as u64, 0, 0, 0, 0],
            )
            .map(LiveMemory::Array)
        } else {
            self.ask(
                "cuMipmappedArrayCreate",
                [shape.as_ptr() as u64, 1 + random.below(4), 0, 0, 0],
            )
            .map(LiveMemory::Mipmap)
        }
    }

    /// A pool that keeps some memory, with a few allocations.
    fn pool(&self, random: &mut Random, bytes: u64) -> LiveMemory {
        const RELEASE_THRESHOLD: u64 = 4;
        let mut properties = [0u64; 11];
        (properties[0], properties[1]) = (1, 1);
        let mut pool = 0u64;
        self.must(
            "cuMemPoolCreate",
            [
                (&raw mut pool) as u64,
                properties.as_ptr() as u64,
                0,
                0,
                0,
                0,
            ],
        );
        let threshold = random.below(bytes);
        self.must(
            "cuMemPoolSetAttribute",
            [
                pool,
                RELEASE_THRESHOLD,
                (&raw const threshold) as u64,
                0,
                0,
                0,
            ],
        );
        let mut pointers: Vec<u64> = (0..=random.below(4))
            .filter_map(|_| {
                let bytes = 1 + random.below(bytes);
                self.ask("cuMemAllocFromPoolAsync", [bytes, pool, 0, 0, 0])
            })
            .collect();
        if let Some(early) = pointers.pop() {
            self.must("cuMemFreeAsync", [early, 0, 0, 0, 0, 0]);
        }
        LiveMemory::Pool { pool, pointers }
    }

    /// A graph with one memory node.
    fn graph(&self, bytes: u64) -> LiveMemory {
        let (mut graph, mut node, mut executable) = (0u64, 0u64, 0u64);
        self.must("cuGraphCreate", [(&raw mut graph) as u64, 0, 0, 0, 0, 0]);
        let mut parameters = [0u64; 15];
        (parameters[0], parameters[1], parameters[13]) = (1, 1, bytes);
        let ask = [graph, 0, 0, parameters.as_mut_ptr() as u64, 0];
        node = self.ask("cuGraphAddMemAllocNode", ask).unwrap_or(node);
        if node != 0 {
            executable = self
                .ask("cuGraphInstantiateWithFlags", [graph, 0, 0, 0, 0])
                .unwrap_or(0);
        }
        if executable != 0 {
            self.must("cuGraphLaunch", [executable, 0, 0, 0, 0, 0]);
        }
        LiveMemory::Graph { graph, executable }
    }

    fn free_again(&self, random: &mut Random, held: LiveMemory) {
        let one = |number| [number, 0, 0, 0, 0, 0];
        match held {
            // Any call frees any pointer.
            LiveMemory::Pointer(pointer) if random.below(2) == 0 => {
                self.must("cuMemFree_v2", one(pointer));
            }
            LiveMemory::Pointer(pointer) => self.must("cuMemFreeAsync", one(pointer)),
            LiveMemory::Handle(handle) => self.must("cuMemRelease", one(handle)),
            LiveMemory::Mapped { at, bytes } => {
                self.must("cuMemUnmap", [at, bytes, 0, 0, 0, 0]);
                self.must("cuMemAddressFree", [at, bytes, 0, 0, 0, 0]);
            }
            LiveMemory::Array(array) => self.must("cuArrayDestroy", one(array)),
            LiveMemory::Mipmap(mipmap) => self.must("cuMipmappedArrayDestroy", one(mipmap)),
            LiveMemory::Pool { pool, pointers } => {
                // The pool is destroyed first, last, or in between.
                let when = random.below(pointers.len() as u64 + 1);
                for (nth, pointer) in pointers.iter().enumerate() {
                    if nth as u64 == when {
                        self.must("cuMemPoolDestroy", one(pool));
                    }
                    self.must("cuMemFree_v2", one(*pointer));
                }
                if when == pointers.len() as u64 {
                    self.must("cuMemPoolDestroy", one(pool));
                }
            }
            LiveMemory::Graph { graph, executable } => {
                self.must("cuGraphDestroy", one(graph));
                if executable != 0 {
                    self.must("cuGraphExecDestroy", one(executable));
                }
            }
        }
    }
}
