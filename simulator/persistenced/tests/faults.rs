//! A GPU that falls off the bus, one that is switched to MIG mode, and calls that fail, while programs run.

use crate::common;

use common::{GIB, Machine};
use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::error::NvmlError;

#[test]
fn a_lost_gpu_does_not_affect_others_and_can_be_restored() {
    let machine = Machine::start("H100-80", 2);
    let (mut on_lost, mut on_other) = (machine.program(), machine.program());
    on_lost.ask("use 0");
    on_other.ask("use 1");
    let nvml = machine.nvml();
    let device = nvml.device_by_index(0).unwrap();
    let (uuid, second) = (
        device.uuid().unwrap(),
        nvml.device_by_index(1).unwrap().uuid().unwrap(),
    );
    let events = nvml.create_event_set().unwrap();
    let events = device
        .register_events(EventTypes::CRITICAL_XID_ERROR, events)
        .unwrap();

    machine.control(&["lose-gpu", &uuid]);
    let event = events.wait(5000).unwrap();
    let data = format!("{:?}", event.event_data);
    assert!(data.contains("79"), "{data}");
    assert_eq!(nvml.device_count().unwrap(), 2, "a lost GPU is counted");
    let is_lost = |error: NvmlError| matches!(error, NvmlError::GpuLost);
    assert!(is_lost(device.memory_info().unwrap_err()));
    assert!(is_lost(nvml.device_by_index(0).unwrap_err()));
    // The search for the second GPU fails at the first.
    assert!(is_lost(nvml.device_by_uuid(second.as_str()).unwrap_err()));
    assert_eq!(nvml.device_by_index(1).unwrap().uuid().unwrap(), second);
    let smi = machine
        .command(machine.path("usr/bin/nvidia-smi"))
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&smi.stdout);
    assert!(text.contains("GPU is lost"), "{text}");

    for request in [&format!("alloc {GIB}"), "launch plain 1", "info"] {
        assert_eq!(on_lost.ask(request), "CUDA_ERROR_UNKNOWN", "{request}");
    }
    assert_eq!(on_other.ask(&format!("alloc {GIB}")), "ok");
    let mut starts = machine.program();
    starts.ask("init");
    assert_eq!(starts.ask("count"), "1");

    machine.control(&["restore-gpu", "0"]);
    assert_eq!(device.uuid().unwrap(), uuid);
    assert_eq!(machine.used(1), (518 << 20) + GIB);
}

#[test]
fn a_lost_gpus_node_can_be_removed() {
    let machine = Machine::start("T4", 2);
    machine.control(&["lose-gpu", "1", "--remove-node"]);
    assert!(!machine.path("dev/nvidia1").exists());
    assert_eq!(machine.nvml().device_count().unwrap(), 1);
    machine.control(&["restore-gpu", "1"]);
    assert!(machine.path("dev/nvidia1").exists());
    let nvml = machine.nvml();
    assert_eq!(nvml.device_count().unwrap(), 2);
    assert!(nvml.device_by_index(1).unwrap().memory_info().is_ok());
}

/// A wait for work ends when the GPU is lost.
#[test]
fn a_wait_ends_when_the_gpu_is_lost() {
    let machine = Machine::start("T4", 1);
    let mut program = machine.program();
    program.ask("use 0");
    let waits = std::thread::spawn(move || program.ask("launch sim_busy_20ms 1000"));
    // The kernels run.
    let nvml = machine.nvml();
    let device = nvml.device_by_index(0).unwrap();
    while device.utilization_rates().unwrap().gpu < 10 {
        std::thread::yield_now();
    }
    machine.control(&["lose-gpu", "0"]);
    assert_eq!(waits.join().unwrap(), "CUDA_ERROR_UNKNOWN");
}

#[test]
fn nvidia_smi_switches_mig_mode_when_the_gpu_is_idle() {
    let machine = Machine::start("H100-80", 2);
    let nvml = machine.nvml();
    let device = nvml.device_by_index(0).unwrap();
    let modes = || {
        let mode = device.mig_mode().unwrap();
        (mode.current, mode.pending)
    };
    assert_eq!(modes(), (0, 0));
    let mut program = machine.program();
    program.ask("use 0");
    machine.smi(&["-i", "0", "-mig", "1"]);
    assert_eq!(modes(), (0, 1), "a program uses it");
    assert_eq!(program.ask(&format!("alloc {GIB}")), "ok");
    program.end();
    common::wait_until(|| modes() == (1, 1), || format!("MIG mode {:?}", modes()));
    let query = ["--query-gpu=mig.mode.current", "--format=csv,noheader"];
    assert_eq!(machine.smi(&query), "Enabled\nDisabled\n");
    let view = machine.smi(&[]);
    assert!(view.contains("Enabled"), "{view}");
    assert!(matches!(
        device.utilization_rates(),
        Err(NvmlError::NotSupported)
    ));

    // CUDA sees only the partitions of a GPU in MIG mode, and there are none.
    let mut starts = machine.program();
    starts.ask("init");
    assert_eq!(starts.ask("count"), "1");
    machine.smi(&["-i", "0", "-mig", "0"]);
    assert_eq!(modes(), (0, 0));
    let mut starts = machine.program();
    starts.ask("init");
    assert_eq!(starts.ask("count"), "2");
}

