//! The built `tranche run`, on simulated GPUs: as root and as an unprivileged user.

use crate::common;

use std::ffi::OsStr;
use std::fs;
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use common::{kill, until};
use tranche_node::page::AccountFile;
use tranche_shim_tests::{Node, Probe, built, text};

const GIB: u64 = 1 << 30;
const NOBODY: u32 = 65_534;

/// A machine with two GPUs and the installed programs.
struct Machine {
    node: Node,
    /// Programs and shim, where every user can read them.
    ours: tempfile::TempDir,
    // The simulated GPUs of all machines have the same UUIDs, so shares of all machines add up.
    _one_at_a_time: MutexGuard<'static, ()>,
}

impl Machine {
    fn new() -> Self {
        static ONE: Mutex<()> = Mutex::new(());
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let one = ONE.lock().unwrap_or_else(PoisonError::into_inner);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let name = format!("tranche-cli-{}-{number}", std::process::id());
        let node = Node::start(
            std::env::temp_dir().join(name),
            tranche_shim_tests::Machine::Simple,
            2,
        );
        let ours = tempfile::tempdir().unwrap();
        let mode = |path: &Path| {
            let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
            fs::set_permissions(path, mode).unwrap();
        };
        for file in [
            PathBuf::from(env!("CARGO_BIN_EXE_tranche")),
            probe(),
            built("libcuda.so.1"),
            built("libnvidia-ml.so.1"),
        ] {
            let to = ours.path().join(file.file_name().unwrap());
            fs::copy(&file, &to).unwrap();
            mode(&to);
        }
        mode(ours.path());
        Self {
            node,
            ours,
            _one_at_a_time: one,
        }
    }

    fn ours(&self, name: &str) -> PathBuf {
        self.ours.path().join(name)
    }

    /// `tranche run` with these options on GPU 0; the caller adds the command.
    fn run(&self, options: &[&str]) -> Command {
        let mut command = Command::new(self.ours("tranche"));
        command
            .args(["run", "--gpu", "0", "--driver-root"])
            .arg(self.node.root())
            .args(options)
            .arg("--");
        command
    }

    fn shell(&self, options: &[&str], script: &str) -> Output {
        self.run(options)
            .args(["sh", "-c", script])
            .output()
            .unwrap()
    }

    fn sleep(&self, options: &[&str]) -> Running {
        Running(self.run(options).args(["sleep", "100"]).spawn().unwrap())
    }

    fn probe(&self, options: &[&str]) -> Probe {
        Probe::by(
            self.run(options)
                .arg(self.ours("tranche-shim-probe"))
                .arg("name"),
        )
    }
}

/// The program of the shim's tests.
fn probe() -> PathBuf {
    let path = tranche_shim_tests::probe_path();
    assert!(
        path.exists(),
        "{}: missing: run `cargo build -p tranche-shim-tests`",
        path.display()
    );
    path
}

/// The folder of a user's shares.
fn base(user: u32) -> PathBuf {
    let run = Path::new("/run/tranche/run");
    if user == 0 && run.exists() {
        return run.into();
    }
    format!("/dev/shm/tranche-run-{user}").into()
}

fn shares(user: u32) -> Vec<String> {
    let Ok(entries) = fs::read_dir(base(user)) else {
        return Vec::new();
    };
    entries
        .map(|entry| entry.unwrap())
        .filter(|entry| entry.path().is_dir())
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect()
}

/// The supervisor of a share.
fn supervisor(share: &str) -> Option<i32> {
    fs::read_dir("/proc").unwrap().find_map(|entry| {
        let path = entry.unwrap().path();
        let line = fs::read(path.join("cmdline")).ok()?;
        let words: Vec<_> = line.split(|&byte| byte == 0).collect();
        let ours = words.contains(&&b"supervise"[..]) && words.contains(&share.as_bytes());
        path.file_name()?.to_str()?.parse().ok().filter(|_| ours)
    })
}

/// A command that ends with its test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

