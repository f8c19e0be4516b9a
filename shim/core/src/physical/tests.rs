use std::boxed::Box;
use std::vec::Vec;

use super::{Export, Freed, Imported, MapFull, Physical};
use crate::map;

pub type Small = Physical<64, 8>;

pub fn fresh() -> Box<Small> {
    Box::new(Physical {
        handles: map::fresh(),
        allocations: map::fresh(),
        bindings: map::fresh(),
        tokens: map::fresh(),
        exports: map::fresh(),
        owners: map::fresh(),
        clock: 0,
        left: 0,
        in_contexts: 0,
        next_export: 0,
    })
}

pub const MIB: u64 = 1 << 20;

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
) -> Result<(), MapFull> {
    if let Some(held) = memory.hold(handle) {
        memory.bind(place, held, 2 * MIB, owner, freed)
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
    // The mapping ends first; and a handle is retained by its address.
    create(&mut memory, 7, 4 * MIB);
    bind(&mut memory, 0x1000, 7);
    let held = memory.shown_at(0x1000).unwrap();
    memory.hold_id(held).unwrap();
    memory.name(7, held, &mut |_| ()).unwrap();
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
        // The third is not noted here.
        let handle = if nth == 2 { 99 } else { 10 + nth };
        bind(&mut memory, start + nth * 2 * MIB, handle);
        release(&mut memory, 10 + nth);
    }
    let sum = freed(&mut memory, |memory, freed| {
        let now = memory.mark();
        memory.unbind_range(start, 8 * MIB, 2 * MIB, now, freed);
    });
    assert_eq!(sum, 6 * MIB);
    assert_eq!((memory.bindings.len(), memory.allocations.len()), (0, 0));
}

#[test]
fn an_import_of_ones_own_is_one_more_use() {
    let mut memory = fresh();
    create(&mut memory, 7, MIB);
    memory.add_token(42, 7);
    for name in [8, 7] {
        let held = memory.hold_exported(42).unwrap();
        memory.name(name, held, &mut |_| ()).unwrap();
    }
    assert_eq!(memory.hold_exported(43), None);
    assert_eq!(memory.id_of(9), None, "another process's");
    assert_eq!(release(&mut memory, 7), 0);
    assert_eq!(release(&mut memory, 7), 0, "handle 8 holds it");
    bind(&mut memory, 0x1000, 8);
    assert_eq!(release(&mut memory, 8), 0);
    let sum = freed(&mut memory, |memory, freed| {
        memory.unbind(0x1000, freed);
    });
    assert_eq!(sum, MIB);
    assert_eq!(
        memory.tokens.len(),
        0,
        "the token is worth nothing any more"
    );
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
    assert_eq!((sum, memory.owners.len()), (MIB, 0));
    // The owner is memory itself, as a multicast object's handle is.
    create(&mut memory, 8, 0);
    create(&mut memory, 7, MIB);
    let owner = memory.id_of(8).unwrap().number();
    bind_to(&mut memory, 1, 7, owner, &mut |_| ()).unwrap();
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
    // A second time has no effect.
    assert_eq!(bind(&mut memory, 1, 8), 0);
    release(&mut memory, 8);
    let shown = memory.shown_at(1 + MIB).unwrap();
    assert_eq!(memory.device_of(shown), Some(3));
    assert_eq!(memory.shown_at(1 + 2 * MIB), None);
    let mapped = [1, 1 + MIB].map(|address| memory.mapping_at(address));
    assert_eq!(mapped, [Some((shown, 1 + 2 * MIB)); 2]);
    assert_eq!(bind(&mut memory, 1, 99), MIB, "unknown memory");
}

