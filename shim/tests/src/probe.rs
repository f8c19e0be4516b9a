//! A CUDA program that executes commands: it reads them from stdin, one per line, and writes answers to stdout.
//!
//! usage: `tranche-shim-probe HOW [COMMAND]`, where HOW is how the driver is loaded: `name` (dlopen of
//! libcuda.so.1), `deepbind`, `global`, `namespace` (dlmopen), `default` (RTLD_DEFAULT: preloaded), or a path.
//!
//! Besides the commands below it calls any function: see `probe_raw`.
//!
//! With a command it executes only that one. An answer is the driver's result code and the values that it wrote.

#![allow(
    clippy::unwrap_used,
    reason = "a probe that cannot go on dies, and its test says so"
)]

use std::ffi::{CStr, CString, c_void};
use std::fmt::Write as _;
use std::io::Write as _;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use tranche_shim_core::paths::REAL_CUDA;

/// What `alloc` got last.
static LAST: AtomicU64 = AtomicU64::new(0);

/// The module that `kernel` loaded last.
static MODULE: AtomicU64 = AtomicU64::new(0);

mod probe_cost;
mod probe_raw;
mod probe_storm;

struct Cuda(*mut c_void);

// SAFETY: a handle of the loader, usable from any thread.
unsafe impl Sync for Cuda {}

macro_rules! call {
    ($cuda:expr, $name:expr, $($argument:expr => $type:ty),*) => {{
        let address = $cuda.find($name);
        // SAFETY: the types are cuda.h's, and the arguments valid for the call.
        unsafe {
            std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($type),*) -> u32>(address)($($argument),*)
        }
    }};
}

impl Cuda {
    fn load(how: &str) -> Self {
        let name = c"libcuda.so.1";
        let lazy = libc::RTLD_LAZY;
        // SAFETY: C strings and flags of dlfcn.h.
        let handle = unsafe {
            match how {
                "name" => libc::dlopen(name.as_ptr(), lazy),
                "deepbind" => libc::dlopen(name.as_ptr(), lazy | libc::RTLD_DEEPBIND),
                "global" => libc::dlopen(name.as_ptr(), lazy | libc::RTLD_GLOBAL),
                "namespace" => libc::dlmopen(libc::LM_ID_NEWLM, name.as_ptr(), lazy),
                "default" => libc::RTLD_DEFAULT,
                path => libc::dlopen(CString::new(path).unwrap().as_ptr(), lazy),
            }
        };
        assert!(
            !handle.is_null() || how == "default",
            "{how}: cannot be loaded"
        );
        Self(handle)
    }

    fn find(&self, name: &str) -> *mut c_void {
        let name_c = CString::new(name).unwrap();
        // SAFETY: a handle and a C string.
        let address = unsafe { libc::dlsym(self.0, name_c.as_ptr()) };
        assert!(!address.is_null(), "{name}: no such symbol");
        address
    }
}

fn main() {
    let how = std::env::args()
        .nth(1)
        .expect("usage: tranche-shim-probe HOW");
    let cuda = Cuda::load(&how);
    if let Some(command) = std::env::args().nth(2) {
        let answer = answer_to(&cuda, &[&command]);
        std::process::exit(i32::from(answer != "0"));
    }
    serve(&cuda);
}

/// Serves until `end`, or until the end of the input.
fn serve(cuda: &Cuda) {
    let mut line = String::new();
    // Not locked for longer than a line, because the child of a fork continues to read.
    while std::io::stdin().read_line(&mut line).unwrap() > 0 {
        let words: Vec<&str> = line.split_whitespace().collect();
        if words.first() == Some(&"end") {
            println!("0");
            return;
        }
        let answer = answer_to(cuda, &words);
        println!("{answer}");
        std::io::stdout().flush().unwrap();
        line.clear();
    }
}

