//! The length of a GPU's time slices, by the driver's own `nvidia-smi compute-policy`.
//!
//! NVML has no public function for it: nvidia-smi calls an unnamed one, whose position in a private table changes with
//! the driver. So the nvidia-smi of the same driver is run, as NVIDIA's DRA driver does. It gets the driver's library
//! by `LD_PRELOAD`: a search path would also give it the host's C library, which may not fit this process's loader.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tranche_api::sharing_policy::Interval;

use super::NvmlError;

/// How long nvidia-smi may take. It powers the GPU up.
const PATIENCE: Duration = Duration::from_secs(10);

const LIST: &str = "nvidia-smi compute-policy --list";
const SET: &str = "nvidia-smi compute-policy --set-timeslice";
const NAMES: [(Interval, &str, &str); 4] = [
    (Interval::Default, "Default", "0"),
    (Interval::Short, "Short", "1"),
    (Interval::Medium, "Medium", "2"),
    (Interval::Long, "Long", "3"),
];

/// The driver's nvidia-smi.
#[derive(Debug)]
pub(super) struct NvidiaSmi {
    /// The program, absent where the driver root has none.
    pub(super) program: Option<PathBuf>,
    /// The driver's libnvidia-ml.
    pub(super) library: PathBuf,
}

impl NvidiaSmi {
    /// The length of a GPU's time slices now.
    pub(super) fn time_slice(&self, gpu_uuid: &str) -> Result<Interval, NvmlError> {
        let listed = self.run(LIST, gpu_uuid, "--list")?;
        read(&listed).ok_or_else(|| {
            let reason = format!("it names no length of time slices: {}", one_line(&listed));
            failed(LIST, gpu_uuid, reason)
        })
    }

    /// Sets the length of a GPU's time slices.
    pub(super) fn set_time_slice(
        &self,
        gpu_uuid: &str,
        interval: Interval,
    ) -> Result<(), NvmlError> {
        let mut names = NAMES.iter();
        let number = names
            .find(|(it, ..)| *it == interval)
            .map_or("0", |(_, _, number)| number);
        self.run(SET, gpu_uuid, &format!("--set-timeslice={number}"))
            .map(drop)
    }

    fn run(&self, call: &'static str, gpu_uuid: &str, argument: &str) -> Result<String, NvmlError> {
        let program = self.program.as_deref().ok_or_else(|| {
            let reason = "the driver root has no nvidia-smi, which sets time slices: install it, or let the SharingPolicy \
                          have `timeshared.interval: Default`";
            failed(call, gpu_uuid, reason.to_owned())
        })?;
        let mut command = command(program, &self.library);
        command.args(["compute-policy", "-i", gpu_uuid, argument]);
        let output = output_within(PATIENCE, &mut command).map_err(|error| {
            failed(
                call,
                gpu_uuid,
                format!("cannot run {}: {error}", program.display()),
            )
        })?;
        if output.status.success() {
            return Ok(text(&output));
        }
        let reason = format!(
            "{} ({}); GPUs before Volta have no such setting: the SharingPolicy must have `timeshared.interval: Default` for them",
            one_line(&text(&output)),
            output.status
        );
        Err(failed(call, gpu_uuid, reason))
    }
}

fn command(program: &Path, library: &Path) -> Command {
    let mut command = Command::new(program);
    command.env_clear().env("LD_PRELOAD", library);
    command
}

/// The output of a program, which is ended if it takes longer.
fn output_within(limit: Duration, command: &mut Command) -> io::Result<Output> {
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn()?;
    let handle = Pid::from_raw(i32::try_from(child.id()).unwrap_or_default())
        .ok_or(Errno::SRCH)
        .and_then(|pid| pidfd_open(pid, PidfdFlags::empty()));
    let handle = match handle {
        Ok(handle) => handle,
        Err(error) => {
            child.kill()?;
            child.wait()?;
            return Err(error.into());
        }
    };
    let (ends, ended) = channel::<()>();
    std::thread::scope(|scope| {
        let watch = scope.spawn(move || {
            let is_late = ended.recv_timeout(limit) == Err(RecvTimeoutError::Timeout);
            // A program that has just ended cannot be ended.
            is_late && pidfd_send_signal(handle, Signal::KILL).is_ok()
        });
        let output = child.wait_with_output();
        drop(ends);
        if watch.join().unwrap_or(false) {
            let text = format!("it did not end within {} s", limit.as_secs());
            return Err(io::Error::new(io::ErrorKind::TimedOut, text));
        }
        output
    })
}

fn failed(call: &'static str, gpu_uuid: &str, reason: String) -> NvmlError {
    NvmlError::Call {
        call,
        object: gpu_uuid.to_owned(),
        reason,
    }
}

/// Its output, errors last.
fn text(output: &Output) -> String {
    let [printed, errors] =
        [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
    format!("{printed}{errors}")
}

fn one_line(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

/// The length in a list of one GPU: `|   1   Timeslice       Medium        |`.
fn read(listed: &str) -> Option<Interval> {
    let mut lines = listed.lines();
    let value = lines.find_map(|line| {
        let mut words = line.split(['|', ' ']).filter(|word| !word.is_empty());
        words.find(|word| *word == "Timeslice")?;
        words.next()
    })?;
    let mut names = NAMES.iter();
    names
        .find(|(_, name, _)| *name == value)
        .map(|(interval, ..)| *interval)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_hangs_is_ended() {
        let limit = Duration::from_millis(1);
        let hangs = output_within(limit, Command::new("sleep").arg("1000"));
        assert_eq!(hangs.unwrap_err().kind(), io::ErrorKind::TimedOut);
        let limit = Duration::from_mins(1);
        let ends = output_within(limit, Command::new("echo").arg("done")).unwrap();
        assert_eq!(text(&ends), "done\n");
    }

    #[test]
    fn the_length_is_read_from_the_list_of_one_gpu() {
        let list = |value| {
            format!(
                "+-------------------------------------+\n\
                 | GPU compute policies:               |\n\
                 | GPU     Name           Value        |\n\
                 |=====================================|\n\
                 |   1   Timeslice       {value}        |\n\
                 +-------------------------------------+\n"
            )
        };
        for (interval, name, _) in NAMES {
            assert_eq!(read(&list(name)), Some(interval));
        }
        assert_eq!(read(&list("Unknown")), None);
        assert_eq!(read(""), None);
    }
}
