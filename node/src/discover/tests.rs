//! Drivers as they are installed, laid out as files.

use std::os::unix::fs::symlink;
use std::os::unix::net::UnixListener;

use tranche_driver::cdi::{NodePaths, Shim, driver_spec};

use super::*;
use crate::testing::{DEBIAN_535, lay_out};

fn found_in(list: &str) -> (tempfile::TempDir, Found) {
    let dir = tempfile::tempdir().unwrap();
    lay_out(dir.path(), list);
    let found = discover(&DriverRoot::open(dir.path()).unwrap(), "535.261.03").unwrap();
    (dir, found)
}

#[test]
fn debian_535_is_found_completely() {
    let (_dir, found) = found_in(DEBIAN_535);
    // Every versioned library of the packages, each once, at its real path.
    let listed: BTreeSet<PathBuf> = DEBIAN_535
        .lines()
        .filter(|l| {
            !l.contains(" -> ") && (l.ends_with(".so.535.261.03") || l.contains("egl-gbm.so"))
        })
        .map(PathBuf::from)
        .collect();
    assert_eq!(found.libraries, listed);
    assert_eq!(found.libraries.len(), 20);

    let folder = Path::new("/usr/lib/x86_64-linux-gnu/nvidia/current");
    let link = |name: &str| found.links.get(&folder.join(name)).map(String::as_str);
    assert_eq!(link("libcuda.so.1"), Some("libcuda.so.535.261.03"));
    assert_eq!(link("libcuda.so"), Some("libcuda.so.1"));
    assert_eq!(
        link("libnvidia-ml.so.1"),
        Some("libnvidia-ml.so.535.261.03")
    );
    assert_eq!(link("libGLX_indirect.so.0"), Some("libGLX_nvidia.so.0"));
    assert_eq!(
        link("nvidia-drm_gbm.so"),
        Some("libnvidia-allocator.so.535.261.03")
    );
    assert!(
        found.links.values().all(|target| !target.contains('/')),
        "no link leads to /etc/alternatives, which a container lacks: {:?}",
        found.links
    );

    assert_eq!(
        found.programs.get(Path::new("/usr/bin/nvidia-smi")),
        Some(&"/usr/lib/nvidia/current/nvidia-smi".into())
    );
    assert_eq!(
        found.programs.keys().collect::<Vec<_>>(),
        [
            Path::new("/usr/bin/nvidia-cuda-mps-control"),
            Path::new("/usr/bin/nvidia-persistenced"),
            Path::new("/usr/bin/nvidia-smi"),
            Path::new("/usr/sbin/nvidia-cuda-mps-server"),
        ]
    );
    assert_eq!(
        found.firmware.iter().collect::<Vec<_>>(),
        [
            Path::new("/lib/firmware/nvidia/535.261.03/gsp_ga10x.bin"),
            Path::new("/lib/firmware/nvidia/535.261.03/gsp_tu10x.bin"),
        ]
    );
    assert!(found.sockets.is_empty());
}

#[test]
fn a_debian_535_spec_names_host_files_and_container_links() {
    let (_dir, found) = found_in(DEBIAN_535);
    let files = found.driver_files(Path::new("/run/nvidia/driver"), &[]);
    let cuda = files
        .libraries
        .iter()
        .find(|l| l.soname == "libcuda.so.1")
        .unwrap();
    let folder = "/usr/lib/x86_64-linux-gnu/nvidia/current";
    assert_eq!(
        cuda.file.host_path,
        format!("/run/nvidia/driver{folder}/libcuda.so.535.261.03")
    );
    assert_eq!(
        cuda.file.container_path,
        format!("{folder}/libcuda.so.535.261.03")
    );
    let links: Vec<_> = cuda.links.iter().map(|l| (&*l.target, &*l.path)).collect();
    assert_eq!(
        links,
        [
            ("libcuda.so.535.261.03", &*format!("{folder}/libcuda.so.1")),
            ("libcuda.so.1", &*format!("{folder}/libcuda.so")),
        ]
    );
    let sonames: Vec<_> = files.libraries.iter().map(|l| &*l.soname).collect();
    assert!(sonames.contains(&"libnvidia-nvvm.so.4"), "{sonames:?}");
    assert!(
        sonames.contains(&"libnvidia-eglcore.so.535.261.03"),
        "{sonames:?}"
    );
    assert!(sonames.contains(&"libnvidia-allocator.so.1"), "{sonames:?}");
    let smi = files
        .binaries
        .iter()
        .find(|b| b.container_path == "/usr/bin/nvidia-smi")
        .unwrap();
    assert_eq!(
        smi.host_path,
        "/run/nvidia/driver/usr/lib/nvidia/current/nvidia-smi"
    );
}

