//! The system calls that the shim uses.

use core::ffi::{CStr, c_int, c_long, c_void};
use core::ptr::{self, NonNull};

use tranche_shim_core::Locks;

/// `errno` of a failed call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Errno(pub c_int);

impl Errno {
    fn last() -> Self {
        // SAFETY: the C library returns a valid pointer to this thread's errno.
        Self(unsafe { *libc::__errno_location() })
    }
}

/// Why memory was not mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NotMapped {
    /// There is no address space for it, or the file cannot be mapped.
    Map(Errno),
    /// `madvise(2)` refuses the advice for forks that the mapping needs. A sandbox's kernel may not
    /// support it.
    Advise(Errno),
}

impl NotMapped {
    /// The error of the failed call.
    #[must_use]
    pub const fn errno(self) -> Errno {
        match self {
            Self::Map(errno) | Self::Advise(errno) => errno,
        }
    }
}

fn mode(writable: bool) -> c_int {
    if writable {
        libc::O_RDWR
    } else {
        libc::O_RDONLY
    }
}

/// An open file, closed when dropped.
#[derive(Debug)]
pub struct File(c_int);

impl File {
    /// Opens an existing file or folder that is not a link.
    pub fn open(path: &CStr, writable: bool) -> Result<Self, Errno> {
        Self::open_with(path, mode(writable) | libc::O_NOFOLLOW)
    }

    /// The same, but returns `EAGAIN` if another tenant's lease on the file (`F_SETLEASE`) would block the open for up to
    /// 45 s. The lease is broken in that time nevertheless.
    pub fn open_at_once(path: &CStr, writable: bool) -> Result<Self, Errno> {
        Self::open_with(path, mode(writable) | libc::O_NOFOLLOW | libc::O_NONBLOCK)
    }

    /// Opens a file for reading, following links.
    pub fn open_anywhere(path: &CStr) -> Result<Self, Errno> {
        Self::open_with(path, mode(false))
    }

    fn open_with(path: &CStr, flags: c_int) -> Result<Self, Errno> {
        // SAFETY: `path` is a C string.
        let fd = unsafe { libc::open(path.as_ptr(), flags | libc::O_CLOEXEC) };
        if fd < 0 {
            Err(Errno::last())
        } else {
            Ok(Self(fd))
        }
    }

    /// The same with a descriptor above 2: if a program has closed its standard input or output, it could
    /// otherwise mistake this file for that.
    pub fn above_standard(self) -> Result<Self, Errno> {
        if self.0 > libc::STDERR_FILENO {
            return Ok(self);
        }
        // SAFETY: duplicates this file's own descriptor.
        let fd = unsafe { libc::fcntl(self.0, libc::F_DUPFD_CLOEXEC, libc::STDERR_FILENO + 1) };
        if fd < 0 {
            Err(Errno::last())
        } else {
            Ok(Self(fd))
        }
    }

    /// The file's length in bytes.
    pub fn size(&self) -> Result<usize, Errno> {
        // SAFETY: changes only this description's offset, which nothing else uses.
        let end = unsafe { libc::lseek(self.0, 0, libc::SEEK_END) };
        usize::try_from(end).map_err(|_| Errno::last())
    }

    /// Reads from offset `at` until `buffer` is full or the file ends; returns the number of bytes.
    pub fn read_at(&self, buffer: &mut [u8], at: usize) -> Result<usize, Errno> {
        let mut done = 0;
        while let Some(rest @ [_, ..]) = buffer.get_mut(done..) {
            #[expect(clippy::cast_possible_wrap, reason = "offsets within a page")]
            let offset = (at + done) as libc::off_t;
            // SAFETY: `rest` is writable for its length.
            let read = unsafe { libc::pread(self.0, rest.as_mut_ptr().cast(), rest.len(), offset) };
            match usize::try_from(read) {
                Ok(0) => break,
                Ok(read) => done += read,
                Err(_) if Errno::last() == Errno(libc::EINTR) => {}
                Err(_) => return Err(Errno::last()),
            }
        }
        Ok(done)
    }

