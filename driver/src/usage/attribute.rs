//! Divides the values of a device among those who use it.

use std::collections::BTreeMap;

use tranche_api::usage::{
    GpuUsage, GroupUsage, Measure, Memory, PartitionUsage, Remainder, ShareMemory, ShareUsage,
    Utilization, Zombie,
};

use super::apportion::{apportion, fit};
use super::{DeviceReading, GpuReading, HeldDevice, Limit, Owner, ProcessReading, User};

/// Attributes a reading. `held` is what claims hold on the GPU, its partitions included; `zombies` is memory that dead
/// processes have left.
#[must_use]
pub fn attribute(reading: GpuReading, held: &[HeldDevice], zombies: &[Zombie]) -> GpuUsage {
    let of = |partition: Option<&str>| {
        let on = |it: &&HeldDevice| it.partition.as_deref() == partition;
        held.iter().filter(on).collect::<Vec<_>>()
    };
    let mut partitions: Vec<PartitionUsage> = reading
        .partitions
        .into_iter()
        .map(|it| {
            let (memory, utilization) = (it.device.memory, it.device.utilization.clone());
            let parts = divide(it.device, &of(Some(&it.uuid)), &[], &mut []);
            PartitionUsage {
                uuid: it.uuid,
                profile: it.profile,
                gpu_instance: it.gpu_instance,
                compute_instance: it.compute_instance,
                memory,
                utilization,
                shares: parts.shares,
                remainder: parts.remainder,
            }
        })
        .collect();
    let (memory, utilization) = (reading.device.memory, reading.device.utilization.clone());
    let parts = divide(reading.device, &of(None), zombies, &mut partitions);
    GpuUsage {
        uuid: reading.uuid,
        index: reading.index,
        minor: reading.minor,
        pci_bus_id: reading.pci_bus_id,
        product_name: reading.product_name,
        mig_mode: reading.mig_mode,
        memory,
        utilization,
        sensors: reading.sensors,
        xids: reading.xids,
        shares: parts.shares,
        partitions,
        remainder: parts.remainder,
        problem: reading.problem,
    }
}

/// A device's values, divided.
struct DividedDevice {
    shares: Vec<ShareUsage>,
    remainder: Remainder,
}

/// The users of a device. The numbers are indices of shares and of their users.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Who {
    Group(usize, usize),
    /// A user whose pod is gone.
    Gone(usize, usize),
    Foreign,
}

/// What processes use together.
#[derive(Clone, Default)]
struct Sum {
    bytes: u64,
    busy: u64,
    copies: u64,
    processes: u32,
}

fn divide(
    device: DeviceReading,
    held: &[&HeldDevice],
    zombies: &[Zombie],
    partitions: &mut [PartitionUsage],
) -> DividedDevice {
    let mut users: Vec<Vec<User>> = held.iter().map(|it| it.users.clone()).collect();
    let by_who = sums(&device.processes, held, &mut users);
    let is_known = device.processes.iter().any(|it| it.busy.is_some());
    let whos: Vec<Who> = by_who.keys().copied().collect();
    let sums: Vec<Sum> = by_who.into_values().collect();

    let memory = divide_memory(device.memory, &sums, zombies, partitions);
    let mut utilization = vec![Utilization::default(); sums.len()];
    let mut rest = Utilization::default();
    for (measure, value) in device.utilization.0 {
        let parts = divide_measure(measure, value, is_known, &whos, &sums);
        let left = u64::from(value) - parts.iter().sum::<u64>();
        rest.0.insert(measure, narrow(left));
        for (to, part) in utilization.iter_mut().zip(parts) {
            to.0.insert(measure, narrow(part));
        }
    }

    let mut shares: Vec<ShareUsage> = held.iter().map(|it| empty(it)).collect();
    let mut remainder = Remainder {
        used: memory.rest,
        utilization: rest,
        ..Remainder::default()
    };
    let each = whos.into_iter().zip(sums).zip(memory.parts);
    for (((who, sum), used), utilization) in each.zip(utilization) {
        match who {
            Who::Group(share, user) => {
                let group = GroupUsage {
                    used,
                    utilization,
                    processes: sum.processes,
                    ..group_of(&users[share][user])
                };
                add(&mut shares[share], group);
            }
            Who::Gone(share, user) => {
                let user = users[share][user].clone();
                remainder.used += used;
                sum_up(&mut remainder.utilization, &utilization);
                remainder.zombies.push(Zombie {
                    claim: held[share].claim.clone(),
                    pod: user.pod,
                    pod_uid: user.pod_uid,
                    used,
                    processes: sum.processes,
                });
            }
            Who::Foreign => {
                remainder.used += used;
                sum_up(&mut remainder.utilization, &utilization);
                remainder.foreign_used = used;
                remainder.foreign_processes = sum.processes;
            }
        }
    }
    for (zombie, used) in zombies.iter().zip(memory.zombies) {
        remainder.used += used;
        if used > 0 {
            let zombie = zombie.clone();
            remainder.zombies.push(Zombie { used, ..zombie });
        }
    }
    for share in &mut shares {
        // It was found in samples, not in this reading.
        if let Some(peak) = &mut share.memory.peak {
            peak.bytes = peak.bytes.max(share.memory.used);
        }
    }
    remainder.free = divide_free(device.memory, held, &mut shares, partitions);
    DividedDevice { shares, remainder }
}