/// The errors in a container with the old driver's files after an update of the driver, and in an image with a newer libcuda.
#[test]
fn libraries_of_another_version_than_the_kernel_drivers() {
    let mut machine = Machine::start("T4", 1);
    let file = machine.path("etc/nvidia-sim/machine.toml");
    let text = std::fs::read_to_string(&file).unwrap();
    // cuda.h and nvml.h: CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, NVML_ERROR_LIB_RM_VERSION_MISMATCH.
    for (kernel, cuda) in [
        ("550.163.01", "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH"),
        ("470.256.02", "ok"),
    ] {
        machine.kill_daemon();
        std::fs::write(&file, text.replace("535.261.03", kernel)).unwrap();
        machine.start_daemon();
        let mut program = machine.program();
        assert_eq!(program.ask("init"), cuda, "{kernel}");
        let nvml = machine.try_nvml();
        assert!(
            matches!(nvml, Err(NvmlError::LibRmVersionMismatch)),
            "{kernel}: {nvml:?}"
        );
        let smi = machine
            .command(machine.path("usr/bin/nvidia-smi"))
            .output()
            .unwrap();
        let shown = String::from_utf8_lossy(&smi.stdout);
        assert!(shown.contains("Driver/library version mismatch"), "{shown}");
    }
}

/// Failures and delays of single calls, from a file that a test writes while programs run.
#[test]
fn calls_fail_and_wait_as_the_file_says() {
    let machine = Machine::start("H100-80", 1);
    machine.smi(&["-i", "0", "-mig", "1"]);
    let write = |text: &str| {
        std::fs::write(machine.path("etc/nvidia-sim/faults.toml"), text).unwrap();
    };
    let mig = |words: &[&str]| {
        let mut command = machine.command(machine.path("usr/bin/nvidia-smi"));
        let output = command.arg("mig").args(words).output().unwrap();
        output.status.code().unwrap()
    };
    // The second creation by a process fails, the third one is executed.
    write("[[fault]]\ncall = \"nvmlDeviceCreateGpuInstance\"\nafter = 1\ntimes = 1\ncode = 23\n");
    assert_eq!(mig(&["-cgi", "19,19"]), 23);
    assert!(machine.smi(&["mig", "-lgi"]).contains("1g.10gb"));
    // After the GPU instance, before its compute instance.
    write("[[fault]]\ncall = \"nvmlGpuInstanceCreateComputeInstance\"\ncode = 999\n");
    assert_eq!(mig(&["-cgi", "19", "-C"]), 255);
    assert_eq!(machine.smi(&["mig", "-lgi"]).matches("1g.10gb").count(), 2);
    write("[[fault]]\ncall = \"nvmlGpuInstanceDestroy\"\ncode = 19\n");
    assert_eq!(mig(&["-dgi"]), 19);
    write("");
    assert_eq!(mig(&["-dgi"]), 0);

    // A running program notices the file.
    let nvml = machine.nvml();
    let device = nvml.device_by_index(0).unwrap();
    write("[[fault]]\ncall = \"nvmlDeviceGetMemoryInfo\"\ncode = 999\n");
    common::wait_until(|| device.memory_info().is_err(), || "it succeeds".into());
    write("[[fault]]\ncall = \"nvmlInit\"\ncode = 9\n\n[[fault]]\ncall = \"cuInit\"\ncode = 100\n");
    common::wait_until(|| device.memory_info().is_ok(), || "it fails".into());
    assert!(matches!(
        machine.try_nvml(),
        Err(NvmlError::DriverNotLoaded)
    ));
    let mut program = machine.program();
    assert_eq!(program.ask("init"), "CUDA_ERROR_NO_DEVICE");
    write("[[fault]]\ncall = \"nvmlDeviceGetMemoryInfo\"\ndelay_ms = 200\ntimes = 1\n");
    let slow = || {
        let start = std::time::Instant::now();
        device.memory_info().unwrap();
        start.elapsed() >= std::time::Duration::from_millis(200)
    };
    common::wait_until(slow, || "no call waits".into());
}

/// What a process waits for in the kernel for ever.
#[test]
fn calls_hang_for_one_gpu_or_at_the_start_until_the_file_changes() {
    let machine = Machine::start("T4", 2);
    let write = |text: &str| {
        std::fs::write(machine.path("etc/nvidia-sim/faults.toml"), text).unwrap();
    };
    let nvml = machine.nvml();
    let [first, second] = [0, 1].map(|index| nvml.device_by_index(index).unwrap());
    write("[[fault]]\ngpu = 1\nhang = true\n");
    std::thread::scope(|scope| {
        // A call that begins before the file is noticed returns.
        let hangs = scope.spawn(|| while second.memory_info().is_ok() {});
        let last = std::time::Instant::now();
        while last.elapsed() < 5 * tranche_simulator_machine::faults::PERIOD {
            first.memory_info().unwrap();
        }
        assert!(!hangs.is_finished());
        write("[[fault]]\ngpu = 1\ncode = 999\n");
        hangs.join().unwrap();
    });
    drop(nvml);
    let starts = ["nvmlInit", "nvmlInitWithFlags"];
    let rows = starts.map(|call| format!("[[fault]]\ncall = \"{call}\"\nhang = true\n"));
    write(&rows.concat());
    let mut smi = machine.command(machine.path("usr/bin/nvidia-smi"));
    let mut smi = smi.stdout(std::process::Stdio::null()).spawn().unwrap();
    let sleeps = || {
        let stack = std::fs::read_to_string(format!("/proc/{}/stat", smi.id())).unwrap();
        stack.contains(") S ")
    };
    common::wait_until(sleeps, || "nvidia-smi does not wait".into());
    assert_eq!(smi.try_wait().unwrap(), None);
    write("");
    assert!(smi.wait().unwrap().success());
}
