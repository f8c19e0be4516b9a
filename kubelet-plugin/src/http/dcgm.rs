//! The GPUs' series under the names and labels that dcgm-exporter gives them (`etc/default-counters.csv`, `rendermetrics`,
//! `transformation` of github.com/NVIDIA/dcgm-exporter), with the labels `tier` and `share_id` more.
//!
//! A value that can be divided has a series for each holder, and one without a pod for the rest: they add up. Any other value has one
//! series for each GPU.

use std::sync::atomic::AtomicU64;

use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use tranche_api::names::DRIVER;
use tranche_api::usage::{
    GpuUsage, GroupUsage, Measure, Memory, NodeUsage, PartitionUsage, Remainder, ShareUsage,
    Utilization, WHOLE,
};
use tranche_driver::usage::apportion::apportion;

const MIB: u64 = 1 << 20;

/// DCGM divides what passed in KiB by the seconds and by 1000 (`ReadAndCacheNvLinkBandwidth` of its `DcgmCacheManager.cpp`). The
/// list of dcgm-exporter calls the result a counter.
const NVLINK_UNIT: f64 = 1000.0 * 1024.0;

pub(super) type Labels = Vec<(&'static str, String)>;
type IntegerGauges = Family<Labels, Gauge<u64, AtomicU64>>;
type FloatGauges = Family<Labels, Gauge<f64, AtomicU64>>;

/// The metrics of sensors, with how each is read.
type Sensor = (&'static str, &'static str, fn(&GpuUsage) -> Option<f64>);

#[expect(
    clippy::cast_precision_loss,
    reason = "a counter of 53 bits is exact for centuries"
)]
const SENSORS: [Sensor; 22] = [
    (
        "DCGM_FI_DEV_SM_CLOCK",
        "SM clock frequency (in MHz)",
        |gpu| gpu.sensors.sm_clock.map(f64::from),
    ),
    (
        "DCGM_FI_DEV_MEM_CLOCK",
        "Memory clock frequency (in MHz)",
        |gpu| gpu.sensors.memory_clock.map(f64::from),
    ),
    ("DCGM_FI_DEV_GPU_TEMP", "GPU temperature (in C)", |gpu| {
        gpu.sensors.temperature.map(f64::from)
    }),
    (
        "DCGM_FI_DEV_MEMORY_TEMP",
        "Memory temperature (in C)",
        |gpu| gpu.sensors.memory_temperature.map(f64::from),
    ),
    ("DCGM_FI_DEV_POWER_USAGE", "Power draw (in W)", |gpu| {
        gpu.sensors.power.map(|it| f64::from(it) / 1000.0)
    }),
    (
        "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION",
        "Total energy consumption since the driver was loaded (in mJ)",
        |gpu| gpu.sensors.energy.map(|it| it as f64),
    ),
    (
        "DCGM_FI_DEV_PCIE_REPLAY_COUNTER",
        "Total number of PCIe retries",
        |gpu| gpu.sensors.pcie_replays.map(f64::from),
    ),
    (
        "DCGM_FI_DEV_ENC_UTIL",
        "Encoder utilization (in %)",
        |gpu| gpu.sensors.encoder.map(f64::from),
    ),
    (
        "DCGM_FI_DEV_DEC_UTIL",
        "Decoder utilization (in %)",
        |gpu| gpu.sensors.decoder.map(f64::from),
    ),
    (
        "DCGM_FI_DEV_FB_RESERVED",
        "Framebuffer memory reserved (in MiB)",
        |gpu| gpu.memory.map(|it| (it.reserved / MIB) as f64),
    ),
    (
        "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS",
        "Number of remapped rows for correctable errors",
        |gpu| gpu.sensors.remapped_correctable.map(|it| it as f64),
    ),
    (
        "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS",
        "Number of remapped rows for uncorrectable errors",
        |gpu| gpu.sensors.remapped_uncorrectable.map(|it| it as f64),
    ),
    (
        "DCGM_FI_DEV_ROW_REMAP_FAILURE",
        "Whether remapping of rows has failed",
        |gpu| gpu.sensors.remap_failed.map(|it| f64::from(u8::from(it))),
    ),
    (
        "DCGM_FI_PROF_PCIE_TX_BYTES",
        "Bytes per second sent over PCIe",
        |gpu| gpu.sensors.pcie_sent.map(|it| it as f64),
    ),
    (
        "DCGM_FI_PROF_PCIE_RX_BYTES",
        "Bytes per second received over PCIe",
        |gpu| gpu.sensors.pcie_received.map(|it| it as f64),
    ),
    (
        "DCGM_FI_PROF_NVLINK_TX_BYTES",
        "Bytes per second sent over all NVLinks",
        |gpu| gpu.sensors.nvlink_sent.map(|it| it as f64),
    ),
    (
        "DCGM_FI_PROF_NVLINK_RX_BYTES",
        "Bytes per second received over all NVLinks",
        |gpu| gpu.sensors.nvlink_received.map(|it| it as f64),
    ),
    (
        "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL",
        "Data sent and received over all NVLinks (in units of 1000 KiB per second)",
        |gpu| gpu.sensors.nvlink_data.map(|it| it as f64 / NVLINK_UNIT),
    ),
    (
        "DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL",
        "Total number of NVLink flow-control CRC errors",
        |gpu| gpu.sensors.nvlink_flit_errors.map(|it| it as f64),
    ),
    (
        "DCGM_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL",
        "Total number of NVLink data CRC errors",
        |gpu| gpu.sensors.nvlink_data_errors.map(|it| it as f64),
    ),
    (
        "DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL",
        "Total number of NVLink retries",
        |gpu| gpu.sensors.nvlink_replays.map(|it| it as f64),
    ),
    (
        "DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL",
        "Total number of NVLink recovery errors",
        |gpu| gpu.sensors.nvlink_recoveries.map(|it| it as f64),
    ),
];