#[expect(clippy::too_many_lines, reason = "one line per command")]
fn answer_to(cuda: &Cuda, words: &[&str]) -> String {
    if let Some(answer) = probe_raw::answer_to(words, |name| cuda.find(name)) {
        return answer;
    }
    let number = |nth: usize| -> u64 { words.get(nth).map_or(0, |word| word.parse().unwrap()) };
    #[expect(clippy::cast_possible_truncation, reason = "the tests' own numbers")]
    let int = |nth: usize| number(nth) as i32;
    let (mut out, mut out_too) = (0u64, 0u64);
    let (out, out_too) = (&raw mut out, &raw mut out_too);
    // SAFETY: reads the two locals.
    let outs = |code: u32| unsafe { format!("{code} {} {}", *out, *out_too) };
    match words[0] {
        "init" => format!("{}", call!(cuda, "cuInit", 0 => u32)),
        "count" => {
            let mut count = 0;
            let code = call!(cuda, "cuDeviceGetCount", &raw mut count => *mut i32);
            format!("{code} {count}")
        }
        "context" => outs(call!(cuda, "cuCtxCreate_v2", out => *mut u64, 0 => u32, int(1) => i32)),
        "context-unseen" => outs(context_unseen(cuda, out, int(1))),
        "primary-unseen" => outs(primary_unseen(cuda, out, int(1))),
        "current" => outs(call!(cuda, "cuCtxSetCurrent", number(1) => u64)),
        "destroy" => outs(call!(cuda, "cuCtxDestroy_v2", number(1) => u64)),
        "primary" => {
            let code = call!(cuda, "cuDevicePrimaryCtxRetain", out => *mut u64, int(1) => i32);
            call!(cuda, "cuCtxSetCurrent", *out => u64);
            outs(code)
        }
        "reset" => format!(
            "{}",
            call!(cuda, "cuDevicePrimaryCtxReset_v2", int(1) => i32)
        ),
        "unprimary" => format!(
            "{}",
            call!(cuda, "cuDevicePrimaryCtxRelease_v2", int(1) => i32)
        ),
        "alloc" => {
            let code = call!(cuda, "cuMemAlloc_v2", out => *mut u64, number(1) => u64);
            // SAFETY: the local.
            LAST.store(unsafe { *out }, Ordering::Relaxed);
            outs(code)
        }
        "free-last" => format!(
            "{}",
            call!(cuda, "cuMemFree_v2", LAST.load(Ordering::Relaxed) => u64)
        ),
        "alloc-null" => {
            outs(call!(cuda, "cuMemAlloc_v2", std::ptr::null_mut() => *mut u64, number(1) => u64))
        }
        "managed" => {
            outs(call!(cuda, "cuMemAllocManaged", out => *mut u64, number(1) => u64, 1 => u32))
        }
        "async" => {
            outs(call!(cuda, "cuMemAllocAsync", out => *mut u64, number(1) => u64, 0 => u64))
        }
        "async-ptsz" => {
            outs(call!(cuda, "cuMemAllocAsync_ptsz", out => *mut u64, number(1) => u64, 0 => u64))
        }
        "pitch" => outs(
            call!(cuda, "cuMemAllocPitch_v2", out => *mut u64, out_too => *mut u64, number(1) => u64, number(2) => u64, 4 => u32),
        ),
        "free" => format!("{}", call!(cuda, "cuMemFree_v2", number(1) => u64)),
        "free-async" => format!(
            "{}",
            call!(cuda, "cuMemFreeAsync", number(1) => u64, 0 => u64)
        ),
        "synchronize" => format!("{}", call!(cuda, "cuCtxSynchronize",)),
        "info" => outs(call!(cuda, "cuMemGetInfo_v2", out => *mut u64, out_too => *mut u64)),
        "info-free" => {
            outs(call!(cuda, "cuMemGetInfo_v2", out => *mut u64, std::ptr::null_mut() => *mut u64))
        }
        "info-total" => outs(
            call!(cuda, "cuMemGetInfo_v2", std::ptr::null_mut() => *mut u64, out_too => *mut u64),
        ),
        "info-none" => outs(
            call!(cuda, "cuMemGetInfo_v2", std::ptr::null_mut() => *mut u64, std::ptr::null_mut() => *mut u64),
        ),
        "total" => outs(call!(cuda, "cuDeviceTotalMem_v2", out => *mut u64, int(1) => i32)),
        "total-legacy" => {
            let mut bytes = 0u32;
            let code = call!(cuda, "cuDeviceTotalMem", &raw mut bytes => *mut u32, int(1) => i32);
            format!("{code} {bytes}")
        }
        "uuid" => {
            let mut uuid = [0u8; 16];
            let code =
                call!(cuda, "cuDeviceGetUuid", &raw mut uuid => *mut [u8; 16], int(1) => i32);
            format!("{code} {}", tranche_shim_core::GpuUuid(uuid))
        }
        "address" => {
            let mut address = std::ptr::null_mut();
            let mut status = -1;
            let name = CString::new(words[1]).unwrap();
            let code = call!(cuda, "cuGetProcAddress_v2", name.as_ptr() => *const libc::c_char, &raw mut address => *mut *mut c_void, int(2) => i32, number(3) => u64, &raw mut status => *mut i32);
            let (file, symbol) = place(address);
            format!("{code} {status} {file} {symbol}")
        }
        "compare" => compare(cuda, words[1]),
        "kernel" => format!("0 {}", kernel(cuda, words[1])),
        "launch-grid" => {
            let [grid, stream] = [number(2), number(3)];
            #[expect(clippy::cast_possible_truncation, reason = "the tests' own numbers")]
            let grid = grid as u32;
            let code = call!(cuda, "cuLaunchKernel", number(1) => u64, grid => u32, 1 => u32, 1 => u32, 32 => u32, 1 => u32, 1 => u32, 0 => u32, stream => u64, 0 => u64, 0 => u64);
            format!("{code}")
        }
        "unload-last" => format!(
            "{}",
            call!(cuda, "cuModuleUnload", MODULE.load(Ordering::Relaxed) => u64)
        ),
        "launch-growing" => launch_growing(cuda, number(1), number(2), number(3)),
        "launch" => launch(cuda, words[1], number(2), number(3), number(4)),
        "requests" => {
            let pause = std::time::Duration::from_micros(number(4));
            requests(cuda, number(1), number(2), number(3), pause)
        }
        "kernels" => {
            *KERNELS.lock().unwrap() = kernels(cuda, number(1), number(2), number(3));
            "0".into()
        }
        "launch-all" => launch_all(cuda, number(1), words[2] == "new"),
        "end-twice" => end_twice(cuda, words[1], number(2)),
        "abandon-capture" => {
            let mut stream = 0u64;
            call!(cuda, "cuStreamCreate", &raw mut stream => *mut u64, 1 => u32);
            call!(cuda, "cuStreamBeginCapture_v2", stream => u64, 0 => u32);
            format!("{}", call!(cuda, "cuStreamDestroy_v2", stream => u64))
        }
        "registers" => {
            // The address of everything that a call may carry: more integers than registers, and a float.
            let sum = call!(cuda, "cuLaunchKernel", 1 => u64, 2 => u32, 3 => u32, 4 => u32, 5 => u32, 6 => u32, 7 => u32, 8 => u32, 9 => u64, 10 => u64, 11 => u64);
            let passed = call!(cuda, "cuLinkAddData", 1 => u64, 2 => u32, 3 => u64, 4 => u64, 5 => u64, 6 => u32, 7 => u64, 8 => u64);
            let float = call!(cuda, "cuTexRefSetMipmapLevelBias", 0 => u64, 1.5 => f32);
            format!("{sum} {passed} {float}")
        }
        "steer" => format!("{}", steer(cuda, words[1], number(2))),
        "cost" | "cpu-cost" => {
            let kernel = kernel(cuda, "sim_busy_0us");
            let (clock, refused) = match words[0] {
                "cost" => (libc::CLOCK_MONOTONIC, probe_cost::TOO_MUCH),
                _ => (libc::CLOCK_THREAD_CPUTIME_ID, number(2)),
            };
            probe_cost::cost(|name| cuda.find(name), kernel, number(1), clock, refused)
        }
        "instructions" => instructions(cuda, words[1], number(2)),
        "repeat" => {
            let mut refused = 0;
            for _ in 0..number(1) {
                if call!(cuda, "cuMemAlloc_v2", out => *mut u64, number(2) => u64) == 0 {
                    // SAFETY: the local.
                    let pointer = unsafe { *out };
                    call!(cuda, "cuMemFree_v2", pointer => u64);
                } else {
                    refused += 1;
                }
            }
            format!("0 {refused}")
        }
        "exec" => {
            use std::os::unix::process::CommandExt as _;
            // Commands after this answer are for the next program.
            println!("0");
            let error = std::process::Command::new("/proc/self/exe")
                .arg("name")
                .exec();
            panic!("exec: {error}")
        }
        "fork" => fork(cuda),
        "spawn" => {
            // By posix_spawn, which is vfork and exec.
            let arguments = ["name", "init"];
            let mut child = std::process::Command::new("/proc/self/exe");
            let done = child
                .args(arguments)
                .stdin(std::process::Stdio::null())
                .stderr(std::process::Stdio::null())
                .status()
                .unwrap();
            format!("{}", done.code().unwrap())
        }
        "between-breakpoints" => between_breakpoints(cuda, words[1]),
        "storm" => {
            let find = |name: &str| cuda.find(name);
            probe_storm::Storm::new(find).run(number(1), number(2), number(3))
        }
        "threads" => threads(cuda, number(1), number(2), number(3)),
        "descriptors" => format!("0 {}", std::fs::read_dir("/proc/self/fd").unwrap().count()),
        "open-to-write" => {
            // Open until the process ends.
            let file = std::fs::OpenOptions::new()
                .read(true)
                .write(true)
                .open(words[1])
                .unwrap();
            format!("0 {}", std::os::fd::IntoRawFd::into_raw_fd(file))
        }
        "take-descriptor" => format!("0 {}", take_descriptor(int(1), int(2))),
        "close" => {
            // SAFETY: a descriptor that the test names.
            format!("{}", unsafe { libc::close(int(1)) })
        }
        "close-all" => {
            for fd in 3..1024 {
                // SAFETY: what a daemon does at its start.
                unsafe { libc::close(fd) };
            }
            "0".into()
        }
        other => panic!("{other}: no such command"),
    }
}