    /// Writes all of `bytes` at offset `at`, in one call; an error too if less was written.
    pub fn write_at(&self, bytes: &[u8], at: usize) -> Result<(), Errno> {
        #[expect(clippy::cast_possible_wrap, reason = "an offset within a page")]
        let offset = at as libc::off_t;
        // SAFETY: `bytes` is readable for its length.
        let written = unsafe { libc::pwrite(self.0, bytes.as_ptr().cast(), bytes.len(), offset) };
        if usize::try_from(written) == Ok(bytes.len()) {
            Ok(())
        } else {
            Err(Errno::last())
        }
    }

    /// Whether another description holds the lock on byte `at`; does not take it.
    pub fn is_locked(&self, at: u64) -> Result<bool, Errno> {
        Descriptor(self.0).is_locked(at)
    }

    /// Returns its descriptor, which stays open.
    #[must_use]
    pub fn leave_open(self) -> Descriptor {
        let descriptor = Descriptor(self.0);
        core::mem::forget(self);
        descriptor
    }

    /// Whether the file is on a tmpfs with a read-only mount.
    pub fn is_on_read_only_tmpfs(&self) -> Result<bool, Errno> {
        let mut words = [0; FILE_SYSTEM_WORDS];
        // SAFETY: `words` is writable, and as long as a `struct statfs`.
        if unsafe { libc::fstatfs(self.0, (&raw mut words).cast()) } != 0 {
            return Err(Errno::last());
        }
        // `f_type` and `f_flags` of the kernel's struct (asm-generic/statfs.h). The crate has no name for
        // `f_flags`, and fstatvfs(3) would be a second call.
        let [kind, _, _, _, _, _, _, _, _, _, flags, ..] = words;
        #[expect(clippy::cast_possible_wrap, reason = "a bit")]
        let read_only = libc::ST_RDONLY as c_long;
        Ok(kind == libc::TMPFS_MAGIC && flags & read_only != 0)
    }

    /// Maps the file's first `len` bytes, shared. The mapping keeps the file's open description and its
    /// locks, even after this file is closed. Children do not inherit the mapping.
    pub fn map_shared(&self, len: usize) -> Result<Mapping, NotMapped> {
        map(len, libc::MAP_SHARED, WRITABLE, self.0, libc::MADV_DONTFORK)
    }

    /// Maps the file's first `len` bytes for reading, while others may write them. Children do not inherit
    /// the mapping.
    pub fn map_readable(&self, len: usize) -> Result<Mapping, NotMapped> {
        let readable = libc::PROT_READ;
        map(len, libc::MAP_SHARED, readable, self.0, libc::MADV_DONTFORK)
    }

    /// Calls `each` with the names in a folder, without `.` and `..`; stops at the first error.
    pub fn names<E>(
        &self,
        each: &mut dyn FnMut(&CStr) -> Result<(), E>,
    ) -> Result<Result<(), E>, Errno> {
        let mut buffer = Entries([0; 2048]);
        loop {
            // SAFETY: `buffer` is writable for its length; the kernel fills it with whole entries.
            let read = unsafe {
                libc::syscall(
                    libc::SYS_getdents64,
                    self.0,
                    buffer.0.as_mut_ptr(),
                    buffer.0.len(),
                )
            };
            let Ok(read) = usize::try_from(read) else {
                return Err(Errno::last());
            };
            let mut rest = buffer.0.get(..read).unwrap_or(&[]);
            if rest.is_empty() {
                return Ok(Ok(()));
            }
            // struct linux_dirent64: inode 8, offset 8, length of the entry 2, type 1, name.
            while let (Some(&[low, high]), Some(name)) = (rest.get(16..18), rest.get(19..)) {
                let Ok(name) = CStr::from_bytes_until_nul(name) else {
                    break;
                };
                if name != c"."
                    && name != c".."
                    && let Err(error) = each(name)
                {
                    return Ok(Err(error));
                }
                rest = rest
                    .get(usize::from(u16::from_le_bytes([low, high]))..)
                    .unwrap_or(&[]);
            }
        }
    }
}

