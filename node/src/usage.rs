//! Reads who uses the GPUs: utilization once a second, everything else on request.
//!
//! NVML reports the utilization of its last sampling period, a sixth of a second to a second. A [`Window`] averages ten
//! seconds of it, for the GPU and for each process alike, so that the parts can be compared with the whole.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Instant;

use tranche_api::gpu_node::Gpu;
use tranche_api::usage::{Measure, WHOLE};
use tranche_driver::usage::{DeviceReading, GpuReading, Owner, PartitionReading, ProcessReading};

use crate::health::XidCounts;
use crate::nvml::{Driver, GpuUse, ProcessMemory};
use crate::utilization::{Answer, ByProcess, NvmlUtilization, Utilization};

/// The time that is averaged, in nanoseconds.
const WINDOW_NANOS: u64 = 10_000_000_000;

/// Reads the GPUs of a node.
#[derive(Debug)]
pub struct Reader {
    nvml: NvmlUtilization,
    windows: BTreeMap<String, Window>,
    /// The Xids of each GPU.
    xids: XidCounts,
}

/// The recent work of a GPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Busy {
    /// Whether it worked.
    pub is_busy: bool,
    /// The processes for which it worked, if NVML reports them.
    pub pids: Option<BTreeSet<u32>>,
}

impl Reader {
    /// For the NVML of `driver`, which is opened when it is needed. `xids` are those of its GPUs.
    #[must_use]
    pub fn new(driver: Box<dyn Driver>, xids: XidCounts) -> Self {
        Self {
            nvml: NvmlUtilization::new(driver),
            windows: BTreeMap::new(),
            xids,
        }
    }

    /// Samples the utilization of some GPUs at `now`, in nanoseconds of any monotonic clock, and forgets all others.
    /// Returns their work since the last call.
    pub fn sample(&mut self, now: u64, gpus: &[&str]) -> BTreeMap<String, Busy> {
        self.windows.retain(|uuid, _| gpus.contains(&uuid.as_str()));
        let mut busy = BTreeMap::new();
        for uuid in gpus {
            let rates = self
                .nvml
                .open()
                .and_then(|nvml| nvml.utilization_rates(uuid));
            let by_process = self.nvml.by_process(uuid);
            let window = self.windows.entry((*uuid).to_owned()).or_default();
            let ran = window.add(now, rates.ok(), by_process);
            busy.insert((*uuid).to_owned(), ran);
        }
        busy
    }

    /// Reads a GPU at `now`. `owners` has the owners of its processes; on a GPU that no claim holds all processes are
    /// foreign.
    pub fn read(
        &mut self,
        now: u64,
        gpu: &Gpu,
        owners: &BTreeMap<u32, Owner>,
        is_held: bool,
    ) -> GpuReading {
        let usage = self.nvml.open().and_then(|nvml| nvml.usage(&gpu.uuid));
        let mut reading = GpuReading {
            uuid: gpu.uuid.clone(),
            index: gpu.index,
            minor: gpu.minor,
            pci_bus_id: gpu.pci_bus_id.clone(),
            product_name: gpu.product_name.clone(),
            mig_mode: gpu.mig_mode.current,
            xids: self.xids.of(&gpu.uuid),
            ..GpuReading::default()
        };
        match usage {
            Ok(usage) => {
                let mean = self.windows.get(&gpu.uuid).map(|window| window.mean(now));
                describe(&mut reading, usage, &mean.unwrap_or_default(), |pid| {
                    let unknown = if is_held {
                        Owner::Ended
                    } else {
                        Owner::Foreign
                    };
                    owners.get(&pid).cloned().unwrap_or(unknown)
                });
            }
            Err(error) => reading.problem = Some(error.to_string()),
        }
        reading
    }

    /// Whether NVML is open.
    #[must_use]
    pub fn is_open(&self) -> bool {
        self.nvml.is_open()
    }

    /// Closes NVML, because nobody needs it for a while.
    pub fn close(&mut self) {
        Utilization::close(&mut self.nvml);
        self.windows.clear();
    }

    /// Closes NVML if it was opened some time ago: none of its calls work.
    pub fn close_failed(&mut self) {
        self.nvml.close_failed(Instant::now());
    }
}

