//! The pools of devices that a node can use: `pools_incubating.go` of Kubernetes' allocator.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{Device, ResourceSlice};
use tranche_api::Quantity;

use super::capacity;
use super::node;
use super::problem::Problem;

/// A pool of one driver, as one node sees it.
#[derive(Debug)]
pub(super) struct Pool<'a> {
    pub driver: &'a str,
    pub name: &'a str,
    pub content: Content<'a>,
}

#[derive(Debug)]
pub(super) enum Content<'a> {
    Ready(Ready<'a>),
    /// There are fewer slices than the driver announces.
    Incomplete {
        seen: usize,
        expected: i64,
    },
    /// No device of it is allocated.
    Invalid(String),
}

#[derive(Debug)]
pub(super) struct Ready<'a> {
    /// In the order of allocation.
    pub devices: Vec<PoolDevice<'a>>,
    /// Devices for other nodes only; they may take the same counters.
    pub elsewhere: Vec<&'a Device>,
    /// Counters by set.
    pub counters: BTreeMap<&'a str, BTreeMap<&'a str, Quantity>>,
}

#[derive(Debug)]
pub(super) struct PoolDevice<'a> {
    pub device: &'a Device,
    /// Whether the slice has devices for different nodes.
    pub selects_nodes: bool,
}

/// The pools in the order of allocation.
pub(super) fn gather<'a>(
    slices: &'a [ResourceSlice],
    node: &Node,
) -> Result<Vec<Pool<'a>>, Problem> {
    // For each pool, the slices of the newest generation that this node can use.
    let mut pools: BTreeMap<(&str, &str), Vec<&ResourceSlice>> = BTreeMap::new();
    for slice in slices {
        if self::has_groups(slice) || !self::is_for(slice, node) {
            continue;
        }
        let key = (&*slice.spec.driver, &*slice.spec.pool.name);
        let known = pools.entry(key).or_default();
        let newest = known.first().map(|first| first.spec.pool.generation);
        match newest.map(|newest| slice.spec.pool.generation.cmp(&newest)) {
            Some(std::cmp::Ordering::Less) => {}
            Some(std::cmp::Ordering::Greater) => *known = vec![slice],
            Some(std::cmp::Ordering::Equal) | None => known.push(slice),
        }
    }
    let mut result = Vec::new();
    for ((driver, name), own) in pools {
        if let Some(content) = self::content(slices, (driver, name), own)? {
            result.push(Pool {
                driver,
                name,
                content,
            });
        }
    }
    // The sort is stable: pools stay in the order of driver and name, those with binding conditions come last.
    result.sort_by_key(Pool::binds);
    Ok(result)
}

impl Pool<'_> {
    fn binds(&self) -> bool {
        let Content::Ready(ready) = &self.content else {
            return false;
        };
        let mut devices = ready.devices.iter();
        devices.any(|it| it.device.binding_conditions.is_some())
    }
}

/// Groups of compatible devices are an alpha feature: the allocator does not see such slices.
fn has_groups(slice: &ResourceSlice) -> bool {
    let devices = slice.spec.devices.iter().flatten();
    let mut counters = devices.flat_map(|device| device.consumes_counters.iter().flatten());
    counters.any(|it| {
        it.compatibility_groups
            .as_ref()
            .is_some_and(|it| !it.is_empty())
    })
}

fn is_for(slice: &ResourceSlice, node: &Node) -> bool {
    let spec = &slice.spec;
    if spec.node_name.is_some() || spec.all_nodes == Some(true) || spec.node_selector.is_some() {
        return self::selected(
            node,
            spec.node_name.as_deref(),
            spec.all_nodes,
            spec.node_selector.as_ref(),
        );
    }
    let mut devices = spec.devices.iter().flatten();
    spec.per_device_node_selection == Some(true) && devices.any(|it| self::device_is_for(it, node))
}

/// Whether a device that selects its nodes itself is for a node.
pub(super) fn device_is_for(device: &Device, node: &Node) -> bool {
    self::selected(
        node,
        device.node_name.as_deref(),
        device.all_nodes,
        device.node_selector.as_ref(),
    )
}

fn selected(
    node: &Node,
    name: Option<&str>,
    all: Option<bool>,
    selector: Option<&k8s_openapi::api::core::v1::NodeSelector>,
) -> bool {
    match (name.filter(|name| !name.is_empty()), all, selector) {
        (Some(name), _, _) => node.metadata.name.as_deref() == Some(name),
        (None, Some(true), _) => true,
        (None, _, Some(selector)) => node::selects(selector, node),
        (None, _, None) => false,
    }
}

