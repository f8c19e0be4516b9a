//! The search for devices: it repeats the steps of `allocator_incubating.go` of Kubernetes' allocator, because their order decides
//! which devices are allocated, and what the allocator forgets when it backtracks decides what fits.

use std::cell::{OnceCell, RefCell};
use std::collections::{BTreeMap, HashMap};

use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::resource::v1::{Device, DeviceSelector, DeviceTaint};
use tranche_api::Quantity;

use super::capacity::{self, Amounts, Shortage};
use super::held::{Allocations, DeviceAllocations};
use super::pool::{self, Content, Pool, PoolDevice};
use super::problem::Problem;
use super::request::{Ask, Claim, Number};
use super::selector::{Selectors, Subject};
use super::taint;

/// The most devices of one claim.
const MOST_RESULTS: usize = 32;
/// The scheduler gives up after 10 seconds for a node; this many steps take about as long.
pub const MOST_STEPS: usize = 300_000;

/// A device: the index of its pool, and its index in the pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct DevicePosition {
    pub pool: usize,
    pub device: usize,
}

/// A device that is being allocated.
#[derive(Clone, Debug)]
pub(super) struct Chosen<'a> {
    pub position: DevicePosition,
    pub request: usize,
    pub alternative: usize,
    /// What a share takes; `None` for a whole device.
    pub consumed: Option<Amounts<'a>>,
}

/// Why a device is not allocated for a request.
#[derive(Clone, Copy, Debug)]
pub(super) enum Blocked<'a> {
    /// A claim has the whole device.
    InUse,
    /// A selector is false.
    NotSelected {
        by: Selecting,
        selector: &'a str,
    },
    /// It is for other nodes.
    OtherNode,
    Capacity(Shortage<'a>),
    Counters {
        set: &'a str,
        counter: &'a str,
        wanted: Quantity,
        left: Quantity,
    },
    Taint(&'a DeviceTaint),
    /// The number of the claim's constraint.
    Constraint(usize),
}

/// Whether a selector is the class's or the request's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Selecting {
    Class,
    Request,
}

/// Why the search ends.
enum Stop {
    /// The claim would have too many devices.
    TooMany,
    Problem(Problem),
}

impl From<Problem> for Stop {
    fn from(problem: Problem) -> Self {
        Self::Problem(problem)
    }
}

/// One device of one request.
#[derive(Clone, Copy, Debug, Default)]
struct At {
    claim: usize,
    request: usize,
    alternative: usize,
    device: usize,
}

/// Shares of one device that are being allocated.
#[derive(Debug, Default)]
struct Sharing<'a> {
    shares: usize,
    consumed: BTreeMap<&'a str, Quantity>,
}

/// What one allocation changed.
struct Undo<'a> {
    at: At,
    position: DevicePosition,
    counters: bool,
    constraints: usize,
    marked: bool,
    share: Option<Amounts<'a>>,
    recorded: bool,
}

/// The results of selectors, by claim, request, alternative and device. They do not depend on what is allocated.
pub(super) type Selections<'a> =
    RefCell<HashMap<(usize, usize, usize, DevicePosition), Option<Blocked<'a>>>>;

type Counter<'a> = (usize, &'a str, &'a str);

/// A search, with what it has chosen so far.
pub(super) struct Search<'a, 'b> {
    node: &'b Node,
    pools: &'b [Pool<'a>],
    held: &'b Allocations<'a>,
    selectors: &'b Selectors,
    /// Counters that were left before this search.
    free: Vec<BTreeMap<(&'a str, &'a str), Quantity>>,
    devices: Vec<&'b [PoolDevice<'a>]>,
    subjects: Vec<Vec<OnceCell<Subject>>>,
    selections: &'b Selections<'a>,
    /// The devices of each claim, request and alternative with `All`.
    all: HashMap<(usize, usize, usize), Vec<DevicePosition>>,
    pub claims: Vec<Claim<'a>>,
    pub chosen: Vec<Vec<Chosen<'a>>>,
    marked: HashMap<DevicePosition, Vec<usize>>,
    sharing: HashMap<DevicePosition, Sharing<'a>>,
    counters: HashMap<Counter<'a>, Quantity>,
    steps: usize,
    most_steps: usize,
}

