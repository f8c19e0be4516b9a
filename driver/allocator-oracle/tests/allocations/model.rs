//! What we promise for a node, without slices: the tiers in which a GPU is offered, what a share takes of it, and which
//! GPU a claim gets first. The model does not use devices, counters or request policies.

use tranche_api::gpu_node::Inventory;
use tranche_api::tier::Tier;

use crate::demand::{Ask, Claim, Number, Uuids};
use crate::node::Policy;

/// The assumed bytes of a context that nobody measured. A device has room for one.
const UNMEASURED_CONTEXT: u64 = 512 << 20;

/// The tiers of one GPU, in the order in which a claim that accepts several tries them.
const ORDER: [Tier; 5] = [
    Tier::Capped,
    Tier::Concurrent,
    Tier::Timeshared,
    Tier::Exclusive,
    Tier::Passthrough,
];

/// What a claim holds of one GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holding {
    /// The GPU's place in the order of PCI addresses.
    pub gpu: usize,
    pub tier: Tier,
    /// Percent, where the GPU's memory is oversubscribed.
    pub over: Option<u32>,
    /// Bytes and percent of a share with limits; 0 otherwise.
    pub memory: u64,
    pub cores: u64,
    /// Bytes that are kept free for its CUDA context.
    pub context: u64,
    /// Whether no other share with this constraint may be on the GPU.
    pub apart: bool,
}

/// A node under a policy.
#[derive(Debug)]
pub struct Model {
    gpus: Vec<Gpu>,
}

#[derive(Debug)]
struct Gpu {
    product: usize,
    /// Bytes in total, and without the driver's reserve.
    total: u64,
    available: u64,
    offers: Vec<Offer>,
    /// Tiers that are no longer offered, in which claims had shares when the policy changed.
    withdrawn: Vec<Offer>,
}

/// How a GPU is offered in one tier.
#[derive(Clone, Debug)]
struct Offer {
    tier: Tier,
    /// Percent, where the GPU's memory is oversubscribed.
    over: Option<u32>,
    kind: Kind,
}

#[derive(Clone, Debug)]
enum Kind {
    Capped {
        usable: u64,
        step: u64,
        default_memory: u64,
        cores_step: u64,
        default_cores: u64,
        sharers: usize,
        context: u64,
        contexts: u64,
    },
    Timeshared {
        sharers: usize,
    },
    Whole {
        memory: u64,
    },
}

impl Kind {
    /// What a claim with these sizes takes of the tier; `None` if the tier does not have such sizes.
    fn share(&self, ask: &Ask) -> Option<(u64, u64, u64)> {
        match self {
            Self::Capped {
                usable,
                step,
                default_memory,
                cores_step,
                default_cores,
                context,
                ..
            } => {
                let memory = match ask.memory {
                    Some(bytes) => bytes.max(1).div_ceil(*step) * step,
                    None => *default_memory,
                };
                let cores = match ask.cores {
                    Some(percent) => percent.max(1).div_ceil(*cores_step) * cores_step,
                    None => *default_cores,
                };
                (memory <= *usable && cores <= 100).then_some((memory, cores, *context))
            }
            Self::Timeshared { .. } => {
                (ask.memory.is_none() && ask.cores.is_none()).then_some((0, 0, 0))
            }
            Self::Whole { memory } => {
                let fits = !ask.apart
                    && ask.memory.is_none_or(|bytes| bytes <= *memory)
                    && ask.cores.is_none_or(|percent| percent <= 100);
                fits.then_some((0, 0, 0))
            }
        }
    }
}

impl Model {
    /// `withheld` are the GPUs that are not offered. `before` is the node before the change and what claims hold of it.
    pub fn new(
        inventory: &Inventory,
        products: &[usize],
        policy: &Policy,
        withheld: &[usize],
        before: Option<(&Self, &[Holding])>,
    ) -> Self {
        let numbered = inventory.gpus.iter().zip(products).enumerate();
        let gpus = numbered.map(|(number, (gpu, product))| {
            let total = gpu.memory.to_count().expect("bytes");
            let available = total - gpu.reserved_memory.to_count().expect("bytes");
            let offered = !withheld.contains(&number);
            let offers: Vec<Offer> = ORDER
                .into_iter()
                .filter(|_| offered)
                .filter_map(|tier| offer(tier, policy, total, available))
                .collect();
            let withdrawn = before.map_or(Vec::new(), |(model, held)| {
                let before = &model.gpus[number];
                before
                    .offers
                    .iter()
                    .chain(&before.withdrawn)
                    .filter(|old| {
                        held.iter().any(|it| {
                            it.gpu == number && (it.tier, it.over) == (old.tier, old.over)
                        }) && offers
                            .iter()
                            .all(|new| (new.tier, new.over) != (old.tier, old.over))
                    })
                    .cloned()
                    .collect()
            });
            Gpu {
                product: *product,
                total,
                available,
                offers,
                withdrawn,
            }
        });
        Self {
            gpus: gpus.collect(),
        }
    }