#[test]
fn nvidia_smi_shows_the_share_and_one_gpu() {
    let machine = Machine::new();
    let ran = machine
        .run(&["--memory", "20Gi", "--cores", "25"])
        .args([
            "nvidia-smi",
            "--query-gpu=uuid,memory.total",
            "--format=csv,noheader",
        ])
        .output()
        .unwrap();
    assert_eq!(text(&ran.stderr), "");
    let uuid = &machine.node.gpus()[0].uuid;
    assert_eq!(text(&ran.stdout), format!("{uuid}, 20480 MiB\n"));
}

#[test]
fn the_cap_holds_to_the_byte() {
    let machine = Machine::new();
    let mut probe = machine.probe(&["--memory", "10Gi"]);
    probe.must("init");
    assert_eq!(probe.must("count").number(0), 1);
    probe.must("primary 0");
    assert_eq!(probe.must("info").number(1), 10 * GIB);
    let free = probe.must("info").number(0);
    let whole = probe.must(&format!("alloc {free}")).number(0);
    assert_eq!(probe.ask("alloc 1").code, 2);
    probe.must(&format!("free {whole}"));
    probe.must(&format!("alloc {free}"));
}

/// A batch system sets the host's index of the GPU; in the share it is the only GPU.
#[test]
fn an_index_of_the_hosts_gpus_is_translated() {
    let machine = Machine::new();
    let mut command = machine.run(&["--memory", "1Gi"]);
    command.env("CUDA_VISIBLE_DEVICES", "1");
    let mut probe = Probe::by(command.arg(machine.ours("tranche-shim-probe")).arg("name"));
    probe.must("init");
    assert_eq!(probe.must("count").number(0), 1);
}

#[test]
fn the_exit_code_is_the_commands() {
    let machine = Machine::new();
    let memory = ["--memory", "1Gi"];
    assert_eq!(machine.shell(&memory, "exit 7").status.code(), Some(7));
    let killed = machine.shell(&memory, "kill -TERM $$").status;
    assert_eq!(killed.signal(), Some(15), "a shell says 143");
    for (command, code, word) in [
        ("no-such-command", 127, "not found"),
        ("/etc/passwd", 126, "/etc/passwd"),
    ] {
        let ran = machine.run(&memory).arg(command).output().unwrap();
        assert_eq!(ran.status.code(), Some(code));
        assert!(text(&ran.stderr).contains(word), "{}", text(&ran.stderr));
    }
    let refused = machine.shell(&["--memory", "900Gi"], "true");
    assert_eq!(refused.status.code(), Some(125));
    assert!(text(&refused.stderr).contains("--memory 900Gi"));
}

/// The process that was started becomes the command: it gets its signals, its terminal, its parent.
#[test]
fn the_command_is_the_process_that_was_started() {
    let machine = Machine::new();
    let mut child = machine
        .run(&["--memory", "1Gi"])
        // A shell cannot trap a signal that its parent ignores, as for commands in the background.
        .args([
            "env",
            "--default-signal=INT",
            "sh",
            "-c",
            "trap 'echo caught; exit 3' INT; echo $$; read line",
        ])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let input = child.stdin.take().unwrap();
    let mut output = std::io::BufReader::new(child.stdout.take().unwrap());
    let mut line = String::new();
    std::io::BufRead::read_line(&mut output, &mut line).unwrap();
    assert_eq!(line.trim(), child.id().to_string());
    kill(child.id(), rustix::process::Signal::INT);
    drop(input);
    line.clear();
    // The read ends because the supervisor does not keep the pipe open.
    std::io::Read::read_to_string(&mut output, &mut line).unwrap();
    assert_eq!(line, "caught\n");
    assert_eq!(child.wait().unwrap().code(), Some(3));
}

#[test]
fn two_commands_share_one_cap() {
    let machine = Machine::new();
    let share = ["--share", "two", "--memory", "10Gi", "--cores", "50"];
    let mut first = machine.probe(&share);
    first.must("init");
    first.must("primary 0");
    first.must(&format!("alloc {}", 6 * GIB));
    let mut second = machine.probe(&["--share", "two"]);
    second.must("init");
    second.must("primary 0");
    assert_eq!(second.ask(&format!("alloc {}", 5 * GIB)).code, 2);
    second.must(&format!("alloc {}", 3 * GIB));
    let other = machine.shell(&["--share", "two", "--memory", "11Gi"], "true");
    let error = text(&other.stderr);
    assert!(
        error.contains("--memory 11Gi") && error.contains("10Gi"),
        "{error}"
    );
    // The other can use what the first released.
    first.kill();
    second.must(&format!("alloc {}", 6 * GIB));
    second.kill();
    until("the share goes with its last command", || {
        shares(0).is_empty()
    });
}

