//! What the sampler reads from shares and writes for them.

use std::fs;

use tranche_driver::gpu_state::Change;
use tranche_driver::mig::tables;
use tranche_shim_core::compute::WHOLE;
use tranche_shim_core::{AccountPage, Priority};

use super::*;
use crate::inventory::testing::two_h100;
use crate::nvml::Nvml as _;
use crate::testing::MigGpus;
use crate::utilization::NvmlUtilization;

const GPU: &str = "GPU-00112233-4455-6677-8899-aabbccddeeff";
const SECOND: u64 = 1_000_000_000;

struct Busy(f64);

impl Utilization for Busy {
    fn whole(&mut self, _: &str) -> Option<f64> {
        Some(self.0)
    }
    fn by_process(&mut self, _: &str) -> ByProcess {
        ByProcess::Unknown
    }
}

fn share(root: &Path, name: &str, cores: Option<u8>) -> PathBuf {
    let folder = root.join(name);
    fs::create_dir(&folder).unwrap();
    let page = CapPage {
        gpu_uuid: GPU,
        memory_limit: Some(1),
        resident_limit: None,
        context_memory: 0,
        cores,
        mps_threads: None,
        compute_policy: ComputePolicy::WorkConserving,
        priority: Priority::Normal,
        claim_uid: "uid",
        device_key: name,
    };
    fs::write(folder.join("cap"), page.encode().unwrap()).unwrap();
    fs::write(folder.join("account"), AccountPage::initial()).unwrap();
    folder
}

fn two_shares(root: &Path) -> [PathBuf; 2] {
    ["a", "b"].map(|name| share(root, name, Some(25)))
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
    // No share works: nothing is written.
    let outcomes = sampler.step(SECOND, &shares, &mut busy);
    assert_eq!(outcomes.len(), 2);
    // It uses the utilization of the whole GPU, and reports that.
    assert_eq!(sampler.gpus_without_processes(), 1);
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
    // A later sampler continues where this one stopped.
    let (turn, before) = refill(&shares[0]);
    let mut later = Sampler::new("/proc");
    later.step(4 * SECOND, &shares, &mut busy);
    spend(&shares[0], 4 * SECOND);
    later.step(5 * SECOND, &shares, &mut busy);
    let (after, now) = refill(&shares[0]);
    assert!(after > turn);
    assert!(now.base >= before.base);
}