#[test]
fn sockets_are_found_and_files_of_their_name_are_not() {
    let dir = tempfile::tempdir().unwrap();
    lay_out(dir.path(), DEBIAN_535);
    for folder in ["run/nvidia-persistenced", "run/nvidia-fabricmanager"] {
        std::fs::create_dir_all(dir.path().join(folder)).unwrap();
    }
    std::fs::create_dir_all(dir.path().join("var")).unwrap();
    symlink("/run", dir.path().join("var/run")).unwrap();
    let _socket = UnixListener::bind(dir.path().join("run/nvidia-persistenced/socket")).unwrap();
    std::fs::write(dir.path().join("run/nvidia-fabricmanager/socket"), "").unwrap();
    let found = discover(&DriverRoot::open(dir.path()).unwrap(), "535.261.03").unwrap();
    assert_eq!(
        found.sockets.iter().collect::<Vec<_>>(),
        [Path::new("/run/nvidia-persistenced/socket")]
    );
}

#[test]
fn a_driver_whose_cuda_library_is_of_another_version_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    lay_out(dir.path(), DEBIAN_535);
    let error = discover(&DriverRoot::open(dir.path()).unwrap(), "550.54.15")
        .unwrap_err()
        .to_string();
    assert!(error.contains("libcuda.so.550.54.15"), "{error}");
}

#[test]
fn libraries_without_links_still_get_the_expected_links() {
    let (_dir, found) = found_in(
        "/usr/lib64/libcuda.so.535.261.03\n/usr/lib64/libnvidia-ml.so.535.261.03\n\
         /usr/lib64/libnvidia-nvvm70.so.4\n/usr/lib64/libother.so.1.2\n/lib64 -> usr/lib64",
    );
    assert_eq!(found.libraries.len(), 3);
    assert_eq!(
        found
            .links
            .get(Path::new("/usr/lib64/libcuda.so"))
            .map(String::as_str),
        Some("libcuda.so.1")
    );
}

/// How the driver of a system is found and its paths in containers: root, test data, libcuda and nvidia-smi in the
/// root, nvidia-smi in a container.
const LAYOUTS: [(&str, &str, &str, &str, &str); 6] = [
    (
        "/",
        DEBIAN_535,
        "/usr/lib/x86_64-linux-gnu/nvidia/current/libcuda.so.535.261.03",
        "/usr/lib/nvidia/current/nvidia-smi",
        "/usr/bin/nvidia-smi",
    ),
    (
        "/run/nvidia/driver",
        DEBIAN_535,
        "/usr/lib/x86_64-linux-gnu/nvidia/current/libcuda.so.535.261.03",
        "/usr/lib/nvidia/current/nvidia-smi",
        "/usr/bin/nvidia-smi",
    ),
    (
        "/home/kubernetes/bin/nvidia",
        include_str!("../../testdata/gke-cos.list"),
        "/lib64/libcuda.so.535.261.03",
        "/bin/nvidia-smi",
        "/bin/nvidia-smi",
    ),
    (
        "/usr/local/nvidia",
        include_str!("../../testdata/usr-local-nvidia.list"),
        "/lib64/libcuda.so.535.261.03",
        "/bin/nvidia-smi",
        "/bin/nvidia-smi",
    ),
    (
        "/",
        include_str!("../../testdata/nixos.list"),
        "/nix/store/aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa-nvidia-x11-535.261.03-6.6.52/lib/libcuda.so.535.261.03",
        "/nix/store/bbbbbbbbbbbbbbbbbbbbbbbbbbbbbbbb-nvidia-x11-535.261.03-6.6.52-bin/bin/nvidia-smi",
        "/usr/bin/nvidia-smi",
    ),
    (
        "/",
        include_str!("../../testdata/bottlerocket.list"),
        "/x86_64-bottlerocket-linux-gnu/sys-root/usr/lib/nvidia/tesla/libcuda.so.535.261.03",
        "/x86_64-bottlerocket-linux-gnu/sys-root/usr/libexec/nvidia/tesla/bin/nvidia-smi",
        "/usr/bin/nvidia-smi",
    ),
];

