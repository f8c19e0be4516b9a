//! Every interleaving of a few processes, by loom: `shim/core/deep-check loom`.

use std::boxed::Box;
use std::vec::Vec;

use loom::sync::{Arc, Mutex};
use loom::thread;

use super::{Account, Locks, SlotIndex};
use crate::layout::{REPAIR_LOCK, SPARE_UNIT, slot_lock};
use crate::sync::kill_after;

const LIMIT: u64 = 10;

type Small = Account<2>;

/// The kernel's locks: bytes held, by description.
struct World {
    account: Box<Small>,
    held: Mutex<Vec<(u64, u32)>>,
}

struct Description<'a> {
    world: &'a World,
    id: u32,
}

impl Locks for Description<'_> {
    fn try_lock(&self, at: u64) -> bool {
        let mut held = self.world.held.lock().unwrap();
        match held.iter().find(|(byte, _)| *byte == at) {
            Some((_, holder)) => *holder == self.id,
            None => {
                held.push((at, self.id));
                true
            }
        }
    }
    fn lock_soon(&self, at: u64) -> bool {
        while !self.try_lock(at) {
            thread::yield_now();
        }
        true
    }
    fn unlock(&self, at: u64) {
        self.world
            .held
            .lock()
            .unwrap()
            .retain(|(byte, _)| *byte != at);
    }
}

impl Drop for Description<'_> {
    fn drop(&mut self) {
        self.world
            .held
            .lock()
            .unwrap()
            .retain(|(_, holder)| *holder != self.id);
    }
}

impl World {
    fn new() -> Arc<Self> {
        Arc::new(Self {
            account: Small::fresh(),
            held: Mutex::new(Vec::new()),
        })
    }
    fn open(&self, id: u32) -> Description<'_> {
        Description { world: self, id }
    }
}

fn explore(preemptions: usize, scene: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(scene);
}

/// Two processes request more than the limit: together they never hold more than it.
#[test]
fn reservations_never_exceed_the_limit() {
    explore(4, || {
        let world = World::new();
        let held = Arc::new(Mutex::new(0u64));
        let processes: Vec<_> = (1..=2)
            .map(|id| {
                let (world, held) = (Arc::clone(&world), Arc::clone(&held));
                thread::spawn(move || {
                    let process = world.open(id);
                    let slot = world
                        .account
                        .join(&process, &process, 0, id as usize)
                        .unwrap();
                    if world.account.reserve(slot, 6, 6, LIMIT).is_some() {
                        let mut now = held.lock().unwrap();
                        *now += 6;
                        assert!(*now <= LIMIT);
                        *now -= 6;
                        drop(now);
                        world.account.release(slot, 6);
                    }
                })
            })
            .collect();
        for process in processes {
            process.join().unwrap();
        }
        assert_eq!(world.account.used(), 0);
    });
}

/// One process is killed at some step while its neighbour works and a third reclaims and repairs:
/// the neighbour's reservation is never taken from the account, and nothing is left in the end.
#[test]
fn a_kill_beside_work_and_repair_is_safe() {
    for steps in 0..9 {
        explore(2, move || {
            let world = World::new();
            let victim = {
                let world = Arc::clone(&world);
                thread::spawn(move || {
                    let process = world.open(1);
                    kill_after(steps, || {
                        let slot = world.account.join(&process, &process, 0, 0).unwrap();
                        let _ = world.account.reserve(slot, 4, 4, LIMIT);
                    });
                })
            };
            let janitor = {
                let world = Arc::clone(&world);
                thread::spawn(move || {
                    let locks = world.open(3);
                    world.account.reclaim(&locks);
                    world.account.repair(&locks);
                })
            };
            let process = world.open(2);
            let slot = world.account.join(&process, &process, 0, 1).unwrap();
            world.account.reserve(slot, 6, 6, LIMIT).unwrap();
            assert!(world.account.used() >= 6);
            victim.join().unwrap();
            janitor.join().unwrap();
            assert!(world.account.used() >= 6);
            assert!(world.account.used() <= LIMIT);
            let locks = world.open(4);
            world.account.reclaim(&locks);
            world.account.repair(&locks);
            assert_eq!(world.account.used(), 6);
        });
    }
}

