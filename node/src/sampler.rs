//! The sampler: once a period it reads what the shares' accounts say and how busy the GPUs are, and
//! writes what each share is granted into its cap page.
//!
//! ```text
//!  account (pread) ─────────────┐
//!  NVML, by process ─► processes ┴─► Reading ─► compute::Controller, one per GPU ─► cap (pwrite)
//! ```
//!
//! One per node. It maps nothing: see [`crate::page`]. A cap page is written in two steps, the copy
//! that is not in use and then which is: see [`tranche_shim_core::compute::refill`].

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use tranche_shim_core::compute::{Refill, refill};
use tranche_shim_core::{CapPage, ComputePolicy, PageError, cap, paths};

use crate::compute::{Controller, Decision, Reading};
use crate::page::{AccountFile, ReadError, open_page};
use crate::processes::{FileId, Processes};
use crate::utilization::Utilization;

/// Why a share's time is not sampled. It goes on with its cores.
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

/// What became of a share in a step.
#[derive(Debug)]
pub struct Sampled {
    /// Its folder.
    pub share: PathBuf,
    /// What was decided, or why nothing was.
    pub outcome: Result<Decision, SampleError>,
}

/// The shares of a node.
#[derive(Debug)]
pub struct Sampler {
    processes: Processes,
    shares: BTreeMap<PathBuf, Opened>,
    gpus: BTreeMap<String, Controller<PathBuf>>,
}

/// From one look whether a share's files are still those at its path to the next, in nanoseconds.
const LOOK_NANOS: u64 = 1_000_000_000;

/// A share's files, kept open: no other file gets their inodes.
#[derive(Debug)]
struct Opened {
    cap: File,
    cap_id: FileId,
    /// When they are looked at again.
    again: u64,
    /// `None` where its time is not limited.
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
    turn: u64,
    written: Refill,
}

impl Sampler {
    /// With the host's `/proc` mounted at `proc`. Where it is not the host's, what the GPU works is
    /// known for all shares together only.
    pub fn new(proc: impl Into<PathBuf>) -> Self {
        Self {
            processes: Processes::new(proc),
            shares: BTreeMap::new(),
            gpus: BTreeMap::new(),
        }
    }

