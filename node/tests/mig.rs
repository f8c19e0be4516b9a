//! MIG of a simulated GPU, with the real nvidia-smi as the administrator.

use crate::common;

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};

use common::{Host, smi};
use tranche_api::gpu_node::MigMode;
use tranche_driver::gpu_state::{Actual, Change};
use tranche_driver::mig::{Geometry, Placement};
use tranche_node::capabilities;
use tranche_node::inventory::inventory;
use tranche_node::nvml::{ChangeError, Driver as _, NvmlError, Opened};
use tranche_nvml::{Mig, Reason};

#[test]
fn the_inventory_has_the_mig_geometry_and_existing_instances() {
    let mut host = Host::new();
    host.install_for("H100-80", "/run/nvidia/driver");
    let root = host.at("/run/nvidia/driver");
    let describe = || {
        let opened = host.driver(None).open().unwrap();
        inventory(&opened.nvml.describe().unwrap(), host.dir.path())
    };
    let off = describe();
    let [reported] = &off.mig_geometries[..] else {
        panic!("two GPUs that are alike: {:?}", off.mig_geometries);
    };
    assert_eq!(reported.gpus.len(), 2);
    let geometry = Geometry::read(reported).unwrap();
    assert_eq!((geometry.whole.compute, geometry.whole.memory), (7, 0xff));
    let largest = geometry.partition(place(0, "7g.80gb")).unwrap();
    assert_eq!(largest.multiprocessors, 132);
    assert!(geometry.partition(place(6, "2g.20gb")).is_none());

    // An administrator's instances, with and without a compute instance.
    let uuid = off.gpus[1].uuid.as_str();
    smi(&root, &["-i", uuid, "-mig", "1"]);
    smi(&root, &["mig", "-i", uuid, "-cgi", "9:4", "-C"]);
    smi(&root, &["mig", "-i", uuid, "-cgi", "19:2"]);
    let on = describe();
    assert_eq!(on.mig_geometries, off.mig_geometries);
    assert_eq!(on.gpus[0].mig_instances, []);
    let found = &on.gpus[1].mig_instances;
    let places: Vec<_> = found.iter().map(|it| (&*it.profile, it.start)).collect();
    assert!(places.contains(&("3g.40gb", 4)) && places.contains(&("1g.10gb", 2)));
    for instance in found {
        let listed = instance
            .uuid
            .as_ref()
            .map(|it| it.starts_with("MIG-") && smi(&root, &["-L"]).contains(it));
        let expected = (instance.start == 4).then_some(true);
        assert_eq!(listed, expected, "{instance:?}");
    }
}

#[test]
fn instances_are_made_and_removed() {
    let mut host = Host::new();
    host.install_for("H100-80", "/");
    let root = host.at("/");
    let library = root.join("usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1");
    let nvml = nvml_wrapper::Nvml::builder()
        .lib_path(library.as_os_str())
        .init()
        .unwrap();
    let device = nvml.device_by_index(0).unwrap();
    let mig = Mig::of(&nvml, &device);
    let profiles = mig.profiles().unwrap();
    let third = profiles.iter().find(|it| it.name == "3g.40gb").unwrap();
    let [low, high] = third.placements[..] else {
        panic!("{third:?}");
    };
    let off = mig.create_instance(third.id, high).unwrap_err();
    assert_eq!(off.reason, Reason::NotSupported);

    smi(&root, &["-i", "0", "-mig", "1"]);
    let id = mig.create_instance(third.id, high).unwrap();
    let again = mig.create_instance(third.id, high).unwrap_err();
    assert_eq!(again.reason, Reason::InsufficientResources);
    let compute = mig.create_compute_instance(id).unwrap();
    assert_eq!(compute.slices, 3);
    assert!(compute.uuid.starts_with("MIG-"), "{compute:?}");
    assert!(smi(&root, &["-L"]).contains(&compute.uuid));
    let [instance] = &mig.instances(&profiles).unwrap()[..] else {
        panic!("{:?}", mig.instances(&profiles));
    };
    assert_eq!((instance.id, instance.placement), (id, high));
    assert_eq!(instance.compute, std::slice::from_ref(&compute));

    let kept = mig.destroy_instance(id).unwrap_err();
    assert_eq!(kept.reason, Reason::InUse, "it has a compute instance");
    mig.destroy_compute_instance(id, compute.id).unwrap();
    mig.destroy_instance(id).unwrap();
    assert_eq!(mig.instances(&profiles).unwrap(), []);
    assert_eq!(
        mig.destroy_instance(id).unwrap_err().reason,
        Reason::NotFound
    );
    mig.create_instance(third.id, low).unwrap();
}

