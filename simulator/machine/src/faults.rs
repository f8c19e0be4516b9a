//! Failures and delays of calls of both libraries, from `<ROOT>/etc/nvidia-sim/faults.toml`.
//!
//! ```toml
//! [[fault]]
//! call = "nvmlDeviceCreateGpuInstance"
//! after = 1        # how many calls are executed before
//! times = 1        # how many calls are affected then; all without it
//! code = 23        # the call returns this; without it the call is executed
//! delay_ms = 500   # how long the call waits
//! hang = true      # the call does not return before the row is gone
//!
//! [[fault]]
//! gpu = 1          # instead of `call`: all calls of NVML that reach the GPU with this minor number
//! hang = true
//! ```
//!
//! A process counts its own calls, from its start or from the file's last change. It notices a change of the file within
//! [`PERIOD`], so that a running program can be made to fail.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime};

use serde::Deserialize;

use crate::root::DriverRoot;

/// The file below the root.
pub const FILE: &str = "etc/nvidia-sim/faults.toml";
/// How often a process checks whether the file has changed.
pub const PERIOD: Duration = Duration::from_millis(10);

/// A row of the file.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
struct Fault {
    /// The function. A name without `_v2` or `_v3` stands for all versions.
    call: Option<String>,
    /// The minor number of a GPU.
    gpu: Option<u32>,
    #[serde(default)]
    after: u64,
    times: Option<u64>,
    code: Option<u32>,
    #[serde(default)]
    delay_ms: u64,
    #[serde(default)]
    hang: bool,
}

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    #[serde(default, rename = "fault")]
    faults: Vec<Fault>,
}

/// What happens to a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Effect {
    delay: Duration,
    hangs: bool,
    code: Option<u32>,
}

/// What a program calls.
#[derive(Debug, Clone, Copy)]
enum Target<'a> {
    Call(&'a str),
    Gpu(u32),
}

/// The rows, each with the number of calls so far.
#[derive(Debug)]
struct Script {
    file: PathBuf,
    changed: Option<SystemTime>,
    rows: Vec<(Fault, u64)>,
}

static SCRIPT: Mutex<Option<Script>> = Mutex::new(None);
/// When the file is checked next, in coarse monotonic nanoseconds.
static NEXT_LOOK: AtomicU64 = AtomicU64::new(0);
/// Whether there are rows.
static HAS_ROWS: AtomicBool = AtomicBool::new(false);

impl Fault {
    fn is_of(&self, target: Target<'_>) -> bool {
        match target {
            Target::Call(call) => {
                let base = call.rsplit_once("_v").map_or(call, |(base, _)| base);
                let names = [Some(call), Some(base)];
                names.contains(&self.call.as_deref())
            }
            Target::Gpu(minor) => self.gpu == Some(minor),
        }
    }
}

impl Script {
    fn new(file: PathBuf) -> Self {
        Self {
            file,
            changed: None,
            rows: Vec::new(),
        }
    }

    /// Reads the file again, if it has changed.
    fn look(&mut self) {
        let changed = std::fs::metadata(&self.file)
            .and_then(|it| it.modified())
            .ok();
        if changed == self.changed {
            return;
        }
        self.changed = changed;
        let text = std::fs::read_to_string(&self.file).unwrap_or_default();
        self.rows = match parse(&text) {
            Ok(faults) => faults.into_iter().map(|fault| (fault, 0)).collect(),
            Err(message) => {
                eprintln!("{}: {message}", self.file.display());
                Vec::new()
            }
        };
    }

    /// Counts a call; returns what happens to it.
    fn count(&mut self, target: Target<'_>) -> Effect {
        let mut effect = Effect::default();
        for (fault, calls) in self
            .rows
            .iter_mut()
            .filter(|(fault, _)| fault.is_of(target))
        {
            let nth = *calls;
            *calls += 1;
            let is_past = fault.times.is_some_and(|times| nth >= fault.after + times);
            if nth >= fault.after && !is_past {
                effect.delay += Duration::from_millis(fault.delay_ms);
                effect.hangs |= fault.hang;
                effect.code = effect.code.or(fault.code);
            }
        }
        effect
    }
}

fn parse(text: &str) -> Result<Vec<Fault>, String> {
    let file: File = toml::from_str(text).map_err(|error| error.to_string())?;
    let is_clear = |fault: &Fault| fault.call.is_some() != fault.gpu.is_some();
    if !file.faults.iter().all(is_clear) {
        return Err("each fault has either `call` or `gpu`".to_owned());
    }
    Ok(file.faults)
}

