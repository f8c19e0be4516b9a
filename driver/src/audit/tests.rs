use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::claim::Allocation;
use crate::preparation::plan;
use crate::testing::{allocation, capped, gpu, inventory, plain, with};

fn moment(second: u32) -> Moment {
    let text = format!(
        "2026-11-25T{:02}:{:02}:{:02}Z",
        second / 3600 % 24,
        second / 60 % 60,
        second % 60
    );
    serde_json::from_value(text.into()).unwrap()
}

/// A claim with a share and a whole GPU.
fn two_devices(name: &str) -> Allocation {
    let whole = with(plain("gpu-00000001"), &json!({"request": "whole"}));
    allocation(name, &[capped("20Gi", "25"), whole])
}

fn record(name: &str, since: Option<u32>) -> ClaimRecord {
    let inventory = inventory(vec![gpu(0), gpu(1)]);
    let plan = plan(&two_devices(name), &inventory, []).unwrap();
    ClaimRecord::new(plan, since.map(moment))
}

fn pods(names: &[&str]) -> BTreeSet<Pod> {
    let pod = |name: &&str| Pod {
        name: (*name).to_owned(),
        uid: format!("uid-of-{name}"),
    };
    names.iter().map(pod).collect()
}

fn trail() -> Trail {
    Trail::new("node-a".to_owned())
}

/// Writes what is due.
fn write(trail: &mut Trail, due: Vec<Line>, log: &mut Vec<Line>) {
    for line in due {
        trail.apply(line.clone());
        log.push(line);
    }
}

fn words(lines: &[Line]) -> Vec<String> {
    let word = |line: &Line| {
        let key = line.grant.key().trim_start_matches("uid-of-");
        match line.event {
            Event::Allocated {} => format!("{key} allocated"),
            Event::Held {} => format!("{key} held"),
            Event::Released { ended, .. } => format!("{key} {ended:?}"),
        }
    };
    lines.iter().map(word).collect()
}

const CHANGED: &str = "collectors and auditors read these fields: add fields, change none";

#[test]
fn a_line_has_what_an_auditor_asks_for() {
    let mut trail = trail();
    let record = record("a", Some(1));
    let begin = trail.held(&record, &pods(&["p"]), moment(2));
    let line: Value = serde_json::from_slice(&begin[0].encode()).unwrap();
    let share = json!({
        "version": 1, "event": "allocated", "time": "2026-11-25T00:00:01.000000Z", "node": "node-a",
        "grant": "uid-of-a-gpu-0@2026-11-25T00:00:01.000000Z", "start": "2026-11-25T00:00:01.000000Z",
        "namespace": "team-a", "pods": [{"name": "p", "uid": "uid-of-p"}], "claim": "a", "claimUID": "uid-of-a",
        "request": "gpu", "tier": "capped", "pool": "node-a/gpu", "device": "gpu-00000000-capped",
        "shareID": "5a1f3a5c-7a80-4d6f-8f2e-111111111111", "gpuUUID": gpu(0).uuid,
        "cap": {"memoryBytes": 20_u64 << 30, "cores": 25},
    });
    assert_eq!(line, share, "{CHANGED}");
    let whole: Value = serde_json::from_slice(&begin[1].encode()).unwrap();
    assert_eq!(
        (&whole["tier"], &whole["cap"]),
        (&json!("exclusive"), &Value::Null)
    );
    for line in begin {
        assert_eq!(Line::decode(&line.encode()).unwrap(), line);
        trail.apply(line);
    }
    let held = HeldAtEnd {
        account_bytes: Some(0),
        unowned_bytes: Some(7),
    };
    let at_end = BTreeMap::from([("uid-of-a-gpu-0".to_owned(), held)]);
    let end = trail.released(&record, Ended::Unprepared, &at_end, moment(9));
    let line: Value = serde_json::from_slice(&end[0].encode()).unwrap();
    let mut released = share;
    released["event"] = json!("released");
    released["time"] = json!("2026-11-25T00:00:09.000000Z");
    released["ended"] = json!("Unprepared");
    released["heldAtEnd"] = json!({"accountBytes": 0, "unownedBytes": 7});
    assert_eq!(line, released, "{CHANGED}");
    assert_eq!(Line::decode(&end[1].encode()).unwrap(), end[1]);
}

