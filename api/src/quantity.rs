//! Kubernetes quantities with exact arithmetic and Go's canonical form.
//!
//! A [`Quantity`] is a whole number of billionths in an `i128`, so sums and comparisons never round. Two quantities are
//! equal if their values are equal, in whatever form they are written. Printing gives the form of
//! `k8s.io/apimachinery/pkg/api/resource`: the suffix family of the text is kept, the number has no fraction, and the
//! suffix is the largest for which that is possible. Go silently changes some amounts: it rounds beyond nine decimal
//! places and limits binary amounts to 2^63-1. Parsing here fails for such amounts, because a limit must not differ
//! from what its author wrote.

use std::cmp::Ordering;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::str::FromStr;

use k8s_openapi::apimachinery::pkg::api::resource::Quantity as Wire;
use serde::de::{self, Deserialize, Deserializer, Visitor};
use serde::ser::{Serialize, Serializer};

/// Billionths in a unit.
const UNIT: i128 = 1_000_000_000;
/// The exponent of the smallest decimal suffix, `n`.
const SMALLEST_EXPONENT: i32 = -9;
/// The exponent of the largest decimal suffix, `E`.
const LARGEST_EXPONENT: i32 = 18;
/// Binary suffixes, smallest first; each is 1024 times the one before.
const BINARY: [&str; 6] = ["Ki", "Mi", "Gi", "Ti", "Pi", "Ei"];
/// What the API server's own schemas accept as a quantity.
const PATTERN: &str =
    r"^(\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?[0-9]+))?$";

/// Bytes as we write them: canonical and below 2^63, so that every match can be represented.
const BYTES_PATTERN: &str =
    "^([0-9]{1,19}|[0-9]{1,16}Ki|[0-9]{1,13}Mi|[0-9]{1,10}Gi|[0-9]{1,7}Ti|[0-9]{1,4}Pi|[0-9]Ei)$";

/// How an amount is written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Format {
    /// Powers of 1024: `Ki` to `Ei`.
    BinarySi,
    /// Powers of 1000: `n` to `E`.
    #[default]
    DecimalSi,
    /// `e` and a power of ten.
    DecimalExponent,
}

/// An exact amount, between about -1.7e29 and 1.7e29 in steps of a billionth.
///
/// Equality, order and hash use the value: `1Gi`, `1024Mi` and `1073741824` are equal.
#[derive(Clone, Copy, Debug, Default)]
pub struct Quantity {
    nanos: i128,
    format: Format,
}

/// A text that is not a quantity, or cannot be represented exactly.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ParseError {
    /// No digits, or something other than digits before the suffix.
    #[error("{text:?} is not a quantity: write a number with an optional suffix, such as 20Gi")]
    Syntax {
        /// The text.
        text: String,
    },
    /// The number ends in an unknown suffix.
    #[error(
        "{text:?} ends in the unknown suffix {suffix:?}: use one of Ki Mi Gi Ti Pi Ei, n u m k M G T P E, or an exponent such as e3"
    )]
    Suffix {
        /// The text.
        text: String,
        /// Its end.
        suffix: String,
    },
    /// Not a multiple of a billionth.
    #[error("{text:?} is finer than a billionth: write at most nine decimal places")]
    TooPrecise {
        /// The text.
        text: String,
    },
    /// Outside of the range of a quantity.
    #[error("{text:?} is out of range: its magnitude must stay below 1.7e29")]
    OutOfRange {
        /// The text.
        text: String,
    },
}

/// A sum, difference or product outside of the range of a quantity.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the result is out of range: its magnitude must stay below 1.7e29")]
pub struct Overflow;

/// An amount that is not a count.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CountError {
    /// Below zero.
    #[error("{0} is negative")]
    Negative(Quantity),
    /// Not whole.
    #[error("{0} is not a whole number")]
    Fraction(Quantity),
    /// Above `u64::MAX`.
    #[error("{0} is more than 2^64-1")]
    TooLarge(Quantity),
}

impl Quantity {
    /// Nothing.
    pub const ZERO: Self = Self {
        nanos: 0,
        format: Format::DecimalSi,
    };

    /// An amount of bytes, printed with binary suffixes.
    #[must_use]
    pub const fn from_bytes(bytes: u64) -> Self {
        Self {
            nanos: bytes as i128 * UNIT,
            format: Format::BinarySi,
        }
    }

    /// A plain count, printed with decimal suffixes.
    #[must_use]
    pub const fn from_count(count: u64) -> Self {
        Self {
            nanos: count as i128 * UNIT,
            format: Format::DecimalSi,
        }
    }

    /// How the amount is written.
    #[must_use]
    pub const fn format(self) -> Format {
        self.format
    }

