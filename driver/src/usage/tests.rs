//! The parts add up for any reading, and the right users get them.

use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use tranche_api::usage::{GpuUsage, GroupUsage, Measure, Remainder, ShareUsage, WHOLE, Zombie};

use super::*;

const GIB: u64 = 1 << 30;

fn claim(name: &str) -> ClaimReference {
    ClaimReference {
        namespace: "team".into(),
        name: name.into(),
        uid: format!("uid-of-{name}"),
    }
}

fn user(pod: &str, container: &str) -> User {
    User {
        pod: Some(pod.into()),
        pod_uid: Some(format!("uid-of-{pod}")),
        container: Some(container.into()),
        is_gone: false,
    }
}

/// A capped share of 10 GiB and a context, in the container `main` of a pod of the same name.
fn share(key: &str) -> HeldDevice {
    HeldDevice {
        key: key.into(),
        claim: claim(key),
        request: "gpu".into(),
        pool: "node/gpu".into(),
        device: "gpu-0-capped".into(),
        share_id: Some(format!("share-{key}")),
        tier: Tier::Capped,
        partition: None,
        limit: Limit::Share {
            allocated: 10 * GIB,
            reserved: GIB / 2,
        },
        account: None,
        peak: None,
        idle_seconds: None,
        users: vec![user(key, "main")],
    }
}

fn process(keys: &[&str], pod: &str, bytes: u64, busy: u32) -> ProcessReading {
    ProcessReading {
        bytes,
        busy: Some(busy),
        copies: Some(busy / 2),
        owner: Owner::Claims {
            keys: keys.iter().map(ToString::to_string).collect(),
            pod_uid: Some(format!("uid-of-{pod}")),
            container: Some("main".into()),
        },
    }
}

fn foreign(bytes: u64, busy: u32) -> ProcessReading {
    ProcessReading {
        owner: Owner::Foreign,
        ..process(&[], "", bytes, busy)
    }
}

fn gpu(used: u64, busy: u32, processes: Vec<ProcessReading>) -> GpuReading {
    let memory = Memory {
        total: 80 * GIB,
        reserved: GIB,
        used,
        free: 79 * GIB - used,
    };
    let utilization = [(Measure::Gpu, busy), (Measure::SmActive, busy / 2)];
    GpuReading {
        device: DeviceReading {
            memory: Some(memory),
            utilization: utilization.into_iter().collect(),
            processes,
        },
        ..GpuReading::default()
    }
}

fn busy(share: &ShareUsage, measure: Measure) -> u32 {
    share.utilization.get(measure).unwrap()
}

#[test]
fn each_share_has_what_its_processes_use_and_nobody_the_rest() {
    let held = [share("a"), share("b"), share("idle")];
    let processes = vec![
        process(&["a"], "a", 3 * GIB, 1_000),
        process(&["b"], "b", 4 * GIB, 2_000),
        process(&["b"], "b", GIB, 1_000),
        foreign(2 * GIB, 500),
    ];
    let usage = attribute(gpu(11 * GIB, 5_000, processes), &held, &[]);
    let [a, b, idle] = &usage.shares[..] else {
        panic!("{usage:?}")
    };
    let used = [a, b, idle].map(|it| it.memory.used / GIB);
    assert_eq!(used, [3, 5, 0]);
    assert_eq!([a, b, idle].map(|it| it.processes), [1, 2, 0]);
    assert_eq!(
        [a, b, idle].map(|it| busy(it, Measure::Gpu)),
        [1_000, 3_000, 0]
    );
    // In proportion to the 10, 30, 0 and 5 percent.
    assert_eq!(
        [a, b, idle].map(|it| busy(it, Measure::SmActive)),
        [555, 1_667, 0]
    );
    assert_eq!(a.memory.free, Some(7 * GIB + GIB / 2));
    assert_eq!(idle.memory.free, Some(10 * GIB + GIB / 2));
    assert_eq!(idle.groups[0].pod.as_deref(), Some("idle"));
    assert_eq!(idle.groups[0].container.as_deref(), Some("main"));
    let Remainder {
        used,
        foreign_used,
        foreign_processes,
        utilization,
        ..
    } = &usage.remainder;
    assert_eq!(
        [*used, *foreign_used, (*foreign_processes).into()],
        [3 * GIB, 2 * GIB, 1]
    );
    assert_eq!(utilization.get(Measure::Gpu), Some(1_000));
}