/// The metrics of utilization: name, meaning, and the value of the whole.
fn name_of(measure: Measure) -> (&'static str, &'static str, f64) {
    match measure {
        Measure::Gpu => ("DCGM_FI_DEV_GPU_UTIL", "GPU utilization (in %)", 100.0),
        Measure::MemoryCopy => (
            "DCGM_FI_DEV_MEM_COPY_UTIL",
            "Memory utilization (in %)",
            100.0,
        ),
        Measure::GraphicsActive => (
            "DCGM_FI_PROF_GR_ENGINE_ACTIVE",
            "Ratio of time the graphics engine is active",
            1.0,
        ),
        Measure::SmActive => (
            "DCGM_FI_PROF_SM_ACTIVE",
            "Ratio of cycles an SM has at least 1 warp assigned",
            1.0,
        ),
        Measure::SmOccupancy => (
            "DCGM_FI_PROF_SM_OCCUPANCY",
            "Ratio of number of warps resident on an SM",
            1.0,
        ),
        Measure::TensorActive => (
            "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE",
            "Ratio of cycles the tensor pipe is active",
            1.0,
        ),
        Measure::DramActive => (
            "DCGM_FI_PROF_DRAM_ACTIVE",
            "Ratio of cycles the device memory interface is active",
            1.0,
        ),
    }
}

/// The series of one scrape.
#[derive(Debug, Default)]
struct Series {
    sensors: Vec<FloatGauges>,
    measures: Vec<FloatGauges>,
    used: IntegerGauges,
    free: IntegerGauges,
    total: IntegerGauges,
    xids: IntegerGauges,
}

