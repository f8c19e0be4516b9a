use std::boxed::Box;
use std::collections::BTreeMap;
use std::vec::Vec;

use proptest::prelude::*;

use super::{Allocation, Binding, Freed, Full, Map, Physical};

type Small = Physical<64, 8>;

fn map<V: Copy + Default, const N: usize>() -> Map<V, N> {
    Map {
        len: 0,
        keys: [0; N],
        values: [V::default(); N],
    }
}

fn fresh() -> Box<Small> {
    Box::new(Physical {
        allocations: map::<Allocation, 64>(),
        bindings: map::<Binding, 64>(),
        tokens: map::<u64, 8>(),
        owned: 0,
    })
}

const MIB: u64 = 1 << 20;

/// What an act frees, in bytes.
fn freed(memory: &mut Small, act: impl FnOnce(&mut Small, &mut dyn FnMut(Freed))) -> u64 {
    let mut sum = 0;
    act(memory, &mut |freed| {
        assert_eq!(freed.device, 3);
        sum += freed.bytes;
    });
    sum
}

fn release(memory: &mut Small, handle: u64) -> u64 {
    freed(memory, |memory, freed| memory.release(handle, freed))
}

fn bind(memory: &mut Small, place: u64, handle: u64) -> u64 {
    freed(memory, |memory, freed| {
        memory.bind(place, handle, 2 * MIB, 0, freed).unwrap();
    })
}

#[test]
fn memory_lives_as_long_as_its_last_use() {
    let mut memory = fresh();
    // The handle is released while it is mapped, as llama.cpp's pool does.
    memory.create(7, 4 * MIB, 3).unwrap();
    bind(&mut memory, 0x1000, 7);
    bind(&mut memory, 0x2000, 7);
    assert_eq!(release(&mut memory, 7), 0);
    let unbind = |memory: &mut Small, at| {
        freed(memory, |memory, freed| {
            memory.unbind(at, freed);
        })
    };
    assert_eq!(unbind(&mut memory, 0x1000), 0);
    assert_eq!(unbind(&mut memory, 0x2000), 4 * MIB);
    assert_eq!(unbind(&mut memory, 0x2000), 0);
    // The mapping goes first; and a handle retained by its address.
    memory.create(7, 4 * MIB, 3).unwrap();
    bind(&mut memory, 0x1000, 7);
    memory.retain(7);
    assert_eq!(unbind(&mut memory, 0x1000), 0);
    assert_eq!(release(&mut memory, 7), 0);
    assert_eq!(release(&mut memory, 7), 4 * MIB);
    assert_eq!(release(&mut memory, 7), 0, "released too often");
}

#[test]
fn a_range_of_several_mappings_goes_at_once() {
    let mut memory = fresh();
    let start = 0x7000_0000_0000;
    for nth in 0..4 {
        memory.create(10 + nth, 2 * MIB, 3).unwrap();
        // The third is no memory of ours, and not noted.
        let handle = if nth == 2 { 99 } else { 10 + nth };
        bind(&mut memory, start + nth * 2 * MIB, handle);
        release(&mut memory, 10 + nth);
    }
    let sum = freed(&mut memory, |memory, freed| {
        memory.unbind_range(start, 8 * MIB, 2 * MIB, freed);
    });
    assert_eq!(sum, 6 * MIB);
    assert_eq!((memory.bindings.len, memory.allocations.len), (0, 0));
}

#[test]
fn an_import_of_ones_own_is_one_more_use() {
    let mut memory = fresh();
    memory.create(7, MIB, 3).unwrap();
    memory.export(42, 7);
    memory.import(42, 8).unwrap();
    memory.import(42, 7).unwrap();
    memory.import(43, 9).unwrap();
    assert!(!memory.knows(9), "another process's");
    assert_eq!(release(&mut memory, 7), 0);
    assert_eq!(release(&mut memory, 7), 0, "handle 8 holds it");
    bind(&mut memory, 0x1000, 8);
    assert_eq!(release(&mut memory, 8), 0);
    let sum = freed(&mut memory, |memory, freed| {
        memory.unbind(0x1000, freed);
    });
    assert_eq!(sum, MIB);
    assert_eq!(memory.tokens.len, 0, "the token is worth nothing any more");
}

#[test]
fn what_goes_with_an_owner_goes() {
    let mut memory = fresh();
    memory.create(7, MIB, 3).unwrap();
    for place in [1, 2] {
        memory.bind(place, 7, 0, 500, &mut |_| ()).unwrap();
    }
    assert_eq!(release(&mut memory, 7), 0);
    let sum = freed(&mut memory, |memory, freed| memory.end_owner(500, freed));
    assert_eq!((sum, memory.owned), (MIB, 0));
    // The owner is memory itself, as a multicast object's handle is.
    memory.create(8, 0, 3).unwrap();
    memory.create(7, MIB, 3).unwrap();
    memory.bind(1, 7, 0, 8, &mut |_| ()).unwrap();
    assert_eq!(release(&mut memory, 7), 0);
    assert_eq!(release(&mut memory, 8), MIB);
}