impl<'a, 'b> Search<'a, 'b> {
    pub fn new(
        node: &'b Node,
        pools: &'b [Pool<'a>],
        held: &'b Allocations<'a>,
        selectors: &'b Selectors,
        selections: &'b Selections<'a>,
        claims: Vec<Claim<'a>>,
        most_steps: usize,
    ) -> Result<Self, Problem> {
        let free = pools.iter().map(|pool| self::free_counters(pool, held));
        let devices: Vec<&[PoolDevice<'a>]> = pools
            .iter()
            .map(|pool| match &pool.content {
                Content::Ready(ready) => &*ready.devices,
                // Devices of such pools are not allocated.
                Content::Incomplete { .. } | Content::Invalid(_) => &[],
            })
            .collect();
        let subjects = devices
            .iter()
            .map(|devices| devices.iter().map(|_| OnceCell::new()).collect());
        Ok(Self {
            node,
            pools,
            held,
            selectors,
            free: free.collect::<Result<_, _>>()?,
            subjects: subjects.collect(),
            devices,
            selections,
            all: HashMap::new(),
            chosen: claims.iter().map(|_| Vec::new()).collect(),
            claims,
            marked: HashMap::new(),
            sharing: HashMap::new(),
            counters: HashMap::new(),
            steps: 0,
            most_steps,
        })
    }

    /// Whether there are devices for all claims; if so, they are in `chosen`.
    pub fn run(&mut self) -> Result<bool, Problem> {
        self.prepare()?;
        match self.one(At::default(), false, DevicePosition { pool: 0, device: 0 }) {
            Ok(done) => Ok(done),
            // Every choice of alternatives has too many devices. The scheduler reports this as an error of the filter.
            Err(Stop::TooMany) => Err(Problem::stops("allocation max size exceeded")),
            Err(Stop::Problem(problem)) => Err(problem),
        }
    }

    /// Finds the devices of requests with `All`, and refuses claims with too many devices.
    fn prepare(&mut self) -> Result<(), Problem> {
        for claim in 0..self.claims.len() {
            let mut least = 0_usize;
            for request in 0..self.claims[claim].requests.len() {
                let mut fewest = usize::MAX;
                for alternative in 0..self.claims[claim].requests[request].asks.len() {
                    let at = At {
                        claim,
                        request,
                        alternative,
                        device: 0,
                    };
                    let count = match self.ask(at).number {
                        Number::Exactly(count) => count,
                        Number::All => {
                            let all = self.all_devices(at)?;
                            let count = all.len();
                            self.all.insert((claim, request, alternative), all);
                            count
                        }
                    };
                    fewest = fewest.min(count);
                }
                if fewest > MOST_RESULTS - least {
                    let message = format!(
                        "claim {}: adding {fewest} devices exceeds the claim limit of {MOST_RESULTS}",
                        self.claims[claim].name
                    );
                    return Err(Problem::Stops(message));
                }
                least += fewest;
            }
        }
        Ok(())
    }

    fn all_devices(&mut self, at: At) -> Result<Vec<DevicePosition>, Problem> {
        let mut all = Vec::new();
        for pool in 0..self.pools.len() {
            let Pool {
                driver,
                name,
                content,
            } = &self.pools[pool];
            let why = match content {
                Content::Ready(_) => None,
                Content::Incomplete { .. } => Some("being updated"),
                Content::Invalid(_) => Some("invalid"),
            };
            if let Some(why) = why {
                let message = format!(
                    "claim {}, request {}: asks for all devices, but resource pool {driver}/{name} is currently {why}",
                    self.claims[at.claim].name,
                    self.ask(at).full_name()
                );
                return Err(Problem::Stops(message));
            }
            for device in 0..self.devices[pool].len() {
                let position = DevicePosition { pool, device };
                if self.selection(at, position)?.is_some() {
                    continue;
                }
                let nothing = |_: &str| Ok(Quantity::ZERO);
                let device = self.device(position);
                if capacity::take(device, &self.ask(at).capacity, nothing)?.is_ok() {
                    all.push(position);
                }
            }
        }
        Ok(all)
    }

    fn ask(&self, at: At) -> &Ask<'a> {
        &self.claims[at.claim].requests[at.request].asks[at.alternative]
    }

    pub fn device(&self, position: DevicePosition) -> &'a Device {
        self.devices[position.pool][position.device].device
    }

    /// The devices that may be allocated.
    pub fn positions(&self) -> impl Iterator<Item = DevicePosition> + use<> {
        let counts: Vec<usize> = self.devices.iter().map(|it| it.len()).collect();
        let pools = counts.into_iter().enumerate();
        pools
            .flat_map(|(pool, count)| (0..count).map(move |device| DevicePosition { pool, device }))
    }

    fn held(&self, position: DevicePosition) -> Option<&'b DeviceAllocations<'a>> {
        let pool = &self.pools[position.pool];
        let device = self.device(position);
        self.held.of_device((pool.driver, pool.name, &device.name))
    }

    /// `allocateOne`.
    fn one(&mut self, at: At, in_alternative: bool, start: DevicePosition) -> Result<bool, Stop> {
        self.steps += 1;
        if self.steps > self.most_steps {
            let message = format!(
                "there are more than {} combinations of devices",
                self.most_steps
            );
            return Err(Problem::Unjudged(message).into());
        }
        let first = DevicePosition { pool: 0, device: 0 };
        let Some(claim) = self.claims.get(at.claim) else {
            return Ok(true);
        };
        let Some(request) = claim.requests.get(at.request) else {
            let next = At {
                claim: at.claim + 1,
                ..At::default()
            };
            return match self.one(next, false, first) {
                Err(Stop::TooMany) => Ok(false),
                result => result,
            };
        };
        if request.is_choice && !in_alternative {
            let mut always_too_many = true;
            for alternative in 0..request.asks.len() {
                match self.one(At { alternative, ..at }, true, first) {
                    Err(Stop::TooMany) => {}
                    Ok(false) => always_too_many = false,
                    result => return result,
                }
            }
            return if always_too_many {
                Err(Stop::TooMany)
            } else {
                Ok(false)
            };
        }
        let number = self.ask(at).number;
        let count = match number {
            Number::Exactly(count) => count,
            Number::All => self.all_of(at).len(),
        };
        if number == Number::All && count == 0 {
            return Ok(false);
        }
        if at.device >= count {
            let next = At {
                claim: at.claim,
                request: at.request + 1,
                ..At::default()
            };
            return self.one(next, false, first);
        }
        if count - at.device > MOST_RESULTS - self.chosen[at.claim].len() {
            return Err(Stop::TooMany);
        }
        let next = At {
            device: at.device + 1,
            ..at
        };
        if number == Number::All {
            let position = self.all_of(at)[at.device];
            let Ok(undo) = self.allocate(at, position, true)? else {
                return Ok(false);
            };
            let done = self.one(next, in_alternative, first);
            if !matches!(done, Ok(true)) {
                self.undo(undo)?;
            }
            return done;
        }
        for pool in start.pool..self.pools.len() {
            let begin = if pool == start.pool { start.device } else { 0 };
            for device in begin..self.devices[pool].len() {
                let position = DevicePosition { pool, device };
                if self.unsuitable(at, position)?.is_some() {
                    continue;
                }
                let Ok(undo) = self.allocate(at, position, false)? else {
                    continue;
                };
                let after = DevicePosition {
                    pool,
                    device: device + 1,
                };
                match self.one(next, in_alternative, after) {
                    Ok(true) => return Ok(true),
                    result => {
                        self.undo(undo)?;
                        result?;
                    }
                }
            }
        }
        Ok(false)
    }

    fn all_of(&self, at: At) -> &[DevicePosition] {
        let key = (at.claim, at.request, at.alternative);
        self.all.get(&key).map(Vec::as_slice).unwrap_or_default()
    }

    /// Why a request cannot get a device, by the device itself and by what was chosen before: the checks of the search's loop.
    fn unsuitable(
        &mut self,
        at: At,
        position: DevicePosition,
    ) -> Result<Option<Blocked<'a>>, Problem> {
        let admin = self.ask(at).admin;
        let mine = |claims: &Vec<usize>| claims.contains(&at.claim);
        if admin && self.marked.get(&position).is_some_and(mine) || !admin && self.in_use(position)
        {
            return Ok(Some(Blocked::InUse));
        }
        if let Some(blocked) = self.selection(at, position)? {
            return Ok(Some(blocked));
        }
        let taken = self.take(at, position)?;
        Ok(taken.err().map(Blocked::Capacity))
    }

    fn in_use(&self, position: DevicePosition) -> bool {
        self.held(position)
            .is_some_and(|held| !held.whole.is_empty())
            || self
                .marked
                .get(&position)
                .is_some_and(|claims| !claims.is_empty())
    }

    /// `isSelectable`.
    fn selection(&self, at: At, position: DevicePosition) -> Result<Option<Blocked<'a>>, Problem> {
        let key = (at.claim, at.request, at.alternative, position);
        if let Some(known) = self.selections.borrow().get(&key) {
            return Ok(*known);
        }
        let blocked = self.select(at, position)?;
        self.selections.borrow_mut().insert(key, blocked);
        Ok(blocked)
    }

    fn select(&self, at: At, position: DevicePosition) -> Result<Option<Blocked<'a>>, Problem> {
        let ask = self.ask(at);
        let class = ask.class.spec.as_ref();
        let selectors: &'a [DeviceSelector] = class
            .and_then(|spec| spec.selectors.as_deref())
            .unwrap_or_default();
        let of_class = selectors.iter().map(|it| (Selecting::Class, it));
        let of_request = ask.selectors.iter().map(|it| (Selecting::Request, it));
        for (by, selector) in of_class.chain(of_request) {
            let place_name = || match by {
                Selecting::Class => {
                    format!(
                        "class {}",
                        ask.class.metadata.name.as_deref().unwrap_or_default()
                    )
                }
                Selecting::Request => format!("claim {}", self.claims[at.claim].name),
            };
            let Some(cel) = &selector.cel else {
                let message = format!("{}: a selector without CEL", place_name());
                return Err(Problem::Stops(message));
            };
            let device = self.device(position);
            let pool = &self.pools[position.pool];
            let fault = |fault| {
                let on = format!("{} on device {}", place_name(), device.name);
                Problem::of_selector(&on, fault)
            };
            let cell = &self.subjects[position.pool][position.device];
            let subject = if let Some(subject) = cell.get() {
                subject
            } else {
                let subject = Subject::new(pool.driver, device).map_err(fault)?;
                cell.get_or_init(|| subject)
            };
            if !self
                .selectors
                .accept(&cel.expression, subject)
                .map_err(fault)?
            {
                let selector = &cel.expression;
                return Ok(Some(Blocked::NotSelected { by, selector }));
            }
        }
        let selects = self.devices[position.pool][position.device].selects_nodes;
        let elsewhere = selects && !pool::device_is_for(self.device(position), self.node);
        Ok(elsewhere.then_some(Blocked::OtherNode))
    }

    /// What the request takes of the device's capacities.
    fn take(
        &self,
        at: At,
        position: DevicePosition,
    ) -> Result<Result<Amounts<'a>, Shortage<'a>>, Problem> {
        let held = self.held(position);
        let sharing = self.sharing.get(&position);
        let used = |name: &str| {
            let old = held.map_or(Ok(Quantity::ZERO), |held| held.consumed(name))?;
            let new = sharing.and_then(|it| it.consumed.get(name)).copied();
            old.checked_add(new.unwrap_or_default())
                .map_err(Problem::unjudged)
        };
        capacity::take(self.device(position), &self.ask(at).capacity, used)
    }

    /// `allocateDevice`. With `must`, a constraint that the device does not satisfy is an error.
    fn allocate(
        &mut self,
        at: At,
        position: DevicePosition,
        must: bool,
    ) -> Result<Result<Undo<'a>, Blocked<'a>>, Problem> {
        let device = self.device(position);
        let shareable = device.allow_multiple_allocations == Some(true);
        let admin = self.ask(at).admin;
        let mine = |claims: &Vec<usize>| claims.contains(&at.claim);
        if !shareable && admin && self.marked.get(&position).is_some_and(mine)
            || !admin && self.in_use(position)
        {
            return Ok(Err(Blocked::InUse));
        }
        let mut undo = Undo {
            at,
            position,
            counters: false,
            constraints: 0,
            marked: false,
            share: None,
            recorded: false,
        };
        // Further shares do not take the counters again.
        let is_shared = self
            .held(position)
            .is_some_and(|held| !held.shares.is_empty())
            || self.sharing.get(&position).is_some_and(|it| it.shares > 0);
        let consumes = device
            .consumes_counters
            .as_ref()
            .is_some_and(|it| !it.is_empty());
        if consumes && !(shareable && is_shared) {
            if let Some(blocked) = self.take_counters(position)? {
                return Ok(Err(blocked));
            }
            undo.counters = true;
        }
        if let Some(taint) = taint::untolerated(device, self.ask(at).tolerations) {
            self.undo(undo)?;
            return Ok(Err(Blocked::Taint(taint)));
        }
        let (request, alternative) = (self.ask(at).request, self.ask(at).alternative);
        let driver = self.pools[position.pool].driver;
        for number in 0..self.claims[at.claim].constraints.len() {
            let constraint = &mut self.claims[at.claim].constraints[number];
            if !constraint.add(request, alternative, driver, device) {
                self.undo(undo)?;
                if must {
                    let claim = &self.claims[at.claim].name;
                    let message = format!(
                        "claim {claim}, request {request}: cannot add device {} because a claim constraint would not be satisfied",
                        device.name
                    );
                    return Err(Problem::Stops(message));
                }
                return Ok(Err(Blocked::Constraint(number)));
            }
            undo.constraints += 1;
        }
        if !shareable {
            self.marked.entry(position).or_default().push(at.claim);
            undo.marked = true;
        }
        let taken = match self.take(at, position)? {
            Ok(taken) => taken,
            Err(shortage) => {
                self.undo(undo)?;
                return Ok(Err(Blocked::Capacity(shortage)));
            }
        };
        if shareable {
            let sharing = self.sharing.entry(position).or_default();
            sharing.shares += 1;
            for (name, amount) in &taken {
                let sum = sharing.consumed.entry(name).or_default();
                *sum = sum.checked_add(*amount).map_err(Problem::unjudged)?;
            }
            undo.share = Some(taken.clone());
        }
        self.chosen[at.claim].push(Chosen {
            position,
            request: at.request,
            alternative: at.alternative,
            consumed: shareable.then_some(taken),
        });
        undo.recorded = true;
        Ok(Ok(undo))
    }

    /// Takes back what an allocation changed. It must be the claim's last allocation.
    fn undo(&mut self, undo: Undo<'a>) -> Result<(), Problem> {
        let (at, position) = (undo.at, undo.position);
        if undo.recorded {
            self.chosen[at.claim].pop();
        }
        if let (Some(taken), Some(sharing)) = (undo.share, self.sharing.get_mut(&position)) {
            sharing.shares -= 1;
            for (name, amount) in taken {
                let sum = sharing.consumed.entry(name).or_default();
                *sum = sum.checked_sub(amount).map_err(Problem::unjudged)?;
            }
        }
        if undo.marked
            && let Some(claims) = self.marked.get_mut(&position)
            && let Some(nth) = claims.iter().rposition(|it| *it == at.claim)
        {
            claims.remove(nth);
        }
        let (request, alternative) = (self.ask(at).request, self.ask(at).alternative);
        for constraint in &mut self.claims[at.claim].constraints[..undo.constraints] {
            constraint.remove(request, alternative);
        }
        if undo.counters {
            self.add_counters(position, true)?;
        }
        Ok(())
    }

    /// `checkAvailableCounters`: none of the pool's counters may be overdrawn, not even one that the device does not take.
    fn take_counters(&mut self, position: DevicePosition) -> Result<Option<Blocked<'a>>, Problem> {
        self.add_counters(position, false)?;
        let mut blocked = None;
        for ((set, counter), free) in &self.free[position.pool] {
            let taken = self
                .counters
                .get(&(position.pool, set, counter))
                .copied()
                .unwrap_or_default();
            if *free < taken {
                let wanted = self::consumption(self.device(position), set, counter)?;
                let others = taken.checked_sub(wanted).map_err(Problem::unjudged)?;
                let left = free.checked_sub(others).map_err(Problem::unjudged)?;
                blocked = Some(Blocked::Counters {
                    set,
                    counter,
                    wanted,
                    left,
                });
                break;
            }
        }
        if blocked.is_some() {
            self.add_counters(position, true)?;
        }
        Ok(blocked)
    }

    fn add_counters(&mut self, position: DevicePosition, back: bool) -> Result<(), Problem> {
        let device = self.device(position);
        for consumption in device.consumes_counters.iter().flatten() {
            for (name, counter) in &consumption.counters {
                let amount = capacity::parse(&counter.value)?;
                let key = (position.pool, &*consumption.counter_set, &**name);
                let sum = self.counters.entry(key).or_default();
                let changed = if back {
                    sum.checked_sub(amount)
                } else {
                    sum.checked_add(amount)
                };
                *sum = changed.map_err(Problem::unjudged)?;
            }
        }
        Ok(())
    }

    /// Why the request does not get a device even when nothing else is being allocated; `None` if it gets it.
    pub fn alone(
        &mut self,
        claim: usize,
        request: usize,
        alternative: usize,
        position: DevicePosition,
    ) -> Result<Option<Blocked<'a>>, Problem> {
        let at = At {
            claim,
            request,
            alternative,
            device: 0,
        };
        if let Some(blocked) = self.unsuitable(at, position)? {
            return Ok(Some(blocked));
        }
        match self.allocate(at, position, false)? {
            Ok(undo) => {
                self.undo(undo)?;
                Ok(None)
            }
            Err(blocked) => Ok(Some(blocked)),
        }
    }
}