/// What each user's processes use. A user without a process is included, unless its pod is gone.
fn sums(
    processes: &[ProcessReading],
    held: &[&HeldDevice],
    users: &mut [Vec<User>],
) -> BTreeMap<Who, Sum> {
    let mut sums = BTreeMap::new();
    for (share, users) in users.iter().enumerate() {
        let present = users.iter().enumerate().filter(|(_, user)| !user.is_gone);
        sums.extend(present.map(|(user, _)| (Who::Group(share, user), Sum::default())));
    }
    for process in processes {
        let (keys, pod_uid, container) = match &process.owner {
            Owner::Claims {
                keys,
                pod_uid,
                container,
            } => (Some(keys), pod_uid.as_deref(), container.as_deref()),
            Owner::Foreign => (None, None, None),
            Owner::Ended => continue,
        };
        let is_of = |it: &HeldDevice| keys.is_some_and(|keys| keys.contains(&it.key));
        let shares: Vec<usize> = (0..held.len()).filter(|at| is_of(held[*at])).collect();
        if shares.is_empty() {
            sums.entry(Who::Foreign).or_default().add(process, 1);
            continue;
        }
        // A pod may hold several shares of a device. NVML does not report which of them a process uses.
        let weights: Vec<u64> = shares.iter().map(|at| held[*at].limit.weight()).collect();
        let divided = |value: u64| apportion(value, &weights);
        let bytes = divided(process.bytes);
        let busy = process.busy.map(|busy| divided(busy.into()));
        let copies = process.copies.map(|copies| divided(copies.into()));
        for (nth, share) in shares.into_iter().enumerate() {
            let part = |of: &Option<Vec<u64>>| of.as_ref().map(|parts| narrow(parts[nth]));
            let part = ProcessReading {
                bytes: bytes[nth],
                busy: part(&busy),
                copies: part(&copies),
                owner: Owner::Foreign,
            };
            let listed = held[share].users.len();
            let user = user_of(&mut users[share], listed, pod_uid, container);
            let who = if users[share][user].is_gone {
                Who::Gone(share, user)
            } else {
                Who::Group(share, user)
            };
            let count = u32::from(nth == 0);
            sums.entry(who).or_default().add(&part, count);
        }
    }
    sums
}

impl Sum {
    fn add(&mut self, process: &ProcessReading, count: u32) {
        self.bytes = self.bytes.saturating_add(process.bytes);
        self.busy += u64::from(process.busy.unwrap_or(0));
        self.copies += u64::from(process.copies.unwrap_or(0));
        self.processes += count;
    }
}

/// The user of a share to whom a process belongs, as far as its pod and container are known; a new user if none
/// matches. The first `listed` users were known before.
fn user_of(
    users: &mut Vec<User>,
    listed: usize,
    pod_uid: Option<&str>,
    container: Option<&str>,
) -> usize {
    let of_pod = |user: &User| pod_uid.is_none() || user.pod_uid.as_deref() == pod_uid;
    let fits = |at: usize| {
        let user = &users[at];
        let is_it = match (container, user.container.as_deref()) {
            (None, _) => true,
            (Some(_), None) => at < listed,
            (Some(name), Some(own)) => own == name,
        };
        of_pod(user) && is_it
    };
    let mut fitting = (0..users.len()).filter(|at| fits(*at));
    if let (Some(found), None) = (fitting.next(), fitting.next()) {
        let user = &mut users[found];
        if found < listed && user.container.is_none() {
            user.container = container.map(str::to_owned);
        }
        return found;
    }
    let known = users
        .iter()
        .find(|user| pod_uid.is_some() && of_pod(user))
        .map(|user| (user.pod.clone(), user.is_gone));
    let (pod, is_gone) = known.unwrap_or_default();
    let new = User {
        pod,
        pod_uid: pod_uid.map(str::to_owned),
        container: container.map(str::to_owned),
        is_gone,
    };
    let same = users.iter().position(|user| *user == new);
    same.unwrap_or_else(|| {
        users.push(new);
        users.len() - 1
    })
}

/// A device's used memory, divided.
struct Divided {
    parts: Vec<u64>,
    zombies: Vec<u64>,
    rest: u64,
}

fn divide_memory(
    memory: Option<Memory>,
    sums: &[Sum],
    zombies: &[Zombie],
    partitions: &mut [PartitionUsage],
) -> Divided {
    let used_of = |it: &PartitionUsage| it.memory.map_or(0, |memory| memory.used);
    let mut parts: Vec<u64> = sums.iter().map(|sum| sum.bytes).collect();
    parts.extend(partitions.iter().map(used_of));
    parts.extend(zombies.iter().map(|zombie| zombie.used));
    let total = memory.map_or(u64::MAX, |memory| memory.used);
    let (mut parts, rest) = fit(total, &parts);
    let zombies = parts.split_off(sums.len() + partitions.len());
    let of_partitions = parts.split_off(sums.len());
    for (partition, used) in partitions.iter_mut().zip(of_partitions) {
        shrink(partition, used);
    }
    Divided {
        parts,
        zombies,
        rest: memory.map_or(0, |_| rest),
    }
}