#[test]
fn a_claim_that_has_the_gpu_alone_has_all_that_it_does() {
    let whole = HeldDevice {
        tier: Tier::Exclusive,
        limit: Limit::Alone,
        share_id: None,
        ..share("a")
    };
    // NVML does not report the utilization by process.
    let mut process = process(&["a"], "a", GIB, 0);
    (process.busy, process.copies) = (None, None);
    let usage = attribute(
        gpu(GIB, 7_000, vec![process.clone()]),
        std::slice::from_ref(&whole),
        &[],
    );
    assert_eq!(busy(&usage.shares[0], Measure::Gpu), 7_000);
    assert_eq!(usage.shares[0].memory.free, Some(78 * GIB));
    assert_eq!(usage.remainder.free, 0);
    // A foreign process may have used it as well.
    let both = vec![
        process,
        ProcessReading {
            busy: None,
            ..foreign(GIB, 0)
        },
    ];
    let usage = attribute(gpu(2 * GIB, 7_000, both), &[whole], &[]);
    assert_eq!(busy(&usage.shares[0], Measure::Gpu), 0);
    assert_eq!(usage.remainder.utilization.get(Measure::Gpu), Some(7_000));
}

#[test]
fn a_pod_that_is_gone_is_a_zombie_and_its_share_uses_nothing() {
    let mut gone = share("a");
    gone.users[0].is_gone = true;
    let processes = vec![process(&["a"], "a", 3 * GIB, 4_000)];
    let left = Zombie {
        claim: claim("released"),
        pod: Some("released".into()),
        used: 5 * GIB,
        ..Zombie::default()
    };
    let usage = attribute(gpu(9 * GIB, 4_000, processes), &[gone], &[left]);
    assert_eq!(usage.shares[0].memory.used, 0);
    assert!(usage.shares[0].groups.is_empty());
    let zombies = &usage.remainder.zombies;
    let named: Vec<_> = zombies
        .iter()
        .map(|it| (it.claim.name.as_str(), it.used / GIB, it.processes))
        .collect();
    assert_eq!(named, [("a", 3, 1), ("released", 5, 0)]);
    assert_eq!(usage.remainder.used, 9 * GIB);
    assert_eq!(usage.remainder.utilization.get(Measure::Gpu), Some(4_000));
}

#[test]
fn containers_of_a_pod_differ_and_an_unknown_one_is_not_guessed() {
    let mut held = share("a");
    held.users = vec![user("a", "main"), user("a", "side"), user("b", "main")];
    let of = |container: Option<&str>, pod: &str| {
        let mut process = process(&["a"], pod, GIB, 0);
        if let Owner::Claims { container: of, .. } = &mut process.owner {
            *of = container.map(str::to_owned);
        }
        process
    };
    let processes = vec![
        of(Some("side"), "a"),
        // The only process of its pod.
        of(None, "b"),
        of(None, "a"),
        of(Some("debug"), "a"),
        of(None, "unknown"),
    ];
    let usage = attribute(gpu(5 * GIB, 0, processes), &[held], &[]);
    let groups = usage.shares[0].groups.iter().map(|it| {
        let text = |of: &Option<String>| of.clone().unwrap_or_default();
        (
            text(&it.pod),
            text(&it.pod_uid),
            text(&it.container),
            it.processes,
        )
    });
    let group = |pod: &str, uid: &str, container: &str, processes| {
        (
            pod.to_owned(),
            uid.to_owned(),
            container.to_owned(),
            processes,
        )
    };
    assert_eq!(
        groups.collect::<Vec<_>>(),
        [
            group("a", "uid-of-a", "main", 0),
            group("a", "uid-of-a", "side", 1),
            group("b", "uid-of-b", "main", 1),
            group("a", "uid-of-a", "", 1),
            group("a", "uid-of-a", "debug", 1),
            group("", "uid-of-unknown", "", 1),
        ]
    );
}

