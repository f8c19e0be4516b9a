use proptest::prelude::*;
use serde_json::json;

use super::*;
use crate::claim_spec::claim_spec;
use crate::preparation::{MigDevice, PAGES, PreparationPlan, plan};
use crate::testing::{UID, allocation, capped, gpu, inventory, plain, with};

// `cdi-oracle` checks these files with the library that container runtimes use.
const GOLDEN_CLAIM: &str = include_str!("../../testdata/cdi-claim.json");
const GOLDEN_CLAIM_DIGIT: &str = include_str!("../../testdata/cdi-claim-digit.json");
const GOLDEN_DRIVER: &str = include_str!("../../testdata/cdi-driver.json");
const NAMES: &str = include_str!("../../testdata/cdi-names.tsv");

fn paths() -> NodePaths {
    NodePaths {
        shares: "/run/tranche/shares".to_owned(),
        hooks: "/var/lib/tranche".to_owned(),
        metadata: Some("/run/tranche/metadata".to_owned()),
        mps: "/run/tranche/mps".to_owned(),
        load: "/run/tranche/load".to_owned(),
        dev_root: "/".to_owned(),
    }
}

fn shim(pages: u32) -> Shim {
    Shim {
        pages,
        folder: format!("/var/lib/kubelet/plugins/gpu.tranche.dev/lib/{pages}"),
    }
}

/// With spaces, as the files in `testdata` are.
fn for_people(spec: &Spec) -> String {
    serde_json::to_string_pretty(spec).unwrap() + "\n"
}

/// A claim with a capped share, a whole GPU and admin access to a third.
fn mixed() -> PreparationPlan {
    let results = [
        capped("20Gi", "25"),
        with(plain("gpu-00000001"), &json!({"request": "whole"})),
        with(
            plain("gpu-00000002-timeshared"),
            &json!({"request": "slow", "shareID": "s"}),
        ),
    ];
    plan(
        &allocation("a", &results),
        &inventory(vec![gpu(0), gpu(1), gpu(2)]),
        [],
    )
    .unwrap()
}

#[test]
fn a_concurrent_share_gets_its_daemon_and_its_limits() {
    let result = with(
        capped("20Gi", "25"),
        &json!({"device": "gpu-00000000-concurrent"}),
    );
    let plan = plan(&allocation("a", &[result]), &inventory(vec![gpu(0)]), []).unwrap();
    let spec = claim_spec(&plan, &paths()).unwrap();
    let edits = &spec.devices()[0].container_edits;
    let daemon = format!("/run/tranche/mps/{}", gpu(0).uuid);
    for (host_path, container_path) in [
        (format!("{daemon}/pipe"), "/tmp/nvidia-mps"),
        (format!("{daemon}/shm"), "/dev/shm"),
    ] {
        let mut mounts = edits.mounts.iter();
        let mount = mounts
            .find(|it| it.container_path == container_path)
            .expect(container_path);
        assert_eq!(mount.host_path, host_path);
        assert_eq!(mount.options[0], "rw");
    }
    for variable in [
        "TRANCHE_GPU_0_TIER=concurrent",
        "CUDA_MPS_PIPE_DIRECTORY=/tmp/nvidia-mps",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE=25",
        // With room for one context, as the server counts it.
        "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT=0=20992M",
    ] {
        assert!(
            edits.env.iter().any(|it| it == variable),
            "{variable}: {:?}",
            edits.env
        );
    }
    let without = claim_spec(&mixed(), &paths()).unwrap();
    let text = String::from_utf8(without.encode()).unwrap();
    assert!(!text.contains("mps") && !text.contains("MPS"), "{text}");
}

