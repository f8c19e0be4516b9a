//! Finds libraries of an image in the folders that the dynamic loader searches.
//!
//! The search uses what is known before a container's first process runs: its environment, the
//! loader's configuration and default folders, and the folders in which images and packages have
//! parts of NVIDIA's driver. It does not walk the whole image. It does not find libraries through an
//! RPATH, in a folder that only a program knows, or that are copied later.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};

use crate::rootfs::{FoundFile, Rootfs, RootfsError};

/// The first process of a container.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Process {
    pub cwd: PathBuf,
    /// `NAME=value`.
    pub env: Vec<String>,
}

/// A library in the root.
#[derive(Debug)]
pub struct Library {
    /// The prefix of its name that was searched: `libcuda.so`.
    pub stem: String,
    pub file: FoundFile,
}

/// Why the search has no result.
#[derive(Debug, thiserror::Error)]
pub enum SearchError {
    /// A step in the root.
    #[error(transparent)]
    Rootfs(#[from] RootfsError),
    /// There are more than the limit.
    #[error(
        "{folder}: more than {limit} {what} to search for copies of NVIDIA's libraries: remove \
         folders from LD_LIBRARY_PATH or /etc/ld.so.conf"
    )]
    TooMany {
        /// The folder at which the search stopped.
        folder: PathBuf,
        /// What there are too many of.
        what: &'static str,
        limit: usize,
    },
}

/// The most folders that are searched, and configuration files that are read.
const MOST_FOLDERS: usize = 4096;
/// The most names that are read, in all folders together.
const MOST_NAMES: usize = 1_000_000;

/// The folders that the loaders of distributions search without any configuration.
const DEFAULT: [&str; 16] = [
    "/lib",
    "/lib32",
    "/lib64",
    "/lib/x86_64-linux-gnu",
    "/lib/aarch64-linux-gnu",
    "/lib/i386-linux-gnu",
    "/usr/lib",
    "/usr/lib32",
    "/usr/lib64",
    "/usr/lib/x86_64-linux-gnu",
    "/usr/lib/aarch64-linux-gnu",
    "/usr/lib/i386-linux-gnu",
    "/usr/local/lib",
    "/usr/local/lib64",
    "/usr/local/lib/x86_64-linux-gnu",
    "/usr/local/lib/aarch64-linux-gnu",
];

/// Folders of images and packages with parts of NVIDIA's driver: Debian's alternatives, the folder
/// that Kubernetes device plugins mount, conda's `cuda-compat`.
const DRIVER_FOLDERS: [&str; 7] = [
    "/usr/lib/x86_64-linux-gnu/nvidia/current",
    "/usr/lib/aarch64-linux-gnu/nvidia/current",
    "/usr/local/nvidia/lib",
    "/usr/local/nvidia/lib64",
    "/opt/conda/lib",
    "/opt/conda/lib/stubs",
    "/opt/conda/cuda-compat",
];

/// Folders of a CUDA toolkit. `*` is any one folder.
const TOOLKIT: [&str; 8] = [
    "compat",
    "compat/*",
    "lib",
    "lib/stubs",
    "lib64",
    "lib64/stubs",
    "targets/*/lib",
    "targets/*/lib/stubs",
];

/// Variables that name the folder of a CUDA toolkit or a conda environment.
const TOOLKIT_VARIABLES: [&str; 3] = ["CUDA_HOME", "CUDA_PATH", "CUDA_ROOT"];

const CONFIGURATION: &str = "/etc/ld.so.conf";

