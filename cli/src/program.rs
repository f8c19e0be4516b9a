//! Finds the command, checks it, and executes it.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The most interpreters of scripts that are followed.
const DEPTH: usize = 4;

/// Why a command is not run.
#[derive(Debug, thiserror::Error)]
pub enum ProgramError {
    #[error("COMMAND {}: not found in PATH", .0.display())]
    NotFound(PathBuf),
    #[error("COMMAND {path}: {source}")]
    CannotRun { path: PathBuf, source: io::Error },
    #[error(
        "COMMAND {path}: it is linked against musl ({interpreter}), and NVIDIA's driver works with glibc only: \
         run a build for glibc"
    )]
    Musl { path: PathBuf, interpreter: String },
}

/// Where the command is, as execvp(3) finds it.
pub fn find(command: &OsStr) -> Result<PathBuf, ProgramError> {
    let not_found = || ProgramError::NotFound(command.into());
    if command.as_bytes().contains(&b'/') {
        let path = PathBuf::from(command);
        return if path.exists() {
            Ok(path)
        } else {
            Err(not_found())
        };
    }
    let path = std::env::var_os("PATH").unwrap_or_else(|| "/usr/local/bin:/usr/bin:/bin".into());
    std::env::split_paths(&path)
        .map(|folder| folder.join(command))
        .find(|path| is_program(path))
        .ok_or_else(not_found)
}

fn is_program(path: &Path) -> bool {
    path.metadata()
        .is_ok_and(|found| found.is_file() && found.permissions().mode() & 0o111 != 0)
}

/// Refuses a command, or a script's interpreter, that is linked against musl. Files that cannot be
/// read or are of another kind are left to execve.
pub fn check(program: &Path) -> Result<(), ProgramError> {
    let mut path = program.to_owned();
    for _ in 0..DEPTH {
        let Ok(file) = File::open(&path) else { break };
        if let Some(interpreter) = elf_interpreter(&file) {
            if interpreter.contains("/ld-musl-") {
                return Err(ProgramError::Musl { path, interpreter });
            }
            break;
        }
        match script_interpreter(&file) {
            Some(interpreter) => path = interpreter,
            None => break,
        }
    }
    Ok(())
}

/// The loader of a 64-bit ELF file (`PT_INTERP`).
fn elf_interpreter(file: &File) -> Option<String> {
    let mut header = [0; 64];
    file.read_exact_at(&mut header, 0).ok()?;
    let word =
        |bytes: &[u8], at: usize| Some(u64::from_le_bytes(bytes.get(at..at + 8)?.try_into().ok()?));
    let half = |at: usize| u64::from(u16::from_le_bytes([header[at], header[at + 1]]));
    // 64-bit, little endian.
    if !header.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let (table, size, count) = (word(&header, 32)?, half(54), half(56));
    for nth in 0..count {
        let mut entry = [0; 56];
        file.read_exact_at(&mut entry, table.checked_add(nth * size)?)
            .ok()?;
        if entry.starts_with(&3u32.to_le_bytes()) {
            let (offset, length) = (word(&entry, 8)?, word(&entry, 32)?.min(4096));
            let mut name = vec![0; usize::try_from(length).ok()?];
            file.read_exact_at(&mut name, offset).ok()?;
            let end = name.iter().position(|&byte| byte == 0)?;
            return Some(String::from_utf8_lossy(&name[..end]).into_owned());
        }
    }
    None
}

/// The program in a script's first line; for env(1), its argument.
fn script_interpreter(mut file: &File) -> Option<PathBuf> {
    let mut start = Vec::new();
    file.by_ref().take(256).read_to_end(&mut start).ok()?;
    let line = start
        .strip_prefix(b"#!")?
        .split(|&byte| byte == b'\n')
        .next()?;
    let mut words = line
        .split(u8::is_ascii_whitespace)
        .filter(|word| !word.is_empty());
    let program = PathBuf::from(OsStr::from_bytes(words.next()?));
    if program.file_name() == Some(OsStr::new("env")) {
        return find(OsStr::from_bytes(words.next()?)).ok();
    }
    Some(program)
}

/// Executes the command in this process; returns only if that fails.
pub fn become_command(
    program: &Path,
    command: &[OsString],
    env: &[(String, String)],
) -> ProgramError {
    let mut next = Command::new(program);
    if let Some((name, arguments)) = command.split_first() {
        next.arg0(name).args(arguments);
    }
    let pairs = env.iter().map(|(name, value)| (name, value));
    let source = next.envs(pairs).exec();
    let path = program.to_owned();
    if source.kind() == io::ErrorKind::NotFound {
        return ProgramError::NotFound(path);
    }
    ProgramError::CannotRun { path, source }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The beginning of an ELF file that requests a loader.
    fn elf(loader: &str) -> Vec<u8> {
        let mut file = vec![0; 64 + 56];
        file[..6].copy_from_slice(b"\x7fELF\x02\x01");
        file[32] = 64;
        file[54] = 56;
        file[56] = 1;
        file[64] = 3;
        file[64 + 8] = 120;
        file[64 + 32] = u8::try_from(loader.len() + 1).unwrap();
        file.extend_from_slice(loader.as_bytes());
        file.push(0);
        file
    }

    #[test]
    fn musl_is_refused_by_name_also_behind_a_script() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        std::fs::write(at("musl"), elf("/lib/ld-musl-x86_64.so.1")).unwrap();
        std::fs::write(at("glibc"), elf("/lib64/ld-linux-x86-64.so.2")).unwrap();
        std::fs::write(at("script"), format!("#! {} -x\n", at("musl").display())).unwrap();
        std::fs::write(at("loop"), format!("#!{}\n", at("loop").display())).unwrap();
        for name in ["musl", "script"] {
            let error = check(&at(name)).unwrap_err().to_string();
            assert!(error.contains("musl") && error.contains("glibc"), "{error}");
        }
        for name in ["glibc", "loop", "missing"] {
            check(&at(name)).unwrap();
        }
        check(&std::env::current_exe().unwrap()).unwrap();
    }

    #[test]
    fn truncated_and_invalid_files_are_not_refused() {
        let whole = elf("/lib/ld-musl-x86_64.so.1");
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        for length in 0..whole.len() - 1 {
            std::fs::write(&path, &whole[..length]).unwrap();
            check(&path).unwrap();
        }
        let mut wild = whole;
        wild[32..40].fill(0xff);
        wild[56..58].fill(0xff);
        std::fs::write(&path, wild).unwrap();
        check(&path).unwrap();
    }

    #[test]
    fn a_command_is_found_as_a_shell_finds_it() {
        assert!(find(OsStr::new("sh")).unwrap().ends_with("sh"));
        assert!(find(OsStr::new("/bin/sh")).unwrap().ends_with("sh"));
        for nothing in ["no-such-command", "/no/such/command"] {
            let error = find(OsStr::new(nothing)).unwrap_err().to_string();
            assert!(error.contains(nothing), "{error}");
        }
    }
}
