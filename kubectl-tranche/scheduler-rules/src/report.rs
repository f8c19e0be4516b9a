//! The reasons: for each request, why it does not get each device of a node.

use super::capacity::Shortage;
use super::held::{Allocations, DeviceAllocations};
use super::pool::{Content, Pool};
use super::problem::Problem;
use super::request::{self, Number};
use super::search::{self, Blocked, DevicePosition, Search, Selecting};
use super::verdict::{DeviceId, DeviceReport, Holder, Obstacle, PoolProblem, RequestReport};

pub(super) fn pool_problems(pools: &[Pool<'_>]) -> Vec<PoolProblem> {
    let problems = pools.iter().filter_map(|pool| {
        let why = match &pool.content {
            Content::Ready(_) => return None,
            Content::Incomplete { seen, expected } => {
                format!("{seen} of its {expected} ResourceSlices are there")
            }
            Content::Invalid(why) => why.clone(),
        };
        Some(PoolProblem {
            driver: pool.driver.to_owned(),
            pool: pool.name.to_owned(),
            why,
        })
    });
    problems.collect()
}

pub(super) fn requests<'a>(
    search: &mut Search<'a, '_>,
    pools: &[Pool<'a>],
    held: &Allocations<'a>,
) -> Result<Vec<RequestReport>, Problem> {
    let mut reports = Vec::new();
    for claim in 0..search.claims.len() {
        for request in 0..search.claims[claim].requests.len() {
            for alternative in 0..search.claims[claim].requests[request].asks.len() {
                let mut devices = Vec::new();
                for position in search.positions() {
                    let blocked = search.alone(claim, request, alternative, position)?;
                    let device = self::id(pools, search, position);
                    let obstacle = blocked
                        .map(|it| self::obstacle(it, search, pools, held, (claim, position)));
                    devices.push(DeviceReport {
                        device,
                        obstacle: obstacle.transpose()?,
                    });
                }
                let name = search.claims[claim].name.clone();
                let ask = &search.claims[claim].requests[request].asks[alternative];
                let asks = ask.capacity.iter();
                reports.push(RequestReport {
                    claim: name,
                    request: ask.full_name(),
                    class: ask.class.metadata.name.clone().unwrap_or_default(),
                    count: match ask.number {
                        Number::Exactly(count) => Some(count),
                        Number::All => None,
                    },
                    asks: asks
                        .map(|(name, amount)| ((*name).to_owned(), *amount))
                        .collect(),
                    devices,
                });
            }
        }
    }
    Ok(reports)
}

pub(super) fn id(
    pools: &[Pool<'_>],
    search: &Search<'_, '_>,
    position: DevicePosition,
) -> DeviceId {
    let pool = &pools[position.pool];
    DeviceId {
        driver: pool.driver.to_owned(),
        pool: pool.name.to_owned(),
        device: search.device(position).name.clone(),
    }
}

fn obstacle<'a>(
    blocked: Blocked<'a>,
    search: &Search<'a, '_>,
    pools: &[Pool<'a>],
    held: &Allocations<'a>,
    (claim, position): (usize, DevicePosition),
) -> Result<Obstacle, Problem> {
    let pool = &pools[position.pool];
    let device = search.device(position);
    let own = held.of_device((pool.driver, pool.name, &device.name));
    Ok(match blocked {
        Blocked::InUse => Obstacle::InUse {
            holders: own
                .map(|own| self::holders(own, &device.name, |_| None))
                .unwrap_or_default(),
        },
        Blocked::NotSelected { by, selector } => {
            let selector = selector.to_owned();
            match by {
                Selecting::Class => Obstacle::NotOfClass { selector },
                Selecting::Request => Obstacle::NotSelected { selector },
            }
        }
        Blocked::OtherNode => Obstacle::OtherNode,
        Blocked::Capacity(Shortage::Missing(name)) => Obstacle::NoSuchCapacity {
            capacity: name.to_owned(),
        },
        Blocked::Capacity(Shortage::Policy { name, wanted, most }) => Obstacle::AgainstPolicy {
            capacity: name.to_owned(),
            wanted,
            most,
        },
        Blocked::Capacity(Shortage::Short {
            name,
            wanted,
            left,
            total,
        }) => Obstacle::TooLittle {
            capacity: name.to_owned(),
            wanted,
            left,
            total,
            holders: own
                .map(|own| self::holders(own, &device.name, |hold| hold.consumed(name)))
                .unwrap_or_default(),
        },
        Blocked::Counters {
            set,
            counter,
            wanted,
            left,
        } => Obstacle::Counters {
            counter_set: set.to_owned(),
            counter: counter.to_owned(),
            wanted,
            left,
            holders: self::takers(pool, held, set, counter)?,
        },
        Blocked::Taint(taint) => Obstacle::Taint {
            key: taint.key.clone(),
            value: taint.value.clone().filter(|value| !value.is_empty()),
            effect: taint.effect.clone(),
            rule: None,
        },
        Blocked::Constraint(number) => Obstacle::Constraint {
            constraint: search.claims[claim].constraints[number].text(),
        },
    })
}

fn holders(
    held: &DeviceAllocations<'_>,
    device: &str,
    amount: impl Fn(&super::held::DeviceAllocation<'_>) -> Option<tranche_api::Quantity>,
) -> Vec<Holder> {
    let holders = held.all().map(|hold| Holder {
        claim: request::name(hold.claim),
        device: device.to_owned(),
        amount: amount(hold),
    });
    // A holder that takes nothing blocks nothing.
    let zero = |holder: &Holder| holder.amount.is_some_and(|amount| !amount.is_positive());
    let mut holders: Vec<Holder> = holders.filter(|holder| !zero(holder)).collect();
    holders.sort();
    holders
}

/// The holders of devices that take a counter.
fn takers<'a>(
    pool: &Pool<'a>,
    held: &Allocations<'a>,
    set: &str,
    counter: &str,
) -> Result<Vec<Holder>, Problem> {
    let Content::Ready(ready) = &pool.content else {
        return Ok(Vec::new());
    };
    let mut takers = Vec::new();
    let devices = ready.devices.iter().map(|it| it.device);
    for device in devices.chain(ready.elsewhere.iter().copied()) {
        let amount = search::consumption(device, set, counter)?;
        let held = held.of_device((pool.driver, pool.name, &device.name));
        if let Some(held) = held.filter(|_| amount.is_positive()) {
            takers.extend(self::holders(held, &device.name, |_| Some(amount)));
        }
    }
    Ok(takers)
}
