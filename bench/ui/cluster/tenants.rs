//! The tenants of each GPU, their parts and what they do.

use tranche_api::Tier;

/// A GPU by its node's number and its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct GpuPosition {
    pub node: usize,
    pub gpu: usize,
}

/// A claim with a device, and its pod, which has the same name.
pub struct Tenant {
    pub place: GpuPosition,
    pub namespace: &'static str,
    pub name: String,
    pub part: Part,
    pub work: Work,
}

/// A claim's part of a GPU.
#[derive(Clone, Copy)]
pub enum Part {
    Whole,
    /// A share of a capped or a concurrent device: GiB, percent of the cores.
    Share(Tier, u64, u64),
    /// A MIG instance: its profile, its first slice, MiB.
    Instance(&'static str, usize, u64),
    /// A turn of a timeshared device.
    Turn,
}

/// What a tenant does.
#[derive(Clone, Copy)]
pub enum Work {
    /// It computes all the time, except while it writes a checkpoint.
    Trains,
    /// It follows its users.
    Serves,
    /// It computes for some minutes, then waits for its user.
    Tries,
    /// Its user did not come back.
    Idles,
}

impl GpuPosition {
    /// Its number in the cluster, if nodes have eight GPUs.
    pub fn nth(self) -> usize {
        self.node * 8 + self.gpu
    }

    pub fn node_name(self) -> String {
        format!("gpu-{:02}", self.node + 1)
    }

    pub fn uuid(self) -> String {
        // The first eight digits differ, because a device's name has only these.
        let number = u32::try_from(self.node * 64 + self.gpu).unwrap();
        let first = number.wrapping_mul(2_654_435_761).wrapping_add(0x1f3a_0000);
        let (node, gpu) = (self.node, self.gpu);
        format!("GPU-{first:08x}-5d2e-4c11-9b6a-{node:06x}{gpu:06x}")
    }
}

impl Tenant {
    pub fn uid(&self) -> String {
        format!("uid-{}-{}", self.namespace, self.name)
    }

    pub fn tier(&self) -> Tier {
        match self.part {
            Part::Whole => Tier::Exclusive,
            Part::Share(tier, ..) => tier,
            Part::Instance(..) => Tier::Partition,
            Part::Turn => Tier::Timeshared,
        }
    }

    pub fn device(&self) -> String {
        let gpu = self.place.uuid()[4..12].to_owned();
        match self.part {
            Part::Whole => format!("gpu-{gpu}"),
            Part::Instance(profile, slice, _) => {
                format!("gpu-{gpu}-mig-{}-{slice}", profile.replace('.', ""))
            }
            Part::Share(..) | Part::Turn => format!("gpu-{gpu}-{}", self.tier()),
        }
    }

    /// The share's ID, for a device that several claims may have.
    pub fn share_id(&self) -> Option<String> {
        let is_shared = matches!(self.part, Part::Share(..) | Part::Turn);
        is_shared.then(|| format!("share-{}", self.name))
    }

    /// The MIG device of an instance.
    pub fn mig_uuid(&self) -> Option<String> {
        let Part::Instance(_, slice, _) = self.part else {
            return None;
        };
        Some(format!("MIG-{}-{slice}", &self.place.uuid()[4..]))
    }
}

/// The tenants of a GPU; empty for a free GPU.
pub fn of(place: GpuPosition) -> Vec<Tenant> {
    let pattern = [
        whole, shares, partitions, shares, free, servers, shares, whole, turns, partitions, shares,
    ];
    pattern[place.nth() % pattern.len()](place)
}

/// The tenant that comes and goes on a free GPU.
pub fn burst(place: GpuPosition) -> Tenant {
    Tenant {
        name: format!("job-{}-{}", place.node, place.gpu),
        ..tenant(
            place,
            "burst",
            "job",
            Part::Share(Tier::Capped, 30, 40),
            Work::Trains,
        )
    }
}

fn tenant(
    place: GpuPosition,
    namespace: &'static str,
    what: &str,
    part: Part,
    work: Work,
) -> Tenant {
    Tenant {
        place,
        namespace,
        name: format!("{what}-{}", place.nth()),
        part,
        work,
    }
}

fn free(_: GpuPosition) -> Vec<Tenant> {
    Vec::new()
}

fn whole(place: GpuPosition) -> Vec<Tenant> {
    let tenant = tenant(place, "research", "pretrain", Part::Whole, Work::Trains);
    vec![tenant]
}

fn shares(place: GpuPosition) -> Vec<Tenant> {
    let share = |gib, cores| Part::Share(Tier::Capped, gib, cores);
    // People forget notebooks.
    let notebook = if place.nth().is_multiple_of(3) {
        Work::Tries
    } else {
        Work::Idles
    };
    let mut tenants = vec![
        tenant(place, "vision", "notebook", share(20, 25), notebook),
        tenant(place, "speech", "train-asr", share(40, 50), Work::Trains),
    ];
    if place.gpu.is_multiple_of(2) {
        tenants.push(tenant(place, "vision", "embed", share(8, 25), Work::Serves));
    }
    tenants
}

fn servers(place: GpuPosition) -> Vec<Tenant> {
    let share = Part::Share(Tier::Concurrent, 12, 30);
    let names = ["chat-a", "chat-b", "rerank"];
    names
        .map(|name| tenant(place, "serving", name, share, Work::Serves))
        .into()
}

fn partitions(place: GpuPosition) -> Vec<Tenant> {
    let large = Part::Instance("3g.40gb", 0, 40_448);
    let small = Part::Instance("1g.10gb", 4, 9_856);
    vec![
        tenant(place, "serving", "moderation", large, Work::Serves),
        tenant(place, "regulated", "scoring", small, Work::Serves),
    ]
}

fn turns(place: GpuPosition) -> Vec<Tenant> {
    vec![
        tenant(place, "demo", "workshop", Part::Turn, Work::Tries),
        tenant(place, "demo", "playground", Part::Turn, Work::Idles),
    ]
}