/// The folders in which a container's programs may find a library without naming it by path: those that exist, each
/// once and without links, because a folder of an image may have thousands of names.
pub fn folders(root: &Rootfs, process: &Process) -> Result<Vec<PathBuf>, SearchError> {
    let mut folders: Vec<PathBuf> = Vec::new();
    for folder in process.library_path() {
        folders.extend(with_library_token(&folder));
    }
    folders.extend(configured(root)?);
    folders.extend(DEFAULT.iter().chain(&DRIVER_FOLDERS).map(PathBuf::from));
    let mut toolkits = expand(root, Path::new("/usr/local/cuda*"))?;
    toolkits.extend(expand(root, Path::new("/opt/cuda*"))?);
    for variable in TOOLKIT_VARIABLES {
        toolkits.extend(
            process
                .variable(variable)
                .map(|value| process.absolute(value)),
        );
    }
    for toolkit in toolkits {
        for inside in TOOLKIT {
            folders.extend(expand(root, &toolkit.join(inside))?);
        }
    }
    if let Some(prefix) = process.variable("CONDA_PREFIX") {
        let prefix = process.absolute(prefix);
        folders.extend(["lib", "lib/stubs", "cuda-compat"].map(|inside| prefix.join(inside)));
    }
    let mut all = Vec::new();
    let (mut named, mut real) = (BTreeSet::new(), BTreeSet::new());
    for folder in folders {
        if !named.insert(folder.clone()) {
            continue;
        }
        if named.len().max(all.len()) > MOST_FOLDERS {
            return Err(SearchError::TooMany {
                folder,
                what: "folders",
                limit: MOST_FOLDERS,
            });
        }
        let Some(folder) = root.real_folder(&folder)? else {
            continue;
        };
        if real.insert(folder.clone()) {
            // glibc prefers libraries for the processor that it runs on.
            all.extend(expand(root, &folder.join("glibc-hwcaps/*"))?);
            all.push(folder);
        }
    }
    Ok(all)
}

/// The libraries in `folders` whose names begin with one of `stems`, each file once.
pub fn find(
    root: &Rootfs,
    folders: &[PathBuf],
    stems: &[&str],
) -> Result<Vec<Library>, SearchError> {
    let mut found = BTreeMap::new();
    let mut looked_at = 0;
    for folder in folders {
        let mut names = Vec::new();
        root.each_name(folder, |name| {
            looked_at += 1;
            if let Some(stem) = stems.iter().find(|stem| is_library(name, stem)) {
                names.push((name.to_owned(), *stem));
            }
        })?;
        if looked_at > MOST_NAMES {
            return Err(SearchError::TooMany {
                folder: folder.clone(),
                what: "files",
                limit: MOST_NAMES,
            });
        }
        for (name, stem) in names {
            if let Some(file) = root.find(&folder.join(&name))? {
                found.entry(file.path.clone()).or_insert_with(|| Library {
                    stem: stem.to_owned(),
                    file,
                });
            }
        }
    }
    Ok(found.into_values().collect())
}

/// Whether a file's name is the stem, or the stem and a version.
fn is_library(name: &OsStr, stem: &str) -> bool {
    let rest = name.as_encoded_bytes().strip_prefix(stem.as_bytes());
    rest.is_some_and(|rest| rest.is_empty() || rest[0] == b'.')
}

impl Process {
    fn variable(&self, name: &str) -> Option<&str> {
        // Most C libraries return the last one; runtimes write only one.
        self.env.iter().rev().find_map(|pair| {
            let (key, value) = pair.split_once('=')?;
            (key == name && !value.is_empty()).then_some(value)
        })
    }

    fn absolute(&self, path: &str) -> PathBuf {
        Path::new("/").join(&self.cwd).join(path)
    }

    /// The folders of `LD_LIBRARY_PATH`, and those of the libraries that `LD_PRELOAD` names by path
    /// (ld.so(8)). An empty entry is the working folder.
    fn library_path(&self) -> Vec<PathBuf> {
        let path = self.variable("LD_LIBRARY_PATH").unwrap_or_default();
        let mut folders: Vec<PathBuf> = path
            .split([':', ';'])
            .filter(|_| !path.is_empty())
            .map(|entry| self.absolute(entry))
            .collect();
        let preloaded = self.variable("LD_PRELOAD").unwrap_or_default();
        folders.extend(
            preloaded
                .split([':', ' '])
                .filter(|library| library.contains('/'))
                .filter_map(|library| self.absolute(library).parent().map(Path::to_owned)),
        );
        folders
    }
}

/// The folder with the values that the loader may use for `$LIB`; none with a token that only the
/// loader knows (`$ORIGIN`, `$PLATFORM`).
fn with_library_token(folder: &Path) -> Vec<PathBuf> {
    let text = folder.to_string_lossy();
    if !text.contains('$') {
        return vec![folder.to_owned()];
    }
    [
        "lib64",
        "lib/x86_64-linux-gnu",
        "lib/aarch64-linux-gnu",
        "lib",
    ]
    .iter()
    .map(|lib| text.replace("${LIB}", lib).replace("$LIB", lib))
    .filter(|text| !text.contains('$'))
    .map(PathBuf::from)
    .collect()
}

