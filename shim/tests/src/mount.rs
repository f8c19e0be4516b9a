//! Mounts of a private namespace. A failure panics.

use std::ffi::{CStr, CString};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

fn c_path(path: &Path) -> CString {
    CString::new(path.as_os_str().as_bytes()).unwrap()
}

fn done(result: i32, what: &str) {
    assert!(
        result == 0,
        "{what}: {}: the tests of the shim need root",
        std::io::Error::last_os_error()
    );
}

fn mount(source: &CStr, target: &Path, kind: &CStr, flags: libc::c_ulong, data: &str) {
    let (to, data) = (c_path(target), CString::new(data).unwrap());
    // SAFETY: all are C strings.
    let result = unsafe {
        libc::mount(
            source.as_ptr(),
            to.as_ptr(),
            kind.as_ptr(),
            flags,
            data.as_ptr().cast(),
        )
    };
    done(result, &format!("mount on {}", target.display()));
}

/// Gives the calling thread, and the processes that it starts, their own mounts.
pub fn private_namespace() {
    // SAFETY: affects this thread's namespace only.
    done(unsafe { libc::unshare(libc::CLONE_NEWNS) }, "unshare");
    mount(
        c"none",
        Path::new("/"),
        c"",
        libc::MS_REC | libc::MS_PRIVATE,
        "",
    );
}

pub fn tmpfs(target: &Path) {
    mount(c"tmpfs", target, c"tmpfs", 0, "mode=0755");
}

/// Makes a folder writable without changing it.
pub fn overlay(over: &Path, upper: &Path, work: &Path) {
    let data = format!(
        "lowerdir={},upperdir={},workdir={}",
        over.display(),
        upper.display(),
        work.display()
    );
    mount(c"overlay", over, c"overlay", 0, &data);
}

pub fn bind(source: &Path, target: &Path, read_only: bool) {
    mount(&c_path(source), target, c"", libc::MS_BIND, "");
    if read_only {
        let flags = libc::MS_BIND | libc::MS_REMOUNT | libc::MS_RDONLY;
        mount(c"none", target, c"", flags, "");
    }
}

/// Mounts a folder, including its mounts, over another one.
pub fn move_over(source: &Path, target: &Path) {
    mount(
        &c_path(source),
        target,
        c"",
        libc::MS_BIND | libc::MS_REC,
        "",
    );
}

/// Removes a mount, now or after its last user has ended.
pub fn detach(target: &Path) {
    // SAFETY: a C string. If it fails, the end of the namespace removes the mount.
    unsafe { libc::umount2(c_path(target).as_ptr(), libc::MNT_DETACH) };
}