#[test]
fn without_room_nothing_is_given_back_early() {
    let mut memory = fresh();
    let noted = (1..=100u64)
        .take_while(|&handle| memory.create(handle, MIB, 3, &mut |_| ()).is_ok())
        .count();
    assert_eq!(noted, 56);
    assert_eq!(memory.create(90, MIB, 3, &mut |_| ()), Err(MapFull));
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
    let held = memory.hold(7).unwrap();
    memory.end_release(&release_7, true, &mut none);
    memory.bind(1, held, MIB, 0, &mut none).unwrap();
    let sum = freed(&mut memory, |memory, freed| {
        memory.unbind(1, freed);
    });
    assert_eq!(sum, MIB);
    // Mapped too late: the driver refused.
    create(&mut memory, 7, MIB);
    let release_7 = memory.begin_release(7);
    let held = memory.hold(7).unwrap();
    memory.let_go(held, &mut none);
    let sum = freed(&mut memory, |memory, freed| {
        memory.end_release(&release_7, true, freed);
    });
    assert_eq!(sum, MIB);
    // Handed out again before the release is noted.
    create(&mut memory, 7, MIB);
    let release_7 = memory.begin_release(7);
    memory.create(7, 2 * MIB, 3, &mut none).unwrap();
    let sum = freed(&mut memory, |memory, freed| {
        memory.end_release(&release_7, true, freed);
    });
    assert_eq!(sum, MIB, "the former");
    // Refused by the driver: nothing has changed.
    let release_7 = memory.begin_release(7);
    memory.end_release(&release_7, false, &mut none);
    assert_eq!(release(&mut memory, 7), 2 * MIB);
}

/// Two releases end two uses; the driver does one of them after the end of the other one is noted.
#[test]
fn memory_is_charged_until_its_last_release_is_done() {
    let mut memory = fresh();
    create(&mut memory, 7, MIB);
    assert!(memory.use_again(7));
    let (first, second) = (memory.begin_release(7), memory.begin_release(7));
    let sum = freed(&mut memory, |memory, freed| {
        memory.end_release(&second, true, freed);
    });
    assert_eq!(sum, 0, "the first is in the driver");
    let sum = freed(&mut memory, |memory, freed| {
        memory.end_release(&first, true, freed);
    });
    assert_eq!(sum, MIB);
}

/// A release that is noted late belongs to the earlier life of the handle, even if it stands for the same memory again.
#[test]
fn a_handle_that_stands_for_its_memory_again_is_another() {
    let mut memory = fresh();
    let mut none = |freed| panic!("{freed:?}");
    create(&mut memory, 7, MIB);
    let held = memory.hold(7).unwrap();
    memory.bind(1, held, MIB, 0, &mut none).unwrap();
    let first = memory.begin_release(7);
    // The driver has done it, and reuses 7 for other memory.
    create(&mut memory, 7, 2 * MIB);
    let second = memory.begin_release(7);
    // The driver has done that too. Now the memory at the place is retained, and 7 is free.
    let held = memory.hold_id(memory.shown_at(1).unwrap()).unwrap();
    memory.name(7, held, &mut none).unwrap();
    memory.end_release(&first, true, &mut none);
    let sum = freed(&mut memory, |memory, freed| {
        memory.end_release(&second, true, freed);
    });
    assert_eq!(sum, 2 * MIB);
    memory.unbind(1, &mut none);
    assert!(memory.id_of(7).is_some());
    assert_eq!(release(&mut memory, 7), MIB);
}

/// Two threads import the same memory of another process at the same time, under one handle.
#[test]
fn two_imports_at_once_are_two_uses() {
    let mut memory = fresh();
    let mut none = |freed| panic!("{freed:?}");
    // Both found that the handle is unknown.
    for noted in [Imported::New, Imported::Again] {
        let imported = memory.import((7, 0), MIB, 3, &mut none);
        assert_eq!(imported, Ok(noted));
    }
    assert_eq!(release(&mut memory, 7), 0);
    assert_eq!(release(&mut memory, 7), MIB);
    // Imported while the last use is released: it may be other memory.
    memory.import((7, 0), MIB, 3, &mut none).unwrap();
    let release_7 = memory.begin_release(7);
    assert!(!memory.use_again(7));
    let imported = memory.import((7, 0), 4 * MIB, 3, &mut none);
    assert_eq!(imported, Ok(Imported::New));
    let sum = freed(&mut memory, |memory, freed| {
        memory.end_release(&release_7, true, freed);
    });
    assert_eq!(sum, MIB);
    assert_eq!(release(&mut memory, 7), 4 * MIB);
}

/// The driver reuses a handle while its former memory is still mapped.
#[test]
fn a_mapping_outlives_its_handle() {
    let mut memory = fresh();
    create(&mut memory, 7, MIB);
    bind(&mut memory, 0x1000, 7);
    let release_7 = memory.begin_release(7);
    create(&mut memory, 7, 4 * MIB);
    memory.end_release(&release_7, true, &mut |freed| panic!("{freed:?}"));
    assert_eq!(release(&mut memory, 7), 4 * MIB);
    let sum = freed(&mut memory, |memory, freed| {
        memory.unbind(0x1000, freed);
    });
    assert_eq!(sum, MIB);
}