/// `None` if the driver is replacing the slices with slices that are not for this node.
fn content<'a>(
    slices: &'a [ResourceSlice],
    (driver, pool): (&str, &str),
    mut own: Vec<&'a ResourceSlice>,
) -> Result<Option<Content<'a>>, Problem> {
    let Some(first) = own.first() else {
        return Ok(None);
    };
    let expected = first.spec.pool.resource_slice_count;
    let generation = first.spec.pool.generation;
    let complete = |seen: usize| i64::try_from(seen).is_ok_and(|seen| seen == expected);
    let mut elsewhere: Vec<&ResourceSlice> = Vec::new();
    if !complete(own.len()) {
        let same =
            |slice: &&ResourceSlice| slice.spec.driver == driver && slice.spec.pool.name == pool;
        let all: Vec<&ResourceSlice> = slices.iter().filter(same).collect();
        if all.iter().any(|it| it.spec.pool.generation > generation) {
            return Ok(None);
        }
        let current: Vec<&ResourceSlice> = all
            .into_iter()
            .filter(|it| it.spec.pool.generation == generation && !self::has_groups(it))
            .collect();
        if !complete(current.len()) {
            let seen = current.len();
            return Ok(Some(Content::Incomplete { seen, expected }));
        }
        let is_own = |slice: &&ResourceSlice| own.iter().any(|it| std::ptr::eq(*it, *slice));
        elsewhere = current.into_iter().filter(|it| !is_own(it)).collect();
    }
    own.sort_by(|a, b| a.metadata.name.cmp(&b.metadata.name));
    self::build(&own, &elsewhere).map(Some)
}

fn build<'a>(
    own: &[&'a ResourceSlice],
    elsewhere: &[&'a ResourceSlice],
) -> Result<Content<'a>, Problem> {
    let mut counters: BTreeMap<&str, BTreeMap<&str, Quantity>> = BTreeMap::new();
    let mut duplicate = None;
    for set in own
        .iter()
        .chain(elsewhere)
        .flat_map(|it| it.spec.shared_counters.iter().flatten())
    {
        let mut amounts = BTreeMap::new();
        for (name, counter) in &set.counters {
            amounts.insert(name.as_str(), capacity::parse(&counter.value)?);
        }
        if counters.insert(&set.name, amounts).is_some() {
            duplicate = duplicate.or(Some(&set.name));
        }
    }
    // A slice has either counters or devices.
    let without_counters = |slice: &&&ResourceSlice| {
        slice
            .spec
            .shared_counters
            .as_ref()
            .is_none_or(Vec::is_empty)
    };
    let mut devices: Vec<PoolDevice<'a>> = Vec::new();
    let mut names = BTreeSet::new();
    for slice in own.iter().filter(without_counters) {
        for device in slice.spec.devices.iter().flatten() {
            if !names.insert(&device.name) {
                let problem = format!("duplicate device name {}", device.name);
                return Ok(Content::Invalid(problem));
            }
            devices.push(PoolDevice {
                device,
                selects_nodes: slice.spec.per_device_node_selection == Some(true),
            });
        }
    }
    if let Some(name) = duplicate {
        let problem = format!("duplicate counter set name {name}");
        return Ok(Content::Invalid(problem));
    }
    let elsewhere: Vec<&Device> = elsewhere
        .iter()
        .filter(without_counters)
        .flat_map(|slice| slice.spec.devices.iter().flatten())
        .collect();
    let all = devices
        .iter()
        .map(|it| it.device)
        .chain(elsewhere.iter().copied());
    for consumption in all.flat_map(|it| it.consumes_counters.iter().flatten()) {
        let Some(set) = counters.get(consumption.counter_set.as_str()) else {
            let problem = format!("counter set {} not found", consumption.counter_set);
            return Ok(Content::Invalid(problem));
        };
        let unknown = consumption
            .counters
            .keys()
            .find(|it| !set.contains_key(it.as_str()));
        if let Some(name) = unknown {
            let set = &consumption.counter_set;
            let problem = format!("counter {name} not found in counter set {set}");
            return Ok(Content::Invalid(problem));
        }
    }
    Ok(Content::Ready(Ready {
        devices,
        elsewhere,
        counters,
    }))
}