/// The series of all GPUs; those of sensors where `gpu_sensors` says so.
pub fn registry(usage: &NodeUsage, gpu_sensors: bool) -> Registry {
    let sensors = if gpu_sensors { &SENSORS[..] } else { &[] };
    let mut series = Series {
        sensors: sensors.iter().map(|_| FloatGauges::default()).collect(),
        measures: Measure::ALL
            .iter()
            .map(|_| FloatGauges::default())
            .collect(),
        ..Series::default()
    };
    for gpu in &usage.gpus {
        // A GPU that fell off the bus has this series too: the error says so.
        if let Some(xids) = &gpu.xids {
            let last = series.xids.get_or_create(&labels(usage, gpu));
            last.set(xids.last.unwrap_or(0));
        }
        if gpu.problem.is_none() {
            series.add(usage, gpu);
        }
    }
    series.registry()
}

/// A holder of memory that has a series of its own.
struct Holder<'a> {
    labels: Labels,
    used: u64,
    free: Option<u64>,
    utilization: Option<&'a Utilization>,
}

impl Series {
    fn add(&mut self, usage: &NodeUsage, gpu: &GpuUsage) {
        let base = labels(usage, gpu);
        for (family, (.., read)) in self.sensors.iter().zip(SENSORS) {
            if let Some(value) = read(gpu) {
                family.get_or_create(&base).set(value);
            }
        }
        let mut holders = holders(&base, &gpu.shares, &gpu.remainder);
        for partition in &gpu.partitions {
            let base = with_partition(&base, partition);
            holders.extend(self::holders(
                &base,
                &partition.shares,
                &partition.remainder,
            ));
        }
        for holder in &holders {
            self.add_utilization(holder);
        }
        if let Some(memory) = gpu.memory {
            self.add_memory(memory, &base, &holders);
        }
    }

    fn add_utilization(&self, holder: &Holder<'_>) {
        let Some(utilization) = holder.utilization else {
            return;
        };
        for (measure, family) in Measure::ALL.into_iter().zip(&self.measures) {
            if let Some(value) = utilization.get(measure) {
                let (.., whole) = name_of(measure);
                let value = f64::from(value) * whole / f64::from(WHOLE);
                family.get_or_create(&holder.labels).set(value);
            }
        }
    }

    /// Whole MiB that add up to those of the GPU.
    fn add_memory(&self, memory: Memory, base: &Labels, holders: &[Holder<'_>]) {
        let parts = |total: u64, of: fn(&Holder<'_>) -> u64| {
            let parts: Vec<u64> = holders.iter().map(of).collect();
            let rest = total.saturating_sub(parts.iter().sum());
            let weights: Vec<u64> = parts.into_iter().chain([rest]).collect();
            apportion(total / MIB, &weights)
        };
        let used = parts(memory.used, |holder| holder.used);
        let free = parts(memory.free, |holder| holder.free.unwrap_or(0));
        let add = |family: &IntegerGauges, labels: &Labels, value: u64| {
            family.get_or_create(labels).inc_by(value);
        };
        let mut total = memory.total / MIB;
        for (holder, (used, free)) in holders.iter().zip(used.iter().zip(&free)) {
            add(&self.used, &holder.labels, *used);
            if holder.free.is_some() {
                add(&self.free, &holder.labels, *free);
                add(&self.total, &holder.labels, used + free);
                total -= (used + free).min(total);
            }
        }
        // What no holder has belongs to nobody.
        let rest = |parts: &[u64]| parts.last().copied().unwrap_or(0);
        add(&self.used, base, rest(&used));
        add(&self.free, base, rest(&free));
        add(&self.total, base, total);
    }

    fn registry(self) -> Registry {
        let mut registry = Registry::default();
        let r = &mut registry;
        for (family, (name, help, _)) in self.sensors.into_iter().zip(SENSORS) {
            r.register(name, help, family);
        }
        r.register(
            "DCGM_FI_DEV_XID_ERRORS",
            "Value of the last XID error encountered",
            self.xids,
        );
        for (measure, family) in Measure::ALL.into_iter().zip(self.measures) {
            let (name, help, _) = name_of(measure);
            r.register(name, help, family);
        }
        for (name, help, family) in [
            ("FB_USED", "Framebuffer memory used (in MiB)", self.used),
            ("FB_FREE", "Framebuffer memory free (in MiB)", self.free),
            (
                "FB_TOTAL",
                "Framebuffer memory in total (in MiB)",
                self.total,
            ),
        ] {
            r.register(format!("DCGM_FI_DEV_{name}"), help, family);
        }
        registry
    }
}

/// The holders of a device; the last one stands for nobody.
fn holders<'a>(
    base: &Labels,
    shares: &'a [ShareUsage],
    remainder: &'a Remainder,
) -> Vec<Holder<'a>> {
    let mut holders = Vec::new();
    for share in shares {
        let labels = with_share(base, share);
        if let [group] = &share.groups[..] {
            holders.push(Holder {
                labels: with_group(&labels, share, group),
                used: group.used,
                free: share.memory.free,
                utilization: Some(&group.utilization),
            });
            continue;
        }
        // What a share may still take belongs to all of its containers.
        holders.push(Holder {
            labels: labels.clone(),
            used: 0,
            free: share.memory.free,
            utilization: share.groups.is_empty().then_some(&share.utilization),
        });
        holders.extend(share.groups.iter().map(|group| Holder {
            labels: with_group(&labels, share, group),
            used: group.used,
            free: None,
            utilization: Some(&group.utilization),
        }));
    }
    holders.push(Holder {
        labels: base.clone(),
        used: remainder.used,
        free: Some(remainder.free),
        utilization: Some(&remainder.utilization),
    });
    holders
}