#[test]
fn a_process_with_two_shares_counts_once_and_by_their_sizes() {
    let mut larger = share("b");
    larger.limit = Limit::Share {
        allocated: 21 * GIB,
        reserved: 0,
    };
    let processes = vec![process(&["a", "b"], "a", 9 * GIB, 900)];
    let usage = attribute(gpu(9 * GIB, 900, processes), &[share("a"), larger], &[]);
    let each: Vec<_> = usage
        .shares
        .iter()
        .map(|it| (it.memory.used / GIB, it.processes, busy(it, Measure::Gpu)))
        .collect();
    assert_eq!(each, [(3, 1, 300), (6, 0, 600)]);
}

#[test]
fn a_partitions_tenant_has_what_the_partition_does() {
    let mut tenant = share("a");
    tenant.partition = Some("MIG-1".into());
    tenant.limit = Limit::Alone;
    let mut reading = gpu(6 * GIB, 0, Vec::new());
    reading.device.utilization = Utilization::default();
    reading.partitions = vec![PartitionReading {
        uuid: "MIG-1".into(),
        profile: "1g.10gb".into(),
        device: DeviceReading {
            memory: Some(Memory {
                total: 10 * GIB,
                reserved: 0,
                used: 4 * GIB,
                free: 6 * GIB,
            }),
            utilization: [(Measure::GraphicsActive, 5_000)].into_iter().collect(),
            processes: vec![ProcessReading {
                busy: None,
                copies: None,
                ..process(&["a"], "a", 3 * GIB, 0)
            }],
        },
        ..PartitionReading::default()
    }];
    let usage = attribute(reading, &[tenant], &[]);
    let partition = &usage.partitions[0];
    assert_eq!(usage.shares, []);
    assert_eq!(partition.shares[0].memory.used, 3 * GIB);
    assert_eq!(partition.remainder.used, GIB);
    assert_eq!(usage.remainder.used, 2 * GIB);
    assert_eq!(busy(&partition.shares[0], Measure::GraphicsActive), 5_000);
}

fn any_process() -> impl Strategy<Value = ProcessReading> {
    let keys = vec(0..6usize, 0..3);
    let busy = option::of(0..=WHOLE);
    let pod = option::of(0..4usize);
    let container = option::of(0..3usize);
    (keys, 0..40 * GIB, busy, pod, container, any::<bool>()).prop_map(
        |(keys, bytes, busy, pod, container, ended)| ProcessReading {
            bytes,
            busy,
            copies: busy,
            owner: match (keys.is_empty(), ended) {
                (false, _) => Owner::Claims {
                    keys: keys.iter().map(|key| format!("k{key}")).collect(),
                    pod_uid: pod.map(|pod| format!("uid-of-p{pod}")),
                    container: container.map(|it| format!("c{it}")),
                },
                (true, true) => Owner::Ended,
                (true, false) => Owner::Foreign,
            },
        },
    )
}

fn any_device() -> impl Strategy<Value = DeviceReading> {
    let measures = vec((0..Measure::ALL.len(), 0..=WHOLE), 0..8);
    let memory = option::of((0..90 * GIB, 0..90 * GIB, 0..GIB));
    (memory, measures, vec(any_process(), 0..12)).prop_map(|(memory, measures, processes)| {
        let memory = memory.map(|(used, free, reserved)| Memory {
            total: used + free + reserved,
            reserved,
            used,
            free,
        });
        let measures = measures.into_iter();
        DeviceReading {
            memory,
            utilization: measures
                .map(|(at, value)| (Measure::ALL[at], value))
                .collect(),
            processes,
        }
    })
}

fn any_held() -> impl Strategy<Value = Vec<HeldDevice>> {
    let user = (0..4usize, 0..3usize, any::<bool>());
    let one = (0..3usize, 0..3usize, 0..40 * GIB, vec(user, 0..3));
    vec(one, 0..6).prop_map(|all| {
        let each = all.into_iter().enumerate();
        each.map(|(nth, (place, limit, allocated, users))| {
            let users = users.into_iter().map(|(pod, container, is_gone)| User {
                is_gone,
                ..self::user(&format!("p{pod}"), &format!("c{container}"))
            });
            HeldDevice {
                partition: (place > 0).then(|| format!("MIG-{place}")),
                limit: match limit {
                    0 => Limit::Alone,
                    1 => Limit::Unlimited,
                    _ => Limit::Share {
                        allocated,
                        reserved: 0,
                    },
                },
                users: users.collect(),
                ..share(&format!("k{nth}"))
            }
        })
        .collect()
    })
}

