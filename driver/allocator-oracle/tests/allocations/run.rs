//! Runs a story: the scheduler's allocator, the model and the node's preparation side by side.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Add;

use k8s_openapi::api::resource::v1::{
    AllocationResult, Device, DeviceRequestAllocationResult, ResourceClaim, ResourceClaimStatus,
    ResourceSlice,
};
use tranche_allocator_oracle::{Error, Knowledge, Outcome, Scheduler};
use tranche_api::gpu_node::Inventory;
use tranche_api::names::{OVERSUBSCRIBED, attribute, capacity, pool};
use tranche_api::quantity::Quantity;
use tranche_api::tier::Tier;
use tranche_api::withheld::{WithheldGpu, reason};
use tranche_driver::claim::{Allocation, DeviceName};
use tranche_driver::preparation::{self, PreparationPlan, PreparationProblem};
use tranche_driver::slices::{self, NodeInput, PublishedDevice};

use crate::demand::Claim;
use crate::model::{Granted, Holding, Model};
use crate::node::{Event, Policy, Story, inventory};

const NODE: &str = "node-a";

/// The number of times that something happened in stories.
#[derive(Clone, Copy, Debug, Default)]
pub struct Count {
    /// Pods that were allocated what was promised.
    pub started: u32,
    /// Pods that were promised nothing and got nothing.
    pub pending: u32,
    /// Those among them that the node refuses if an allocator that ignores all other claims allocates something to
    /// them.
    pub refused: u32,
    /// Changes of the policy while claims had devices that are no longer offered.
    pub withdrawn: u32,
    /// Pods for which the scheduler searched in vain until it gave up.
    pub timed_out: u32,
}

impl Add for Count {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            started: self.started + other.started,
            pending: self.pending + other.pending,
            refused: self.refused + other.refused,
            withdrawn: self.withdrawn + other.withdrawn,
            timed_out: self.timed_out + other.timed_out,
        }
    }
}

/// A pod that runs.
struct Pod {
    claims: Vec<ResourceClaim>,
    holdings: Vec<Holding>,
    devices: BTreeSet<String>,
    plans: Vec<PreparationPlan>,
}

struct Run<'a> {
    scheduler: &'a mut Scheduler,
    /// Changes the slices before they are published.
    distort: &'a dyn Fn(&mut Device),
    products: &'a [usize],
    inventory: Inventory,
    model: Model,
    generation: i64,
    slices: Vec<ResourceSlice>,
    devices: Vec<Device>,
    pods: Vec<Pod>,
    created: usize,
    count: Count,
}

/// Runs a story with slices that `distort` has changed. The error names the event and the problem.
pub fn story(
    scheduler: &mut Scheduler,
    story: &Story,
    distort: impl Fn(&mut Device),
) -> Result<Count, String> {
    let inventory = inventory(&story.gpus);
    let model = Model::new(&inventory, &story.gpus, &story.policy, &[], None);
    let mut run = Run {
        scheduler,
        distort: &distort,
        products: &story.gpus,
        inventory,
        model,
        generation: 0,
        slices: Vec::new(),
        devices: Vec::new(),
        pods: Vec::new(),
        created: 0,
        count: Count::default(),
    };
    run.scheduler.reset().map_err(|error| error.to_string())?;
    run.publish(&story.policy, &[])?;
    for (number, event) in story.events.iter().enumerate() {
        let happened = match event {
            Event::Pod(claims) => run.pod(claims),
            Event::End(which) => match run.pods.len() {
                0 => Ok(()),
                count => run.end(which.index(count)),
            },
            Event::Change(policy, which) => {
                let gpus = run.products.len();
                let withheld: Vec<usize> = which.iter().map(|it| it.index(gpus)).collect();
                run.change(policy, &withheld)
            }
        };
        happened.map_err(|problem| format!("event {number}: {problem}"))?;
    }
    Ok(run.count)
}

