//! The current use of tenants: the objects of `usage.gpu.tranche.dev`. As in a node's answer, all parts add up.

use std::time::{SystemTime, UNIX_EPOCH};

use kube::core::ObjectMeta;
use tranche_api::usage::{
    ClaimReference, GpuUsage, GroupUsage, Measure, Memory, NodeUsage, PartitionUsage, Peak,
    Remainder, Sensors, ShareMemory, ShareUsage, Utilization, Xids,
};
use tranche_api::usage_api::{ClaimUsage, DeviceUsage, NodeUsageObject, PartitionName};

use crate::Cluster;
use crate::objects::{DRIVER_VERSION, MEMORY, PRODUCT, RESERVED, pci_address};
use crate::tenants::{GpuPosition, Part, Tenant, Work};

const MIB: u64 = 1 << 20;
/// MiB that a GPU's driver takes beside its reserve, and MiB of a share for the contexts of its processes.
const OF_DRIVER: u64 = 12;
const CONTEXT: u64 = 512;
/// One of this many GPUs is lost.
const OF_GPUS: usize = 97;
const LOST: usize = 43;

/// A tenant's load at one time, in thousandths.
struct Load {
    memory: u64,
    /// The used part of its GPU time.
    busy: u64,
    idle_seconds: u64,
}

pub fn of_node(cluster: &Cluster, node: usize) -> String {
    let second = cluster.began.elapsed().as_secs();
    let name = GpuPosition { node, gpu: 0 }.node_name();
    let gpus = (0..cluster.gpus).map(|gpu| GpuPosition { node, gpu });
    let usage = NodeUsage {
        node: name.clone(),
        driver_version: Some(DRIVER_VERSION.into()),
        unix_millis: now(),
        gpus: gpus
            .map(|place| gpu(place, &cluster.tenants(place), second))
            .collect(),
    };
    let object = NodeUsageObject {
        metadata: ObjectMeta {
            name: Some(name),
            ..ObjectMeta::default()
        },
        usage: Some(usage),
        ..NodeUsageObject::default()
    };
    serde_json::to_string(&object).unwrap()
}

pub fn of_claim(cluster: &Cluster, tenant: &Tenant) -> String {
    let second = cluster.began.elapsed().as_secs();
    let mut share = share(tenant, second);
    share.memory.free = None;
    let partition = tenant.mig_uuid().map(|uuid| PartitionName {
        uuid,
        profile: profile(tenant).to_owned(),
    });
    let object = ClaimUsage {
        metadata: ObjectMeta {
            namespace: Some(tenant.namespace.to_owned()),
            name: Some(tenant.name.clone()),
            ..ObjectMeta::default()
        },
        claim_uid: tenant.uid(),
        nodes: [tenant.place.node_name()].into(),
        devices: vec![DeviceUsage {
            unix_millis: now(),
            gpu_uuid: tenant.place.uuid(),
            product_name: PRODUCT.into(),
            partition,
            share,
        }],
        ..ClaimUsage::default()
    };
    serde_json::to_string(&object).unwrap()
}

fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    u64::try_from(since.as_millis()).unwrap()
}

fn gpu(place: GpuPosition, tenants: &[Tenant], second: u64) -> GpuUsage {
    let described = GpuUsage {
        uuid: place.uuid(),
        index: u32::try_from(place.gpu).ok(),
        minor: u32::try_from(place.gpu).unwrap(),
        pci_bus_id: pci_address(place.gpu),
        product_name: PRODUCT.into(),
        xids: Some(Xids::default()),
        ..GpuUsage::default()
    };
    let shares: Vec<ShareUsage> = tenants.iter().map(|it| share(it, second)).collect();
    if is_lost(place) {
        let call = format!(
            "nvmlDeviceGetMemoryInfo_v2({}): the GPU is lost",
            place.uuid()
        );
        return GpuUsage {
            shares,
            problem: Some(call),
            ..described
        };
    }
    let memory = memory(MEMORY * MIB, RESERVED * MIB, OF_DRIVER * MIB, &shares);
    let remainder = remainder(&memory, OF_DRIVER * MIB, &shares);
    let busy: u32 = shares.iter().map(|it| of_time(&it.utilization)).sum();
    let described = GpuUsage {
        memory: Some(memory),
        sensors: sensors(busy),
        remainder,
        ..described
    };
    if tenants.iter().any(|it| it.mig_uuid().is_some()) {
        let partitions = tenants.iter().zip(shares);
        return GpuUsage {
            mig_mode: true,
            partitions: partitions.map(|(it, share)| partition(it, share)).collect(),
            ..described
        };
    }
    GpuUsage {
        utilization: shares.iter().fold(measures(0), |mut sum, share| {
            for (measure, value) in &share.utilization.0 {
                *sum.0.entry(*measure).or_default() += value;
            }
            sum
        }),
        shares,
        ..described
    }
}