/// The sum of the shares of a device and of its remainder.
fn check(
    memory: Option<Memory>,
    utilization: &Utilization,
    shares: &[ShareUsage],
    remainder: &Remainder,
    partitions: [u64; 2],
) {
    for share in shares {
        let groups = &share.groups;
        assert_eq!(
            share.memory.used,
            groups.iter().map(|it| it.used).sum::<u64>()
        );
        assert_eq!(
            share.processes,
            groups.iter().map(|it| it.processes).sum::<u32>()
        );
        for measure in Measure::ALL {
            let of = |it: &GroupUsage| it.utilization.get(measure).unwrap_or(0);
            let sum: u32 = groups.iter().map(of).sum();
            assert_eq!(
                share.utilization.get(measure).unwrap_or(0),
                sum,
                "{measure:?}"
            );
        }
    }
    if let Some(memory) = memory {
        let used: u64 = shares.iter().map(|it| it.memory.used).sum();
        assert_eq!(memory.used, used + remainder.used + partitions[0]);
        let free: u64 = shares.iter().filter_map(|it| it.memory.free).sum();
        assert!(memory.free >= free + remainder.free);
        if partitions[1] == 0 {
            assert_eq!(memory.free, free + remainder.free);
        }
    }
    let named: u64 = remainder.zombies.iter().map(|it| it.used).sum();
    assert!(named + remainder.foreign_used <= remainder.used || memory.is_none());
    for measure in Measure::ALL {
        let of = |it: &ShareUsage| it.utilization.get(measure).unwrap_or(0);
        let sum: u32 = shares.iter().map(of).sum();
        let rest = remainder.utilization.get(measure);
        assert_eq!(
            utilization.get(measure),
            rest.map(|rest| rest + sum),
            "{measure:?}"
        );
    }
}

fn check_gpu(usage: &GpuUsage) {
    let of = |value: fn(&Memory) -> u64| {
        let memory = usage.partitions.iter().filter_map(|it| it.memory.as_ref());
        memory.map(value).sum::<u64>()
    };
    let partitions = [of(|it| it.used), of(|it| it.free)];
    check(
        usage.memory,
        &usage.utilization,
        &usage.shares,
        &usage.remainder,
        partitions,
    );
    for partition in &usage.partitions {
        if let Some(memory) = partition.memory {
            assert_eq!(memory.total, memory.used + memory.free + memory.reserved);
        }
        let Some(_) = partition.memory else { continue };
        let used: u64 = partition.shares.iter().map(|it| it.memory.used).sum();
        let memory = partition.memory.unwrap();
        assert_eq!(memory.used, used + partition.remainder.used);
    }
}

proptest! {
    #[test]
    fn all_parts_add_up(
        device in any_device(),
        partitions in vec(any_device(), 0..3),
        held in any_held(),
        zombies in vec(0..20 * GIB, 0..3),
    ) {
        let each = partitions.into_iter().enumerate();
        let partitions = each.map(|(nth, device)| PartitionReading {
            uuid: format!("MIG-{}", nth + 1),
            device,
            ..PartitionReading::default()
        });
        let reading = GpuReading { device, partitions: partitions.collect(), ..GpuReading::default() };
        let zombies: Vec<_> = zombies
            .into_iter()
            .map(|used| Zombie { used, ..Zombie::default() })
            .collect();
        check_gpu(&attribute(reading, &held, &zombies));
    }
}

#[test]
fn a_process_fills_in_what_is_not_known_of_its_user() {
    let mut held = share("a");
    held.users[0].container = None;
    let owner = Owner::Claims {
        keys: ["a".to_owned()].into(),
        pod_uid: None,
        container: Some("main".into()),
    };
    let process = ProcessReading {
        owner,
        ..process(&["a"], "a", GIB, 100)
    };
    // Its cgroup names no pod: it is that of the only user.
    let usage = attribute(gpu(GIB, 100, vec![process]), &[held], &[]);
    let group = &usage.shares[0].groups[0];
    assert_eq!(group.processes, 1);
    assert_eq!(group.pod.as_deref(), Some("a"));
    assert_eq!(group.container.as_deref(), Some("main"));
}
