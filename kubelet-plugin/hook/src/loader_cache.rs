//! The loader's cache as a value: read, added to, written.
//!
//! `ldconfig` opens every library of an image to make it: 6 ms of CPU time for 85 libraries, 9 ms for 163 (with 1.2 GB of
//! CUDA's), 24 ms for 529, and where they are not in the page cache 20 to 150 ms and the disk's time, 0.1 to 1 s. Adding the
//! driver's libraries to the image's own cache reads one file. The format is glibc's `glibc-ld.so.cache1.1` (`elf/cache.c`,
//! `sysdeps/generic/dl-cache.h`), little endian:
//!
//! ```text
//!  header (48 bytes) │ entries (24 bytes each), sorted │ strings │ extensions: the generator, names of glibc-hwcaps
//! ```
//!
//! A cache in any other form, also the one with glibc 2.0's entries in front, is not read: `ldconfig` makes it anew.

use std::cmp::Ordering;
use std::collections::HashMap;

const MAGIC: &[u8] = b"glibc-ld.so.cache1.1";
const HEADER: usize = 48;
const ENTRY: usize = 24;
const LITTLE_ENDIAN: u8 = 2;
const EXTENSIONS: u32 = 0xeaa4_2174;
const SECTION: usize = 16;
const TAG_GENERATOR: u32 = 0;
const TAG_HWCAPS: u32 = 1;

/// An ELF library of glibc for x86-64 (`FLAG_ELF_LIBC6 | FLAG_X8664_LIB64`).
const X86_64: u32 = 0x0303;

/// A cache; by default one without entries, for an image that has none.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct LoaderCache {
    entries: Vec<Entry>,
    /// Names of subfolders for later processors, to which entries refer by their place.
    hwcaps: Vec<Vec<u8>>,
    generator: Vec<u8>,
}

#[derive(Debug, PartialEq, Eq)]
struct Entry {
    flags: u32,
    /// What a program asks for.
    name: Vec<u8>,
    path: Vec<u8>,
    os_version: u32,
    hwcap: u64,
}

/// Another library of this name is in the cache: only `ldconfig` can decide which of them comes first.
#[derive(Debug, PartialEq, Eq)]
pub struct OtherOfThatName;