#[test]
fn a_concurrent_partition_share_gets_its_mig_devices_daemon() {
    let share = with(
        capped("20Gi", "25"),
        &json!({"device": "gpu-00000000-mps-3g40gb-4"}),
    );
    let mut inventory = inventory(vec![gpu(0)]);
    inventory.mig_geometries = vec![crate::mig::tables::h100(&[&gpu(0).uuid])];
    let plan = plan(&allocation("a", &[share]), &inventory, [])
        .unwrap()
        .on_gpu(&gpu(0).uuid, None, |_| {
            Some(MigDevice {
                uuid: "MIG-1".to_owned(),
                gpu_instance: 1,
                compute_instance: 0,
                capabilities: [12, 13],
            })
        });
    let spec = claim_spec(&plan, &paths()).unwrap();
    let mounts = &spec.devices()[0].container_edits.mounts;
    let of_daemon = mounts.iter().filter(|it| it.host_path.contains("/mps/"));
    let folders: Vec<_> = of_daemon.map(|it| &*it.host_path).collect();
    let expected = ["pipe", "shm"].map(|name| format!("/run/tranche/mps/MIG-1/{name}"));
    assert_eq!(folders, expected);
}

fn file(path: &str) -> DriverFile {
    DriverFile {
        host_path: path.to_owned(),
        container_path: path.to_owned(),
    }
}

fn library(folder: &str, stem: &str, version: &str, soname: &str) -> Library {
    let name = format!("{stem}.so.{version}");
    let link = |target: &str, path: &str| Link {
        target: target.to_owned(),
        path: format!("{folder}/{path}"),
    };
    Library {
        file: file(&format!("{folder}/{name}")),
        soname: soname.to_owned(),
        links: vec![link(&name, soname), link(soname, &format!("{stem}.so"))],
    }
}

fn driver_files() -> DriverFiles {
    let folder = "/usr/lib/x86_64-linux-gnu";
    let version = "535.261.03";
    DriverFiles {
        libraries: vec![
            library(folder, "libcuda", version, "libcuda.so.1"),
            library(folder, "libnvidia-ml", version, "libnvidia-ml.so.1"),
            library(
                folder,
                "libnvidia-ptxjitcompiler",
                version,
                "libnvidia-ptxjitcompiler.so.1",
            ),
        ],
        binaries: vec![file("/usr/bin/nvidia-smi")],
        firmware: vec![file("/lib/firmware/nvidia/535.261.03/gsp_tu10x.bin")],
        sockets: vec![file("/run/nvidia-persistenced/socket")],
        config_files: vec![],
        control_nodes: vec!["/dev/nvidiactl".to_owned(), "/dev/nvidia-uvm".to_owned()],
    }
}

#[test]
fn the_spec_of_a_claim() {
    let spec = claim_spec(&mixed(), &paths()).unwrap();
    assert_eq!(for_people(&spec), GOLDEN_CLAIM);
    assert_eq!(serde_json::from_str::<Spec>(GOLDEN_CLAIM).unwrap(), spec);
}

#[test]
fn the_spec_of_the_driver() {
    let spec = driver_spec(&driver_files(), &paths(), &[shim(1)]).unwrap();
    assert_eq!(for_people(&spec), GOLDEN_DRIVER);
    assert_eq!(serde_json::from_str::<Spec>(GOLDEN_DRIVER).unwrap(), spec);
}

#[test]
fn the_spec_of_a_claim_on_a_node_with_a_driver_container() {
    let mut allocation = allocation("a", &[plain("gpu-00000001")]);
    UID.clone_into(&mut allocation.uid);
    let plan = plan(&allocation, &inventory(vec![gpu(1)]), []).unwrap();
    let paths = NodePaths {
        dev_root: "/run/nvidia/driver".to_owned(),
        ..paths()
    };
    let spec = claim_spec(&plan, &paths).unwrap();
    assert_eq!(for_people(&spec), GOLDEN_CLAIM_DIGIT);
}

#[test]
fn every_id_for_the_kubelet_is_a_device_of_a_spec() {
    let plan = mixed();
    let known: Vec<String> = [
        claim_spec(&plan, &paths()),
        driver_spec(&driver_files(), &paths(), &[shim(PAGES)]),
    ]
    .into_iter()
    .map(Result::unwrap)
    .flat_map(|spec| {
        let id = |device: &Device| format!("{}={}", spec.kind, device.name);
        spec.devices.iter().map(id).collect::<Vec<_>>()
    })
    .collect();
    for id in plan.devices.iter().flat_map(|device| &device.cdi_ids) {
        assert!(known.contains(id), "{id} is none of {known:?}");
    }
}

