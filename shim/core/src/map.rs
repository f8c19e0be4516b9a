//! A map of fixed size without allocation. All zeros means an empty map.

/// There is no room for another value, or its key is 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MapFull;

/// Values by number (not 0), in open addressing.
#[repr(C)]
#[derive(Debug)]
pub struct Map<V, const N: usize> {
    len: usize,
    keys: [u64; N],
    values: [V; N],
}

impl<V: Copy, const N: usize> Map<V, N> {
    const MOST: usize = N / 8 * 7;

    fn home(key: u64) -> usize {
        // Fibonacci hashing.
        (key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32) as usize % N
    }

    /// The place of a key, or the free place for it.
    fn find(&self, key: u64) -> (usize, bool) {
        let mut at = Self::home(key);
        // There is always a free place.
        while self.keys[at] != 0 {
            if self.keys[at] == key {
                return (at, true);
            }
            at = (at + 1) % N;
        }
        (at, false)
    }

    pub fn get(&self, key: u64) -> Option<&V> {
        match self.find(key) {
            (at, true) if key != 0 => Some(&self.values[at]),
            _ => None,
        }
    }

    pub fn get_mut(&mut self, key: u64) -> Option<&mut V> {
        match self.find(key) {
            (at, true) if key != 0 => Some(&mut self.values[at]),
            _ => None,
        }
    }

    pub fn put(&mut self, key: u64, value: V) -> Result<(), MapFull> {
        if key == 0 {
            return Err(MapFull);
        }
        let (at, there) = self.find(key);
        if !there {
            if self.len >= Self::MOST {
                return Err(MapFull);
            }
            self.len += 1;
            self.keys[at] = key;
        }
        self.values[at] = value;
        Ok(())
    }

    pub fn remove(&mut self, key: u64) -> Option<V> {
        let (mut hole, there) = self.find(key);
        if !there || key == 0 {
            return None;
        }
        let value = self.values[hole];
        self.len -= 1;
        // The values behind it move up, so that no search ends at the hole.
        let mut at = hole;
        loop {
            at = (at + 1) % N;
            if self.keys[at] == 0 {
                break;
            }
            let ideal = Self::home(self.keys[at]);
            // Whether its own place is not after the hole, in the circular order.
            if (at + N - ideal) % N >= (at + N - hole) % N {
                self.keys[hole] = self.keys[at];
                self.values[hole] = self.values[at];
                hole = at;
            }
        }
        self.keys[hole] = 0;
        Some(value)
    }

    pub fn iter(&self) -> impl Iterator<Item = (u64, &V)> {
        let all = if self.len == 0 { 0 } else { N };
        self.keys
            .iter()
            .zip(&self.values)
            .take(all)
            .filter(|(key, _)| **key != 0)
            .map(|(key, value)| (*key, value))
    }

    /// The key of any value that matches.
    pub fn key_of(&self, is_it: impl Fn(&V) -> bool) -> Option<u64> {
        let mut all = self.iter();
        all.find(|(_, value)| is_it(value)).map(|(key, _)| key)
    }

    pub fn len(&self) -> usize {
        self.len
    }

    /// The first value that matches, from a place on, and the place after it.
    pub fn next(&self, from: usize, is_it: impl Fn(&V) -> bool) -> Option<(usize, u64, V)> {
        if self.len == 0 {
            return None;
        }
        let mut rest = self.keys.iter().zip(&self.values).enumerate().skip(from);
        let (place, (key, value)) = rest.find(|(_, (key, value))| **key != 0 && is_it(value))?;
        Some((place + 1, *key, *value))
    }
}

#[cfg(test)]
pub fn fresh<V: Copy + Default, const N: usize>() -> Map<V, N> {
    Map {
        len: 0,
        keys: [0; N],
        values: [V::default(); N],
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::fresh;

    proptest! {
        #[test]
        fn it_remembers_like_a_map(acts in prop::collection::vec((any::<bool>(), 1u64..100, any::<u64>()), 0..300)) {
            let mut ours = fresh::<u64, 64>();
            let mut theirs = BTreeMap::new();
            for (put, key, value) in acts {
                if put {
                    if ours.put(key, value).is_ok() {
                        theirs.insert(key, value);
                    } else {
                        prop_assert_eq!(theirs.len(), 56);
                    }
                } else {
                    prop_assert_eq!(ours.remove(key), theirs.remove(&key));
                }
                prop_assert_eq!(ours.len(), theirs.len());
                for (key, value) in &theirs {
                    prop_assert_eq!(ours.get(*key), Some(value));
                }
                let (mut from, mut found) = (0, 0);
                while let Some((next, key, value)) = ours.next(from, |_| true) {
                    prop_assert_eq!(theirs.get(&key), Some(&value));
                    (from, found) = (next, found + 1);
                }
                prop_assert_eq!(found, theirs.len());
            }
        }
    }
}