impl LoaderCache {
    /// Reads a cache; `None` for one in a form that is not known.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let (count, strings) = (word(bytes, 20)?, word(bytes, 24)?);
        if !bytes.starts_with(MAGIC) || *bytes.get(28)? != LITTLE_ENDIAN {
            return None;
        }
        let strings_at = HEADER.checked_add(index(count)?.checked_mul(ENTRY)?)?;
        // Strings are addressed from the beginning of the file.
        let with_strings = bytes.get(..strings_at.checked_add(index(strings)?)?)?;
        let string = |at: u32| {
            let start = index(at).filter(|&start| start >= strings_at)?;
            let rest = with_strings.get(start..)?;
            let end = rest.iter().position(|&byte| byte == 0)?;
            Some(rest[..end].to_vec())
        };
        let entries = bytes[HEADER..strings_at].chunks_exact(ENTRY).map(|entry| {
            Some(Entry {
                flags: word(entry, 0)?,
                name: string(word(entry, 4)?)?,
                path: string(word(entry, 8)?)?,
                os_version: word(entry, 12)?,
                hwcap: u64::from(word(entry, 16)?) | u64::from(word(entry, 20)?) << 32,
            })
        });
        let mut cache = Self {
            entries: entries.collect::<Option<_>>()?,
            hwcaps: Vec::new(),
            generator: Vec::new(),
        };
        match word(bytes, 32)? {
            0 => {}
            at => cache.parse_extensions(bytes, index(at)?, &string)?,
        }
        Some(cache)
    }

    fn parse_extensions(
        &mut self,
        bytes: &[u8],
        at: usize,
        string: &impl Fn(u32) -> Option<Vec<u8>>,
    ) -> Option<()> {
        let extensions = bytes.get(at..)?;
        if word(extensions, 0)? != EXTENSIONS {
            return None;
        }
        for nth in 0..index(word(extensions, 4)?)? {
            let section = extensions.get(nth.checked_mul(SECTION)?.checked_add(8)?..)?;
            let (start, size) = (index(word(section, 8)?)?, index(word(section, 12)?)?);
            let content = bytes.get(start..start.checked_add(size)?)?;
            match word(section, 0)? {
                TAG_GENERATOR => self.generator = content.to_vec(),
                TAG_HWCAPS => {
                    let names = content.chunks_exact(4).map(|name| string(word(name, 0)?));
                    self.hwcaps = names.collect::<Option<_>>()?;
                }
                // A section of a later glibc.
                _ => return None,
            }
        }
        Some(())
    }

    /// Whether it names no library.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Adds a library for x86-64 that programs ask for as `name`.
    pub fn add(&mut self, name: &[u8], path: &[u8]) -> Result<(), OtherOfThatName> {
        if let Some(entry) = self.entries.iter().find(|entry| entry.name == name) {
            let is_it = entry.path == path && entry.flags == X86_64;
            return if is_it { Ok(()) } else { Err(OtherOfThatName) };
        }
        // Entries are sorted from the greatest name to the least, as the loader searches.
        let place = self
            .entries
            .partition_point(|entry| compare(&entry.name, name) == Ordering::Greater);
        let entry = Entry {
            flags: X86_64,
            name: name.to_vec(),
            path: path.to_vec(),
            os_version: 0,
            hwcap: 0,
        };
        self.entries.insert(place, entry);
        Ok(())
    }

    /// The cache's bytes; `None` where it would be larger than its format allows.
    pub fn encode(&self) -> Option<Vec<u8>> {
        let strings_at = HEADER + self.entries.len() * ENTRY;
        let mut strings = Strings {
            at: strings_at,
            bytes: Vec::new(),
            places: HashMap::new(),
        };
        let mut out = MAGIC.to_vec();
        let mut entries = Vec::new();
        for entry in &self.entries {
            for word in [
                entry.flags,
                strings.place(&entry.name)?,
                strings.place(&entry.path)?,
                entry.os_version,
            ] {
                entries.extend(word.to_le_bytes());
            }
            entries.extend(entry.hwcap.to_le_bytes());
        }
        let mut hwcaps = Vec::new();
        for name in &self.hwcaps {
            hwcaps.extend(strings.place(name)?.to_le_bytes());
        }
        let end = strings_at + strings.bytes.len();
        let extensions_at = end.next_multiple_of(4);
        out.extend(u32::try_from(self.entries.len()).ok()?.to_le_bytes());
        out.extend(u32::try_from(strings.bytes.len()).ok()?.to_le_bytes());
        out.extend([LITTLE_ENDIAN, 0, 0, 0]);
        out.extend(u32::try_from(extensions_at).ok()?.to_le_bytes());
        out.resize(HEADER, 0);
        out.extend(entries);
        out.extend(strings.bytes);
        out.resize(extensions_at, 0);
        // The list of names first: it must be aligned.
        let sections = [(TAG_HWCAPS, &hwcaps), (TAG_GENERATOR, &self.generator)];
        let mut content_at = extensions_at + 8 + sections.len() * SECTION;
        out.extend(EXTENSIONS.to_le_bytes());
        out.extend(u32::try_from(sections.len()).ok()?.to_le_bytes());
        for (tag, content) in sections {
            let size = content.len();
            for word in [
                tag,
                0,
                u32::try_from(content_at).ok()?,
                u32::try_from(size).ok()?,
            ] {
                out.extend(word.to_le_bytes());
            }
            content_at += size;
        }
        for (_, content) in sections {
            out.extend(content);
        }
        Some(out)
    }
}

/// The strings of a cache that is written, each of them once.
struct Strings<'a> {
    /// Where they begin.
    at: usize,
    bytes: Vec<u8>,
    places: HashMap<&'a [u8], u32>,
}

impl<'a> Strings<'a> {
    fn place(&mut self, string: &'a [u8]) -> Option<u32> {
        if let Some(&place) = self.places.get(string) {
            return Some(place);
        }
        let place = u32::try_from(self.at + self.bytes.len()).ok()?;
        self.bytes.extend_from_slice(string);
        self.bytes.push(0);
        self.places.insert(string, place);
        Some(place)
    }
}

