//! NVML's clients agree with each other, and kernels take virtual time.

use crate::common;

use std::thread::sleep;
use std::time::{Duration, Instant};

use common::{GIB, MIB, Machine};
use nvml_wrapper::Nvml;
use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::enum_wrappers::device::TemperatureSensor;
use nvml_wrapper::enums::device::SampleValue;
use nvml_wrapper::enums::gpm::GpmMetricId;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::gpm::{GpmSample, gpm_metrics_get};
use nvml_wrapper::struct_wrappers::gpm::GpmMetricResult;
use nvml_wrapper::structs::device::FieldId;
use nvml_wrapper::sys_exports::field_id::NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX;

#[test]
fn nvidia_smi_and_nvml_agree() {
    let machine = Machine::start("A100-40", 2);
    let mut program = machine.program();
    program.ask("use 1");
    program.ask(&format!("alloc {}", 5 * GIB));
    let fields = "index,name,uuid,pci.bus_id,memory.total,memory.used,memory.free,driver_version,mig.mode.current";
    let table = machine.smi(&[
        &format!("--query-gpu={fields}"),
        "--format=csv,noheader,nounits",
    ]);
    let nvml = machine.nvml();
    for (index, line) in (0..).zip(table.lines()) {
        let device = nvml.device_by_index(index).unwrap();
        let memory = device.memory_info().unwrap();
        let expected = [
            index.to_string(),
            device.name().unwrap(),
            device.uuid().unwrap(),
            device.pci_info().unwrap().bus_id,
            (memory.total / MIB).to_string(),
            (memory.used / MIB).to_string(),
            (memory.free / MIB).to_string(),
            nvml.sys_driver_version().unwrap(),
            "Disabled".to_owned(),
        ]
        .join(", ");
        assert_eq!(line, expected);
    }
    assert_eq!(table.lines().count(), 2);
    let apps = machine.smi(&[
        "--query-compute-apps=pid,used_memory",
        "--format=csv,noheader,nounits",
    ]);
    assert_eq!(
        apps.trim(),
        format!("{}, {}", program.pid(), 5 * 1024 + 418)
    );
    // Every view works and shows the name of a simulated GPU.
    for arguments in [&[][..], &["-L"], &["-q"], &["-q", "-x"]] {
        let view = machine.smi(arguments);
        assert!(view.contains("Simulated A100-SXM4-40GB"), "{view}");
    }
    for arguments in [
        ["topo", "-m"].as_slice(),
        &["dmon", "-c", "1"],
        &["pmon", "-c", "1"],
    ] {
        machine.smi(arguments);
    }
    let view = machine.smi(&[]);
    assert!(
        view.contains(&program.pid().to_string()) && view.contains("5538MiB / 40960MiB"),
        "{view}"
    );
}

#[test]
fn nvidia_smi_sets_the_length_of_time_slices() {
    let machine = Machine::start("A100-40", 2);
    // The view has a line for each GPU, by its index.
    let lengths = || -> Vec<String> {
        let view = machine.smi(&["compute-policy", "-l"]);
        let lines = view.lines().filter(|line| line.contains("Timeslice"));
        let words =
            lines.filter_map(|line| line.trim_end_matches(['|', ' ']).split(' ').next_back());
        words.map(str::to_owned).collect()
    };
    assert_eq!(lengths(), ["Default", "Default"]);
    for (number, word) in [(1, "Short"), (2, "Medium"), (3, "Long"), (0, "Default")] {
        let number = format!("--set-timeslice={number}");
        machine.smi(&["compute-policy", "-i", "1", &number]);
        assert_eq!(lengths(), ["Default", word]);
    }
}

#[test]
fn handles_by_index_uuid_and_address_are_the_same_gpu() {
    let machine = Machine::start("L4", 2);
    let nvml = machine.nvml();
    let device = nvml.device_by_index(1).unwrap();
    let uuid = device.uuid().unwrap();
    for same in [
        nvml.device_by_uuid(uuid.as_str()).unwrap(),
        nvml.device_by_pci_bus_id(device.pci_info().unwrap().bus_id)
            .unwrap(),
    ] {
        assert_eq!(same.uuid().unwrap(), uuid);
        assert_eq!(same.index().unwrap(), 1);
    }
    assert!(nvml.device_by_index(2).is_err());
    assert!(nvml.device_by_uuid("GPU-0").is_err());
    assert!(device.mig_mode().is_err(), "an L4 cannot be partitioned");
    let capability = device.cuda_compute_capability().unwrap();
    assert_eq!((capability.major, capability.minor), (8, 9));
    assert_eq!(device.memory_info().unwrap().total, 23034 * MIB);
    assert!(device.is_multi_gpu_board().is_ok_and(|multi| !multi));
}