/// The labels of a GPU, as `rendermetrics` writes them.
fn labels(usage: &NodeUsage, gpu: &GpuUsage) -> Labels {
    let number = gpu.index.unwrap_or(gpu.minor);
    // NVML writes an address with a domain of eight digits, in capital letters.
    let address = format!("0000{}", gpu.pci_bus_id.to_ascii_uppercase());
    vec![
        ("gpu", number.to_string()),
        ("UUID", gpu.uuid.clone()),
        ("pci_bus_id", address),
        ("device", format!("nvidia{number}")),
        ("modelName", gpu.product_name.clone()),
        ("hostname", usage.node.clone()),
        (
            "DCGM_FI_DRIVER_VERSION",
            usage.driver_version.clone().unwrap_or_default(),
        ),
    ]
}

fn with_partition(base: &Labels, partition: &PartitionUsage) -> Labels {
    let mut labels = base.clone();
    labels.extend([
        ("GPU_I_PROFILE", partition.profile.clone()),
        ("GPU_I_ID", partition.gpu_instance.to_string()),
        ("dra_mig_profile", partition.profile.clone()),
        ("dra_mig_device_uuid", partition.uuid.clone()),
    ]);
    labels
}

fn with_share(base: &Labels, share: &ShareUsage) -> Labels {
    let mut labels = base.clone();
    labels.extend([
        ("dra_claim_name", share.claim.name.clone()),
        ("dra_claim_namespace", share.claim.namespace.clone()),
        ("dra_driver_name", DRIVER.to_owned()),
        ("dra_pool_name", share.pool.clone()),
        ("dra_device_name", share.device.clone()),
        ("tier", share.tier.as_str().to_owned()),
    ]);
    labels.extend(share.share_id.clone().map(|id| ("share_id", id)));
    labels
}

fn with_group(base: &Labels, share: &ShareUsage, group: &GroupUsage) -> Labels {
    let mut labels = base.clone();
    labels.push(("namespace", share.claim.namespace.clone()));
    let of_group = [
        ("pod", &group.pod),
        ("pod_uid", &group.pod_uid),
        ("container", &group.container),
    ];
    labels.extend(
        of_group
            .into_iter()
            .filter_map(|(name, value)| Some((name, value.clone()?))),
    );
    labels
}