/// A copy of another process's descriptor, as if that process had sent it.
fn take_descriptor(pid: i32, number: i32) -> i64 {
    // SAFETY: both calls take and return numbers.
    unsafe {
        let process = libc::syscall(libc::SYS_pidfd_open, pid, 0);
        assert!(process >= 0, "pidfd_open: {pid}");
        let taken = libc::syscall(libc::SYS_pidfd_getfd, process, number, 0);
        assert!(taken >= 0, "pidfd_getfd: {number} of {pid}");
        taken
    }
}

/// Makes a call, or a pair, between two breakpoints, for a debugger. It was made once before, so that nothing is looked up.
fn between_breakpoints(cuda: &Cuda, what: &str) -> String {
    type Alloc = unsafe extern "C" fn(*mut u64, u64) -> u32;
    type Free = unsafe extern "C" fn(u64) -> u32;
    type Launch =
        unsafe extern "C" fn(u64, u32, u32, u32, u32, u32, u32, u32, u64, u64, u64) -> u32;
    // SAFETY: cuda.h's types of these functions.
    let (alloc, free, launch) = unsafe {
        (
            std::mem::transmute::<*mut c_void, Alloc>(cuda.find("cuMemAlloc_v2")),
            std::mem::transmute::<*mut c_void, Free>(cuda.find("cuMemFree_v2")),
            std::mem::transmute::<*mut c_void, Launch>(cuda.find("cuLaunchKernel")),
        )
    };
    let once = |pointer: &mut u64| {
        // SAFETY: all arguments are valid.
        unsafe {
            match what {
                "alloc-free" => alloc(pointer, 4 << 20) + free(*pointer),
                "alloc-free-much" => alloc(pointer, 32 << 20) + free(*pointer),
                "alloc-free-all" => {
                    let some = alloc(pointer, 4 << 20) + free(*pointer);
                    some + alloc(pointer, 20 << 30) + free(*pointer)
                }
                "refused" => alloc(pointer, 1 << 50),
                "launch" => launch(1, 1, 1, 1, 32, 1, 1, 0, 0, 0, 0),
                _ => panic!("{what}: no call to stop at"),
            }
        }
    };
    let mut pointer = 0;
    once(&mut pointer);
    // SAFETY: stops for the debugger, and does nothing else.
    unsafe { std::arch::asm!("int3") };
    let code = once(&mut pointer);
    // SAFETY: as above.
    unsafe { std::arch::asm!("int3") };
    format!("{code}")
}