/// Reduces the used memory of a partition to this value.
fn shrink(partition: &mut PartitionUsage, used: u64) {
    let Some(memory) = &mut partition.memory else {
        return;
    };
    if memory.used == used {
        return;
    }
    memory.free += memory.used - used;
    memory.used = used;
    let of_shares = partition.shares.iter().flat_map(|share| &share.groups);
    let mut parts: Vec<u64> = of_shares.map(|group| group.used).collect();
    parts.push(partition.remainder.used);
    let mut parts = fit(used, &parts).0.into_iter();
    for share in &mut partition.shares {
        share.memory.used = 0;
        for group in &mut share.groups {
            group.used = parts.next().unwrap_or(0);
            share.memory.used += group.used;
        }
    }
    let left: u64 = partition.shares.iter().map(|share| share.memory.used).sum();
    partition.remainder.used = used - left;
}

/// One measure of a device, divided among `whos`.
fn divide_measure(
    measure: Measure,
    value: u32,
    is_known: bool,
    whos: &[Who],
    sums: &[Sum],
) -> Vec<u64> {
    let value = u64::from(value);
    let busy = || sums.iter().map(|sum| sum.busy).collect::<Vec<_>>();
    match measure {
        Measure::Gpu if is_known => fit(value, &busy()).0,
        Measure::MemoryCopy if is_known => {
            let copies: Vec<u64> = sums.iter().map(|sum| sum.copies).collect();
            fit(value, &copies).0
        }
        _ if sums.iter().any(|sum| sum.busy > 0) => apportion(value, &busy()),
        // A user that has a device alone used everything that the device did.
        _ if matches!(whos, [Who::Group(..)]) => vec![value],
        _ => vec![0; sums.len()],
    }
}

/// Divides the device's free memory: each share may take the rest of its limit. Returns what belongs to no share.
fn divide_free(
    memory: Option<Memory>,
    held: &[&HeldDevice],
    shares: &mut [ShareUsage],
    partitions: &[PartitionUsage],
) -> u64 {
    let Some(memory) = memory else { return 0 };
    let left = |held: &HeldDevice, share: &ShareUsage| match held.limit {
        Limit::Alone => memory.free,
        Limit::Share {
            allocated,
            reserved,
        } => allocated
            .saturating_add(reserved)
            .saturating_sub(share.memory.used),
        Limit::Unlimited => 0,
    };
    let each = held.iter().zip(&*shares);
    let mut parts: Vec<u64> = each.map(|(held, share)| left(held, share)).collect();
    let free_of = |it: &PartitionUsage| it.memory.map_or(0, |memory| memory.free);
    parts.push(partitions.iter().map(free_of).sum());
    let (parts, rest) = fit(memory.free, &parts);
    for ((held, share), part) in held.iter().zip(shares).zip(parts) {
        share.memory.free = (held.limit != Limit::Unlimited).then_some(part);
    }
    rest
}

fn empty(held: &HeldDevice) -> ShareUsage {
    let (allocated, reserved) = match held.limit {
        Limit::Share {
            allocated,
            reserved,
        } => (Some(allocated), reserved),
        Limit::Alone | Limit::Unlimited => (None, 0),
    };
    ShareUsage {
        claim: held.claim.clone(),
        request: held.request.clone(),
        pool: held.pool.clone(),
        device: held.device.clone(),
        share_id: held.share_id.clone(),
        tier: held.tier,
        memory: ShareMemory {
            allocated,
            reserved,
            account: held.account,
            peak: held.peak,
            ..ShareMemory::default()
        },
        utilization: Utilization::default(),
        processes: 0,
        idle_seconds: held.idle_seconds,
        groups: Vec::new(),
    }
}

fn group_of(user: &User) -> GroupUsage {
    GroupUsage {
        pod: user.pod.clone(),
        pod_uid: user.pod_uid.clone(),
        container: user.container.clone(),
        ..GroupUsage::default()
    }
}

/// Adds `more` to `to`.
fn sum_up(to: &mut Utilization, more: &Utilization) {
    for (measure, value) in &more.0 {
        *to.0.entry(*measure).or_default() += value;
    }
}

fn add(share: &mut ShareUsage, group: GroupUsage) {
    share.memory.used += group.used;
    share.processes += group.processes;
    sum_up(&mut share.utilization, &group.utilization);
    share.groups.push(group);
}

/// A part of a utilization, which is at most [`WHOLE`](tranche_api::usage::WHOLE).
fn narrow(part: u64) -> u32 {
    u32::try_from(part).unwrap_or(u32::MAX)
}