#[test]
fn an_import_ends_with_its_context() {
    const CONTEXT: u64 = 0x7f00_0000_1000;
    let mut memory = fresh();
    let mut none = |freed| panic!("{freed:?}");
    for (handle, context) in [(7, CONTEXT), (8, CONTEXT + 64)] {
        memory.import((handle, context), MIB, 3, &mut none).unwrap();
    }
    assert!(memory.use_again(7));
    let before = memory.mark();
    // In a context that got the same handle.
    memory.import((9, CONTEXT), 4 * MIB, 3, &mut none).unwrap();
    let sum = freed(&mut memory, |memory, freed| {
        memory.end_context(CONTEXT, before, freed);
    });
    assert_eq!(sum, MIB);
    assert_eq!(release(&mut memory, 7), 0);
    assert_eq!(release(&mut memory, 8), MIB);
    assert_eq!(release(&mut memory, 9), 4 * MIB);
}

pub fn export(byte: u64, file: u64, witness: i32) -> Export {
    Export::new(byte, witness, (1, file))
}

#[test]
fn an_open_descriptor_keeps_memory() {
    let mut memory = fresh();
    create(&mut memory, 7, MIB);
    for (byte, file, witness, used) in [(100, 1, 10, 10), (101, 1, 11, 10), (102, 2, 12, 12)] {
        let held = memory.hold(7).unwrap();
        let noted = memory.add_export(held, export(byte, file, witness));
        assert_eq!(noted, Ok(used), "one witness for each file");
    }
    assert_eq!(
        (memory.has_left(), memory.next_export(false)),
        (false, None)
    );
    assert_eq!(release(&mut memory, 7), 0);
    assert!(memory.has_left());
    let mut witnesses = Vec::new();
    let sum = freed(&mut memory, |memory, freed| {
        while let Some(export) = memory.next_export(false) {
            witnesses.extend(memory.end_export(&export, freed));
            // Ended already.
            assert_eq!(memory.end_export(&export, freed), None);
        }
    });
    witnesses.sort_unstable();
    assert_eq!((sum, witnesses), (MIB, std::vec![10, 12]));
    assert!(!memory.has_left() && !memory.has_exports());
}

/// A range of addresses is unmapped and mapped again before the unmapping is noted.
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
    assert_eq!((sum, memory.shown_at(0x20_0000)), (0, memory.id_of(8)));
}

/// A handle is released while another handle of its memory exists, and is reused for other memory.
#[test]
fn memory_with_another_name_outlives_its_handle() {
    let mut memory = fresh();
    create(&mut memory, 7, MIB);
    memory.add_token(42, 7);
    let held = memory.hold_exported(42).unwrap();
    memory.name(8, held, &mut |_| ()).unwrap();
    assert_eq!(release(&mut memory, 7), 0);
    create(&mut memory, 7, 4 * MIB);
    let held = memory.hold_exported(42);
    assert_eq!(held, memory.id_of(8), "the token is of the former");
    memory.let_go(held.unwrap(), &mut |_| ());
    assert_eq!(release(&mut memory, 8), MIB);
    assert_eq!(release(&mut memory, 7), 4 * MIB);
    assert_eq!(memory.allocations.len(), 0);
}

/// Memory whose size is not known is charged what its uses show.
#[test]
fn uses_show_a_size_that_was_not_known() {
    let mut memory = fresh();
    create(&mut memory, 6, MIB);
    let other = memory.id_of(6).unwrap();
    assert_eq!(memory.unsized_charge(other), None);
    create(&mut memory, 7, MIB);
    memory.set_unsized(7);
    let id = memory.id_of(7).unwrap();
    let of = |bytes| Some(Freed { bytes, device: 3 });
    assert_eq!(memory.unsized_charge(id), of(MIB));
    for (shown, more, charged) in [(4, 3, 4), (2, 0, 4), (4, 0, 4), (9, 5, 9)] {
        assert_eq!(memory.show_bytes(id, shown * MIB), more * MIB);
        assert_eq!(memory.unsized_charge(id), of(charged * MIB));
    }
    assert_eq!(bind(&mut memory, 0x1000, 7), 0);
    assert_eq!(release(&mut memory, 7), 0);
    let unbound = freed(&mut memory, |memory, freed| {
        memory.unbind(0x1000, freed);
    });
    assert_eq!(unbound, 9 * MIB);
    assert_eq!(memory.show_bytes(id, MIB), 0, "it is gone");
}
