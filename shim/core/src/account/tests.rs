//! The account, one process after another, killed at every step.

use std::boxed::Box;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::vec::Vec;

use proptest::prelude::*;

use super::{Account, AccountFull, Locks, Ordering, SlotIndex};
use crate::layout::{MOST_SPARE, SPARE_UNIT};
use crate::sync::kill_after;

const UNIT: u64 = SPARE_UNIT;

/// A file's locks: which description holds which byte.
#[derive(Default)]
struct File {
    held: RefCell<BTreeMap<u64, u32>>,
    next: Cell<u32>,
}

struct Description {
    file: Rc<File>,
    id: u32,
}

impl File {
    fn open(self: &Rc<Self>) -> Description {
        self.next.set(self.next.get() + 1);
        Description {
            file: Rc::clone(self),
            id: self.next.get(),
        }
    }
}

impl Locks for Description {
    fn try_lock(&self, at: u64) -> bool {
        *self.file.held.borrow_mut().entry(at).or_insert(self.id) == self.id
    }
    fn lock_soon(&self, at: u64) -> bool {
        self.try_lock(at)
    }
    fn unlock(&self, at: u64) {
        self.file.held.borrow_mut().remove(&at);
    }
}

/// The kernel drops a description's locks with its last reference.
impl Drop for Description {
    fn drop(&mut self) {
        self.file
            .held
            .borrow_mut()
            .retain(|_, holder| *holder != self.id);
    }
}

type Small = Account<4>;

fn account() -> (Box<Small>, Rc<File>) {
    (Small::fresh(), Rc::default())
}

#[test]
fn the_last_byte_is_granted_and_the_next_refused() {
    let (account, file) = account();
    let process = file.open();
    let slot = account.join(&process, &process, 1, 0).unwrap();
    assert_eq!(account.reserve(slot, 100, 100, 100), Some(100));
    assert_eq!(account.reserve(slot, 1, 1, 100), None);
    assert_eq!(account.release(slot, 1), 1);
    assert_eq!(account.reserve(slot, 2, 2, 100), None);
    assert_eq!(account.reserve(slot, 1, 1, 100), Some(1));
    assert_eq!(account.reserve(slot, u64::MAX, u64::MAX, 100), None);
    assert_eq!((account.used(), account.charged(slot)), (100, 100));
}

#[test]
fn a_slot_is_kept_until_its_files_are_closed_everywhere() {
    let (account, file) = account();
    let (parent, inherited) = (file.open(), file.open());
    let slot = account.join(&parent, &inherited, 1, 0).unwrap();
    account.reserve(slot, 70, 70, 100).unwrap();
    // The parent ends, and its child has the descriptor.
    drop(parent);
    assert_eq!(account.reclaim(&file.open()), 0);
    assert_eq!(account.used(), 70);
    // A process that joins gets another slot, if there is one.
    let others: Vec<_> = (2..5).map(|pid| (pid, file.open())).collect();
    for (pid, other) in &others {
        assert_ne!(account.join(other, other, *pid, 0), Ok(slot));
    }
    assert_eq!(
        account.join(&file.open(), &file.open(), 9, 0),
        Err(AccountFull)
    );
    assert_eq!(account.used(), 70);
    drop(inherited);
    assert_eq!(account.reclaim(&file.open()), 1);
    assert_eq!(account.used(), 0);
}

#[test]
fn a_part_is_granted_where_a_part_will_do() {
    let (account, file) = account();
    let slot = account.join(&file.open(), &file.open(), 1, 0).unwrap();
    assert_eq!(account.reserve(slot, 0, 60, 100), Some(60));
    assert_eq!(account.reserve(slot, 0, 60, 100), Some(40));
    assert_eq!(account.reserve(slot, 0, 60, 100), Some(0));
    assert_eq!(account.release(slot, 150), 100);
    assert_eq!(account.used(), 0);
}

