//! Measures the memory of a CUDA context, by GPU model and driver.
//!
//! A process that is charged for exactly one context and nothing else holds just that: its memory in NVML is
//! the context's size, if it is the same in two samples. The smallest of these sizes is used, because code
//! that a program has loaded makes its context larger.
//!
//! Tenants write the charges, so implausible sizes are ignored. A size is rounded up and can only decrease
//! under one driver, so the published size changes only a few times in the life of a node.

use std::collections::BTreeMap;

use super::compare::{Owner, ProcessId, ProcessSample, Sample};

/// Sizes are whole multiples of this, in bytes.
const STEP: u64 = 16 << 20;

/// No context is smaller or larger than this, in bytes.
const LEAST: u64 = 32 << 20;
const MOST: u64 = 4 << 30;

/// Contexts have the same size for the same GPU model and driver.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Model {
    /// `nvmlDeviceGetName`.
    pub product: String,
    /// `nvmlSystemGetDriverVersion`.
    pub driver: String,
}

/// A size as files keep it: product, driver, bytes.
pub type Line = (String, String, u64);

/// The sizes that were measured.
#[derive(Clone, Debug, Default)]
pub struct ContextSizes {
    known: BTreeMap<Model, u64>,
    /// Processes that had one context and nothing else in the last sample, and their bytes.
    last: BTreeMap<(String, ProcessId), u64>,
}

impl ContextSizes {
    /// Starts with sizes that were measured before.
    pub fn new(known: impl IntoIterator<Item = (Model, u64)>) -> Self {
        Self {
            known: known.into_iter().collect(),
            last: BTreeMap::new(),
        }
    }

    /// With sizes that a file kept.
    #[must_use]
    pub fn from_lines(lines: Vec<Line>) -> Self {
        let model = |(product, driver, bytes)| (Model { product, driver }, bytes);
        Self::new(lines.into_iter().map(model))
    }

    /// All known sizes, in the form that files keep.
    #[must_use]
    pub fn lines(&self) -> Vec<Line> {
        let line =
            |(model, bytes): (&Model, &u64)| (model.product.clone(), model.driver.clone(), *bytes);
        self.known.iter().map(line).collect()
    }

    /// Bytes of a context, if they were measured.
    #[must_use]
    pub fn get(&self, model: &Model) -> Option<u64> {
        self.known.get(model).copied()
    }

    /// Evaluates a sample of the GPU `gpu_uuid`; whether a size changed.
    pub fn note(&mut self, model: &Model, gpu_uuid: &str, sample: &Sample) -> bool {
        let now: BTreeMap<_, _> = sample
            .processes
            .iter()
            .filter(|process| has_one_context(sample, process))
            .map(|process| ((gpu_uuid.to_owned(), process.id), process.bytes))
            .collect();
        let stable = now
            .iter()
            .filter(|(process, bytes)| self.last.get(process) == Some(bytes))
            .map(|(_, bytes)| *bytes);
        let least = stable.filter(|bytes| (LEAST..=MOST).contains(bytes)).min();
        self.last.retain(|(gpu, _), _| gpu != gpu_uuid);
        self.last.extend(now);
        let Some(size) = least.map(|bytes| bytes.next_multiple_of(STEP)) else {
            return false;
        };
        let is_less = self.known.get(model).is_none_or(|known| size < *known);
        if is_less {
            self.known.insert(model.clone(), size);
        }
        is_less
    }
}

/// Whether a process is charged for a context and nothing else.
fn has_one_context(sample: &Sample, process: &ProcessSample) -> bool {
    let Owner::Shares { keys, .. } = &process.owner else {
        return false;
    };
    // Two containers of a share may each have a process with that PID.
    let is_other = |other: &&ProcessSample| {
        other.id != process.id
            && other.inner_pid == process.inner_pid
            && other.owner == process.owner
    };
    if process.inner_pid.is_none() || sample.processes.iter().any(|other| is_other(&other)) {
        return false;
    }
    let mut charges = Vec::new();
    for share in sample
        .shares
        .iter()
        .filter(|share| keys.contains(&share.key))
    {
        for slot in share.slots.iter().flatten() {
            if Some(slot.pid) == process.inner_pid {
                charges.push((slot.charged, share.context));
            }
        }
    }
    matches!(&charges[..], [(Some(memory), context)] if memory == context && *context > 0)
}