#[test]
fn shares_add_up_to_no_more_than_the_gpu() {
    let machine = Machine::new();
    let _first = machine.sleep(&["--memory", "50Gi", "--cores", "60"]);
    until("the first share", || !shares(0).is_empty());
    for (options, word) in [
        (["--memory", "40Gi", "--cores", "40"], "--memory 40Gi"),
        (["--memory", "10Gi", "--cores", "41"], "--cores 41"),
    ] {
        let error = text(&machine.shell(&options, "true").stderr);
        assert!(error.contains(word), "{error}");
    }
    let fits = machine.shell(&["--memory", "20Gi", "--cores", "40"], "true");
    assert!(fits.status.success(), "{}", text(&fits.stderr));
}

#[test]
fn a_dead_process_is_swept_while_others_idle() {
    let machine = Machine::new();
    let share = ["--share", "swept", "--memory", "10Gi"];
    let _idle = machine.sleep(&share);
    let mut probe = machine.probe(&share);
    probe.must("init");
    probe.must("primary 0");
    probe.must(&format!("alloc {}", 6 * GIB));
    let account = AccountFile::open(&base(0).join("swept/swept-gpu-0/account")).unwrap();
    assert!(account.copy().unwrap().snapshot().used() >= 6 * GIB);
    probe.kill();
    until("the dead process's memory is back", || {
        account.copy().unwrap().snapshot().used() == 0
    });
}

/// One supervisor samples all shares; when it ends, another does.
#[test]
fn every_share_is_granted_its_gpu_time() {
    let machine = Machine::new();
    let starts = |share: &str| {
        let sizes = ["--memory", "1Gi", "--cores", "25"];
        let options = ["--share", share, "--mode", "work-conserving"];
        machine.sleep(&[&options[..], &sizes].concat())
    };
    // A share that works while all others are idle gets more than its cores.
    let is_sampled = |share: &str| {
        let pages = base(0).join(format!("{share}/{share}-gpu-0"));
        let mut spent = 0u64;
        until(share, || {
            spent += 5_000_000;
            if let Ok(account) = fs::File::options().write(true).open(pages.join("account")) {
                let words = [spent.to_le_bytes(), spent.to_le_bytes()].concat();
                // The words `position` and `spent`.
                std::os::unix::fs::FileExt::write_all_at(&account, &words, 384).unwrap();
            }
            let page = fs::read(pages.join("cap")).unwrap_or_default();
            let grants = page.get(tranche_shim_core::cap::LIMITS_LEN..);
            grants.is_some_and(|grants| grants.iter().any(|&byte| byte != 0))
        });
    };
    let (first, _second) = (starts("first"), starts("second"));
    is_sampled("first");
    is_sampled("second");
    drop(first);
    let _third = starts("third");
    is_sampled("third");
}

#[test]
fn the_cap_outlives_a_killed_supervisor() {
    let machine = Machine::new();
    let mut probe = machine.probe(&["--share", "orphan", "--memory", "10Gi", "--cores", "50"]);
    probe.must("init");
    probe.must("primary 0");
    let watcher = supervisor("orphan").unwrap();
    kill(watcher.try_into().unwrap(), rustix::process::Signal::KILL);
    until("the supervisor's end", || {
        supervisor("orphan") != Some(watcher)
    });
    assert_eq!(probe.ask(&format!("alloc {}", 11 * GIB)).code, 2);
    probe.must(&format!("alloc {}", 6 * GIB));
    // The share counts as in use, because of the process in it.
    let error = machine.shell(&["--memory", "75Gi"], "true");
    assert!(
        text(&error.stderr).contains("orphan"),
        "{}",
        text(&error.stderr)
    );
    assert_eq!(shares(0), ["orphan"]);
    probe.kill();
    let after = machine.shell(&["--memory", "75Gi"], "true");
    assert!(after.status.success(), "{}", text(&after.stderr));
    until("nothing is left", || shares(0).is_empty());
}