/// The file and symbol of an address.
fn place(address: *mut c_void) -> (String, String) {
    if address.is_null() {
        return ("-".into(), "-".into());
    }
    // SAFETY: all-zero is valid; dladdr takes any address, and fills in C strings or null.
    unsafe {
        let mut info: libc::Dl_info = std::mem::zeroed();
        libc::dladdr(address, &raw mut info);
        let text = |c: *const libc::c_char| {
            if c.is_null() {
                "-".into()
            } else {
                CStr::from_ptr(c).to_string_lossy().into_owned()
            }
        };
        (text(info.dli_fname), text(info.dli_sname))
    }
}

/// Asks the shim and the driver behind it for every symbol, version and flag, in both forms of
/// cuGetProcAddress. The file has the versions on its first line, then symbols and their classes. Answers how often both
/// returned the same, how often ours was the twin of theirs, and how often neither; the first such case, and the names (at
/// most 50) of these cases.
fn compare(shim: &Cuda, list: &str) -> String {
    type Ask =
        unsafe extern "C" fn(*const libc::c_char, *mut *mut c_void, i32, u64, *mut i32) -> u32;
    let real = Cuda::load(REAL_CUDA.to_str().unwrap());
    let text = std::fs::read_to_string(list).unwrap();
    let (versions, rows) = text.split_once('\n').unwrap();
    let versions: Vec<i32> = versions
        .split(' ')
        .map(|word| word.parse().unwrap())
        .collect();
    let class: std::collections::BTreeMap<&str, &str> = rows
        .lines()
        .map(|line| line.split_once(' ').unwrap())
        .collect();
    let mut names: std::collections::BTreeSet<&str> = class.keys().copied().collect();
    for name in class.keys() {
        // The names under which the functions are looked up, and names that do not exist.
        let name = name.trim_end_matches("_ptsz").trim_end_matches("_ptds");
        names.insert(name.rsplit_once("_v").map_or(name, |(base, _)| base));
    }
    names.extend(["", "cuNoSuchFunction"]);
    let (mut same, mut ours, mut different, mut first) = (0, 0, 0, String::from("-"));
    let mut answered_differently = std::collections::BTreeSet::new();
    for form in ["cuGetProcAddress", "cuGetProcAddress_v2"] {
        // The four-argument form ignores the fifth: in this ABI it is in a register.
        // SAFETY: cuda.h's type of the longer form.
        let (shim_asks, real_asks) = unsafe {
            (
                std::mem::transmute::<*mut c_void, Ask>(shim.find(form)),
                std::mem::transmute::<*mut c_void, Ask>(real.find(form)),
            )
        };
        for name in &names {
            let name_c = CString::new(*name).unwrap();
            for &version in &versions {
                for flags in [0, 1, 2] {
                    let (mut a, mut b, mut status_a, mut status_b) =
                        (std::ptr::null_mut(), std::ptr::null_mut(), -1, -1);
                    // SAFETY: C strings and locals.
                    let (code_a, code_b) = unsafe {
                        (
                            shim_asks(
                                name_c.as_ptr(),
                                &raw mut a,
                                version,
                                flags,
                                &raw mut status_a,
                            ),
                            real_asks(
                                name_c.as_ptr(),
                                &raw mut b,
                                version,
                                flags,
                                &raw mut status_b,
                            ),
                        )
                    };
                    let ((file, symbol), (_, real_symbol)) = (place(a), place(b));
                    let handled = class
                        .get(real_symbol.as_str())
                        .is_some_and(|class| *class != "passes");
                    let agreed = code_a == code_b && status_a == status_b;
                    if agreed && a == b && !handled {
                        same += 1;
                    } else if agreed
                        && handled
                        && symbol == real_symbol
                        && file == "/usr/lib/tranche/libcuda.so.1"
                    {
                        ours += 1;
                    } else {
                        different += 1;
                        answered_differently.insert(*name);
                        if first == "-" {
                            first = format!("{form}({name:?},{version},{flags}):{code_a},{status_a},{file},{symbol}:{code_b},{status_b},{real_symbol}").replace(' ', "_");
                        }
                    }
                }
            }
        }
    }
    let names: Vec<&str> = answered_differently.into_iter().take(50).collect();
    format!("0 {same} {ours} {different} {first} {}", names.join(","))
}

