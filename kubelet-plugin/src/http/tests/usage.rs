//! The series of what NVML says: that they add up, whom they name, and how many they are.

use std::collections::BTreeSet;

use tranche_api::Tier;
use tranche_api::usage::{
    ClaimReference, GpuUsage, GroupUsage, Measure, Memory, NodeUsage, PartitionUsage, Remainder,
    Sensors, ShareMemory, ShareUsage, Utilization, Xids, Zombie,
};

use super::super::{Known, exposition};
use crate::metrics::Metrics;
use crate::share::last_findings::LastFindings;
use crate::testing::World;

const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const RESERVED: u64 = 600 * MIB;

fn utilization(value: u32) -> Utilization {
    Measure::ALL.into_iter().map(|it| (it, value)).collect()
}

fn claim(name: &str) -> ClaimReference {
    ClaimReference {
        namespace: "team".into(),
        name: name.into(),
        uid: format!("uid-of-{name}"),
    }
}

/// The processes of a pod, which take a tenth of the GPU's time.
fn group(pod: &str, used: u64) -> GroupUsage {
    GroupUsage {
        pod: Some(pod.into()),
        pod_uid: Some(format!("uid-of-{pod}")),
        container: Some("main".into()),
        used,
        utilization: utilization(1_000),
        processes: 1,
    }
}

fn share(name: &str, groups: Vec<GroupUsage>, free: u64) -> ShareUsage {
    let count = u32::try_from(groups.len()).unwrap();
    ShareUsage {
        claim: claim(name),
        request: "gpu".into(),
        pool: "node-a/gpu".into(),
        device: "gpu-0-capped".into(),
        share_id: Some(format!("share-of-{name}")),
        tier: Tier::Capped,
        memory: ShareMemory {
            allocated: Some(20 * GIB),
            reserved: 300 * MIB,
            used: groups.iter().map(|it| it.used).sum(),
            free: Some(free),
            account: Some(GIB),
            peak: None,
        },
        utilization: utilization(count * 1_000),
        processes: count,
        idle_seconds: Some(5),
        groups,
    }
}

fn sensors() -> Sensors {
    Sensors {
        sm_clock: Some(1_980),
        memory_clock: Some(2_619),
        temperature: Some(55),
        memory_temperature: Some(60),
        power: Some(345_678),
        energy: Some(123_456_789),
        pcie_replays: Some(0),
        encoder: Some(0),
        decoder: Some(0),
        remapped_correctable: Some(0),
        remapped_uncorrectable: Some(1),
        remap_failed: Some(false),
        pcie_sent: Some(1 << 30),
        pcie_received: Some(1 << 31),
        nvlink_sent: Some(1 << 34),
        nvlink_received: Some(1 << 35),
        nvlink_data: Some(204_800_000_000),
        nvlink_flit_errors: Some(3),
        nvlink_data_errors: Some(4),
        nvlink_replays: Some(5),
        nvlink_recoveries: Some(6),
    }
}

/// A GPU of 80 GiB with `used` bytes in use, by nobody.
fn gpu(index: u32, used: u64) -> GpuUsage {
    let free = 80 * GIB - RESERVED - used;
    GpuUsage {
        uuid: format!("GPU-{index}"),
        index: Some(index),
        minor: index,
        pci_bus_id: format!("0000:1{index}:00.0"),
        product_name: "Simulated H100 80GB HBM3".into(),
        memory: Some(Memory {
            total: 80 * GIB,
            reserved: RESERVED,
            used,
            free,
        }),
        utilization: utilization(0),
        sensors: sensors(),
        xids: Some(Xids {
            last: Some(31),
            counts: [(31, 2)].into(),
            times: [(31, 1_790_000_000)].into(),
        }),
        remainder: Remainder {
            used,
            free,
            utilization: utilization(0),
            ..Remainder::default()
        },
        ..GpuUsage::default()
    }
}