/// Waits as the file says, and returns the code that replaces the result of `call`.
#[must_use]
pub fn inject(call: &str) -> Option<u32> {
    inject_into(Target::Call(call))
}

/// The same for a call of NVML that reaches the GPU with this minor number.
#[must_use]
pub fn inject_for(gpu: u32) -> Option<u32> {
    inject_into(Target::Gpu(gpu))
}

fn inject_into(target: Target<'_>) -> Option<u32> {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::MonotonicCoarse);
    let seconds = u64::try_from(time.tv_sec).unwrap_or(0);
    let now = seconds * 1_000_000_000 + u64::try_from(time.tv_nsec).unwrap_or(0);
    let looks = now >= NEXT_LOOK.load(Ordering::Relaxed);
    if !looks && !HAS_ROWS.load(Ordering::Relaxed) {
        return None;
    }
    let effect = with_script(looks, now, |script| script.count(target));
    if !effect.delay.is_zero() {
        std::thread::sleep(effect.delay);
    }
    if effect.hangs {
        let is_hung = |script: &mut Script| {
            let mut rows = script.rows.iter();
            rows.any(|(fault, _)| fault.hang && fault.is_of(target))
        };
        while with_script(true, now, is_hung) {
            std::thread::sleep(PERIOD);
        }
    }
    effect.code
}

/// Does something with the rows, which are read again if `looks` and the file has changed.
fn with_script<T>(looks: bool, now: u64, what: impl FnOnce(&mut Script) -> T) -> T {
    let mut script = SCRIPT.lock().unwrap_or_else(PoisonError::into_inner);
    let script = script.get_or_insert_with(|| {
        // `SCRIPT` is a static of the library into which this is linked.
        let root = DriverRoot::of_library(&SCRIPT);
        Script::new(root.path().join(Path::new(FILE)))
    });
    if looks {
        let period = u64::try_from(PERIOD.as_nanos()).unwrap_or(0);
        NEXT_LOOK.store(now + period, Ordering::Relaxed);
        script.look();
        HAS_ROWS.store(!script.rows.is_empty(), Ordering::Relaxed);
    }
    what(script)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn script(text: &str) -> Script {
        let mut script = Script::new(PathBuf::new());
        script.rows = parse(text).unwrap().into_iter().map(|it| (it, 0)).collect();
        script
    }

    #[test]
    fn calls_are_counted() {
        let text = "[[fault]]\ncall = \"nvmlInit\"\nafter = 1\ntimes = 2\ncode = 9\n\
                    [[fault]]\ncall = \"nvmlInit_v2\"\ndelay_ms = 5\n";
        let mut script = script(text);
        let mut codes = || script.count(Target::Call("nvmlInit_v2")).code;
        assert_eq!([(); 4].map(|()| codes()), [None, Some(9), Some(9), None]);
        assert_eq!(
            script.count(Target::Call("nvmlInit_v2")).delay,
            Duration::from_millis(5)
        );
        assert_eq!(script.count(Target::Call("nvmlInit")).delay, Duration::ZERO);
        assert_eq!(
            script.count(Target::Call("nvmlInitWithFlags")),
            Effect::default()
        );
    }

    #[test]
    fn a_fault_of_a_gpu_is_of_no_other() {
        let mut script = script("[[fault]]\ngpu = 1\nhang = true\n");
        let mut hangs = |target| script.count(target).hangs;
        let targets = [Target::Gpu(0), Target::Gpu(1), Target::Call("nvmlInit")];
        assert_eq!(targets.map(&mut hangs), [false, true, false]);
    }

    #[test]
    fn a_changed_file_is_read_again() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("faults.toml");
        let mut script = Script::new(file.clone());
        script.look();
        assert_eq!(script.count(Target::Call("cuInit")).code, None);
        std::fs::write(&file, "[[fault]]\ncall = \"cuInit\"\ncode = 100\n").unwrap();
        script.look();
        assert_eq!(script.count(Target::Call("cuInit")).code, Some(100));
        std::fs::remove_file(&file).unwrap();
        script.look();
        assert_eq!(script.count(Target::Call("cuInit")).code, None);
    }

    #[test]
    fn errors_name_the_field() {
        for text in [
            "[[fault]]\ncode = 1\n",
            "[[fault]]\ncall = \"x\"\ngpu = 1\n",
            "[[fault]]\ncall = \"x\"\ncodes = 1\n",
        ] {
            let message = parse(text).unwrap_err();
            assert!(
                message.contains("call") || message.contains("codes"),
                "{message}"
            );
        }
    }

    proptest! {
        #[test]
        fn no_text_panics(text in ".{0,200}") {
            let _ = parse(&text);
        }
    }
}
