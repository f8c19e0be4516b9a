//! ResourceClaims, made through the API and allocated as the scheduler does.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::Context;
use futures::{StreamExt, TryStreamExt, stream};
use k8s_openapi::api::resource::v1::{
    AllocationResult, CapacityRequirements, DeviceAllocationResult, DeviceClaim, DeviceRequest,
    DeviceRequestAllocationResult, ExactDeviceRequest, ResourceClaim, ResourceClaimSpec,
    ResourceClaimStatus,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use kube::api::{ObjectMeta, PostParams};
use kube::{Api, ResourceExt};
use tranche_api::Tier;
use tranche_api::names::{DRIVER, capacity};
use uuid::Uuid;

use crate::cluster::{Cluster, NAMESPACE};
use crate::dra::ClaimId;

/// The one request of every claim.
pub const REQUEST: &str = "gpu";
/// A small size, so that only the percents limit the number of shares on a GPU.
const MEMORY: &str = "64Mi";
const CORES: &str = "1";
/// The most concurrent API calls while claims are made.
const AT_ONCE: usize = 16;

/// The device that is allocated to a claim.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Share {
    /// One percent of the GPU whose exclusive device has this name.
    Capped(Arc<str>),
    /// A place on the GPU whose exclusive device has this name.
    Timeshared(Arc<str>),
    /// One percent of the threads of the GPU whose exclusive device has this name.
    Concurrent(Arc<str>),
    /// The exclusive device of this name.
    Exclusive(Arc<str>),
    /// The partition of this name.
    Partition(Arc<str>),
}

impl Share {
    #[must_use]
    pub const fn tier(&self) -> Tier {
        match self {
            Self::Capped(_) => Tier::Capped,
            Self::Timeshared(_) => Tier::Timeshared,
            Self::Concurrent(_) => Tier::Concurrent,
            Self::Exclusive(_) => Tier::Exclusive,
            Self::Partition(_) => Tier::Partition,
        }
    }

    fn device(&self) -> String {
        match self {
            Self::Exclusive(device) | Self::Partition(device) => device.to_string(),
            Self::Capped(gpu) | Self::Timeshared(gpu) | Self::Concurrent(gpu) => {
                format!("{gpu}-{}", self.tier())
            }
        }
    }

    fn requested(&self) -> BTreeMap<String, Quantity> {
        let sizes: &[_] = match self {
            Self::Capped(_) | Self::Concurrent(_) => {
                &[(capacity::MEMORY, MEMORY), (capacity::CORES, CORES)]
            }
            Self::Timeshared(_) | Self::Exclusive(_) | Self::Partition(_) => &[],
        };
        sizes
            .iter()
            .map(|(name, size)| ((*name).to_owned(), Quantity((*size).to_owned())))
            .collect()
    }

    /// The requested capacities, with those that the device's request policies add.
    fn consumed(&self) -> BTreeMap<String, Quantity> {
        let mut consumed = self.requested();
        consumed.insert(capacity::SHARERS.to_owned(), Quantity("1".to_owned()));
        consumed
    }
}

/// The GPUs of the claims, chosen so that the node's check of each GPU's sums accepts all of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// GPUs of the claims that are timed.
    pub timed: Vec<Share>,
    /// GPUs of the claims that stay prepared meanwhile.
    pub held: Vec<Share>,
}

impl Placement {
    /// Uses `gpus`, at least two. Timed claims are capped shares of all GPUs but the last. Held
    /// ones are capped shares too as far as they fit beside the timed ones (a GPU has 100 percent);
    /// the rest is timeshared on the last GPU.
    #[must_use]
    pub fn new(gpus: &[Arc<str>], timed: usize, held: usize) -> Self {
        let (last, first) = gpus.split_last().expect("at least two GPUs");
        let spread = |count: usize| first.iter().cycle().take(count).cloned();
        let room = first.len() * 100 - timed.next_multiple_of(first.len());
        let capped = held.min(room);
        Self {
            timed: spread(timed).map(Share::Capped).collect(),
            held: spread(capped)
                .map(Share::Capped)
                .chain(std::iter::repeat_n(
                    Share::Timeshared(Arc::clone(last)),
                    held - capped,
                ))
                .collect(),
        }
    }
}

