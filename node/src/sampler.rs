//! The sampler: once a period it reads the shares' accounts and the GPUs' utilization, and writes what each share is
//! granted into its cap page.
//!
//! ```text
//!  account (pread) ─────────────┐
//!  NVML, by process ─► processes ┴─► Reading ─► compute::Controller, one per GPU ─► cap (pwrite)
//! ```
//!
//! One per node. It maps no page: see [`crate::page`]. A cap page is written in two steps: first
//! the copy that is not in use, then the number of the copy in use; see
//! [`tranche_shim_core::compute::refill`].

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashSet};
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use tranche_shim_core::compute::{Refill, refill};
use tranche_shim_core::{CapPage, ComputePolicy, PageError, cap, paths};

use crate::compute::evidence::{Report, Worked};
use crate::compute::{Controller, Decision, Reading};
use crate::page::{AccountFile, ReadError, open_page};
use crate::processes::accounts::{FileId, Processes};
use crate::utilization::{Answer, ByProcess, Utilization};

/// Why a share's time is not sampled. Its cores stay as they are.
#[derive(Debug, thiserror::Error)]
pub enum SampleError {
    /// The account.
    #[error(transparent)]
    Account(#[from] ReadError),
    /// A page's file.
    #[error("page {path}: {source}")]
    File {
        /// The page.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The cap page's content.
    #[error("cap page {path}: {source}")]
    Page {
        /// The page.
        path: PathBuf,
        /// Why.
        source: PageError,
    },
}

/// The clock of [`Sampler::step`]: nanoseconds of `CLOCK_MONOTONIC`, which containers share.
#[must_use]
pub fn now() -> u64 {
    tranche_shim_runtime::sys::now()
}

/// The result of a step for one share.
#[derive(Debug)]
pub struct Sampled {
    /// Its folder.
    pub share: PathBuf,
    /// The decision, or why there is none.
    pub outcome: Result<Decision, SampleError>,
}

/// The shares of a node.
#[derive(Debug)]
pub struct Sampler {
    processes: Processes,
    shares: BTreeMap<PathBuf, Opened>,
    gpus: BTreeMap<String, Gpu>,
    /// The number of GPUs with shares whose utilization by process NVML did not report in the last
    /// step.
    coarse: usize,
}

/// A GPU with shares whose time is limited.
#[derive(Debug, Default)]
struct Gpu {
    controller: Controller<PathBuf>,
    /// When an answer of NVML last contained a process of a share.
    matched: Option<u64>,
}

/// For how many nanoseconds after such an answer it is assumed that NVML's processes can be assigned to shares: answers
/// are up to a second apart, and a share is idle at times.
const MATCHED_NANOS: u64 = 3_000_000_000;

/// The interval between checks that a share's open files are still those at its path, in
/// nanoseconds.
const CHECK_NANOS: u64 = 1_000_000_000;

/// The weight of one step in [`Share::recent`].
const RECENT_WEIGHT: f64 = 0.1;

/// A share's files, kept open so that their inodes are not reused.
#[derive(Debug)]
struct Opened {
    cap: File,
    cap_id: FileId,
    /// When they are checked again.
    again: u64,
    /// `None` if its time is not limited.
    share: Option<Share>,
}

/// A share whose time is limited.
#[derive(Debug)]
struct Share {
    gpu: String,
    cores: u8,
    policy: ComputePolicy,
    account: AccountFile,
    account_id: FileId,
    /// The estimated GPU time of its launches, in total and in about the last second.
    spent: u64,
    recent: f64,
    turn: u64,
    written: Refill,
}

impl Sampler {
    /// With the host's `/proc` mounted at `proc`. With another `/proc`, the GPU's utilization is
    /// known only for all shares together.
    pub fn new(proc: impl Into<PathBuf>) -> Self {
        Self {
            processes: Processes::new(proc),
            shares: BTreeMap::new(),
            gpus: BTreeMap::new(),
            coarse: 0,
        }
    }

    /// The number of GPUs with limited shares in the last step whose utilization by process was not known:
    /// their shares got a common correction, by the utilization of the whole GPU.
    #[must_use]
    pub fn gpus_without_processes(&self) -> usize {
        self.coarse
    }

    /// Samples once, at `now` (`CLOCK_MONOTONIC` in nanoseconds). `shares` are the folders of all
    /// held shares, each with a cap page and, if that has a limit, an account. Returns the results
    /// of those whose GPU time is limited.
    pub fn step(
        &mut self,
        now: u64,
        shares: &[PathBuf],
        utilization: &mut dyn Utilization,
    ) -> Vec<Sampled> {
        let mut sampled = Vec::new();
        let held: HashSet<&PathBuf> = shares.iter().collect();
        self.shares.retain(|folder, _| held.contains(folder));
        for folder in shares {
            if let Some(opened) = self.shares.get_mut(folder) {
                // A new share of the same name is opened in the next step, so that the controller
                // forgets the old one.
                if opened.is_replaced(now, folder) {
                    self.shares.remove(folder);
                }
                continue;
            }
            match Opened::open(now, folder) {
                Ok(opened) => {
                    self.shares.insert(folder.clone(), opened);
                }
                Err(error) => sampled.push(failed(folder, error)),
            }
        }
        let mut by_gpu: BTreeMap<String, Vec<(PathBuf, Reading)>> = BTreeMap::new();
        for (folder, opened) in &mut self.shares {
            let Some(share) = &mut opened.share else {
                continue;
            };
            match share.read() {
                Ok(reading) => by_gpu
                    .entry(share.gpu.clone())
                    .or_default()
                    .push((folder.clone(), reading)),
                Err(error) => sampled.push(failed(folder, error)),
            }
        }
        self.gpus.retain(|gpu, _| by_gpu.contains_key(gpu));
        self.coarse = 0;
        if by_gpu.is_empty() {
            // An open NVML would keep the kernel driver from being unloaded.
            utilization.close();
        }
        let mut decisions = Vec::new();
        for (gpu, readings) in &mut by_gpu {
            let share = |folder: &PathBuf| self.shares.get(folder)?.share.as_ref();
            let by_process = utilization.by_process(gpu);
            self.coarse += usize::from(by_process == ByProcess::Unknown);
            let Gpu {
                controller,
                matched,
            } = self.gpus.entry(gpu.clone()).or_default();
            let assigned = match by_process {
                ByProcess::Answer(answer) => {
                    assign(&mut self.processes, now, &answer, readings, share)
                }
                ByProcess::Unknown | ByProcess::NothingNew => BTreeMap::new(),
            };
            if assigned.values().any(|worked| worked.part > 0.0) {
                *matched = Some(now);
            }
            if matched.is_some_and(|at| now.saturating_sub(at) < MATCHED_NANOS) {
                for (folder, reading) in readings.iter_mut() {
                    let worked = share(folder).and_then(|share| assigned.get(&share.account_id));
                    reading.report = worked.copied().map_or(Report::NothingNew, Report::Worked);
                }
            }
            let written = |folder: &PathBuf| {
                share(folder).map_or_else(Refill::default, |share| share.written)
            };
            decisions.extend(controller.step(now, utilization.whole(gpu), readings, written));
        }
        self.processes.forget_ended(now);
        for (folder, decision) in decisions {
            let Some(Opened {
                cap,
                share: Some(share),
                ..
            }) = self.shares.get_mut(&folder)
            else {
                continue;
            };
            let outcome = share
                .write(cap, &decision)
                .map(|()| decision)
                .map_err(|source| SampleError::File {
                    path: folder.join(paths::CAP),
                    source,
                });
            sampled.push(Sampled {
                share: folder,
                outcome,
            });
        }
        sampled
    }
}

/// Assigns an answer to shares, by the shares' accounts. A process that is visible and has no share's account belongs
/// to no share, and no share is charged for it.
///
/// A process may use several shares of a GPU: its utilization is divided in proportion to their charges.
fn assign<'a>(
    processes: &mut Processes,
    now: u64,
    answer: &Answer,
    readings: &[(PathBuf, Reading)],
    share_of: impl Fn(&PathBuf) -> Option<&'a Share>,
) -> BTreeMap<FileId, Worked> {
    let shares: Vec<(FileId, f64)> = readings
        .iter()
        .filter_map(|(folder, _)| share_of(folder))
        .map(|share| (share.account_id, share.recent))
        .collect();
    let accounts: Vec<FileId> = shares.iter().map(|(id, _)| *id).collect();
    let mut parts: BTreeMap<FileId, f64> = accounts.iter().map(|id| (*id, 0.0)).collect();
    let mut ended = 0.0;
    for (pid, part) in answer.processes.iter().filter(|(_, part)| *part > 0.0) {
        let Some(mapped) = processes.accounts_of(*pid, now, &accounts) else {
            ended += part;
            continue;
        };
        let mapped = shares.iter().filter(|(id, _)| mapped.contains(id));
        let all: f64 = mapped.clone().map(|(_, recent)| recent).sum();
        let count: f64 = mapped.clone().map(|_| 1.0).sum();
        for (id, recent) in mapped {
            let weight = if all > 0.0 { recent / all } else { 1.0 / count };
            *parts.entry(*id).or_default() += part * weight;
        }
    }
    let worked = |part: f64| Worked {
        from: answer.from,
        to: answer.to,
        part: part.min(1.0),
        ended,
    };
    parts
        .into_iter()
        .map(|(id, part)| (id, worked(part)))
        .collect()
}

fn failed(folder: &Path, error: SampleError) -> Sampled {
    Sampled {
        share: folder.to_owned(),
        outcome: Err(error),
    }
}

impl Opened {
    fn open(now: u64, folder: &Path) -> Result<Self, SampleError> {
        let path = folder.join(paths::CAP);
        let file = |source| SampleError::File {
            path: path.clone(),
            source,
        };
        let cap_file = open_page(&path, true).map_err(file)?;
        let cap_id = cap_file.metadata().map_err(file)?;
        let mut bytes = [0; cap::LEN];
        cap_file.read_exact_at(&mut bytes, 0).map_err(file)?;
        let page = CapPage::decode(&bytes).map_err(|source| SampleError::Page {
            path: path.clone(),
            source,
        })?;
        let share = match page.cores {
            Some(cores @ 1..=99) => Some(Share::open(folder, cores, &page, &bytes)?),
            _ => None,
        };
        Ok(Self {
            cap: cap_file,
            cap_id: FileId::from(&cap_id),
            again: now.saturating_add(CHECK_NANOS),
            share,
        })
    }

