//! How much of a device's capacities a request takes: `consumable_capacity.go` of Kubernetes' allocator.

use std::collections::BTreeMap;

use k8s_openapi::api::resource::v1::{CapacityRequestPolicyRange, Device, DeviceCapacity};
use tranche_api::Quantity;
use tranche_api::quantity::Format;

use super::problem::Problem;

/// Amounts by the capacity's name.
pub(super) type Amounts<'a> = BTreeMap<&'a str, Quantity>;

/// Why a request does not get a device's capacities.
#[derive(Clone, Copy, Debug)]
pub(super) enum Shortage<'a> {
    /// The device does not have the requested capacity.
    Missing(&'a str),
    /// The request policy allows no such amount.
    Policy {
        name: &'a str,
        wanted: Quantity,
        most: Option<Quantity>,
    },
    /// More than is left.
    Short {
        name: &'a str,
        wanted: Quantity,
        left: Quantity,
        total: Quantity,
    },
}

/// What a request takes of each capacity, or why the device has too little. `used` is what others take.
pub(super) fn take<'a>(
    device: &'a Device,
    requested: &Amounts<'a>,
    used: impl Fn(&str) -> Result<Quantity, Problem>,
) -> Result<Result<Amounts<'a>, Shortage<'a>>, Problem> {
    let own = |name: &str| {
        device
            .capacity
            .as_ref()
            .is_some_and(|it| it.contains_key(name))
    };
    if let Some(name) = requested.keys().find(|name| !own(name)) {
        return Ok(Err(Shortage::Missing(name)));
    }
    let capacities = device.capacity.iter().flatten();
    let mut taken = Amounts::new();
    // An amount that cannot be represented ends the allocation, whatever else is short.
    for (name, capacity) in capacities.clone() {
        let amount = self::consumed(name, capacity, requested.get(name.as_str()).copied())?;
        taken.insert(name, amount);
    }
    for (name, capacity) in capacities {
        let Some(wanted) = taken.get(name.as_str()).copied() else {
            continue;
        };
        if let Policy::Forbids(most) = self::policy(capacity, wanted)? {
            return Ok(Err(Shortage::Policy { name, wanted, most }));
        }
        let total = self::parse(&capacity.value)?;
        let left = total.checked_sub(used(name)?).map_err(Problem::unjudged)?;
        if wanted > left {
            return Ok(Err(Shortage::Short {
                name,
                wanted,
                left,
                total,
            }));
        }
    }
    Ok(Ok(taken))
}

pub(super) fn parse(
    wire: &k8s_openapi::apimachinery::pkg::api::resource::Quantity,
) -> Result<Quantity, Problem> {
    Quantity::try_from(wire).map_err(Problem::unjudged)
}

/// `calculateConsumedCapacity`: the default, or the request rounded up.
fn consumed(
    name: &str,
    capacity: &DeviceCapacity,
    requested: Option<Quantity>,
) -> Result<Quantity, Problem> {
    let policy = capacity.request_policy.as_ref();
    let amount = match (requested, policy) {
        (None, policy) => {
            let default = policy.and_then(|policy| policy.default.as_ref());
            self::parse(default.unwrap_or(&capacity.value))?
        }
        (Some(requested), None) => requested,
        (Some(requested), Some(policy)) => match (&policy.valid_range, &policy.valid_values) {
            (Some(range), _) => self::round_up(name, requested, range)?,
            (None, Some(listed)) => {
                let values = listed
                    .iter()
                    .map(self::parse)
                    .collect::<Result<Vec<_>, _>>()?;
                let fitting = values.into_iter().find(|value| requested <= *value);
                fitting.unwrap_or(requested)
            }
            (None, None) => requested,
        },
    };
    if amount < Quantity::ZERO {
        return Err(Problem::stops(format!("capacity {name:?} is negative")));
    }
    Ok(amount)
}

/// The next amount at or above a request: the minimum plus whole steps.
fn round_up(
    name: &str,
    requested: Quantity,
    range: &CapacityRequestPolicyRange,
) -> Result<Quantity, Problem> {
    let least = self::parse(&range.min)?;
    if requested < least {
        return Ok(least);
    }
    let Some(step) = &range.step else {
        return Ok(requested);
    };
    let step = self::parse(step)?;
    let too_large = || {
        let message = "capacity request cannot be represented in the device's range arithmetic";
        Problem::stops(format!("capacity {name:?}: {message}: {requested}"))
    };
    let whole = self::whole(requested).ok_or_else(too_large)?;
    let (Some(least), Some(width)) = (self::whole(least), self::whole(step)) else {
        return Err(Problem::unjudged(format!("the range of capacity {name:?}")));
    };
    let steps = whole.saturating_sub(least).div_ceil(width.max(1));
    let rounded = steps
        .checked_mul(width)
        .and_then(|above| above.checked_add(least))
        .filter(|rounded| i64::try_from(*rounded).is_ok())
        .ok_or_else(too_large)?;
    Ok(match step.format() {
        Format::BinarySi => Quantity::from_bytes(rounded),
        _ => Quantity::from_count(rounded),
    })
}

/// An amount as a range counts it: a whole number that fits in a Go `int64`, because `DRAFractionalCapacityRange` is off by default.
fn whole(amount: Quantity) -> Option<u64> {
    let count = amount.to_count_rounded_up().ok()?;
    i64::try_from(count).ok().map(|_| count)
}

/// Whether the request policy allows an amount.
enum Policy {
    Allows,
    /// It allows at most this.
    Forbids(Option<Quantity>),
}

fn policy(capacity: &DeviceCapacity, amount: Quantity) -> Result<Policy, Problem> {
    let Some(policy) = &capacity.request_policy else {
        return Ok(Policy::Allows);
    };
    if let Some(default) = &policy.default
        && self::parse(default)? == amount
    {
        return Ok(Policy::Allows);
    }
    if let Some(range) = &policy.valid_range {
        let most = range.max.as_ref().map(self::parse).transpose()?;
        if most.is_some_and(|most| amount > most) {
            return Ok(Policy::Forbids(most));
        }
        let Some(step) = &range.step else {
            return Ok(Policy::Allows);
        };
        let (Some(amount), Some(least), Some(step)) = (
            self::whole(amount),
            self::whole(self::parse(&range.min)?),
            self::whole(self::parse(step)?),
        ) else {
            return Ok(Policy::Forbids(most));
        };
        let steps = i128::from(amount) - i128::from(least);
        let on_step = step > 0 && steps % i128::from(step) == 0;
        if !on_step {
            return Ok(Policy::Forbids(most));
        }
    }
    let listed = policy.valid_values.as_deref();
    if let Some(listed) = listed.filter(|it| !it.is_empty() && policy.valid_range.is_none()) {
        let values = listed
            .iter()
            .map(self::parse)
            .collect::<Result<Vec<_>, _>>()?;
        if !values.contains(&amount) {
            return Ok(Policy::Forbids(values.iter().max().copied()));
        }
    }
    Ok(Policy::Allows)
}
