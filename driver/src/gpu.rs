//! A GPU is identified by its UUID. The names of its devices contain the UUID's first digits.
//!
//! The minor number and NVML's index follow the order in which the kernel probes, so they may change when a GPU dies,
//! the MIG mode changes or the node reboots. So nothing is stored by them; only a SharingPolicy may select GPUs by index.

use std::fmt;
use std::str::FromStr;

/// The least number of the UUID's digits in a device's name.
const SHORTEST: u8 = 8;
/// All digits of a UUID.
const ALL: u8 = 32;
/// The groups in which a UUID is written.
const GROUPS: [usize; 5] = [8, 4, 4, 4, 12];

/// A GPU's UUID as NVML prints it: `GPU-` and 32 hexadecimal digits in five groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GpuUuid(u128);

/// Text that is not the UUID of a GPU.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not a GPU's UUID: it must look like GPU-4d8c1f9e-2b4a-4f0e-9c39-0f6c1a3c5b7d, in lower case"
)]
pub struct GpuUuidError(String);

impl GpuUuid {
    /// The digits that stand for this GPU in the names of its devices, on a node with the GPUs `others`: eight, or all
    /// digits if another GPU begins with the same eight.
    ///
    /// Other lengths are not used: a name with all digits does not change when GPUs are added or removed.
    #[must_use]
    pub fn name_prefix<'a>(self, others: impl IntoIterator<Item = &'a Self>) -> UuidPrefix {
        let short = self.prefix(SHORTEST);
        let mut others = others.into_iter();
        let alone = !others.any(|other| *other != self && short.begins(*other));
        if alone { short } else { self.all_digits() }
    }

    /// All digits, without dashes.
    #[must_use]
    pub const fn all_digits(self) -> UuidPrefix {
        self.prefix(ALL)
    }

    const fn prefix(self, length: u8) -> UuidPrefix {
        UuidPrefix {
            // The first digits are the highest bits.
            digits: self.0 >> (4 * (ALL - length)),
            length,
        }
    }
}

impl fmt::Display for GpuUuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let digits = format!("{:032x}", self.0);
        let mut rest = digits.as_str();
        f.write_str("GPU")?;
        for length in GROUPS {
            let (group, after) = rest.split_at(length);
            write!(f, "-{group}")?;
            rest = after;
        }
        Ok(())
    }
}

impl FromStr for GpuUuid {
    type Err = GpuUuidError;

    fn from_str(text: &str) -> Result<Self, GpuUuidError> {
        let digits: String = text
            .chars()
            .filter(|c| *c != '-')
            .skip("GPU".len())
            .collect();
        u128::from_str_radix(&digits, 16)
            .ok()
            .map(Self)
            // One spelling per UUID: the groups, the prefix, lower case.
            .filter(|uuid| uuid.to_string() == text)
            .ok_or_else(|| GpuUuidError(text.to_owned()))
    }
}

/// The first digits of a GPU's UUID: 8 to 32 of them, lower case, without dashes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct UuidPrefix {
    digits: u128,
    length: u8,
}

impl UuidPrefix {
    /// Whether the UUID begins with these digits.
    #[must_use]
    pub fn begins(self, uuid: GpuUuid) -> bool {
        uuid.prefix(self.length) == self
    }

    /// Reads digits; `None` where they are too few or too many, or are not digits.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let length = u8::try_from(text.len()).ok()?;
        let is_digit = |byte: u8| matches!(byte, b'0'..=b'9' | b'a'..=b'f');
        if !(SHORTEST..=ALL).contains(&length) || !text.bytes().all(is_digit) {
            return None;
        }
        let digits = u128::from_str_radix(text, 16).ok()?;
        Some(Self { digits, length })
    }
}

impl fmt::Display for UuidPrefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{:0width$x}",
            self.digits,
            width = usize::from(self.length)
        )
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn other_texts_are_refused() {
        for text in [
            "",
            "GPU-",
            "4d8c1f9e-2b4a-4f0e-9c39-0f6c1a3c5b7d",
            "MIG-4d8c1f9e-2b4a-4f0e-9c39-0f6c1a3c5b7d",
            "GPU-4D8C1F9E-2b4a-4f0e-9c39-0f6c1a3c5b7d",
            "GPU-4d8c1f9e2b4a4f0e9c390f6c1a3c5b7d",
            "GPU-4d8c1f9e-2b4a-4f0e-9c39-0f6c1a3c5b7",
            "GPU-4d8c1f9e-2b4a-4f0e-9c39-0f6c1a3c5b7d0",
            "GPU-+d8c1f9e-2b4a-4f0e-9c39-0f6c1a3c5b7d",
        ] {
            assert_eq!(text.parse::<GpuUuid>(), Err(GpuUuidError(text.to_owned())));
        }
    }

    #[test]
    fn prefixes_have_8_to_32_digits() {
        let digits = "4d8c1f9e2b4a4f0e9c390f6c1a3c5b7d";
        for length in 8..=32 {
            let prefix = UuidPrefix::parse(&digits[..length]).unwrap();
            assert_eq!(prefix.to_string(), digits[..length]);
        }
        for text in [&digits[..7], &format!("{digits}0"), "4D8C1F9E", "+d8c1f9e"] {
            assert_eq!(UuidPrefix::parse(text), None, "{text}");
        }
    }

    /// UUIDs, many of which begin with the same digits.
    fn any_uuid() -> impl Strategy<Value = GpuUuid> {
        (0..3_u128, 0..3_u128, any::<u64>())
            .prop_map(|(high, middle, low)| GpuUuid(high << 96 | middle << 64 | u128::from(low)))
    }

    proptest! {
        #[test]
        fn every_uuid_is_read_back(number: u128) {
            let uuid = GpuUuid(number);
            prop_assert_eq!(uuid.to_string().parse(), Ok(uuid));
            prop_assert_eq!(UuidPrefix::parse(&uuid.all_digits().to_string()), Some(uuid.all_digits()));
        }

        #[test]
        fn no_text_makes_it_panic(text in "(GPU-)?[0-9a-f-]{0,40}|.*") {
            let _ = text.parse::<GpuUuid>();
            let _ = UuidPrefix::parse(&text);
        }

        #[test]
        fn a_name_fits_one_gpu_of_the_node(uuids in prop::collection::btree_set(any_uuid(), 1..12)) {
            for uuid in &uuids {
                let prefix = uuid.name_prefix(&uuids);
                let fitting: Vec<_> = uuids.iter().filter(|other| prefix.begins(**other)).collect();
                prop_assert_eq!(fitting, [uuid]);
            }
        }
    }
}