#[test]
fn names_are_checked() {
    for line in NAMES.lines() {
        let (name, taken) = line.split_once('\t').unwrap();
        let device = Device {
            name: name.to_owned(),
            container_edits: ContainerEdits::default(),
        };
        let spec = Spec::new(CLAIM_CLASS, vec![device], ContainerEdits::default());
        assert_eq!(claim_device_id(name).is_ok(), taken == "yes", "{name:?}");
        assert_eq!(spec.is_ok(), taken == "yes", "{name:?}");
    }
    for class in ["", "0", "a.b", "a-", "_a", &"a".repeat(64)] {
        assert!(
            Spec::new(class, vec![], ContainerEdits::default()).is_err(),
            "{class:?}"
        );
    }
}

#[test]
fn the_version_is_the_lowest_that_runtimes_take() {
    // The name of a claim's device begins with a digit of its UID, or with a letter.
    let named = |name: &str| {
        let device = Device {
            name: name.to_owned(),
            container_edits: ContainerEdits {
                env: vec!["A=b".to_owned()],
                ..ContainerEdits::default()
            },
        };
        Spec::new(CLAIM_CLASS, vec![device], ContainerEdits::default()).unwrap()
    };
    let typed = {
        let mut device = named("a").devices[0].clone();
        device.container_edits.mounts = vec![Mount {
            kind: "tmpfs".to_owned(),
            ..read_only("/a".to_owned(), "/b".to_owned())
        }];
        Spec::new(CLAIM_CLASS, vec![device], ContainerEdits::default()).unwrap()
    };
    let elsewhere = claim_spec(
        &mixed(),
        &NodePaths {
            dev_root: "/run/nvidia/driver".to_owned(),
            ..paths()
        },
    )
    .unwrap();
    let common = {
        let edits = ContainerEdits {
            device_nodes: vec![device_node("/dev/nvidiactl", "/run/nvidia/driver")],
            ..ContainerEdits::default()
        };
        Spec::new(DRIVER_CLASS, named("a").devices, edits).unwrap()
    };
    for (spec, version) in [
        (named("a"), Version::V0_3),
        (typed, Version::V0_4),
        (named("0a"), Version::V0_5),
        (elsewhere, Version::V0_5),
        (common, Version::V0_5),
    ] {
        assert_eq!(spec.version(), version);
    }
}

#[test]
fn only_the_shim_in_a_capped_container_sees_the_driver() {
    let spec = driver_spec(&driver_files(), &paths(), &[shim(1)]).unwrap();
    let edits = |device: DriverDevice| {
        &spec
            .devices()
            .iter()
            .find(|d| d.name == device.name())
            .unwrap()
            .container_edits
    };
    let source = |edits: &ContainerEdits, path: &str| {
        let found = edits.mounts.iter().chain(&spec.container_edits().mounts);
        found
            .filter(|mount| mount.container_path == path)
            .map(|mount| mount.host_path.clone())
            .collect::<Vec<_>>()
    };
    let (full, capped) = (
        edits(DriverDevice::Full),
        edits(DriverDevice::Capped { pages: 1 }),
    );
    for soname in ["libcuda.so.1", "libnvidia-ml.so.1"] {
        let real = format!(
            "/usr/lib/x86_64-linux-gnu/{}.so.535.261.03",
            soname.trim_end_matches(".so.1")
        );
        let shim = format!("/var/lib/kubelet/plugins/gpu.tranche.dev/lib/1/{soname}");
        let covered = format!("/usr/lib/x86_64-linux-gnu/{soname}");
        assert_eq!(source(capped, &covered), [&*shim]);
        assert_eq!(
            source(capped, &format!("/usr/lib/tranche/{soname}")),
            [&*shim]
        );
        assert_eq!(
            source(capped, &format!("/usr/lib/tranche/driver/{soname}")),
            [&*real]
        );
        assert_eq!(source(capped, &real), Vec::<String>::new());
        assert_eq!(source(full, &real), [&*real]);
        // The link that a plain driver needs would replace the shim.
        let link = format!("::{covered}");
        let makes = |edits: &ContainerEdits| {
            let links = command(edits, "create-links").unwrap_or_default();
            links.iter().any(|arg| arg.ends_with(&link))
        };
        assert!(makes(full) && !makes(capped));
    }
    assert_eq!(
        source(capped, "/etc/ld.so.preload"),
        ["/var/lib/kubelet/plugins/gpu.tranche.dev/lib/1/ld.so.preload"]
    );
    assert!(source(full, "/etc/ld.so.preload").is_empty());
    // The cache is made from the links.
    for edits in [full, capped] {
        let [hook] = &edits.hooks[..] else {
            panic!("one process for all commands: {:?}", edits.hooks);
        };
        let order: Vec<_> = hook.args[1..]
            .iter()
            .filter(|arg| COMMANDS.contains(&arg.as_str()))
            .collect();
        let between = if edits == full {
            "enable-cuda-compat"
        } else {
            "cover-libraries"
        };
        assert_eq!(order, ["create-links", between, "update-ldcache"]);
    }
}