impl Run<'_> {
    fn holdings(&self) -> Vec<Holding> {
        let holdings = self.pods.iter().flat_map(|pod| pod.holdings.clone());
        holdings.collect()
    }

    /// Publishes the slices that are planned now.
    fn publish(&mut self, policy: &Policy, withheld: &[usize]) -> Result<(), String> {
        let held: BTreeSet<&String> = self.pods.iter().flat_map(|pod| &pod.devices).collect();
        let retained: Vec<PublishedDevice> = self
            .devices
            .iter()
            .filter(|device| held.contains(&device.name))
            .filter_map(|device| {
                Some(PublishedDevice {
                    content: Some(device.clone()),
                    ..PublishedDevice::identify(device)?
                })
            })
            .collect();
        let withheld: Vec<WithheldGpu> = withheld
            .iter()
            .map(|gpu| &self.inventory.gpus[*gpu].uuid)
            .map(|uuid| WithheldGpu::whole(uuid, reason::OTHER_PROVIDER, String::new()))
            .collect();
        let plan = slices::plan(&NodeInput {
            name: NODE,
            uid: "7c1b2f6e-0d5e-4a43-8a07-5c9f1a2b3c4d",
            labels: &BTreeMap::new(),
            inventory: &self.inventory,
            withheld: &withheld,
            health: &[],
            policies: &[policy.object()],
            retained: &retained,
        });
        let plan = plan.map_err(|error| error.to_string())?;
        self.generation += 1;
        let mut objects: Vec<ResourceSlice> = plan
            .slices
            .iter()
            .map(|slice| plan.object(slice, self.generation))
            .collect();
        let devices = objects.iter_mut().flat_map(|it| &mut it.spec.devices);
        devices.flatten().for_each(self.distort);
        let devices = objects.iter().filter_map(|it| it.spec.devices.clone());
        self.devices = devices.flatten().collect();
        let published = self.scheduler.publish(NODE, &objects);
        self.slices = objects;
        published.map_err(|error| error.to_string())
    }

    fn change(&mut self, policy: &Policy, withheld: &[usize]) -> Result<(), String> {
        let before = Some((&self.model, &*self.holdings()));
        self.model = Model::new(&self.inventory, self.products, policy, withheld, before);
        self.publish(policy, withheld)?;
        let mut taints = self.devices.iter().flat_map(|device| &device.taints);
        self.count.withdrawn += u32::from(taints.next().is_some());
        Ok(())
    }

    fn end(&mut self, index: usize) -> Result<(), String> {
        let pod = self.pods.remove(index);
        let name = |it: &ResourceClaim| format!("team-a/{}", it.metadata.name.clone().unwrap());
        let names: Vec<String> = pod.claims.iter().map(name).collect();
        let released = self.scheduler.release(&names);
        released.map_err(|error| error.to_string())
    }

    fn pod(&mut self, claims: &[Claim]) -> Result<(), String> {
        let objects: Vec<ResourceClaim> = claims
            .iter()
            .map(|claim| {
                self.created += 1;
                claim.object(&format!("claim-{}", self.created))
            })
            .collect();
        let promised = self.model.allocate(claims, &self.holdings());
        let outcome = match self.scheduler.allocate(&objects, Knowledge::All) {
            Err(Error::TimedOut) => {
                self.count.timed_out += 1;
                return Ok(());
            }
            outcome => outcome.map_err(|error| error.to_string())?,
        };
        match (outcome, promised) {
            (Outcome::Unschedulable(_), None) => {
                self.count.pending += 1;
                self.refuse(&objects)
            }
            (Outcome::Allocated(results), Some(promised)) => {
                self.start(&objects, &results, &promised)
            }
            (outcome, promised) => Err(format!("promised {promised:?}, but it is {outcome:?}")),
        }
    }

    /// A pod gets what was promised, and the node can prepare it.
    fn start(
        &mut self,
        objects: &[ResourceClaim],
        results: &[AllocationResult],
        promised: &[Vec<Granted>],
    ) -> Result<(), String> {
        let allocated = results
            .iter()
            .map(|result| self.read(result))
            .collect::<Result<Vec<_>, _>>()?;
        if allocated != promised {
            return Err(format!("promised {promised:?}, allocated {allocated:?}"));
        }
        let all = |granted: &[Vec<Granted>]| -> Vec<Holding> {
            let requests = granted.iter().flatten();
            requests.flat_map(|it| it.holdings.clone()).collect()
        };
        let holdings = all(&allocated);
        let held = [self.holdings(), holdings.clone()].concat();
        self.model.is_realisable(&held)?;
        for holding in &holdings {
            self.model.is_within_policy(&held, holding)?;
        }
        let results_of = |it: &AllocationResult| it.devices.clone().unwrap().results.unwrap();
        let devices = results.iter().flat_map(results_of);
        let pod = Pod {
            claims: objects
                .iter()
                .zip(results)
                .map(|(claim, result)| self::allocated(claim, result))
                .collect(),
            devices: devices.map(|result| result.device).collect(),
            plans: self
                .prepare(objects, results)?
                .map_err(|it| it.to_string())?,
            holdings,
        };
        self.pods.push(pod);
        self.count.started += 1;
        Ok(())
    }

    /// A pod gets nothing. An allocator that ignores all other claims may allocate something: the node must refuse it
    /// exactly if the hardware cannot serve it.
    fn refuse(&mut self, objects: &[ResourceClaim]) -> Result<(), String> {
        let results = match self.scheduler.allocate(objects, Knowledge::None) {
            Ok(Outcome::Allocated(results)) => results,
            Ok(Outcome::Unschedulable(_)) | Err(Error::TimedOut) => return Ok(()),
            Err(error) => return Err(error.to_string()),
        };
        let mut held = self.holdings();
        for result in &results {
            let granted = self.read(result)?;
            held.extend(granted.into_iter().flat_map(|it| it.holdings));
        }
        match (
            self.prepare(objects, &results)?,
            self.model.is_realisable(&held),
        ) {
            (Ok(_), Ok(())) => Ok(()),
            (Err(PreparationProblem::Conflict(_)), Err(_)) => {
                self.count.refused += 1;
                Ok(())
            }
            (Ok(_), Err(problem)) => Err(format!("the node prepares what cannot be: {problem}")),
            (Err(problem), possible) => Err(format!(
                "the node refuses: {problem}; is it possible: {possible:?}"
            )),
        }
    }

    /// What the node would do for the claims, in order.
    fn prepare(
        &self,
        objects: &[ResourceClaim],
        results: &[AllocationResult],
    ) -> Result<Result<Vec<PreparationPlan>, PreparationProblem>, String> {
        let mut plans: Vec<PreparationPlan> = Vec::new();
        for (claim, result) in objects.iter().zip(results) {
            let claim = self::allocated(claim, result);
            let allocation =
                Allocation::from_claim(&claim, &pool(NODE)).map_err(|error| error.to_string())?;
            let held = self.pods.iter().flat_map(|pod| &pod.plans).chain(&plans);
            match preparation::plan(&allocation, &self.inventory, held) {
                Ok(plan) => plans.push(plan),
                Err(error) => return Ok(Err(error.problem)),
            }
        }
        Ok(Ok(plans))
    }

    /// What the results of a claim mean, request by request.
    fn read(&self, result: &AllocationResult) -> Result<Vec<Granted>, String> {
        let mut granted: Vec<(String, Granted)> = Vec::new();
        let results = result.devices.clone().unwrap_or_default().results;
        for result in results.unwrap_or_default() {
            let holding = self.holding(&result)?;
            let request = granted.iter_mut().find(|(name, _)| *name == result.request);
            if let Some((_, granted)) = request {
                granted.holdings.push(holding);
                continue;
            }
            let choice = result
                .request
                .split_once("/choice-")
                .map_or(0, |(_, number)| number.parse().unwrap());
            let holdings = vec![holding];
            granted.push((result.request, Granted { choice, holdings }));
        }
        Ok(granted.into_iter().map(|(_, granted)| granted).collect())
    }

    fn holding(&self, result: &DeviceRequestAllocationResult) -> Result<Holding, String> {
        let device = self
            .devices
            .iter()
            .find(|it| it.name == result.device)
            .ok_or_else(|| format!("no device {}", result.device))?;
        let text = |name: &str| device.attributes.as_ref()?[name].string.clone();
        let uuid = text(attribute::UUID).unwrap();
        let over = result
            .device
            .parse::<DeviceName>()
            .unwrap()
            .oversubscription()
            .map(|it| it.percent().into());
        let isolation = text(attribute::ISOLATION).unwrap();
        let tier: Tier = match over {
            Some(_) if isolation == OVERSUBSCRIBED => Tier::Capped,
            _ => isolation.parse().unwrap(),
        };
        let consumed = |name: &str| {
            let consumed = result.consumed_capacity.as_ref()?.get(name)?;
            Quantity::try_from(consumed).ok()?.to_count().ok()
        };
        if tier.is_shared() != result.share_id.is_some()
            || tier.is_shared() != (consumed(capacity::SHARERS) == Some(1))
        {
            return Err(format!("{tier}, but {result:?}"));
        }
        let gpu = self.inventory.gpus.iter().position(|gpu| gpu.uuid == uuid);
        Ok(Holding {
            gpu: gpu.unwrap(),
            tier,
            over,
            memory: consumed(capacity::MEMORY).unwrap_or(0),
            cores: consumed(capacity::CORES).unwrap_or(0),
            context: consumed(capacity::CONTEXT_MEMORY).unwrap_or(0),
            apart: consumed(capacity::ANTI_AFFINITY).unwrap_or(0) == 1,
        })
    }
}

fn allocated(claim: &ResourceClaim, result: &AllocationResult) -> ResourceClaim {
    let mut claim = claim.clone();
    claim.status = Some(ResourceClaimStatus {
        allocation: Some(result.clone()),
        ..ResourceClaimStatus::default()
    });
    claim
}
