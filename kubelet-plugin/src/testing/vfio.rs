//! A machine's IOMMU groups in memory, whose changes are calls of the plugin's file system, so that a plugin that dies there changes
//! nothing. The kernel's habits are tested with files, in `tranche_node::vfio`.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard};

use tranche_api::PciAddress;
use tranche_api::gpu_node::GpuVfio;
use tranche_driver::vfio::{Actual, Change, Function, User, VFIO_DRIVER, obstacle};
use tranche_node::testing::MigGpus;
use tranche_node::vfio::{Groups, VfioError};

use crate::host::fs::Fs;

const GPU_DRIVER: &str = "nvidia";

/// The functions of a machine, which outlive a plugin. Each GPU has a group of its own, named after its bus, with its audio
/// function.
#[derive(Clone, Debug)]
pub struct Machine {
    state: Arc<Mutex<State>>,
    /// The driver's view: it knows the GPUs that it has.
    gpus: MigGpus,
}

#[derive(Debug, Default)]
struct State {
    boots: u32,
    functions: BTreeMap<PciAddress, Bound>,
    /// A process that has all GPUs open.
    user: Option<User>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Bound {
    own: &'static str,
    driver: Option<String>,
    driver_override: Option<String>,
}

impl Bound {
    fn by(own: &'static str) -> Self {
        Self {
            own,
            driver: Some(own.to_owned()),
            driver_override: None,
        }
    }
}

impl Machine {
    pub fn of(gpus: &MigGpus) -> Self {
        let machine = Self {
            state: Arc::default(),
            gpus: gpus.clone(),
        };
        machine.bind_all();
        machine
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    fn bind_all(&self) {
        let addresses = self.gpus.addresses();
        let mut functions = BTreeMap::new();
        for gpu in addresses.values() {
            let gpu: PciAddress = gpu.parse().unwrap();
            functions.insert(gpu, Bound::by(GPU_DRIVER));
            let audio = PciAddress { function: 1, ..gpu };
            functions.insert(audio, Bound::by("snd_hda_intel"));
        }
        self.state().functions = functions;
        self.tell_driver();
    }

    /// The driver knows the GPUs that are bound to it.
    fn tell_driver(&self) {
        let state = self.state();
        for (uuid, address) in self.gpus.addresses() {
            let function = state.functions.get(&address.parse().unwrap()).unwrap();
            let has = function.driver.as_deref() == Some(GPU_DRIVER);
            self.gpus.has_left(&uuid, !has);
        }
    }

    /// The kernel binds every function to its own driver.
    pub fn reboot(&self) {
        self.state().boots += 1;
        self.bind_all();
    }

    /// A process with this name has all GPUs open, or none has.
    pub fn is_open(&self, user: Option<&str>) {
        self.state().user = user.map(|name| User {
            pid: 4711,
            name: name.to_owned(),
        });
    }

    /// The functions that are not as at boot.
    pub fn changed(&self) -> Vec<String> {
        let state = self.state();
        let changed = state
            .functions
            .iter()
            .filter(|(_, it)| **it != Bound::by(it.own));
        changed.map(|(at, it)| format!("{at} {it:?}")).collect()
    }
}

/// The machine for one plugin.
#[derive(Clone, Debug)]
pub struct MortalGroups {
    pub machine: Machine,
    pub fs: Arc<dyn Fs>,
    /// Any folder that exists.
    pub folder: PathBuf,
}

impl Groups for MortalGroups {
    fn boot(&self) -> Result<String, VfioError> {
        Ok(format!("boot-{}", self.machine.state().boots))
    }

    fn read(&self, gpu: PciAddress, _: Option<u32>) -> Result<Actual, VfioError> {
        let boot = self.boot()?;
        let state = self.machine.state();
        let of_group = state.functions.iter().filter(|(at, _)| at.bus == gpu.bus);
        let functions = of_group.map(|(at, bound)| Function {
            address: *at,
            class: if at.function == 0 {
                0x03_0200
            } else {
                0x04_0300
            },
            driver: bound.driver.clone(),
            driver_override: bound.driver_override.clone(),
        });
        Ok(Actual {
            gpu,
            group: Some(gpu.bus.into()),
            functions: functions.collect(),
            has_vfio: true,
            has_nvswitch: false,
            user: state.user.clone(),
            boot,
        })
    }

    fn change(&self, change: &Change) -> Result<(), VfioError> {
        let alive = self.fs.create_dir(&self.folder);
        alive.map_err(|error| VfioError::File {
            path: self.folder.clone(),
            source: std::io::Error::other(error.to_string()),
        })?;
        let mut state = self.machine.state();
        let mut function = |at: &PciAddress| state.functions.get_mut(at).unwrap().clone();
        let (at, new) = match change {
            Change::Override(at, driver) => (
                at,
                Bound {
                    driver_override: driver.clone(),
                    ..function(at)
                },
            ),
            Change::Unbind(at, driver) => {
                let before = function(at);
                assert_eq!(
                    before.driver.as_ref(),
                    Some(driver),
                    "nothing else is unbound"
                );
                let driver = None;
                (at, Bound { driver, ..before })
            }
            Change::Probe(at) => {
                let before = function(at);
                let forced = before.driver_override.clone();
                let driver = Some(forced.unwrap_or_else(|| before.own.to_owned()));
                (at, Bound { driver, ..before })
            }
        };
        state.functions.insert(*at, new);
        drop(state);
        self.machine.tell_driver();
        Ok(())
    }

    fn nodes(&self, actual: &Actual) -> Result<Vec<String>, VfioError> {
        let is_bound = |it: &Function| it.driver.as_deref() == Some(VFIO_DRIVER);
        assert!(actual.functions.iter().all(is_bound), "{actual:?}");
        let group = actual.group.unwrap();
        Ok(vec![
            "/dev/vfio/vfio".to_owned(),
            format!("/dev/vfio/{group}"),
        ])
    }

    fn inspect(&self, gpu: PciAddress) -> Result<Option<GpuVfio>, VfioError> {
        let actual = self.read(gpu, None)?;
        Ok(Some(GpuVfio {
            iommu_group: gpu.bus.into(),
            obstacle: obstacle(&actual).map(|it| it.to_string()),
        }))
    }
}
