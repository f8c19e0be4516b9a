//! Amounts of money.

use std::fmt;
use std::ops::Add;
use std::str::FromStr;

/// An amount of money, or a price for an hour: whole millionths of a dollar.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Money(u64);

/// Millionths in a dollar.
const DOLLAR: u64 = 1_000_000;
/// Millionths in a cent.
const CENT: u64 = DOLLAR / 100;

/// The text is not an amount of money.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0:?} is not a price: write dollars, with at most six decimal places, such as 3.50")]
pub struct MoneyError(String);

impl Money {
    /// Nothing.
    pub const ZERO: Self = Self(0);

    /// An amount of millionths of a dollar.
    #[must_use]
    pub const fn from_micros(micros: u64) -> Self {
        Self(micros)
    }

    /// Millionths of a dollar.
    #[must_use]
    pub const fn micros(self) -> u64 {
        self.0
    }

    /// Dollars, for programs that read numbers.
    #[must_use]
    #[expect(
        clippy::cast_precision_loss,
        reason = "prices are far below 2^53 millionths"
    )]
    pub fn dollars(self) -> f64 {
        self.0 as f64 / DOLLAR as f64
    }

    /// This amount `count` times; the largest amount where that overflows.
    #[must_use]
    pub const fn times(self, count: u64) -> Self {
        Self(self.0.saturating_mul(count))
    }

    /// `numerator / denominator` of this, rounded down; zero where the denominator is 0.
    #[must_use]
    pub fn part(self, numerator: u128, denominator: u128) -> Self {
        let product = u128::from(self.0).saturating_mul(numerator);
        let part = product.checked_div(denominator).unwrap_or_default();
        Self(u64::try_from(part).unwrap_or(u64::MAX))
    }

    /// The difference, or zero where `other` is more.
    #[must_use]
    pub const fn less(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }
}

impl Add for Money {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }
}

impl std::iter::Sum for Money {
    fn sum<I: Iterator<Item = Self>>(all: I) -> Self {
        all.fold(Self::ZERO, Add::add)
    }
}

impl fmt::Display for Money {
    /// Dollars and cents, rounded.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let cents = self.0.saturating_add(CENT / 2) / CENT;
        write!(f, "${}.{:02}", cents / 100, cents % 100)
    }
}

impl FromStr for Money {
    type Err = MoneyError;

    fn from_str(text: &str) -> Result<Self, MoneyError> {
        read(text.trim().trim_start_matches('$')).ok_or_else(|| MoneyError(text.to_owned()))
    }
}

fn read(text: &str) -> Option<Money> {
    let (whole, decimals) = text.split_once('.').unwrap_or((text, ""));
    let is_number = |digits: &str| digits.bytes().all(|byte| byte.is_ascii_digit());
    if whole.is_empty() || decimals.len() > 6 || !is_number(whole) || !is_number(decimals) {
        return None;
    }
    let whole: u64 = whole.parse().ok()?;
    let decimals: u64 = format!("{decimals:0<6}").parse().ok()?;
    whole.checked_mul(DOLLAR)?.checked_add(decimals).map(Money)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn amounts_are_read_and_shown_in_dollars() {
        let of = |text: &str| text.parse::<Money>();
        assert_eq!(of("3.50"), Ok(Money(3_500_000)));
        assert_eq!(of(" $2 "), Ok(Money(2_000_000)));
        assert_eq!(of("0.000001"), Ok(Money(1)));
        for text in [
            "",
            ".5",
            "-1",
            "1e3",
            "3,50",
            "1.0000001",
            "99999999999999999",
        ] {
            assert_eq!(of(text), Err(MoneyError(text.to_owned())), "{text}");
        }
        assert_eq!(Money(945_000).to_string(), "$0.95");
        assert_eq!(Money(3_500_000).to_string(), "$3.50");
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "[$0-9. e-]{0,30}|.*") {
            let _ = text.parse::<Money>();
        }
    }
}
