//! Compares the list of physical memory with a model of the driver.

use std::boxed::Box;
use std::collections::BTreeMap;
use std::vec::Vec;

use proptest::prelude::*;

use super::tests::{MIB, Small, export, fresh};
use super::{Freed, Id, Imported, Mark, Release};

/// A model of the driver's memory. It hands out the lowest free handle, even while the handle's former memory is still
/// mapped.
#[derive(Default)]
struct Driver {
    objects: Vec<Object>,
    /// For each handle, its object and how often it was handed out and not released.
    handles: BTreeMap<u64, (usize, u32)>,
    /// For each place, the object that it shows.
    places: BTreeMap<u64, usize>,
    /// Open descriptors, and their objects.
    descriptors: BTreeMap<u64, usize>,
}

struct Object {
    bytes: u64,
    /// Which memory of another process it is.
    foreign: Option<u64>,
    /// Whether it was mapped.
    is_shown: bool,
}

/// The memory of another process whose size is not known before it is mapped.
const UNSIZED: u64 = 2;

impl Driver {
    fn is_live(&self, object: usize) -> bool {
        self.handles.values().any(|(of, _)| *of == object)
            || self.places.values().any(|of| *of == object)
            || self.descriptors.values().any(|of| *of == object)
    }

    /// What is held of all memory; a block of that whose size was never known.
    fn held(&self) -> u64 {
        self.held_if_known(|object| self.objects[object].is_shown)
    }

    /// The same, but a block also of memory whose size nothing shows now: an import that is not mapped may be charged only that,
    /// although an earlier import of the same memory was mapped.
    fn held_for_certain(&self) -> u64 {
        self.held_if_known(|object| self.places.values().any(|shown| *shown == object))
    }

    fn held_if_known(&self, is_known: impl Fn(usize) -> bool) -> u64 {
        let live = (0..self.objects.len()).filter(|object| self.is_live(*object));
        let bytes = |object: usize| match self.objects[object] {
            Object {
                foreign: Some(UNSIZED),
                ..
            } if !is_known(object) => MIB,
            Object { bytes, .. } => bytes,
        };
        live.map(bytes).sum()
    }

    /// Hands out an object's handle, for a further use or for the first.
    fn give_out(&mut self, object: usize) -> u64 {
        if let Some((handle, (_, uses))) =
            self.handles.iter_mut().find(|(_, (of, _))| *of == object)
        {
            *uses += 1;
            return *handle;
        }
        let free = (1..64).find(|handle| !self.handles.contains_key(handle));
        let handle = free.unwrap();
        self.handles.insert(handle, (object, 1));
        handle
    }

    fn make(&mut self, bytes: u64, foreign: Option<u64>) -> u64 {
        self.objects.push(Object {
            bytes,
            foreign,
            is_shown: false,
        });
        self.give_out(self.objects.len() - 1)
    }

    /// Imports memory: if it still has a handle, hands that out again (`true`); if it is only mapped, it counts as other memory.
    fn import(&mut self, which: u64) -> (u64, bool) {
        let is_known = |of: &usize| self.objects[*of].foreign == Some(which);
        let mut named = self.handles.values().map(|(of, _)| *of);
        match named.find(is_known) {
            Some(object) => (self.give_out(object), true),
            None => (self.make((which + 1) * MIB, Some(which)), false),
        }
    }

    fn release(&mut self, handle: u64) {
        let (_, uses) = self
            .handles
            .get_mut(&handle)
            .expect("a program releases what it has");
        *uses -= 1;
        if *uses == 0 {
            self.handles.remove(&handle);
        }
    }
}

/// A call of a thread, and the step that it has reached.
enum Call {
    Create {
        bytes: u64,
        handle: Option<u64>,
    },
    Import {
        which: u64,
        /// And whether there was a handle of it.
        handle: Option<(u64, bool)>,
    },
    Release {
        handle: u64,
        release: Release,
        done: bool,
    },
    Map {
        handle: u64,
        place: u64,
        held: Id,
        /// The memory's bytes, and how many of them are reserved, if that was not known.
        shown: Option<(u64, u64)>,
        done: bool,
    },
    Unmap {
        place: u64,
        mark: Mark,
        done: bool,
    },
    Retain {
        place: u64,
        held: Id,
        handle: Option<u64>,
    },
    Export {
        handle: u64,
        held: Id,
        byte: Option<u64>,
    },
}

/// What is charged for another process's memory when it is imported.
fn charged_at_import(which: u64) -> u64 {
    if which == UNSIZED {
        MIB
    } else {
        (which + 1) * MIB
    }
}

/// A program with some threads, its driver, and its list of physical memory.
struct World {
    driver: Driver,
    memory: Box<Small>,
    charged: u64,
    /// Uses of handles that no call is using or ending, and places that none maps or unmaps.
    owned: Vec<u64>,
    mapped: Vec<u64>,
    free: Vec<u64>,
    next_byte: u64,
    /// Whether known memory could not be distinguished from other memory.
    is_doubtful: bool,
}

