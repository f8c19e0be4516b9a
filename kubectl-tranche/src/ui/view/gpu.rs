//! A GPU as the page shows it: a bar, and the same facts in words.

use serde::Serialize;
use tranche_api::Tier;

use super::cost::{self, AmountParts};
use super::used;
use crate::cost::Prices;
use crate::model::{AllocatedDevice, Gpu, Room, SharesRoom, Tenant, short};
use crate::money::Money;
use crate::output::bytes;
use crate::top::size;

/// The length of a bar.
const LENGTH: u64 = 1000;

/// A node and its GPUs.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct NodeView {
    /// The GPU driver's version.
    pub driver: Option<String>,
    pub plugin: Option<String>,
    /// What is wrong with it.
    pub problems: Vec<String>,
    pub gpus: Vec<GpuView>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct GpuView {
    /// `GPU-…`.
    pub uuid: String,
    /// Its number, or the beginning of its UUID.
    pub name: String,
    pub product: String,
    pub pci: String,
    /// All of its memory.
    pub memory: String,
    /// The tier that it serves; `None` where no claim has any of it.
    pub tier: Option<Tier>,
    /// The tiers in which it is offered.
    pub offered: Vec<Tier>,
    /// What is free of it, in words.
    pub room: String,
    /// Whether it is offered and no claim has any of it.
    pub is_free: bool,
    /// The bar of its memory.
    pub bar: Vec<Segment>,
    /// The claims that have parts of it.
    pub tenants: Vec<TenantView>,
    /// What is not offered, and why.
    pub withheld: Vec<String>,
    /// The price of an hour; `None` for a product without a price.
    pub price: Option<String>,
    /// Whether the price is a default of this release.
    pub is_default_price: bool,
    /// The free part of the price.
    pub free_price: Option<String>,
    /// The stranded part of the price.
    pub stranded_price: Option<String>,
}

/// A part of a bar, in thousandths of its length.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Segment {
    /// The tier of its holders; `None` where it is stranded.
    pub tier: Option<Tier>,
    /// Where it begins.
    pub at: u64,
    /// How long it is.
    pub size: u64,
}

/// A claim's part of a GPU.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct TenantView {
    pub namespace: String,
    pub claim: String,
    /// The key of its use in the record `use/NODE`.
    pub use_key: String,
    /// The pods for which it is reserved.
    pub pods: Vec<String>,
    pub tier: Tier,
    /// What it has: `20Gi · 25 %`, `3g.40gb`, `whole GPU`.
    pub has: String,
    pub device: String,
    /// The MIG device's UUID.
    pub mig: Option<String>,
    /// Whether its node prepared it.
    pub is_ready: bool,
    /// Whether it only observes.
    pub is_admin: bool,
    /// What it costs for an hour.
    pub cost: Option<String>,
}

/// What a GPU adds to the cluster's sums.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GpuSums {
    /// Its price for an hour; `None` for a product without a price.
    pub price: Option<Money>,
    /// Whether the price is a default.
    pub is_default: bool,
    /// The parts of the price.
    pub cost: AmountParts,
    /// The parts of the GPU: a GPU is a million.
    pub parts: AmountParts,
}

impl GpuSums {
    #[must_use]
    pub fn new(gpu: &Gpu, prices: &Prices) -> Self {
        let known = prices.of(&gpu.product);
        let price = known.map(|it| it.price);
        Self {
            price,
            is_default: known.is_some_and(|it| it.is_default),
            cost: price.map(|it| cost::parts(gpu, it)).unwrap_or_default(),
            parts: cost::parts(gpu, cost::GPU),
        }
    }
}