/// The folders of the loader's configuration, with all that it includes.
fn configured(root: &Rootfs) -> Result<Vec<PathBuf>, SearchError> {
    let mut folders = Vec::new();
    let mut files = vec![PathBuf::from(CONFIGURATION)];
    let mut next = 0;
    while let Some(file) = files.get(next).cloned() {
        next += 1;
        let text = root.read(&file)?.unwrap_or_default();
        for line in String::from_utf8_lossy(&text).lines() {
            let line = line.split('#').next().unwrap_or_default();
            let mut words = line.split_whitespace();
            match words.next() {
                None | Some("hwcap") => {}
                Some("include") => {
                    let folder = file.parent().unwrap_or(Path::new("/"));
                    for pattern in words {
                        for included in expand(root, &folder.join(pattern))? {
                            if !files.contains(&included) {
                                files.push(included);
                            }
                        }
                    }
                }
                Some(_) => {
                    // Folders may be separated by colons and commas too (glibc's ldconfig.c), and
                    // may be followed by `=TYPE`.
                    let names = line
                        .split([':', ',', ' ', '\t'])
                        .map(|name| name.split('=').next().unwrap_or_default())
                        .filter(|name| name.starts_with('/'));
                    folders.extend(names.map(PathBuf::from));
                }
            }
            if folders.len() + files.len() > MOST_FOLDERS {
                return Err(SearchError::TooMany {
                    folder: file,
                    what: "folders",
                    limit: MOST_FOLDERS,
                });
            }
        }
    }
    Ok(folders)
}

/// The paths that match a pattern with `*` and `?` as in a shell. A path without these is returned
/// itself, whether it exists or not.
fn expand(root: &Rootfs, pattern: &Path) -> Result<Vec<PathBuf>, SearchError> {
    let mut paths = vec![PathBuf::new()];
    for component in pattern {
        let bytes = component.as_encoded_bytes();
        if !bytes.iter().any(|byte| b"*?".contains(byte)) {
            for path in &mut paths {
                path.push(component);
            }
            continue;
        }
        let mut longer = Vec::new();
        for path in paths {
            let names: Vec<OsString> = root.list(&path)?;
            let matching = names
                .iter()
                .filter(|name| matches(bytes, name.as_encoded_bytes()));
            longer.extend(matching.map(|name| path.join(name)));
            if longer.len() > MOST_FOLDERS {
                return Err(SearchError::TooMany {
                    folder: pattern.to_owned(),
                    what: "folders",
                    limit: MOST_FOLDERS,
                });
            }
        }
        paths = longer;
    }
    Ok(paths)
}