/// The number of a descriptor that may be closed: the program's, or one that it may have closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Descriptor(pub c_int);

impl Descriptor {
    /// Opens the same file again, with a new description.
    pub fn reopen(self) -> Result<File, Errno> {
        let mut path = *b"/proc/self/fd/\0\0\0\0\0\0\0\0\0\0\0\0";
        let number = u32::try_from(self.0).map_err(|_| Errno(libc::EBADF))?;
        let digits = number.checked_ilog10().unwrap_or(0) as usize + 1;
        let (mut rest, places) = (number, &mut path[b"/proc/self/fd/".len()..]);
        for place in places.iter_mut().take(digits).rev() {
            *place = b'0' + u8::try_from(rest % 10).unwrap_or(0);
            rest /= 10;
        }
        let path = CStr::from_bytes_until_nul(&path).map_err(|_| Errno(libc::EBADF))?;
        File::open_with(path, mode(true))?.above_standard()
    }

    /// The device and inode of its file.
    pub fn file(self) -> Result<(u64, u64), Errno> {
        // SAFETY: zeros are a valid `struct stat`.
        let mut found: libc::stat = unsafe { core::mem::zeroed() };
        // SAFETY: `found` is writable, and has the layout that the kernel writes on this architecture. The C library's
        // function is newer than glibc 2.17.
        if unsafe { libc::syscall(libc::SYS_fstat, self.0, &raw mut found) } != 0 {
            return Err(Errno::last());
        }
        Ok((found.st_dev, found.st_ino))
    }

    /// Takes a lock on byte `at` for its description, which is dropped when the description's last descriptor is closed,
    /// in whichever process. Returns whether it has the lock.
    #[must_use]
    pub fn lock(self, at: u64) -> bool {
        lock(self.0, at, libc::F_WRLCK)
    }

    /// Whether another description holds the lock on byte `at`; does not take it.
    pub fn is_locked(self, at: u64) -> Result<bool, Errno> {
        let mut request = request(at, libc::F_WRLCK);
        // SAFETY: `request` is writable; the call does not wait.
        if unsafe { libc::fcntl(self.0, libc::F_OFD_GETLK, &raw mut request) } != 0 {
            return Err(Errno::last());
        }
        Ok(i32::from(request.l_type) != libc::F_UNLCK)
    }

    /// Closes it.
    ///
    /// # Safety
    ///
    /// [`File::leave_open`] left it open, and nothing uses it any more.
    pub unsafe fn close(self) {
        // SAFETY: the caller's promise.
        unsafe { libc::close(self.0) };
    }
}

/// A random number below 2⁶², which no other process has; `None` if the kernel has no random numbers.
#[must_use]
pub fn unique() -> Option<u64> {
    let mut bytes = [0u8; 8];
    // SAFETY: `bytes` is writable for its length.
    let got = unsafe {
        libc::syscall(
            libc::SYS_getrandom,
            bytes.as_mut_ptr(),
            bytes.len(),
            libc::GRND_NONBLOCK,
        )
    };
    (usize::try_from(got) == Ok(bytes.len())).then(|| u64::from_le_bytes(bytes) >> 2 | 1)
}

/// Of a `struct statfs`.
const FILE_SYSTEM_WORDS: usize = size_of::<libc::statfs>() / size_of::<c_long>();

#[repr(align(8))]
struct Entries([u8; 2048]);

impl Drop for File {
    fn drop(&mut self) {
        // SAFETY: this file's own descriptor.
        unsafe { libc::close(self.0) };
    }
}

/// Open file description locks: in all PID namespaces, the kernel drops them when the description's
/// last reference, here a mapping, is gone.
impl Locks for File {
    fn try_lock(&self, at: u64) -> bool {
        lock(self.0, at, libc::F_WRLCK)
    }
    fn lock_soon(&self, at: u64) -> bool {
        const TRIES: usize = 20;
        const NAP_NANOS: u64 = 50_000;
        for _ in 0..TRIES {
            if self.try_lock(at) {
                return true;
            }
            sleep(NAP_NANOS);
        }
        false
    }
    fn unlock(&self, at: u64) {
        lock(self.0, at, libc::F_UNLCK);
    }
}