/// Calls `odd_*` of the odd driver, without the shim.
/// The UUID of the driver's private table with a function that makes contexts.
static PRIVATE_TABLE: [u8; 16] = [
    0x0c, 0xa5, 0x0b, 0x8c, 0x10, 0x04, 0x92, 0x9a, 0x89, 0xa7, 0xd0, 0xdf, 0x10, 0xe7, 0x72, 0x86,
];

/// Its bytes, and the function.
#[repr(C)]
struct PrivateTable(usize, unsafe extern "C" fn(*mut u64, u32, i32) -> u32);

/// A context that the driver's private table makes.
fn context_unseen(cuda: &Cuda, context: *mut u64, device: i32) -> u32 {
    let mut table: *const PrivateTable = std::ptr::null();
    let id = &raw const PRIVATE_TABLE;
    let code = call!(cuda, "cuGetExportTable", &raw mut table => *mut *const PrivateTable, id => *const [u8; 16]);
    assert_eq!(code, 0, "cuGetExportTable");
    // SAFETY: the driver's own table, which has this function.
    unsafe { ((*table).1)(context, 0, device) }
}

/// A primary context that the driver's own function makes, as the driver's private ones do, without the shim.
fn primary_unseen(cuda: &Cuda, context: *mut u64, device: i32) -> u32 {
    // SAFETY: the shim has opened the driver, whose function has these arguments; `context` is a caller's local.
    let (code, made) = unsafe {
        let driver = libc::dlopen(REAL_CUDA.as_ptr(), libc::RTLD_LAZY);
        let retain = libc::dlsym(driver, c"cuDevicePrimaryCtxRetain".as_ptr());
        let retain: unsafe extern "C" fn(*mut u64, i32) -> u32 = std::mem::transmute(retain);
        (retain(context, device), *context)
    };
    call!(cuda, "cuCtxSetCurrent", made => u64);
    code
}

fn steer(_: &Cuda, name: &str, value: u64) -> u64 {
    // SAFETY: the shim has opened it; its functions take and return one number.
    unsafe {
        let driver = libc::dlopen(REAL_CUDA.as_ptr(), libc::RTLD_LAZY);
        let address = libc::dlsym(
            driver,
            CString::new(format!("odd_{name}")).unwrap().as_ptr(),
        );
        assert!(!address.is_null(), "odd_{name}");
        std::mem::transmute::<*mut c_void, unsafe extern "C" fn(u64) -> u64>(address)(value)
    }
}

/// A kernel of the simulator, which takes the time in its name.
fn kernel(cuda: &Cuda, name: &str) -> u64 {
    let ptx = format!(
        ".version 7.0\n.target sm_75\n.address_size 64\n.visible .entry {name}()\n{{\n\tret;\n}}\n"
    );
    let (ptx, name) = (CString::new(ptx).unwrap(), CString::new(name).unwrap());
    let (mut module, mut function) = (0u64, 0u64);
    let code = call!(cuda, "cuModuleLoadData", &raw mut module => *mut u64, ptx.as_ptr() => *const libc::c_char);
    assert_eq!(code, 0, "cuModuleLoadData");
    MODULE.store(module, Ordering::Relaxed);
    let code = call!(cuda, "cuModuleGetFunction", &raw mut function => *mut u64, module => u64, name.as_ptr() => *const libc::c_char);
    assert_eq!(code, 0, "cuModuleGetFunction");
    function
}

/// The kernels of `launch-all`.
static KERNELS: Mutex<Vec<u64>> = Mutex::new(Vec::new());

/// So many kernels of the simulator, which take `least` to `most` nanoseconds: the first the shortest, each a little longer
/// than the one before, in proportion.
fn kernels(cuda: &Cuda, count: u64, least: u64, most: u64) -> Vec<u64> {
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "times of kernels"
    )]
    let nanos = |nth: u64| {
        let part = nth as f64 / (count - 1).max(1) as f64;
        (least as f64 * (most as f64 / least as f64).powf(part)) as u64
    };
    let name = |nth: u64| format!("kernel_{nth}_sim_busy_{}ns", nanos(nth));
    let mut ptx = ".version 7.0\n.target sm_75\n.address_size 64\n".to_owned();
    for nth in 0..count {
        writeln!(ptx, ".visible .entry {}()\n{{\n\tret;\n}}", name(nth)).unwrap();
    }
    let (ptx, mut module) = (CString::new(ptx).unwrap(), 0u64);
    let code = call!(cuda, "cuModuleLoadData", &raw mut module => *mut u64, ptx.as_ptr() => *const libc::c_char);
    assert_eq!(code, 0, "cuModuleLoadData");
    let find = |nth| {
        let (name, mut function) = (CString::new(name(nth)).unwrap(), 0u64);
        let code = call!(cuda, "cuModuleGetFunction", &raw mut function => *mut u64, module => u64, name.as_ptr() => *const libc::c_char);
        assert_eq!(code, 0, "cuModuleGetFunction");
        function
    };
    (0..count).map(find).collect()
}

