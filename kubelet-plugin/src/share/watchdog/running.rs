//! What runs on a GPU, as one round of the watchdog found it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tranche_driver::journal::ClaimRecord;
use tranche_driver::preparation::PreparedDevice;
use tranche_node::watchdog::compare::{Owner, ProcessId, Sample};

use crate::share::held_device::limit;

/// A device that a claim holds, by its key.
pub type Devices = BTreeMap<String, (Arc<ClaimRecord>, usize)>;

/// What runs on a GPU.
#[derive(Debug)]
pub struct Alive {
    /// The processes with their bytes.
    pub held: Vec<(ProcessId, u64)>,
    /// Bytes without an owner.
    pub unowned: Option<u64>,
    /// The bytes of each process, on whichever MIG device it is.
    pub bytes: BTreeMap<u32, u64>,
    /// Whether NVML tells what processes on no MIG device hold.
    is_told: bool,
    /// The MIG devices for which it tells what processes hold.
    told: BTreeSet<String>,
}

impl Alive {
    /// Takes a sample of the GPU and those of the partitions that claims share, by the UUIDs of their MIG devices.
    pub fn new(
        whole: &Sample,
        of_partitions: &BTreeMap<String, Sample>,
        unowned: Option<u64>,
    ) -> Self {
        let held = whole.processes.iter().filter(|it| it.owner != Owner::Ended);
        let all = of_partitions.values().chain([whole]);
        let mut bytes = BTreeMap::new();
        for process in all.flat_map(|sample| &sample.processes) {
            let known: &mut u64 = bytes.entry(process.id.pid).or_default();
            // In the sample of the whole GPU a process of a MIG device has no bytes.
            *known = process.bytes.max(*known);
        }
        Self {
            held: held.map(|it| (it.id, it.bytes)).collect(),
            unowned,
            bytes,
            is_told: whole.used.is_some(),
            told: of_partitions.keys().cloned().collect(),
        }
    }

    /// The devices on the GPU whose memory NVML tells, with the weight of each.
    pub fn weights(&self, devices: &Devices, gpu_uuid: &str) -> BTreeMap<String, u64> {
        let held = devices
            .iter()
            .map(|(key, (record, nth))| (key, &record.plan.devices[*nth]));
        let is_told = |device: &PreparedDevice| match &device.partition {
            None => self.is_told,
            Some(partition) => {
                let mig = partition.mig.as_ref();
                mig.is_some_and(|mig| self.told.contains(&mig.uuid))
            }
        };
        held.filter(|(_, it)| it.gpu_uuid == gpu_uuid && !it.admin_access && is_told(it))
            .map(|(key, device)| (key.clone(), limit(device).weight()))
            .collect()
    }
}
