//! On the simulator's PCI tree.

use std::cell::RefCell;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tranche_simulator_pci::{Function as SimulatedFunction, Nodes, Tree, serve};

use super::*;

const GPU: &str = "0000:41:00.0";
const AUDIO: &str = "0000:41:00.1";
const MINOR: u32 = 3;

struct Machine {
    root: tempfile::TempDir,
    tree: Arc<Tree>,
    vfio: Vfio,
    record: RefCell<Option<VfioRecord>>,
}

fn address(text: &str) -> PciAddress {
    text.parse().unwrap()
}

fn function(at: &str, class: u32, group: Option<u32>) -> SimulatedFunction {
    SimulatedFunction {
        address: at.to_owned(),
        vendor: 0x10de,
        device: 0x2330,
        class,
        group,
    }
}

fn machine(others: &[SimulatedFunction]) -> Machine {
    let root = tempfile::tempdir().unwrap();
    let mut functions = vec![
        function(GPU, 0x03_0200, Some(7)),
        function(AUDIO, 0x04_0300, Some(7)),
    ];
    functions.extend_from_slice(others);
    let tree = Arc::new(Tree::boot(root.path(), Nodes::Files, &functions).unwrap());
    let node = root.path().join(format!("dev/nvidia{MINOR}"));
    fs::write(&node, "").unwrap();
    let in_use = move |_: &str| tranche_simulator_pci::open_devices::is_open(&node);
    serve::start(
        &tree,
        &(Arc::new(in_use) as _),
        &(Arc::new(|_: &str, _: Option<&str>| {}) as _),
    )
    .unwrap();
    let at = |name: &str| root.path().join(name);
    let vfio = Vfio::new(at("sys"), at("dev"), "/proc");
    Machine {
        tree,
        vfio,
        root,
        record: RefCell::default(),
    }
}

impl Machine {
    fn reconcile(&self, wanted: bool) -> Result<Actual, ReconcileError> {
        let record = self.record.borrow().clone();
        reconcile(
            &self.vfio,
            (address(GPU), Some(MINOR)),
            wanted,
            record,
            &mut |record| {
                *self.record.borrow_mut() = record.cloned();
                Ok(())
            },
        )
    }

    fn drivers(&self) -> [Option<String>; 2] {
        [self.tree.driver_of(GPU), self.tree.driver_of(AUDIO)]
    }
}

fn names(gpu: &str, audio: &str) -> [Option<String>; 2] {
    [Some(gpu.to_owned()), Some(audio.to_owned())]
}

#[test]
fn a_gpu_goes_to_vfio_with_its_audio_and_comes_back() {
    let machine = machine(&[]);
    let actual = machine.reconcile(true).unwrap();
    assert_eq!(machine.drivers(), names(VFIO_DRIVER, VFIO_DRIVER));
    assert_eq!(
        machine.vfio.nodes_by(&actual, Interface::Group).unwrap(),
        ["/dev/vfio/vfio", "/dev/vfio/7"]
    );
    assert_eq!(
        machine.vfio.nodes_by(&actual, Interface::Iommufd).unwrap(),
        [
            "/dev/iommu",
            "/dev/vfio/devices/vfio0",
            "/dev/vfio/devices/vfio1"
        ]
    );
    assert!(machine.record.borrow().is_some());

    machine.reconcile(false).unwrap();
    assert_eq!(machine.drivers(), names("nvidia", "snd_hda_intel"));
    assert_eq!(*machine.record.borrow(), None);
    let gpu = machine.vfio.function(address(GPU)).unwrap();
    assert_eq!((gpu.class, gpu.driver_override), (0x03_0200, None));
}