fn lock(fd: c_int, at: u64, kind: c_int) -> bool {
    let request = request(at, kind);
    // SAFETY: `request` is readable; the call does not wait.
    unsafe { libc::fcntl(fd, libc::F_OFD_SETLK, &raw const request) == 0 }
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_possible_wrap,
    reason = "small constants"
)]
fn request(at: u64, kind: c_int) -> libc::flock {
    libc::flock {
        l_type: kind as i16,
        l_whence: libc::SEEK_SET as i16,
        l_start: at as libc::off_t,
        l_len: 1,
        l_pid: 0,
    }
}

/// Mapped memory; stays for the life of the process unless it is given to [`unmap`].
#[derive(Clone, Copy, Debug)]
pub struct Mapping {
    /// Its first byte.
    pub start: NonNull<c_void>,
    len: usize,
}

/// Maps `len` bytes of zeros, which take no memory until they are touched, are zeros again in a forked
/// child, and are not in core dumps.
pub fn map_private(len: usize) -> Result<Mapping, NotMapped> {
    let anonymous = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let mapping = map(len, anonymous, WRITABLE, -1, libc::MADV_WIPEONFORK)?;
    for advice in [libc::MADV_DONTDUMP, libc::MADV_NOHUGEPAGE] {
        // SAFETY: the mapping is ours. Only a hint: it may fail.
        unsafe { libc::madvise(mapping.start.as_ptr(), len, advice) };
    }
    Ok(mapping)
}

const WRITABLE: c_int = libc::PROT_READ | libc::PROT_WRITE;

fn map(
    len: usize,
    flags: c_int,
    access: c_int,
    fd: c_int,
    advice: c_int,
) -> Result<Mapping, NotMapped> {
    // SAFETY: a new mapping, at an address of the kernel's choice.
    let start = unsafe { libc::mmap(ptr::null_mut(), len, access, flags, fd, 0) };
    if start == libc::MAP_FAILED {
        return Err(NotMapped::Map(Errno::last()));
    }
    let Some(start) = NonNull::new(start) else {
        return Err(NotMapped::Map(Errno(libc::ENOMEM)));
    };
    let mapping = Mapping { start, len };
    // SAFETY: the mapping is ours.
    if unsafe { libc::madvise(start.as_ptr(), len, advice) } != 0 {
        let errno = Errno::last();
        // SAFETY: nothing uses it yet.
        unsafe { unmap(mapping) };
        return Err(NotMapped::Advise(errno));
    }
    Ok(mapping)
}

/// Unmaps a mapping.
///
/// # Safety
///
/// Nothing refers to its memory any more.
pub unsafe fn unmap(mapping: Mapping) {
    // SAFETY: the caller's promise.
    unsafe { libc::munmap(mapping.start.as_ptr(), mapping.len) };
}

/// A clock for intervals, in nanoseconds.
#[must_use]
pub fn now() -> u64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `time` is writable.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    u64::try_from(time.tv_sec * 1_000_000_000 + time.tv_nsec).unwrap_or(0)
}

/// This process's PID, in its own namespace.
#[must_use]
pub fn pid() -> u64 {
    // SAFETY: always succeeds.
    u64::try_from(unsafe { libc::getpid() }).unwrap_or(0)
}

/// Sleeps for `nanos`, or until a signal.
pub fn sleep(nanos: u64) {
    let time = libc::timespec {
        tv_sec: libc::time_t::try_from(nanos / 1_000_000_000).unwrap_or(1),
        tv_nsec: libc::c_long::try_from(nanos % 1_000_000_000).unwrap_or(0),
    };
    // SAFETY: reads the local time. Not the C library's function, in which a thread can be cancelled.
    unsafe {
        libc::syscall(
            libc::SYS_nanosleep,
            &raw const time,
            ptr::null_mut::<libc::timespec>(),
        )
    };
}

