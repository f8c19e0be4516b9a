//! `cover-libraries` as a runtime runs it: after the container's mounts, in its mount namespace,
//! with its state on stdin. The namespace is `unshare(1)`'s, which takes root.
#![allow(clippy::unwrap_used, reason = "a test that cannot be set up fails")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const SHIM: &str = "/usr/lib/tranche/libcuda.so.1";
const NVML_SHIM: &str = "/usr/lib/tranche/libnvidia-ml.so.1";
const REAL: &str = "/usr/lib/tranche/driver/libcuda.so.1";
const JIT: &str = "/usr/lib/x86_64-linux-gnu/libnvidia-ptxjitcompiler.so.535.261.03";

/// A bundle: `config.json`, `rootfs` and the node's files that are mounted in it.
struct Bundle(tempfile::TempDir);

impl Bundle {
    /// An image with these files; each file's content is its path.
    fn new(image: &[&str], env: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let bundle = Self(dir);
        for path in image {
            write(&bundle.in_image(path), path);
        }
        for path in [SHIM, NVML_SHIM, REAL, JIT] {
            write(
                &bundle.path("node").join(&path[1..]),
                &format!("node:{path}"),
            );
            write(&bundle.in_image(path), "a mount point");
        }
        let config = serde_json::json!({
            "ociVersion": "1.2.0", "root": {"path": "rootfs"}, "process": {"cwd": "/", "env": env},
        });
        std::fs::write(bundle.path("config.json"), config.to_string()).unwrap();
        let state = serde_json::json!({
            "ociVersion": "1.2.0", "id": "x", "status": "creating", "bundle": bundle.0.path(),
        });
        std::fs::write(bundle.path("state.json"), state.to_string()).unwrap();
        bundle
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn in_image(&self, path: &str) -> PathBuf {
        self.path("rootfs").join(path.trim_start_matches('/'))
    }

    /// Runs a script in a mount namespace with the container's mounts; `$hook` is the hook's command.
    fn run(&self, script: &str) -> Output {
        let mounts = "cd $bundle\n\
            for file in $files; do\n\
              mount --bind node$file rootfs$file && mount -o remount,bind,ro,nosuid,nodev rootfs$file\n\
            done\n";
        self.run_without_mounts(&format!("{mounts}{script}"))
    }

    fn run_without_mounts(&self, script: &str) -> Output {
        let hook = format!(
            "{} cover-libraries --shim libcuda.so::{SHIM} --shim libnvidia-ml.so::{NVML_SHIM} \
             --companion libnvidia-ptxjitcompiler.so::{JIT} --real-cuda {REAL} \
             --host-driver-version 535.261.03",
            env!("CARGO_BIN_EXE_tranche-cdi-hook")
        );
        Command::new("unshare")
            .args(["--mount", "--propagation", "private", "sh", "-euc", script])
            .env("bundle", self.0.path())
            .env("files", [SHIM, NVML_SHIM, REAL, JIT].join(" "))
            .env("hook", hook)
            .output()
            .unwrap()
    }

    /// What each path shows after the hook.
    fn shown(&self, paths: &[&str]) -> Vec<String> {
        let cats: Vec<String> = paths
            .iter()
            .map(|path| format!("cat rootfs{path}; echo"))
            .collect();
        let ran = self.run(&format!("$hook <state.json\n{}", cats.join("\n")));
        assert!(ran.status.success(), "{}", text(&ran.stderr));
        text(&ran.stdout)
            .lines()
            .filter(|line| !line.is_empty())
            .map(str::to_owned)
            .collect()
    }
}

fn write(path: &Path, content: &str) {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, content).unwrap();
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn node(path: &str) -> String {
    format!("node:{path}")
}

#[test]
fn every_copy_that_is_found_shows_the_shim() {
    let image = [
        "/usr/local/cuda/compat/libcuda.so.470.82.01",
        "/usr/local/cuda/lib64/stubs/libcuda.so",
        "/usr/local/cuda/lib64/stubs/libnvidia-ml.so",
        "/usr/lib/x86_64-linux-gnu/libcuda.so.470.82.01",
        "/opt/real.so",
        "/a/libcudart.so.12",
        "/other/libcuda.so.1",
    ];
    let bundle = Bundle::new(&image, &["LD_LIBRARY_PATH=/a"]);
    std::os::unix::fs::symlink("/opt/real.so", bundle.in_image("/a/libcuda.so")).unwrap();
    // A hard link of a covered file must be covered too.
    let linked = bundle.in_image("/a/libcuda.so.1");
    std::fs::hard_link(bundle.in_image(image[0]), linked).unwrap();
    assert_eq!(
        bundle.shown(&[
            "/usr/local/cuda/compat/libcuda.so.470.82.01",
            "/usr/local/cuda/lib64/stubs/libcuda.so",
            "/usr/lib/x86_64-linux-gnu/libcuda.so.470.82.01",
            "/opt/real.so",
            "/a/libcuda.so.1",
            "/usr/local/cuda/lib64/stubs/libnvidia-ml.so",
            // Not a library of the driver, or not in a searched folder.
            "/a/libcudart.so.12",
            "/other/libcuda.so.1",
            // Older than the node's.
            REAL,
        ]),
        [
            node(SHIM),
            node(SHIM),
            node(SHIM),
            node(SHIM),
            node(SHIM),
            node(NVML_SHIM),
            "/a/libcudart.so.12".to_owned(),
            "/other/libcuda.so.1".to_owned(),
            node(REAL),
        ]
    );
    // The mounts are in the container's mount namespace only.
    for path in image {
        assert_eq!(
            std::fs::read_to_string(bundle.in_image(path)).unwrap(),
            path
        );
    }
}

#[test]
fn a_covered_file_cannot_be_written() {
    let file = "/usr/local/cuda/compat/libcuda.so.1";
    let bundle = Bundle::new(&[file], &[]);
    let ran = bundle.run(&format!("$hook <state.json; echo x >rootfs{file}"));
    assert!(!ran.status.success());
    assert!(
        text(&ran.stderr).contains("Read-only"),
        "{}",
        text(&ran.stderr)
    );
}

#[test]
fn the_shim_loads_a_newer_libcuda_for_forward_compatibility() {
    let compat = "/usr/local/cuda/compat/libcuda.so.575.57.08";
    let jit = "/usr/local/cuda/compat/libnvidia-ptxjitcompiler.so.575.57.08";
    let bundle = Bundle::new(&[compat, jit], &[]);
    let conf = "/etc/ld.so.conf.d/00-compat-tranche.conf";
    assert_eq!(
        bundle.shown(&[compat, REAL, jit, conf]),
        [&node(SHIM), compat, jit, "/usr/local/cuda/compat"]
    );
}

#[test]
fn what_came_with_an_older_libcuda_is_covered_by_the_nodes() {
    let compat = "/usr/local/cuda/compat/libcuda.so.470.82.01";
    let jit = "/usr/local/cuda/compat/libnvidia-ptxjitcompiler.so.470.82.01";
    let elsewhere = "/usr/lib/libnvidia-ptxjitcompiler.so.470.82.01";
    let bundle = Bundle::new(&[compat, jit, elsewhere], &[]);
    assert_eq!(
        bundle.shown(&[REAL, jit, JIT, elsewhere]),
        [&node(REAL), &node(JIT), &node(JIT), elsewhere]
    );
    assert!(!bundle.in_image("/etc/ld.so.conf.d").exists());
}

#[test]
fn in_a_user_namespace_too() {
    let compat = "/usr/local/cuda/compat/libcuda.so.575.57.08";
    let bundle = Bundle::new(&[compat], &[]);
    let script = format!(
        "unshare --user --map-root-user --mount sh -euc '$hook <state.json; \
         cat rootfs{compat}; echo; cat rootfs{REAL}; echo; ! (echo x >rootfs{compat})'"
    );
    let ran = bundle.run(&script);
    assert!(ran.status.success(), "{}", text(&ran.stderr));
    let shown: Vec<_> = text(&ran.stdout)
        .lines()
        .filter(|line| !line.is_empty())
        .map(str::to_owned)
        .collect();
    assert_eq!(shown, [&node(SHIM), compat]);
}

/// The hook's error, with which the container does not start.
fn refusal(ran: &Output) -> String {
    assert!(!ran.status.success(), "{}", text(&ran.stdout));
    text(&ran.stderr)
}

#[test]
fn without_the_shims_mount_the_container_does_not_start() {
    let bundle = Bundle::new(&["/usr/local/cuda/compat/libcuda.so.1"], &[]);
    let refused = refusal(&bundle.run_without_mounts("$hook <$bundle/state.json"));
    assert!(
        refused.contains(SHIM) && refused.contains("not mounted read-only"),
        "{refused}"
    );
    // This fails even if nothing is to be covered, because the cap would not hold.
    let refused = refusal(&Bundle::new(&[], &[]).run_without_mounts("$hook <$bundle/state.json"));
    assert!(refused.contains(SHIM), "{refused}");
}

#[test]
fn a_library_on_a_volume_that_the_host_shares_fails_the_start() {
    let bundle = Bundle::new(&["/volume/libcuda.so.1"], &["LD_LIBRARY_PATH=/volume"]);
    let share = "mount --bind rootfs/volume rootfs/volume; mount --make-shared rootfs/volume";
    let refused = refusal(&bundle.run(&format!("{share}; $hook <state.json")));
    for words in ["/volume/libcuda.so.1", "Bidirectional", "LD_LIBRARY_PATH"] {
        assert!(refused.contains(words), "{words}: {refused}");
    }
}

#[test]
fn an_uncoverable_library_is_named_and_fails_the_start() {
    let file = "/usr/local/cuda/compat/libcuda.so.1";
    let bundle = Bundle::new(&[file], &[]);
    // Without CAP_SYS_ADMIN.
    let refused = refusal(
        &bundle.run("setpriv --bounding-set -sys_admin --inh-caps -sys_admin $hook <state.json"),
    );
    for words in [file, "cannot be covered", "no limit"] {
        assert!(refused.contains(words), "{words}: {refused}");
    }
}