    /// Samples once, at `now` (`CLOCK_MONOTONIC` in nanoseconds). `shares` are the folders of all
    /// shares that are held, each with a cap page and, if that limits anything, an account. Returns
    /// what became of those whose GPU time is limited.
    pub fn step(
        &mut self,
        now: u64,
        shares: &[PathBuf],
        utilization: &mut dyn Utilization,
    ) -> Vec<Sampled> {
        let mut sampled = Vec::new();
        self.shares.retain(|folder, _| shares.contains(folder));
        for folder in shares {
            if let Some(opened) = self.shares.get_mut(folder) {
                // Another share of that name is opened in the next step, so that the controller forgets
                // this one.
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
        let mut by_gpu: BTreeMap<&str, Vec<(PathBuf, Reading)>> = BTreeMap::new();
        let opened = self.shares.iter();
        let limited = opened.filter_map(|(folder, opened)| Some((folder, opened.share.as_ref()?)));
        for (folder, share) in limited {
            match share.read() {
                Ok(reading) => by_gpu
                    .entry(&share.gpu)
                    .or_default()
                    .push((folder.clone(), reading)),
                Err(error) => sampled.push(failed(folder, error)),
            }
        }
        self.gpus.retain(|gpu, _| by_gpu.contains_key(gpu.as_str()));
        let mut decisions = Vec::new();
        let mut pids = Vec::new();
        for (gpu, readings) in &mut by_gpu {
            let parts = utilization.by_process(gpu).unwrap_or_default();
            pids.extend(parts.iter().map(|(pid, _)| *pid));
            let share = |folder: &PathBuf| self.shares.get(folder)?.share.as_ref();
            let ids = |folder: &PathBuf| share(folder).map(|share| share.account_id);
            set_busy(&mut self.processes, now, &parts, readings, ids);
            let controller = self.gpus.entry((*gpu).to_owned()).or_default();
            let written = |folder: &PathBuf| {
                share(folder).map_or_else(Refill::default, |share| share.written)
            };
            decisions.extend(controller.step(now, utilization.whole(gpu), readings, written));
        }
        self.processes.keep(&pids);
        for (folder, decision) in decisions {
            let Some(Opened {
                cap,
                share: Some(share),
                ..
            }) = self.shares.get_mut(&folder)
            else {
                continue;
            };
            let outcome = share.write(cap, &decision).map(|()| decision);
            let outcome = outcome.map_err(|source| SampleError::File {
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

/// Notes for each share how much of the time its GPU worked for its processes; or for none of them,
/// where no process of any share can be seen here. One that cannot is nobody's: its neighbours are not
/// to answer for it.
fn set_busy(
    processes: &mut Processes,
    now: u64,
    parts: &[(u32, f64)],
    readings: &mut [(PathBuf, Reading)],
    id_of: impl Fn(&PathBuf) -> Option<FileId>,
) {
    let ids: Vec<Option<FileId>> = readings.iter().map(|(folder, _)| id_of(folder)).collect();
    let accounts: Vec<FileId> = ids.iter().copied().flatten().collect();
    let mut sums: BTreeMap<FileId, f64> = BTreeMap::new();
    for (pid, part) in parts.iter().filter(|(_, part)| *part > 0.0) {
        if let Some(account) = processes.account_of(*pid, now, &accounts) {
            *sums.entry(account).or_default() += part;
        }
    }
    if sums.is_empty() {
        return;
    }
    for ((_, reading), id) in readings.iter_mut().zip(ids) {
        let sum = id.and_then(|id| sums.get(&id)).copied().unwrap_or(0.0);
        reading.busy = Some(sum.min(1.0));
    }
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
            again: now.saturating_add(LOOK_NANOS),
            share,
        })
    }

    /// Whether other files are at the share's path by now: a share ended and another one has its name.
    fn is_replaced(&mut self, now: u64, folder: &Path) -> bool {
        if now < self.again {
            return false;
        }
        self.again = now.saturating_add(LOOK_NANOS);
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
        // Before it is opened: one that comes in between is noticed later.
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
            turn,
            written,
        })
    }

    fn read(&self) -> Result<Reading, SampleError> {
        let (position, spent) = self.account.compute()?;
        Ok(Reading {
            cores: self.cores,
            policy: self.policy,
            position,
            spent,
            busy: None,
        })
    }

    fn write(&mut self, cap: &File, decision: &Decision) -> io::Result<()> {
        if !decision.is_news {
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

#[cfg(test)]
mod tests {
    use std::fs;

    use tranche_shim_core::AccountPage;
    use tranche_shim_core::compute::WHOLE;

    use super::*;

    const GPU: &str = "GPU-00112233-4455-6677-8899-aabbccddeeff";
    const SECOND: u64 = 1_000_000_000;

    struct Busy(f64);

    impl Utilization for Busy {
        fn whole(&mut self, _: &str) -> Option<f64> {
            Some(self.0)
        }
        fn by_process(&mut self, _: &str) -> Option<Vec<(u32, f64)>> {
            None
        }
    }

    fn share(root: &Path, name: &str, cores: Option<u8>) -> PathBuf {
        let folder = root.join(name);
        fs::create_dir(&folder).unwrap();
        let page = CapPage {
            gpu_uuid: GPU,
            memory_limit: Some(1),
            context_memory: 0,
            cores,
            compute_policy: ComputePolicy::WorkConserving,
            claim_uid: "uid",
            device_key: name,
        };
        fs::write(folder.join("cap"), page.encode().unwrap()).unwrap();
        fs::write(folder.join("account"), AccountPage::initial()).unwrap();
        folder
    }

    fn refill(folder: &Path) -> (u64, Refill) {
        let page: [u8; cap::LEN] = fs::read(folder.join("cap")).unwrap().try_into().unwrap();
        CapPage::decode(&page).unwrap();
        Refill::decode(&page)
    }

    fn spend(folder: &Path, nanos: u64) {
        let account = File::options()
            .write(true)
            .open(folder.join("account"))
            .unwrap();
        // Position and spent.
        account.write_all_at(&nanos.to_le_bytes(), 384).unwrap();
        account.write_all_at(&nanos.to_le_bytes(), 392).unwrap();
    }

    #[test]
    fn a_share_alone_gets_it_all_and_two_their_parts() {
        let root = tempfile::tempdir().unwrap();
        let shares = [
            share(root.path(), "a", Some(25)),
            share(root.path(), "b", Some(50)),
            share(root.path(), "c", None),
        ];
        let (mut sampler, mut busy) = (Sampler::new("/proc"), Busy(1.0));
        // Nobody works: nothing is written.
        let outcomes = sampler.step(SECOND, &shares, &mut busy);
        assert_eq!(outcomes.len(), 2);
        assert_eq!(refill(&shares[0]), (0, Refill::default()));
        spend(&shares[0], SECOND);
        sampler.step(2 * SECOND, &shares, &mut busy);
        let (turn, alone) = refill(&shares[0]);
        assert_eq!((turn, alone.rate), (1, 4 * WHOLE));
        spend(&shares[0], 2 * SECOND);
        spend(&shares[1], 2 * SECOND);
        sampler.step(3 * SECOND, &shares, &mut busy);
        let rates = [0, 1].map(|nth: usize| refill(&shares[nth]).1.rate);
        assert_eq!(rates, [333_333, 666_667]);
        // A sampler that comes later goes on where this one was.
        let (turn, before) = refill(&shares[0]);
        let mut later = Sampler::new("/proc");
        later.step(4 * SECOND, &shares, &mut busy);
        spend(&shares[0], 4 * SECOND);
        later.step(5 * SECOND, &shares, &mut busy);
        let (after, now) = refill(&shares[0]);
        assert!(after > turn);
        assert!(now.base >= before.base);
    }

    /// A `/proc` in which the first process has these files mapped.
    fn proc_of(root: &Path, pid: u32, mapped: &[&Path]) {
        use std::fmt::Write as _;
        let mut maps = String::new();
        for file in mapped {
            let FileId { device, inode } = FileId::of(file).unwrap();
            let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
            writeln!(
                maps,
                "7f00-7f21 rw-s 00000000 {major:02x}:{minor:02x} {inode} /x"
            )
            .unwrap();
        }
        let folder = root.join(pid.to_string());
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("maps"), maps).unwrap();
    }

    /// A process that ended meanwhile, or is another user's, is nobody's.
    #[test]
    fn a_process_that_cannot_be_seen_changes_nothing_for_the_others() {
        let root = tempfile::tempdir().unwrap();
        let folders = [
            share(root.path(), "a", Some(25)),
            share(root.path(), "b", Some(25)),
        ];
        let ids = folders
            .each_ref()
            .map(|folder| FileId::of(&folder.join("account")).unwrap());
        proc_of(root.path(), 7, &[&folders[0].join("account")]);
        let busy_of = |parts: &[(u32, f64)]| {
            let reading = Reading {
                cores: 25,
                policy: ComputePolicy::Strict,
                position: 0,
                spent: 0,
                busy: None,
            };
            let mut readings = folders.clone().map(|folder| (folder, reading));
            let id_of = |folder: &PathBuf| {
                let nth = folders.iter().position(|known| known == folder)?;
                Some(ids[nth])
            };
            let mut processes = Processes::new(root.path());
            set_busy(&mut processes, 0, parts, &mut readings, id_of);
            readings.map(|(_, reading)| reading.busy)
        };
        assert_eq!(busy_of(&[(7, 0.25), (8, 0.5)]), [Some(0.25), Some(0.0)]);
        // Where none can be seen, only the whole GPU is known.
        assert_eq!(busy_of(&[(8, 0.5)]), [None, None]);
    }

    /// As when a share ended and another one of its name began: `tranche run --share` does so.
    #[test]
    fn a_share_of_the_same_name_is_another_one() {
        let root = tempfile::tempdir().unwrap();
        let folders = [share(root.path(), "a", Some(25))];
        let (mut sampler, mut busy) = (Sampler::new("/proc"), Busy(1.0));
        sampler.step(SECOND, &folders, &mut busy);
        spend(&folders[0], 100 * SECOND);
        // But is not in debt.
        let account = File::options().write(true).open(folders[0].join("account"));
        account.unwrap().write_all_at(&[0; 8], 384).unwrap();
        sampler.step(2 * SECOND, &folders, &mut busy);
        assert_eq!(refill(&folders[0]).0, 1);
        // Its account; later its cap page.
        let mut at = 2 * SECOND;
        for page in ["account", "cap"] {
            let other = share(root.path(), "other", Some(25));
            fs::rename(other.join(page), folders[0].join(page)).unwrap();
            fs::remove_dir_all(other).unwrap();
            // Noticed within a second; opened; read.
            for _ in 0..3 {
                at += SECOND;
                for outcome in sampler.step(at, &folders, &mut busy) {
                    assert_eq!(outcome.outcome.unwrap().suspect, None, "{page}");
                }
            }
            let before = refill(&folders[0]).0;
            at += SECOND;
            spend(&folders[0], at);
            sampler.step(at, &folders, &mut busy);
            let (turn, written) = refill(&folders[0]);
            assert_eq!((turn, written.rate), (before + 1, 4 * WHOLE), "{page}");
        }
    }

    /// A share without a limit of its time needs nothing of the sampler, ten times a second.
    #[test]
    fn a_share_without_a_limit_is_opened_once() {
        let root = tempfile::tempdir().unwrap();
        let shares = [share(root.path(), "a", None)];
        let mut sampler = Sampler::new("/proc");
        assert!(sampler.step(SECOND, &shares, &mut Busy(1.0)).is_empty());
        fs::write(shares[0].join("cap"), "no page").unwrap();
        let outcomes = sampler.step(SECOND + 1, &shares, &mut Busy(1.0));
        assert!(outcomes.is_empty(), "{outcomes:?}");
    }

    #[test]
    fn a_page_that_its_tenant_broke_is_said_and_the_others_go_on() {
        let root = tempfile::tempdir().unwrap();
        let shares = [
            share(root.path(), "a", Some(25)),
            share(root.path(), "b", Some(50)),
        ];
        let mut sampler = Sampler::new("/proc");
        sampler.step(SECOND, &shares, &mut Busy(1.0));
        fs::write(shares[0].join("account"), "x").unwrap();
        spend(&shares[1], SECOND);
        let outcomes = sampler.step(2 * SECOND, &shares, &mut Busy(1.0));
        let bad: Vec<_> = outcomes.iter().filter(|s| s.outcome.is_err()).collect();
        assert_eq!(bad.len(), 1);
        assert_eq!(bad[0].share, shares[0]);
        assert_eq!(refill(&shares[1]).1.rate, 4 * WHOLE);
    }
}