    /// What the claims of a pod get beside `held`: for each request of each claim, the number of the chosen alternative
    /// and the devices. It tries everything in order and takes the first that fits.
    pub fn allocate(&self, pod: &[Claim], held: &[Holding]) -> Option<Vec<Vec<Granted>>> {
        let mut search = Search {
            model: self,
            pod,
            held: held.to_vec(),
            granted: vec![Vec::new()],
        };
        search.request(0, 0).then_some(search.granted)
    }

    /// Whether the hardware can serve these holdings: a GPU serves one tier at a time, an exclusive GPU has one claim,
    /// and the caps of all shares fit the GPU.
    pub fn is_realisable(&self, held: &[Holding]) -> Result<(), String> {
        for (number, gpu) in self.gpus.iter().enumerate() {
            let on_gpu = || held.iter().filter(|it| it.gpu == number);
            let Some(first) = on_gpu().next() else {
                continue;
            };
            let count = on_gpu().count();
            if on_gpu().any(|it| it.tier != first.tier) {
                return Err(format!("GPU {number} is in two tiers"));
            }
            if !first.tier.is_shared() && count > 1 {
                return Err(format!("GPU {number} is {} {count} times", first.tier));
            }
            let part = |it: &Holding| it.memory * 100 / u64::from(it.over.unwrap_or(100));
            let memory: u64 = on_gpu().map(part).sum();
            if memory > gpu.available {
                return Err(format!("GPU {number}: {memory} bytes of {}", gpu.available));
            }
            let cores: u64 = on_gpu().map(|it| it.cores).sum();
            if cores > 100 {
                return Err(format!("GPU {number}: {cores} percent"));
            }
        }
        Ok(())
    }

    /// Whether a GPU that was allocated in this tier has no more sharers and memory than the policy allows.
    pub fn is_within_policy(&self, held: &[Holding], given: &Holding) -> Result<(), String> {
        let gpu = &self.gpus[given.gpu];
        let is_given = |it: &&Offer| (it.tier, it.over) == (given.tier, given.over);
        let offer = gpu
            .offers
            .iter()
            .find(is_given)
            .ok_or_else(|| format!("GPU {} is not offered", given.gpu))?;
        let on_gpu = held.iter().filter(|it| it.gpu == given.gpu);
        let (count, memory) = on_gpu.fold((0, 0), |(n, sum), it| (n + 1, sum + it.memory));
        if given.apart
            && held
                .iter()
                .filter(|it| it.gpu == given.gpu && it.apart)
                .count()
                > 1
        {
            return Err(format!(
                "GPU {} has two shares that are to be apart",
                given.gpu
            ));
        }
        let (most, usable) = match offer.kind {
            Kind::Capped {
                sharers, usable, ..
            } => (sharers, usable),
            Kind::Timeshared { sharers } => (sharers, 0),
            Kind::Whole { .. } => (1, gpu.total),
        };
        if count > most || memory > usable {
            return Err(format!(
                "GPU {} has {count} sharers of {most} with {memory} bytes of {usable}",
                given.gpu
            ));
        }
        Ok(())
    }
}

/// How a GPU with this memory is offered; `None` if it is not.
fn offer(tier: Tier, policy: &Policy, total: u64, available: u64) -> Option<Offer> {
    if !policy.tiers.contains(&tier) {
        return None;
    }
    let over = policy.over.filter(|_| tier == Tier::Capped);
    let kind = match tier {
        Tier::Capped | Tier::Concurrent => {
            let (step, context) = (policy.step, policy.context << 20);
            let free = available - context * u64::from(policy.expected_sharers);
            let usable = free / step * step;
            let percent = over.map_or(100, u64::from);
            let least = usable / step;
            let usable = usable * percent / 100 / step * step;
            let part = usable / u64::from(policy.max_sharers) / step * step;
            let cores_step = u64::from(policy.cores_step);
            let default_memory = policy
                .default_memory
                .map_or(part.max(step), |steps| steps * step);
            if least < 2 || default_memory > usable {
                return None;
            }
            Kind::Capped {
                usable,
                step,
                default_memory,
                cores_step,
                default_cores: match policy.default_cores {
                    Some(steps) => u64::from(steps) * cores_step,
                    None => (u64::from(100 / policy.max_sharers) / cores_step).max(1) * cores_step,
                },
                sharers: policy.max_sharers as usize,
                context,
                contexts: u64::from(policy.max_sharers) * context.max(UNMEASURED_CONTEXT),
            }
        }
        Tier::Timeshared => Kind::Timeshared {
            sharers: policy.timeshared_sharers as usize,
        },
        Tier::Exclusive | Tier::Passthrough => Kind::Whole { memory: total },
        Tier::Partition => return None,
    };
    Some(Offer { tier, over, kind })
}

/// The devices of one request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Granted {
    pub choice: usize,
    pub holdings: Vec<Holding>,
}

