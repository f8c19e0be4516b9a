//! MIG: the real nvidia-smi and NVML clients with partitions.

use crate::common;

use std::collections::BTreeMap;

use common::{MIB, Machine};
use nvml_wrapper::enums::device::UsedGpuMemory;
use nvml_wrapper::enums::gpm::GpmMetricId;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::gpm::gpm_metrics_get;

/// A machine whose first GPU is in MIG mode.
fn partitioned(model: &str, gpus: u32) -> Machine {
    let machine = Machine::start(model, gpus);
    machine.smi(&["-i", "0", "-mig", "1"]);
    machine
}

/// Runs `nvidia-smi mig` with these arguments; returns its exit status and its output.
fn mig(machine: &Machine, words: &str) -> (i32, String) {
    let output = machine
        .command(machine.path("usr/bin/nvidia-smi"))
        .arg("mig")
        .args(words.split(' '))
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    (output.status.code().unwrap(), text)
}

fn succeeds(machine: &Machine, words: &str) -> String {
    let (status, text) = mig(machine, words);
    assert_eq!(status, 0, "{words}: {text}");
    text
}

/// The rows of a table as words, without its lines.
fn rows(table: &str) -> Vec<Vec<&str>> {
    let inner = table.lines().filter_map(|line| {
        let words: Vec<&str> = line.trim_matches('|').split_whitespace().collect();
        words
            .first()
            .is_some_and(|first| first.parse::<u32>().is_ok())
            .then_some(words)
    });
    inner.collect()
}

#[test]
fn nvidia_smi_lists_the_profiles_of_each_model() {
    // Name, id, instances, memory in GiB, multiprocessors and decoders, as published logs of these GPUs show them.
    for (model, expected) in [
        (
            "A30",
            ["1g.6gb 14 4/4 5.81 14 0", "4g.24gb 0 1/1 23.44 56 4"],
        ),
        (
            "A100-40",
            ["1g.5gb 19 7/7 4.75 14 0", "7g.40gb 0 1/1 39.50 98 5"],
        ),
        (
            "A100-80",
            ["1g.10gb 19 7/7 9.50 14 0", "7g.80gb 0 1/1 79.00 98 5"],
        ),
        (
            "H100-80",
            ["1g.20gb 15 4/4 19.62 26 1", "7g.80gb 0 1/1 79.25 132 7"],
        ),
        (
            "H200",
            ["1g.18gb 19 7/7 16.00 16 1", "4g.71gb 5 1/1 69.50 64 4"],
        ),
        (
            "B200",
            ["1g.23gb 19 7/7 22.00 18 1", "2g.45gb 14 3/3 44.25 36 2"],
        ),
        // nvidia-smi 535 does not ask for the new profiles of this model.
        (
            "RTX-PRO-6000",
            ["1g.24gb+me 21 1/1 23.62 46 1", "2g.48gb 5 2/2 47.38 94 2"],
        ),
    ] {
        let machine = partitioned(model, 1);
        let table = succeeds(&machine, "-lgip");
        let listed: Vec<String> = rows(&table)
            .into_iter()
            .filter(|row| row.get(1) == Some(&"MIG"))
            .map(|row| [row[2], row[3], row[4], row[5], row[7], row[8]].join(" "))
            .collect();
        for row in expected {
            assert!(
                listed.iter().any(|it| it == row),
                "{model} {row}: {listed:?}"
            );
        }
    }
}

