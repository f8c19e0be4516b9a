//! The fields of the objects of `usage.gpu.tranche.dev` that commands show. A thousand nodes answer with 17 MB, mostly other
//! fields; with the API's own types, a reading would take several times the time and memory. A test compares these types with
//! the API's.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Deserialize;
use tranche_api::usage::Peak;

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub struct NodeReading {
    pub metadata: ObjectMeta,
    /// Absent if the node does not answer.
    pub gpus: Option<Vec<GpuReading>>,
    /// Why the node does not answer.
    pub problem: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
pub struct ClaimReading {
    /// Its namespace and name.
    pub metadata: ObjectMeta,
    #[serde(default)]
    pub devices: Vec<ShareReading>,
    /// Why the use, or a part of it, is not known.
    pub problem: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct GpuReading {
    /// `GPU-…`.
    pub uuid: String,
    /// Absent where NVML does not report it.
    pub memory: Option<Memory>,
    /// How busy it is.
    #[serde(default)]
    pub utilization: Time,
    /// The claims' parts of the GPU itself.
    #[serde(default)]
    shares: Vec<ShareReading>,
    #[serde(default)]
    partitions: Vec<PartitionReading>,
    /// Why NVML does not report it.
    pub problem: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
struct PartitionReading {
    #[serde(default)]
    shares: Vec<ShareReading>,
}

/// What a claim has of a device.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ShareReading {
    pub claim: Claim,
    /// The device's pool, which is its node's: the API drops a node's reports about other nodes' pools.
    pub pool: String,
    pub device: String,
    /// The share, where claims share the device.
    pub share_id: Option<String>,
    pub memory: ShareMemory,
    /// Its part of the device's time.
    #[serde(default)]
    pub utilization: Time,
    /// Since the last kernel, where that is known.
    pub idle_seconds: Option<u64>,
    /// By pod and container.
    #[serde(default)]
    pub groups: Vec<GroupReading>,
}

/// A container of a pod.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct GroupReading {
    /// The pod, where it is known.
    pub pod: Option<String>,
    /// Bytes that its processes hold.
    pub used: u64,
    /// Its part of the device's time.
    #[serde(default)]
    pub utilization: Time,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct Claim {
    pub uid: String,
}

/// Memory of a share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct ShareMemory {
    /// Bytes in use.
    pub used: u64,
    /// The highest use that was measured, where that is known.
    pub peak: Option<Peak>,
}

/// Memory of a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct Memory {
    /// Bytes in use.
    pub used: u64,
}

/// The time in which a kernel ran.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub struct Time {
    /// In hundredths of a percent, where it is known.
    pub gpu: Option<u32>,
}

impl GpuReading {
    /// The claims' parts of the GPU itself and of its partitions.
    pub fn all_shares(&self) -> impl Iterator<Item = &ShareReading> {
        let on_partitions = self.partitions.iter().flat_map(|it| &it.shares);
        self.shares.iter().chain(on_partitions)
    }
}

impl Time {
    #[must_use]
    pub fn percent(self) -> Option<f64> {
        Some(f64::from(self.gpu?) / 100.0)
    }
}

#[cfg(test)]
mod tests {
    use tranche_api::Tier;
    use tranche_api::usage as api;
    use tranche_api::usage_api::{ClaimUsage, DeviceUsage, NodeUsageObject};

    use super::*;

    const PEAK: Peak = Peak {
        bytes: 8,
        watched_seconds: 60,
    };

    fn utilization(gpu: u32) -> api::Utilization {
        let others = api::Measure::ALL.map(|measure| (measure, 1));
        let of_time = (api::Measure::Gpu, gpu);
        others.into_iter().chain([of_time]).collect()
    }

    fn share(share_id: Option<&str>) -> api::ShareUsage {
        api::ShareUsage {
            claim: api::ClaimReference {
                namespace: "team".into(),
                name: "claim".into(),
                uid: "uid".into(),
            },
            request: "gpu".into(),
            pool: "a/gpu".into(),
            device: "device".into(),
            share_id: share_id.map(str::to_owned),
            tier: Tier::Capped,
            memory: api::ShareMemory {
                used: 7,
                peak: Some(PEAK),
                ..api::ShareMemory::default()
            },
            utilization: utilization(150),
            processes: 1,
            idle_seconds: Some(9),
            groups: vec![api::GroupUsage {
                pod: Some("pod".into()),
                used: 5,
                utilization: utilization(50),
                ..api::GroupUsage::default()
            }],
        }
    }

    fn read_share(share_id: Option<&str>) -> ShareReading {
        ShareReading {
            claim: Claim { uid: "uid".into() },
            pool: "a/gpu".into(),
            device: "device".into(),
            share_id: share_id.map(str::to_owned),
            memory: ShareMemory {
                used: 7,
                peak: Some(PEAK),
            },
            utilization: Time { gpu: Some(150) },
            idle_seconds: Some(9),
            groups: vec![GroupReading {
                pod: Some("pod".into()),
                used: 5,
                utilization: Time { gpu: Some(50) },
            }],
        }
    }

    #[test]
    fn what_the_api_says_of_a_node_is_read() {
        let gpu = api::GpuUsage {
            uuid: "GPU-a".into(),
            memory: Some(api::Memory {
                used: 30,
                ..api::Memory::default()
            }),
            utilization: utilization(4_160),
            shares: vec![share(Some("s"))],
            partitions: vec![api::PartitionUsage {
                shares: vec![share(None)],
                ..api::PartitionUsage::default()
            }],
            ..api::GpuUsage::default()
        };
        let lost = api::GpuUsage {
            problem: Some("lost".into()),
            ..api::GpuUsage::default()
        };
        let object = NodeUsageObject {
            usage: Some(api::NodeUsage {
                gpus: vec![gpu, lost],
                ..api::NodeUsage::default()
            }),
            ..NodeUsageObject::default()
        };
        let text = serde_json::to_string(&object).unwrap();
        let read: NodeReading = serde_json::from_str(&text).unwrap();
        let gpus = read.gpus.unwrap();
        let first = GpuReading {
            uuid: "GPU-a".into(),
            memory: Some(Memory { used: 30 }),
            utilization: Time { gpu: Some(4_160) },
            shares: vec![read_share(Some("s"))],
            partitions: vec![PartitionReading {
                shares: vec![read_share(None)],
            }],
            problem: None,
        };
        assert_eq!(gpus[0], first);
        assert_eq!(gpus[0].all_shares().count(), 2);
        assert_eq!(
            (gpus[1].memory, gpus[1].problem.as_deref()),
            (None, Some("lost"))
        );
    }

    #[test]
    fn what_the_api_says_of_a_silent_node_and_of_a_claim_is_read() {
        let silent = NodeUsageObject {
            problem: Some("no answer".into()),
            ..NodeUsageObject::default()
        };
        let read: NodeReading =
            serde_json::from_str(&serde_json::to_string(&silent).unwrap()).unwrap();
        assert_eq!(
            (read.gpus, read.problem.as_deref()),
            (None, Some("no answer"))
        );
        let claim = ClaimUsage {
            devices: vec![DeviceUsage {
                unix_millis: 7,
                gpu_uuid: "GPU-a".into(),
                product_name: "H100".into(),
                partition: None,
                share: share(Some("s")),
            }],
            problem: Some("a part".into()),
            ..ClaimUsage::default()
        };
        let read: ClaimReading =
            serde_json::from_str(&serde_json::to_string(&claim).unwrap()).unwrap();
        assert_eq!(read.devices, [read_share(Some("s"))]);
        assert_eq!(read.problem.as_deref(), Some("a part"));
    }
}
