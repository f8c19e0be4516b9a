//! The CUDA program: reads commands from its input, executes them through cudarc, and writes `=> ` and the result.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString};
use std::io::{BufRead as _, Write as _};
use std::time::Instant;

use cudarc::driver::{CudaContext, DriverError, result, sys};

const PTX: &CStr = c".version 8.0
.target sm_70
.address_size 64
.visible .entry sim_busy_20ms() { ret; }
.visible .entry sim_busy_0us() { ret; }
.visible .entry sim_illegal_address() { ret; }
.visible .entry plain() { ret; }
";

fn code(error: DriverError) -> String {
    error
        .error_name()
        .map_or("?".into(), |name| name.to_string_lossy().into_owned())
}

#[derive(Default)]
struct State {
    contexts: BTreeMap<usize, std::sync::Arc<CudaContext>>,
    allocations: Vec<u64>,
    module: Option<sys::CUmodule>,
}

impl State {
    fn run(&mut self, words: &[&str]) -> Result<String, DriverError> {
        let number = |index: usize| words[index].parse::<u64>().unwrap();
        match words[0] {
            "init" => result::init().map(|()| "ok".into()),
            "count" => CudaContext::device_count().map(|count| count.to_string()),
            "use" => {
                let ordinal = usize::try_from(number(1)).unwrap();
                let context = CudaContext::new(ordinal)?;
                context.bind_to_thread()?;
                let name = context.name()?;
                self.contexts.insert(ordinal, context);
                Ok(name)
            }
            "info" => result::mem_get_info().map(|(free, total)| format!("{free} {total}")),
            // Multiprocessors, and the UUID of the device and of its GPU, of the last ordinal that is used.
            "device" => {
                let ordinal = i32::try_from(*self.contexts.keys().last().unwrap()).unwrap();
                let device = result::device::get(ordinal)?;
                let count = sys::CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
                let mut uuids = [sys::CUuuid { bytes: [0; 16] }; 2];
                // SAFETY: a device, and places for its UUIDs.
                let count = unsafe {
                    sys::cuDeviceGetUuid_v2(&raw mut uuids[0], device).result()?;
                    sys::cuDeviceGetUuid(&raw mut uuids[1], device).result()?;
                    result::device::get_attribute(device, count)?
                };
                let [own, of_gpu] = uuids.map(|uuid| hexadecimal(&uuid.bytes));
                Ok(format!("{count} {own} {of_gpu}"))
            }
            "alloc" => {
                // SAFETY: the address is only used as CUDA allows.
                let address = unsafe { result::malloc_sync(usize::try_from(number(1)).unwrap())? };
                self.allocations.push(address);
                Ok("ok".into())
            }
            "free" => {
                for address in self.allocations.drain(..) {
                    // SAFETY: allocated above and not freed before.
                    unsafe { result::free_sync(address)? };
                }
                Ok("ok".into())
            }
            // Writes a pattern at the start and the end of the last allocation, whose size is given, and reads it back.
            "check" => {
                let address = *self.allocations.last().unwrap();
                let pattern: Vec<u32> = (0..1000).collect();
                let mut back = vec![0u32; 1000];
                for offset in [0, number(1) - 4000] {
                    // SAFETY: within the allocation.
                    unsafe {
                        result::memset_d8_sync(address + offset, 0x11, 4000)?;
                        result::memcpy_htod_sync(address + offset + 4, &pattern[..999])?;
                        result::memcpy_dtoh_sync(&mut back, address + offset)?;
                    }
                    assert_eq!(back[0], 0x1111_1111);
                    assert_eq!(back[1..], pattern[..999]);
                }
                Ok("ok".into())
            }
            // Launches a kernel so many times; milliseconds by events, of wall time and of processor time.
            "launch" => self.launch(words[1], number(2)),
            // Allocates and frees in several threads until it is killed.
            "churn" => {
                for seed in 0..4u64 {
                    let context = self.contexts[&0].clone();
                    std::thread::spawn(move || {
                        context.bind_to_thread().unwrap();
                        churn(seed + u64::from(std::process::id()));
                    });
                }
                Ok("ok".into())
            }
            "fork" => {
                // SAFETY: the child only calls CUDA and ends.
                let child = unsafe { libc::fork() };
                if child == 0 {
                    let failed = result::init().unwrap_err().0 as i32;
                    // SAFETY: ends the child at once, without the harness's handlers.
                    unsafe { libc::_exit(failed) };
                }
                let mut status = 0;
                // SAFETY: our child, and a valid place for its status.
                unsafe { libc::waitpid(child, &raw mut status, 0) };
                Ok(libc::WEXITSTATUS(status).to_string())
            }
            // Forks a child that keeps the inherited files open.
            "leave-child" => {
                // SAFETY: the child only sleeps.
                let child = unsafe { libc::fork() };
                if child == 0 {
                    // SAFETY: as above.
                    unsafe {
                        libc::close(0);
                        libc::close(1);
                        libc::close(2);
                        libc::sleep(60);
                        libc::_exit(0);
                    }
                }
                Ok(child.to_string())
            }
            other => panic!("unknown command {other}"),
        }
    }