#[test]
fn a_lowered_limit_refuses_and_takes_nothing_away() {
    let (account, file) = account();
    let slot = account.join(&file.open(), &file.open(), 1, 0).unwrap();
    account.reserve(slot, 100, 100, 100).unwrap();
    assert_eq!(account.reserve(slot, 1, 1, 50), None);
    assert_eq!(account.used(), 100);
}

#[test]
fn living_processes_keep_their_slots() {
    let (account, file) = account();
    let living: Vec<_> = (0..4)
        .map(|pid| {
            let process = file.open();
            let slot = account.join(&process, &process, pid, 0).unwrap();
            account.reserve(slot, 10, 10, 100).unwrap();
            (process, slot)
        })
        .collect();
    assert_eq!(
        account.join(&file.open(), &file.open(), 9, 0),
        Err(AccountFull)
    );
    assert_eq!(account.reclaim(&file.open()), 0);
    assert_eq!(account.used(), 40);
    drop(living);
    assert_eq!(account.reclaim(&file.open()), 4);
    assert_eq!(account.used(), 0);
}

#[test]
fn a_dead_process_makes_room_without_a_reclaimer() {
    let (account, file) = account();
    let mut living = Vec::new();
    for pid in 0..4 {
        let process = file.open();
        let slot = account.join(&process, &process, pid, 0).unwrap();
        account.reserve(slot, 10, 10, 100).unwrap();
        account.note_refusal(slot);
        living.push(process);
    }
    drop(living.remove(2));
    let process = file.open();
    assert_eq!(account.join(&process, &process, 9, 0), Ok(SlotIndex(2)));
    assert_eq!(account.used(), 30);
}

/// What is reserved, spares included.
fn reserved(account: &Small) -> u64 {
    account.used.load(Ordering::Relaxed)
}

#[test]
fn a_process_keeps_what_it_frees_for_its_next_allocation() {
    let (account, file) = account();
    let slot = account.join(&file.open(), &file.open(), 1, 0).unwrap();
    let limit = 100 * UNIT;
    account.reserve(slot, 3 * UNIT, 3 * UNIT, limit).unwrap();
    assert_eq!(account.release(slot, 3 * UNIT), 3 * UNIT);
    assert_eq!((account.used(), account.charged(slot)), (0, 0));
    assert_eq!(account.processes().collect::<Vec<_>>(), [(1, 0)]);
    assert_eq!(reserved(&account), 3 * UNIT);
    // In two parts, and the rest from the share.
    for (bytes, all) in [(2, 3), (1, 3), (1, 4)] {
        let bytes = bytes * UNIT;
        assert_eq!(account.reserve(slot, 1, bytes, limit), Some(bytes));
        assert_eq!(reserved(&account), all * UNIT);
    }
    assert_eq!(account.charged(slot), 4 * UNIT);
    // More than it holds; nothing is in it twice.
    assert_eq!(account.release(slot, 9 * UNIT), 4 * UNIT);
    assert_eq!(account.release(slot, UNIT), 0);
    assert_eq!((account.used(), reserved(&account)), (0, 4 * UNIT));
}

#[test]
fn no_more_is_kept_than_the_most_and_nothing_but_whole_units() {
    let (account, file) = account();
    let slot = account.join(&file.open(), &file.open(), 1, 0).unwrap();
    let all = 2 * MOST_SPARE + 7;
    account.reserve(slot, all, all, all).unwrap();
    assert_eq!(account.release(slot, 7), 7);
    assert_eq!(reserved(&account), 2 * MOST_SPARE);
    assert_eq!(account.release(slot, MOST_SPARE + UNIT), MOST_SPARE + UNIT);
    assert_eq!(reserved(&account), MOST_SPARE - UNIT);
    for _ in 1..MOST_SPARE / UNIT {
        assert_eq!(account.release(slot, UNIT), UNIT);
    }
    assert_eq!((account.used(), reserved(&account)), (0, MOST_SPARE - UNIT));
}