#[test]
fn kernels_take_virtual_time_that_nvml_shows() {
    let machine = Machine::start("T4", 1);
    let mut program = machine.program();
    program.ask("use 0");
    let answer = program.ask("launch sim_busy_20ms 75");
    let [events, wall, processor] = answer
        .split(' ')
        .map(|n| n.parse::<i64>().unwrap())
        .collect::<Vec<_>>()[..]
    else {
        panic!("{answer}")
    };
    assert!((1500..1700).contains(&events), "{answer}");
    assert!(wall >= 1500, "{answer}");
    assert!(processor < 300, "waiting sleeps: {answer}");
    let nvml = machine.nvml();
    let device = nvml.device_by_index(0).unwrap();
    let rates = device.utilization_rates().unwrap();
    assert!(rates.gpu >= 70, "{rates:?}");
    let samples = device.process_utilization_stats(0).unwrap();
    assert_eq!(samples[0].pid, program.pid());
    assert!(device.temperature(TemperatureSensor::Gpu).unwrap() > 30);
    // Kernels without duration take no time, however many are launched.
    let answer = program.ask("launch sim_busy_0us 100000");
    let wall: u64 = answer.split(' ').nth(1).unwrap().parse().unwrap();
    assert!(wall < 1000, "{answer}");
}

/// The metrics between two samples, in percent.
fn metrics<'a>(nvml: &'a Nvml, samples: [&GpmSample<'a>; 2], ids: &[GpmMetricId]) -> Vec<f64> {
    let [first, second] = samples;
    let found = gpm_metrics_get(nvml, first, second, ids).expect("two samples of one GPU");
    let value = |it: Result<GpmMetricResult, _>| it.expect("a metric of the model").value;
    found.into_iter().map(value).collect()
}

#[test]
fn gpm_measures_the_time_between_samples_since_hopper() {
    let machine = Machine::start("H100-80", 1);
    let nvml = machine.nvml();
    let device = nvml.device_by_index(0).unwrap();
    assert!(device.gpm_support().unwrap());
    let mut program = machine.program();
    program.ask("use 0");
    let ids = [
        GpmMetricId::GraphicsUtil,
        GpmMetricId::SmUtil,
        GpmMetricId::AnyTensorUtil,
        GpmMetricId::PcieTxPerSec,
    ];
    let idle = device.gpm_sample().unwrap();
    let begun = Instant::now();
    let before = device.gpm_sample().unwrap();
    program.ask("launch sim_busy_20ms 50");
    let after = device.gpm_sample().unwrap();
    // The first sample is from a moment before it is requested.
    let seconds = begun.elapsed().as_secs_f64() + 0.1;
    let busy = metrics(&nvml, [&before, &after], &ids);
    // Kernels of one second.
    let range = 99.0 / seconds..=100.0;
    assert!(
        range.contains(&busy[0]) && range.contains(&busy[1]),
        "{busy:?} in {seconds} s"
    );
    assert!(
        busy[2..].iter().all(|value| value.abs() < f64::EPSILON),
        "{busy:?}"
    );
    let none = metrics(&nvml, [&idle, &before], &ids);
    assert!(none[0] <= 1.0, "{none:?}");

    let machine = Machine::start("A100-40", 1);
    let nvml = machine.nvml();
    let device = nvml.device_by_index(0).unwrap();
    assert!(!device.gpm_support().unwrap());
    assert!(matches!(device.gpm_sample(), Err(NvmlError::NotSupported)));
}

#[test]
fn nvml_counts_the_traffic_of_nvlinks() {
    let machine = Machine::start("H100-80", 1);
    let nvml = machine.nvml();
    let device = nvml.device_by_index(0).unwrap();
    let rates = [
        GpmMetricId::NvlinkTotalRxPerSec,
        GpmMetricId::NvlinkTotalTxPerSec,
        GpmMetricId::NvlinkL17TxPerSec,
    ];
    let before = device.gpm_sample().unwrap();
    let begun = Instant::now();
    // 1800 MiB over 18 links.
    machine.control(&["count-nvlink", "0", "sent", "1843200"]);
    sleep(Duration::from_millis(300));
    let least = begun.elapsed().as_secs_f64();
    let after = device.gpm_sample().unwrap();
    let found = metrics(&nvml, [&before, &after], &rates);
    assert!(found[0].abs() < f64::EPSILON, "{found:?}");
    assert!((0.0..=1_800.0 / least).contains(&found[1]), "{found:?}");
    assert!((found[1] / 18.0 - found[2]).abs() < 0.01, "{found:?}");
    // The wrapper asks for the first link.
    let link_0 = FieldId(NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX);
    let values = device.field_values_for(&[link_0]).unwrap();
    let value = values[0].as_ref().unwrap().value.as_ref().unwrap();
    assert_eq!(*value, SampleValue::U64(102_400));

    // This one has GPM as well.
    let machine = Machine::start("RTX-PRO-6000", 1);
    let nvml = machine.nvml();
    let device = nvml.device_by_index(0).unwrap();
    let samples = [device.gpm_sample().unwrap(), device.gpm_sample().unwrap()];
    assert!(is_unsupported(&nvml, [&samples[0], &samples[1]], &rates));
}

