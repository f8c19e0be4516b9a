//! A tenant may hold a lease on its pages (`F_SETLEASE`), which blocks an open for up to 45 s: the
//! node does not wait.
use std::io::{BufRead as _, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use tranche_api::share_config::ComputeMode;
use tranche_driver::preparation::{Cap, Priority};
use tranche_node::page::{AccountFile, cap_page, read_cap};
use tranche_node::sampler::Sampler;
use tranche_node::sweep::{Sweeper, reclaim};
use tranche_node::utilization::{ByProcess, Utilization};
use tranche_shim_core::AccountPage;

const GPU: &str = "GPU-00112233-4455-6677-8899-aabbccddeeff";

/// Takes a write lease, prints a line, and ignores the kernel's request to release it.
const HOLDER: &str = r#"
    $SIG{IO} = 'IGNORE'; $| = 1;
    open(my $file, '+<', $ARGV[0]) or die $!;
    fcntl($file, 1024, 1) or die "no lease: $!";
    print "held\n"; sleep 300;
"#;

struct Lease(Child);

impl Lease {
    fn take(path: &Path) -> Self {
        let mut child = Command::new("perl")
            .args(["-e", HOLDER])
            .arg(path)
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut said = String::new();
        let out = child.stdout.take().unwrap();
        BufReader::new(out).read_line(&mut said).unwrap();
        assert_eq!(said, "held\n");
        Self(child)
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

struct Unknown;

impl Utilization for Unknown {
    fn whole(&mut self, _: &str) -> Option<f64> {
        None
    }
    fn by_process(&mut self, _: &str) -> ByProcess {
        ByProcess::Unknown
    }
}

fn error_of<T, E: std::fmt::Display>(result: Result<T, E>) -> String {
    result.err().map_or_else(String::new, |e| e.to_string())
}

#[test]
fn a_lease_on_a_page_is_an_error_at_once_and_passes() {
    // A tmpfs, as the pages' own.
    let root = tempfile::tempdir_in("/dev/shm").unwrap();
    let shares = ["a", "b"].map(|name| root.path().join(name));
    for share in &shares {
        let cap = Cap::Share {
            memory: 1 << 30,
            resident: None,
            cores: 25,
            mode: ComputeMode::Strict,
            priority: Priority::Normal,
            context_memory: 0,
            mps: false,
        };
        std::fs::create_dir(share).unwrap();
        let page = cap_page("uid", "key", GPU, cap).unwrap();
        std::fs::write(share.join("cap"), page).unwrap();
        std::fs::write(share.join("account"), AccountPage::initial()).unwrap();
    }
    for page in ["cap", "account"] {
        let path = shares[0].join(page);
        let lease = Lease::take(&path);
        let start = Instant::now();
        let mut sampler = Sampler::new("/proc");
        let outcome = sampler.step(1, &shares, &mut Unknown);
        let [wrong] = &outcome
            .iter()
            .filter_map(|s| Some(s.outcome.as_ref().err()?.to_string()))
            .collect::<Vec<_>>()[..]
        else {
            panic!("{outcome:?}")
        };
        assert_eq!(outcome.len(), 2, "the other share goes on");
        let mut errors = vec![wrong.clone()];
        if page == "account" {
            errors.push(error_of(AccountFile::open(&path)));
            errors.push(error_of(reclaim(&path)));
            errors.push(error_of(Sweeper::new("true", [""; 0]).sweep(&path)));
        } else {
            let error = read_cap(&path).unwrap_err();
            assert_eq!(error.kind(), std::io::ErrorKind::WouldBlock);
        }
        for error in errors {
            assert!(error.contains(path.to_str().unwrap()), "{error:?}");
        }
        assert!(start.elapsed() < Duration::from_secs(20), "it waited");
        drop(lease);
        let outcome = sampler.step(2, &shares, &mut Unknown);
        assert!(outcome.iter().all(|s| s.outcome.is_ok()), "{outcome:?}");
    }
}