#[test]
fn what_is_written_is_not_due_again() {
    let (mut trail, mut log) = (trail(), Vec::new());
    let record = record("a", Some(1));
    for _ in 0..2 {
        let due = trail.held(&record, &pods(&["p"]), moment(1));
        write(&mut trail, due, &mut log);
    }
    // A new pod changes the grant; a known one does not.
    for names in [["p"], ["q"], ["p"]] {
        let due = trail.held(&record, &pods(&names), moment(2));
        write(&mut trail, due, &mut log);
    }
    for _ in 0..2 {
        let due = trail.released(&record, Ended::Unprepared, &BTreeMap::new(), moment(3));
        write(&mut trail, due, &mut log);
    }
    assert_eq!(
        words(&log),
        [
            "a-gpu-0 allocated",
            "a-whole-1 allocated",
            "a-gpu-0 held",
            "a-whole-1 held",
            "a-gpu-0 Unprepared",
            "a-whole-1 Unprepared",
        ]
    );
    assert_eq!(log[5].grant.pods, pods(&["p", "q"]));
    assert!(trail.is_released(&record));
    trail.forget(&record);
    assert!(trail.snapshot(moment(4)).is_empty());
}

#[test]
fn a_claim_that_was_never_ready_has_no_lines() {
    let record = record("a", Some(1));
    let due = trail().released(&record, Ended::Failed, &BTreeMap::new(), moment(3));
    assert_eq!(due, []);
}

#[test]
fn a_beginning_that_was_not_written_comes_with_the_end() {
    let record = record("a", Some(1));
    let due = trail().released(&record, Ended::Orphan, &BTreeMap::new(), moment(3));
    let expected = [
        "a-gpu-0 allocated",
        "a-gpu-0 Orphan",
        "a-whole-1 allocated",
        "a-whole-1 Orphan",
    ];
    assert_eq!(words(&due), expected);
    assert_eq!(due[0].time, moment(1));
}

#[test]
fn a_start_adds_what_is_missing() {
    let (mut trail, mut log) = (trail(), Vec::new());
    let [kept, lost, unread] = ["kept", "lost", "unread"].map(|name| record(name, Some(1)));
    for record in [&lost, &unread] {
        let due = trail.held(record, &pods(&[]), moment(1));
        write(&mut trail, due, &mut log);
    }
    log.clear();
    for _ in 0..2 {
        let due = trail.settle([&kept], &BTreeSet::from(["uid-of-unread"]), moment(5));
        write(&mut trail, due, &mut log);
    }
    assert_eq!(
        words(&log),
        [
            "lost-gpu-0 Unrecorded",
            "lost-whole-1 Unrecorded",
            "kept-gpu-0 allocated",
            "kept-whole-1 allocated",
        ]
    );
    assert_eq!(
        log[2].time,
        moment(1),
        "the grant began when its journal was written"
    );
}

/// The claim's end was recorded, its journal was not removed, and the claim is prepared again.
#[test]
fn a_new_grant_of_a_claim_is_told_from_its_last_one() {
    let (mut trail, mut log) = (trail(), Vec::new());
    let first = record("a", Some(1));
    let due = trail.held(&first, &pods(&["p"]), moment(1));
    write(&mut trail, due, &mut log);
    let due = trail.released(&first, Ended::Unprepared, &BTreeMap::new(), moment(2));
    write(&mut trail, due, &mut log);
    let second = record("a", Some(3));
    assert!(!trail.is_released(&second));
    let due = trail.held(&second, &pods(&["q"]), moment(3));
    assert_eq!(words(&due), ["a-gpu-0 allocated", "a-whole-1 allocated"]);
    assert_eq!(due[0].grant.pods, pods(&["q"]));
}

/// The grants that a journal describes.
fn grants_of(record: &ClaimRecord) -> Vec<String> {
    let devices = record.plan.devices.iter();
    devices
        .map(|device| Grant::new(record, device).grant)
        .collect()
}

/// A step of a history.
#[derive(Clone, Copy, Debug)]
enum Step {
    Prepare(usize),
    Join(usize, usize),
    Undo(usize),
    RemoveJournal(usize),
    LoseJournal(usize),
    Kill,
    Rotate,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => (0..3_usize).prop_map(Step::Prepare),
        2 => (0..3_usize, 0..3_usize).prop_map(|(claim, pod)| Step::Join(claim, pod)),
        3 => (0..3_usize).prop_map(Step::Undo),
        3 => (0..3_usize).prop_map(Step::RemoveJournal),
        1 => (0..3_usize).prop_map(Step::LoseJournal),
        2 => Just(Step::Kill),
        1 => Just(Step::Rotate),
    ];
    prop::collection::vec(step, 0..40)
}