#[test]
fn nvidia_smi_creates_lists_and_destroys_instances() {
    let machine = partitioned("A100-40", 2);
    let places = succeeds(&machine, "-lgipp");
    assert!(
        places.contains("GPU  0 Profile ID 15 Placements: {0,2,4,6}:2"),
        "{places}"
    );
    assert!(
        places.contains("GPU  0 Profile ID  0 Placement : {0}:8"),
        "{places}"
    );
    // The guide's first example: by id and by name, with compute instances.
    let made = succeeds(&machine, "-cgi 9,3g.20gb -C");
    for line in [
        "Successfully created GPU instance ID  2 on GPU  0 using profile MIG 3g.20gb (ID  9)",
        "Successfully created compute instance ID  0 on GPU  0 GPU instance ID  2 using profile MIG 3g.20gb (ID  2)",
        "Successfully created GPU instance ID  1 on GPU  0 using profile MIG 3g.20gb (ID  9)",
    ] {
        assert!(made.contains(line), "{made}");
    }
    let (status, refusal) = mig(&machine, "-cgi 19");
    assert_eq!(status, 23);
    assert!(refusal.contains("Insufficient Resources"), "{refusal}");
    let listed = succeeds(&machine, "-lgi");
    let expected = [
        ["0", "MIG", "3g.20gb", "9", "1", "0:4"],
        ["0", "MIG", "3g.20gb", "9", "2", "4:4"],
    ];
    assert_eq!(rows(&listed), expected);
    let (status, refusal) = mig(&machine, "-dgi -gi 2");
    assert_eq!(status, 19);
    assert!(refusal.contains("In use by another client"), "{refusal}");

    // Three compute instances in place of one.
    succeeds(&machine, "-dci -gi 2");
    let profiles = succeeds(&machine, "-lcip -gi 2");
    assert!(
        profiles.contains("MIG 1c.3g.20gb       0      3/3           14"),
        "{profiles}"
    );
    succeeds(&machine, "-cci 0,1c.3g.20gb,0 -gi 2");
    let listed = succeeds(&machine, "-lci -gi 2");
    let ids: Vec<_> = rows(&listed)
        .iter()
        .map(|row| (row[5].to_owned(), row[6].to_owned()))
        .collect();
    let expected = [("0", "0:1"), ("1", "1:1"), ("2", "2:1")];
    assert_eq!(
        ids,
        expected.map(|(id, place)| (id.to_owned(), place.to_owned()))
    );
    let devices = machine.smi(&["-L"]);
    assert_eq!(
        devices.matches("MIG 1c.3g.20gb  Device").count(),
        3,
        "{devices}"
    );
    assert_eq!(devices.matches("UUID: MIG-").count(), 4, "{devices}");
    let view = machine.smi(&[]);
    assert!(
        view.contains("0MiB / 20096MiB") && view.contains("MIG devices:"),
        "{view}"
    );
    let xml = machine.smi(&["-q", "-x"]);
    assert_eq!(xml.matches("<mig_device>").count(), 4, "{xml}");
    assert!(
        xml.contains("<multiprocessor_count>42</multiprocessor_count>"),
        "{xml}"
    );

    succeeds(&machine, "-dci");
    succeeds(&machine, "-dgi");
    let (status, text) = mig(&machine, "-lgi");
    assert_eq!(
        (status, text.contains("No GPU instances found")),
        (6, true),
        "{text}"
    );
    // By place.
    succeeds(&machine, "-cgi 19:4,14:0");
    let listed = succeeds(&machine, "-lgi");
    let places: Vec<_> = rows(&listed)
        .iter()
        .map(|row| (row[2].to_owned(), row[5].to_owned()))
        .collect();
    let expected = [("1g.5gb", "4:1"), ("2g.10gb", "0:2")];
    assert_eq!(
        places,
        expected.map(|(name, place)| (name.to_owned(), place.to_owned()))
    );
    assert_eq!(mig(&machine, "-cgi 14:4").0, 23, "taken");
    assert_eq!(mig(&machine, "-cgi 14:1").0, 2, "no such place");
    assert_eq!(mig(&machine, "-i 1 -cgi 19").0, 6, "not in MIG mode");
}

