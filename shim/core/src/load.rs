//! The load page of a GPU or partition: until when its shares of high priority have work.
//!
//! It has [`PLACES`] words, little endian, each a time of `CLOCK_MONOTONIC` in nanoseconds. A process of such a share
//! writes until when it has work into a place of its own choice; two processes may have the same place. Processes of
//! shares of low priority read all of them.
//!
//! Several tenants write the page, so it is read and written by `pread` and `pwrite` and never mapped: an access to a
//! mapping of a file that somebody truncated ends the process. A time that is too far ahead is ignored, so what a
//! dead process or a wrong program wrote is forgotten after [`MOST_AHEAD_NANOS`].

/// The places of a page.
pub const PLACES: usize = 64;

/// Bytes of a place.
pub const PLACE_LEN: usize = 8;

/// Bytes of a load page.
pub const LEN: usize = PLACES * PLACE_LEN;

/// How far ahead a time may be, in nanoseconds.
pub const MOST_AHEAD_NANOS: u64 = 100_000_000;

/// Until when there is work after `now`, as these places say; `None` for no work. `places` may have any content and any
/// length.
#[must_use]
pub fn busy_until(places: &[u8], now: u64) -> Option<u64> {
    let most = now.saturating_add(MOST_AHEAD_NANOS);
    let times = places.as_chunks().0.iter().copied().map(u64::from_le_bytes);
    times.filter(|time| *time > now && *time <= most).max()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::{LEN, MOST_AHEAD_NANOS, PLACE_LEN, busy_until};

    #[test]
    fn the_latest_time_counts() {
        let mut page = [0; LEN];
        assert_eq!(busy_until(&page, 0), None);
        for (place, time) in [(0, 1500u64), (63, 1700), (7, 1600)] {
            page[place * PLACE_LEN..][..PLACE_LEN].copy_from_slice(&time.to_le_bytes());
        }
        assert_eq!(busy_until(&page, 1000), Some(1700));
        assert_eq!(busy_until(&page, 1699), Some(1700));
        assert_eq!(busy_until(&page, 1700), None);
        // The last place was cut off.
        assert_eq!(busy_until(&page[..LEN - 1], 1000), Some(1600));
    }

    proptest! {
        /// Whatever a tenant wrote: others wait for at most so long unless it writes again.
        #[test]
        fn any_content_is_forgotten(content: [u64; 4], cut in 0..32usize, now in 0..u64::MAX / 2) {
            let bytes: std::vec::Vec<u8> = content.iter().flat_map(|time| time.to_le_bytes()).collect();
            if let Some(until) = busy_until(&bytes[..cut], now) {
                prop_assert!(until > now && until <= now + MOST_AHEAD_NANOS);
                prop_assert!(content.contains(&until));
            }
        }

        #[test]
        fn a_time_that_is_near_counts(now in 0..u64::MAX / 2, ahead in 1..=MOST_AHEAD_NANOS) {
            let until = now + ahead;
            prop_assert_eq!(busy_until(&until.to_le_bytes(), now), Some(until));
            let beyond = until + MOST_AHEAD_NANOS;
            prop_assert_eq!(busy_until(&beyond.to_le_bytes(), now), None);
        }
    }
}