#[test]
fn a_spare_causes_no_refusal() {
    let (account, file) = account();
    let processes: Vec<_> = (0..3).map(|_| file.open()).collect();
    let join = |process| account.join(process, process, 1, 0).unwrap();
    let [one, two, three] = [0, 1, 2].map(|nth| join(&processes[nth]));
    let limit = 6 * UNIT;
    let reserve_all = || {
        for slot in [one, two] {
            account.reserve(slot, 3 * UNIT, 3 * UNIT, limit).unwrap();
        }
        assert_eq!(account.reserve(three, 1, UNIT, limit), None);
        for slot in [one, two] {
            account.release(slot, 3 * UNIT);
        }
        assert_eq!((account.used(), reserved(&account)), (0, limit));
    };
    // A process without a spare collects all of it.
    reserve_all();
    assert_eq!(account.reserve(three, limit, limit, limit), Some(limit));
    assert_eq!(account.reserve(one, 1, UNIT, limit), None);
    account.release_to_share(&account.slots[three.0], limit);
    // A process that has a part of it collects it.
    reserve_all();
    assert_eq!(account.reserve(one, limit, limit, limit), Some(limit));
    account.release_to_share(&account.slots[one.0], limit);
    // As much as there is.
    reserve_all();
    assert_eq!(account.reserve(two, 0, 2 * limit, limit), Some(limit));
    assert_eq!((account.used(), reserved(&account)), (limit, limit));
}

#[test]
fn the_spare_of_a_dead_process_goes_with_its_slot_or_before() {
    let (account, file) = account();
    let (dead, inherited, living) = (file.open(), file.open(), file.open());
    let slot = account.join(&dead, &inherited, 1, 0).unwrap();
    let living = account.join(&living, &living, 2, 0).unwrap();
    let limit = 4 * UNIT;
    account.reserve(slot, limit, limit, limit).unwrap();
    account.release(slot, 3 * UNIT);
    // A child has its files: what the process held stays charged, and its spare is free.
    drop(dead);
    assert_eq!(account.reclaim(&file.open()), 0);
    assert_eq!(account.reserve(living, UNIT, UNIT, limit), Some(UNIT));
    assert_eq!(account.used(), 2 * UNIT);
    drop(inherited);
    assert_eq!(account.reclaim(&file.open()), 1);
    assert_eq!((account.used(), reserved(&account)), (UNIT, UNIT));
    // No process has collected it before.
    let dead = file.open();
    let slot = account.join(&dead, &dead, 3, 0).unwrap();
    account.reserve(slot, 2 * UNIT, 2 * UNIT, limit).unwrap();
    account.release(slot, 2 * UNIT);
    drop(dead);
    assert_eq!(reserved(&account), 3 * UNIT);
    assert_eq!(account.reclaim(&file.open()), 1);
    assert_eq!(reserved(&account), UNIT);
}

#[test]
fn refusals_write_nothing_while_there_is_no_spare() {
    let (account, file) = account();
    let process = file.open();
    let slot = account.join(&process, &process, 1, 0).unwrap();
    account.reserve(slot, UNIT, UNIT, UNIT).unwrap();
    for _ in 0..2 {
        assert!(kill_after(0, || {
            assert_eq!(account.reserve(slot, 1, UNIT, UNIT), None);
            assert_eq!(account.reserve(slot, 2 * UNIT, 2 * UNIT, UNIT), None);
        }));
        // After a spare, one refusal searches.
        account.release(slot, UNIT);
        assert_eq!(account.reserve(slot, UNIT, UNIT, UNIT), Some(UNIT));
        assert_eq!(account.reserve(slot, 1, UNIT, UNIT), None);
    }
}

/// The actions of a process, in units of so many bytes, and how many bytes it really holds at each moment.
fn life(account: &Small, process: &Description, held: &Cell<u64>, unit: u64) {
    let slot = account.join(process, process, 1, 0).unwrap();
    let reserve = |least, most| {
        let granted = account.reserve(slot, least * unit, most * unit, 100 * unit);
        granted.map(|bytes| bytes / unit)
    };
    assert_eq!(reserve(30, 30), Some(30));
    held.set(30 * unit);
    assert_eq!(reserve(20, 20), Some(20));
    held.set(50 * unit);
    // The driver refuses this one: rolled back.
    assert_eq!(reserve(40, 40), Some(40));
    account.release(slot, 40 * unit);
    assert_eq!(reserve(10, 10), Some(10));
    assert_eq!(reserve(0, 70), Some(40));
    held.set(100 * unit);
    held.set(70 * unit);
    account.release(slot, 30 * unit);
}