/// A node as far as its trail is concerned.
#[derive(Default)]
struct Node {
    trail: Trail,
    /// The journals, and whether the end of each has begun.
    journals: BTreeMap<usize, ClaimRecord>,
    /// The current file.
    file: Vec<Line>,
    /// All lines that were ever written, without repetitions at the beginning of files.
    log: Vec<Line>,
}

impl Node {
    /// Writes the first `written` of the due lines; the process dies if there are more.
    fn write(&mut self, due: Vec<Line>, written: usize, now: Moment) {
        let dies = due.len() > written;
        for line in due.into_iter().take(written) {
            self.file.push(line.clone());
            self.log.push(line.clone());
            self.trail.apply(line);
        }
        if dies {
            self.kill(now);
        }
    }

    fn kill(&mut self, now: Moment) {
        self.trail = trail();
        for line in self.file.clone() {
            self.trail.apply(line);
        }
        let journals: Vec<_> = self.journals.values().cloned().collect();
        let due = self.trail.settle(&journals, &BTreeSet::new(), now);
        self.write(due, usize::MAX, now);
    }

    fn step(&mut self, step: Step, nth: u32, written: usize) {
        let now = moment(nth);
        match step {
            Step::Prepare(claim) => {
                let is_undone = |record: &ClaimRecord| self.trail.is_released(record);
                if self.journals.get(&claim).is_some_and(is_undone) {
                    self.step(Step::RemoveJournal(claim), nth, written);
                }
                let new = || record(&claim.to_string(), Some(nth));
                let record = self.journals.entry(claim).or_insert_with(new).clone();
                let due = self.trail.held(&record, &pods(&["first"]), now);
                self.write(due, written, now);
            }
            Step::Join(claim, pod) => {
                if let Some(record) = self.journals.get(&claim) {
                    let pods = pods(&[&pod.to_string()]);
                    let due = self.trail.held(record, &pods, now);
                    self.write(due, written, now);
                }
            }
            Step::Undo(claim) => {
                if let Some(record) = self.journals.get(&claim) {
                    let none = BTreeMap::new();
                    let due = self.trail.released(record, Ended::Unprepared, &none, now);
                    self.write(due, written, now);
                }
            }
            Step::RemoveJournal(claim) => {
                let Some(record) = self.journals.get(&claim) else {
                    return;
                };
                let none = BTreeMap::new();
                let due = self.trail.released(record, Ended::Unprepared, &none, now);
                let is_whole = due.len() <= written;
                self.write(due, written, now);
                if is_whole && let Some(record) = self.journals.remove(&claim) {
                    self.trail.forget(&record);
                }
            }
            Step::LoseJournal(claim) => {
                self.journals.remove(&claim);
                self.kill(now);
            }
            Step::Kill => self.kill(now),
            Step::Rotate => {
                self.file = self.trail.snapshot(now);
            }
        }
    }
}

proptest! {
    /// Whatever happens, every grant has one beginning, and one end after its journal is gone.
    #[test]
    fn no_line_is_lost_or_doubled(
        steps in steps(),
        written in prop::collection::vec(prop_oneof![3 => Just(usize::MAX), 1 => 0..4_usize], 40),
    ) {
        let mut node = Node { trail: trail(), ..Node::default() };
        let mut began = BTreeSet::new();
        for (nth, step) in (0..).zip(steps) {
            node.step(step, nth, written[nth as usize]);
            for record in node.journals.values() {
                began.extend(grants_of(record));
            }
        }
        node.kill(moment(1000));
        let mut grants: BTreeMap<&str, (u32, u32)> = BTreeMap::new();
        for line in &node.log {
            let (beginnings, ends) = grants.entry(&line.grant.grant).or_default();
            match line.event {
                Event::Allocated {} => *beginnings += 1,
                Event::Held {} => {}
                Event::Released { .. } => *ends += 1,
            }
            prop_assert!((*beginnings, *ends) == (1, 0) || (*beginnings, *ends) == (1, 1), "{:?}", words(&node.log));
        }
        for grant in began {
            prop_assert!(grants.contains_key(&*grant), "{grant} is lost: {:?}", words(&node.log));
        }
        let journalled: BTreeSet<_> = node.journals.values().flat_map(grants_of).collect();
        for (grant, (_, ends)) in grants {
            prop_assert!(ends == 1 || journalled.contains(grant), "{grant} has no end: {:?}", words(&node.log));
        }
    }

    #[test]
    fn no_bytes_make_it_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        let _ = Line::decode(&bytes);
    }
}
