use std::fs as std_fs;
use std::sync::mpsc;
use std::thread;

use serde_json::json;
use tempfile::TempDir;

use super::*;
use crate::host::fs::HostFs;
use crate::host::fs::testing::{Fault, FaultyFs};

const MOST: usize = 20;

/// No test waits so long.
const FOREVER: Duration = Duration::from_hours(1);

fn spec(uid: &str, node: &str) -> Spec {
    let spec = json!({
        "cdiVersion": "0.3.0",
        "kind": "gpu.tranche.dev/claim",
        "devices": [{"name": format!("{uid}-gpu-0"), "containerEdits": {"deviceNodes": [{"path": node}]}}],
    });
    Spec::decode(spec.to_string().as_bytes()).unwrap()
}

fn open(folder: &TempDir, fs: Arc<dyn Fs>) -> Arc<ClaimSpecFile> {
    let mut file = ClaimSpecFile::open(fs, folder.path().join("claims.json"), MOST).unwrap();
    file.patience = FOREVER;
    Arc::new(file)
}

/// The names of the devices in the file.
fn names(file: &ClaimSpecFile) -> Vec<String> {
    let Ok(content) = std_fs::read(file.path()) else {
        return Vec::new();
    };
    let spec = Spec::decode(&content).unwrap();
    let names = spec.devices().iter().map(|device| device.name.clone());
    names.collect()
}

/// Fails instead of waiting for ever.
fn ends<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> T {
    let (done, result) = mpsc::channel();
    thread::spawn(move || done.send(work()));
    let limit = Duration::from_mins(1);
    result.recv_timeout(limit).expect("it waits")
}

#[test]
fn claims_that_come_together_share_a_write() {
    let folder = tempfile::tempdir().unwrap();
    let fs = Arc::new(FaultyFs::recording());
    let file = open(&folder, Arc::clone(&fs) as _);
    file.put("old", spec("old", "/dev/a")).unwrap();
    let before = fs.calls().len();
    let uids: Vec<_> = (0..16).map(|n| format!("uid{n:02}")).collect();
    let all: Vec<_> = uids.iter().map(String::as_str).chain(["old"]).collect();
    let announced: Vec<_> = all.iter().map(|uid| file.announce(uid)).collect();
    thread::scope(|scope| {
        for uid in &uids {
            scope.spawn(|| file.put(uid, spec(uid, "/dev/a")).unwrap());
        }
        scope.spawn(|| file.remove("old"));
    });
    drop(announced);
    assert_eq!(lock(&file.wanted).waiting, 0);
    assert_eq!(fs.calls()[before..].len(), 2, "{:?}", fs.calls());
    let of_all: Vec<_> = uids.iter().map(|uid| format!("{uid}-gpu-0")).collect();
    assert_eq!(names(&file), of_all);
}

#[test]
fn nobody_waits_for_a_claim_that_does_not_come() {
    let folder = tempfile::tempdir().unwrap();
    let file = open(&folder, Arc::new(HostFs));
    let alone = Arc::clone(&file);
    ends(move || alone.put("a", spec("a", "/dev/a"))).unwrap();
    let other = Arc::clone(&file);
    ends(move || {
        let _own = other.announce("b");
        // It fails before it gets here.
        let failing = other.announce("c");
        drop(failing);
        other.put("b", spec("b", "/dev/a"))
    })
    .unwrap();
    assert_eq!(names(&file), ["a-gpu-0", "b-gpu-0"]);
}

#[test]
fn who_cannot_come_or_has_been_on_its_way_for_long_is_not_waited_for() {
    let folder = tempfile::tempdir().unwrap();
    let full = open(&folder, Arc::new(HostFs));
    // It waits for its turn.
    let other = full.announce("other");
    let writers = Arc::clone(&full);
    ends(move || {
        thread::scope(|scope| {
            for n in 0..MOST {
                let (file, uid) = (&writers, format!("uid{n}"));
                scope.spawn(move || file.put(&uid, spec(&uid, "/dev/a")).unwrap());
            }
        });
    });
    drop(other);

    let mut file = ClaimSpecFile::open(Arc::new(HostFs), folder.path().join("x"), MOST).unwrap();
    file.patience = Duration::from_millis(1);
    let file = Arc::new(file);
    // It waits for its GPU.
    let _waiting = file.announce("other");
    ends(move || file.put("a", spec("a", "/dev/a"))).unwrap();
}

#[test]
fn a_claim_is_released_though_the_file_cannot_be_written() {
    let folder = tempfile::tempdir().unwrap();
    for uid in ["a", "b"] {
        let file = open(&folder, Arc::new(HostFs));
        file.put(uid, spec(uid, "/dev/a")).unwrap();
    }
    let file = open(&folder, Arc::new(FaultyFs::new(0, Fault::Once)));
    file.remove("a");
    assert_eq!(names(&file), ["a-gpu-0", "b-gpu-0"]);
    file.restore().unwrap();
    assert_eq!(names(&file), ["b-gpu-0"]);
    file.remove("b");
    assert!(!file.path().exists(), "a runtime refuses an empty spec");
}

#[test]
fn a_device_that_cannot_be_written_is_an_error_and_not_forgotten() {
    let folder = tempfile::tempdir().unwrap();
    let file = open(&folder, Arc::new(FaultyFs::new(0, Fault::Once)));
    file.put("a", spec("a", "/dev/a")).unwrap_err();
    assert_eq!(names(&file), [""; 0]);
    // The call is repeated.
    file.put("a", spec("a", "/dev/a")).unwrap();
    assert_eq!(names(&file), ["a-gpu-0"]);
}

#[test]
fn a_file_that_is_deleted_changed_or_broken_is_written_again() {
    let folder = tempfile::tempdir().unwrap();
    let file = open(&folder, Arc::new(HostFs));
    file.put("a", spec("a", "/dev/a")).unwrap();
    for content in [None, Some(""), Some("{}"), Some("\0")] {
        match content {
            Some(content) => std_fs::write(file.path(), content).unwrap(),
            None => std_fs::remove_file(file.path()).unwrap(),
        }
        if content == Some("{}") {
            // A Prepare of the claim does it, too.
            file.put("a", spec("a", "/dev/a")).unwrap();
        } else {
            file.restore().unwrap();
        }
        assert_eq!(names(&file), ["a-gpu-0"]);
    }
    // One that the next process finds.
    std_fs::write(file.path(), "{").unwrap();
    let next = open(&folder, Arc::new(HostFs));
    assert!(!next.has("a"));
    next.restore().unwrap();
    assert!(!next.path().exists());
    next.put("b", spec("b", "/dev/a")).unwrap();
    assert_eq!(names(&next), ["b-gpu-0"]);
    let next = open(&folder, Arc::new(HostFs));
    assert!(next.has("b"));
    next.keep(["c"]);
    assert!(!next.path().exists());
}