#[test]
fn a_place_that_shows_something_else_lets_go() {
    let mut memory = fresh();
    for handle in [7, 8] {
        memory.create(handle, MIB, 3).unwrap();
    }
    bind(&mut memory, 1, 7);
    release(&mut memory, 7);
    assert_eq!(bind(&mut memory, 1, 8), MIB);
    // The same again is not its end.
    release(&mut memory, 8);
    assert_eq!(bind(&mut memory, 1, 8), 0);
    assert_eq!(memory.shown_at(1 + MIB), Some(8));
    assert_eq!(memory.shown_at(1 + 2 * MIB), None);
    assert_eq!(bind(&mut memory, 1, 99), MIB, "unknown memory");
}

#[test]
fn without_room_nothing_is_given_back_early() {
    let mut memory = fresh();
    let noted = (1..=100u64)
        .take_while(|&handle| memory.create(handle, MIB, 3).is_ok())
        .count();
    assert_eq!(noted, 56);
    assert_eq!(memory.create(90, MIB, 3), Err(Full));
    assert_eq!(release(&mut memory, 90), 0);
    // A mapping that cannot be noted keeps its memory.
    let bound = (1..=100u64)
        .take_while(|&place| memory.bind(place, 1, 0, 0, &mut |_| ()).is_ok())
        .count();
    assert_eq!(bound, 56);
    release(&mut memory, 1);
    let sum = freed(&mut memory, |memory, freed| {
        (1..=100u64).for_each(|place| {
            memory.unbind(place, freed);
        });
    });
    assert_eq!(sum, 0);
}

proptest! {
    /// Whatever is done in whatever order: freed is exactly what has no use left.
    #[test]
    fn it_holds_like_counted_references(
        acts in prop::collection::vec((0u8..6, 1u64..6, 1u64..12), 0..300),
    ) {
        let mut memory = fresh();
        // Handles to (bytes, not released, places that show it), and places to handles.
        let mut uses = BTreeMap::<u64, (u64, u32, u32)>::new();
        let mut places = BTreeMap::<u64, u64>::new();
        for (act, handle, place) in acts {
            let mut found = Vec::new();
            let mut expected = Vec::new();
            let mut end = |uses: &mut BTreeMap<u64, (u64, u32, u32)>, handle: u64| {
                if let Some((bytes, 0, 0)) = uses.get(&handle) {
                    expected.push(*bytes);
                    uses.remove(&handle);
                }
            };
            let known = uses.get(&handle).copied();
            match (act, known) {
                // A driver gives no handle out that is in use.
                (0, None) => {
                    memory.create(handle, handle * MIB, 3).unwrap();
                    uses.insert(handle, (handle * MIB, 1, 0));
                }
                // And refuses to release what was released.
                (1 | 2, Some((_, 1.., _))) => {
                    memory.release(handle, &mut |freed| found.push(freed.bytes));
                    uses.get_mut(&handle).unwrap().1 -= 1;
                    end(&mut uses, handle);
                }
                (3, Some(_)) => {
                    memory.bind(place, handle, MIB, 0, &mut |freed| found.push(freed.bytes)).unwrap();
                    uses.get_mut(&handle).unwrap().2 += 1;
                    if let Some(former) = places.insert(place, handle) {
                        uses.get_mut(&former).unwrap().2 -= 1;
                        end(&mut uses, former);
                    }
                }
                (4, _) => {
                    memory.unbind(place, &mut |freed| found.push(freed.bytes));
                    if let Some(former) = places.remove(&place) {
                        uses.get_mut(&former).unwrap().2 -= 1;
                        end(&mut uses, former);
                    }
                }
                (5, Some(_)) => {
                    memory.retain(handle);
                    uses.get_mut(&handle).unwrap().1 += 1;
                }
                _ => {}
            }
            prop_assert_eq!(found, expected);
            prop_assert_eq!(memory.allocations.len, uses.len());
            prop_assert_eq!(memory.bindings.len, places.len());
        }
    }

    #[test]
    fn the_map_is_one(acts in prop::collection::vec((any::<bool>(), 1u64..100, any::<u64>()), 0..300)) {
        let mut ours = map::<u64, 64>();
        let mut theirs = BTreeMap::new();
        for (put, key, value) in acts {
            if put {
                if ours.put(key, value).is_ok() {
                    theirs.insert(key, value);
                } else {
                    prop_assert_eq!(theirs.len(), 56);
                }
            } else {
                prop_assert_eq!(ours.remove(key), theirs.remove(&key));
            }
            prop_assert_eq!(ours.len, theirs.len());
            for (key, value) in &theirs {
                prop_assert_eq!(ours.get(*key), Some(value));
            }
        }
    }
}
