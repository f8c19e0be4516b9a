//! Amounts of memory in Kubernetes' notation.

use std::fmt;
use std::str::FromStr;

const KI: u64 = 1 << 10;
const MI: u64 = 1 << 20;
const GI: u64 = 1 << 30;

/// Bytes, at least 1, written as a whole number with Ki, Mi, Gi or nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Amount(pub u64);

impl FromStr for Amount {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (number, unit) = [("Ki", KI), ("Mi", MI), ("Gi", GI)]
            .into_iter()
            .find_map(|(suffix, unit)| text.strip_suffix(suffix).map(|number| (number, unit)))
            .unwrap_or((text, 1));
        number
            .parse::<u64>()
            .ok()
            .and_then(|number| number.checked_mul(unit))
            .filter(|bytes| *bytes > 0)
            .map(Self)
            .ok_or_else(|| {
                format!(
                    "{text:?} is not an amount of memory: write it like 512Ki, 256Mi, 20Gi or 4096"
                )
            })
    }
}

impl fmt::Display for Amount {
    /// Writes it with the largest unit that shows it exactly.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (unit, suffix) = [(GI, "Gi"), (MI, "Mi"), (KI, "Ki")]
            .into_iter()
            .find(|(unit, _)| self.0 > 0 && self.0.is_multiple_of(*unit))
            .unwrap_or((1, ""));
        write!(f, "{}{suffix}", self.0 / unit)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn amounts_are_read_and_written() {
        for (text, bytes) in [
            ("1", 1),
            ("4Ki", 4096),
            ("256Mi", 256 << 20),
            ("20Gi", 20 << 30),
        ] {
            assert_eq!(text.parse(), Ok(Amount(bytes)));
            assert_eq!(Amount(bytes).to_string(), text);
        }
        assert_eq!(Amount(0).to_string(), "0");
        assert_eq!(Amount((1 << 30) + 1).to_string(), "1073741825");
    }

    #[test]
    fn what_is_no_amount_is_refused() {
        for text in [
            "",
            "0",
            "0Gi",
            "-1",
            "1.5Gi",
            "Gi",
            "1G",
            "18446744073709551615Gi",
        ] {
            assert!(text.parse::<Amount>().is_err(), "{text}");
        }
    }
}