/// Every layout is found with its root given, and containers find `libcuda.so.1` in it: the folder of each library is
/// in the loader configuration of the container, and the SONAME is a link to the file that is mounted.
#[test]
fn every_known_layout_is_found_and_its_containers_find_libcuda() {
    for (root_on_host, list, libcuda, smi, smi_in_container) in LAYOUTS {
        let host = tempfile::tempdir().unwrap();
        let at = host.path().join(root_on_host.trim_start_matches('/'));
        lay_out(&at, list);
        let host_root = DriverRoot::open(host.path()).unwrap();
        let root = DriverRoot::of_host(&host_root, Path::new(root_on_host))
            .unwrap()
            .unwrap();
        let found = discover(&root, "535.261.03").unwrap();
        let files = found.driver_files(root.on_host(), &[]);

        let cuda = files
            .libraries
            .iter()
            .find(|l| l.soname == "libcuda.so.1")
            .unwrap();
        let on_host = |path: &str| format!("{}{path}", root_on_host.trim_end_matches('/'));
        assert_eq!(cuda.file.host_path, on_host(libcuda), "{root_on_host}");
        assert_eq!(cuda.file.container_path, libcuda);
        let folder = Path::new(libcuda).parent().unwrap();
        let soname = folder.join("libcuda.so.1");
        let link = cuda.links.iter().find(|l| Path::new(&l.path) == soname);
        assert_eq!(link.unwrap().target, "libcuda.so.535.261.03");
        let smi_file = files
            .binaries
            .iter()
            .find(|b| b.container_path == smi_in_container);
        assert_eq!(smi_file.unwrap().host_path, on_host(smi), "{root_on_host}");

        let shim = Shim {
            pages: 1,
            folder: "/var/lib/kubelet/plugins/gpu.tranche.dev/lib/1".into(),
        };
        let paths = NodePaths {
            metadata: None,
            mps: "/run/tranche/mps".into(),
            load: "/run/tranche/load".into(),
            shares: "/run/tranche/shares".into(),
            hooks: "/var/lib/tranche".into(),
            dev_root: "/".into(),
        };
        let spec = driver_spec(&files, &paths, &[shim]).unwrap();
        let devices = spec.devices().iter();
        let whole: Vec<_> = devices
            .filter(|device| ["full", "capped"].contains(&&*device.name))
            .collect();
        assert_eq!(whole.len(), 2);
        for device in whole {
            let hooks = &device.container_edits.hooks;
            let cache = hooks
                .iter()
                .find(|h| h.args.contains(&"update-ldcache".into()));
            let args = &cache.unwrap().args;
            for library in &files.libraries {
                let folder = Path::new(&library.file.container_path)
                    .parent()
                    .unwrap()
                    .to_string_lossy()
                    .into_owned();
                let is_passed = args
                    .windows(2)
                    .any(|a| a[0] == "--folder" && a[1] == folder);
                assert!(
                    is_passed,
                    "{folder} is not among the loader\'s folders: {args:?}"
                );
            }
        }
    }
}

#[test]
fn libraries_of_32_bits_are_left_out() {
    let dir = tempfile::tempdir().unwrap();
    lay_out(
        dir.path(),
        include_str!("../../testdata/fedora-multilib.list"),
    );
    let of_32_bits = dir.path().join("usr/lib/libcuda.so.535.261.03");
    let mut file = std::fs::read(&of_32_bits).unwrap();
    // EI_CLASS: ELFCLASS32.
    file[4] = 1;
    std::fs::write(&of_32_bits, file).unwrap();
    let found = discover(&DriverRoot::open(dir.path()).unwrap(), "535.261.03").unwrap();
    assert_eq!(
        found.libraries.iter().collect::<Vec<_>>(),
        [
            Path::new("/usr/lib64/libcuda.so.535.261.03"),
            Path::new("/usr/lib64/libnvidia-ml.so.535.261.03"),
        ]
    );
}
