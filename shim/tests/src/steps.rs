//! A probe under a debugger, which runs it instruction by instruction and can kill it at any of them.

use std::ptr;

use libc::{c_int, c_void, pid_t};

/// A traced process. Its tracer is the thread that made this.
#[derive(Debug)]
pub struct Traced(pid_t);

impl Traced {
    /// Attaches to a running process, which continues.
    #[must_use]
    pub fn seize(pid: u32) -> Self {
        let traced = Self(pid.cast_signed());
        traced.request(libc::PTRACE_SEIZE, ptr::null_mut());
        traced
    }

    /// Waits until it reaches a breakpoint.
    pub fn to_breakpoint(&self) {
        assert!(self.stopped_at_breakpoint(), "no breakpoint");
    }

    /// Lets it run one instruction; returns whether that was a breakpoint.
    #[must_use]
    pub fn step(&self) -> bool {
        self.request(libc::PTRACE_SINGLESTEP, ptr::null_mut());
        self.stopped_at_breakpoint()
    }

    fn stopped_at_breakpoint(&self) -> bool {
        let mut status = 0;
        // SAFETY: waits for the traced process; `status` is writable.
        let waited = unsafe { libc::waitpid(self.0, &raw mut status, libc::__WALL) };
        assert_eq!(waited, self.0);
        assert!(
            libc::WIFSTOPPED(status) && libc::WSTOPSIG(status) == libc::SIGTRAP,
            "stopped with status {status:#x}"
        );
        // SAFETY: all-zero is a valid `siginfo_t`.
        let mut info: libc::siginfo_t = unsafe { std::mem::zeroed() };
        self.request(libc::PTRACE_GETSIGINFO, (&raw mut info).cast());
        // A breakpoint is the kernel's own signal; a step is not.
        info.si_code == SI_KERNEL
    }

    fn request(&self, what: libc::c_uint, data: *mut c_void) {
        // SAFETY: the process is traced by this thread, or about to be; `data` is what the request takes.
        let done = unsafe { libc::ptrace(what, self.0, ptr::null_mut::<c_void>(), data) };
        assert_eq!(done, 0, "ptrace: {}", std::io::Error::last_os_error());
    }
}

const SI_KERNEL: c_int = 0x80;