/// Whether the GPU has none of these metrics.
fn is_unsupported(nvml: &Nvml, samples: [&GpmSample<'_>; 2], ids: &[GpmMetricId]) -> bool {
    let found = gpm_metrics_get(nvml, samples[0], samples[1], ids).expect("what GPM found");
    let is_refused = |it: &Result<_, NvmlError>| matches!(it, Err(NvmlError::NotSupported));
    found.iter().all(is_refused)
}

#[test]
fn two_processes_share_a_gpus_time() {
    let machine = Machine::start("T4", 1);
    let (mut first, mut second) = (machine.program(), machine.program());
    first.ask("use 0");
    second.ask("use 0");
    let other = std::thread::spawn(move || second.ask("launch sim_busy_20ms 100"));
    let own = first.ask("launch sim_busy_20ms 100");
    let took = |answer: &str| answer.split(' ').nth(1).unwrap().parse::<u64>().unwrap();
    // 200 kernels of 20 ms on one GPU: each process alone would take 2 s. One of them begins before the other.
    let longest = took(&own).max(took(&other.join().unwrap()));
    assert!(longest >= 3000, "{longest}");
    let again = (0..3)
        .map(|_| took(&first.ask("launch sim_busy_20ms 1")))
        .min()
        .unwrap();
    assert!(again < 400, "the queue is empty again: {again}");
}

#[test]
fn an_injected_xid_wakes_an_event_set() {
    let machine = Machine::start("T4", 2);
    let nvml = machine.nvml();
    let set = nvml.create_event_set().unwrap();
    let set = nvml
        .device_by_index(1)
        .unwrap()
        .register_events(EventTypes::CRITICAL_XID_ERROR, set)
        .unwrap();
    assert!(set.wait(20).is_err(), "nothing has happened");
    for gpu in ["0", "1"] {
        machine.control(&["inject-xid", gpu, "79"]);
    }
    let event = set.wait(5000).unwrap();
    assert_eq!(
        event.device.index().unwrap(),
        1,
        "the other GPU is not registered"
    );
    let data = format!("{:?}", event.event_data);
    assert!(data.contains("79"), "{data}");
}

/// `NVML_FI_DEV_REMAPPED_PENDING`, `NVML_FI_DEV_REMAPPED_FAILURE` and `NVML_FI_DEV_GET_GPU_RECOVERY_ACTION`; absent where they are not
/// supported.
fn recovery(device: &nvml_wrapper::Device<'_>) -> [Option<u32>; 3] {
    let fields = [144, 145, 230].map(nvml_wrapper::structs::device::FieldId);
    let samples = device.field_values_for(&fields).unwrap();
    let value =
        |sample: Result<nvml_wrapper::struct_wrappers::device::FieldValueSample, _>| match sample
            .and_then(|sample| sample.value)
        {
            Ok(nvml_wrapper::enums::device::SampleValue::U32(value)) => Some(value),
            _ => None,
        };
    let values: Vec<_> = samples.into_iter().map(value).collect();
    values.try_into().unwrap()
}

#[test]
fn an_xid_changes_what_the_driver_asks_for_until_the_gpu_is_reset() {
    // An old model, and drivers before and since recovery actions.
    for (model, driver, fine, rows, reset) in [
        ("T4", "535.261.03", [None; 3], [None; 3], [None; 3]),
        (
            "H100-80",
            "535.261.03",
            [Some(0), Some(0), None],
            [Some(1), Some(0), None],
            [Some(0), Some(0), None],
        ),
        (
            "H100-80",
            "570.86.15",
            [Some(0); 3],
            [Some(1), Some(0), Some(0)],
            [Some(0), Some(0), Some(1)],
        ),
    ] {
        let machine = Machine::start_with_driver(model, 1, driver);
        let nvml = machine.nvml();
        let device = nvml.device_by_index(0).unwrap();
        let inject = |xid: &str| machine.control(&["inject-xid", "0", xid]);
        assert_eq!(recovery(&device), fine, "{model} {driver}");
        inject("13");
        assert_eq!(recovery(&device), fine, "{model} {driver}");
        inject("63");
        assert_eq!(recovery(&device), rows, "{model} {driver}");
        machine.control(&["reset-gpu", "0"]);
        assert_eq!(recovery(&device), fine, "{model} {driver}");
        inject("48");
        assert_eq!(recovery(&device), reset, "{model} {driver}");
        machine.control(&["reset-gpu", "0"]);
        assert_eq!(recovery(&device), fine, "{model} {driver}");
    }
}

#[test]
fn partition_profiles_are_listed_without_mig_mode() {
    for (model, slices) in [("H100-80", Some(7)), ("A100-40", Some(7)), ("L4", None)] {
        let machine = Machine::start(model, 1);
        let nvml = machine.nvml();
        let device = nvml.device_by_index(0).unwrap();
        let profiles = (0..17).filter_map(|profile| device.profile_info(profile).ok());
        assert_eq!(profiles.map(|p| p.slice_count).max(), slices, "{model}");
    }
}