/// Launches all [`KERNELS`] in turn for `millis` milliseconds, each launch with a grid of its own if `new`, and answers
/// with the launches.
fn launch_all(cuda: &Cuda, millis: u64, new: bool) -> String {
    static GRID: AtomicU32 = AtomicU32::new(0);
    let kernels = KERNELS.lock().unwrap().clone();
    let start = std::time::Instant::now();
    let mut launches = 0u64;
    for kernel in kernels.into_iter().cycle() {
        if start.elapsed().as_millis() >= u128::from(millis) {
            break;
        }
        let grid = if new {
            1 + GRID.fetch_add(1, Ordering::Relaxed)
        } else {
            1
        };
        let code = call!(cuda, "cuLaunchKernel", kernel => u64, grid => u32, 1 => u32, 1 => u32, 32 => u32, 1 => u32, 1 => u32, 0 => u32, 0 => u64, 0 => u64, 0 => u64);
        assert_eq!(code, 0, "cuLaunchKernel");
        launches += 1;
    }
    format!("0 {launches}")
}

/// `rounds` times makes an array or a module and ends it in two threads at once; answers with how many ends succeeded.
fn end_twice(cuda: &Cuda, what: &str, rounds: u64) -> String {
    /// `CUDA_ARRAY_DESCRIPTOR`: 4096 x 256 floats.
    #[repr(C)]
    struct Shape(u64, u64, u32, u32);
    let shape = Shape(4096, 256, 0x20, 1);
    let image = CString::new(
        ".version 8.0\n.target sm_75\n.address_size 64\n.global .align 4 .b8 big[4194304];\n.entry f() { ret; }\n",
    )
    .unwrap();
    let context = {
        let mut context = 0u64;
        call!(cuda, "cuCtxGetCurrent", &raw mut context => *mut u64);
        context
    };
    let ended = AtomicU64::new(0);
    for _ in 0..rounds {
        let mut object = 0u64;
        let code = if what == "array" {
            call!(cuda, "cuArrayCreate_v2", &raw mut object => *mut u64, &raw const shape => *const Shape)
        } else {
            call!(cuda, "cuModuleLoadData", &raw mut object => *mut u64, image.as_ptr() => *const libc::c_char)
        };
        assert_eq!(code, 0, "{what}");
        let both = std::sync::Barrier::new(2);
        std::thread::scope(|scope| {
            for _ in 0..2 {
                scope.spawn(|| {
                    call!(cuda, "cuCtxSetCurrent", context => u64);
                    both.wait();
                    let code = if what == "array" {
                        call!(cuda, "cuArrayDestroy", object => u64)
                    } else {
                        call!(cuda, "cuModuleUnload", object => u64)
                    };
                    ended.fetch_add(u64::from(code == 0), Ordering::Relaxed);
                });
            }
        });
    }
    format!("0 {}", ended.into_inner())
}

/// How a kernel is launched by `cuLaunchKernelEx`.
#[repr(C)]
struct Config {
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
    stream: u64,
    attributes: u64,
    count: u32,
}

/// Launches `kernel` in a loop for `millis` milliseconds, each so many times before it waits for the
/// GPU (0 for never), and answers with the launches.
fn launch(cuda: &Cuda, how: &str, kernel: u64, millis: u64, each: u64) -> String {
    let stream = {
        let mut stream = 0u64;
        call!(cuda, "cuStreamCreate", &raw mut stream => *mut u64, 1 => u32);
        stream
    };
    let graph = if how.starts_with("graph") {
        captured(cuda, kernel, stream)
    } else {
        0
    };
    let config = Config {
        grid: [1, 2, 3],
        block: [4, 5, 6],
        shared: 0,
        stream,
        attributes: 0,
        count: 0,
    };
    let once = |stream: u64| match how {
        "plain" | "plain-ptsz" | "cooperative" | "cooperative-ptsz" => {
            let name = match how {
                "plain" => "cuLaunchKernel",
                "plain-ptsz" => "cuLaunchKernel_ptsz",
                "cooperative" => "cuLaunchCooperativeKernel",
                _ => "cuLaunchCooperativeKernel_ptsz",
            };
            call!(cuda, name, kernel => u64, 1 => u32, 1 => u32, 1 => u32, 32 => u32, 1 => u32, 1 => u32, 0 => u32, stream => u64, 0 => u64, 0 => u64)
        }
        "ex" => {
            call!(cuda, "cuLaunchKernelEx", &raw const config => *const Config, kernel => u64, 0 => u64, 0 => u64)
        }
        "ex-ptsz" => {
            call!(cuda, "cuLaunchKernelEx_ptsz", &raw const config => *const Config, kernel => u64, 0 => u64, 0 => u64)
        }
        "graph" => call!(cuda, "cuGraphLaunch", graph => u64, stream => u64),
        "graph-ptsz" => call!(cuda, "cuGraphLaunch_ptsz", graph => u64, stream => u64),
        other => panic!("{other}: no way to launch"),
    };
    let start = std::time::Instant::now();
    let mut launches = 0u64;
    while start.elapsed().as_millis() < u128::from(millis) {
        assert_eq!(once(stream), 0, "{how}");
        launches += 1;
        if each != 0 && launches.is_multiple_of(each) {
            call!(cuda, "cuStreamSynchronize", stream => u64);
        }
    }
    format!("0 {launches}")
}

