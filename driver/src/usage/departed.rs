//! Remembers the claims of processes that died, while a GPU has memory that no process owns.

use std::collections::BTreeMap;

use tranche_api::usage::{ClaimReference, Zombie};

/// What a process held when it was last seen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holding {
    /// Its claim.
    pub claim: ClaimReference,
    /// Its pod.
    pub pod: Option<String>,
    /// The pod's UID.
    pub pod_uid: Option<String>,
    /// Bytes of the GPU.
    pub bytes: u64,
}

/// The processes of one GPU, from sample to sample.
#[derive(Clone, Debug)]
pub struct Departed<K> {
    alive: BTreeMap<K, Holding>,
    /// What dead processes have left, in the order of their deaths.
    dead: Vec<Holding>,
}

impl<K> Default for Departed<K> {
    fn default() -> Self {
        Self {
            alive: BTreeMap::new(),
            dead: Vec::new(),
        }
    }
}

impl<K: Ord> Departed<K> {
    /// Takes the processes of a sample and the bytes in use without an owner; `None` if these are not known. Memory
    /// that the driver has freed is forgotten. The process that died first is assumed to own what is left: the driver
    /// usually frees a process's memory within a second of its end, so what is left after that will stay.
    pub fn step(&mut self, alive: BTreeMap<K, Holding>, unowned: Option<u64>) {
        let before = std::mem::take(&mut self.alive);
        let died = before
            .into_iter()
            .filter(|(process, _)| !alive.contains_key(process));
        for (_, holding) in died {
            let same =
                |it: &&mut Holding| (&it.claim, &it.pod_uid) == (&holding.claim, &holding.pod_uid);
            match self.dead.iter_mut().find(same) {
                Some(same) => same.bytes = same.bytes.saturating_add(holding.bytes),
                None => self.dead.push(holding),
            }
        }
        self.alive = alive;
        if let Some(mut left) = unowned {
            for holding in &mut self.dead {
                holding.bytes = holding.bytes.min(left);
                left -= holding.bytes;
            }
            self.dead.retain(|holding| holding.bytes > 0);
        }
    }

    /// What dead processes have left.
    #[must_use]
    pub fn zombies(&self) -> Vec<Zombie> {
        let zombie = |holding: &Holding| Zombie {
            claim: holding.claim.clone(),
            pod: holding.pod.clone(),
            pod_uid: holding.pod_uid.clone(),
            used: holding.bytes,
            processes: 0,
        };
        self.dead.iter().map(zombie).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn holding(claim: &str, bytes: u64) -> Holding {
        let claim = ClaimReference {
            namespace: "team".into(),
            name: claim.into(),
            uid: format!("uid-of-{claim}"),
        };
        Holding {
            claim,
            pod: Some("pod".into()),
            pod_uid: Some("pod-uid".into()),
            bytes,
        }
    }

    fn named(departed: &Departed<u32>) -> Vec<(String, u64)> {
        let zombies = departed.zombies().into_iter();
        zombies.map(|it| (it.claim.name, it.used)).collect()
    }

    #[test]
    fn what_a_dead_process_left_is_its_claims_until_it_is_free() {
        let mut departed = Departed::default();
        let alive = [(1, holding("a", 100)), (2, holding("b", 50))];
        departed.step(BTreeMap::from(alive), Some(0));
        assert!(named(&departed).is_empty());
        // The first dies, and the driver keeps its memory.
        departed.step(BTreeMap::from([(2, holding("b", 50))]), Some(100));
        assert_eq!(named(&departed), [("a".to_owned(), 100)]);
        // The second dies, and its memory is free a moment later.
        departed.step(BTreeMap::new(), Some(150));
        assert_eq!(
            named(&departed),
            [("a".to_owned(), 100), ("b".to_owned(), 50)]
        );
        departed.step(BTreeMap::new(), None);
        departed.step(BTreeMap::new(), Some(100));
        assert_eq!(named(&departed), [("a".to_owned(), 100)]);
        departed.step(BTreeMap::new(), Some(0));
        assert!(named(&departed).is_empty());
    }

    #[test]
    fn the_processes_of_a_claim_are_named_once() {
        let mut departed = Departed::default();
        let alive = [(1, holding("a", 100)), (2, holding("a", 50))];
        departed.step(BTreeMap::from(alive), Some(0));
        departed.step(BTreeMap::new(), Some(120));
        assert_eq!(named(&departed), [("a".to_owned(), 120)]);
    }
}
