//! What NVML says of claims and GPUs, under names of our own.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicI64, AtomicU64};

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};
use tranche_api::gpu_node::{Gpu, Inventory};
use tranche_api::usage::{GpuUsage, NodeUsage, Remainder, ShareUsage};
use tranche_driver::mig::{Geometry, Placement};
use tranche_driver::preparation::Cap;
use tranche_driver::stranded::{self, Shares};

use super::dcgm::Labels;
use super::shares::ShareLabels;
use super::watchdog::{GpuGauges, GpuLabels};
use crate::ledger::Ledger;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ClaimLabels {
    namespace: String,
    claim: String,
    request: String,
    device: String,
    gpu_uuid: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ZombieLabels {
    namespace: String,
    pod: String,
    claim: String,
    gpu_uuid: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct SliceLabels {
    gpu_uuid: String,
    kind: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct XidLabels {
    gpu_uuid: String,
    xid: u64,
}

type ClaimGauges = Family<ClaimLabels, Gauge<u64, AtomicU64>>;

#[derive(Debug, Default)]
struct Series {
    info: Family<Labels, Gauge>,
    allocated: ClaimGauges,
    reserved: ClaimGauges,
    used: ClaimGauges,
    difference: Family<ShareLabels, Gauge<i64, AtomicI64>>,
    processes: ClaimGauges,
    idle: ClaimGauges,
    zombies: Family<ZombieLabels, Gauge<u64, AtomicU64>>,
    readable: GpuGauges,
    xids: Family<XidLabels, Counter>,
    xid_times: Family<XidLabels, Gauge<u64, AtomicU64>>,
    gpu_processes: GpuGauges,
    slices: Family<SliceLabels, Gauge<u64, AtomicU64>>,
    memory: GpuGauges,
}

/// The series of one scrape.
pub fn registry(usage: &NodeUsage, inventory: Option<&Inventory>, ledger: &Ledger) -> Registry {
    let series = Series::default();
    for gpu in &usage.gpus {
        series.add(gpu, ledger);
        let known = inventory.and_then(|it| it.gpus.iter().find(|known| known.uuid == gpu.uuid));
        if let (Some(inventory), Some(known)) = (inventory, known) {
            series.add_stranded(gpu, inventory, known, ledger);
        }
    }
    series.registry()
}

impl Series {
    fn add(&self, gpu: &GpuUsage, ledger: &Ledger) {
        let labels = GpuLabels {
            gpu_uuid: gpu.uuid.clone(),
        };
        self.add_xids(gpu);
        let is_readable = u64::from(gpu.problem.is_none());
        self.readable.get_or_create(&labels).set(is_readable);
        if is_readable == 0 {
            return;
        }
        let processes = self.gpu_processes.get_or_create(&labels);
        processes.set(0);
        for share in &gpu.shares {
            processes.inc_by(share.processes.into());
            self.add_share(gpu, None, share, ledger);
        }
        let remainders = gpu.partitions.iter().map(|it| &it.remainder);
        for remainder in remainders.chain([&gpu.remainder]) {
            processes.inc_by(others(remainder));
            self.add_zombies(gpu, remainder);
        }
        for partition in &gpu.partitions {
            for share in &partition.shares {
                processes.inc_by(share.processes.into());
                self.add_share(gpu, Some(&partition.uuid), share, ledger);
            }
        }
    }

    fn add_xids(&self, gpu: &GpuUsage) {
        let Some(xids) = &gpu.xids else {
            return;
        };
        let labels = |xid: &u64| XidLabels {
            gpu_uuid: gpu.uuid.clone(),
            xid: *xid,
        };
        for (xid, count) in &xids.counts {
            self.xids.get_or_create(&labels(xid)).inc_by(*count);
        }
        for (xid, at) in &xids.times {
            self.xid_times.get_or_create(&labels(xid)).set(*at);
        }
    }

    fn add_share(&self, gpu: &GpuUsage, mig: Option<&String>, share: &ShareUsage, ledger: &Ledger) {
        self.add_info(gpu, mig, share);
        let labels = ClaimLabels {
            namespace: share.claim.namespace.clone(),
            claim: share.claim.name.clone(),
            request: share.request.clone(),
            device: share.device.clone(),
            gpu_uuid: gpu.uuid.clone(),
        };
        // Two shares of one GPU for one request have one series, because they also add up for the container.
        let add = |family: &ClaimGauges, value: u64| {
            family.get_or_create(&labels).inc_by(value);
        };
        if let Some(allocated) = share.memory.allocated {
            add(&self.allocated, allocated);
        }
        add(&self.reserved, share.memory.reserved);
        add(&self.used, share.memory.used);
        add(&self.processes, share.processes.into());
        if let Some(account) = share.memory.account {
            let signed = |bytes: u64| i64::try_from(bytes).unwrap_or(i64::MAX);
            let difference = signed(share.memory.used).saturating_sub(signed(account));
            let of_share = ShareLabels {
                namespace: labels.namespace.clone(),
                pod: ledger.pods(&share.claim.uid).join(","),
                claim: labels.claim.clone(),
                request: labels.request.clone(),
                device: labels.device.clone(),
                gpu_uuid: labels.gpu_uuid.clone(),
            };
            self.difference.get_or_create(&of_share).inc_by(difference);
        }
        if let Some(seconds) = share.idle_seconds {
            self.idle.get_or_create(&labels).set(seconds);
        }
    }

    fn add_info(&self, gpu: &GpuUsage, mig: Option<&String>, share: &ShareUsage) {
        let mut labels: Labels = vec![
            ("namespace", share.claim.namespace.clone()),
            ("claim", share.claim.name.clone()),
            ("claim_uid", share.claim.uid.clone()),
            ("request", share.request.clone()),
            ("pool", share.pool.clone()),
            ("device", share.device.clone()),
            ("tier", share.tier.as_str().to_owned()),
            ("gpu_uuid", gpu.uuid.clone()),
        ];
        labels.extend(mig.cloned().map(|uuid| ("mig_uuid", uuid)));
        labels.extend(share.share_id.clone().map(|id| ("share_id", id)));
        if share.groups.is_empty() {
            self.info.get_or_create(&labels).set(1);
        }
        for group in &share.groups {
            let mut labels = labels.clone();
            let of_group = [("pod", &group.pod), ("container", &group.container)];
            labels.extend(
                of_group
                    .into_iter()
                    .filter_map(|(name, value)| Some((name, value.clone()?))),
            );
            self.info.get_or_create(&labels).set(1);
        }
    }

    fn add_zombies(&self, gpu: &GpuUsage, remainder: &Remainder) {
        for zombie in &remainder.zombies {
            let labels = ZombieLabels {
                namespace: zombie.claim.namespace.clone(),
                pod: zombie.pod.clone().unwrap_or_default(),
                claim: zombie.claim.name.clone(),
                gpu_uuid: gpu.uuid.clone(),
            };
            self.zombies.get_or_create(&labels).inc_by(zombie.used);
        }
    }

    fn add_stranded(&self, gpu: &GpuUsage, inventory: &Inventory, known: &Gpu, ledger: &Ledger) {
        let labels = GpuLabels {
            gpu_uuid: gpu.uuid.clone(),
        };
        if !gpu.mig_mode {
            if let Some(bytes) = stranded_of_shares(gpu, ledger) {
                self.memory.get_or_create(&labels).set(bytes);
            }
            return;
        }
        let geometry = inventory.mig_geometry(known).map(Geometry::read);
        let Some(Ok(geometry)) = geometry else {
            return;
        };
        let held = placements(gpu, known, ledger);
        let Ok(left) = stranded::of_partitions(&geometry, &BTreeSet::new(), &held) else {
            return;
        };
        for (kind, count) in [
            ("compute", left.stranded.compute),
            ("memory", left.stranded.memory),
        ] {
            let gpu_uuid = gpu.uuid.clone();
            let labels = SliceLabels { gpu_uuid, kind };
            self.slices.get_or_create(&labels).set(count.into());
        }
        let slices = u64::from(left.whole.memory).max(1);
        let total = gpu.memory.map_or(0, |memory| memory.total);
        let bytes = total / slices * u64::from(left.stranded.memory);
        self.memory.get_or_create(&labels).set(bytes);
    }

    fn registry(self) -> Registry {
        let mut registry = Registry::with_prefix("tranche");
        let r = &mut registry;
        r.register(
            "claim_info",
            "1 for each device of a claim and each container that has it: its labels join other series",
            self.info,
        );
        let of_memory = [
            (
                "claim_memory_allocated",
                "Memory that the claim was allocated of the device; missing for a tier that limits none",
                self.allocated,
            ),
            (
                "claim_memory_reserved",
                "Memory for CUDA contexts beside the allocated memory, which the claim's programs do not see",
                self.reserved,
            ),
            (
                "claim_memory_used",
                "Memory of the device that the claim's processes hold by NVML, contexts included",
                self.used,
            ),
        ];
        for (name, help, family) in of_memory {
            r.register_with_unit(name, help, Unit::Bytes, family);
        }
        r.register_with_unit(
            "share_account_difference",
            "Memory of the share's processes by NVML minus that of its account, which they can write",
            Unit::Bytes,
            self.difference,
        );
        r.register(
            "claim_processes",
            "Processes of the claim that have memory on the device, by NVML",
            self.processes,
        );
        r.register_with_unit(
            "claim_idle",
            "Time since the device last worked for the claim, by NVML; missing where that is not known",
            Unit::Seconds,
            self.idle,
        );
        r.register_with_unit(
            "zombie_memory",
            "Memory of a GPU that belongs to a pod that is gone",
            Unit::Bytes,
            self.zombies,
        );
        r.register(
            "gpu_readable",
            "1, or 0 if NVML does not answer for the GPU, so that its other series are missing",
            self.readable,
        );
        r.register(
            "gpu_xids",
            "Errors of the GPU by their number (Xid), since the plugin's start and while a claim held a GPU of the node",
            self.xids,
        );
        r.register_with_unit(
            "gpu_last_xid_timestamp",
            "When the last error of the GPU with this number (Xid) was read, Unix time",
            Unit::Seconds,
            self.xid_times,
        );
        r.register(
            "gpu_processes",
            "Processes that have memory on the GPU",
            self.gpu_processes,
        );
        r.register(
            "gpu_stranded_slices",
            "Free MIG slices that no further partition can use, by kind: compute or memory",
            self.slices,
        );
        r.register_with_unit(
            "gpu_stranded_memory",
            "Free memory of a GPU in use that no further claim can have",
            Unit::Bytes,
            self.memory,
        );
        registry
    }
}

/// Processes that belong to no claim that has the device now.
fn others(remainder: &Remainder) -> u64 {
    let zombies = remainder.zombies.iter().map(|it| u64::from(it.processes));
    u64::from(remainder.foreign_processes) + zombies.sum::<u64>()
}

/// Memory of a GPU whose cores are all held; `None` for a GPU that no claims share by memory and cores. How many sharers a policy
/// allows is not known here.
fn stranded_of_shares(gpu: &GpuUsage, ledger: &Ledger) -> Option<u64> {
    let memory = gpu.memory?;
    let mut contexts = 0;
    let mut held = Shares::default();
    for record in ledger.held() {
        let on_gpu = record
            .plan
            .devices
            .iter()
            .filter(|it| it.gpu_uuid == gpu.uuid);
        for device in on_gpu.filter(|it| it.partition.is_none()) {
            if let Cap::Share {
                cores,
                context_memory,
                ..
            } = device.cap
            {
                held.memory = held.memory.saturating_add(device.cap.on_gpu());
                held.cores += u64::from(cores);
                held.sharers += 1;
                contexts += context_memory;
            }
        }
    }
    let whole = Shares {
        memory: memory
            .total
            .saturating_sub(memory.reserved)
            .saturating_sub(contexts),
        cores: 100,
        sharers: held.sharers + 1,
    };
    let least = Shares {
        memory: 1,
        cores: 1,
        sharers: 1,
    };
    (held.sharers > 0).then(|| stranded::of_shares(whole, held, least).stranded_memory)
}

/// The placements of a GPU's partitions that are held, or that an administrator made.
fn placements(gpu: &GpuUsage, known: &Gpu, ledger: &Ledger) -> BTreeSet<Placement> {
    let held = ledger.held();
    let devices = held.iter().flat_map(|record| &record.plan.devices);
    let on_gpu = devices.filter(|device| device.gpu_uuid == gpu.uuid);
    let held = on_gpu.filter_map(|device| Some(device.partition.as_ref()?.placement));
    let foreign = known.mig_instances.iter().filter_map(Placement::of);
    held.chain(foreign).collect()
}