fn is_lost(place: GpuPosition) -> bool {
    place.nth() % OF_GPUS == LOST
}

fn partition(tenant: &Tenant, share: ShareUsage) -> PartitionUsage {
    let Part::Instance(profile, slice, mib) = tenant.part else {
        unreachable!("the tenants of a GPU in MIG mode have instances");
    };
    let shares = vec![share];
    let memory = memory(mib * MIB, 0, 0, &shares);
    PartitionUsage {
        uuid: tenant.mig_uuid().unwrap(),
        profile: profile.to_owned(),
        gpu_instance: u32::try_from(slice).unwrap() + 1,
        compute_instance: 0,
        memory: Some(memory),
        utilization: shares[0].utilization.clone(),
        remainder: remainder(&memory, 0, &shares),
        shares,
    }
}

fn memory(total: u64, reserved: u64, beside: u64, shares: &[ShareUsage]) -> Memory {
    let used = beside + shares.iter().map(|it| it.memory.used).sum::<u64>();
    Memory {
        total,
        reserved,
        used,
        free: total - reserved - used,
    }
}

fn remainder(memory: &Memory, used: u64, shares: &[ShareUsage]) -> Remainder {
    let of_shares: u64 = shares.iter().filter_map(|it| it.memory.free).sum();
    Remainder {
        used,
        free: memory.free.saturating_sub(of_shares),
        ..Remainder::default()
    }
}

fn sensors(busy: u32) -> Sensors {
    let percent = busy / 100;
    Sensors {
        sm_clock: Some(if busy > 0 { 1_980 } else { 345 }),
        memory_clock: Some(2_619),
        temperature: Some(30 + percent / 3),
        memory_temperature: Some(38 + percent / 3),
        power: Some(72_000 + percent * 5_900),
        energy: Some(81_234_567_890),
        pcie_replays: Some(0),
        encoder: Some(0),
        decoder: Some(0),
        remapped_correctable: Some(0),
        remapped_uncorrectable: Some(0),
        remap_failed: Some(false),
        pcie_sent: Some(u64::from(busy) * 40_000),
        pcie_received: Some(u64::from(busy) * 90_000),
        nvlink_sent: Some(u64::from(busy) * 400_000),
        nvlink_received: Some(u64::from(busy) * 400_000),
        nvlink_data: Some(u64::from(busy) * 700_000),
        nvlink_flit_errors: Some(0),
        nvlink_data_errors: Some(0),
        nvlink_replays: Some(0),
        nvlink_recoveries: Some(0),
    }
}