const COMMANDS: [&str; 4] = [
    "create-links",
    "cover-libraries",
    "enable-cuda-compat",
    "update-ldcache",
];

/// The options of a command of the hook.
fn command<'a>(edits: &'a ContainerEdits, name: &str) -> Option<&'a [String]> {
    let args = &edits.hooks.first()?.args;
    let options = &args[args.iter().position(|arg| arg == name)? + 1..];
    let end = options
        .iter()
        .position(|arg| COMMANDS.contains(&arg.as_str()));
    Some(&options[..end.unwrap_or(options.len())])
}

#[test]
fn a_capped_container_has_only_the_shim_and_named_libraries() {
    let folder = "/usr/lib/x86_64-linux-gnu";
    let other = [
        ("libnvidia-opencl", "opencl"),
        ("libnvidia-encode", "video"),
        ("libnvcuvid", "video"),
        ("libnvoptix", "graphics"),
        ("libGLX_nvidia", "graphics"),
        ("libnvidia-ngx", "ngx"),
        ("libnvidia-new-in-900", "other"),
    ];
    let mut files = driver_files();
    files.libraries.extend(
        other
            .iter()
            .map(|(stem, _)| library(folder, stem, "535.261.03", &format!("{stem}.so.1"))),
    );
    let spec = driver_spec(&files, &paths(), &[shim(1)]).unwrap();
    // By mounts and by links.
    let names = |edits: &ContainerEdits, stem: &str| {
        let mounts = edits.mounts.iter().map(|mount| &mount.container_path);
        let args = command(edits, "create-links").unwrap_or_default();
        let lists: [Vec<&String>; 2] = [mounts.collect(), args.iter().collect()];
        lists.map(|list| {
            list.iter()
                .any(|path| path.contains(&format!("/{stem}.so")))
        })
    };
    for (stem, capability) in other {
        assert_eq!(
            names(spec.container_edits(), stem),
            [false, false],
            "{stem}"
        );
        for device in spec.devices() {
            let expected = device.name == "full" || device.name == capability;
            let name = &device.name;
            assert_eq!(
                names(&device.container_edits, stem),
                [expected; 2],
                "{stem} {name}"
            );
        }
    }
    // CUDA's own are everybody's.
    assert!(names(spec.container_edits(), "libnvidia-ptxjitcompiler")[0]);
}

#[test]
fn every_library_of_a_driver_has_a_capability() {
    use std::collections::BTreeMap;
    let mut by_capability: BTreeMap<Capability, Vec<&str>> = BTreeMap::new();
    for path in include_str!("../../../node/testdata/debian-535.list").lines() {
        let name = path.rsplit('/').next().unwrap_or(path);
        if !path.contains(" -> ") && name.contains(".so.") {
            by_capability
                .entry(Capability::of_library(name))
                .or_default()
                .push(name);
        }
    }
    let counts: Vec<_> = by_capability
        .iter()
        .map(|(c, names)| (c.name(), names.len()))
        .collect();
    assert_eq!(
        counts,
        [
            ("compute", 4),
            ("utility", 2),
            ("video", 4),
            ("graphics", 9),
            ("opencl", 1)
        ],
        "{by_capability:?}"
    );
}