    fn launch(&mut self, name: &str, times: u64) -> Result<String, DriverError> {
        let module = match self.module {
            Some(module) => module,
            // SAFETY: PTX with its final zero.
            None => unsafe { result::module::load_data(PTX.as_ptr().cast())? },
        };
        self.module = Some(module);
        let name = CString::new(name).unwrap();
        let event = || result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT);
        // SAFETY: module, function, events and stream are live; the kernels take
        // no parameters.
        unsafe {
            let function = result::module::get_function(module, name)?;
            let stream = result::stream::create(result::stream::StreamKind::NonBlocking)?;
            let (start, end) = (event()?, event()?);
            let (wall, cpu) = (Instant::now(), processor_time());
            result::event::record(start, stream)?;
            for _ in 0..times {
                result::launch_kernel(function, (1, 1, 1), (32, 1, 1), 0, stream, &mut [])?;
            }
            result::event::record(end, stream)?;
            result::event::synchronize(end)?;
            let milliseconds = result::event::elapsed(start, end)?;
            result::stream::destroy(stream)?;
            let (wall, cpu) = (wall.elapsed().as_millis(), processor_time() - cpu);
            Ok(format!("{milliseconds:.0} {wall} {cpu}"))
        }
    }
}

fn hexadecimal(bytes: &[std::ffi::c_char]) -> String {
    let bytes: [u8; 16] = std::array::from_fn(|nth| bytes[nth].cast_unsigned());
    format!("{:032x}", u128::from_be_bytes(bytes))
}

/// Allocates and frees blocks of all sizes, at most half of a T4 at a time.
fn churn(mut random: u64) {
    let mut live = std::collections::VecDeque::new();
    loop {
        random = random
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        let bytes = 1 + (random >> 33) % (1 << (9 + (random >> 60)));
        // SAFETY: each address is freed once.
        unsafe {
            live.push_back(result::malloc_sync(usize::try_from(bytes).unwrap()).unwrap());
            if live.len() > 50 {
                result::free_sync(live.pop_front().unwrap()).unwrap();
            }
        }
    }
}

/// Milliseconds of processor time of this process.
fn processor_time() -> i64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: a valid place for the time.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
    time.tv_sec * 1000 + time.tv_nsec / 1_000_000
}

#[test]
#[ignore = "a program for the other tests, which start it"]
fn run() {
    let mut state = State::default();
    for line in std::io::stdin().lock().lines() {
        let line = line.unwrap();
        let words: Vec<&str> = line.split(' ').collect();
        let answer = state.run(&words).unwrap_or_else(code);
        println!("=> {answer}");
        std::io::stdout().flush().unwrap();
    }
}