#[test]
fn mig_devices_are_nvml_devices() {
    let machine = partitioned("H100-80", 2);
    succeeds(&machine, "-cgi 9,19 -C");
    let nvml = machine.nvml();
    let gpu = nvml.device_by_index(0).unwrap();
    assert_eq!(gpu.mig_device_count().unwrap(), 7);
    assert!(!gpu.mig_is_mig_device_handle().unwrap());
    assert!(gpu.mig_device_by_index(2).is_err());
    let mut seen = BTreeMap::new();
    for index in 0..2 {
        let device = gpu.mig_device_by_index(index).unwrap();
        assert!(device.mig_is_mig_device_handle().unwrap());
        let parent = device.mig_parent_device().unwrap();
        assert_eq!(parent.uuid().unwrap(), gpu.uuid().unwrap());
        assert_eq!(device.index().unwrap(), index);
        let uuid = device.uuid().unwrap();
        assert!(uuid.starts_with("MIG-"), "{uuid}");
        let same = nvml.device_by_uuid(uuid.as_str()).unwrap();
        assert_eq!(same.name().unwrap(), device.name().unwrap());
        assert_eq!(device.running_compute_processes().unwrap(), []);
        assert!(matches!(
            device.utilization_rates(),
            Err(NvmlError::NotSupported)
        ));
        let attributes = device.attributes().unwrap();
        let memory = device.memory_info().unwrap();
        assert_eq!(memory.total, attributes.memory_size_mb * MIB);
        assert_eq!((memory.used, memory.free), (0, memory.total));
        seen.insert(
            device.name().unwrap(),
            (attributes.multiprocessor_count, attributes.memory_size_mb),
        );
    }
    let name = |profile| format!("Simulated H100 80GB HBM3 MIG {profile}");
    let expected = [
        (name("1g.10gb"), (16, 9984)),
        (name("3g.40gb"), (60, 40_448)),
    ];
    assert_eq!(seen, BTreeMap::from(expected));
    assert!(matches!(gpu.attributes(), Err(NvmlError::NotSupported)));

    // A handle belongs to one instance.
    let device = gpu.mig_device_by_index(0).unwrap();
    let uuid = device.uuid().unwrap();
    succeeds(&machine, "-dci");
    assert!(device.name().is_err());
    assert!(nvml.device_by_uuid(uuid.as_str()).is_err());
    succeeds(&machine, "-cci -gi 2");
    assert!(device.name().is_err());
    assert_ne!(gpu.mig_device_by_index(0).unwrap().uuid().unwrap(), uuid);
}

/// Files and nodes are created and removed with the instances.
#[test]
fn instances_have_capabilities() {
    let machine = partitioned("A100-40", 2);
    let listed = |folder: &str| -> Vec<String> {
        let entries = std::fs::read_dir(machine.path(folder)).unwrap();
        let mut names: Vec<_> = entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        names
    };
    assert_eq!(listed("dev/nvidia-caps"), ["nvidia-cap1", "nvidia-cap2"]);
    succeeds(&machine, "-cgi 9 -C");
    // GPU instance 2 of GPU 0 has the number 3 + 2 * 9.
    let nodes = ["nvidia-cap1", "nvidia-cap2", "nvidia-cap21", "nvidia-cap22"];
    assert_eq!(listed("dev/nvidia-caps"), nodes);
    let read = |path: &str| std::fs::read_to_string(machine.path(path)).unwrap();
    let access = "proc/driver/nvidia/capabilities/gpu0/mig/gi2/ci0/access";
    assert_eq!(
        read(access),
        "DeviceFileMinor: 22\nDeviceFileMode: 292\nDeviceFileModify: 1\n"
    );
    assert!(read("proc/driver/nvidia-caps/mig-minors").contains("gpu0/gi2/ci0/access 22\n"));
    succeeds(&machine, "-dci");
    assert_eq!(listed("dev/nvidia-caps"), nodes[..3]);
    assert!(!machine.path(access).exists());
    succeeds(&machine, "-dgi");
    assert_eq!(listed("dev/nvidia-caps"), nodes[..2]);
    assert_eq!(listed("proc/driver/nvidia/capabilities"), ["mig"]);
}

#[test]
fn instances_outlive_the_daemon_and_not_the_machine() {
    let mut machine = partitioned("A100-40", 1);
    succeeds(&machine, "-cgi 9 -C");
    let before = machine.smi(&["-L"]);
    machine.kill_daemon();
    machine.start_daemon();
    assert_eq!(machine.smi(&["-L"]), before);
    // A reboot empties /run.
    machine.kill_daemon();
    std::fs::remove_file(machine.path("run/nvidia-persistenced/machine")).unwrap();
    machine.start_daemon();
    assert!(!machine.smi(&["-L"]).contains("MIG"));
    assert!(!machine.path("dev/nvidia-caps/nvidia-cap21").exists());
}

