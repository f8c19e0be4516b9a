//! The promises with a number. `SPECIFICATION.md` has a row for each of them.

use std::fmt;

/// The limit of a value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Bound {
    /// Less is better.
    AtMost(f64),
    /// More is better.
    AtLeast(f64),
    /// There is no target.
    Open,
}

impl Bound {
    /// Whether `value` is within the bound; always true for an open bound.
    #[must_use]
    pub fn is_kept_by(self, value: f64) -> bool {
        match self {
            Self::AtMost(bound) => value <= bound,
            Self::AtLeast(bound) => value >= bound,
            Self::Open => true,
        }
    }
}

impl fmt::Display for Bound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::AtMost(bound) => write!(f, "≤ {bound}"),
            Self::AtLeast(bound) => write!(f, "≥ {bound}"),
            Self::Open => f.write_str("–"),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Promise {
    /// Its name in results and in `SPECIFICATION.md`.
    pub id: &'static str,
    pub what: &'static str,
    /// The unit of the value and its bound.
    pub unit: &'static str,
    pub bound: Bound,
}

const fn promise(
    id: &'static str,
    what: &'static str,
    unit: &'static str,
    bound: Bound,
) -> Promise {
    Promise {
        id,
        what,
        unit,
        bound,
    }
}

use Bound::{AtLeast, AtMost, Open};