/// Does `count` requests with a `pause` after each: `steps` launches of `kernel`, each of which it waits for. Answers with
/// the median and the 99th percentile of their times, in microseconds.
fn requests(
    cuda: &Cuda,
    kernel: u64,
    count: u64,
    steps: u64,
    pause: std::time::Duration,
) -> String {
    let mut times: Vec<u128> = (0..count)
        .map(|_| {
            let start = std::time::Instant::now();
            for _ in 0..steps {
                let code = call!(cuda, "cuLaunchKernel", kernel => u64, 1 => u32, 1 => u32, 1 => u32, 32 => u32, 1 => u32, 1 => u32, 0 => u32, 0 => u64, 0 => u64, 0 => u64);
                assert_eq!(code, 0, "cuLaunchKernel");
                call!(cuda, "cuCtxSynchronize",);
            }
            let took = start.elapsed().as_micros();
            std::thread::sleep(pause);
            took
        })
        .collect();
    times.sort_unstable();
    let [p50, p99] = [50, 99].map(|percent| times[times.len() * percent / 100]);
    format!("0 {p50} {p99}")
}

/// Launches `kernel` in a loop for `millis` milliseconds, with grids that never repeat, or only after `shapes`
/// others, and answers with the number of launched blocks and of launches.
fn launch_growing(cuda: &Cuda, kernel: u64, millis: u64, shapes: u64) -> String {
    let start = std::time::Instant::now();
    let (mut blocks, mut launches) = (0u64, 0u64);
    while start.elapsed().as_millis() < u128::from(millis) {
        // All numbers below `shapes`, each once, in a mixed order.
        let grid = 1 + launches * 7919 % shapes;
        #[expect(
            clippy::cast_possible_truncation,
            reason = "below the number of shapes"
        )]
        let code = call!(cuda, "cuLaunchKernel", kernel => u64, grid as u32 => u32, 1 => u32, 1 => u32, 32 => u32, 1 => u32, 1 => u32, 0 => u32, 0 => u64, 0 => u64, 0 => u64);
        assert_eq!(code, 0, "cuLaunchKernel");
        (blocks, launches) = (blocks + grid, launches + 1);
    }
    format!("0 {blocks} {launches}")
}

/// A graph of ten launches of a kernel, captured.
fn captured(cuda: &Cuda, kernel: u64, stream: u64) -> u64 {
    let (mut graph, mut executable) = (0u64, 0u64);
    call!(cuda, "cuStreamBeginCapture_v2", stream => u64, 0 => u32);
    for _ in 0..10 {
        call!(cuda, "cuLaunchKernel", kernel => u64, 1 => u32, 1 => u32, 1 => u32, 32 => u32, 1 => u32, 1 => u32, 0 => u32, stream => u64, 0 => u64, 0 => u64);
    }
    let code = call!(cuda, "cuStreamEndCapture", stream => u64, &raw mut graph => *mut u64);
    assert_eq!(code, 0, "cuStreamEndCapture");
    let code = call!(cuda, "cuGraphInstantiateWithFlags", &raw mut executable => *mut u64, graph => u64, 0 => u64);
    assert_eq!(code, 0, "cuGraphInstantiate");
    executable
}

/// Makes the same call several times while instructions are counted, after some uncounted calls, except for the
/// first look-up.
fn instructions(cuda: &Cuda, what: &str, live: u64) -> String {
    let mut once = call_of(cuda, what, live);
    if what != "first-address" {
        for _ in 0..100 {
            once();
        }
    }
    counted_calls(&mut once);
    format!("0 {CALLS}")
}

/// The function that the counter finds by name.
#[unsafe(export_name = "counted_calls")]
#[inline(never)]
fn counted_calls(once: &mut dyn FnMut() -> u32) {
    for _ in 0..CALLS {
        std::hint::black_box(once());
    }
}

/// Calls that are counted; each takes the same number of instructions, except for the first look-up. Of so many pairs in the
/// order of a stream, the shim asks the driver after one.
const CALLS: u32 = 8;

/// The call that is counted.
#[derive(Clone, Copy)]
enum Measured {
    Pass,
    AllocFree,
    Refused,
    Full,
    Info,
    Launch,
    Address,
    AsyncPair,
    Synchronize,
}

impl Measured {
    fn named(what: &str) -> Self {
        match what {
            "pass" => Self::Pass,
            "alloc-free" => Self::AllocFree,
            "refused" => Self::Refused,
            "full" => Self::Full,
            "info" | "info-pool" => Self::Info,
            "async-pair" => Self::AsyncPair,
            "sync-pool" => Self::Synchronize,
            "launch" => Self::Launch,
            // The first look-up must be in a process without an earlier one.
            "address" | "first-address" => Self::Address,
            _ => panic!("{what}: not counted"),
        }
    }
}