/// Runs CUDA on the device 0 that the libraries of a root show it, until its input ends.
#[test]
#[ignore = "the program of the other tests"]
fn program() {
    let context = cudarc::driver::CudaContext::new(0).unwrap();
    println!("=> {}", context.name().unwrap());
    let _ = std::io::stdin().lines().next();
}

/// Starts [`program`] on a device; ends with its drop.
struct Program(Child);

impl Program {
    fn on(host: &Host, device: &str) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--ignored", "--exact", "mig::program", "--nocapture"])
            .env("LD_LIBRARY_PATH", host.at("usr/lib/x86_64-linux-gnu"))
            .env("CUDA_VISIBLE_DEVICES", device)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap())
            .lines()
            .map(Result::unwrap);
        assert!(lines.any(|line| line.contains("=> ")), "no CUDA");
        Self(child)
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn place(start: u8, profile: &str) -> Placement {
    Placement {
        start,
        profile: profile.parse().unwrap(),
    }
}

/// A driver at `/` of a host, and the UUID of its first GPU.
fn open(host: &Host) -> (Opened, String) {
    let opened = host.driver(None).open().unwrap();
    let uuid = opened.nvml.describe().unwrap().gpus[0].uuid.clone();
    (opened, uuid)
}

const MODE_ON: MigMode = MigMode {
    current: true,
    pending: true,
};

#[test]
fn a_partition_is_made_used_and_removed() {
    let mut host = Host::new();
    host.install_for("H100-80", "/");
    let root = host.at("/");
    let (opened, uuid) = open(&host);
    let nvml = opened.nvml;
    let change = |change| nvml.change_mig(&uuid, &change);
    let state = || nvml.mig_state(&uuid).unwrap();
    let whole = nvml.describe().unwrap();
    assert_eq!(state(), Actual::default());
    let at_two = Change::CreateInstance(place(2, "1g.10gb"));
    let off = change(at_two).unwrap_err();
    assert!(
        matches!(off, ChangeError::Nvml(NvmlError::NotSupported { .. })),
        "{off}"
    );

    // A program has the whole GPU: MIG mode stays off, and is not pending.
    let program = Program::on(&host, "0");
    let used = change(Change::SwitchMigMode { on: true }).unwrap_err();
    assert!(matches!(used, ChangeError::InUse { .. }), "{used}");
    assert_eq!(state(), Actual::default());
    drop(program);
    common::wait_until(|| change(Change::SwitchMigMode { on: true }).is_ok());
    assert_eq!(state().mig_mode, MODE_ON);

    for none in [place(7, "1g.10gb"), place(0, "1g.5gb")] {
        let error = change(Change::CreateInstance(none)).unwrap_err();
        assert!(
            matches!(&error, ChangeError::Nvml(NvmlError::Call { .. })),
            "{error}"
        );
    }
    change(at_two).unwrap();
    let again = change(at_two).unwrap_err();
    assert!(
        matches!(again, ChangeError::InsufficientResources { .. }),
        "{again}"
    );
    let instance = state().instances[0].id;
    change(Change::CreateComputeInstance { instance }).unwrap();
    let made = state().instances;
    assert_eq!((made.len(), made[0].placement), (1, place(2, "1g.10gb")));
    let [compute] = &made[0].compute[..] else {
        panic!("{made:?}");
    };
    assert_eq!(compute.slices, 1);
    assert!(compute.uuid.starts_with("MIG-"), "{compute:?}");
    assert!(smi(&root, &["-L"]).contains(&compute.uuid));

    // The GPU's own description stays: the totals are those of the whole GPU.
    let mut partitioned = nvml.describe().unwrap();
    let gpu = &mut partitioned.gpus[0];
    assert_eq!(gpu.mig_instances.len(), 1);
    assert_eq!(gpu.mig_instances[0].uuid.as_ref(), Some(&compute.uuid));
    gpu.mig_instances.clear();
    gpu.mig_mode = MigMode::default();
    assert_eq!(partitioned, whole);

    // The nodes of both capabilities, as the simulator made them.
    let minor = whole.gpus[0].minor;
    let nodes = capabilities::of_partition(&host.at("proc"), &root, minor, instance, compute.id);
    for node in nodes.unwrap() {
        let there = root.join(&node.path[1..]);
        let before = fs::symlink_metadata(&there).unwrap();
        node.make(&root).unwrap();
        let after = fs::symlink_metadata(&there).unwrap();
        assert_eq!(format!("{before:?}"), format!("{after:?}"), "made again");
        assert_eq!(node.mode, 0o444);
    }
    let none = capabilities::of_partition(&host.at("proc"), &root, minor, instance, 1);
    assert!(none.unwrap_err().to_string().contains("ci1/access"));

    // Nothing is removed or switched off while it is used.
    let program = Program::on(&host, &compute.uuid);
    let remove_compute = Change::DestroyComputeInstance {
        instance,
        compute: compute.id,
    };
    let remove = Change::DestroyInstance { instance };
    for (refused, calls) in [
        (remove_compute, "nvmlComputeInstanceDestroy"),
        (remove, "nvmlGpuInstanceDestroy"),
        (Change::SwitchMigMode { on: false }, "nvmlDeviceSetMigMode"),
    ] {
        match change(refused).unwrap_err() {
            ChangeError::InUse { call, object } => {
                assert_eq!((call, object.contains(&uuid)), (calls, true));
            }
            error => panic!("{error}"),
        }
    }
    assert_eq!(
        (state().mig_mode, state().instances),
        (MODE_ON, made.clone())
    );
    drop(program);
    common::wait_until(|| change(remove_compute).is_ok());
    // What is gone is removed.
    change(remove_compute).unwrap();
    change(remove).unwrap();
    change(remove).unwrap();
    change(Change::SwitchMigMode { on: false }).unwrap();
    assert_eq!(state(), Actual::default());
    assert_eq!(nvml.describe().unwrap(), whole);
}