#[test]
fn the_hooks_know_the_drivers_version_and_what_covers_what() {
    let spec = driver_spec(&driver_files(), &paths(), &[shim(1)]).unwrap();
    let args = |device: DriverDevice, name: &str| {
        let device = spec
            .devices()
            .iter()
            .find(|d| d.name == device.name())
            .unwrap();
        command(&device.container_edits, name).unwrap().join(" ")
    };
    assert_eq!(
        args(DriverDevice::Capped { pages: 1 }, "cover-libraries"),
        "--shim libcuda.so::/usr/lib/tranche/libcuda.so.1 \
         --shim libnvidia-ml.so::/usr/lib/tranche/libnvidia-ml.so.1 \
         --companion libnvidia-ptxjitcompiler.so::/usr/lib/x86_64-linux-gnu/libnvidia-ptxjitcompiler.so.535.261.03 \
         --real-cuda /usr/lib/tranche/driver/libcuda.so.1 --host-driver-version 535.261.03"
    );
    assert_eq!(
        args(DriverDevice::Full, "enable-cuda-compat"),
        "--host-driver-version 535.261.03 --unless /usr/lib/tranche/driver/libcuda.so.1"
    );
}

#[test]
fn containers_write_to_their_account_and_to_nothing_else() {
    let specs = [
        claim_spec(&mixed(), &paths()).unwrap(),
        driver_spec(&driver_files(), &paths(), &[shim(1)]).unwrap(),
    ];
    let mut writable = Vec::new();
    for spec in &specs {
        let edits = spec.devices().iter().map(|device| &device.container_edits);
        for mount in edits
            .chain([spec.container_edits()])
            .flat_map(|edits| &edits.mounts)
        {
            assert!(mount.options.contains(&"nosuid".to_owned()), "{mount:?}");
            if !mount.options.contains(&"ro".to_owned()) {
                writable.push(&*mount.container_path);
            }
        }
    }
    assert_eq!(writable, ["/usr/lib/tranche/shares/uid-of-a-gpu-0/account"]);
}

#[test]
fn what_is_missing_or_no_path_is_refused() {
    let refusal = |change: fn(&mut DriverFiles, &mut NodePaths)| {
        let (mut files, mut paths) = (driver_files(), paths());
        change(&mut files, &mut paths);
        driver_spec(&files, &paths, &[shim(1)])
            .unwrap_err()
            .to_string()
    };
    assert_eq!(
        refusal(|files, _| files
            .libraries
            .retain(|library| library.soname != "libcuda.so.1")),
        "the driver's files have no libcuda.so.1: is the driver root complete?"
    );
    assert_eq!(
        refusal(|files, _| files.libraries.clear()),
        "the driver's files have no libcuda.so.1: is the driver root complete?"
    );
    assert_eq!(
        refusal(|files, _| files.binaries[0].host_path = "nvidia-smi".to_owned()),
        r#"the driver's file "nvidia-smi" is not an absolute path"#
    );
    assert_eq!(
        refusal(|files, _| files.libraries[0].links[0].path = "libcuda.so.1".to_owned()),
        r#"the driver's link "libcuda.so.1" is not an absolute path"#
    );
    assert_eq!(
        refusal(|files, _| files.control_nodes.push(String::new())),
        r#"the control node "" is not an absolute path"#
    );
    assert_eq!(
        refusal(|_, paths| paths.hooks = "lib".to_owned()),
        r#"the folder of hooks "lib" is not an absolute path"#
    );
    let relative = Shim {
        pages: 1,
        folder: "lib".to_owned(),
    };
    let error = driver_spec(&driver_files(), &paths(), &[relative]).unwrap_err();
    assert_eq!(
        error.to_string(),
        r#"the folder of the shim "lib" is not an absolute path"#
    );
    let error = claim_spec(
        &mixed(),
        &NodePaths {
            shares: "x".to_owned(),
            ..paths()
        },
    );
    assert_eq!(
        error.unwrap_err().to_string(),
        r#"the folder of shares "x" is not an absolute path"#
    );
}