impl World {
    fn note<R>(&mut self, act: impl FnOnce(&mut Small, &mut dyn FnMut(Freed)) -> R) -> R {
        let charged = &mut self.charged;
        act(&mut self.memory, &mut |freed| *charged -= freed.bytes)
    }

    /// The first step of a call.
    fn begin(&mut self, kind: u8, choice: u64) -> Option<Call> {
        let pick = |list: &mut Vec<u64>| {
            let nth = usize::try_from(choice).unwrap() % list.len().max(1);
            (nth < list.len()).then(|| list.swap_remove(nth))
        };
        Some(match kind {
            0 if self.owned.len() < 16 => {
                let bytes = (choice % 5 + 1) * MIB;
                self.charged += bytes;
                Call::Create {
                    bytes,
                    handle: None,
                }
            }
            1 if self.owned.len() < 16 => Call::Import {
                which: choice % 3,
                handle: None,
            },
            2 => {
                let handle = pick(&mut self.owned)?;
                let release = self.memory.begin_release(handle);
                Call::Release {
                    handle,
                    release,
                    done: false,
                }
            }
            3 => {
                let handle = pick(&mut self.owned)?;
                let Some(place) = self.free.pop() else {
                    self.owned.push(handle);
                    return None;
                };
                let held = self.memory.hold(handle).expect("noted");
                let shown = self.memory.unsized_charge(held).map(|charge| {
                    let bytes = (UNSIZED + 1) * MIB;
                    (bytes, bytes - charge.bytes)
                });
                self.charged += shown.map_or(0, |(_, reserved)| reserved);
                Call::Map {
                    handle,
                    place,
                    held,
                    shown,
                    done: false,
                }
            }
            4 => {
                let place = pick(&mut self.mapped)?;
                Call::Unmap {
                    place,
                    mark: self.memory.mark(),
                    done: false,
                }
            }
            5 if self.owned.len() < 16 => {
                let place = pick(&mut self.mapped)?;
                let shown = self.memory.shown_at(place).expect("noted");
                let held = self.memory.hold_id(shown).expect("charged");
                Call::Retain {
                    place,
                    held,
                    handle: None,
                }
            }
            6 if self.memory.exports.len() < 4 => {
                let handle = pick(&mut self.owned)?;
                let held = self.memory.hold(handle).expect("noted");
                Call::Export {
                    handle,
                    held,
                    byte: None,
                }
            }
            _ => return None,
        })
    }

    /// Lets the driver do the call, or notes its result, which ends the call.
    fn go_on(&mut self, call: Call) -> Option<Call> {
        match call {
            Call::Create { handle: None, .. }
            | Call::Import { handle: None, .. }
            | Call::Retain { handle: None, .. }
            | Call::Export { byte: None, .. }
            | Call::Release { done: false, .. }
            | Call::Map { done: false, .. }
            | Call::Unmap { done: false, .. } => Some(self.drive(call)),
            _ => {
                self.end(call);
                None
            }
        }
    }

    fn drive(&mut self, call: Call) -> Call {
        match call {
            Call::Create { bytes, .. } => {
                let handle = Some(self.driver.make(bytes, None));
                Call::Create { bytes, handle }
            }
            Call::Import { which, .. } => {
                let handle = Some(self.driver.import(which));
                Call::Import { which, handle }
            }
            Call::Release {
                handle, release, ..
            } => {
                self.driver.release(handle);
                Call::Release {
                    handle,
                    release,
                    done: true,
                }
            }
            Call::Map {
                handle,
                place,
                held,
                shown,
                ..
            } => {
                let (object, _) = self.driver.handles[&handle];
                self.driver.places.insert(place, object);
                self.driver.objects[object].is_shown = true;
                Call::Map {
                    handle,
                    place,
                    held,
                    shown,
                    done: true,
                }
            }
            Call::Unmap { place, mark, .. } => {
                self.driver.places.remove(&place);
                Call::Unmap {
                    place,
                    mark,
                    done: true,
                }
            }
            Call::Retain { place, held, .. } => {
                let handle = Some(self.driver.give_out(self.driver.places[&place]));
                Call::Retain {
                    place,
                    held,
                    handle,
                }
            }
            Call::Export { handle, held, .. } => {
                let (object, _) = self.driver.handles[&handle];
                self.next_byte += 1;
                self.driver.descriptors.insert(self.next_byte, object);
                Call::Export {
                    handle,
                    held,
                    byte: Some(self.next_byte),
                }
            }
        }
    }