#[test]
fn a_gpu_that_a_process_has_open_stays_where_it_is() {
    let machine = machine(&[]);
    let open = |name: &str| fs::File::open(machine.root.path().join(name)).unwrap();
    let in_use = |result: Result<Actual, ReconcileError>| match result {
        Err(ReconcileError::Obstacle(Obstacle::InUse { user, .. })) => {
            assert_eq!(user.pid, std::process::id());
            let name = fs::read_to_string("/proc/self/comm").unwrap();
            assert_eq!(user.name, name.trim_end());
        }
        other => panic!("{other:?}"),
    };
    let file = open("dev/nvidia3");
    in_use(machine.reconcile(true));
    assert_eq!(machine.drivers(), names("nvidia", "snd_hda_intel"));
    assert_eq!(*machine.record.borrow(), None);
    drop(file);
    machine.reconcile(true).unwrap();
    // What a virtual machine opens.
    for name in ["dev/vfio/7", "dev/vfio/devices/vfio1"] {
        let file = open(name);
        in_use(machine.reconcile(false));
        assert_eq!(machine.drivers(), names(VFIO_DRIVER, VFIO_DRIVER));
        drop(file);
    }
    machine.reconcile(false).unwrap();
}

#[test]
fn a_crash_after_any_step_is_made_good() {
    for wanted_at_last in [true, false] {
        for steps in 0..10 {
            let machine = machine(&[]);
            for wanted in [true, false] {
                // Like `reconcile`, but no further.
                for _ in 0..steps {
                    let actual = machine.vfio.read(address(GPU), None).unwrap();
                    let record = machine.record.borrow().clone();
                    match next(wanted, record.as_ref(), &actual).unwrap() {
                        Next::Write(changed) => *machine.record.borrow_mut() = changed,
                        Next::Change(change) => machine.vfio.change(&change).unwrap(),
                        Next::Done => break,
                    }
                }
            }
            machine.reconcile(wanted_at_last).unwrap();
            let expected = if wanted_at_last {
                names(VFIO_DRIVER, VFIO_DRIVER)
            } else {
                names("nvidia", "snd_hda_intel")
            };
            assert_eq!(machine.drivers(), expected, "{steps}");
            assert_eq!(machine.record.borrow().is_some(), wanted_at_last, "{steps}");
        }
    }
}

/// VFIO's device goes with its driver, which the kernel may let go at any time.
#[test]
fn a_vfio_device_that_goes_while_it_is_read_is_no_error() {
    let machine = machine(&[]);
    let folder = machine.vfio.device(address(GPU)).join("vfio-dev");
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                fs::create_dir(&folder).unwrap();
                fs::remove_dir(&folder).unwrap();
            }
        });
        let failed = (0..2000).find_map(|_| machine.vfio.read(address(GPU), None).err());
        is_over.store(true, Ordering::Relaxed);
        assert!(failed.is_none(), "{failed:?}");
    });
}

#[test]
fn a_machine_that_cannot_give_the_gpu_away_is_left_as_it_is() {
    let nic = SimulatedFunction {
        vendor: 0x15b3,
        ..function("0000:42:00.0", 0x02_0000, Some(7))
    };
    let switch = function("0000:50:00.0", 0x06_8000, Some(9));
    for (other, part) in [(nic, "0000:42:00.0 too"), (switch, "connected by NVSwitch")] {
        let machine = machine(&[other]);
        let error = machine.reconcile(true).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
        assert_eq!(machine.drivers(), names("nvidia", "snd_hda_intel"));
    }
}

#[test]
fn a_write_without_effect_is_an_error() {
    let machine = machine(&[]);
    machine.reconcile(true).unwrap();
    let vfio = machine.vfio.clone().with_patience(Duration::ZERO);
    let change = Change::Unbind(address(GPU), VFIO_DRIVER.to_owned());
    // Nobody reads this file.
    let unbind = machine
        .root
        .path()
        .join("sys/bus/pci/drivers/vfio-pci/unbind");
    fs::remove_file(&unbind).unwrap();
    let missing = vfio.change(&change).unwrap_err().to_string();
    assert!(missing.contains("unbind: No such file"), "{missing}");
    fs::write(&unbind, "").unwrap();
    let error = vfio.change(&change).unwrap_err().to_string();
    assert!(error.contains("has had no effect for 0 s"), "{error}");
}