impl GpuView {
    #[must_use]
    pub fn new(gpu: &Gpu, sums: &GpuSums) -> Self {
        let money = |amount: Money| sums.price.map(|_| amount.to_string());
        let mut costs = sums.cost.tenants.iter().copied();
        let tenants: Vec<TenantView> = gpu
            .held
            .iter()
            .flat_map(|held| held.tenants.iter().map(move |tenant| (held, tenant)))
            .map(|(held, tenant)| {
                let cost = if tenant.device.is_admin {
                    None
                } else {
                    costs.next().and_then(money)
                };
                TenantView::new(held, tenant, cost)
            })
            .collect();
        let withheld = gpu.withheld.iter().map(|it| {
            let tiers: Vec<String> = it.tiers.iter().map(ToString::to_string).collect();
            match tiers.as_slice() {
                [] => it.message.clone(),
                tiers => format!("{}: {}", tiers.join(", "), it.message),
            }
        });
        Self {
            uuid: gpu.uuid.clone(),
            name: gpu.index.map_or_else(
                || short(&gpu.uuid).to_owned(),
                |index| format!("GPU {index}"),
            ),
            product: gpu.product.clone(),
            pci: gpu.pci_bus_id.clone(),
            memory: bytes(gpu.memory),
            tier: gpu.tier,
            offered: gpu.offered.clone(),
            room: room(&gpu.room),
            is_free: gpu.room == Room::All,
            bar: bar(gpu),
            tenants,
            withheld: withheld.collect(),
            price: sums.price.map(|price| price.to_string()),
            is_default_price: sums.is_default,
            free_price: money(sums.cost.free),
            stranded_price: money(sums.cost.stranded),
        }
    }
}

impl TenantView {
    fn new(held: &AllocatedDevice, tenant: &Tenant, cost: Option<String>) -> Self {
        let device = &tenant.device;
        Self {
            namespace: tenant.namespace.clone(),
            claim: tenant.claim.clone(),
            use_key: used::key(&tenant.part()),
            pods: tenant.pods.clone(),
            tier: device.tier,
            has: has(held, tenant),
            device: device.device.clone(),
            mig: device.mig_uuid.clone(),
            is_ready: device.is_ready,
            is_admin: device.is_admin,
            cost,
        }
    }
}

/// What a claim has, in words.
fn has(held: &AllocatedDevice, tenant: &Tenant) -> String {
    let device = &tenant.device;
    let sizes: Vec<String> = [
        device.memory.map(bytes),
        device.cores.map(|cores| format!("{cores} %")),
    ]
    .into_iter()
    .flatten()
    .collect();
    match (&held.profile, device.tier) {
        (Some(profile), Tier::Partition) => profile.clone(),
        (Some(profile), _) => format!("{} of {profile}", sizes.join(" · ")),
        (None, Tier::Exclusive | Tier::Passthrough) => "whole GPU".to_owned(),
        (None, Tier::Timeshared) => "a turn".to_owned(),
        (None, _) => sizes.join(" · "),
    }
}

/// What is free of a GPU, in words.
fn room(room: &Room) -> String {
    match room {
        Room::All => "all of it is free".to_owned(),
        Room::Nothing => "nothing is free".to_owned(),
        Room::Places { free, whole } => format!("{free} of {whole} places free"),
        Room::Shares(shares) => shares_room(shares),
        Room::Slices(slices) => {
            let stranded = match slices.stranded_compute {
                0 => String::new(),
                number => format!(", {number} stranded"),
            };
            let fits = match slices.fits.as_slice() {
                [] => String::new(),
                profiles => format!("; fits {}", profiles.join(", ")),
            };
            let (free, whole) = (slices.free_compute, slices.compute);
            format!("{free} of {whole} slices free{stranded}{fits}")
        }
        Room::NotOffered => "not offered".to_owned(),
        Room::Unknown => "what is free is not known".to_owned(),
    }
}

fn shares_room(shares: &SharesRoom) -> String {
    let memory = (shares.free_memory > 0).then(|| size(shares.free_memory));
    let cores = (shares.free_cores > 0).then(|| format!("{} %", shares.free_cores));
    match (memory, cores) {
        (None, None) => "nothing is free".to_owned(),
        (Some(memory), None) => format!("{memory} free, stranded: no cores are left"),
        (None, Some(cores)) => format!("{cores} free, stranded: no memory is left"),
        (Some(memory), Some(cores)) if shares.free_places == 0 => {
            format!("{memory} and {cores} free, stranded: no place is left")
        }
        (Some(memory), Some(cores)) => {
            let amounts: Vec<String> = [
                (shares.stranded_memory > 0).then(|| size(shares.stranded_memory)),
                (shares.stranded_cores > 0).then(|| format!("{} %", shares.stranded_cores)),
            ]
            .into_iter()
            .flatten()
            .collect();
            let stranded = match amounts.as_slice() {
                [] => String::new(),
                amounts => format!(", {} of it stranded", amounts.join(" and ")),
            };
            format!("{memory} and {cores} free{stranded}")
        }
    }
}

