//! GPUs that MIG can divide, in memory, behind the traits of NVML.

use std::collections::{BTreeMap, BTreeSet};
use std::mem::discriminant;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use tranche_api::gpu_node::MigMode;
use tranche_api::mig::{MigGeometry, MigInstance};
use tranche_api::sharing_policy::Interval;
use tranche_api::usage::{Measure, Memory, Sensors};
use tranche_driver::gpu_state::{Actual, Change, ComputeInstance, ComputeMode, Instance};
use tranche_driver::health::Report;
use tranche_driver::mig::{Geometry, Placement, Slices, tables};

use crate::devices::DeviceNodes;
use crate::inventory::testing::h100;
use crate::nvml::{
    BrokenGpu, ChangeError, Description, Driver, GpuDescription, GpuUse, Nvml, NvmlError, Opened,
    PartitionUse, ProcessMemory, ProcessSample, Traces,
};
use crate::root::DriverRoot;

/// GPUs that MIG can divide. Clones are the same GPUs.
#[derive(Clone, Debug)]
pub struct MigGpus {
    root: PathBuf,
    machine: Arc<Mutex<Machine>>,
    /// Signals that a GPU is no longer held back, and calls that begin or end to hang.
    released: Arc<Condvar>,
}

#[derive(Debug)]
struct Machine {
    description: Description,
    gpus: BTreeMap<String, Gpu>,
    /// GPUs that another kernel driver has.
    left: BTreeMap<String, Gpu>,
    /// UUIDs of MIG devices that were given out.
    uuids: u32,
    /// Changes that fail next.
    failures: Vec<(Change, ChangeError)>,
    /// Reads of the state that fail next.
    unread: Vec<NvmlError>,
    /// The changes that were carried out.
    changes: Vec<(String, Change)>,
    /// No driver can be opened.
    is_unloaded: bool,
    /// GPUs whose changes wait.
    held_back: BTreeSet<String>,
    /// The processes on GPUs.
    uses: BTreeMap<String, Vec<ProcessMemory>>,
    /// The GPUs whose calls do not return; empty for the start of NVML.
    hanging: BTreeSet<String>,
    /// How many calls wait for that.
    waiting: u32,
    /// Errors that were not read yet.
    xids: Vec<(String, u64)>,
    /// What is reported about GPUs' health; nothing bad about all others.
    reports: BTreeMap<String, Report>,
    /// Lost GPUs.
    lost: BTreeSet<String>,
}

#[derive(Debug)]
struct Gpu {
    geometry: Geometry,
    actual: Actual,
    /// MIG mode changes only by [`MigGpus::reset`].
    needs_reset: bool,
    /// A program uses the whole GPU.
    is_used: bool,
    /// The GPU instances that programs use.
    used: BTreeSet<u32>,
    time_slice: Interval,
}

impl MigGpus {
    /// Two H100 with 80 GB, not in MIG mode. Opened as a driver, their files are those of `root`.
    #[must_use]
    pub fn two_h100(root: &Path) -> Self {
        Self::h100(2, root)
    }

    /// So many H100 with 80 GB, at most ten.
    #[must_use]
    pub fn h100(count: u32, root: &Path) -> Self {
        let mut description = h100(count);
        for gpu in &mut description.gpus {
            gpu.mig_profiles = tables::h100(&[&gpu.uuid]).profiles;
        }
        Self::new(description, root)
    }