    /// The amount as a whole number that is not negative: bytes, percent, places.
    pub fn to_count(self) -> Result<u64, CountError> {
        if self.nanos < 0 {
            return Err(CountError::Negative(self));
        }
        if self.nanos % UNIT != 0 {
            return Err(CountError::Fraction(self));
        }
        u64::try_from(self.nanos / UNIT).map_err(|_| CountError::TooLarge(self))
    }

    /// Like [`Quantity::to_count`], with a fraction rounded up, as Go's `Value` does.
    pub fn to_count_rounded_up(self) -> Result<u64, CountError> {
        let fraction = self.nanos.rem_euclid(UNIT);
        let missing = if fraction == 0 { 0 } else { UNIT - fraction };
        let too_large = CountError::TooLarge(self);
        let nanos = self.nanos.checked_add(missing).ok_or(too_large)?;
        Self { nanos, ..self }.to_count()
    }

    /// Whether the amount is above zero.
    #[must_use]
    pub const fn is_positive(self) -> bool {
        self.nanos > 0
    }

    /// The exact sum, in the format of the first amount that is not zero.
    pub fn checked_add(self, other: Self) -> Result<Self, Overflow> {
        self.with(self.nanos.checked_add(other.nanos), other)
    }

    /// The exact difference, in the format of the first amount that is not zero.
    pub fn checked_sub(self, other: Self) -> Result<Self, Overflow> {
        self.with(self.nanos.checked_sub(other.nanos), other)
    }

    /// The exact multiple.
    pub fn checked_mul(self, factor: i64) -> Result<Self, Overflow> {
        self.with(self.nanos.checked_mul(i128::from(factor)), self)
    }

    fn with(self, nanos: Option<i128>, other: Self) -> Result<Self, Overflow> {
        let format = if self.nanos == 0 {
            other.format
        } else {
            self.format
        };
        nanos.map(|nanos| Self { nanos, format }).ok_or(Overflow)
    }
}

impl FromStr for Quantity {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<Self, ParseError> {
        let syntax = || ParseError::Syntax {
            text: text.to_owned(),
        };
        let (negative, unsigned) = match text.as_bytes().first() {
            Some(b'-') => (true, &text[1..]),
            Some(b'+') => (false, &text[1..]),
            _ => (false, text),
        };
        let (whole, rest) = split_digits(unsigned);
        let (fraction, suffix) = match rest.strip_prefix('.') {
            Some(rest) => split_digits(rest),
            None => ("", rest),
        };
        if whole.is_empty() && fraction.is_empty() {
            return Err(syntax());
        }
        let (format, twos, fives) = scale(suffix).ok_or_else(|| {
            if suffix.starts_with(|c: char| c.is_ascii_alphabetic()) {
                ParseError::Suffix {
                    text: text.to_owned(),
                    suffix: suffix.to_owned(),
                }
            } else {
                syntax()
            }
        })?;
        let nanos = nanos(whole, fraction, twos, fives).map_err(|problem| match problem {
            Inexact::TooPrecise => ParseError::TooPrecise {
                text: text.to_owned(),
            },
            Inexact::OutOfRange => ParseError::OutOfRange {
                text: text.to_owned(),
            },
        })?;
        Ok(Self {
            nanos: if negative { -nanos } else { nanos },
            format,
        })
    }
}

fn split_digits(text: &str) -> (&str, &str) {
    let end = text
        .bytes()
        .position(|byte| !byte.is_ascii_digit())
        .unwrap_or(text.len());
    text.split_at(end)
}

/// The format of a suffix, and its value as powers of two and five.
fn scale(suffix: &str) -> Option<(Format, i64, i64)> {
    if let Some(position) = BINARY.iter().position(|binary| *binary == suffix) {
        let twos = 10 * (i64::try_from(position).ok()? + 1);
        return Some((Format::BinarySi, twos, 0));
    }
    let decimal = |exponent| Some((Format::DecimalSi, exponent, exponent));
    match suffix {
        "n" => decimal(-9),
        "u" => decimal(-6),
        "m" => decimal(-3),
        "" => decimal(0),
        "k" => decimal(3),
        "M" => decimal(6),
        "G" => decimal(9),
        "T" => decimal(12),
        "P" => decimal(15),
        "E" => decimal(18),
        _ => {
            let exponent = suffix.strip_prefix(['e', 'E'])?;
            let digits = exponent.strip_prefix(['+', '-']).unwrap_or(exponent);
            if digits.is_empty() || !digits.bytes().all(|byte| byte.is_ascii_digit()) {
                return None;
            }
            let exponent = i64::from(exponent.parse::<i32>().ok()?);
            Some((Format::DecimalExponent, exponent, exponent))
        }
    }
}

