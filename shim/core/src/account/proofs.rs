//! The account's arithmetic for all numbers, by Kani: `shim/core/deep-check kani`. One process alone; loom
//! checks several.

use super::{Account, MOST_CHARGED, SlotIndex};

/// Two requests of any size under any limit, and any amount released: no more is reserved than the limit,
/// every grant is within the request, and `charged` is equal to `used`.
#[kani::proof]
#[kani::unwind(5)]
fn reserved_is_within_the_limit_and_charged_is_used() {
    let account = Account::<1>::empty();
    let slot = SlotIndex(0);
    account.mark(0, true);
    let limit: u64 = kani::any();
    kani::assume(limit <= MOST_CHARGED);
    for _ in 0..2 {
        let (least, most): (u64, u64) = (kani::any(), kani::any());
        kani::assume(least <= most);
        let before = account.used();
        match account.reserve(slot, least, most, limit) {
            Some(granted) => {
                assert!(least <= granted && granted <= most);
                assert!(account.used() == before + granted && account.used() <= limit);
            }
            None => assert!(account.used() == before && limit - before < least),
        }
        assert!(account.charged(slot) == account.used());
    }
    let before = account.used();
    let bytes: u64 = kani::any();
    let returned = account.release(slot, bytes);
    assert!(returned == bytes.min(before) && account.used() == before - returned);
    assert!(account.charged(slot) == account.used());
}