/// The bar of a GPU's memory. What no segment covers is free.
fn bar(gpu: &Gpu) -> Vec<Segment> {
    let held = gpu.held.iter().filter(|held| count(held) > 0);
    match &gpu.room {
        Room::Slices(slices) => {
            let whole = u64::from(slices.memory).max(1);
            let mut bar: Vec<Segment> = held
                .flat_map(|held| {
                    let size = slices_of(held, gpu.memory, whole);
                    let start = held.slice.map_or(0, u64::from);
                    within(held, start * LENGTH / whole, size * LENGTH / whole)
                })
                .collect();
            if slices.stranded_memory == slices.free_memory {
                bar.extend(gaps(&bar));
            }
            bar.sort_by_key(|segment| segment.at);
            bar
        }
        Room::Places { whole, .. } => {
            let size = LENGTH / (*whole).max(1);
            let segments = held.flat_map(|held| vec![held.tier; count(held)]).zip(0..);
            segments
                .map(|(tier, nth)| Segment {
                    tier: Some(tier),
                    at: nth * size,
                    size,
                })
                .collect()
        }
        _ => held.flat_map(|held| within(held, 0, LENGTH)).collect(),
    }
}

fn count(held: &AllocatedDevice) -> usize {
    held.holders().count()
}

/// Memory slices of a partition, at least one.
fn slices_of(held: &AllocatedDevice, memory: u64, whole: u64) -> u64 {
    let of_memory = u128::from(held.memory) * u128::from(whole) + u128::from(memory) / 2;
    let slices = of_memory.checked_div(memory.into()).unwrap_or_default();
    u64::try_from(slices).unwrap_or(whole).clamp(1, whole)
}

/// The tenants of a device that has `size` of the bar from `at` on.
fn within(held: &AllocatedDevice, at: u64, size: u64) -> Vec<Segment> {
    let Some(room) = &held.room else {
        let number = count(held).max(1) as u64;
        let sizes = (0..number).map(|_| size / number);
        return row(held.tier, at, sizes);
    };
    let of = |memory: u64| {
        let product = u128::from(memory) * u128::from(size);
        let part = product.checked_div(room.memory.into()).unwrap_or_default();
        u64::try_from(part).unwrap_or(size).min(size)
    };
    let sizes = held
        .holders()
        .map(|it| of(it.device.memory.unwrap_or_default()));
    let mut segments = row(held.tier, at, sizes);
    let end = segments.last().map_or(at, |it| it.at + it.size);
    let left = (at + size).saturating_sub(end);
    let stranded = of(room.stranded_memory).min(left);
    if stranded > 0 {
        segments.push(Segment {
            tier: None,
            at: at + size - stranded,
            size: stranded,
        });
    }
    segments
}

fn row(tier: Tier, at: u64, sizes: impl Iterator<Item = u64>) -> Vec<Segment> {
    let mut next = at;
    sizes
        .map(|size| {
            let segment = Segment {
                tier: Some(tier),
                at: next,
                size,
            };
            next += size;
            segment
        })
        .collect()
}

/// The gaps between segments, as stranded segments.
fn gaps(bar: &[Segment]) -> Vec<Segment> {
    let mut sorted: Vec<&Segment> = bar.iter().collect();
    sorted.sort_by_key(|segment| segment.at);
    let mut gaps = Vec::new();
    let mut next = 0;
    for segment in sorted {
        // A difference of one comes from rounding.
        if segment.at > next + 1 {
            gaps.push(Segment {
                tier: None,
                at: next,
                size: segment.at - next,
            });
        }
        next = next.max(segment.at + segment.size);
    }
    if next + 1 < LENGTH {
        gaps.push(Segment {
            tier: None,
            at: next,
            size: LENGTH - next,
        });
    }
    gaps
}
