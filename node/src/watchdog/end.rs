//! Ends a process that bypassed its share's cap.
//!
//! The process was identified by its PID some milliseconds ago. So first a pidfd is opened, which keeps referring to
//! one process even if the PID is reused; then the process is identified again; only then it is ended.

use std::io;

use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::compare::ProcessId;
use crate::processes::owner::Proc;

/// The result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ended {
    /// It got SIGKILL.
    Killed,
    /// It had ended before, or another process has its PID now.
    Gone,
}

/// Sends SIGKILL to `process` and to no other process. `proc` must be of this process's own PID
/// namespace.
pub fn end(proc: &Proc, process: ProcessId) -> io::Result<Ended> {
    let Some(pid) = i32::try_from(process.pid).ok().and_then(Pid::from_raw) else {
        return Ok(Ended::Gone);
    };
    let held = match pidfd_open(pid, PidfdFlags::empty()) {
        Err(rustix::io::Errno::SRCH) => return Ok(Ended::Gone),
        other => other?,
    };
    if proc.started(process.pid) != Some(process.started) {
        return Ok(Ended::Gone);
    }
    match pidfd_send_signal(held, Signal::KILL) {
        Err(rustix::io::Errno::SRCH) => Ok(Ended::Gone),
        other => Ok(other.map(|()| Ended::Killed)?),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt as _;
    use std::process::{Command, Stdio};

    use super::*;

    #[test]
    fn the_process_is_ended_and_no_other_of_its_number() {
        // Ends with this test, however that ends.
        let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
        let proc = Proc::new("/proc");
        let pid = child.id();
        let process = ProcessId {
            pid,
            started: proc.started(pid).unwrap(),
        };
        let other = ProcessId {
            started: process.started + 1,
            ..process
        };
        assert_eq!(end(&proc, other).unwrap(), Ended::Gone);
        assert!(
            child.try_wait().unwrap().is_none(),
            "it was another process"
        );
        assert_eq!(end(&proc, process).unwrap(), Ended::Killed);
        assert_eq!(child.wait().unwrap().signal(), Some(9));
        assert_eq!(end(&proc, process).unwrap(), Ended::Gone);
    }
}
