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
        owners: map::<u64, 8>(),
        clock: 0,
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

fn create(memory: &mut Small, handle: u64, bytes: u64) {
    memory
        .create(handle, bytes, 3, &mut |freed| panic!("{freed:?}"))
        .unwrap();
}

fn release(memory: &mut Small, handle: u64) -> u64 {
    freed(memory, |memory, freed| {
        let release = memory.begin_release(handle);
        memory.end_release(&release, true, freed);
    })
}

fn bind_to(
    memory: &mut Small,
    place: u64,
    handle: u64,
    owner: u64,
    freed: &mut dyn FnMut(Freed),
) -> Result<(), Full> {
    if memory.hold(handle) {
        memory.bind(place, handle, 2 * MIB, owner, freed)
    } else {
        memory.unbind(place, freed);
        Ok(())
    }
}

fn bind(memory: &mut Small, place: u64, handle: u64) -> u64 {
    freed(memory, |memory, freed| {
        bind_to(memory, place, handle, 0, freed).unwrap();
    })
}

#[test]
fn memory_lives_as_long_as_its_last_use() {
    let mut memory = fresh();
    // The handle is released while it is mapped, as llama.cpp's pool does.
    create(&mut memory, 7, 4 * MIB);
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
    create(&mut memory, 7, 4 * MIB);
    bind(&mut memory, 0x1000, 7);
    assert!(memory.hold(7));
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
        create(&mut memory, 10 + nth, 2 * MIB);
        // The third is no memory of ours, and not noted.
        let handle = if nth == 2 { 99 } else { 10 + nth };
        bind(&mut memory, start + nth * 2 * MIB, handle);
        release(&mut memory, 10 + nth);
    }
    let sum = freed(&mut memory, |memory, freed| {
        let now = memory.mark();
        memory.unbind_range(start, 8 * MIB, 2 * MIB, now, freed);
    });
    assert_eq!(sum, 6 * MIB);
    assert_eq!((memory.bindings.len, memory.allocations.len), (0, 0));
}

#[test]
fn an_import_of_ones_own_is_one_more_use() {
    let mut memory = fresh();
    create(&mut memory, 7, MIB);
    memory.export(42, 7);
    for name in [8, 7] {
        let held = memory.hold_exported(42).unwrap();
        memory.name(name, held, &mut |_| ()).unwrap();
    }
    assert_eq!(memory.hold_exported(43), None);
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
    create(&mut memory, 7, MIB);
    for place in [1, 2] {
        bind_to(&mut memory, place, 7, 500, &mut |_| ()).unwrap();
    }
    assert_eq!(release(&mut memory, 7), 0);
    let sum = freed(&mut memory, |memory, freed| {
        let now = memory.mark();
        memory.end_owner(500, now, freed);
    });
    assert_eq!((sum, memory.owners.len), (MIB, 0));
    // The owner is memory itself, as a multicast object's handle is.
    create(&mut memory, 8, 0);
    create(&mut memory, 7, MIB);
    bind_to(&mut memory, 1, 7, 8, &mut |_| ()).unwrap();
    assert_eq!(release(&mut memory, 7), 0);
    assert_eq!(release(&mut memory, 8), MIB);
}

#[test]
fn a_place_that_shows_something_else_lets_go() {
    let mut memory = fresh();
    for handle in [7, 8] {
        create(&mut memory, handle, MIB);
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
        .take_while(|&handle| memory.create(handle, MIB, 3, &mut |_| ()).is_ok())
        .count();
    assert_eq!(noted, 56);
    assert_eq!(memory.create(90, MIB, 3, &mut |_| ()), Err(Full));
    assert_eq!(release(&mut memory, 90), 0);
    // A mapping that cannot be noted keeps its memory.
    let bound = (1..=100u64)
        .take_while(|&place| bind_to(&mut memory, place, 1, 0, &mut |_| ()).is_ok())
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

/// While the driver releases a handle, others may map its memory, or get the same handle for other memory.
#[test]
fn what_others_do_during_a_release_is_their_own() {
    let mut memory = fresh();
    let mut none = |freed| panic!("{freed:?}");
    // Mapped in time, and unmapped later.
    create(&mut memory, 7, MIB);
    let release_7 = memory.begin_release(7);
    assert!(memory.hold(7));
    memory.end_release(&release_7, true, &mut none);
    memory.bind(1, 7, MIB, 0, &mut none).unwrap();
    let sum = freed(&mut memory, |memory, freed| {
        memory.unbind(1, freed);
    });
    assert_eq!(sum, MIB);
    // Mapped too late: the driver refused.
    create(&mut memory, 7, MIB);
    let release_7 = memory.begin_release(7);
    assert!(memory.hold(7));
    memory.let_go(7, &mut none);
    let sum = freed(&mut memory, |memory, freed| {
        memory.end_release(&release_7, true, freed);
    });
    assert_eq!(sum, MIB);
    // Handed out again before the release is noted.
    create(&mut memory, 7, MIB);
    let release_7 = memory.begin_release(7);
    let sum = freed(&mut memory, |memory, freed| {
        memory.create(7, 2 * MIB, 3, freed).unwrap();
    });
    assert_eq!(sum, MIB, "the former");
    memory.end_release(&release_7, true, &mut none);
    // Refused by the driver: nothing has changed.
    let release_7 = memory.begin_release(7);
    memory.end_release(&release_7, false, &mut none);
    assert_eq!(release(&mut memory, 7), 2 * MIB);
}

/// A range of addresses is unmapped and mapped anew before it is noted.
#[test]
fn what_is_mapped_after_an_unmap_stays() {
    let mut memory = fresh();
    create(&mut memory, 7, MIB);
    create(&mut memory, 8, 2 * MIB);
    bind(&mut memory, 0x20_0000, 7);
    release(&mut memory, 7);
    let unmap = memory.mark();
    assert_eq!(
        bind(&mut memory, 0x20_0000, 8),
        MIB,
        "what was there is gone"
    );
    let sum = freed(&mut memory, |memory, freed| {
        memory.unbind_range(0x20_0000, 2 * MIB, MIB, unmap, freed);
    });
    assert_eq!((sum, memory.shown_at(0x20_0000)), (0, Some(8)));
}

/// A handle is released while another name of its memory lives, and handed out again for other memory.
#[test]
fn memory_with_another_name_outlives_its_handle() {
    let mut memory = fresh();
    create(&mut memory, 7, MIB);
    memory.export(42, 7);
    let held = memory.hold_exported(42).unwrap();
    memory.name(8, held, &mut |_| ()).unwrap();
    assert_eq!(release(&mut memory, 7), 0);
    create(&mut memory, 7, 4 * MIB);
    assert_eq!(
        memory.hold_exported(42),
        None,
        "the token was of the former"
    );
    assert_eq!(release(&mut memory, 8), MIB);
    assert_eq!(release(&mut memory, 7), 4 * MIB);
    assert_eq!(memory.allocations.len, 0);
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
                    create(&mut memory, handle, handle * MIB);
                    uses.insert(handle, (handle * MIB, 1, 0));
                }
                // And refuses to release what was released.
                (1 | 2, Some((_, 1.., _))) => {
                    let release = memory.begin_release(handle);
                    memory.end_release(&release, true, &mut |freed| found.push(freed.bytes));
                    uses.get_mut(&handle).unwrap().1 -= 1;
                    end(&mut uses, handle);
                }
                (3, Some(_)) => {
                    bind_to(&mut memory, place, handle, 0, &mut |freed| found.push(freed.bytes)).unwrap();
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
                    prop_assert!(memory.hold(handle));
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