#[test]
fn the_mode_is_kept_while_there_are_instances() {
    for (model, switches_when_idle) in [("H100-80", true), ("A100-40", false)] {
        let machine = partitioned(model, 1);
        succeeds(&machine, "-cgi 9 -C");
        let text = machine.smi(&["-i", "0", "-mig", "0"]);
        assert!(text.contains("pending disable"), "{text}");
        let nvml = machine.nvml();
        let device = nvml.device_by_index(0).unwrap();
        let modes = || {
            let mode = device.mig_mode().unwrap();
            (mode.current, mode.pending)
        };
        assert_eq!(modes(), (1, 0));
        succeeds(&machine, "-dci");
        succeeds(&machine, "-dgi");
        if switches_when_idle {
            common::wait_until(|| modes() == (0, 0), || format!("{:?}", modes()));
        } else {
            assert_eq!(modes(), (1, 0), "Ampere needs a reset");
            machine.control(&["reset-gpu", "0"]);
            assert_eq!(modes(), (0, 0));
        }
    }
}

/// Each program has the memory and the time of its instance.
#[test]
fn a_cuda_program_runs_in_one_instance() {
    let machine = partitioned("H100-80", 2);
    succeeds(&machine, "-cgi 9,19,19 -C");
    let nvml = machine.nvml();
    let gpu = nvml.device_by_index(0).unwrap();
    let devices: Vec<_> = (0..3)
        .map(|index| gpu.mig_device_by_index(index).unwrap())
        .collect();
    let uuids: Vec<_> = devices
        .iter()
        .map(|device| device.uuid().unwrap())
        .collect();
    let on = |uuid: &str| {
        let mut program = machine.program_with(&[("CUDA_VISIBLE_DEVICES", uuid)]);
        assert_eq!(program.ask("init"), "ok");
        assert_eq!(program.ask("count"), "1");
        program
    };
    let hexadecimal = |uuid: &str| uuid[4..].replace('-', "");
    let (mut large, mut small) = (on(&uuids[0]), on(&uuids[1]));
    let name = |profile| format!("Simulated H100 80GB HBM3 MIG {profile}");
    assert_eq!(large.ask("use 0"), name("3g.40gb"));
    assert_eq!(small.ask("use 0"), name("1g.10gb"));
    let of_gpu = hexadecimal(&gpu.uuid().unwrap());
    assert_eq!(
        small.ask("device"),
        format!("16 {} {of_gpu}", hexadecimal(&uuids[1]))
    );
    assert_eq!(
        large.ask("device"),
        format!("60 {} {of_gpu}", hexadecimal(&uuids[0]))
    );

    let (context, all) = (64 * MIB, 9984 * MIB);
    assert_eq!(small.ask("info"), format!("{} {all}", all - context));
    assert_eq!(small.ask(&format!("alloc {}", all - context)), "ok");
    assert_eq!(small.ask("alloc 1"), "CUDA_ERROR_OUT_OF_MEMORY");
    assert_eq!(large.ask(&format!("alloc {}", 40_000 * MIB)), "ok");
    let memory = devices[1].memory_info().unwrap();
    assert_eq!((memory.used, memory.free), (all, 0));
    let listed = devices[1].running_compute_processes().unwrap();
    assert_eq!(listed.len(), 1);
    assert_eq!(
        (listed[0].pid, listed[0].gpu_instance_id),
        (small.pid(), Some(7))
    );
    assert_eq!(listed[0].used_gpu_memory, UsedGpuMemory::Used(all));
    assert_eq!(gpu.running_compute_processes().unwrap().len(), 2);
    let view = machine.smi(&[]);
    assert!(view.contains("9984MiB /  9984MiB"), "{view}");

    // Kernels of one instance take no time from another.
    let other = std::thread::spawn(move || {
        let took = large.ask("launch sim_busy_20ms 40");
        (large, took)
    });
    let own = small.ask("launch sim_busy_20ms 40");
    let (large, others) = other.join().unwrap();
    for answer in [own, others] {
        let events: u64 = answer.split(' ').next().unwrap().parse().unwrap();
        assert!((800..1000).contains(&events), "{answer}");
    }

    // An instance with a program in it cannot be destroyed.
    let (status, refusal) = mig(&machine, "-dci -gi 7");
    assert_eq!(status, 19);
    assert!(refusal.contains("In use by another client"), "{refusal}");
    small.kill();
    machine.wait_for_used(0, 40_236 * MIB);
    succeeds(&machine, "-dci -gi 7");
    assert_eq!(devices[0].running_compute_processes().unwrap().len(), 1);
    large.end();
}