    /// The second step of a call, after the driver has done it.
    fn end(&mut self, call: Call) {
        match call {
            Call::Create { bytes, handle } => {
                let handle = handle.unwrap();
                self.note(|memory, freed| memory.create(handle, bytes, 3, freed))
                    .unwrap();
                self.owned.push(handle);
            }
            Call::Import { which, handle } => {
                let (bytes, (handle, is_known)) = (charged_at_import(which), handle.unwrap());
                let noted = self.note(|memory, freed| memory.import((handle, 0), bytes, 3, freed));
                if noted.unwrap() == Imported::New {
                    self.charged += bytes;
                    // If the memory was known, it is charged twice until its earlier uses have ended.
                    self.is_doubtful |= is_known;
                    if which == UNSIZED {
                        self.memory.set_unsized(handle);
                    }
                }
                self.owned.push(handle);
            }
            Call::Release { release, .. } => {
                self.note(|memory, freed| memory.end_release(&release, true, freed));
            }
            Call::Map {
                handle,
                place,
                held,
                shown,
                ..
            } => {
                if let Some((bytes, reserved)) = shown {
                    self.charged -= reserved - self.memory.show_bytes(held, bytes);
                }
                self.note(|memory, freed| memory.bind(place, held, 1, 0, freed))
                    .unwrap();
                self.owned.push(handle);
                self.mapped.push(place);
            }
            Call::Unmap { place, mark, .. } => {
                self.note(|memory, freed| memory.unbind_range(place, 1, 1, mark, freed));
                self.free.push(place);
            }
            Call::Retain {
                place,
                held,
                handle,
            } => {
                let handle = handle.unwrap();
                self.note(|memory, freed| memory.name(handle, held, freed))
                    .unwrap();
                self.mapped.push(place);
                self.owned.push(handle);
            }
            Call::Export { handle, held, byte } => {
                let byte = byte.unwrap();
                self.memory.add_export(held, export(byte, byte, 1)).unwrap();
                self.owned.push(handle);
            }
        }
    }

    /// Checks a descriptor.
    fn close_one(&mut self, of_all: bool) -> bool {
        let Some(export) = self.memory.next_export(of_all) else {
            return false;
        };
        let is_closed = !self.driver.descriptors.contains_key(&export.byte);
        if is_closed {
            self.note(|memory, freed| memory.end_export(&export, freed));
        }
        is_closed
    }
}

proptest! {
    /// Threads do the steps of their calls in any order. The charge is never less than what the driver has, and exactly that
    /// if no call is in progress and every handle's memory was known.
    #[test]
    fn what_is_charged_covers_what_the_driver_has(
        acts in prop::collection::vec((0usize..4, 0u8..10, 0u64..64), 0..300),
    ) {
        let mut world = World {
            driver: Driver::default(),
            memory: fresh(),
            charged: 0,
            owned: Vec::new(),
            mapped: Vec::new(),
            free: (0x100..0x108).collect(),
            next_byte: 1,
            is_doubtful: false,
        };
        let mut threads: [Option<Call>; 4] = [const { None }; 4];
        // An import is charged when its size is known.
        let arriving = |threads: &[Option<Call>; 4]| -> u64 {
            let bytes = |call: &Option<Call>| match call {
                Some(Call::Import { which, handle: Some(_) }) => charged_at_import(*which),
                _ => 0,
            };
            threads.iter().map(bytes).sum()
        };
        for (thread, kind, choice) in acts {
            match (threads[thread].take(), kind) {
                (Some(call), _) => threads[thread] = world.go_on(call),
                (None, 7) => {
                    let open = world.driver.descriptors.keys().next().copied();
                    if let Some(first) = open {
                        world.driver.descriptors.remove(&first);
                    }
                }
                (None, 8 | 9) => {
                    world.close_one(kind == 9);
                }
                (None, _) => threads[thread] = world.begin(kind, choice),
            }
            let held = world.driver.held_for_certain();
            let charged = world.charged + arriving(&threads);
            prop_assert!(held <= charged, "{} of {}", held, charged);
        }
        for thread in &mut threads {
            while let Some(call) = thread.take() {
                *thread = world.go_on(call);
            }
        }
        // Until as many as there can be were checked in turn and not closed.
        let mut open = 0;
        while world.memory.has_exports() && open < 8 {
            open = if world.close_one(true) { 0 } else { open + 1 };
        }
        prop_assert!(world.is_doubtful || world.driver.held() == world.charged);
        for handle in std::mem::take(&mut world.owned) {
            let release = world.memory.begin_release(handle);
            let call = Call::Release { handle, release, done: false };
            let call = world.go_on(call).unwrap();
            world.go_on(call);
        }
        for place in std::mem::take(&mut world.mapped) {
            let mark = world.memory.mark();
            let call = world.go_on(Call::Unmap { place, mark, done: false }).unwrap();
            world.go_on(call);
        }
        world.driver.descriptors.clear();
        while world.close_one(true) {}
        prop_assert_eq!((world.driver.held(), world.charged), (0, 0));
        prop_assert_eq!((world.memory.handles.len(), world.memory.left), (0, 0));
    }
}