/// Two concurrent repairs subtract a surplus once.
#[test]
fn a_surplus_is_subtracted_once() {
    explore(4, || {
        let world = World::new();
        let process = world.open(1);
        let slot = world.account.join(&process, &process, 0, 0).unwrap();
        world.account.reserve(slot, 3, 3, LIMIT).unwrap();
        // What a killed process left.
        world.account.used.fetch_add(2, super::Ordering::AcqRel);
        let repairers: Vec<_> = (2..=3)
            .map(|id| {
                let world = Arc::clone(&world);
                thread::spawn(move || world.account.repair(&world.open(id)))
            })
            .collect();
        world.account.release(slot, 1);
        for repairer in repairers {
            repairer.join().unwrap();
        }
        assert!(world.account.used() >= 2);
        world.account.repair(&world.open(4));
        assert_eq!(world.account.used(), 2);
        assert!(slot_lock(1) < REPAIR_LOCK);
    });
}

/// What a dead process had is enough for two that reclaim at once: neither is refused.
#[test]
fn nobody_is_refused_what_a_dead_process_had() {
    explore(3, || {
        let world = World::new();
        let (dead, process) = (world.open(1), world.open(2));
        let slot = world.account.join(&dead, &dead, 0, 0).unwrap();
        world.account.reserve(slot, LIMIT, LIMIT, LIMIT).unwrap();
        let own = world.account.join(&process, &process, 0, 1).unwrap();
        drop(dead);
        let threads: Vec<_> = (3..=4)
            .map(|id| {
                let world = Arc::clone(&world);
                thread::spawn(move || {
                    world.account.reclaim(&world.open(id));
                    let half = LIMIT / 2;
                    world.account.reserve(own, half, half, LIMIT)
                })
            })
            .collect();
        for thread in threads {
            assert!(thread.join().unwrap().is_some());
        }
    });
}

/// Two processes reclaim, and one joins meanwhile and may take the dead one's slot: its charge is
/// returned once.
#[test]
fn a_dead_slot_is_given_back_once() {
    explore(3, || {
        let world = World::new();
        let (dead, inherited) = (world.open(1), world.open(6));
        let slot = world.account.join(&dead, &inherited, 0, 0).unwrap();
        world.account.reserve(slot, 4, 4, LIMIT).unwrap();
        drop((dead, inherited));
        let reclaimers: Vec<_> = (2..=3)
            .map(|id| {
                let world = Arc::clone(&world);
                thread::spawn(move || world.account.reclaim(&world.open(id)))
            })
            .collect();
        let heir = world.open(4);
        let slot = world.account.join(&heir, &heir, 0, 0).unwrap();
        assert_eq!(world.account.reserve(slot, 6, 6, LIMIT), Some(6));
        for reclaimer in reclaimers {
            reclaimer.join().unwrap();
        }
        assert!(world.account.used() >= 6);
        world.account.reclaim(&world.open(5));
        world.account.repair(&world.open(5));
        assert_eq!(world.account.used(), 6);
    });
}

/// The size of the share in the models of spares.
const ALL: u64 = SPARE_UNIT;