#[test]
fn a_program_sees_the_instance_whose_capabilities_it_has() {
    let machine = partitioned("H100-80", 2);
    succeeds(&machine, "-cgi 19,19 -C");
    let nvml = machine.nvml();
    let gpu = nvml.device_by_index(0).unwrap();
    let uuid = |index| gpu.mig_device_by_index(index).unwrap().uuid().unwrap();
    // Without a choice, a program sees the first MIG device, and not the GPU beside it.
    let mut program = machine.program();
    program.ask("init");
    assert_eq!(program.ask("count"), "1");
    assert!(program.ask("use 0").ends_with("MIG 1g.10gb"));
    assert!(
        program
            .ask("device")
            .contains(&uuid(0)[4..].replace('-', ""))
    );

    // Without CAP_SYS_ADMIN the nodes of both capabilities are needed. Here only those of GPU instance 13 are there.
    for node in ["nvidia-cap1", "nvidia-cap2", "nvidia-cap102"] {
        std::fs::remove_file(machine.path("dev/nvidia-caps").join(node)).unwrap();
    }
    let mut program = machine.program_without_administration();
    program.ask("init");
    assert!(program.ask("use 0").ends_with("MIG 1g.10gb"));
    assert!(
        program
            .ask("device")
            .contains(&uuid(1)[4..].replace('-', ""))
    );
    let listed = machine
        .unprivileged(machine.path("usr/bin/nvidia-smi"))
        .arg("-L")
        .output()
        .unwrap();
    let listed = String::from_utf8(listed.stdout).unwrap();
    assert!(
        listed.contains(&uuid(1)) && !listed.contains(&uuid(0)),
        "{listed}"
    );
    let mut unprivileged = machine.unprivileged(machine.path("usr/bin/nvidia-smi"));
    let refused = unprivileged.args(["mig", "-cgi", "19"]).output().unwrap();
    assert_eq!(refused.status.code(), Some(4), "{refused:?}");
    std::fs::remove_file(machine.path("dev/nvidia-caps/nvidia-cap121")).unwrap();
    let mut program = machine.program_without_administration();
    program.ask("init");
    assert_eq!(program.ask("count"), "1", "the other GPU");
    assert_eq!(program.ask("use 0"), "Simulated H100 80GB HBM3");
}

#[test]
fn gpm_samples_a_gpu_instance_by_its_id() {
    let machine = partitioned("H100-80", 1);
    succeeds(&machine, "-cgi 19 -C");
    let nvml = machine.nvml();
    let device = nvml.device_by_index(0).unwrap();
    let mut ids = (0..16).filter(|id| device.gpm_mig_sample(*id).is_ok());
    let id = ids.next().unwrap();
    assert_eq!(ids.next(), None, "one instance");
    let samples = [device.gpm_mig_sample(id), device.gpm_mig_sample(id)];
    let [first, second] = samples.map(Result::unwrap);
    let metric = [GpmMetricId::GraphicsUtil];
    let found = gpm_metrics_get(&nvml, &first, &second, &metric).unwrap();
    assert!(found[0].as_ref().unwrap().value < 1.0, "{found:?}");
    // A sample of the whole GPU is not compared with one of an instance.
    let whole = device.gpm_sample().unwrap();
    assert!(gpm_metrics_get(&nvml, &first, &whole, &metric).is_err());
}
