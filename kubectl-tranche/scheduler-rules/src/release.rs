//! Finds claims whose release makes a pod fit.

use std::collections::BTreeSet;

use super::verdict::{Obstacle, Release, Report, Verdict};

/// How many sets of claims are tried for one node.
const MOST_TRIES: usize = 2_000;
/// The largest set that is tried before the set of all holders of one GPU.
const MOST_CLAIMS: usize = 3;

/// Tries sets of fewer holders than `fewer_than`: small sets first, then all holders that block one device, then all holders on
/// the node.
pub(super) fn find(
    report: &Report,
    fewer_than: usize,
    fits: impl Fn(&[&str]) -> bool,
) -> Option<Release> {
    if report.verdict != Verdict::DoesNotFit {
        return None;
    }
    // Each group is the holders that block one device.
    let mut groups: BTreeSet<BTreeSet<&str>> = BTreeSet::new();
    for device in report.requests.iter().flat_map(|request| &request.devices) {
        let holders = device.obstacle.iter().flat_map(Obstacle::holders);
        groups.insert(holders.map(|holder| holder.claim.as_str()).collect());
    }
    groups.remove(&BTreeSet::new());
    let distinct: BTreeSet<&str> = groups.iter().flatten().copied().collect();
    let all: Vec<&str> = distinct.into_iter().collect();

    let mut tries = MOST_TRIES;
    let mut try_set = |set: &[&str]| {
        if tries == 0 {
            return None;
        }
        tries -= 1;
        Some(fits(set))
    };
    let release = |set: &[&str], smallest| Release {
        claims: set.iter().map(|claim| (*claim).to_owned()).collect(),
        smallest,
    };
    let mut proven = 0;
    'sizes: for size in 1..=MOST_CLAIMS.min(all.len()).min(fewer_than.saturating_sub(1)) {
        let mut combination: Vec<usize> = (0..size).collect();
        loop {
            let set: Vec<&str> = combination.iter().map(|index| all[*index]).collect();
            match try_set(&set) {
                Some(true) => return Some(release(&set, true)),
                Some(false) => {}
                None => break 'sizes,
            }
            if !self::advance(&mut combination, all.len()) {
                break;
            }
        }
        proven = size;
    }
    if fewer_than <= proven + 1 {
        return None;
    }
    let mut larger: Vec<Vec<&str>> = groups
        .iter()
        .map(|it| it.iter().copied().collect())
        .collect();
    larger.sort_by_key(Vec::len);
    larger.push(all);
    let mut set = larger
        .into_iter()
        .find(|set| set.len() > proven && fits(set))?;
    // Remove the claims that need not be released.
    let mut index = 0;
    while index < set.len() {
        let mut without = set.clone();
        without.remove(index);
        if fits(&without) {
            set = without;
        } else {
            index += 1;
        }
    }
    let smallest = set.len() == proven + 1;
    (set.len() < fewer_than).then(|| release(&set, smallest))
}

/// The next combination of the numbers below `count`.
fn advance(combination: &mut [usize], count: usize) -> bool {
    let size = combination.len();
    for place in (0..size).rev() {
        if combination[place] < count - (size - place) {
            combination[place] += 1;
            for later in place + 1..size {
                combination[later] = combination[later - 1] + 1;
            }
            return true;
        }
    }
    false
}