    /// Whether other files are at the share's path now: the share ended and a new one has its name.
    fn is_replaced(&mut self, now: u64, folder: &Path) -> bool {
        if now < self.again {
            return false;
        }
        self.again = now.saturating_add(CHECK_NANOS);
        let is = |page: &str, id: FileId| FileId::of(&folder.join(page)).is_ok_and(|at| at == id);
        let account = self.share.as_ref().map(|share| share.account_id);
        !is(paths::CAP, self.cap_id) || account.is_some_and(|id| !is(paths::ACCOUNT, id))
    }
}

impl Share {
    fn open(
        folder: &Path,
        cores: u8,
        page: &CapPage<'_>,
        bytes: &[u8; cap::LEN],
    ) -> Result<Self, SampleError> {
        let (turn, written) = Refill::decode(bytes);
        let account = folder.join(paths::ACCOUNT);
        // Read before it is opened, so that a file that replaces it in between is detected later.
        let account_id = FileId::of(&account).map_err(|source| SampleError::File {
            path: account.clone(),
            source,
        })?;
        Ok(Self {
            account_id,
            gpu: page.gpu_uuid.to_owned(),
            cores,
            policy: page.compute_policy,
            account: AccountFile::open(&account)?,
            spent: u64::MAX,
            recent: 0.0,
            turn,
            written,
        })
    }

    fn read(&mut self) -> Result<Reading, SampleError> {
        let (position, spent) = self.account.compute()?;
        #[expect(clippy::cast_precision_loss, reason = "a ratio of it is wanted")]
        let news = spent.saturating_sub(self.spent) as f64;
        self.recent += news - self.recent * RECENT_WEIGHT;
        self.spent = spent;
        Ok(Reading {
            cores: self.cores,
            policy: self.policy,
            position,
            spent,
            report: Report::Unknown,
        })
    }

    fn write(&mut self, cap: &File, decision: &Decision) -> io::Result<()> {
        if !decision.is_changed {
            return Ok(());
        }
        let turn = self.turn + 1;
        let at = |offset: usize| (refill::OFFSET + offset) as u64;
        let copy = at(refill::offset_of_turn(turn));
        cap.write_all_at(&decision.refill.encode(), copy)?;
        cap.write_all_at(&turn.to_le_bytes(), at(0))?;
        self.turn = turn;
        self.written = decision.refill;
        Ok(())
    }
}
