//! Keeps the most memory that each held device was seen to use.

use std::collections::BTreeMap;

use tranche_api::usage::Peak;

use super::Owner;
use super::apportion::apportion;

/// The peaks of held devices, by their keys, from sample to sample.
#[derive(Clone, Debug, Default)]
pub struct Peaks {
    devices: BTreeMap<String, Sampled>,
}

#[derive(Clone, Copy, Debug)]
struct Sampled {
    bytes: u64,
    /// When the device was first seen, seconds.
    since: u64,
}

impl Peaks {
    /// Takes a sample of one GPU at `now`, in seconds of any monotonic clock. `weights` has the devices of the GPU for
    /// which the driver reports what each process holds; a process that may use several of them is divided by their
    /// weights.
    pub fn add<'a>(
        &mut self,
        now: u64,
        weights: &BTreeMap<String, u64>,
        processes: impl IntoIterator<Item = (&'a Owner, u64)>,
    ) {
        let mut sums: BTreeMap<&str, u64> = weights.keys().map(|key| (key.as_str(), 0)).collect();
        for (owner, bytes) in processes {
            let Owner::Claims { keys, .. } = owner else {
                continue;
            };
            let of_gpu = keys.iter().filter_map(|key| weights.get_key_value(key));
            let (keys, weights): (Vec<_>, Vec<u64>) = of_gpu.unzip();
            for (key, part) in keys.into_iter().zip(apportion(bytes, &weights)) {
                let sum = sums.entry(key).or_default();
                *sum = sum.saturating_add(part);
            }
        }
        for (key, bytes) in sums {
            let new = Sampled { bytes, since: now };
            let known = self.devices.entry(key.to_owned()).or_insert(new);
            known.bytes = known.bytes.max(bytes);
        }
    }

    /// Forgets all other devices.
    pub fn keep(&mut self, is_held: impl Fn(&str) -> bool) {
        self.devices.retain(|key, _| is_held(key));
    }

    /// The peaks at `now`.
    #[must_use]
    pub fn get(&self, now: u64) -> BTreeMap<String, Peak> {
        let peak = |known: &Sampled| Peak {
            bytes: known.bytes,
            watched_seconds: now.saturating_sub(known.since),
        };
        let devices = self.devices.iter();
        devices
            .map(|(key, known)| (key.clone(), peak(known)))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owner(keys: &[&str]) -> Owner {
        Owner::Claims {
            keys: keys.iter().map(ToString::to_string).collect(),
            pod_uid: None,
            container: None,
        }
    }

    fn weights(devices: &[(&str, u64)]) -> BTreeMap<String, u64> {
        let devices = devices.iter();
        devices
            .map(|(key, weight)| ((*key).to_owned(), *weight))
            .collect()
    }

    fn told(peaks: &Peaks, now: u64) -> Vec<(String, u64, u64)> {
        let peaks = peaks.get(now).into_iter();
        peaks
            .map(|(key, peak)| (key, peak.bytes, peak.watched_seconds))
            .collect()
    }

    #[test]
    fn the_peak_of_all_samples_is_kept_while_the_device_is_held() {
        let mut peaks = Peaks::default();
        let of_gpu = weights(&[("a", 1), ("b", 1)]);
        let (a, b) = (owner(&["a", "on-another-gpu"]), owner(&["b"]));
        peaks.add(10, &of_gpu, [(&a, 30), (&a, 20), (&Owner::Foreign, 1000)]);
        peaks.add(11, &of_gpu, [(&a, 40), (&b, 7)]);
        peaks.add(12, &of_gpu, []);
        let both = [("a".to_owned(), 50, 5), ("b".to_owned(), 7, 5)];
        assert_eq!(told(&peaks, 15), both);
        peaks.keep(|key| key == "b");
        assert_eq!(told(&peaks, 15), both[1..]);
        peaks.add(20, &of_gpu, [(&a, 1)]);
        assert_eq!(told(&peaks, 20)[0], ("a".to_owned(), 1, 0));
    }

    #[test]
    fn a_process_with_several_shares_is_divided_by_their_sizes() {
        let mut peaks = Peaks::default();
        let process = owner(&["large", "small"]);
        peaks.add(
            0,
            &weights(&[("large", 30), ("small", 10)]),
            [(&process, 100)],
        );
        let expected = [("large".to_owned(), 75, 0), ("small".to_owned(), 25, 0)];
        assert_eq!(told(&peaks, 0), expected);
    }
}