fn describe(reading: &mut GpuReading, usage: GpuUse, mean: &Mean, owner: impl Fn(u32) -> Owner) {
    reading.mig_mode = usage.mig_mode;
    reading.sensors = usage.sensors;
    let process = |process: &ProcessMemory| ProcessReading {
        bytes: process.bytes.unwrap_or(0),
        busy: part(mean.busy.as_ref(), process.pid),
        copies: part(mean.copies.as_ref(), process.pid),
        owner: owner(process.pid),
    };
    let on_partitions: BTreeSet<u32> = usage
        .partitions
        .iter()
        .flat_map(|it| &it.processes)
        .map(|process| process.pid)
        .collect();
    let mut utilization = usage.utilization;
    for (measure, value) in [Measure::Gpu, Measure::MemoryCopy]
        .into_iter()
        .zip(mean.whole)
    {
        if let (Some(value), true) = (value, utilization.get(measure).is_some()) {
            utilization.0.insert(measure, value);
        }
    }
    reading.device = DeviceReading {
        memory: usage.memory,
        utilization,
        processes: usage
            .processes
            .iter()
            .filter(|process| !on_partitions.contains(&process.pid))
            .map(process)
            .collect(),
    };
    let partitions = usage.partitions.into_iter().map(|it| PartitionReading {
        device: DeviceReading {
            memory: it.memory,
            utilization: it.utilization,
            processes: it.processes.iter().map(process).collect(),
        },
        uuid: it.uuid,
        profile: it.profile,
        gpu_instance: it.gpu_instance,
        compute_instance: it.compute_instance,
    });
    reading.partitions = partitions.collect();
}

/// The last ten seconds of a GPU.
#[derive(Debug, Default)]
struct Window {
    /// When it was first sampled.
    since: Option<u64>,
    /// When, and the percent of the GPU and of its memory.
    polls: VecDeque<(u64, [u32; 2])>,
    /// The answers by process, with the time at which they were read.
    answers: VecDeque<(u64, Answer)>,
    /// Whether NVML reports the utilization by process.
    is_by_process: bool,
}

/// Averages in hundredths of a percent.
#[derive(Debug, Default)]
struct Mean {
    /// Of the GPU and of its memory.
    whole: [Option<u32>; 2],
    /// By process; `None` if NVML does not report it.
    busy: Option<BTreeMap<u32, f64>>,
    copies: Option<BTreeMap<u32, f64>>,
}

/// A process's average.
fn part(parts: Option<&BTreeMap<u32, f64>>, pid: u32) -> Option<u32> {
    Some(parts?.get(&pid).map_or(0, |part| of_whole(*part)))
}

impl Window {
    fn add(&mut self, now: u64, rates: Option<[u32; 2]>, by_process: ByProcess) -> Busy {
        self.since.get_or_insert(now);
        if let Some(rates) = rates {
            self.polls.push_back((now, rates));
        }
        self.is_by_process = by_process != ByProcess::Unknown;
        let mut pids = BTreeSet::new();
        if let ByProcess::Answer(answer) = by_process {
            let busy = answer.processes.iter().filter(|(_, part)| *part > 0.0);
            pids.extend(busy.map(|(pid, _)| *pid));
            self.answers.push_back((now, answer));
        }
        let is_old = |at: u64| now.saturating_sub(at) >= WINDOW_NANOS;
        while self.polls.front().is_some_and(|(at, _)| is_old(*at)) {
            self.polls.pop_front();
        }
        while self.answers.front().is_some_and(|(at, _)| is_old(*at)) {
            self.answers.pop_front();
        }
        Busy {
            is_busy: !pids.is_empty() || rates.is_some_and(|[gpu, _]| gpu > 0),
            pids: self.is_by_process.then_some(pids),
        }
    }