/// NVML reports no utilization in MIG mode: the shares keep their cores, and nothing is an error.
#[test]
fn in_mig_mode_shares_are_sampled_without_gpu_utilization() {
    let root = tempfile::tempdir().unwrap();
    let shares = two_shares(root.path());
    let mut description = two_h100();
    description.gpus[0].uuid = GPU.into();
    description.gpus[0].mig_profiles = tables::h100(&[GPU]).profiles;
    let gpus = MigGpus::new(description, root.path());
    let on = Change::SwitchMigMode { on: true };
    gpus.change_mig(GPU, &on).unwrap();
    let mut utilization = NvmlUtilization::new(Box::new(gpus));
    let mut sampler = Sampler::new("/proc");
    for second in 1..4 {
        spend(&shares[0], second * SECOND);
        let outcomes = sampler.step(second * SECOND, &shares, &mut utilization);
        assert_eq!(outcomes.len(), 2);
        for sampled in outcomes {
            sampled.outcome.unwrap();
        }
        assert_eq!(sampler.gpus_without_processes(), 1);
    }
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

/// The part of an answer that each share gets after the first share spent `spent`, and the part of ended processes.
fn assigned(
    proc: &Path,
    folders: &[PathBuf; 2],
    spent: u64,
    parts: &[(u32, f64)],
) -> ([f64; 2], f64) {
    let mut shares = folders.each_ref().map(|folder| {
        let share = Opened::open(0, folder).unwrap().share;
        share.unwrap()
    });
    let mut read = || shares.each_mut().map(|share| share.read().unwrap());
    read();
    spend(&folders[0], spent);
    let [first, second] = read();
    let readings = [(folders[0].clone(), first), (folders[1].clone(), second)];
    let share_of = |folder: &PathBuf| {
        let nth = folders.iter().position(|known| known == folder)?;
        Some(&shares[nth])
    };
    let answer = Answer {
        from: 1,
        to: 2,
        processes: parts.to_vec(),
        copies: Vec::new(),
    };
    let found = assign(&mut Processes::new(proc), 0, &answer, &readings, share_of);
    let [one, two] = shares.each_ref().map(|share| found[&share.account_id]);
    assert!((one.ended - two.ended).abs() < f64::EPSILON);
    ([one.part, two.part], one.ended)
}

/// A container may have two shares of one GPU, and its programs use both.
#[test]
fn work_of_a_process_of_two_shares_is_divided_as_charged() {
    let root = tempfile::tempdir().unwrap();
    let folders = two_shares(root.path());
    let accounts = folders.each_ref().map(|folder| folder.join("account"));
    proc_of(root.path(), 7, &accounts.each_ref().map(PathBuf::as_path));
    let assigned = |spent| assigned(root.path(), &folders, spent, &[(7, 0.5)]);
    // At first neither was charged, then one of them was.
    assert_eq!(assigned(0), ([0.25, 0.25], 0.0));
    assert_eq!(assigned(SECOND), ([0.5, 0.0], 0.0));
}

/// A process without a share belongs to none; one that has ended may have belonged to any.
#[test]
fn what_the_gpu_did_for_others_is_no_shares() {
    let root = tempfile::tempdir().unwrap();
    let folders = two_shares(root.path());
    proc_of(root.path(), 7, &[&folders[0].join("account")]);
    proc_of(root.path(), 8, &[]);
    let parts = [(7, 0.25), (8, 0.5), (7, 0.125), (9, 0.0625)];
    let found = assigned(root.path(), &folders, 0, &parts);
    assert_eq!(found, ([0.375, 0.0], 0.0625));
}

/// NVML with an answer.
struct Answering(Option<Answer>);

impl Utilization for Answering {
    fn whole(&mut self, _: &str) -> Option<f64> {
        Some(0.5)
    }
    fn by_process(&mut self, _: &str) -> ByProcess {
        self.0
            .take()
            .map_or(ByProcess::NothingNew, ByProcess::Answer)
    }
}

/// Without a process of a share in NVML's answers only the whole GPU's utilization is known, which never
/// raises a price above its measurement. With one, its share is compared with its own processes.
#[test]
fn shares_are_compared_singly_where_their_processes_are_seen() {
    let root = tempfile::tempdir().unwrap();
    let folders = two_shares(root.path());
    proc_of(root.path(), 7, &[&folders[0].join("account")]);
    proc_of(root.path(), 8, &[]);
    let mut sampler = Sampler::new(root.path());
    let mut scale = |from: u64, seconds: u64, pid: u32| {
        let mut scale = 0;
        for step in 0..seconds * 10 {
            let now = (100 + from) * SECOND + step * SECOND / 10;
            // The GPU works for the first one twice as long as its account says.
            let spent = (now - 90 * SECOND) / 4;
            for folder in &folders {
                spend(folder, spent);
            }
            // Every other step has an answer.
            let answer = (step % 2 == 0).then(|| Answer {
                from: now - SECOND / 5,
                to: now,
                processes: vec![(pid, 0.5)],
                copies: Vec::new(),
            });
            for sampled in sampler.step(now, &folders, &mut Answering(answer)) {
                if sampled.share == folders[0] {
                    scale = sampled.outcome.unwrap().refill.scale;
                }
            }
        }
        scale
    };
    assert!(scale(0, 6, 8) <= WHOLE);
    let own = scale(6, 12, 7);
    assert!(own.abs_diff(2 * WHOLE) < WHOLE / 10, "{own}");
}

/// A share ends and another one of its name begins, as with `tranche run --share`.
#[test]
fn a_share_of_the_same_name_is_another_one() {
    let root = tempfile::tempdir().unwrap();
    let folders = [share(root.path(), "a", Some(25))];
    let (mut sampler, mut busy) = (Sampler::new("/proc"), Busy(1.0));
    sampler.step(SECOND, &folders, &mut busy);
    spend(&folders[0], 100 * SECOND);
    // But it is not in debt.
    let account = File::options().write(true).open(folders[0].join("account"));
    account.unwrap().write_all_at(&[0; 8], 384).unwrap();
    sampler.step(2 * SECOND, &folders, &mut busy);
    assert_eq!(refill(&folders[0]).0, 1);
    // First its account is replaced, then its cap page.
    let mut at = 2 * SECOND;
    for page in ["account", "cap"] {
        let other = share(root.path(), "other", Some(25));
        fs::rename(other.join(page), folders[0].join(page)).unwrap();
        fs::remove_dir_all(other).unwrap();
        // Detected within a second, opened, read.
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

/// The sampler does no repeated work for a share without a time limit.
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
fn a_broken_page_is_reported_and_other_shares_are_sampled() {
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

/// Counts how often it is asked and closed.
#[derive(Default)]
struct Counted {
    asked: u32,
    closed: u32,
}

impl Utilization for Counted {
    fn whole(&mut self, _: &str) -> Option<f64> {
        self.asked += 1;
        None
    }
    fn by_process(&mut self, _: &str) -> ByProcess {
        ByProcess::Unknown
    }
    fn close(&mut self) {
        self.closed += 1;
    }
}

/// With an open NVML the kernel driver cannot be unloaded.
#[test]
fn without_shares_nvml_is_closed() {
    let root = tempfile::tempdir().unwrap();
    let limited = share(root.path(), "a", Some(25));
    let unlimited = share(root.path(), "b", None);
    let (mut sampler, mut nvml) = (Sampler::new("/proc"), Counted::default());
    sampler.step(SECOND, std::slice::from_ref(&unlimited), &mut nvml);
    assert_eq!((nvml.asked, nvml.closed), (0, 1));
    sampler.step(2 * SECOND, &[unlimited.clone(), limited], &mut nvml);
    assert_eq!((nvml.asked, nvml.closed), (1, 1));
    sampler.step(3 * SECOND, &[unlimited], &mut nvml);
    assert_eq!((nvml.asked, nvml.closed), (1, 2));
}