/// All promises, in the order of `SPECIFICATION.md`.
pub const PROMISES: &[Promise] = &[
    promise(
        "prepare-p50",
        "Prepare, one after another, median",
        "ms",
        AtMost(2.0),
    ),
    promise(
        "prepare-above-get",
        "of that, above one GET of the claim",
        "ms",
        AtMost(1.0),
    ),
    promise(
        "prepare-p99",
        "Prepare, one after another, 99th percentile",
        "ms",
        AtMost(8.0),
    ),
    promise(
        "prepare-held-p50",
        "the same with 200 claims held, median",
        "ms",
        AtMost(2.0),
    ),
    promise(
        "prepare-held-above-get",
        "of that, above one GET of the claim",
        "ms",
        AtMost(1.0),
    ),
    promise(
        "prepare-held-p99",
        "the same with 200 claims held, 99th percentile",
        "ms",
        AtMost(8.0),
    ),
    promise("prepare-8", "8 Prepares at once, the last", "ms", Open),
    promise(
        "prepare-32",
        "32 Prepares at once, the last",
        "ms",
        AtMost(100.0),
    ),
    promise(
        "prepare-held-8",
        "8 Prepares at once with 200 held, the last",
        "ms",
        Open,
    ),
    promise(
        "prepare-held-32",
        "32 Prepares at once with 200 held, the last",
        "ms",
        AtMost(100.0),
    ),
    promise(
        "unprepare-p50",
        "Unprepare, one after another, median",
        "ms",
        Open,
    ),
    promise(
        "cycles-rate",
        "prepare + unprepare cycles, 32 workers",
        "/s",
        AtLeast(500.0),
    ),
    promise(
        "cycles-p99",
        "one of these cycles, 99th percentile",
        "ms",
        AtMost(150.0),
    ),
    promise("cycles-failed", "of these, failed", "calls", AtMost(0.0)),
    promise(
        "cycles-cpu",
        "the plugin's CPU time for one of these cycles",
        "ms",
        AtMost(2.5),
    ),
    promise(
        "cycles-runtime-cpu",
        "containerd's CPU time for one of these cycles, for reading the CDI specs again",
        "ms",
        Open,
    ),
    promise(
        "prepare-timeshared-above-get",
        "Prepare of the tier timeshared, median above one GET of the claim",
        "ms",
        AtMost(10.0),
    ),
    promise(
        "prepare-timeshared-p99",
        "the same, 99th percentile, with the GET",
        "ms",
        Open,
    ),
    promise(
        "prepare-concurrent-above-get",
        "Prepare of the tier concurrent, median above one GET of the claim",
        "ms",
        AtMost(10.0),
    ),
    promise(
        "prepare-concurrent-p99",
        "the same, 99th percentile, with the GET",
        "ms",
        Open,
    ),
    promise(
        "prepare-partition-above-get",
        "Prepare of the tier partition, median above one GET of the claim",
        "ms",
        AtMost(10.0),
    ),
    promise(
        "prepare-partition-p99",
        "the same, 99th percentile, with the GET",
        "ms",
        Open,
    ),
    promise(
        "prepare-exclusive-above-get",
        "Prepare of the tier exclusive, median above one GET of the claim",
        "ms",
        AtMost(10.0),
    ),
    promise(
        "prepare-exclusive-p99",
        "the same, 99th percentile, with the GET",
        "ms",
        Open,
    ),
    promise(
        "prepare-left",
        "files left after the last release",
        "files",
        AtMost(0.0),
    ),
    promise(
        "pod-claim-added",
        "pod to Running, added by a claim, one pod",
        "ms",
        AtMost(10.0),
    ),
    promise(
        "pod-exclusive-added",
        "added by a claim for a whole GPU, one pod",
        "ms",
        AtMost(10.0),
    ),
    promise(
        "pod-step-scheduler",
        "of a capped claim's: until the pod has a node",
        "ms",
        Open,
    ),
    promise(
        "pod-step-claim",
        "the kubelet's part of preparing the claim",
        "ms",
        Open,
    ),
    promise("pod-step-prepare", "the driver's Prepare", "ms", Open),
    promise("pod-step-sandbox", "the pod's sandbox", "ms", Open),
    promise(
        "pod-step-create",
        "the container is created, with CDI's edits",
        "ms",
        Open,
    ),
    promise(
        "pod-step-start",
        "the container is started: mounts and hooks",
        "ms",
        Open,
    ),
    promise(
        "pod-step-rest",
        "the rest of the way to Running",
        "ms",
        Open,
    ),
    promise(
        "pod-step-ours",
        "Prepare, create and start together",
        "ms",
        AtMost(10.0),
    ),
    promise(
        "pod-claim-added-8",
        "the same, the last of 8 pods at once",
        "ms",
        AtMost(40.0),
    ),
    promise(
        "pod-template-added",
        "added by a claim from a template, one pod",
        "ms",
        Open,
    ),
    promise(
        "pod-template-added-8",
        "the same, the last of 8 pods at once",
        "ms",
        Open,
    ),
    promise(
        "plugin-start",
        "plugin start → slices published",
        "ms",
        AtMost(300.0),
    ),
    promise("slice-healed", "a deleted slice is back after", "ms", Open),
    promise(
        "kubelet-restart",
        "slices back after the kubelet's re-registration",
        "s",
        AtMost(5.0),
    ),
    promise(
        "slices-1",
        "ResourceSlices of a node of one H100, all tiers on",
        "slices",
        AtMost(2.0),
    ),
    promise("slices-bytes-1", "their bytes as JSON", "KiB", AtMost(48.0)),
    promise(
        "slices-8",
        "ResourceSlices of a node of 8 H100, all tiers on",
        "slices",
        AtMost(9.0),
    ),
    promise(
        "slices-bytes-8",
        "their bytes as JSON",
        "KiB",
        AtMost(384.0),
    ),
    promise(
        "slices-16",
        "ResourceSlices of a node of 16 H100, all tiers on",
        "slices",
        AtMost(18.0),
    ),
    promise(
        "slices-bytes-16",
        "their bytes as JSON",
        "KiB",
        AtMost(768.0),
    ),
    promise(
        "plan-8",
        "planning a node of 8 H100, all tiers on",
        "ms",
        AtMost(10.0),
    ),
    promise(
        "scrape-time",
        "a scrape of the node's metrics, every GPU full of shares",
        "ms",
        AtMost(50.0),
    ),
    promise("scrape-size", "its bytes", "MB", AtMost(5.0)),
    promise(
        "scrape-memory",
        "plugin's resident memory after these scrapes",
        "MiB",
        AtMost(30.0),
    ),
    promise(
        "plugin-memory",
        "plugin's resident memory",
        "MiB",
        AtMost(20.0),
    ),
    promise(
        "plugin-memory-peak",
        "plugin's largest resident memory under this load",
        "MiB",
        Open,
    ),
    promise(
        "controller-memory",
        "controller's resident memory, the leader's",
        "MiB",
        Open,
    ),
    promise(
        "packing-capped",
        "GPUs that capped shares need",
        "of best fit",
        AtMost(1.05),
    ),
    promise("packing-capped-free", "free parts of these GPUs", "%", Open),
    promise(
        "packing-partition",
        "GPUs that partitions need",
        "of best fit",
        AtMost(1.05),
    ),
    promise(
        "packing-partition-free",
        "free parts of these GPUs",
        "%",
        Open,
    ),
    promise("plugin-size", "plugin's binary", "MB", AtMost(15.0)),
    promise("controller-size", "controller's binary", "MB", Open),
    promise("image-size", "image of plugin and controller", "MB", Open),
    promise("hook-size", "container hook", "KiB", Open),
    promise("shim-cuda-size", "shim, libcuda.so.1", "KiB", AtMost(64.0)),
    promise(
        "shim-nvml-size",
        "shim, libnvidia-ml.so.1",
        "KiB",
        AtMost(64.0),
    ),
    promise(
        "shim-load",
        "shim's load, added to a process without CUDA",
        "ms",
        AtMost(0.15),
    ),
    promise(
        "shim-init",
        "shim's load + cuInit, added",
        "ms",
        AtMost(0.3),
    ),
    promise(
        "shim-init-300",
        "300 processes at once, load + cuInit, the last",
        "s",
        AtMost(2.0),
    ),
    promise("shim-alloc", "alloc + free, added", "ns", AtMost(30.0)),
    promise(
        "shim-alloc-4",
        "alloc + free, added, 4 processes",
        "ns",
        AtMost(150.0),
    ),
    promise(
        "shim-alloc-16",
        "alloc + free, added, 16 processes",
        "ns",
        AtMost(150.0),
    ),
    promise(
        "shim-alloc-64",
        "alloc + free, added, 64 processes",
        "ns",
        AtMost(150.0),
    ),
    promise(
        "shim-alloc-live",
        "alloc + free with 10,000 live, added",
        "ns",
        AtMost(150.0),
    ),
    promise(
        "shim-alloc-live-4",
        "alloc + free with 10,000 live, added, 4 processes",
        "ns",
        AtMost(150.0),
    ),
    promise(
        "shim-alloc-live-16",
        "alloc + free with 10,000 live, added, 16 processes",
        "ns",
        AtMost(150.0),
    ),
    promise(
        "shim-alloc-live-64",
        "alloc + free with 10,000 live, added, 64 processes",
        "ns",
        AtMost(150.0),
    ),
    promise("shim-refusal", "refusal", "ns", AtMost(300.0)),
    promise(
        "shim-refusal-4",
        "refusal, 4 processes",
        "ns",
        AtMost(300.0),
    ),
    promise(
        "shim-refusal-16",
        "refusal, 16 processes",
        "ns",
        AtMost(300.0),
    ),
    promise(
        "shim-refusal-64",
        "refusal, 64 processes",
        "ns",
        AtMost(300.0),
    ),
    promise("shim-mem-info", "cuMemGetInfo, added", "ns", AtMost(50.0)),
    promise(
        "shim-mem-info-4",
        "cuMemGetInfo, added, 4 processes",
        "ns",
        AtMost(50.0),
    ),
    promise(
        "shim-mem-info-16",
        "cuMemGetInfo, added, 16 processes",
        "ns",
        AtMost(50.0),
    ),
    promise(
        "shim-mem-info-64",
        "cuMemGetInfo, added, 64 processes",
        "ns",
        AtMost(50.0),
    ),
    promise(
        "shim-proc-address",
        "cuGetProcAddress, added",
        "ns",
        AtMost(100.0),
    ),
    promise(
        "shim-proc-address-4",
        "cuGetProcAddress, added, 4 processes",
        "ns",
        AtMost(100.0),
    ),
    promise(
        "shim-proc-address-16",
        "cuGetProcAddress, added, 16 processes",
        "ns",
        AtMost(100.0),
    ),
    promise(
        "shim-proc-address-64",
        "cuGetProcAddress, added, 64 processes",
        "ns",
        AtMost(100.0),
    ),
    promise(
        "shim-launch",
        "launch of a kernel, added",
        "ns",
        AtMost(15.0),
    ),
    promise(
        "shim-launch-4",
        "launch of a kernel, added, 4 processes",
        "ns",
        AtMost(15.0),
    ),
    promise(
        "shim-launch-16",
        "launch of a kernel, added, 16 processes",
        "ns",
        AtMost(15.0),
    ),
    promise(
        "shim-launch-64",
        "launch of a kernel, added, 64 processes",
        "ns",
        AtMost(15.0),
    ),
    promise(
        "shim-launch-whole-time",
        "launch by a share of all of the GPU's time, added",
        "ns",
        AtMost(3.0),
    ),
    promise(
        "shim-launch-whole-time-4",
        "launch by a share of all of the GPU's time, added, 4 processes",
        "ns",
        AtMost(3.0),
    ),
    promise(
        "shim-launch-whole-time-16",
        "launch by a share of all of the GPU's time, added, 16 processes",
        "ns",
        AtMost(3.0),
    ),
    promise(
        "shim-launch-whole-time-64",
        "launch by a share of all of the GPU's time, added, 64 processes",
        "ns",
        AtMost(3.0),
    ),
    promise(
        "shim-async-pair",
        "stream-ordered alloc + free, added",
        "ns",
        AtMost(100.0),
    ),
    promise(
        "shim-async-pair-4",
        "stream-ordered alloc + free, added, 4 processes",
        "ns",
        AtMost(100.0),
    ),
    promise(
        "shim-async-pair-16",
        "stream-ordered alloc + free, added, 16 processes",
        "ns",
        AtMost(100.0),
    ),
    promise(
        "shim-async-pair-64",
        "stream-ordered alloc + free, added, 64 processes",
        "ns",
        AtMost(100.0),
    ),
    promise(
        "shim-sync-pools",
        "synchronise a stream beside four pools, added",
        "ns",
        AtMost(20.0),
    ),
    promise(
        "shim-sync-pools-4",
        "synchronise a stream beside four pools, added, 4 processes",
        "ns",
        AtMost(20.0),
    ),
    promise(
        "shim-sync-pools-16",
        "synchronise a stream beside four pools, added, 16 processes",
        "ns",
        AtMost(20.0),
    ),
    promise(
        "shim-sync-pools-64",
        "synchronise a stream beside four pools, added, 64 processes",
        "ns",
        AtMost(20.0),
    ),
    promise(
        "shim-mem-info-pools",
        "cuMemGetInfo beside four pools, added",
        "ns",
        AtMost(50.0),
    ),
    promise(
        "shim-mem-info-pools-4",
        "cuMemGetInfo beside four pools, added, 4 processes",
        "ns",
        AtMost(50.0),
    ),
    promise(
        "shim-mem-info-pools-16",
        "cuMemGetInfo beside four pools, added, 16 processes",
        "ns",
        AtMost(50.0),
    ),
    promise(
        "shim-mem-info-pools-64",
        "cuMemGetInfo beside four pools, added, 64 processes",
        "ns",
        AtMost(50.0),
    ),
    promise(
        "compute-alone",
        "GPU time of a share, 5 to 75 percent, kernels of 10 µs to 100 ms, off its cores by",
        "points",
        AtMost(5.0),
    ),
    promise(
        "compute-contended",
        "30 and 70 percent beside each other, off by",
        "points",
        AtMost(5.0),
    ),
    promise(
        "compute-jain",
        "four shares of 25 percent beside each other, Jain's index",
        "of 1",
        AtLeast(0.99),
    ),
    promise(
        "priority-p99",
        "99th percentile of a request of 2 ms with high priority beside a low share that launches as much as it may",
        "of it alone",
        AtMost(1.5),
    ),
];

