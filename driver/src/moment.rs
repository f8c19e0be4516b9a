//! A moment in records that outlive a process.

use std::fmt;

use jiff::Timestamp;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

/// A moment in UTC, to the microsecond. As text it always has the same length
/// (`2026-11-25T10:00:00.000000Z`), so that texts sort as the moments do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Moment(Timestamp);

/// Nanoseconds in a microsecond.
const MICROSECOND: i128 = 1_000;

impl From<Timestamp> for Moment {
    /// Rounds down to a microsecond.
    fn from(time: Timestamp) -> Self {
        let nanos = time.as_nanosecond();
        let whole = Timestamp::from_nanosecond(nanos - nanos.rem_euclid(MICROSECOND));
        // Fails only within a microsecond of the earliest time that can be written.
        Self(whole.unwrap_or(time))
    }
}

impl From<Moment> for Timestamp {
    fn from(moment: Moment) -> Self {
        moment.0
    }
}

impl fmt::Display for Moment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0.strftime("%Y-%m-%dT%H:%M:%S%.6fZ"))
    }
}

impl Serialize for Moment {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Moment {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        let time: Timestamp = text.parse().map_err(de::Error::custom)?;
        Ok(time.into())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn it_is_written_with_all_its_digits() {
        for (text, written) in [
            ("2026-11-25T10:00:00Z", "2026-11-25T10:00:00.000000Z"),
            ("2026-11-25T12:00:00.5+02:00", "2026-11-25T10:00:00.500000Z"),
            (
                "2026-11-25T10:00:00.123456789Z",
                "2026-11-25T10:00:00.123456Z",
            ),
        ] {
            let moment: Moment = serde_json::from_value(text.into()).unwrap();
            assert_eq!(moment.to_string(), written);
        }
    }

    proptest! {
        #[test]
        fn texts_sort_as_moments_and_are_read_back(
            [a, b] in proptest::array::uniform2(0_i128..4_000_000_000_000_000_000),
        ) {
            let [a, b] = [a, b].map(|nanos| Moment::from(Timestamp::from_nanosecond(nanos).unwrap()));
            prop_assert_eq!(a.cmp(&b), a.to_string().cmp(&b.to_string()));
            let read: Moment = serde_json::from_str(&serde_json::to_string(&a).unwrap()).unwrap();
            prop_assert_eq!(read, a);
        }
    }
}
