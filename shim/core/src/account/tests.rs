//! The account, one process after another, killed at every step.

use std::boxed::Box;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::vec::Vec;

use proptest::prelude::*;

use super::{Account, Full, Locks, SlotIndex};
use crate::sync::kill_after;

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
fn a_slot_is_kept_until_the_last_who_has_its_files_is_gone() {
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
    assert_eq!(account.join(&file.open(), &file.open(), 9, 0), Err(Full));
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
    assert_eq!(account.join(&file.open(), &file.open(), 9, 0), Err(Full));
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

/// The actions of a process, and how much it really holds at each moment.
fn life(account: &Small, process: &Description, held: &Cell<u64>) {
    let slot = account.join(process, process, 1, 0).unwrap();
    account.reserve(slot, 30, 30, 100).unwrap();
    held.set(30);
    account.reserve(slot, 20, 20, 100).unwrap();
    held.set(50);
    // The driver refuses this one: rolled back.
    account.reserve(slot, 40, 40, 100).unwrap();
    account.release(slot, 40);
    assert_eq!(account.reserve(slot, 0, 70, 100), Some(50));
    held.set(100);
    held.set(70);
    account.release(slot, 30);
}

#[test]
fn killed_at_any_step_it_errs_to_the_safe_side_and_is_repaired() {
    for steps in 0.. {
        let (account, file) = account();
        let neighbour = file.open();
        let neighbours = account.join(&neighbour, &neighbour, 2, 3).unwrap();
        account.reserve(neighbours, 7, 7, 7).unwrap();
        account.release(neighbours, 7);

        let process = file.open();
        let held = Cell::new(0);
        let lived = kill_after(steps, || life(&account, &process, &held));
        // As long as its locks are held it is not reclaimed, and what it holds is covered.
        account.reclaim(&file.open());
        account.repair(&file.open());
        assert!(account.used() >= held.get(), "killed after {steps} steps");
        assert!(account.used() <= 100, "killed after {steps} steps");
        drop(process);
        account.reclaim(&file.open());
        account.repair(&file.open());
        assert_eq!(account.used(), 0, "killed after {steps} steps");
        assert_eq!(account.reserve(neighbours, 100, 100, 100), Some(100));
        if lived {
            return;
        }
    }
}

#[test]
fn a_reclaimer_killed_at_any_step_subtracts_nothing_twice() {
    for victim_steps in 0..40 {
        for steps in 0.. {
            let (account, file) = account();
            let neighbour = file.open();
            let neighbours = account.join(&neighbour, &neighbour, 2, 3).unwrap();
            let process = file.open();
            kill_after(victim_steps, || life(&account, &process, &Cell::new(0)));
            drop(process);
            // Whatever the victim left of the cap.
            let room = account.reserve(neighbours, 0, 100, 100).unwrap();

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
        account.used.store(nonsense, super::Ordering::Relaxed);
        account.repair(&file.open());
        assert_eq!(account.used(), 10);
    }
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
        6 => (0..4usize, 0..60u64).prop_map(|(who, bytes)| Act::Reserve { who, bytes }),
        4 => (0..4usize, 0..60u64).prop_map(|(who, bytes)| Act::Release { who, bytes }),
        1 => (0..4usize).prop_map(|who| Act::End { who }),
        2 => (0..4usize, 0..60u64, 0..5u32).prop_map(|(who, bytes, steps)| Act::Kill { who, bytes, steps }),
        2 => Just(Act::Reclaim),
    ]
}

proptest! {
    #[test]
    fn any_history_stays_within_the_cap_and_returns_everything(acts in prop::collection::vec(act(), 0..80)) {
        const LIMIT: u64 = 100;
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
                Act::Reserve { who, bytes } => if let Some((_, slot, held)) = living.get_mut(who) {
                    *held += account.reserve(*slot, bytes, bytes, LIMIT).unwrap_or(0);
                },
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
            prop_assert!(account.used() <= LIMIT);
        }
    }
}