/// How much a device takes of a counter.
pub(super) fn consumption(device: &Device, set: &str, counter: &str) -> Result<Quantity, Problem> {
    let mut consumptions = device.consumes_counters.iter().flatten();
    let consumption = consumptions.find(|it| it.counter_set == set);
    let amount = consumption.and_then(|it| it.counters.get(counter));
    amount.map_or(Ok(Quantity::ZERO), |it| capacity::parse(&it.value))
}

/// The counters of a pool minus what allocated devices take; below zero if they take too much.
fn free_counters<'a>(
    pool: &Pool<'a>,
    held: &Allocations<'a>,
) -> Result<BTreeMap<(&'a str, &'a str), Quantity>, Problem> {
    let mut free = BTreeMap::new();
    let Content::Ready(ready) = &pool.content else {
        return Ok(free);
    };
    for (set, counters) in &ready.counters {
        for (counter, value) in counters {
            free.insert((*set, *counter), *value);
        }
    }
    let devices = ready.devices.iter().map(|it| it.device);
    for device in devices.chain(ready.elsewhere.iter().copied()) {
        let held = held.of_device((pool.driver, pool.name, &device.name));
        if !held.is_some_and(DeviceAllocations::any) {
            continue;
        }
        for consumption in device.consumes_counters.iter().flatten() {
            for (counter, amount) in &consumption.counters {
                let key = (&*consumption.counter_set, &**counter);
                if let Some(left) = free.get_mut(&key) {
                    let amount = capacity::parse(&amount.value)?;
                    *left = left.checked_sub(amount).map_err(Problem::unjudged)?;
                }
            }
        }
    }
    Ok(free)
}