#[cfg(test)]
mod tests {
    use super::super::compare::{ShareSample, SlotSample};
    use super::*;

    const MIB: u64 = 1 << 20;
    const CHARGED: u64 = 512 * MIB;

    fn model(driver: &str) -> Model {
        Model {
            product: "NVIDIA H100 80GB HBM3".into(),
            driver: driver.into(),
        }
    }

    /// Processes, each with its charge and its memory.
    fn sample(processes: &[(u64, u64)]) -> Sample {
        let processes = || (1u32..).zip(processes);
        Sample {
            shares: vec![ShareSample {
                movable: 0,
                key: "share".into(),
                limit: 10 << 30,
                context: CHARGED,
                slots: Some(
                    processes()
                        .map(|(pid, (charged, _))| SlotSample {
                            pid: pid.into(),
                            charged: Some(*charged),
                        })
                        .collect(),
                ),
            }],
            processes: processes()
                .map(|(pid, (_, bytes))| ProcessSample {
                    id: ProcessId { pid, started: 1 },
                    inner_pid: Some(pid.into()),
                    bytes: *bytes,
                    owner: Owner::Shares {
                        pod: None,
                        keys: vec!["share".into()],
                    },
                })
                .collect(),
            ..Sample::default()
        }
    }

    #[test]
    fn the_least_of_what_single_contexts_hold_is_their_size() {
        let mut sizes = ContextSizes::default();
        let mut note =
            |processes: &[(u64, u64)]| sizes.note(&model("580"), "GPU-0", &sample(processes));
        // A single sample is not stable, nor is a growing size.
        assert!(!note(&[(CHARGED, 450 * MIB)]));
        assert!(!note(&[(CHARGED, 460 * MIB)]));
        assert!(note(&[(CHARGED, 460 * MIB)]));
        // With other memory, with a second context, or with an implausible size.
        for _ in 0..3 {
            assert!(!note(&[
                (CHARGED + 2 * MIB, 100 * MIB),
                (2 * CHARGED, 700 * MIB),
                (CHARGED, MIB),
                (CHARGED, 600 * MIB),
            ]));
        }
        assert!(!note(&[(CHARGED, 430 * MIB)]));
        assert!(note(&[(CHARGED, 430 * MIB)]));
        // Within the same step: nothing to write.
        for bytes in [431, 432, 429, 425] {
            assert!(!note(&[(CHARGED, bytes * MIB)]));
            assert!(!note(&[(CHARGED, bytes * MIB)]));
        }
        assert_eq!(sizes.get(&model("580")), Some(432 * MIB));
        assert_eq!(sizes.get(&model("535")), None);
        let kept = ContextSizes::from_lines(sizes.lines());
        assert_eq!(kept.get(&model("580")), Some(432 * MIB));
    }

    #[test]
    fn processes_of_one_number_and_of_two_slots_are_not_measured() {
        let mut sizes = ContextSizes::default();
        let mut twins = sample(&[(CHARGED, 400 * MIB), (CHARGED, 400 * MIB)]);
        twins.processes[1].inner_pid = Some(1);
        let mut slots = sample(&[(CHARGED, 400 * MIB), (CHARGED, 400 * MIB)]);
        for slot in slots.shares[0].slots.iter_mut().flatten() {
            slot.pid = 1;
        }
        for sample in [twins, slots] {
            for _ in 0..3 {
                assert!(!sizes.note(&model("580"), "GPU-0", &sample));
            }
        }
    }
}
