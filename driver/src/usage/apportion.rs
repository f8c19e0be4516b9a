//! Divides a whole number into whole parts.

/// Divides `total` in proportion to `weights`, by the method of the largest remainder: the parts are whole, add up to
/// `total`, and each differs by less than 1 from its exact part. If all weights are 0, all parts are 0.
#[must_use]
pub fn apportion(total: u64, weights: &[u64]) -> Vec<u64> {
    let sum: u128 = weights.iter().map(|weight| u128::from(*weight)).sum();
    if sum == 0 {
        return vec![0; weights.len()];
    }
    let exact = |weight: &u64| u128::from(total) * u128::from(*weight);
    // No part is larger than the total.
    let mut parts: Vec<u64> = weights
        .iter()
        .map(|weight| u64::try_from(exact(weight) / sum).unwrap_or(total))
        .collect();
    let left = total - parts.iter().sum::<u64>();
    let mut order: Vec<usize> = (0..weights.len()).collect();
    // Among equal remainders the first comes first, so that the result is always the same.
    order.sort_by_key(|at| std::cmp::Reverse(exact(&weights[*at]) % sum));
    for at in order
        .into_iter()
        .take(usize::try_from(left).unwrap_or(usize::MAX))
    {
        parts[at] += 1;
    }
    parts
}

/// Reduces `parts` in proportion if they exceed `total`, and returns what is left.
#[must_use]
pub fn fit(total: u64, parts: &[u64]) -> (Vec<u64>, u64) {
    let sum: u128 = parts.iter().map(|part| u128::from(*part)).sum();
    match u64::try_from(sum) {
        Ok(sum) if sum <= total => (parts.to_vec(), total - sum),
        _ => (apportion(total, parts), 0),
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_is_left_goes_to_the_largest_remainders() {
        assert_eq!(apportion(10, &[1, 1, 1]), [4, 3, 3]);
        assert_eq!(apportion(100, &[333, 333, 334]), [33, 33, 34]);
        assert_eq!(apportion(7, &[0, 0]), [0, 0]);
        assert_eq!(fit(10, &[3, 4]), (vec![3, 4], 3));
        assert_eq!(fit(10, &[30, 10]), (vec![8, 2], 0));
    }

    proptest! {
        #[test]
        fn parts_add_up_and_are_near_their_exact_part(total: u64, weights in vec(any::<u64>(), 1..40)) {
            let parts = apportion(total, &weights);
            let sum: u128 = weights.iter().map(|w| u128::from(*w)).sum();
            let added: u128 = parts.iter().map(|part| u128::from(*part)).sum();
            prop_assert_eq!(added, if sum == 0 { 0 } else { u128::from(total) });
            for (part, weight) in parts.iter().zip(&weights).filter(|_| sum > 0) {
                let floor = u128::from(total) * u128::from(*weight) / sum;
                prop_assert!((floor..=floor + 1).contains(&u128::from(*part)));
            }
        }

        #[test]
        fn parts_that_fit_are_unchanged(parts in vec(0..1u64 << 50, 0..40), more in 0..1u64 << 50) {
            let total = parts.iter().sum::<u64>() + more;
            prop_assert_eq!(fit(total, &parts), (parts, more));
        }
    }
}