#[test]
fn a_file_is_read_as_it_was_written() {
    let spec = claim_spec(&mixed(), &paths()).unwrap();
    assert_eq!(Spec::decode(&spec.encode()).unwrap(), spec);
    Spec::decode(br#"{"cdiVersion": "0.5.0", "kind": "a/b", "devices": [], "news": 1}"#)
        .unwrap_err();
    assert_ne!(claims_file_name(), driver_file_name());
}

#[test]
fn claims_share_a_file_and_each_replaces_and_removes_its_own_devices() {
    let of = |uid: &str, results: &[serde_json::Value]| {
        let mut allocation = allocation("a", results);
        uid.clone_into(&mut allocation.uid);
        let plan = plan(&allocation, &inventory(vec![gpu(0), gpu(1)]), []).unwrap();
        claim_spec(&plan, &paths()).unwrap()
    };
    let (one, other) = (
        of("1-a", &[plain("gpu-00000000")]),
        of("b-1", &[plain("gpu-00000001")]),
    );
    let mut devices = ClaimDevices::default();
    assert_eq!(devices.encode(), None);
    assert!(devices.put("1-a", one.clone()) && devices.put("b-1", other.clone()));
    assert!(!devices.put("b-1", other.clone()), "it has them already");
    let content = devices.encode().unwrap();
    let file = Spec::decode(&content).unwrap();
    // A name that starts with a digit needs it.
    assert_eq!(file.version(), Version::V0_5);
    let names =
        |spec: &Spec| -> Vec<String> { spec.devices().iter().map(|it| it.name.clone()).collect() };
    assert_eq!(names(&file), [names(&one), names(&other)].concat());
    assert_eq!(ClaimDevices::decode(&content), Some(devices.clone()));

    // Another allocation of the same claim.
    let anew = of(
        "1-a",
        &[with(plain("gpu-00000001"), &json!({"request": "other"}))],
    );
    assert!(devices.put("1-a", anew.clone()));
    assert!(devices.remove("b-1") && !devices.remove("b-1"));
    assert_eq!(
        names(&Spec::decode(&devices.encode().unwrap()).unwrap()),
        names(&anew)
    );
    assert!(devices.has("1-a") && !devices.has("b-1"));
    assert!(!devices.keep(["1-a"]) && devices.keep(["c"]));
    assert_eq!(devices.encode(), None);
    assert_eq!(ClaimDevices::decode(b"{"), None);
    let of_others = driver_spec(&driver_files(), &paths(), &[shim(PAGES)]).unwrap();
    assert_eq!(ClaimDevices::decode(&of_others.encode()), None);
}

#[test]
fn a_device_is_never_empty() {
    // Runtimes refuse a device without edits.
    let spec = claim_spec(&mixed(), &paths()).unwrap();
    for device in spec.devices() {
        assert!(!device.container_edits.device_nodes.is_empty());
    }
    // Nor where a driver has no file for some capability.
    let spec = driver_spec(&driver_files(), &paths(), &[shim(1)]).unwrap();
    for device in spec.devices() {
        assert_ne!(
            device.container_edits,
            ContainerEdits::default(),
            "{}",
            device.name
        );
    }
}

proptest! {
    #[test]
    fn a_name_that_is_taken_is_safe_in_a_path(name in "[A-Za-z0-9_./:-]{0,12}|.{0,4}") {
        if claim_device_id(&name).is_ok() {
            prop_assert!(!name.contains('/') && name != "." && name != ".." && !name.contains('='));
        }
    }
}

#[test]
fn each_version_of_the_pages_has_a_device_with_its_own_shim() {
    let shims = [shim(1), shim(2)];
    let spec = driver_spec(&driver_files(), &paths(), &shims).unwrap();
    for (name, shim) in ["capped", "capped-2"].into_iter().zip(&shims) {
        let device = spec.devices().iter().find(|device| device.name == name);
        let mounts = &device.unwrap().container_edits.mounts;
        let of_shim: Vec<_> = mounts
            .iter()
            .filter(|mount| mount.host_path.contains("gpu.tranche.dev/lib"))
            .collect();
        assert_eq!(of_shim.len(), 5, "{mounts:?}");
        for mount in of_shim {
            assert!(mount.host_path.starts_with(&shim.folder), "{mount:?}");
        }
        let device = DriverDevice::Capped { pages: shim.pages };
        assert_eq!(device.id(), format!("gpu.tranche.dev/driver={name}"));
    }
}