#[test]
fn a_gpu_that_needs_a_reset_says_so_and_stays_as_it_is() {
    let mut host = Host::new();
    host.lay_out("A100-80", "/");
    let machine = host.at("/etc/nvidia-sim/machine.toml");
    let text = fs::read_to_string(&machine).unwrap();
    fs::write(&machine, text + "mig_needs_reset = true\n").unwrap();
    host.load("/");
    let (opened, uuid) = open(&host);
    let on = Change::SwitchMigMode { on: true };
    let error = opened.nvml.change_mig(&uuid, &on).unwrap_err();
    assert!(matches!(error, ChangeError::NeedsReset { .. }), "{error}");
    assert_eq!(opened.nvml.mig_state(&uuid).unwrap(), Actual::default());
}

#[test]
fn a_change_whose_call_fails_can_be_made_again() {
    let mut host = Host::new();
    host.lay_out("H100-80", "/");
    // NVML_ERROR_GPU_IS_LOST, NVML_ERROR_UNKNOWN and NVML_ERROR_IN_USE.
    let faults = [
        ("nvmlDeviceCreateGpuInstanceWithPlacement", 15),
        ("nvmlGpuInstanceCreateComputeInstance", 999),
        ("nvmlGpuInstanceDestroy", 19),
    ];
    let fault = |(call, code)| format!("[[fault]]\ncall = {call:?}\ntimes = 1\ncode = {code}\n");
    let script: String = faults.map(fault).concat();
    fs::write(host.at("/etc/nvidia-sim/faults.toml"), script).unwrap();
    host.load("/");
    let (opened, uuid) = open(&host);
    let change = |change| opened.nvml.change_mig(&uuid, &change);
    let instances = || opened.nvml.mig_state(&uuid).unwrap().instances;
    change(Change::SwitchMigMode { on: true }).unwrap();
    let create = Change::CreateInstance(place(6, "1g.10gb"));
    let lost = change(create).unwrap_err();
    assert!(
        matches!(lost, ChangeError::Nvml(NvmlError::GpuLost { .. })),
        "{lost}"
    );
    assert_eq!(instances(), []);
    change(create).unwrap();

    let instance = instances()[0].id;
    let compute = Change::CreateComputeInstance { instance };
    let unknown = change(compute).unwrap_err();
    let (name, code) = faults[1];
    let text = unknown.to_string();
    assert!(
        text.contains(name) && text.contains(&format!("code {code}")),
        "{text}"
    );
    assert!(
        text.contains(&format!("{uuid}, GPU instance {instance}")),
        "{text}"
    );
    assert_eq!(instances()[0].compute, [], "it is found without the other");
    change(compute).unwrap();

    let compute = instances()[0].compute[0].id;
    change(Change::DestroyComputeInstance { instance, compute }).unwrap();
    let remove = Change::DestroyInstance { instance };
    let used = change(remove).unwrap_err();
    assert!(matches!(used, ChangeError::InUse { .. }), "{used}");
    change(remove).unwrap();
    assert_eq!(instances(), []);
}