#[test]
fn the_cap_holds_in_every_environment_and_for_every_user() {
    let machine = Machine::new();
    let probe = machine.ours("tranche-shim-probe");
    let too_much = format!("{} name", probe.display());
    for way in [
        "exec",
        "env -i",
        "env -i setsid",
        "setpriv --reuid 65534 --clear-groups",
    ] {
        let script = format!(
            "printf 'init\\nprimary 0\\nalloc {}\\ntotal 0\\nend\\n' | {way} {too_much}",
            6 * GIB
        );
        let ran = machine.shell(&["--memory", "5Gi"], &script);
        let answers = text(&ran.stdout);
        let lines: Vec<_> = answers.lines().collect();
        assert!(
            lines[0].starts_with('0') && lines[2].starts_with("2 "),
            "{way}: {answers}"
        );
        assert!(
            lines[3].starts_with(&format!("0 {}", 5 * GIB)),
            "{way}: {answers}"
        );
    }
}

/// A copy of the driver in a folder of `LD_LIBRARY_PATH` is covered by the shim, by name and by
/// path.
#[test]
fn the_cap_holds_for_a_copy_of_the_driver_in_the_environment() {
    let machine = Machine::new();
    let own = tempfile::tempdir().unwrap();
    let copy = own.path().join("libcuda.so");
    let real = machine
        .node
        .root()
        .join("usr/lib/x86_64-linux-gnu/libcuda.so.1");
    fs::copy(real, &copy).unwrap();
    let probe = machine.ours("tranche-shim-probe");
    for how in ["libcuda.so", copy.to_str().unwrap()] {
        let script = format!(
            "printf 'init\\nprimary 0\\ntotal 0\\nend\\n' | {} {how}",
            probe.display()
        );
        let mut command = machine.run(&["--memory", "5Gi"]);
        command
            .args(["sh", "-c", &script])
            .env("LD_LIBRARY_PATH", own.path());
        let ran = command.output().unwrap();
        let answers = text(&ran.stdout);
        let total = answers.lines().nth(2).unwrap_or_default();
        assert!(
            total.starts_with(&format!("0 {}", 5 * GIB)),
            "{how}: {answers}{}",
            text(&ran.stderr)
        );
    }
    // Nothing of the host is changed.
    assert!(
        fs::metadata(&copy).unwrap().len() != fs::metadata(built("libcuda.so.1")).unwrap().len()
    );
}

#[test]
fn a_run_in_a_run_is_refused() {
    let machine = Machine::new();
    let script = format!(
        "{} run --memory 1Gi true",
        machine.ours("tranche").display()
    );
    let ran = machine.shell(&["--memory", "5Gi"], &script);
    assert_eq!(ran.status.code(), Some(125));
    assert!(text(&ran.stderr).contains("already in a share of a GPU"));
}

/// As an unprivileged user, in a user namespace: the same cap, and still the same user.
#[test]
fn a_user_without_rights_can_have_shares() {
    let machine = Machine::new();
    let as_nobody = |mut command: Command| {
        command
            .uid(NOBODY)
            .gid(NOBODY)
            .env_remove("XDG_RUNTIME_DIR");
        command
    };
    let mut shell = machine.run(&["--memory", "3Gi"]);
    shell.args([
        "sh",
        "-c",
        "id -u; nvidia-smi --query-gpu=memory.total --format=csv,noheader",
    ]);
    let ran = as_nobody(shell).output().unwrap();
    assert_eq!(
        text(&ran.stdout),
        "65534\n3072 MiB\n",
        "{}",
        text(&ran.stderr)
    );
    let mut command = machine.run(&["--memory", "3Gi"]);
    command.arg(machine.ours("tranche-shim-probe")).arg("name");
    let mut probe = Probe::by(&mut as_nobody(command));
    probe.must("init");
    probe.must("primary 0");
    assert_eq!(probe.ask(&format!("alloc {}", 3 * GIB + 1)).code, 2);
    probe.must(&format!("alloc {}", 2 * GIB));
    probe.kill();
    until("the share goes with its command", || {
        shares(NOBODY).is_empty()
    });
}