/// A process takes its spare again, gives it and ends, while another one collects it, and a third one joins
/// in the slot of one that has ended: together they never hold more than the limit, and nothing is left.
#[test]
fn a_spare_is_used_once() {
    explore(2, || {
        let world = World::new();
        // The driver's memory, which loom does not explore.
        let held = std::sync::Arc::new(std::sync::atomic::AtomicU64::new(0));
        let hold = |account: &Small, held: &std::sync::atomic::AtomicU64| {
            let before = held.fetch_add(1, super::Ordering::SeqCst);
            assert_eq!(before, 0);
            // Others run here.
            assert_eq!(account.used.load(super::Ordering::Acquire), ALL);
            held.fetch_sub(1, super::Ordering::SeqCst);
        };
        let owner = world.open(1);
        let slot = world.account.join(&owner, &owner, 0, 0).unwrap();
        world.account.reserve(slot, ALL, ALL, ALL).unwrap();
        world.account.release(slot, ALL);
        let others: Vec<_> = (2..=3)
            .map(|id| {
                let (world, held) = (Arc::clone(&world), std::sync::Arc::clone(&held));
                thread::spawn(move || {
                    let process = world.open(id);
                    // Both slots may be taken still.
                    if let Ok(slot) = world.account.join(&process, &process, 0, 0)
                        && world.account.reserve(slot, ALL, ALL, ALL).is_some()
                    {
                        hold(&world.account, &held);
                        world.account.release(slot, ALL);
                    }
                })
            })
            .collect();
        if world.account.reserve(slot, ALL, ALL, ALL).is_some() {
            hold(&world.account, &held);
            world.account.release(slot, ALL);
        }
        drop(owner);
        for other in others {
            other.join().unwrap();
        }
        let locks = world.open(4);
        world.account.reclaim(&locks);
        world.account.repair(&locks);
        assert_eq!(world.account.used.load(super::Ordering::Acquire), 0);
    });
}

/// Lets a process hold all of the share, and the page say that it may have a spare: others collect.
fn hold_after_a_spare(account: &Small, slot: SlotIndex) {
    account.reserve(slot, ALL, ALL, ALL).unwrap();
    account.release(slot, ALL);
    assert!(account.take_spare(slot, ALL));
}

/// A process gives while another one collects and is killed at some step: a third one that asks for all of
/// the share gets it.
#[test]
fn a_killed_collector_leaves_no_spare_unseen() {
    for steps in 0..24 {
        explore(2, move || {
            let world = World::new();
            let giver = world.open(1);
            let slot = world.account.join(&giver, &giver, 0, 0).unwrap();
            hold_after_a_spare(&world.account, slot);
            let victim = {
                let world = Arc::clone(&world);
                thread::spawn(move || {
                    let process = world.open(2);
                    kill_after(steps, || {
                        let slot = world.account.join(&process, &process, 0, 1).unwrap();
                        if world.account.reserve(slot, ALL, ALL, ALL).is_some() {
                            world.account.release(slot, ALL);
                        }
                    });
                })
            };
            world.account.release(slot, ALL);
            victim.join().unwrap();
            let process = world.open(3);
            let slot = world.account.join(&process, &process, 0, 1).unwrap();
            let reserve = || world.account.reserve(slot, ALL, ALL, ALL);
            // As a process does before it is refused.
            let granted = reserve().or_else(|| {
                world.account.repair(&world.open(4));
                reserve()
            });
            assert_eq!(granted, Some(ALL));
        });
    }
}

/// A process gives while two threads of another one collect: afterwards all of the share is there.
#[test]
fn collectors_at_the_same_time_leave_no_spare_unseen() {
    explore(2, || {
        let world = World::new();
        let (giver, taker) = (world.open(1), world.open(2));
        let giving = world.account.join(&giver, &giver, 0, 0).unwrap();
        let taking = world.account.join(&taker, &taker, 0, 1).unwrap();
        hold_after_a_spare(&world.account, giving);
        let collectors: Vec<_> = (0..2)
            .map(|_| {
                let world = Arc::clone(&world);
                thread::spawn(move || {
                    if world.account.reserve(taking, ALL, ALL, ALL).is_some() {
                        world.account.release(taking, ALL);
                    }
                })
            })
            .collect();
        world.account.release(giving, ALL);
        for collector in collectors {
            collector.join().unwrap();
        }
        assert_eq!(world.account.reserve(taking, ALL, ALL, ALL), Some(ALL));
        drop((giver, taker));
    });
}
