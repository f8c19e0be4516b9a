//! Divides a GPU's price among the holders of its parts.

use tranche_driver::stranded::Shares;

use crate::money::Money;

/// How a holder's part of the price is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Basis {
    /// Equal parts: whole GPUs and timeshared shares.
    Equal,
    /// The mean of memory and cores, as parts of these totals.
    Sizes(Shares),
    /// Compute slices, as parts of this total.
    ComputeSlices(u32),
}

/// The parts of a price, which add up to it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Split {
    /// The part of each holder, in their order.
    pub holders: Vec<Money>,
    /// The part that is free and can be allocated.
    pub free: Money,
    /// The part that is free but cannot be allocated.
    pub stranded: Money,
}

/// Splits the price of a device. `holders` and `stranded` are amounts: for [`Basis::ComputeSlices`], `cores` is the number of
/// slices.
#[must_use]
pub fn split(price: Money, basis: Basis, holders: &[Shares], stranded: Shares) -> Split {
    let whole = basis.whole(holders.len());
    let mut left = price;
    let mut take = |shares: &Shares, basis: Basis| {
        // Limited to what is left: amounts above the device's total would bill parts of it twice.
        let part = price.part(basis.weight(shares), whole).min(left);
        left = left.less(part);
        part
    };
    let holders: Vec<Money> = holders.iter().map(|held| take(held, basis)).collect();
    let stranded = match basis {
        Basis::Equal => Money::ZERO,
        _ => take(&stranded, basis),
    };
    // Nothing is free of a device in equal parts: the last holder pays what rounding leaves.
    let (holders, free) = match (basis, holders.split_last()) {
        (Basis::Equal, Some((last, others))) => {
            let mut all = others.to_vec();
            all.push(*last + left);
            (all, Money::ZERO)
        }
        _ => (holders, left),
    };
    Split {
        holders,
        free,
        stranded,
    }
}

impl Basis {
    /// The weight of all.
    fn whole(self, holders: usize) -> u128 {
        match self {
            Self::Equal => holders as u128,
            Self::Sizes(whole) => 2 * u128::from(whole.memory) * u128::from(whole.cores),
            Self::ComputeSlices(slices) => slices.into(),
        }
    }

    fn weight(self, held: &Shares) -> u128 {
        match self {
            Self::Equal => 1,
            // (memory / whole.memory + cores / whole.cores) / 2, over one denominator.
            Self::Sizes(whole) => {
                u128::from(held.memory) * u128::from(whole.cores)
                    + u128::from(held.cores) * u128::from(whole.memory)
            }
            Self::ComputeSlices(_) => held.cores.into(),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn shares(memory: u64, cores: u64) -> Shares {
        Shares {
            memory,
            cores,
            sharers: 1,
        }
    }

    #[test]
    fn a_share_pays_the_mean_of_its_memory_and_its_cores() {
        let price = Money::from_micros(4_000_000);
        let whole = shares(80, 100);
        let split = split(
            price,
            Basis::Sizes(whole),
            &[shares(20, 25), shares(40, 75)],
            shares(20, 0),
        );
        // 20 of the 80 have no cores left: an eighth of the price.
        assert_eq!(
            split,
            Split {
                holders: vec![Money::from_micros(1_000_000), Money::from_micros(2_500_000)],
                stranded: Money::from_micros(500_000),
                free: Money::ZERO,
            }
        );
    }

    /// An H100 for $5,026 a month whose two halves are in use: $718 are stranded.
    #[test]
    fn the_seventh_slice_costs_a_seventh() {
        let month = Money::from_micros(5_026_000_000);
        let halves = [shares(0, 3), shares(0, 3)];
        let split = split(month, Basis::ComputeSlices(7), &halves, shares(0, 1));
        assert_eq!(split.stranded.to_string(), "$718.00");
        assert_eq!(split.holders[0].to_string(), "$2154.00");
        assert_eq!(split.free, Money::ZERO);
    }

    fn any_shares() -> impl Strategy<Value = Shares> {
        (0..200_u64 << 30, 0..120_u64).prop_map(|(memory, cores)| shares(memory, cores))
    }

    proptest! {
        #[test]
        fn the_parts_sum_to_the_price(
            micros in 0..20_000_000_u64,
            basis in prop_oneof![
                Just(Basis::Equal),
                (1..200_u64 << 30).prop_map(|memory| Basis::Sizes(shares(memory, 100))),
                (1..9_u32).prop_map(Basis::ComputeSlices),
            ],
            holders in prop::collection::vec(any_shares(), 0..9),
            stranded in any_shares(),
        ) {
            let price = Money::from_micros(micros);
            let split = split(price, basis, &holders, stranded);
            prop_assert_eq!(split.holders.len(), holders.len());
            let sum: Money = split.holders.iter().copied().sum();
            prop_assert_eq!(sum + split.free + split.stranded, price);
        }
    }
}