enum Inexact {
    TooPrecise,
    OutOfRange,
}

/// `whole.fraction` times 2^twos times 5^fives, in billionths and exact.
fn nanos(whole: &str, fraction: &str, twos: i64, fives: i64) -> Result<i128, Inexact> {
    let whole = whole.trim_start_matches('0');
    let fraction = fraction.trim_end_matches('0');
    let mut value = 0_i128;
    for digit in whole.bytes().chain(fraction.bytes()) {
        value = value
            .checked_mul(10)
            .and_then(|value| value.checked_add(i128::from(digit - b'0')))
            .ok_or(if fraction.is_empty() {
                Inexact::OutOfRange
            } else {
                Inexact::TooPrecise
            })?;
    }
    if value == 0 {
        return Ok(0);
    }
    let places = i64::try_from(fraction.len()).map_err(|_| Inexact::TooPrecise)?;
    let mut power = |base: i128, exponent: i64| {
        for _ in 0..exponent {
            value = value.checked_mul(base).ok_or(Inexact::OutOfRange)?;
        }
        for _ in exponent..0 {
            if value % base != 0 {
                return Err(Inexact::TooPrecise);
            }
            value /= base;
        }
        Ok(())
    };
    // Divides first, to keep intermediate values small.
    let (twos, fives) = (twos + 9 - places, fives + 9 - places);
    if twos < fives {
        power(2, twos)?;
        power(5, fives)?;
    } else {
        power(5, fives)?;
        power(2, twos)?;
    }
    Ok(value)
}

impl fmt::Display for Quantity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let binary = self.format == Format::BinarySi
            && self.nanos % UNIT == 0
            && self.nanos.unsigned_abs() >= 1024 * UNIT.unsigned_abs();
        if self.nanos == 0 {
            return f.write_str("0");
        }
        if binary {
            let mut number = self.nanos / UNIT;
            let mut suffix = "";
            for larger in BINARY {
                if number % 1024 != 0 {
                    break;
                }
                number /= 1024;
                suffix = larger;
            }
            return write!(f, "{number}{suffix}");
        }
        let exponential = self.format == Format::DecimalExponent;
        let mut number = self.nanos;
        let mut exponent = SMALLEST_EXPONENT;
        while number % 1000 == 0 && (exponential || exponent < LARGEST_EXPONENT) {
            number /= 1000;
            exponent += 3;
        }
        let suffix = match exponent {
            0 => "",
            _ if exponential => return write!(f, "{number}e{exponent}"),
            -9 => "n",
            -6 => "u",
            -3 => "m",
            3 => "k",
            6 => "M",
            9 => "G",
            12 => "T",
            15 => "P",
            _ => "E",
        };
        write!(f, "{number}{suffix}")
    }
}

impl PartialEq for Quantity {
    fn eq(&self, other: &Self) -> bool {
        self.nanos == other.nanos
    }
}

impl Eq for Quantity {}

impl PartialOrd for Quantity {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Quantity {
    fn cmp(&self, other: &Self) -> Ordering {
        self.nanos.cmp(&other.nanos)
    }
}

impl Hash for Quantity {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.nanos.hash(state);
    }
}

impl TryFrom<&Wire> for Quantity {
    type Error = ParseError;

    fn try_from(wire: &Wire) -> Result<Self, ParseError> {
        wire.0.parse()
    }
}

impl From<Quantity> for Wire {
    fn from(quantity: Quantity) -> Self {
        Self(quantity.to_string())
    }
}

impl Serialize for Quantity {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Quantity {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct IntOrString;

        impl Visitor<'_> for IntOrString {
            type Value = Quantity;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a quantity: an integer, or a string such as \"20Gi\"")
            }

            fn visit_i64<E: de::Error>(self, value: i64) -> Result<Quantity, E> {
                Ok(Quantity {
                    nanos: i128::from(value) * UNIT,
                    format: Format::DecimalSi,
                })
            }

            fn visit_u64<E: de::Error>(self, value: u64) -> Result<Quantity, E> {
                Ok(Quantity::from_count(value))
            }

            fn visit_str<E: de::Error>(self, value: &str) -> Result<Quantity, E> {
                value.parse().map_err(E::custom)
            }
        }

        deserializer.deserialize_any(IntOrString)
    }
}

impl schemars::JsonSchema for Quantity {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Quantity".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({
            "pattern": PATTERN,
            "x-kubernetes-int-or-string": true,
        })
    }
}

/// The schema of bytes that we write: narrower than what users may write.
pub(crate) fn bytes_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
    schemars::json_schema!({
        "pattern": BYTES_PATTERN,
        "x-kubernetes-int-or-string": true,
    })
}

#[cfg(test)]
mod tests;