fn share(tenant: &Tenant, second: u64) -> ShareUsage {
    let known = !is_lost(tenant.place);
    let load = load(tenant.work, seed(tenant), second);
    let (mib, percent, is_limited) = match tenant.part {
        Part::Whole => (MEMORY - RESERVED - OF_DRIVER, 100, false),
        Part::Share(_, gib, cores) => (gib * 1024, cores, true),
        Part::Instance(_, _, mib) => (mib, 100, false),
        // There are two turns, without limits.
        Part::Turn => (MEMORY / 4, 50, false),
    };
    let (allocated, reserved) = (mib * MIB, if is_limited { CONTEXT * MIB } else { 0 });
    let used = if known {
        allocated * load.memory / 1000
    } else {
        0
    };
    let utilization = match tenant.part {
        _ if !known => Utilization::default(),
        // NVML does not measure the time of kernels in MIG mode.
        Part::Instance(..) => without_time(measures(load.busy * percent / 10)),
        _ => measures(load.busy * percent / 10),
    };
    ShareUsage {
        claim: ClaimReference {
            namespace: tenant.namespace.to_owned(),
            name: tenant.name.clone(),
            uid: tenant.uid(),
        },
        request: "gpu".into(),
        pool: format!("{}/gpu", tenant.place.node_name()),
        device: tenant.device(),
        share_id: tenant.share_id(),
        tier: tenant.tier(),
        memory: ShareMemory {
            allocated: is_limited.then_some(allocated),
            reserved,
            used,
            free: is_limited.then(|| allocated + reserved - used),
            account: is_limited.then_some(used),
            peak: (known && !matches!(tenant.part, Part::Instance(..))).then_some(Peak {
                bytes: used + used / 8,
                watched_seconds: 10_800,
            }),
        },
        utilization: utilization.clone(),
        processes: 1,
        idle_seconds: known.then_some(load.idle_seconds),
        groups: vec![GroupUsage {
            pod: Some(tenant.name.clone()),
            pod_uid: Some(format!("pod-{}", tenant.name)),
            container: Some("main".into()),
            used,
            utilization,
            processes: 1,
        }],
    }
}

fn profile(tenant: &Tenant) -> &'static str {
    match tenant.part {
        Part::Instance(profile, ..) => profile,
        _ => "",
    }
}

/// A number that makes tenants of a kind differ.
fn seed(tenant: &Tenant) -> u64 {
    let place = u64::try_from(tenant.place.nth()).unwrap();
    let name = tenant.name.bytes().map(u64::from).sum::<u64>();
    place * 389 + name * 97
}

fn load(work: Work, seed: u64, second: u64) -> Load {
    let at = second + seed;
    let jitter = wave(at * 7, 100) / 25;
    match work {
        Work::Trains => {
            let is_saving = at % 660 > 600;
            Load {
                memory: 880 + seed % 90,
                busy: if is_saving { 120 } else { 920 } + jitter,
                idle_seconds: 0,
            }
        }
        Work::Serves => Load {
            memory: 600 + seed % 250 + wave(at, 1_100) / 8,
            busy: 150 + wave(at, 1_500) / 2 + wave(at, 340) / 6 + jitter,
            idle_seconds: 0,
        },
        Work::Tries => {
            let (at, runs) = (at % 840, 300);
            Load {
                memory: if at < runs { 640 } else { 410 },
                busy: if at < runs { 700 + jitter } else { 0 },
                idle_seconds: at.saturating_sub(runs),
            }
        }
        Work::Idles => Load {
            memory: 120 + seed % 300,
            busy: 0,
            idle_seconds: 3_600 * (1 + seed % 40) + second,
        },
    }
}

/// Rises from 0 to 1000 and falls again within the period.
fn wave(at: u64, period: u64) -> u64 {
    let at = at % period * 2_000 / period;
    at.min(2_000 - at)
}

/// All measures of a device or a share, from the time in which a kernel ran, in hundredths of a percent.
fn measures(time: u64) -> Utilization {
    let time = u32::try_from(time).unwrap();
    let of = |part: u32| time / 100 * part;
    [
        (Measure::Gpu, time),
        (Measure::MemoryCopy, of(41)),
        (Measure::GraphicsActive, of(98)),
        (Measure::SmActive, of(83)),
        (Measure::SmOccupancy, of(37)),
        (Measure::TensorActive, of(46)),
        (Measure::DramActive, of(39)),
    ]
    .into_iter()
    .collect()
}

fn without_time(mut measures: Utilization) -> Utilization {
    measures.0.remove(&Measure::Gpu);
    measures.0.remove(&Measure::MemoryCopy);
    measures
}

fn of_time(utilization: &Utilization) -> u32 {
    utilization.get(Measure::Gpu).unwrap_or(0)
}