/// A depth-first search for the first allocation that fits. `held` and `granted` hold the current attempt.
struct Search<'a> {
    model: &'a Model,
    pod: &'a [Claim],
    held: Vec<Holding>,
    /// One list of requests for each claim that the search has reached.
    granted: Vec<Vec<Granted>>,
}

impl Search<'_> {
    /// Tries all alternatives for a request, and all requests after it.
    fn request(&mut self, claim: usize, request: usize) -> bool {
        let Some(asked) = self.pod.get(claim) else {
            self.granted.pop();
            return true;
        };
        let Some(asks) = asked.requests.get(request) else {
            self.granted.push(Vec::new());
            return self.request(claim + 1, 0) || {
                self.granted.pop();
                false
            };
        };
        for choice in 0..asks.asks().len() {
            let holdings = Vec::new();
            self.granted[claim].push(Granted { choice, holdings });
            if self.device(claim, request, (0, 0)) {
                return true;
            }
            self.granted[claim].pop();
        }
        false
    }

    /// Tries the request's next device, starting at this GPU and tier.
    fn device(&mut self, claim: usize, request: usize, from: (usize, usize)) -> bool {
        let granted = &self.granted[claim][request];
        let ask = &self.pod[claim].requests[request].asks()[granted.choice];
        let got = granted.holdings.len();
        let places = self.model.places(ask);
        let wanted = match ask.number {
            Number::Exactly(count) => count,
            Number::All => match self.model.all(ask) {
                0 => return false,
                count => count,
            },
        };
        if got == wanted {
            return self.request(claim, request + 1);
        }
        for (gpu, number) in places.into_iter().filter(|place| *place >= from) {
            let Some(holding) = self.fit(claim, ask, gpu, number) else {
                continue;
            };
            self.held.push(holding.clone());
            self.granted[claim][request].holdings.push(holding);
            if self.device(claim, request, (gpu, number + 1)) {
                return true;
            }
            self.granted[claim][request].holdings.pop();
            self.held.pop();
        }
        false
    }

    /// What the claim gets of a GPU in a tier, if that fits beside `held`.
    fn fit(&self, claim: usize, ask: &Ask, gpu: usize, number: usize) -> Option<Holding> {
        let offer = &self.model.gpus[gpu].offers[number];
        let (memory, cores, context) = offer.kind.share(ask)?;
        let on_gpu = || self.held.iter().filter(|it| it.gpu == gpu);
        if on_gpu().any(|it| (it.tier, it.over) != (offer.tier, offer.over)) {
            return None;
        }
        if ask.apart && on_gpu().any(|it| it.apart) {
            return None;
        }
        let before = on_gpu().count();
        let sum = |of: fn(&Holding) -> u64| on_gpu().map(of).sum::<u64>();
        let fits = match &offer.kind {
            Kind::Capped {
                usable,
                sharers,
                contexts,
                ..
            } => {
                before < *sharers
                    && sum(|it| it.memory) + memory <= *usable
                    && sum(|it| it.cores) + cores <= 100
                    && (context == 0 || sum(|it| it.context) + context <= *contexts)
            }
            Kind::Timeshared { sharers } => before < *sharers,
            Kind::Whole { .. } => before == 0,
        };
        let mut same_claim = self.granted[claim].iter().flat_map(|it| &it.holdings);
        let allowed = match self.pod[claim].uuids {
            None => true,
            Some(Uuids::Distinct) => same_claim.all(|it| it.gpu != gpu),
            Some(Uuids::Same) => same_claim.all(|it| it.gpu == gpu),
        };
        (fits && allowed).then_some(Holding {
            gpu,
            tier: offer.tier,
            over: offer.over,
            memory,
            cores,
            context,
            apart: ask.apart,
        })
    }
}

impl Model {
    /// The GPUs and tiers that match the class and the product of an ask, in order.
    fn places(&self, ask: &Ask) -> Vec<(usize, usize)> {
        let wanted = |gpu: &Gpu| ask.product.is_none_or(|product| product == gpu.product);
        let gpus = self.gpus.iter().enumerate().filter(|(_, gpu)| wanted(gpu));
        gpus.flat_map(|(number, gpu)| {
            let offers = gpu
                .offers
                .iter()
                .enumerate()
                .filter(|(_, offer)| ask.class.accepts(offer.tier, offer.over));
            offers.map(move |(offer, _)| (number, offer))
        })
        .collect()
    }

    /// How many devices `All` means: those that could ever satisfy the ask. A device that is no longer offered counts too,
    /// so that nothing is allocated as long as it is published.
    fn all(&self, ask: &Ask) -> usize {
        let wanted = |gpu: &&Gpu| ask.product.is_none_or(|product| product == gpu.product);
        let gpus = self.gpus.iter().filter(wanted);
        gpus.flat_map(|gpu| gpu.offers.iter().chain(&gpu.withdrawn))
            .filter(|offer| {
                ask.class.accepts(offer.tier, offer.over) && offer.kind.share(ask).is_some()
            })
            .count()
    }
}