    fn mean(&self, now: u64) -> Mean {
        let count = self.polls.len().max(1);
        let whole = |which: usize| {
            let sum: usize = self.polls.iter().map(|(_, it)| it[which] as usize).sum();
            let mean = sum * (WHOLE as usize / 100) / count;
            (!self.polls.is_empty()).then(|| u32::try_from(mean).unwrap_or(WHOLE).min(WHOLE))
        };
        // Between two answers it was idle.
        let length = self.since.map_or(0, |since| now.saturating_sub(since));
        let length = seconds(length.clamp(1_000_000_000, WINDOW_NANOS));
        let by_process = |of: fn(&Answer) -> &Vec<(u32, f64)>| {
            let mut parts: BTreeMap<u32, f64> = BTreeMap::new();
            for (_, answer) in &self.answers {
                let answered = seconds(answer.to.saturating_sub(answer.from));
                for (pid, part) in of(answer) {
                    *parts.entry(*pid).or_default() += part * answered / length;
                }
            }
            self.is_by_process.then_some(parts)
        };
        Mean {
            whole: [whole(0), whole(1)],
            busy: by_process(|answer| &answer.processes),
            copies: by_process(|answer| &answer.copies),
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "some seconds")]
fn seconds(nanos: u64) -> f64 {
    nanos as f64 / 1e9
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "between 0 and the whole"
)]
fn of_whole(part: f64) -> u32 {
    (part.clamp(0.0, 1.0) * f64::from(WHOLE)).round() as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::inventory::inventory;
    use crate::nvml::Nvml as _;
    use crate::testing::MigGpus;

    const SECOND: u64 = 1_000_000_000;

    fn answer(at: u64, parts: &[(u32, f64)]) -> ByProcess {
        ByProcess::Answer(Answer {
            from: at - SECOND,
            to: at,
            processes: parts.to_vec(),
            copies: parts.iter().map(|(pid, part)| (*pid, part / 2.0)).collect(),
        })
    }

    #[test]
    fn a_window_averages_ten_seconds_of_a_gpu_and_its_processes() {
        let mut window = Window::default();
        for second in 1..=30 {
            // Every other second two processes work, one of them a quarter of it.
            let (now, is_on) = (second * SECOND, second % 2 == 0);
            let by_process = if is_on {
                answer(now, &[(1, 0.25), (2, 0.5)])
            } else {
                ByProcess::NothingNew
            };
            let busy = window.add(now, Some(if is_on { [80, 40] } else { [0, 0] }), by_process);
            assert_eq!(busy.is_busy, is_on);
            assert_eq!(busy.pids.unwrap().len(), if is_on { 2 } else { 0 });
        }
        let mean = window.mean(30 * SECOND);
        let near = |value: Option<u32>, wanted: u32| value.unwrap().abs_diff(wanted) < 500;
        assert!(
            near(mean.whole[0], 4_000) && near(mean.whole[1], 2_000),
            "{mean:?}"
        );
        assert!(near(part(mean.busy.as_ref(), 1), 1_250), "{mean:?}");
        assert!(near(part(mean.busy.as_ref(), 2), 2_500), "{mean:?}");
        assert!(near(part(mean.copies.as_ref(), 2), 1_250), "{mean:?}");
        assert_eq!(part(mean.busy.as_ref(), 3), Some(0));
        // Long ago.
        window.add(60 * SECOND, None, ByProcess::Unknown);
        let mean = window.mean(60 * SECOND);
        assert_eq!((mean.whole, part(mean.busy.as_ref(), 1)), ([None; 2], None));
    }

    #[test]
    fn a_reading_has_the_gpu_and_whose_its_processes_are() {
        let root = tempfile::tempdir().unwrap();
        let gpus = MigGpus::two_h100(root.path());
        let known = inventory(&gpus.describe().unwrap(), root.path()).gpus;
        let process = |pid| ProcessMemory {
            pid,
            bytes: Some(1 << 30),
        };
        gpus.run(&known[0].uuid, vec![process(7), process(8)]);
        let mut reader = Reader::new(Box::new(gpus), XidCounts::default());
        let of_a_claim = Owner::Claims {
            keys: ["key".to_owned()].into(),
            pod_uid: None,
            container: None,
        };
        let owners = BTreeMap::from([(7, of_a_claim.clone())]);
        let reading = reader.read(0, &known[0], &owners, true);
        assert_eq!(reading.problem, None);
        assert_eq!(reading.device.memory.unwrap().used, 2 << 30);
        let found = reading.device.processes.iter().map(|it| it.owner.clone());
        // The owner of the second one is not known yet.
        assert_eq!(found.collect::<Vec<_>>(), [of_a_claim, Owner::Ended]);
        let reading = reader.read(0, &known[0], &BTreeMap::new(), false);
        assert!(
            reading
                .device
                .processes
                .iter()
                .all(|it| it.owner == Owner::Foreign)
        );
        assert_eq!(reading.xids, None, "its Xids are not watched");
        let gone = Gpu {
            uuid: "GPU-gone".into(),
            ..known[1].clone()
        };
        assert!(reader.read(0, &gone, &owners, true).problem.is_some());
    }
}