/// A call, or a pair, for `instructions`.
///
/// Names are compared here, not in each call: the C library takes eight more instructions to compare strings near the
/// end of a page, and the address of a name changes with the environment.
fn call_of(cuda: &Cuda, what: &str, live: u64) -> impl FnMut() -> u32 + use<> {
    type Alloc = unsafe extern "C" fn(*mut u64, u64) -> u32;
    type Free = unsafe extern "C" fn(u64) -> u32;
    type Info = unsafe extern "C" fn(*mut u64, *mut u64) -> u32;
    type AllocAsync = unsafe extern "C" fn(*mut u64, u64, u64) -> u32;
    type FreeAsync = unsafe extern "C" fn(u64, u64) -> u32;
    type Launch =
        unsafe extern "C" fn(u64, u32, u32, u32, u32, u32, u32, u32, u64, u64, u64) -> u32;
    type Ask =
        unsafe extern "C" fn(*const libc::c_char, *mut *mut c_void, i32, u64, *mut i32) -> u32;
    let what = Measured::named(what);
    // SAFETY: cuda.h's types of these functions.
    let (alloc, free, info, ask, version, launch) = unsafe {
        (
            std::mem::transmute::<*mut c_void, Alloc>(cuda.find("cuMemAlloc_v2")),
            std::mem::transmute::<*mut c_void, Free>(cuda.find("cuMemFree_v2")),
            std::mem::transmute::<*mut c_void, Info>(cuda.find("cuMemGetInfo_v2")),
            std::mem::transmute::<*mut c_void, Ask>(cuda.find("cuGetProcAddress_v2")),
            std::mem::transmute::<*mut c_void, unsafe extern "C" fn(*mut i32) -> u32>(
                cuda.find("cuDriverGetVersion"),
            ),
            std::mem::transmute::<*mut c_void, Launch>(cuda.find("cuLaunchKernel")),
        )
    };
    // SAFETY: as above.
    let (alloc_async, free_async, synchronize) = unsafe {
        (
            std::mem::transmute::<*mut c_void, AllocAsync>(cuda.find("cuMemAllocAsync")),
            std::mem::transmute::<*mut c_void, FreeAsync>(cuda.find("cuMemFreeAsync")),
            std::mem::transmute::<*mut c_void, unsafe extern "C" fn() -> u32>(
                cuda.find("cuCtxSynchronize"),
            ),
        )
    };
    let (mut pointer, mut other, mut address, mut status) =
        (0u64, 0u64, std::ptr::null_mut(), 0i32);
    if matches!(what, Measured::AllocFree | Measured::Full) {
        let mut kept = 0u64;
        for _ in 0..live {
            // SAFETY: as above.
            unsafe { alloc(&raw mut kept, 4096) };
        }
    }
    move || {
        // SAFETY: all arguments are valid.
        unsafe {
            match what {
                Measured::Pass => version(&raw mut status),
                Measured::AllocFree => alloc(&raw mut pointer, 4096) + free(pointer),
                Measured::Refused => alloc(&raw mut pointer, 1 << 50),
                Measured::Full => alloc(&raw mut pointer, 4 << 20),
                Measured::Info => info(&raw mut pointer, &raw mut other),
                Measured::AsyncPair => {
                    alloc_async(&raw mut pointer, 4096, 0) + free_async(pointer, 0)
                }
                Measured::Synchronize => synchronize(),
                Measured::Launch => launch(1, 1, 1, 1, 32, 1, 1, 0, 0, 0, 0),
                Measured::Address => ask(
                    c"cuDriverGetVersion".as_ptr(),
                    &raw mut address,
                    12000,
                    0,
                    &raw mut status,
                ),
            }
        }
    }
}

/// Forks: the child serves until `end`; then the parent continues.
fn fork(cuda: &Cuda) -> String {
    // SAFETY: this program has one thread when it is told to fork.
    match unsafe { libc::fork() } {
        0 => {
            println!("0 child");
            std::io::stdout().flush().unwrap();
            serve(cuda);
            std::process::exit(0);
        }
        child => {
            let mut status = 0;
            // SAFETY: waits for our child.
            unsafe { libc::waitpid(child, &raw mut status, 0) };
            format!("{status} parent")
        }
    }
}

/// Threads that allocate and free at random: `threads COUNT OPERATIONS MOST-BYTES`. Answers with the
/// number of allocations, refusals, and other errors; everything is freed in the end.
fn threads(cuda: &Cuda, count: u64, operations: u64, most: u64) -> String {
    let (allocated, refused, failed) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
    let mut context = 0u64;
    call!(cuda, "cuCtxGetCurrent", &raw mut context => *mut u64);
    std::thread::scope(|scope| {
        for thread in 0..count {
            let (allocated, refused, failed) = (&allocated, &refused, &failed);
            scope.spawn(move || {
                call!(cuda, "cuCtxSetCurrent", context => u64);
                let mut state = (u64::from(std::process::id()) << 20) + thread + 1;
                let mut random = || {
                    state ^= state << 13;
                    state ^= state >> 7;
                    state ^= state << 17;
                    state
                };
                let mut live = Vec::new();
                for _ in 0..operations {
                    if random() % 3 > 0 || live.is_empty() {
                        let mut pointer = 0u64;
                        let bytes = 1 + random() % most;
                        match call!(cuda, "cuMemAlloc_v2", &raw mut pointer => *mut u64, bytes => u64) {
                            0 => {
                                allocated.fetch_add(1, Ordering::Relaxed);
                                live.push(pointer);
                            }
                            2 => {
                                refused.fetch_add(1, Ordering::Relaxed);
                            }
                            _ => {
                                failed.fetch_add(1, Ordering::Relaxed);
                            }
                        }
                    } else {
                        #[expect(clippy::cast_possible_truncation, reason = "an index")]
                        let pointer = live.swap_remove(random() as usize % live.len());
                        if call!(cuda, "cuMemFree_v2", pointer => u64) != 0 {
                            failed.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                }
                for pointer in live {
                    if call!(cuda, "cuMemFree_v2", pointer => u64) != 0 {
                        failed.fetch_add(1, Ordering::Relaxed);
                    }
                }
            });
        }
    });
    format!(
        "0 {} {} {}",
        allocated.into_inner(),
        refused.into_inner(),
        failed.into_inner()
    )
}