/// A page on which a process has freed all that it had: into its spare, if that is a whole number of units.
fn beside_a_neighbour(unit: u64) -> (Box<Small>, Rc<File>, Description, SlotIndex) {
    let (account, file) = account();
    let neighbour = file.open();
    let slot = account.join(&neighbour, &neighbour, 2, 3).unwrap();
    account.reserve(slot, 7 * unit, 7 * unit, 7 * unit).unwrap();
    account.release(slot, 7 * unit);
    (account, file, neighbour, slot)
}

#[test]
fn killed_at_any_step_it_errs_to_the_safe_side_and_is_repaired() {
    for unit in [1, UNIT] {
        for steps in 0.. {
            let (account, file, _neighbour, neighbours) = beside_a_neighbour(unit);
            let process = file.open();
            let held = Cell::new(0);
            let lived = kill_after(steps, || life(&account, &process, &held, unit));
            // While its locks are held, it is not reclaimed, and what it holds is covered.
            account.reclaim(&file.open());
            account.repair(&file.open());
            assert!(account.used() >= held.get(), "killed after {steps} steps");
            assert!(
                reserved(&account) <= 100 * unit,
                "killed after {steps} steps"
            );
            drop(process);
            account.reclaim(&file.open());
            account.repair(&file.open());
            assert_eq!(account.used(), 0, "killed after {steps} steps");
            let all = 100 * unit;
            assert_eq!(account.reserve(neighbours, all, all, all), Some(all));
            if lived {
                break;
            }
        }
    }
}

#[test]
fn a_reclaimer_killed_at_any_step_subtracts_nothing_twice() {
    for (unit, victim_steps) in [1, UNIT]
        .into_iter()
        .flat_map(|unit| (0..60).map(move |steps| (unit, steps)))
    {
        for steps in 0.. {
            let (account, file, _neighbour, neighbours) = beside_a_neighbour(unit);
            let process = file.open();
            kill_after(victim_steps, || {
                life(&account, &process, &Cell::new(0), unit);
            });
            drop(process);
            // Everything that the victim left of the cap.
            let room = account
                .reserve(neighbours, 0, 100 * unit, 100 * unit)
                .unwrap();

            let reclaimer = file.open();
            let done = kill_after(steps, || {
                account.reclaim(&reclaimer);
                account.repair(&reclaimer);
            });
            drop(reclaimer);
            assert!(account.used() >= room);
            account.reclaim(&file.open());
            account.repair(&file.open());
            assert_eq!(
                account.used(),
                room,
                "victim {victim_steps}, reclaimer {steps}"
            );
            if done {
                break;
            }
        }
    }
}

#[test]
fn nonsense_written_by_the_tenant_is_repaired() {
    let (account, file) = account();
    let process = file.open();
    let slot = account.join(&process, &process, 1, 0).unwrap();
    account.reserve(slot, 10, 10, 100).unwrap();
    for nonsense in [0, 3, u64::MAX] {
        account.used.store(nonsense, Ordering::Relaxed);
        account.repair(&file.open());
        assert_eq!(account.used(), 10);
    }
}

/// Sizes of allocations; some can be spares, some cannot.
fn bytes() -> impl Strategy<Value = u64> {
    prop_oneof![3 => (0..60u64).prop_map(|units| units * UNIT), 1 => 0..60u64]
}