/// The loader's order of names (`_dl_cache_libcmp`): digits are compared as numbers, and come after all else.
fn compare(one: &[u8], two: &[u8]) -> Ordering {
    let (mut one, mut two) = (one, two);
    loop {
        match (one.first(), two.first()) {
            (None, None) => return Ordering::Equal,
            (None, Some(_)) => return Ordering::Less,
            (Some(_), None) => return Ordering::Greater,
            (Some(a), Some(b)) => match (a.is_ascii_digit(), b.is_ascii_digit()) {
                (true, true) => {
                    let (first, second) = (number(&mut one), number(&mut two));
                    if first != second {
                        return first.cmp(&second);
                    }
                }
                (true, false) => return Ordering::Greater,
                (false, true) => return Ordering::Less,
                (false, false) if a != b => return a.cmp(b),
                (false, false) => (one, two) = (&one[1..], &two[1..]),
            },
        }
    }
}

/// Takes a number from the front.
fn number(text: &mut &[u8]) -> u64 {
    let mut value = 0u64;
    while let [digit @ b'0'..=b'9', rest @ ..] = *text {
        value = value
            .saturating_mul(10)
            .saturating_add(u64::from(digit - b'0'));
        *text = rest;
    }
    value
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    let bytes = bytes.get(at..at.checked_add(4)?)?;
    Some(u32::from_le_bytes(bytes.try_into().ok()?))
}