/// The promise with that name.
#[must_use]
pub fn find(id: &str) -> Option<&'static Promise> {
    PROMISES.iter().find(|promise| promise.id == id)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    const SPECIFICATION: &str = include_str!("../../SPECIFICATION.md");

    /// The rows of the page that name a measurement: its ID, and the target as written there.
    fn rows() -> Vec<(&'static str, &'static str)> {
        SPECIFICATION
            .lines()
            .filter_map(|line| {
                let cells: Vec<_> = line.split('|').map(str::trim).collect();
                let id = cells.last_chunk::<2>()?[0].strip_prefix("bench `")?;
                Some((id.strip_suffix('`')?, *cells.get(2)?))
            })
            .collect()
    }

    #[test]
    fn the_specification_has_a_row_for_each_with_the_same_target() {
        for promise in PROMISES {
            let expected = match promise.bound {
                Bound::Open => promise.bound.to_string(),
                _ => format!("{} {}", promise.bound, promise.unit),
            };
            assert!(
                rows().contains(&(promise.id, expected.as_str())),
                "SPECIFICATION.md has no row that ends with bench `{}` and promises {expected}: {:?}",
                promise.id,
                rows().iter().find(|(id, _)| *id == promise.id)
            );
        }
    }

    #[test]
    fn every_row_of_the_specification_is_measured() {
        for (id, _) in rows() {
            assert!(find(id).is_some(), "SPECIFICATION.md: nobody measures {id}");
        }
        let ids: BTreeSet<_> = PROMISES.iter().map(|promise| promise.id).collect();
        assert_eq!(ids.len(), PROMISES.len());
    }

    #[test]
    fn a_bound_is_kept_up_to_itself() {
        assert!(AtMost(2.0).is_kept_by(2.0));
        assert!(!AtMost(2.0).is_kept_by(2.1));
        assert!(AtLeast(2.0).is_kept_by(2.0));
        assert!(!AtLeast(2.0).is_kept_by(1.9));
    }
}