/// Makes a claim for each share and allocates it on the cluster's node.
pub async fn make(
    cluster: &Cluster,
    prefix: &str,
    shares: &[Share],
) -> anyhow::Result<Vec<ClaimId>> {
    let api = Api::namespaced(cluster.client.clone(), NAMESPACE);
    let pool = cluster.pool();
    stream::iter(shares.iter().enumerate().map(|(index, share)| {
        let name = format!("{prefix}-{index}");
        let (api, pool) = (&api, &pool);
        async move {
            allocate(api, &name, pool, share)
                .await
                .with_context(|| format!("claim {NAMESPACE}/{name}"))
        }
    }))
    .buffered(AT_ONCE)
    .try_collect()
    .await
}

/// `reservedFor` stays empty: it would have to name a pod, and controllers release a claim whose pod does not exist. Drivers do not
/// read it.
async fn allocate(
    api: &Api<ResourceClaim>,
    name: &str,
    pool: &str,
    share: &Share,
) -> anyhow::Result<ClaimId> {
    let tier = share.tier();
    let mut claim = api
        .create(
            &PostParams::default(),
            &claim(name, tier.as_str(), share.requested()),
        )
        .await?;
    claim.status = Some(ResourceClaimStatus {
        allocation: Some(AllocationResult {
            devices: Some(DeviceAllocationResult {
                results: Some(vec![DeviceRequestAllocationResult {
                    request: REQUEST.to_owned(),
                    driver: DRIVER.to_owned(),
                    pool: pool.to_owned(),
                    device: share.device(),
                    share_id: tier.is_shared().then(|| Uuid::new_v4().to_string()),
                    consumed_capacity: tier.is_shared().then(|| share.consumed()),
                    ..DeviceRequestAllocationResult::default()
                }]),
                ..DeviceAllocationResult::default()
            }),
            ..AllocationResult::default()
        }),
        ..ResourceClaimStatus::default()
    });
    let claim = api
        .replace_status(name, &PostParams::default(), &claim)
        .await?;
    Ok(ClaimId {
        namespace: NAMESPACE.to_owned(),
        uid: claim.uid().context("the API server gave it no UID")?,
        name: name.to_owned(),
    })
}

/// A claim for one device of a tier, or a share of that size.
#[must_use]
pub fn claim(name: &str, tier: &str, size: BTreeMap<String, Quantity>) -> ResourceClaim {
    ResourceClaim {
        metadata: ObjectMeta {
            name: Some(name.to_owned()),
            ..ObjectMeta::default()
        },
        spec: Some(spec(tier, size)),
        status: None,
    }
}

/// The request of such a claim.
#[must_use]
pub fn spec(tier: &str, size: BTreeMap<String, Quantity>) -> ResourceClaimSpec {
    ResourceClaimSpec {
        devices: Some(DeviceClaim {
            requests: Some(vec![DeviceRequest {
                name: REQUEST.to_owned(),
                exactly: Some(ExactDeviceRequest {
                    device_class_name: format!("{tier}.{DRIVER}"),
                    capacity: (!size.is_empty()).then_some(CapacityRequirements {
                        requests: Some(size),
                    }),
                    ..ExactDeviceRequest::default()
                }),
                ..DeviceRequest::default()
            }]),
            ..DeviceClaim::default()
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn percents(placement: &Placement, gpu: &Arc<str>) -> usize {
        [&placement.timed, &placement.held]
            .into_iter()
            .flatten()
            .filter(|share| **share == Share::Capped(Arc::clone(gpu)))
            .count()
    }

    #[test]
    fn no_gpu_gets_more_than_it_has_and_none_serves_two_tiers() {
        for gpus in 2..=8 {
            let names: Vec<Arc<str>> = (0..gpus).map(|n| format!("gpu-{n:08x}").into()).collect();
            for (timed, held) in [(1, 0), (8, 0), (32, 200), (33, 700)] {
                let placement = Placement::new(&names, timed, held);
                assert_eq!((placement.timed.len(), placement.held.len()), (timed, held));
                for gpu in &names {
                    let capped = percents(&placement, gpu);
                    assert!(capped <= 100, "{gpus} GPUs, {timed}, {held}: {capped}");
                    let timeshared = placement.held.contains(&Share::Timeshared(Arc::clone(gpu)));
                    assert!(!timeshared || capped == 0);
                }
            }
        }
    }

    #[test]
    fn what_is_consumed_has_the_place_that_nobody_asks_for() {
        let share = Share::Capped("gpu-4d8c1f9e".into());
        assert_eq!(share.device(), "gpu-4d8c1f9e-capped");
        assert_eq!(
            share.consumed().keys().collect::<Vec<_>>(),
            ["cores", "memory", "sharers"]
        );
        assert!(!share.requested().contains_key("sharers"));
        assert_eq!(Share::Timeshared("gpu-4d8c1f9e".into()).consumed().len(), 1);
    }
}