fn index(word: u32) -> Option<usize> {
    usize::try_from(word).ok()
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::path::Path;
    use std::process::Command;

    use proptest::prelude::*;

    use super::*;

    const LDCONFIG: &str = "/sbin/ldconfig";

    fn ldconfig(root: &Path, args: &[&str]) -> String {
        let out = Command::new(LDCONFIG)
            .arg("-r")
            .arg(root)
            .args(args)
            .output()
            .unwrap();
        assert!(out.status.success(), "{out:?}");
        String::from_utf8(out.stdout).unwrap()
    }

    fn listed(root: &Path) -> Vec<String> {
        let text = ldconfig(root, &["-p", "-C", "/etc/ld.so.cache"]);
        text.lines()
            .filter(|line| line.contains("=>"))
            .map(str::to_owned)
            .collect()
    }

    /// A root with copies of this machine's libraries, without a cache.
    fn image() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let lib = dir.path().join("usr/lib/x86_64-linux-gnu");
        fs::create_dir_all(&lib).unwrap();
        fs::create_dir_all(dir.path().join("etc/ld.so.conf.d")).unwrap();
        fs::write(
            dir.path().join("etc/ld.so.conf"),
            "/usr/lib/x86_64-linux-gnu\n",
        )
        .unwrap();
        for name in [
            "libc.so.6",
            "libm.so.6",
            "libdl.so.2",
            "libz.so.1",
            "libgcc_s.so.1",
        ] {
            let from = Path::new("/lib/x86_64-linux-gnu").join(name);
            fs::copy(fs::canonicalize(from).unwrap(), lib.join(name)).unwrap();
        }
        dir
    }

    /// The same as `ldconfig` makes, with the driver's libraries there.
    #[test]
    fn what_is_added_is_what_ldconfig_would_have_added() {
        let dir = image();
        ldconfig(dir.path(), &["-X"]);
        let before = fs::read(dir.path().join("etc/ld.so.cache")).unwrap();
        // A library whose SONAME is its name, and the link for linkers.
        let lib = dir.path().join("usr/lib/x86_64-linux-gnu");
        for (from, name, link) in [
            ("libpthread.so.0", "libpthread.so.0", "libpthread.so"),
            ("librt.so.1", "librt.so.1", "librt.so"),
        ] {
            let from = Path::new("/lib/x86_64-linux-gnu").join(from);
            fs::copy(fs::canonicalize(from).unwrap(), lib.join(name)).unwrap();
            std::os::unix::fs::symlink(name, lib.join(link)).unwrap();
        }
        ldconfig(dir.path(), &["-X"]);
        let expected = listed(dir.path());
        assert!(
            expected.iter().any(|line| line.contains("librt.so (")),
            "{expected:?}"
        );

        let mut cache = LoaderCache::parse(&before).unwrap();
        for name in ["librt.so", "libpthread.so.0", "librt.so.1", "libpthread.so"] {
            let path = format!("/usr/lib/x86_64-linux-gnu/{name}");
            cache.add(name.as_bytes(), path.as_bytes()).unwrap();
        }
        fs::write(dir.path().join("etc/ld.so.cache"), cache.encode().unwrap()).unwrap();
        assert_eq!(listed(dir.path()), expected);
    }

    /// This reads this machine's own cache, whatever its glibc writes.
    #[test]
    fn a_real_cache_is_read_and_written_without_a_change() {
        let bytes = fs::read("/etc/ld.so.cache").unwrap();
        let cache = LoaderCache::parse(&bytes).unwrap();
        assert!(cache.entries.len() > 10 && !cache.generator.is_empty());
        let again = LoaderCache::parse(&cache.encode().unwrap()).unwrap();
        assert_eq!(again, cache);
        let is_sorted = cache
            .entries
            .is_sorted_by(|one, two| compare(&one.name, &two.name) != Ordering::Less);
        assert!(is_sorted, "in another order than the loader's");
    }

    #[test]
    fn another_library_of_the_name_is_left_to_ldconfig() {
        let mut cache = LoaderCache::default();
        assert_eq!(cache.add(b"libcuda.so.1", b"/a/libcuda.so.1"), Ok(()));
        assert_eq!(cache.add(b"libcuda.so.1", b"/a/libcuda.so.1"), Ok(()));
        assert_eq!(cache.entries.len(), 1);
        let other = cache.add(b"libcuda.so.1", b"/b/libcuda.so.1");
        assert_eq!(other, Err(OtherOfThatName));
    }

    /// Programs find the added library through it, and every other library in the loader's default folders.
    #[test]
    fn a_cache_of_only_the_added_libraries_suffices_for_the_loader() {
        let dir = image();
        let driver = dir.path().join("opt/driver");
        fs::create_dir_all(&driver).unwrap();
        fs::create_dir_all(dir.path().join("lib64")).unwrap();
        let host = Path::new("/lib/x86_64-linux-gnu");
        fs::copy(host.join("librt.so.1"), driver.join("librt.so.1")).unwrap();
        let loader = "lib64/ld-linux-x86-64.so.2";
        fs::copy(Path::new("/").join(loader), dir.path().join(loader)).unwrap();
        let mut cache = LoaderCache::default();
        assert!(cache.is_empty());
        cache.add(b"librt.so.1", b"/opt/driver/librt.so.1").unwrap();
        assert!(!cache.is_empty());
        fs::write(dir.path().join("etc/ld.so.cache"), cache.encode().unwrap()).unwrap();
        let out = Command::new("chroot")
            .arg(dir.path())
            .args([
                "/lib64/ld-linux-x86-64.so.2",
                "--preload",
                "librt.so.1 libz.so.1",
            ])
            .args(["--list", "/usr/lib/x86_64-linux-gnu/libgcc_s.so.1"])
            .output()
            .unwrap();
        let found = String::from_utf8_lossy(&out.stdout);
        assert!(out.status.success(), "{out:?}");
        for line in [
            "librt.so.1 => /opt/driver/librt.so.1",
            "libz.so.1 => /usr/lib/x86_64-linux-gnu/libz.so.1",
        ] {
            assert!(found.contains(line), "{found}");
        }
    }

    proptest! {
        /// An image's file is not trusted.
        #[test]
        fn any_content_is_read_or_not(at in 0usize..4096, with: [u8; 4], cut in 0usize..40_000) {
            let mut bytes = fs::read("/etc/ld.so.cache").unwrap();
            if let Some(place) = bytes.get_mut(at..at + 4) {
                place.copy_from_slice(&with);
            }
            bytes.truncate(cut);
            let _ = LoaderCache::parse(&bytes);
        }

        #[test]
        fn names_have_one_order(mut names in prop::collection::vec("lib[a-c0-9.]{0,6}", 0..12)) {
            names.sort_by(|one, two| compare(one.as_bytes(), two.as_bytes()));
            for pair in names.windows(2) {
                prop_assert!(compare(pair[0].as_bytes(), pair[1].as_bytes()) != Ordering::Greater);
            }
        }
    }
}
