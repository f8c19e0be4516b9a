//! The price of a GPU for an hour.
//!
//! An administrator writes prices into a ConfigMap, with a key for each product. A key cannot have spaces, so it spells the
//! product with dashes, as GPU feature discovery does in node labels: `NVIDIA-H100-80GB-HBM3: "3.50"`.

use std::collections::BTreeMap;

use crate::money::{Money, MoneyError};

/// Prices of products for which the administrator gives none: a word of the product's name, and millionths of a dollar for an hour.
///
/// They are round figures near the clouds' on-demand prices of 2026, for comparisons only, not for bills. The first word that
/// the product's name contains decides.
pub const DEFAULTS: [(&str, u64); 14] = [
    ("GB200", 10_000_000),
    ("B300", 9_000_000),
    ("B200", 7_000_000),
    ("H200", 4_500_000),
    ("H100", 3_500_000),
    ("H20", 2_500_000),
    ("A100", 2_500_000),
    ("A30", 1_000_000),
    ("L40S", 1_800_000),
    ("L40", 1_500_000),
    ("A10", 1_000_000),
    ("L4", 800_000),
    ("V100", 1_500_000),
    ("T4", 500_000),
];

/// Prices of GPUs for an hour, by product.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Prices {
    by_key: BTreeMap<String, Money>,
}

/// A price, and whether it is an administrator's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Priced {
    /// For an hour of the whole GPU.
    pub price: Money,
    /// Whether it is one of [`DEFAULTS`].
    pub is_default: bool,
}

/// An entry of the ConfigMap that is not a price.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("key {key:?}: {problem}")]
pub struct PriceError {
    pub key: String,
    pub problem: MoneyError,
}

impl Prices {
    /// Reads the `data` of the ConfigMap, and returns an error for each entry that is not a price.
    #[must_use]
    pub fn read(data: &BTreeMap<String, String>) -> (Self, Vec<PriceError>) {
        let mut prices = Self::default();
        let mut errors = Vec::new();
        for (name, text) in data {
            match text.parse() {
                Ok(price) => {
                    prices.by_key.insert(key(name), price);
                }
                Err(problem) => errors.push(PriceError {
                    key: name.clone(),
                    problem,
                }),
            }
        }
        (prices, errors)
    }

    /// The price of a product as NVML names it; `None` where it has no price.
    #[must_use]
    pub fn of(&self, product: &str) -> Option<Priced> {
        let named = self.by_key.get(&key(product)).map(|price| Priced {
            price: *price,
            is_default: false,
        });
        named.or_else(|| default(product))
    }
}

fn default(product: &str) -> Option<Priced> {
    let words: Vec<&str> = product
        .split(|c: char| !c.is_ascii_alphanumeric())
        .collect();
    let mut defaults = DEFAULTS.iter();
    let (_, micros) = defaults.find(|(word, _)| words.contains(word))?;
    Some(Priced {
        price: Money::from_micros(*micros),
        is_default: true,
    })
}

/// A product's name as a key of the ConfigMap: a dash replaces each character that a key cannot have.
#[must_use]
pub fn key(product: &str) -> String {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '.' | '_');
    product
        .chars()
        .map(|c| if is_allowed(c) { c } else { '-' })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_administrators_price_is_before_the_default() {
        let data = [("NVIDIA-H100-80GB-HBM3", "2.01"), ("NVIDIA-L4", "cheap")]
            .map(|(key, value)| (key.to_owned(), value.to_owned()));
        let (prices, errors) = Prices::read(&data.into());
        let of = |product| {
            prices
                .of(product)
                .map(|it| (it.price.micros(), it.is_default))
        };
        assert_eq!(of("NVIDIA H100 80GB HBM3"), Some((2_010_000, false)));
        assert_eq!(of("NVIDIA H100 PCIe"), Some((3_500_000, true)));
        assert_eq!(of("NVIDIA A100-SXM4-80GB"), Some((2_500_000, true)));
        assert_eq!(of("NVIDIA L4"), Some((800_000, true)));
        assert_eq!(of("Unknown 4090"), None);
        let errors: Vec<_> = errors.iter().map(|error| error.key.as_str()).collect();
        assert_eq!(errors, ["NVIDIA-L4"]);
    }

    #[test]
    fn a_longer_name_is_not_a_shorter_ones() {
        let price = |product| Prices::default().of(product).map(|it| it.price.micros());
        assert_ne!(price("NVIDIA L40S"), price("NVIDIA L4"));
        assert_eq!(price("NVIDIA L4000"), None);
    }
}
