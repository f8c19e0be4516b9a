//! Bytes that depend on a seed, so that bytes of another buffer are detected.

/// `len` bytes that depend on every bit of `seed` and on their place.
pub fn bytes(seed: u64, len: usize) -> Vec<u8> {
    // SplitMix64, a byte at a time.
    let mut state = seed;
    std::iter::from_fn(|| {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = state;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        Some((word ^ (word >> 31)).to_le_bytes())
    })
    .flatten()
    .take(len)
    .collect()
}

/// How many bytes differ.
pub fn differences(a: &[u8], b: &[u8]) -> u64 {
    let differing = a.iter().zip(b).filter(|(a, b)| a != b).count();
    (differing + a.len().abs_diff(b.len())) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_differ_and_differences_are_counted() {
        let one = bytes(1, 4096);
        assert_eq!(one, bytes(1, 4096));
        assert!(differences(&one, &bytes(2, 4096)) > 4000);
        let mut other = one.clone();
        other[17] ^= 1;
        other.pop();
        assert_eq!(differences(&one, &other), 2);
    }
}