/// Takes at most as many steps as the product of both lengths, without recursion, because the pattern
/// comes from an image.
fn matches(pattern: &[u8], name: &[u8]) -> bool {
    let (mut p, mut n) = (0, 0);
    // The last star, and the least part of the name that it matches.
    let mut star = None;
    while n < name.len() {
        match pattern.get(p) {
            Some(b'*') => {
                star = Some((p, n));
                p += 1;
            }
            Some(byte) if *byte == b'?' || *byte == name[n] => {
                p += 1;
                n += 1;
            }
            _ => match star {
                Some((at, taken)) => {
                    star = Some((at, taken + 1));
                    p = at + 1;
                    n = taken + 1;
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|byte| *byte == b'*')
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// A root with files, and links `path -> target`.
    fn image(list: &[&str]) -> (tempfile::TempDir, Rootfs) {
        let dir = tempfile::tempdir().unwrap();
        for line in list {
            let (path, target) = line
                .split_once(" -> ")
                .map_or((*line, None), |(p, t)| (p, Some(t)));
            let path = dir.path().join(path.trim_start_matches('/'));
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            match target {
                Some(target) => symlink(target, path).unwrap(),
                None => std::fs::write(path, line).unwrap(),
            }
        }
        let root = Rootfs::open(dir.path()).unwrap();
        (dir, root)
    }

    fn process(env: &[&str]) -> Process {
        Process {
            cwd: "/work".into(),
            env: env.iter().map(ToString::to_string).collect(),
        }
    }

    fn found(root: &Rootfs, env: &[&str]) -> Vec<String> {
        let folders = folders(root, &process(env)).unwrap();
        find(root, &folders, &["libcuda.so", "libnvidia-ml.so"])
            .unwrap()
            .iter()
            .map(|library| library.file.path.to_str().unwrap().to_owned())
            .collect()
    }

    #[test]
    fn what_images_bring_is_found_once_each() {
        let (_dir, root) = image(&[
            "/usr/local/cuda-12.9/compat/libcuda.so.575.57.08",
            "/usr/local/cuda-12.9/compat/libcuda.so.1 -> libcuda.so.575.57.08",
            "/usr/local/cuda-12.9/compat/libcuda.so -> libcuda.so.1",
            "/usr/local/cuda-12.9/compat/libnvidia-ptxjitcompiler.so.575.57.08",
            "/usr/local/cuda -> cuda-12.9",
            "/usr/local/cuda-12.9/lib64 -> targets/x86_64-linux/lib",
            "/usr/local/cuda-12.9/targets/x86_64-linux/lib/stubs/libcuda.so",
            "/usr/local/cuda-12.9/targets/x86_64-linux/lib/stubs/libnvidia-ml.so",
            "/usr/local/cuda-12.9/targets/x86_64-linux/lib/libcudart.so.12",
            "/usr/local/cuda-11/compat/lib.real/libcuda.so.470.82.01",
            "/usr/lib/x86_64-linux-gnu/libcuda.so.1",
            "/lib -> usr/lib",
            "/usr/local/nvidia/lib64/libnvidia-ml.so.1",
        ]);
        assert_eq!(
            found(&root, &[]),
            [
                "/usr/lib/x86_64-linux-gnu/libcuda.so.1",
                "/usr/local/cuda-11/compat/lib.real/libcuda.so.470.82.01",
                "/usr/local/cuda-12.9/compat/libcuda.so.575.57.08",
                "/usr/local/cuda-12.9/targets/x86_64-linux/lib/stubs/libcuda.so",
                "/usr/local/cuda-12.9/targets/x86_64-linux/lib/stubs/libnvidia-ml.so",
                "/usr/local/nvidia/lib64/libnvidia-ml.so.1",
            ]
        );
    }

    #[test]
    fn a_folder_is_searched_once_and_an_absent_one_not_at_all() {
        let (_dir, root) = image(&[
            "/usr/lib/x86_64-linux-gnu/libc.so.6",
            "/usr/lib/glibc-hwcaps/x86-64-v3/libm.so.6",
            "/lib -> usr/lib",
            "/usr/lib64 -> lib",
            "/lib64 -> usr/lib64",
            "/usr/local/cuda-12/targets/x86_64-linux/lib/libcudart.so.12",
            "/usr/local/cuda-12/lib64 -> targets/x86_64-linux/lib",
            "/usr/local/cuda -> cuda-12",
            "/etc/ld.so.conf",
        ]);
        let folders = folders(&root, &process(&["LD_LIBRARY_PATH=/lib/../lib:/nowhere"])).unwrap();
        let expected = [
            "/usr/lib/glibc-hwcaps/x86-64-v3",
            "/usr/lib",
            "/usr/lib/x86_64-linux-gnu",
            "/usr/local/cuda-12/targets/x86_64-linux/lib",
        ];
        assert_eq!(folders, expected.map(PathBuf::from));
    }

    #[test]
    fn the_environments_folders_are_searched() {
        let (_dir, root) = image(&[
            "/a/libcuda.so",
            "/work/b/libcuda.so.1",
            "/work/libnvidia-ml.so.1",
            "/c/glibc-hwcaps/x86-64-v3/libcuda.so.1",
            "/d/lib64/libcuda.so.1",
            "/home/cuda/compat/libcuda.so.1",
            "/env/cuda-compat/libcuda.so.1",
            "/libcuda.so.1",
            "/p/libcuda.so.5",
            "/p/libcuda.so.5.orig",
            "/unnamed/libcuda.so",
        ]);
        let found = found(
            &root,
            &[
                "LD_LIBRARY_PATH=/nowhere",
                "LD_LIBRARY_PATH=/a:b;:/c:/d/$LIB:/e/$ORIGIN:/",
                "LD_PRELOAD=libx.so /p/libcuda.so.5",
                "CUDA_HOME=/home/cuda",
                "CONDA_PREFIX=/env",
            ],
        );
        assert_eq!(
            found,
            [
                "/a/libcuda.so",
                "/c/glibc-hwcaps/x86-64-v3/libcuda.so.1",
                "/d/lib64/libcuda.so.1",
                "/env/cuda-compat/libcuda.so.1",
                "/home/cuda/compat/libcuda.so.1",
                "/libcuda.so.1",
                "/p/libcuda.so.5",
                "/p/libcuda.so.5.orig",
                "/work/b/libcuda.so.1",
                "/work/libnvidia-ml.so.1",
            ]
        );
    }

    #[test]
    fn the_loaders_configuration_is_searched_with_what_it_includes() {
        let (dir, root) = image(&[
            "/a/libcuda.so.1",
            "/b/libcuda.so.1",
            "/c/libcuda.so.1",
            "/d/libcuda.so.1",
        ]);
        let write = |path: &str, text: &str| {
            let path = dir.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        };
        write(
            "etc/ld.so.conf",
            "include ld.so.conf.d/*.conf /etc/more\n/a # not /z\nhwcap 0 nosegneg\n",
        );
        write("etc/ld.so.conf.d/x.conf", "/b=libc6\n");
        write("etc/ld.so.conf.d/y.not", "/nowhere\n");
        // It includes itself, as a faulty image may.
        write("etc/more", "include /etc/more\n/c:/d\n");
        assert_eq!(
            found(&root, &[]),
            ["/a", "/b", "/c", "/d"].map(|folder| format!("{folder}/libcuda.so.1"))
        );
    }

    #[test]
    fn links_that_lead_out_of_the_root_or_nowhere_find_nothing() {
        let host = tempfile::tempdir().unwrap();
        std::fs::write(host.path().join("libcuda.so.1"), "the host's").unwrap();
        let (dir, root) = image(&["/a/libcuda.so -> gone", "/usr/local/cuda -> cuda"]);
        symlink(host.path(), dir.path().join("b")).unwrap();
        std::fs::create_dir(dir.path().join("a/libcuda.so.1")).unwrap();
        let env = ["LD_LIBRARY_PATH=/a:/b:/../../../b"];
        assert_eq!(found(&root, &env), Vec::<String>::new());
    }

    #[test]
    fn the_search_is_bounded() {
        let (_dir, root) = image(&[]);
        let path: Vec<_> = (0..=MOST_FOLDERS).map(|n| format!("/{n}")).collect();
        let env = format!("LD_LIBRARY_PATH={}", path.join(":"));
        let error = folders(&root, &process(&[&env])).unwrap_err().to_string();
        assert!(error.contains("LD_LIBRARY_PATH"), "{error}");
    }

    #[test]
    fn a_pattern_of_an_image_takes_neither_time_nor_stack() {
        let name = [b'a'; 255];
        let pattern = [&b"*a".repeat(200)[..], b"b"].concat();
        assert!(!matches(&pattern, &name));
        assert!(matches(&b"*".repeat(1 << 20), &name));
        let (dir, root) = image(&[]);
        for n in 0..=MOST_FOLDERS {
            std::fs::File::create(dir.path().join(n.to_string())).unwrap();
        }
        let error = expand(&root, Path::new("/*")).unwrap_err().to_string();
        assert!(error.contains("/*: more than"), "{error}");
    }

    #[test]
    fn patterns_match_as_in_a_shell() {
        for (pattern, name, matched) in [
            ("*", "x", true),
            ("*.conf", "a.conf", true),
            ("*.conf", "a.conf.bak", false),
            ("a?c*", "abc", true),
            ("a?c", "ac", false),
            ("a*b*c", "a-b-b-c", true),
            ("a*b*c", "a-c-b", false),
            ("", "", true),
            ("", "a", false),
        ] {
            assert_eq!(
                matches(pattern.as_bytes(), name.as_bytes()),
                matched,
                "{pattern} {name}"
            );
        }
    }
}