#[derive(Clone, Debug)]
enum Act {
    Start,
    Reserve { who: usize, bytes: u64 },
    Release { who: usize, bytes: u64 },
    End { who: usize },
    Kill { who: usize, bytes: u64, steps: u32 },
    Reclaim,
}

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        2 => Just(Act::Start),
        6 => (0..4usize, bytes()).prop_map(|(who, bytes)| Act::Reserve { who, bytes }),
        4 => (0..4usize, bytes()).prop_map(|(who, bytes)| Act::Release { who, bytes }),
        1 => (0..4usize).prop_map(|who| Act::End { who }),
        2 => (0..4usize, bytes(), 0..12u32).prop_map(|(who, bytes, steps)| Act::Kill { who, bytes, steps }),
        2 => Just(Act::Reclaim),
    ]
}

proptest! {
    /// With any values that a tenant writes into the words, nothing panics, and a repair makes the page consistent.
    #[test]
    fn any_content_is_survived(charges: [u64; 4], used: u64, spares: u64, acts in prop::collection::vec((0..4usize, any::<bool>(), bytes()), 0..20)) {
        let (account, file) = account();
        let processes: Vec<_> = (0..4).map(|_| file.open()).collect();
        let slots: Vec<_> = processes.iter().map(|process| account.join(process, process, 1, 0).unwrap()).collect();
        for (slot, charge) in account.slots.iter().zip(charges) {
            slot.charge.store(charge, Ordering::Relaxed);
        }
        account.used.store(used, Ordering::Relaxed);
        account.spares.store(spares, Ordering::Relaxed);
        for (who, reserves, bytes) in acts {
            if reserves {
                let granted = account.reserve(slots[who], bytes / 2, bytes, 100 * UNIT);
                prop_assert!(granted.is_none_or(|granted| (bytes / 2..=bytes).contains(&granted)));
            } else {
                prop_assert!(account.release(slots[who], bytes) <= bytes);
            }
            let _ = (account.used(), account.processes().count());
        }
        account.repair(&file.open());
        let charged = account.slots.iter().map(|slot| slot.charge().bytes()).sum::<u64>();
        prop_assert_eq!(reserved(&account), charged);
    }

    #[test]
    fn any_history_stays_within_the_cap_and_returns_everything(acts in prop::collection::vec(act(), 0..80)) {
        const LIMIT: u64 = 100 * UNIT;
        let (account, file) = account();
        let mut living: Vec<(Description, SlotIndex, u64)> = Vec::new();
        for act in acts {
            match act {
                Act::Start => {
                    let process = file.open();
                    if let Ok(slot) = account.join(&process, &process, 1, living.len()) {
                        living.push((process, slot, 0));
                    } else {
                        prop_assert_eq!(living.len(), 4);
                    }
                }
                Act::Reserve { who, bytes } => {
                    let fits = bytes <= LIMIT - living.iter().map(|(_, _, held)| held).sum::<u64>();
                    if let Some((_, slot, held)) = living.get_mut(who) {
                        let reserve = || account.reserve(*slot, bytes, bytes, LIMIT);
                        // As a process does before it is refused.
                        let granted = reserve().or_else(|| {
                            account.reclaim(&file.open());
                            account.repair(&file.open());
                            reserve()
                        });
                        prop_assert_eq!(granted, fits.then_some(bytes));
                        *held += granted.unwrap_or(0);
                    }
                }
                Act::Release { who, bytes } => if let Some((_, slot, held)) = living.get_mut(who) {
                    *held -= account.release(*slot, bytes);
                },
                Act::End { who } => if who < living.len() {
                    living.remove(who);
                },
                Act::Kill { who, bytes, steps } => if who < living.len() {
                    let (process, slot, _) = living.remove(who);
                    kill_after(steps, || { let _ = account.reserve(slot, bytes, bytes, LIMIT); });
                    drop(process);
                },
                Act::Reclaim => {
                    account.reclaim(&file.open());
                    account.repair(&file.open());
                    prop_assert_eq!(account.used(), living.iter().map(|(_, _, held)| held).sum::<u64>());
                }
            }
            let held: u64 = living.iter().map(|(_, _, held)| held).sum();
            prop_assert!(account.used() >= held);
            prop_assert!(reserved(&account) <= LIMIT);
        }
    }
}
