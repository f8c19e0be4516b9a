use proptest::prelude::*;

use super::*;

const GPU: &str = "0000:41:00.0";
const AUDIO: &str = "0000:41:00.1";
const BRIDGE: &str = "0000:40:00.0";

fn function(address: &str, class: u32, driver: Option<&str>) -> Function {
    Function {
        address: address.parse().unwrap(),
        class,
        driver: driver.map(str::to_owned),
        driver_override: None,
    }
}

fn machine() -> Actual {
    Actual {
        gpu: GPU.parse().unwrap(),
        group: Some(7),
        functions: vec![
            function(BRIDGE, 0x06_0400, Some("pcieport")),
            function(GPU, 0x03_0200, Some("nvidia")),
            function(AUDIO, 0x04_0300, Some("snd_hda_intel")),
        ],
        has_vfio: true,
        has_nvswitch: false,
        user: None,
        boot: "one".to_owned(),
    }
}

fn user(name: &str) -> User {
    User {
        pid: 4711,
        name: name.to_owned(),
    }
}

/// The kernel: the effect of a write to sysfs.
fn write(actual: &mut Actual, change: &Change) {
    let (Change::Override(address, _) | Change::Unbind(address, _) | Change::Probe(address)) =
        change;
    let at = actual
        .functions
        .iter()
        .position(|it| it.address == *address);
    let function = &mut actual.functions[at.unwrap()];
    match change {
        Change::Override(_, driver) => function.driver_override.clone_from(driver),
        Change::Unbind(_, driver) => {
            assert_eq!(function.driver.as_ref(), Some(driver));
            assert!(actual.user.is_none(), "an open GPU is unbound");
            function.driver = None;
        }
        Change::Probe(_) => {
            assert_eq!(function.driver, None);
            let own = match function.class >> 8 {
                0x0604 => "pcieport",
                0x0403 => "snd_hda_intel",
                _ => "nvidia",
            };
            let driver = function.driver_override.as_deref().unwrap_or(own);
            function.driver = Some(driver.to_owned());
        }
    }
}

/// Does at most this many steps; returns whether it came to rest.
fn run(wanted: bool, record: &mut Option<VfioRecord>, actual: &mut Actual, steps: usize) -> bool {
    for _ in 0..steps {
        match next(wanted, record.as_ref(), actual).unwrap() {
            Next::Write(changed) => *record = changed,
            Next::Change(change) => {
                assert!(record.is_some(), "{change:?} without a record");
                write(actual, &change);
            }
            Next::Done => return true,
        }
    }
    false
}

fn drivers(actual: &Actual) -> Vec<Option<&str>> {
    actual
        .functions
        .iter()
        .map(|it| it.driver.as_deref())
        .collect()
}

#[test]
fn the_group_goes_to_vfio_without_its_bridge_and_comes_back() {
    let (mut record, mut actual) = (None, machine());
    assert!(run(true, &mut record, &mut actual, 20));
    let vfio = Some(VFIO_DRIVER);
    assert_eq!(drivers(&actual), [Some("pcieport"), vfio, vfio]);
    let written = serde_json::to_value(&record).unwrap();
    assert_eq!(
        written,
        serde_json::json!({
            "boot": "one",
            "functions": {GPU: {"driver": "nvidia"}, AUDIO: {"driver": "snd_hda_intel"}},
        })
    );
    assert_eq!(
        serde_json::from_value::<Option<VfioRecord>>(written).unwrap(),
        record
    );
    assert!(run(false, &mut record, &mut actual, 20));
    assert_eq!((record, actual), (None, machine()));
}

#[test]
fn an_override_that_was_there_comes_back() {
    let mut before = machine();
    // After the first step no driver takes it once it is unbound.
    before.functions[1].driver_override = Some("other".to_owned());
    before.functions[2].driver = None;
    let (mut record, mut actual) = (None, before.clone());
    assert!(run(true, &mut record, &mut actual, 20));
    assert!(run(false, &mut record, &mut actual, 20));
    assert_eq!(actual, before);

    // An override that names VFIO would keep the GPU from its driver.
    let mut actual = machine();
    actual.functions[1].driver_override = Some(VFIO_DRIVER.to_owned());
    assert!(run(true, &mut record, &mut actual, 20));
    assert!(run(false, &mut record, &mut actual, 20));
    assert_eq!(actual, machine());
}