#[test]
fn a_run_changes_nothing_on_the_host() {
    let machine = Machine::new();
    let listing = |folder: &str| {
        let entries = fs::read_dir(folder).unwrap();
        let mut names: Vec<_> = entries.map(|e| e.unwrap().file_name()).collect();
        names.sort();
        names
    };
    let listings = || ["/etc", "/usr/lib", "/usr/local/bin", "/run", "/dev"].map(listing);
    let before = listings();
    // In a mount namespace that does not see the mounts of other tests, but would see all that a run leaves behind.
    let mut run = machine.run(&["--memory", "1Gi"]);
    run.args(["ls", "/usr/lib/tranche", "/etc/ld.so.preload"]);
    let script = r#"
        mount --make-rshared /
        cat /proc/self/mountinfo >"$ours/before"
        "$@" || exit
        cat /proc/self/mountinfo >"$ours/after"
    "#;
    let mut shell = Command::new("unshare");
    shell.args(["--mount", "sh", "-c", script, "sh"]);
    shell.arg(run.get_program()).args(run.get_args());
    let ran = shell.env("ours", machine.ours.path()).output().unwrap();
    assert!(ran.status.success(), "{}", text(&ran.stderr));
    assert_eq!(listings(), before);
    let mounts = |name: &str| fs::read_to_string(machine.ours(name)).unwrap();
    assert_eq!(mounts("after"), mounts("before"));
}

/// A driver that is installed on the host itself: its files stay, the shim covers them, and the node
/// of the other GPU cannot be opened.
#[test]
fn the_cap_holds_with_the_hosts_own_driver() {
    let machine = Machine::new();
    let script = r#"
        /usr/bin/nvidia-sim-persistenced --root / >/dev/null 2>&1 &
        trap "kill $!" EXIT
        until [ -e /run/nvidia-persistenced/socket ]; do sleep 0.01; done
        nvidia-smi -L | wc -l
        "$ours/tranche" run --memory 2Gi --gpu 1 -- sh -c '
            nvidia-smi --query-gpu=pci.bus_id,memory.total --format=csv,noheader
            cat /etc/ld.so.preload
            cd /run/tranche/run && ls -d run-*
            printf "init\ncount\nend\n" | "$ours/tranche-shim-probe" name
            (: </dev/nvidia0) 2>&1 | grep -o "Permission denied"
        '
        while [ -n "$(ls -d /run/tranche/run/*/ 2>/dev/null)" ]; do sleep 0.01; done
        ls /usr/lib/tranche /etc/ld.so.preload 2>&1 | grep -c "No such file"
    "#;
    let work = tempfile::tempdir().unwrap();
    let ran = common::on_a_machine_of_its_own(work.path(), script)
        .env("ours", machine.ours.path())
        .output()
        .unwrap();
    let out = text(&ran.stdout);
    let lines: Vec<_> = out.lines().collect();
    assert_eq!(lines.first(), Some(&"2"), "{out}{}", text(&ran.stderr));
    assert!(lines[1].ends_with(", 2048 MiB"), "{out}");
    assert_eq!(
        lines[2..4],
        [
            "/usr/lib/tranche/libcuda.so.1",
            "/usr/lib/tranche/libnvidia-ml.so.1"
        ]
    );
    assert!(lines[4].starts_with("run-"), "{out}");
    assert_eq!(
        lines[5..],
        ["0", "0 1", "0", "Permission denied", "2"],
        "{out}"
    );
    assert!(ran.status.success(), "{}", text(&ran.stderr));
}

#[test]
fn the_musl_loader_is_named() {
    let machine = Machine::new();
    let script = machine.ours("program");
    let mut elf = vec![0; 120];
    elf[..6].copy_from_slice(b"\x7fELF\x02\x01");
    (elf[32], elf[54], elf[56], elf[64], elf[72], elf[96]) = (64, 56, 1, 3, 120, 26);
    elf.extend_from_slice(b"/lib/ld-musl-x86_64.so.1\0\0");
    fs::write(&script, elf).unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    fs::set_permissions(&script, mode).unwrap();
    let ran = machine
        .run(&["--memory", "1Gi"])
        .arg(OsStr::new(&script))
        .output()
        .unwrap();
    assert_eq!(ran.status.code(), Some(126));
    assert!(text(&ran.stderr).contains("musl"), "{}", text(&ran.stderr));
}