/// A node with a shared GPU, a divided one and one that nobody uses, with all that NVML can say.
pub(super) fn everything() -> NodeUsage {
    let zombie = Zombie {
        claim: claim("gone"),
        pod: Some("dead".into()),
        pod_uid: None,
        used: 3 * GIB + 1,
        processes: 0,
    };
    let mut shared = gpu(0, 10 * GIB + 12_345_678);
    shared.utilization = utilization(4_000);
    shared.shares = vec![
        share("a", vec![group("one", GIB + 7_777_777)], 19 * GIB),
        share("b", vec![group("two", GIB), group("three", 999)], 5 * GIB),
    ];
    shared.remainder.used -= 2 * GIB + 7_777_777 + 999;
    shared.remainder.free -= 24 * GIB;
    shared.remainder.utilization = utilization(1_000);
    shared.remainder.zombies = vec![zombie];
    let mut divided = gpu(1, 5 * GIB);
    divided.mig_mode = true;
    divided.remainder.used -= 4 * GIB;
    divided.remainder.free -= 6 * GIB;
    divided.partitions = vec![PartitionUsage {
        uuid: "MIG-1".into(),
        profile: "1g.10gb".into(),
        gpu_instance: 7,
        compute_instance: 0,
        memory: Some(Memory {
            total: 10 * GIB,
            reserved: 0,
            used: 4 * GIB,
            free: 6 * GIB,
        }),
        utilization: utilization(1_000),
        shares: vec![ShareUsage {
            tier: Tier::Partition,
            ..share("c", vec![group("four", 4 * GIB)], 6 * GIB)
        }],
        remainder: Remainder {
            utilization: utilization(0),
            ..Remainder::default()
        },
    }];
    NodeUsage {
        node: "node-a".into(),
        driver_version: Some("535.261.03".into()),
        unix_millis: 0,
        gpus: vec![shared, divided, gpu(2, 0)],
    }
}

fn encoded(usage: &NodeUsage) -> String {
    let (world, metrics) = (World::new(), Metrics::default());
    let plugin = world.start();
    let ledger = plugin.preparer.ledger();
    exposition(
        &metrics,
        ledger,
        &world.layout,
        &LastFindings::default(),
        usage,
        &Known {
            sensors: true,
            ..Known::default()
        },
    )
}

/// The values of a metric's series with all of these labels.
fn values(text: &str, name: &str, labels: &[&str]) -> Vec<f64> {
    let of_name = |line: &&str| line.starts_with(&format!("{name}{{"));
    let has_labels = |line: &&str| labels.iter().all(|label| line.contains(label));
    let lines = text.lines().filter(of_name).filter(has_labels);
    lines
        .map(|line| line.rsplit_once(' ').unwrap().1.parse().unwrap())
        .collect()
}

fn sum(text: &str, name: &str, labels: &[&str]) -> f64 {
    let values = values(text, name, labels);
    assert!(!values.is_empty(), "{name} {labels:?}: {text}");
    // The sum is exact to a millionth.
    (values.iter().sum::<f64>() * 1e6).round() / 1e6
}

#[tokio::test]
#[expect(
    clippy::float_cmp,
    clippy::cast_precision_loss,
    reason = "short decimal numbers"
)]
async fn the_series_of_dcgm_add_up_to_the_gpu_and_name_its_holder() {
    let usage = everything();
    let text = encoded(&usage);
    for gpu in &usage.gpus {
        let uuid = format!("UUID=\"{}\"", gpu.uuid);
        let memory = gpu.memory.unwrap();
        for (name, bytes) in [
            ("FB_USED", memory.used),
            ("FB_FREE", memory.free),
            ("FB_TOTAL", memory.total),
            ("FB_RESERVED", memory.reserved),
        ] {
            let found = sum(&text, &format!("DCGM_FI_DEV_{name}"), &[&uuid]);
            assert_eq!(found, (bytes / MIB) as f64, "{name} of {uuid}");
        }
    }
    let shared = "UUID=\"GPU-0\"";
    let one = "pod=\"one\"";
    for (name, labels, wanted) in [
        ("DCGM_FI_DEV_GPU_UTIL", vec![shared], 40.0),
        ("DCGM_FI_DEV_GPU_UTIL", vec![shared, one], 10.0),
        ("DCGM_FI_PROF_SM_ACTIVE", vec![shared], 0.4),
        ("DCGM_FI_DEV_FB_USED", vec![one], 1_031.0),
        // Used and free tell how full the share is, as dashboards compute it.
        ("DCGM_FI_DEV_FB_FREE", vec![one], 19_456.0),
        ("DCGM_FI_DEV_POWER_USAGE", vec![shared], 345.678),
        ("tranche_gpu_processes", vec!["GPU-0"], 3.0),
        ("tranche_gpu_xids_total", vec!["GPU-0", "xid=\"31\""], 2.0),
        (
            "tranche_gpu_last_xid_timestamp_seconds",
            vec!["GPU-0", "xid=\"31\""],
            1_790_000_000.0,
        ),
        ("tranche_claim_info", vec!["claim=\"b\""], 2.0),
        (
            "tranche_share_account_difference_bytes",
            vec!["claim=\"b\""],
            999.0,
        ),
        (
            "tranche_zombie_memory_bytes",
            vec!["claim=\"gone\"", "pod=\"dead\""],
            3_221_225_473.0,
        ),
    ] {
        assert_eq!(sum(&text, name, &labels), wanted, "{name} {labels:?}");
    }
    // A value that is not divided has one series.
    for name in ["SM_CLOCK", "GPU_TEMP", "POWER_USAGE"] {
        let name = format!("DCGM_FI_DEV_{name}");
        assert_eq!(values(&text, &name, &[]).len(), 3, "{name}");
        assert!(values(&text, &name, &["pod="]).is_empty(), "{name}");
    }
    let of_four = |line: &&str| line.contains("pod=\"four\"");
    let mut used = text
        .lines()
        .filter(|line| line.starts_with("DCGM_FI_DEV_FB_USED{"));
    assert_eq!(
        used.find(of_four).unwrap(),
        "DCGM_FI_DEV_FB_USED{gpu=\"1\",UUID=\"GPU-1\",pci_bus_id=\"00000000:11:00.0\",device=\"nvidia1\",\
         modelName=\"Simulated H100 80GB HBM3\",hostname=\"node-a\",DCGM_FI_DRIVER_VERSION=\"535.261.03\",\
         GPU_I_PROFILE=\"1g.10gb\",GPU_I_ID=\"7\",dra_mig_profile=\"1g.10gb\",dra_mig_device_uuid=\"MIG-1\",\
         dra_claim_name=\"c\",dra_claim_namespace=\"team\",dra_driver_name=\"gpu.tranche.dev\",\
         dra_pool_name=\"node-a/gpu\",dra_device_name=\"gpu-0-capped\",tier=\"partition\",share_id=\"share-of-c\",\
         namespace=\"team\",pod=\"four\",pod_uid=\"uid-of-four\",container=\"main\"} 4096"
    );
}