#[test]
fn what_cannot_be_given_away_is_refused_before_any_record() {
    let refused = |change: &dyn Fn(&mut Actual)| {
        let mut actual = machine();
        change(&mut actual);
        next(true, None, &actual).unwrap_err().to_string()
    };
    let nic = "0000:42:00.0";
    for (text, expected) in [
        (
            refused(&|it| it.group = None),
            "the GPU 0000:41:00.0 has no IOMMU group: switch the IOMMU on in the firmware and in the kernel's command line (`intel_iommu=on` or `amd_iommu=on`)",
        ),
        (
            refused(&|it| it.has_vfio = false),
            "the kernel has no driver vfio-pci: load it (`modprobe vfio-pci`)",
        ),
        (
            refused(&|it| {
                let other = function(nic, 0x02_0000, Some("mlx5_core"));
                it.functions.push(other);
            }),
            "the IOMMU group 7 of the GPU 0000:41:00.0 has the device 0000:42:00.0 too, which would be taken from this machine with it: use a GPU that has a group of its own",
        ),
        (
            refused(&|it| it.has_nvswitch = true),
            "the machine's GPUs are connected by NVSwitch: a GPU of a virtual machine needs a partition of the Fabric Manager, which Tranche does not make: use another tier here",
        ),
        (
            refused(&|it| it.user = Some(user("python3"))),
            r#"the process 4711 ("python3") has the GPU 0000:41:00.0 open: end it first"#,
        ),
        (
            refused(&|it| it.user = Some(user(User::PERSISTENCE_DAEMON))),
            r#"the process 4711 ("nvidia-persiste") has the GPU 0000:41:00.0 open: switch persistence mode off (`nvidia-smi -pm 0 -i 0000:41:00.0`)"#,
        ),
        (
            refused(&|it| it.user = Some(user("\x1b]0;\n"))),
            r#"the process 4711 ("\u{1b}]0;\n") has the GPU 0000:41:00.0 open: end it first"#,
        ),
        (
            refused(&|it| it.functions[1].driver = Some(VFIO_DRIVER.to_owned())),
            "the function 0000:41:00.0 is bound to vfio-pci, which Tranche did not do: give it back to its own driver",
        ),
        (
            refused(&|it| it.functions.clear()),
            "the kernel has no PCI device 0000:41:00.0",
        ),
    ] {
        assert_eq!(text, expected);
    }
}

#[test]
fn a_gpu_that_a_virtual_machine_has_open_is_not_taken_back() {
    let (mut record, mut actual) = (None, machine());
    assert!(run(true, &mut record, &mut actual, 20));
    actual.user = Some(user("qemu-system-x86"));
    let in_use = Err(Obstacle::InUse {
        gpu: actual.gpu,
        user: user("qemu-system-x86"),
    });
    assert_eq!(next(false, record.as_ref(), &actual), in_use);
    assert_eq!(next(true, record.as_ref(), &actual), Ok(Next::Done));
}

#[test]
fn a_gpu_that_a_process_opened_after_the_record_is_not_unbound() {
    let (mut record, mut actual) = (None, machine());
    // The record and the GPU's override.
    assert!(!run(true, &mut record, &mut actual, 2));
    assert_eq!(
        actual.functions[1].driver_override.as_deref(),
        Some(VFIO_DRIVER)
    );
    actual.user = Some(user("python3"));
    let result = next(true, record.as_ref(), &actual);
    assert!(matches!(result, Err(Obstacle::InUse { .. })), "{result:?}");
    // It is no longer wanted: nothing of it is left, although the process still has the GPU.
    assert!(run(false, &mut record, &mut actual, 20));
    assert_eq!(
        (
            record,
            Actual {
                user: None,
                ..actual
            }
        ),
        (None, machine())
    );
}

#[test]
fn a_record_of_an_earlier_boot_says_nothing_of_this_one() {
    let (mut record, mut actual) = (None, machine());
    assert!(run(true, &mut record, &mut actual, 20));
    // An administrator has the GPU bound to VFIO at boot.
    actual.boot = "two".to_owned();
    let before = actual.clone();
    assert!(run(false, &mut record, &mut actual, 20));
    assert_eq!((&record, &actual), (&None, &before));
    record = Some(VfioRecord {
        boot: "one".to_owned(),
        functions: BTreeMap::new(),
    });
    assert_eq!(next(true, record.as_ref(), &actual), Ok(Next::Write(None)));
}

#[test]
fn what_an_administrator_did_meanwhile_stays() {
    let (mut record, mut actual) = (None, machine());
    assert!(run(true, &mut record, &mut actual, 20));
    actual.functions[2].driver = Some("other".to_owned());
    actual.functions[2].driver_override = Some("other".to_owned());
    assert!(run(false, &mut record, &mut actual, 20));
    assert_eq!(
        drivers(&actual),
        [Some("pcieport"), Some("nvidia"), Some("other")]
    );
    assert_eq!(
        actual.functions[2].driver_override.as_deref(),
        Some("other")
    );
}

proptest! {
    /// Whatever interrupts, the group ends as the last wish wants it, and no record is left.
    #[test]
    fn interrupted_ways_end_where_they_should(
        ways in proptest::collection::vec((any::<bool>(), 0_usize..12, any::<bool>()), 0..8),
        wanted: bool,
    ) {
        let (mut record, mut actual) = (None, machine());
        for (wanted, steps, reboots) in ways {
            run(wanted, &mut record, &mut actual, steps);
            if reboots {
                let boot = format!("{}+", actual.boot);
                actual = Actual { boot, ..machine() };
            }
        }
        prop_assert!(run(wanted, &mut record, &mut actual, 30));
        prop_assert_eq!(record.is_some(), wanted);
        if wanted {
            let vfio = Some(VFIO_DRIVER);
            prop_assert_eq!(drivers(&actual), [Some("pcieport"), vfio, vfio]);
        } else {
            let boot = actual.boot.clone();
            prop_assert_eq!(actual, Actual { boot, ..machine() });
        }
    }
}