/// A number that is unique to the calling thread: the address of the C library's data of the
/// thread.
#[cfg(target_arch = "x86_64")]
#[must_use]
#[inline]
pub fn thread() -> u64 {
    let own: u64;
    // SAFETY: the ABI has a thread's own address at the start of its thread-local segment.
    unsafe {
        core::arch::asm!("mov {}, fs:0", out(reg) own, options(pure, readonly, nostack, preserves_flags));
    }
    own
}

/// Microseconds since 1970.
#[must_use]
pub fn wall_clock() -> u64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: writes to the local; this clock always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_REALTIME, &raw mut time) };
    let [seconds, nanos] = [time.tv_sec, time.tv_nsec].map(|part| u64::try_from(part).unwrap_or(0));
    seconds * 1_000_000 + nanos / 1000
}

/// Yields to other threads.
pub fn give_way() {
    // SAFETY: always succeeds.
    unsafe { libc::sched_yield() };
}

/// Ends the process, for states that cannot occur.
pub fn abort() -> ! {
    // SAFETY: does not return.
    unsafe { libc::abort() }
}

/// Whether there is a file at `path`.
#[must_use]
pub fn exists(path: &CStr) -> bool {
    // SAFETY: `path` is a C string.
    unsafe { libc::access(path.as_ptr(), libc::F_OK) == 0 }
}

/// Whether a process accepts connections at the socket; the error says why not.
pub fn is_served(socket: &CStr) -> Result<(), Errno> {
    // SAFETY: zeros are a valid address.
    let mut address: libc::sockaddr_un = unsafe { core::mem::zeroed() };
    address.sun_family = 1; // AF_UNIX
    // The last byte stays zero.
    let most = address.sun_path.len() - 1;
    for (to, &from) in address
        .sun_path
        .iter_mut()
        .take(most)
        .zip(socket.to_bytes())
    {
        *to = from.cast_signed();
    }
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: plain arguments.
    let fd = unsafe { libc::socket(libc::AF_UNIX, kind, 0) };
    if fd < 0 {
        return Err(Errno::last());
    }
    let connection = File(fd);
    #[expect(
        clippy::cast_possible_truncation,
        reason = "the size of a small struct"
    )]
    let length = size_of::<libc::sockaddr_un>() as libc::socklen_t;
    // SAFETY: a valid address of this length.
    let result = unsafe { libc::connect(connection.0, (&raw const address).cast(), length) };
    match Errno::last() {
        _ if result == 0 => Ok(()),
        error @ Errno(libc::ENOENT | libc::ECONNREFUSED | libc::ENOTDIR | libc::EACCES) => {
            Err(error)
        }
        // The socket's queue is full, or a later driver has another kind of socket.
        _ => Ok(()),
    }
}

/// Whether a variable of the environment has this value; `None` for no variable.
#[must_use]
pub fn environment_is(name: &CStr, value: Option<&CStr>) -> bool {
    // SAFETY: a C string; the result is one too, or null.
    let found = unsafe { libc::getenv(name.as_ptr()) };
    match value {
        None => found.is_null(),
        // SAFETY: not null, so a C string.
        Some(value) => !found.is_null() && unsafe { CStr::from_ptr(found) } == value,
    }
}

/// Sets or removes a variable of the environment. Other threads must not read the environment meanwhile.
pub fn set_environment(name: &CStr, value: Option<&CStr>) -> Result<(), Errno> {
    // SAFETY: C strings.
    let result = unsafe {
        match value {
            Some(value) => libc::setenv(name.as_ptr(), value.as_ptr(), 1),
            None => libc::unsetenv(name.as_ptr()),
        }
    };
    if result == 0 {
        Ok(())
    } else {
        Err(Errno::last())
    }
}

pub(crate) fn write_stderr(text: &[u8]) {
    // SAFETY: `text` is readable. An error, such as a closed stderr, is ignored.
    unsafe { libc::write(libc::STDERR_FILENO, text.as_ptr().cast(), text.len()) };
}