/// The values are in the units of DCGM.
#[tokio::test]
async fn nvlinks_have_series_where_the_board_has_some() {
    let mut usage = everything();
    usage.gpus[2].sensors = Sensors::default();
    let text = encoded(&usage);
    for (name, value) in [
        ("DCGM_FI_PROF_NVLINK_TX_BYTES", 17_179_869_184.0),
        ("DCGM_FI_PROF_NVLINK_RX_BYTES", 34_359_738_368.0),
        ("DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL", 200_000.0),
        ("DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL", 3.0),
        ("DCGM_FI_DEV_NVLINK_CRC_DATA_ERROR_COUNT_TOTAL", 4.0),
        ("DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL", 5.0),
        ("DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL", 6.0),
    ] {
        assert_eq!(values(&text, name, &["UUID=\"GPU-0\""]), [value], "{name}");
        assert_eq!(values(&text, name, &[]).len(), 2, "{name}");
    }
}

/// The most that a node has: 8 GPUs with 16 shares each.
#[tokio::test]
async fn a_scrape_of_a_full_node_is_smaller_than_five_megabytes() {
    let mut usage = everything();
    let shared = usage.gpus.swap_remove(0);
    usage.gpus = (0..8)
        .map(|index| {
            let mut full = shared.clone();
            full.uuid = format!("GPU-00000000-0000-0000-0000-00000000000{index}");
            full.index = Some(index);
            let share = |nth: u32| {
                let mut share = shared.shares[0].clone();
                let name = format!("of-a-deployment-with-a-long-name-{index}-{nth}");
                share.claim.name = format!("claim-{name}");
                share.groups[0].pod = Some(format!("pod-{name}"));
                share
            };
            full.shares = (0..16).map(share).collect();
            full
        })
        .collect();
    let text = encoded(&usage);
    assert!(text.len() < 5_000_000, "{}", text.len());
    assert_eq!(values(&text, "DCGM_FI_DEV_FB_USED", &[]).len(), 8 * 17);
}

#[tokio::test]
async fn where_dcgm_exporter_runs_its_sensors_can_be_left_out() {
    let (world, metrics) = (World::new(), Metrics::default());
    let plugin = world.start();
    let (ledger, findings) = (plugin.preparer.ledger(), LastFindings::default());
    let names = |gpu_sensors| -> BTreeSet<String> {
        let layout = &world.layout;
        let text = exposition(
            &metrics,
            ledger,
            layout,
            &findings,
            &everything(),
            &Known {
                sensors: gpu_sensors,
                ..Known::default()
            },
        );
        let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE "));
        types
            .filter_map(|line| line.split(' ').next())
            .map(str::to_owned)
            .collect()
    };
    let (all, without) = (names(true), names(false));
    let left_out: Vec<_> = all.difference(&without).collect();
    assert_eq!(left_out.len(), 22, "{left_out:?}");
    assert!(left_out.iter().all(|name| name.starts_with("DCGM_FI_")));
    assert!(without.contains("DCGM_FI_DEV_FB_USED") && without.contains("DCGM_FI_DEV_GPU_UTIL"));
}