    /// The GPUs of a description. Its profiles define how MIG divides them.
    #[must_use]
    pub fn new(description: Description, root: &Path) -> Self {
        let gpu = |gpu: &GpuDescription| {
            let reported = MigGeometry {
                gpus: vec![gpu.uuid.clone()],
                profiles: gpu.mig_profiles.clone(),
            };
            let new = Gpu {
                geometry: Geometry::read(&reported).unwrap(),
                actual: Actual {
                    mig_mode: gpu.mig_mode,
                    ..Actual::default()
                },
                needs_reset: false,
                is_used: false,
                used: BTreeSet::new(),
                time_slice: Interval::Default,
            };
            (gpu.uuid.clone(), new)
        };
        Self {
            root: root.to_owned(),
            machine: Arc::new(Mutex::new(Machine {
                gpus: description.gpus.iter().map(gpu).collect(),
                description,
                left: BTreeMap::new(),
                uuids: 0,
                failures: Vec::new(),
                unread: Vec::new(),
                changes: Vec::new(),
                is_unloaded: false,
                held_back: BTreeSet::new(),
                uses: BTreeMap::new(),
                hanging: BTreeSet::new(),
                waiting: 0,
                xids: Vec::new(),
                reports: BTreeMap::new(),
                lost: BTreeSet::new(),
            })),
            released: Arc::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Machine> {
        self.machine.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn gpu<T>(&self, uuid: &str, with: impl FnOnce(&mut Gpu) -> T) -> T {
        with(self.lock().gpus.get_mut(uuid).unwrap())
    }

    /// The changes that were carried out, in their order, with the GPUs' UUIDs.
    #[must_use]
    pub fn changes(&self) -> Vec<(String, Change)> {
        self.lock().changes.clone()
    }

    /// The next change of the same kind as `like` (whatever its instance or placement) fails. Several failures of one
    /// kind occur in their order.
    pub fn fail(&self, like: Change, error: ChangeError) {
        self.lock().failures.push((like, error));
    }

    /// The next read of the state fails.
    pub fn fail_to_read(&self, error: NvmlError) {
        self.lock().unread.push(error);
    }

    /// MIG mode changes only by [`Self::reset`] from now on.
    pub fn demand_reset(&self, uuid: &str) {
        self.gpu(uuid, |gpu| gpu.needs_reset = true);
    }

    /// Resets a GPU: its instances are gone, and a pending change of MIG mode takes effect.
    pub fn reset(&self, uuid: &str) {
        self.gpu(uuid, |gpu| {
            gpu.actual.instances.clear();
            gpu.actual.mig_mode.current = gpu.actual.mig_mode.pending;
            gpu.used.clear();
        });
    }

    /// Unloads the driver, or loads it again.
    pub fn unload(&self, is_unloaded: bool) {
        self.lock().is_unloaded = is_unloaded;
    }

    /// From now on changes of a GPU wait until it is released.
    pub fn hold_back(&self, uuid: &str, is_held: bool) {
        if is_held {
            self.lock().held_back.insert(uuid.to_owned());
        } else {
            self.lock().held_back.remove(uuid);
            self.released.notify_all();
        }
    }

    /// From now on calls for a GPU, or without one the start of NVML, do not return.
    pub fn hang(&self, object: &str, do_they: bool) {
        if do_they {
            self.lock().hanging.insert(object.to_owned());
        } else {
            self.lock().hanging.remove(object);
        }
        self.released.notify_all();
    }

    /// Waits until a call hangs.
    pub fn wait_for_hang(&self) {
        let nothing_hangs = |machine: &mut Machine| machine.waiting == 0;
        drop(self.released.wait_while(self.lock(), nothing_hangs));
    }

    /// The machine, when calls for this object return.
    fn returns(&self, object: &str) -> MutexGuard<'_, Machine> {
        let mut machine = self.lock();
        if !machine.hanging.contains(object) {
            return machine;
        }
        machine.waiting += 1;
        self.released.notify_all();
        let hangs = |machine: &mut Machine| machine.hanging.contains(object);
        let waited = self.released.wait_while(machine, hangs);
        let mut machine = waited.unwrap_or_else(PoisonError::into_inner);
        machine.waiting -= 1;
        machine
    }

    /// NVML reports these processes on a GPU ([`Nvml::usage`]).
    pub fn run(&self, uuid: &str, processes: Vec<ProcessMemory>) {
        self.lock().uses.insert(uuid.to_owned(), processes);
    }

    /// A GPU has an error.
    pub fn err(&self, uuid: &str, xid: u64) {
        self.lock().xids.push((uuid.to_owned(), xid));
    }

    /// What is reported about a GPU's health from now on.
    pub fn report(&self, uuid: &str, report: Report) {
        self.lock().reports.insert(uuid.to_owned(), report);
    }

    /// A GPU falls off the bus ([`Nvml::health`] alone notices), or is back.
    pub fn lose(&self, uuid: &str, is_lost: bool) {
        let mut machine = self.lock();
        if is_lost {
            machine.lost.insert(uuid.to_owned());
        } else {
            machine.lost.remove(uuid);
        }
    }

    /// Boots the machine: no instances, and no MIG mode, as on Hopper and later.
    pub fn reboot(&self) {
        for gpu in self.lock().gpus.values_mut() {
            gpu.actual = Actual::default();
            gpu.used.clear();
            gpu.is_used = false;
            gpu.time_slice = Interval::Default;
        }
    }

    /// The PCI addresses of all GPUs, by UUID, whichever kernel driver has them.
    #[must_use]
    pub fn addresses(&self) -> BTreeMap<String, String> {
        let machine = self.lock();
        let gpus = machine.description.gpus.iter();
        gpus.map(|gpu| (gpu.uuid.clone(), gpu.pci_bus_id()))
            .collect()
    }

    /// Another kernel driver takes the GPU, or the driver gets it back, as after its start.
    pub fn has_left(&self, uuid: &str, has_left: bool) {
        let mut machine = self.lock();
        let Machine { gpus, left, .. } = &mut *machine;
        if has_left {
            left.extend(gpus.remove_entry(uuid));
        } else if let Some((uuid, mut gpu)) = left.remove_entry(uuid) {
            gpu.actual = Actual::default();
            gpu.time_slice = Interval::Default;
            gpus.insert(uuid, gpu);
        }
    }

    /// Gives each GPU the minor number, the index and the PCI address of another one. A boot that probes them in
    /// another order does this.
    pub fn reorder(&self) {
        let gpus = &mut self.lock().description.gpus;
        let mut placements: Vec<_> = gpus.iter().map(|it| (it.minor, it.index, it.pci)).collect();
        placements.rotate_left(1);
        for (gpu, placement) in gpus.iter_mut().zip(placements) {
            (gpu.minor, gpu.index, gpu.pci) = placement;
        }
    }

    /// What `nvidia-smi -mig` leaves on a GPU whose mode does not change at once.
    pub fn set_pending(&self, uuid: &str, on: bool) {
        self.gpu(uuid, |gpu| gpu.actual.mig_mode.pending = on);
    }

    /// A program begins or ends to use the whole GPU.
    pub fn use_whole(&self, uuid: &str, is_used: bool) {
        self.gpu(uuid, |gpu| gpu.is_used = is_used);
    }

    /// A program begins or ends to use a GPU instance.
    pub fn use_instance(&self, uuid: &str, instance: u32, is_used: bool) {
        self.gpu(uuid, |gpu| {
            if is_used {
                gpu.used.insert(instance);
            } else {
                gpu.used.remove(&instance);
            }
        });
    }
}

impl Gpu {
    fn change(&mut self, change: &Change, uuids: &mut u32) -> Result<(), ChangeError> {
        let (call, object) = ("nvml", "scripted".to_owned());
        let in_use = || ChangeError::InUse {
            call,
            object: object.clone(),
        };
        let insufficient = || ChangeError::InsufficientResources {
            call,
            object: object.clone(),
        };
        let not_supported = || NvmlError::NotSupported {
            call,
            object: object.clone(),
        };
        let find = |instances: &[Instance], id| instances.iter().position(|it| it.id == id);
        match *change {
            Change::SwitchMigMode { on } => {
                if on == self.actual.mig_mode.current {
                    self.actual.mig_mode.pending = on;
                    return Ok(());
                }
                if self.is_used || !self.actual.instances.is_empty() {
                    return Err(in_use());
                }
                if self.needs_reset {
                    return Err(ChangeError::NeedsReset { call, object });
                }
                self.actual.mig_mode = MigMode {
                    current: on,
                    pending: on,
                };
            }
            Change::CreateInstance(placement) => {
                if !self.actual.mig_mode.current {
                    return Err(not_supported().into());
                }
                self.slices(placement).ok_or_else(not_supported)?;
                if !self.is_free(placement) {
                    return Err(insufficient());
                }
                let mut ids = 1..;
                let is_free = |id: &u32| find(&self.actual.instances, *id).is_none();
                let id = ids.find(is_free).unwrap();
                self.actual.instances.push(Instance {
                    id,
                    placement,
                    compute: Vec::new(),
                });
            }
            Change::CreateComputeInstance { instance } => {
                let at = find(&self.actual.instances, instance).ok_or_else(not_supported)?;
                let instance = &mut self.actual.instances[at];
                if !instance.compute.is_empty() {
                    return Err(insufficient());
                }
                *uuids += 1;
                instance.compute.push(ComputeInstance {
                    id: 0,
                    uuid: format!("MIG-{:08}-0000-5000-8000-000000000000", *uuids),
                    slices: instance.placement.profile.compute_slices.into(),
                });
            }
            Change::DestroyComputeInstance { instance, compute } => {
                if self.used.contains(&instance) {
                    return Err(in_use());
                }
                if let Some(at) = find(&self.actual.instances, instance) {
                    let there = &mut self.actual.instances[at].compute;
                    there.retain(|it| it.id != compute);
                }
            }
            Change::DestroyInstance { instance } => {
                if let Some(at) = find(&self.actual.instances, instance) {
                    if !self.actual.instances[at].compute.is_empty() {
                        return Err(in_use());
                    }
                    self.actual.instances.remove(at);
                }
            }
        }
        Ok(())
    }

    fn slices(&self, placement: Placement) -> Option<Slices> {
        let partition = self.geometry.partition(placement)?;
        Some(partition.slices)
    }

    fn is_free(&self, placement: Placement) -> bool {
        let placements = self.actual.instances.iter().map(|it| it.placement);
        let mut left = Some(self.geometry.whole);
        for placement in placements.chain([placement]) {
            left = left
                .zip(self.slices(placement))
                .and_then(|(left, taken)| left.less(taken));
        }
        left.is_some()
    }
}

fn unknown(uuid: &str) -> NvmlError {
    NvmlError::Call {
        call: "nvmlDeviceGetHandleByUUID",
        object: uuid.to_owned(),
        reason: "not found".to_owned(),
    }
}

impl Nvml for MigGpus {
    fn describe(&self) -> Result<Description, NvmlError> {
        let machine = self.lock();
        let mut description = machine.description.clone();
        let left = |gpu: &GpuDescription| machine.left.contains_key(&gpu.uuid);
        description.gpus.retain(|gpu| !left(gpu));
        // NVML numbers those that it has.
        let index = |gpu: &GpuDescription| {
            let before = machine
                .description
                .gpus
                .iter()
                .filter(|it| left(it) && it.index < gpu.index);
            gpu.index - u32::try_from(before.count()).unwrap_or_default()
        };
        let numbers: Vec<u32> = description.gpus.iter().map(index).collect();
        for (gpu, number) in description.gpus.iter_mut().zip(numbers) {
            gpu.index = number;
        }
        for gpu in &mut description.gpus {
            let Some(known) = machine.gpus.get(&gpu.uuid) else {
                continue;
            };
            gpu.mig_mode = known.actual.mig_mode;
            let described = |it: &Instance| MigInstance {
                profile: it.placement.profile.to_string(),
                start: it.placement.start.into(),
                id: it.id,
                uuid: it.compute.first().map(|it| it.uuid.clone()),
            };
            gpu.mig_instances = known.actual.instances.iter().map(described).collect();
        }
        Ok(description)
    }

    fn describe_gpu(&self, index: u32) -> Result<GpuDescription, BrokenGpu> {
        let all = self.describe().map_err(|error| BrokenGpu {
            index,
            uuid: None,
            error,
        })?;
        let found = all.gpus.into_iter().find(|gpu| gpu.index == index);
        let gpu = found.ok_or_else(|| BrokenGpu {
            index,
            uuid: None,
            error: unknown("by index"),
        })?;
        drop(self.returns(&gpu.uuid));
        Ok(gpu)
    }

    fn minor(&self, gpu_uuid: &str) -> Result<u32, NvmlError> {
        let gpus = self.describe()?.gpus;
        let gpu = gpus.iter().find(|gpu| gpu.uuid == gpu_uuid);
        gpu.map(|gpu| gpu.minor).ok_or_else(|| unknown(gpu_uuid))
    }

    fn process_utilization(&self, gpu_uuid: &str, _: u64) -> Result<Vec<ProcessSample>, NvmlError> {
        if self.mig_state(gpu_uuid)?.mig_mode.current {
            return Err(NvmlError::NotSupported {
                call: "nvmlDeviceGetProcessUtilization",
                object: gpu_uuid.to_owned(),
            });
        }
        Ok(Vec::new())
    }

    fn processes(&self, _: &str) -> Result<Vec<ProcessMemory>, NvmlError> {
        Ok(Vec::new())
    }

    fn used_memory(&self, gpu_uuid: &str) -> Result<Option<u64>, NvmlError> {
        let state = self.mig_state(gpu_uuid)?;
        Ok((!state.mig_mode.current).then_some(0))
    }

    fn utilization_rates(&self, gpu_uuid: &str) -> Result<[u32; 2], NvmlError> {
        self.process_utilization(gpu_uuid, 0).map(|_| [0, 0])
    }

    fn xids(&self, gpus: &[&str]) -> Result<Vec<(String, u64)>, NvmlError> {
        let of_gpus = |(uuid, _): &mut (String, u64)| gpus.contains(&uuid.as_str());
        Ok(self.lock().xids.extract_if(.., of_gpus).collect())
    }

    fn health(&self, gpu_uuid: &str) -> Result<Report, NvmlError> {
        let machine = self.lock();
        if machine.lost.contains(gpu_uuid) {
            return Err(NvmlError::GpuLost {
                call: "nvmlDeviceGetHandleByUUID",
                object: gpu_uuid.to_owned(),
            });
        }
        let known = machine.gpus.contains_key(gpu_uuid);
        let report = machine.reports.get(gpu_uuid).copied().unwrap_or_default();
        known.then_some(report).ok_or_else(|| unknown(gpu_uuid))
    }

    fn usage(&self, gpu_uuid: &str) -> Result<GpuUse, NvmlError> {
        let gpus = self.describe()?.gpus;
        let gpu = gpus
            .iter()
            .find(|gpu| gpu.uuid == gpu_uuid)
            .ok_or_else(|| unknown(gpu_uuid))?;
        let memory = |total, reserved, used| Memory {
            total,
            reserved,
            used,
            free: total - reserved - used,
        };
        let processes = self.lock().uses.get(gpu_uuid).cloned().unwrap_or_default();
        let used = processes.iter().filter_map(|it| it.bytes).sum();
        let busy = self.utilization_rates(gpu_uuid).ok();
        let state = self.mig_state(gpu_uuid)?;
        let partitions = state.instances.iter().flat_map(|instance| {
            let profile = instance.placement.profile.to_string();
            instance.compute.iter().map(move |compute| PartitionUse {
                uuid: compute.uuid.clone(),
                profile: profile.clone(),
                gpu_instance: instance.id,
                compute_instance: compute.id,
                ..PartitionUse::default()
            })
        });
        Ok(GpuUse {
            mig_mode: state.mig_mode.current,
            memory: Some(memory(gpu.memory_total, gpu.memory_reserved, used)),
            utilization: busy
                .map(|[busy, _]| (Measure::Gpu, busy * 100))
                .into_iter()
                .collect(),
            sensors: Sensors {
                temperature: Some(30),
                ..Sensors::default()
            },
            processes,
            partitions: partitions.collect(),
        })
    }

    fn mig_state(&self, gpu_uuid: &str) -> Result<Actual, NvmlError> {
        let mut machine = self.returns(gpu_uuid);
        if !machine.unread.is_empty() {
            return Err(machine.unread.remove(0));
        }
        let gpu = machine.gpus.get(gpu_uuid);
        gpu.map(|gpu| gpu.actual.clone())
            .ok_or_else(|| unknown(gpu_uuid))
    }

    fn change_mig(&self, gpu_uuid: &str, change: &Change) -> Result<(), ChangeError> {
        let is_held = |machine: &mut Machine| machine.held_back.contains(gpu_uuid);
        let free = self.released.wait_while(self.lock(), is_held);
        let mut machine = free.unwrap_or_else(PoisonError::into_inner);
        let fails = |(like, _): &(Change, _)| discriminant(like) == discriminant(change);
        if let Some(at) = machine.failures.iter().position(fails) {
            return Err(machine.failures.remove(at).1);
        }
        let Machine { gpus, uuids, .. } = &mut *machine;
        let gpu = gpus.get_mut(gpu_uuid).ok_or_else(|| unknown(gpu_uuid))?;
        gpu.change(change, uuids)?;
        machine.changes.push((gpu_uuid.to_owned(), *change));
        Ok(())
    }

    fn compute_mode(&self, gpu_uuid: &str) -> Result<ComputeMode, NvmlError> {
        let machine = self.lock();
        let gpu = machine.gpus.get(gpu_uuid);
        gpu.map(|gpu| gpu.actual.compute_mode)
            .ok_or_else(|| unknown(gpu_uuid))
    }

    fn set_compute_mode(&self, gpu_uuid: &str, mode: ComputeMode) -> Result<(), NvmlError> {
        let mut machine = self.lock();
        let gpu = machine
            .gpus
            .get_mut(gpu_uuid)
            .ok_or_else(|| unknown(gpu_uuid))?;
        gpu.actual.compute_mode = mode;
        Ok(())
    }

    fn time_slice(&self, gpu_uuid: &str) -> Result<Interval, NvmlError> {
        let machine = self.lock();
        let gpu = machine.gpus.get(gpu_uuid);
        gpu.map(|gpu| gpu.time_slice)
            .ok_or_else(|| unknown(gpu_uuid))
    }

    fn set_time_slice(&self, gpu_uuid: &str, interval: Interval) -> Result<(), NvmlError> {
        let mut machine = self.lock();
        let gpu = machine.gpus.get_mut(gpu_uuid);
        gpu.ok_or_else(|| unknown(gpu_uuid))?.time_slice = interval;
        Ok(())
    }
}

impl Driver for MigGpus {
    fn open(&self) -> Result<Opened, NvmlError> {
        if self.returns("").is_unloaded {
            return Err(NvmlError::Devices("no driver".to_owned()));
        }
        let root = DriverRoot::open(&self.root)?;
        Ok(Opened {
            nvml: Box::new(self.clone()),
            nodes: DeviceNodes::find(&root, &root)?,
            pass: None,
            root,
        })
    }

    fn traces(&self) -> Traces {
        Traces::default()
    }
}

#[cfg(test)]
mod tests {
    use tranche_driver::gpu_state::{GpuChanges, Next, Wanted, next};

    use super::*;

    /// Replaces NVML in the comparison: the pure function must bring both to the same end.
    #[test]
    fn partitions_are_made_and_removed() {
        let gpus = MigGpus::two_h100(Path::new("/"));
        let uuid = gpus.describe().unwrap().gpus[0].uuid.clone();
        let geometry = Geometry::read(&tables::h100(&[&uuid])).unwrap();
        let placement = |start, profile: &str| Placement {
            start,
            profile: profile.parse().unwrap(),
        };
        let mut record = GpuChanges::default();
        for partitions in [
            BTreeSet::from([placement(6, "1g.10gb"), placement(0, "4g.40gb")]),
            BTreeSet::from([placement(0, "4g.40gb")]),
            BTreeSet::new(),
        ] {
            let wanted = Wanted {
                held: partitions.clone(),
                make: partitions,
                ..Wanted::default()
            };
            let made = loop {
                let actual = gpus.mig_state(&uuid).unwrap();
                match next(&wanted, &record, &actual, Some(&geometry)).unwrap() {
                    Next::Write(changed) => record = changed,
                    Next::Change(change) => gpus.change_mig(&uuid, &change).unwrap(),
                    Next::Done(made) => break made,
                    other => panic!("{other:?}"),
                }
            };
            assert!(made.keys().eq(&wanted.make));
            let described = gpus.describe().unwrap();
            let gpu = described.gpus.iter().find(|gpu| gpu.uuid == uuid).unwrap();
            assert_eq!(gpu.mig_instances.len(), made.len());
            assert_eq!(gpu.mig_mode.current, !made.is_empty());
        }
        assert!(record.is_empty());

        let taken = Change::CreateInstance(placement(0, "7g.80gb"));
        let off = gpus.change_mig(&uuid, &taken).unwrap_err();
        assert!(
            matches!(off, ChangeError::Nvml(NvmlError::NotSupported { .. })),
            "{off}"
        );
        gpus.change_mig(&uuid, &Change::SwitchMigMode { on: true })
            .unwrap();
        gpus.change_mig(&uuid, &taken).unwrap();
        let again = gpus.change_mig(&uuid, &taken).unwrap_err();
        assert!(
            matches!(again, ChangeError::InsufficientResources { .. }),
            "{again}"
        );
    }
}
