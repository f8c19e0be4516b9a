//! Calls in progress that end an object.
//!
//! A program may end one object in two threads at once, which is its fault: the driver lets one of the calls succeed, and
//! that may be the one that did not find the object's charges. So a call that fails leaves what it found to the calls that
//! end the same object meanwhile.

use tranche_shim_core::Entry;
use tranche_shim_runtime::lock::Guarded;

/// The calls in progress. All zeros means none.
pub struct Ends(Guarded<[End; MOST]>);

/// Objects that are being ended at a time. For more than these, an object that two threads end at once may stay charged.
const MOST: usize = 32;

/// The charges of an object. All zeros means none.
#[derive(Clone, Copy)]
pub struct Charges([Charge; 2]);

#[derive(Clone, Copy)]
struct Charge {
    is_there: bool,
    key: u64,
    entry: Entry,
}

/// All zeros mean a free place.
struct End {
    /// The key of the object's first charge.
    object: u64,
    calls: u32,
    /// One of the calls has ended the object.
    is_over: bool,
    /// What calls found that have failed.
    left: Charges,
}

impl Charges {
    const NONE: Self = Self(
        [Charge {
            is_there: false,
            key: 0,
            entry: Entry {
                bytes: 0,
                device: 0,
                context: 0,
            },
        }; 2],
    );

    /// Those of the table's `keys` that `take` finds.
    pub fn take<const N: usize>(keys: [u64; N], take: impl Fn(u64) -> Option<Entry>) -> Self {
        let mut charges = Self::NONE;
        for (place, key) in charges.0.iter_mut().zip(keys) {
            if let Some(entry) = take(key) {
                *place = Charge {
                    is_there: true,
                    key,
                    entry,
                };
            }
        }
        charges
    }

    pub fn each(self, note: impl Fn(u64, Entry)) {
        for charge in self.0.into_iter().filter(|charge| charge.is_there) {
            note(charge.key, charge.entry);
        }
    }

    fn add(&mut self, other: Self) {
        for (place, charge) in self.0.iter_mut().zip(other.0) {
            if charge.is_there {
                *place = charge;
            }
        }
    }
}

impl Ends {
    /// Begins a call. The charges are looked up afterwards.
    #[inline(never)]
    pub fn begin(&self, object: u64) {
        self.0.with(|ends| {
            let place = ends
                .iter()
                .position(|end| end.calls > 0 && end.object == object)
                .or_else(|| ends.iter().position(|end| end.calls == 0));
            if let Some(end) = place.and_then(|place| ends.get_mut(place)) {
                end.object = object;
                end.calls += 1;
            }
        });
    }

    /// Ends a call that found `charges`; returns the charges for which this call has to care, and whether their object has
    /// ended, by this call or by another one at the same time.
    #[inline(never)]
    pub fn end(&self, object: u64, is_over: bool, charges: Charges) -> (Charges, bool) {
        self.0.with(|ends| {
            let known = |end: &&mut End| end.calls > 0 && end.object == object;
            let Some(end) = ends.iter_mut().find(known) else {
                return (charges, is_over);
            };
            end.is_over |= is_over;
            end.left.add(charges);
            end.calls -= 1;
            let is_over = end.is_over;
            if end.calls > 0 && !is_over {
                return (Charges::NONE, false);
            }
            let left = core::mem::replace(&mut end.left, Charges::NONE);
            end.is_over &= end.calls > 0;
            (left, is_over)
        })
    }
}
